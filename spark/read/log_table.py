"""The table `messages` from commit-log files: which ranges to read, and what comes of one.

Free of Spark.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import pyarrow as pa

from batonmq.protocol.records.codec import scan_record
from batonmq.protocol.records.faults import CorruptRecord, RecordFault
from batonmq.protocol.records.search import is_record
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.log_range import Block, LogGap, LogRange, RangeReader
from batonmq.spark.read.message_columns import message_batch
from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.selection import HIGH, LOW
from batonmq.spark.read.storage import Storage
from batonmq.spark.read.store_facts import StoreError, StoreFacts, StoreFile, segments


def confirmed_end(facts: StoreFacts) -> int:
    """The exclusive end of what is confirmed. Raises StoreError if the store has none."""
    if facts.confirm_offset is None or facts.confirm_offset < 0:
        raise StoreError(
            f"{facts.path}/checkpoint is missing or no checkpoint, so what is confirmed is not "
            "known: read with unconfirmed=true to get all there is"
        )
    return facts.confirm_offset


def plan_ranges(
    storage: Storage, facts: StoreFacts, options: ReadOptions
) -> list[LogRange | LogGap]:
    """The ranges of one store that may hold wanted messages. Raises StoreError, OSError.

    What lies in no file, between two files or below the confirmed end, is a gap. A log that begins
    late is whole: its first files have expired.
    """
    files = segments(storage, f"{facts.path}/commitlog")
    confirmed = _confirmed(storage, facts, options, files)
    ranges: list[LogRange | LogGap] = []
    chosen = _of_time(storage, files, options)
    is_last = chosen[-1:] == files[-1:]
    for gap in _gaps(facts.path, chosen, confirmed if is_last else 0):
        end = gap.end if options.unconfirmed else min(gap.end, confirmed)
        if gap.begin < end:
            ranges.append(LogGap(gap.path, gap.begin, end))
    for file in chosen:
        limit = file.end if options.unconfirmed else min(file.end, confirmed)
        if file.start >= limit:
            continue
        loose_from = confirmed if options.unconfirmed else HIGH
        later = [each for each in files if each.start >= file.end]
        followed = options.unconfirmed and any(
            _begins_with_record(storage, each, options.record_bytes_max) for each in later
        )
        parts = options.ranges_of(limit - file.start)
        ranges += [
            LogRange(
                file.path, file.start, file.end, part_begin, part_end, limit,
                part_begin == file.start, loose_from, followed,
            )
            for part_begin, part_end in _parts(file.start, limit, parts)
        ]  # fmt: skip
    return sorted(ranges, key=lambda each: each.begin)


def _confirmed(
    storage: Storage, facts: StoreFacts, options: ReadOptions, files: Sequence[StoreFile]
) -> int:
    """The end of what may be read without `unconfirmed`. Raises StoreError if there is none."""
    if not files or options.unconfirmed:
        return max(facts.confirm_offset or 0, 0)
    confirmed = confirmed_end(facts)
    is_kept = confirmed or facts.broker is not None
    if not is_kept and _begins_with_record(storage, files[0], options.record_bytes_max):
        raise StoreError(
            f"{facts.path} has messages, but confirmOffset 0 and no brokerIdentity: a broker "
            "without a controller does not keep it; read with unconfirmed=true"
        )
    return confirmed


def _parts(begin: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    """[begin, end) in `count` parts of about one size."""
    return pairwise([begin + (end - begin) * part // count for part in range(count)] + [end])


def _gaps(store: str, files: Sequence[StoreFile], confirmed: int) -> Iterator[LogGap]:
    """What is missing between the files, and from the last one up to `confirmed`."""
    folder = f"{store}/commitlog"
    if not files and confirmed:
        yield LogGap(folder, 0, confirmed)
    usual = max((file.size for file in files), default=0)
    starts = [file.start for file in files[1:]] + [confirmed]
    for file, next_start in zip(files, starts, strict=False):
        if file.end < next_start:
            path = file.path if file.size < usual else f"{folder}/{file.end:020d}"
            yield LogGap(path, file.end, next_start)


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
        low, high = 0, len(files)
        while low < high:
            middle = (low + high) // 2
            if first_ms(middle) >= at_least_ms:
                high = middle
            else:
                low = middle + 1
        return low

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
    storage: Storage,
    wanted: LogRange,
    facts: StoreFacts,
    options: ReadOptions,
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch | Damage]:
    """Batches of wanted messages, and damaged stretches, in the order of the log."""
    selection, broker = options.selection, facts.broker or facts.path
    times = selection.store_ms
    with storage.open(wanted.path) as file:
        if file.size < wanted.file_end - wanted.file_start:
            what = f"{file.size} bytes where {wanted.file_end - wanted.file_start} were listed"
            yield Damage(wanted.path, wanted.begin, wanted.end - wanted.begin, what)
            return
        reader = RangeReader(
            file,
            wanted,
            window_bytes=options.batch_bytes,
            record_bytes_max=options.record_bytes_max,
        )
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
