"""The table `messages` from commit-log files: which ranges to read, and what comes of one.

Free of Spark.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from operator import itemgetter

import pyarrow as pa

from batonmq.protocol.records.codec import scan_record
from batonmq.protocol.records.faults import CorruptRecord, RecordFault
from batonmq.protocol.records.search import is_record
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.log_range import Block, LogRange, RangeReader
from batonmq.spark.read.message_columns import message_batch
from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.selection import HIGH, LOW
from batonmq.spark.read.storage import Storage, even_parts
from batonmq.spark.read.store_facts import StoreError, StoreFacts, StoreFile, segments


def plan_ranges(
    storage: Storage, facts: StoreFacts, options: ReadOptions
) -> list[LogRange | Damage]:
    """The ranges of one store that may hold wanted messages. Raises StoreError, OSError.

    What lies in no file, between two files or below the confirmed end, is damage. A log that begins
    late is whole: its first files have expired.
    """
    files = segments(storage, f"{facts.path}/commitlog")
    confirmed = _confirmed(storage, facts, options, files)
    ranges: list[tuple[int, LogRange | Damage]] = []
    chosen = _of_time(storage, files, options)
    is_last = chosen[-1:] == files[-1:]
    for path, begin, end in _gaps(facts.path, chosen, confirmed if is_last else 0):
        size = (end if options.unconfirmed else min(end, confirmed)) - begin
        if size > 0:
            lacking = Damage(path, begin, size, "no file of the log holds this part")
            ranges.append((begin, lacking))
    for file in chosen:
        limit = file.end if options.unconfirmed else min(file.end, confirmed)
        if file.start >= limit:
            continue
        followed = options.unconfirmed and any(
            _begins_with_record(storage, each, options.record_bytes_max)
            for each in files
            if each.start >= file.end
        )
        for begin, end in even_parts(file.start, limit, options.ranges_of(limit - file.start)):
            ranges.append((begin, LogRange(
                file.path, file.start, file.end, begin, end, limit, begin == file.start,
                confirmed if options.unconfirmed else HIGH, followed,
            )))  # fmt: skip
    return [each for _, each in sorted(ranges, key=itemgetter(0))]


def _confirmed(
    storage: Storage, facts: StoreFacts, options: ReadOptions, files: Sequence[StoreFile]
) -> int:
    """The end of what may be read without `unconfirmed`. Raises StoreError if there is none."""
    if not files or options.unconfirmed:
        return max(facts.confirm_offset or 0, 0)
    confirmed = facts.confirmed_end()
    is_kept = confirmed or facts.broker is not None
    if not is_kept and _begins_with_record(storage, files[0], options.record_bytes_max):
        raise StoreError(
            f"{facts.path} has messages, but confirmOffset 0 and no brokerIdentity: a broker "
            "without a controller does not keep it; read with unconfirmed=true"
        )
    return confirmed


def _gaps(store: str, files: Sequence[StoreFile], confirmed: int) -> Iterator[tuple[str, int, int]]:
    """(path, begin, end) of what is missing between the files, and from the last one up to
    `confirmed`; `path` should hold it."""
    folder = f"{store}/commitlog"
    if not files and confirmed:
        yield folder, 0, confirmed
    usual = max((file.size for file in files), default=0)
    starts = [file.start for file in files[1:]] + [confirmed]
    for file, next_start in zip(files, starts, strict=False):
        if file.end < next_start:
            path = file.path if file.size < usual else f"{folder}/{file.end:020d}"
            yield path, file.end, next_start


def _begins_with_record(storage: Storage, file: StoreFile, size_max: int) -> bool:
    return is_record(_first_bytes(storage, file, size_max), 0, file.start)


def _first_bytes(storage: Storage, file: StoreFile, size_max: int) -> bytes:
    """The first record of a file, if it is one and not larger than `size_max`."""
    with storage.open(file.path) as opened:
        size = int.from_bytes(opened.read_at(0, 4), "big")
        return opened.read_at(0, min(size, file.size, size_max))


def _of_time(storage: Storage, files: list[StoreFile], options: ReadOptions) -> list[StoreFile]:
    """The files that may hold messages of the wanted time, found by bisection.

    Times grow along the log but for the differences of masters' clocks: that is what the slack is
    for. If a first record cannot be read, all files are taken.
    """
    wanted = options.selection.store_ms
    if wanted.is_all:
        return files

    @cache
    def first_ms(index: int) -> int:
        data = _first_bytes(storage, files[index], options.record_bytes_max)
        head = scan_record(data, check_crc=True)
        if head is None or head.physical_offset != files[index].start:
            raise CorruptRecord(RecordFault.NOT_WHOLE)
        return head.store_timestamp

    def first_with(at_least_ms: int) -> int:
        """Index of the first file whose first message was stored at or after a time."""
        return bisect_left(range(len(files)), at_least_ms, key=first_ms)

    try:
        begin = 0
        if wanted.low != LOW:
            begin = max(0, first_with(wanted.low - options.time_slack_ms) - 1)
        end = len(files)
        if wanted.high != HIGH:
            end = first_with(wanted.high + options.time_slack_ms + 1)
    except CorruptRecord:
        return files
    return files[begin:end]


def read_range(
    storage: Storage, wanted: LogRange, facts: StoreFacts, options: ReadOptions, schema: pa.Schema
) -> Iterator[pa.RecordBatch | Damage]:
    """Batches of wanted messages, and damaged stretches, in the order of the log."""
    selection, broker = options.selection, facts.broker or facts.path
    times = selection.store_ms
    with storage.open(wanted.path) as file:
        if file.size < wanted.file_end - wanted.file_start:
            what = f"{file.size} bytes where {wanted.file_end - wanted.file_start} were listed"
            yield Damage(wanted.path, wanted.begin, wanted.end - wanted.begin, what)
            return
        reader = RangeReader(file, wanted, options.batch_bytes, options.record_bytes_max)
        if times.low != LOW:
            reader = reader.skip_older(times.low - options.time_slack_ms)
        for item in reader.blocks():
            if not isinstance(item, Block):
                yield item
                continue
            if times.high != HIGH:
                oldest = int(item.records.store_ms.min())
                if oldest > times.high + options.time_slack_ms:
                    return
            records = selection.rows(item.window, item.records, broker)
            if len(records):
                yield message_batch(item.window, records, facts, schema)
