"""The part of the log above the dispatched end: what a new master takes over.

A slave has bytes there that it never parsed. Before it may put, it must know where whole records
end and which queue offsets they took. Origin: Java `CommitLog.recoverTopicQueueTable` and
`AutoSwitchHAService.truncateInvalidMsg`, which looks only below confirmOffset.
"""

from __future__ import annotations

from protocol.errors import CorruptLogError
from store.commit_log import CommitLog
from store.dispatch import NO_UNIT, Dispatcher
from store.log_scan import LogScanner, find_valid_record
from store.queue_table import QueueTable
from store.reader_checks import check_record
from store.torn_tail import ends_in_property_crc


def queue_undispatched(commit_log: CommitLog, queues: QueueTable, dispatcher: Dispatcher) -> int:
    """Queue every whole record above the dispatched end for dispatch; where they end.

    Counts `next_offset` of their queues on. Raises CorruptLogError unless what follows is the
    beginning of a record that never came to its end (R24): this process wrote or verified each
    byte below the log's end, so nothing here can be torn.
    """
    dispatcher.pending.clear()
    queues.reset_next_offsets()
    scanner = LogScanner(commit_log, dispatcher.offset, commit_log.max_offset, check_crc=True)
    while (head := scanner.next()) is not None:
        queue = queues.of_bytes(head.topic, head.queue_id)
        if queue.handler is not None:
            # What the old master changed of topics and groups counts before the first put (R31).
            queue.handler(head, scanner.body(head))
        record = dispatcher.describe(head, queue)
        dispatcher.pending.append(record)
        if record.queue_offset != NO_UNIT:
            if head.queue_offset != queue.next_offset:
                queue.is_gapless = False
            queue.next_offset = max(queue.next_offset, head.queue_offset + 1)
    fault = _fault_behind(commit_log, scanner)
    if fault is not None:
        raise CorruptLogError(commit_log.file_of(scanner.offset), scanner.offset, fault)
    return scanner.offset


def _fault_behind(commit_log: CommitLog, scanner: LogScanner) -> str | None:
    """Why the bytes between the scanner and the log's end are damage, None if just incomplete."""
    if scanner.offset >= commit_log.max_offset:
        return None
    behind = find_valid_record(commit_log, scanner.offset)
    if behind is not None:
        return (
            f"{scanner.problem or 'no whole record'}, but there are records behind it, at {behind}"
        )
    if scanner.problem is None:
        view = commit_log.view(scanner.offset, commit_log.segment_size)
        if ends_in_property_crc(view, 0, len(view)):
            return "a record with a wrong length"
    return scanner.problem


def is_record_boundary(commit_log: CommitLog, offset: int, dispatched_offset: int) -> bool:
    """Whether the log can be cut at `offset`: a record begins there, or whole records end there.

    `dispatched_offset` is a known boundary at or below which nothing has to be read.
    """
    if offset == dispatched_offset or offset % commit_log.segment_size == 0:
        return True
    if offset > dispatched_offset:
        scanner = LogScanner(commit_log, dispatched_offset, offset, check_crc=False)
        while scanner.next() is not None:
            pass
        return scanner.offset == offset
    try:
        check_record(commit_log, offset)
    except CorruptLogError:
        return False
    return True
