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
from batonmq.spark.read.store_facts import StoreFacts, StoreFile, gaps


def plan_ranges(facts: StoreFacts, options: ReadOptions) -> list[LogRange | Damage]:
    """The ranges of one store that may hold wanted messages. Raises StoreError, OSError.

    What lies in no file, between two files or below the confirmed end, is damage. A log that begins
    late is whole: its first files have expired.
    """
    files, storage = facts.log_files(), facts.storage
    confirmed = _confirmed(facts, options, files)
    top = HIGH if options.unconfirmed else confirmed
    chosen = _of_time(storage, files, options)
    behind = confirmed if chosen[-1:] == files[-1:] else 0
    what = "no file of the log holds this part"
    ranges: list[tuple[int, LogRange | Damage]] = [
        (begin, Damage(path, begin, min(end, top) - begin, what))
        for path, begin, end in gaps(f"{facts.path}/commitlog", chosen, behind)
        if begin < min(end, top)
    ]
    for file in chosen:
        limit = min(file.end, top)
        if file.start >= limit:
            continue
        followed = options.unconfirmed and any(
            _begins_with_record(storage, each, options.record_bytes_max)
            for each in files
            if each.start >= file.end
        )
        loose_from = confirmed if options.unconfirmed else HIGH
        for begin, end in even_parts(file.start, limit, options.ranges_of(limit - file.start)):
            ranges.append((begin, LogRange(
                file.path, file.start, file.end, begin, end, limit, begin == file.start,
                loose_from, followed,
            )))  # fmt: skip
    return [each for _, each in sorted(ranges, key=itemgetter(0))]


def _confirmed(facts: StoreFacts, options: ReadOptions, files: Sequence[StoreFile]) -> int:
    """The end of what may be read without `unconfirmed`. Raises StoreError if there is none."""
    if not files or options.unconfirmed:
        return max(facts.confirm_offset or 0, 0)
    # A broker without a controller keeps 0, which is the end only of a log without a message.
    is_doubtful = facts.confirm_offset == 0 and not facts.keeps_confirm
    if is_doubtful and not _begins_with_record(facts.storage, files[0], options.record_bytes_max):
        return 0
    return facts.confirmed_end()


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
    wanted: LogRange, facts: StoreFacts, options: ReadOptions, schema: pa.Schema
) -> Iterator[pa.RecordBatch | Damage]:
    """Batches of wanted messages, and damaged stretches, in the order of the log."""
    selection, broker = options.selection, facts.broker or facts.path
    times = selection.store_ms
    with facts.storage.open(wanted.path) as file:
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
