"""Where the log ends after a start, and whether it can be trusted.

Only a torn tail is cut (R24): whole records end there, at or above the stored confirmOffset and
what consume queues show, bytes are missing, and no whole record follows. Everything else is damage:
a flipped byte, a missing file, a log that ends below what was confirmed. It is reported, the bytes
stay, and the store opens up to it.

Reading starts at our recovery offset in the checkpoint; without it (a Java store) where Java would
start (`CommitLog.recoverNormally`, `recoverAbnormally`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.layout import FILLER_SIZE, RECORD_HEAD, UNIT_SIZE
from batonmq.protocol.records.codec import FIXED_SIZE_V1, RecordHead
from batonmq.protocol.records.search import ends_in_property_crc
from batonmq.protocol.sysflag import has_queue_unit
from batonmq.protocol.topic_name import METADATA_TOPIC
from batonmq.store.checkpoint import QueueTotals, StoreCheckpoint
from batonmq.store.commit_log import CommitLog
from batonmq.store.consume_queue import ConsumeQueue, is_message, whole_units
from batonmq.store.dispatch import LogDispatcher
from batonmq.store.log_scan import LogScanner, check_record, find_valid_record, whole_records_end
from batonmq.store.queue_positions import POSITIONS_QUEUE, decode_positions
from batonmq.store.queue_table import QueueTable, may_have_folder
from batonmq.store.store_files import StoreFiles
from batonmq.store.suspicion import Suspicion
from batonmq.store.truncation import LogTruncation

log = logging.getLogger(__name__)

_AGAIN_BYTES: Final = 1 << 20
_SECTOR_SIZE: Final = 512
_ZERO_SECTOR: Final = bytes(_SECTOR_SIZE)
_RECORD_SIZE: Final = RECORD_HEAD.only("size")


class StartConfirmRule(Protocol):
    """What counts as confirmed after a start; one type for each mode. Offsets are exclusive ends;
    `visible` is the end of what the consume queues hold."""

    @property
    def writes_at_once(self) -> bool:
        """Whether the store takes writes before the broker is given a role."""

    def proven(self, visible: int) -> int:
        """How far the queues alone prove that the log was confirmed."""

    def confirmed(self, stored: int, visible: int, end: int) -> int:
        """confirmOffset of a log that ends at `end`. `stored`: the checkpoint's."""

    def settle_epochs(self, files: StoreFiles, end: int) -> None:
        """After recovery: no epoch may begin behind `end`."""

    def begin_run(self, files: StoreFiles) -> None:
        """Before the first write of this run. Raises OSError."""


class ConfirmedBySet:
    """Controller mode: a record is confirmed once every member of the SyncStateSet has it."""

    writes_at_once = False

    def proven(self, visible: int) -> int:
        return visible  # only confirmed records have units in a queue

    def confirmed(self, stored: int, visible: int, end: int) -> int:
        return min(max(stored, visible), end)

    def settle_epochs(self, files: StoreFiles, end: int) -> None:
        files.epochs.drop_above(end)

    def begin_run(self, files: StoreFiles) -> None:
        """The epochs stay: they say which master wrote what."""


class ConfirmedByLog:
    """Classic mode: every whole record counts."""

    writes_at_once = True

    def proven(self, visible: int) -> int:
        return 0  # a queue may be ahead of a log that lost its unflushed end

    def confirmed(self, stored: int, visible: int, end: int) -> int:
        return end

    def settle_epochs(self, files: StoreFiles, end: int) -> None:
        """Without effect: `begin_run` drops them all."""

    def begin_run(self, files: StoreFiles) -> None:
        files.drop_epochs()


class Confirmed(NamedTuple):
    """Ends of what was confirmed before the stop, by the checkpoint and by consume queues."""

    stored_offset: int
    visible_offset: int


def recover_store(
    files: StoreFiles,
    truncation: LogTruncation,
    dispatcher: LogDispatcher,
    *,
    confirm_rule: StartConfirmRule,
    boot_id: str,
) -> None:
    """Finds the end of the log, and builds missing derived data up to the confirmed offset. First
    finishes an interrupted truncation. Consume queues ahead of the log are cut. Damage, and an
    unclean stop under another boot, are noted in `suspect_mark`, not raised."""
    truncation.resume()
    while True:
        try:
            confirmed = _find_end(files, dispatcher, confirm_rule, boot_id)
            break
        except CorruptLogError as error:
            # Nothing is dispatched yet, so no table gets a record twice.
            if not files.consume_queues.drop_unreadable(error):
                raise
            log.error("consume_queue_damaged reason=%s", error)
    files.log.health.queue_failure = ""  # this start has removed what it could not read
    dispatcher.advance(confirmed)
    log.info(
        "store_recovered clean=%s from_offset=%d end_offset=%d confirm_offset=%d",
        files.was_clean, dispatcher.verified.start, files.log.max_offset, dispatcher.offset,
    )  # fmt: skip


def _find_end(
    files: StoreFiles, dispatcher: LogDispatcher, confirm_rule: StartConfirmRule, boot_id: str
) -> int:
    """Finds the log's end, and makes queues and index ready for dispatch; what counts as confirmed.
    May be repeated."""
    commit_log, consume_queues = files.log, files.consume_queues
    stored_confirm, totals = files.checkpoint.confirm_phy_offset, files.checkpoint.queue_totals
    start, checkpoint = _start_offset(files), files.checkpoint
    # Where only queues are lost, and `start` is the log's beginning, the index is still whole.
    indexed = checkpoint.recovery_offset
    if indexed is None or indexed > commit_log.end_of_segments:
        indexed = start
    # Queues and index are cut to it, and what they get next is only in memory for a while: if this
    # process is killed, the next start must read from there too.
    if checkpoint.recovery_offset is not None and checkpoint.recovery_offset > start:
        checkpoint.lower_recovery(start)
        checkpoint.flush()
    files.index.forget_failure()
    damaged = _drop_bad_queues(files, dispatcher.queues, start, totals)
    # Only confirmed records have units, so queues may show a newer confirmed offset.
    visible_end = files.visible_end = max(files.visible_end, consume_queues.last_physical_end)
    is_rebuilt = _are_queues_lost(files)
    # What was built above `start` may be half on disk; it is rebuilt from the log.
    if not files.was_clean:
        damaged = consume_queues.drop_damaged(start, expects_none=False) or damaged
        consume_queues.truncate_dirty(start)
        # R22: a cut that failed here, unmarked, left entries of bytes that were replaced since.
        files.index.truncate_to(indexed)
    confirmed = Confirmed(stored_confirm, confirm_rule.proven(visible_end))
    end, damage = recover_log(commit_log, start, confirmed, was_clean=files.was_clean)
    _write_again(files, start := min(start, end))
    _note_damage(files, end, damage, boot_id)
    if visible_end > end:
        log.warning("consume_queues_ahead_of_log visible_end=%d log_end=%d", visible_end, end)
    if end == commit_log.min_offset:
        consume_queues.destroy_all()
    is_whole = files.was_clean and damage is None
    damaged = consume_queues.drop_damaged(end, expects_none=is_whole) or damaged
    consume_queues.truncate_dirty(end)
    files.index.truncate_to(end)
    confirm_rule.settle_epochs(files, end)
    _adopt_queues(files, dispatcher.queues, end, are_rebuilt=is_rebuilt or damaged)
    dispatcher.verified.restart(start, end)
    # Removed queues are rebuilt from the beginning of the log.
    dispatcher.restart_at(commit_log.min_offset if damaged else start)
    return confirm_rule.confirmed(stored_confirm, visible_end, end)


def _drop_bad_queues(
    files: StoreFiles, table: QueueTable, start: int, totals: QueueTotals | None
) -> bool:
    """Removes queues that lack units or end wrongly, for rebuilding; whether there were any."""
    are_wrong = _drop_wrong_ends(files)
    # After a rebuild queues are missing that the log gives back: the totals say nothing then.
    is_low = not are_wrong and _are_ends_low(files, totals)
    is_late = not are_wrong and _begin_late(files, totals)
    are_short = _drop_short_queues(files, table, start, is_any=is_low)
    return (is_late and _drop_late_queues(files, start)) or are_short or are_wrong


def _drop_wrong_ends(files: StoreFiles) -> bool:
    """Removes queues whose last unit is wrong, for rebuilding; whether there were any. Such a unit
    may lie behind the log's end, and does not prove that the log was longer (R24)."""
    wrong = []
    queues = files.consume_queues.queues()
    for queue in sorted(queues, key=lambda one: one.last_physical_end, reverse=True):
        # Ends are sorted: below a good one no unit can be beyond the log.
        if not _has_wrong_end(files.log, queue):
            break
        wrong.append(queue)
    files.consume_queues.rebuild(wrong)
    return bool(wrong)


def _has_wrong_end(commit_log: CommitLog, queue: ConsumeQueue) -> bool:
    """Whether the last message of a queue lies elsewhere in the log, or has another size, than its
    unit says. If the log has it nowhere, the log may have lost it."""
    index = queue.max_offset - 1
    unit, before = queue.unit_at(index), queue.unit_at(index - 1)
    # The neighbour before shows where the search may begin.
    if unit is None or before is None or _names_its_message(commit_log, queue, index, unit):
        return False
    if not _names_its_message(commit_log, queue, index - 1, before):
        return False
    begin = before[0] + before[1]
    scanner = LogScanner(commit_log, begin, commit_log.end_of_segments, check_crc=True)
    while (head := scanner.next()) is not None:
        if is_message(head, queue, index):
            log.error("consume_queue_end_false topic=%s queue_id=%d", queue.topic, queue.queue_id)
            return True
    return False


def _are_ends_low(files: StoreFiles, stored: QueueTotals | None) -> bool:
    """Whether queues have fewer units than when the checkpoint was written: a file is gone, or the
    end of one is zeros. Units of later records do not count."""
    if stored is None:
        return False
    queues = files.consume_queues.queues()
    return sum(queue.end_below(stored.recovery_offset) for queue in queues) < stored.ends


def _begin_late(files: StoreFiles, stored: QueueTotals | None) -> bool:
    """Whether the files of queues begin later than when the checkpoint was written: the first ones
    are gone."""
    if stored is None or stored.begins < 0:
        return False
    # Queues are only left out below, so the sum can only fall.
    if files.consume_queues.begins_total <= stored.begins:
        return False
    begins = 0
    for queue in files.consume_queues.queues():
        if not queue.first_in_files:
            continue
        # A queue may have been given its position (R38) behind the checkpoint.
        if _first_place(queue) < stored.recovery_offset or not _is_placed(files, queue):
            begins += queue.first_in_files
    if begins <= stored.begins:
        return False
    log.warning("consume_queues_begin_late stored=%d found=%d", stored.begins, begins)
    return True


def _first_place(queue: ConsumeQueue) -> int:
    """Where the first record of the queue's files begins in the log; -1 if all units are filler."""
    units = queue.iter_units(queue.first_in_files)
    return next((place for _, place, size, _ in units if size != FILLER_SIZE), -1)


def _is_placed(files: StoreFiles, queue: ConsumeQueue) -> bool:
    """Whether a stated position explains where the files of a queue begin."""
    position = files.positions.placed.get(queue.topic, {}).get(queue.queue_id)
    if position is None:
        return False
    units = whole_units(files.config.mapped_file_size_consume_queue) // UNIT_SIZE
    return position // units == queue.first_in_files // units


def _drop_late_queues(files: StoreFiles, end: int) -> bool:
    """Removes queues whose files begin behind a message that the log below `end` has, for
    rebuilding; whether there were any."""
    unseen = {
        (queue.topic.encode("utf-8"), queue.queue_id): queue
        for queue in files.consume_queues.queues()
        if queue.first_in_files
    }
    lost = []
    scanner = LogScanner(files.log, files.log.min_offset, end, check_crc=False)
    while unseen and (head := scanner.next()) is not None:
        if not has_queue_unit(head.sys_flag):
            continue
        # Offsets only grow: the first message of a queue in the log decides.
        queue = unseen.pop((head.topic, head.queue_id), None)
        if queue is not None and head.queue_offset < queue.first_in_files:
            log.error(
                "consume_queue_file_missing topic=%s queue_id=%d first=%d log_has=%d",
                queue.topic, queue.queue_id, queue.first_in_files, head.queue_offset,
            )  # fmt: skip
            lost.append(queue)
    files.consume_queues.rebuild(lost)
    return bool(lost)


def _drop_short_queues(files: StoreFiles, table: QueueTable, start: int, *, is_any: bool) -> bool:
    """Removes queues that lack units of messages that the log below `start` names, for rebuilding;
    whether there were any. They would number these again (R38). Candidates are queues whose last
    file has no unit, which may be new: their messages come behind `start`. `is_any`: all queues,
    also those without a folder."""
    queues = {
        (queue.topic, queue.queue_id): queue
        for queue in files.consume_queues.queues()
        if is_any or queue.ends_blank
    }
    begin = max(files.positions.stated_below(start), files.log.min_offset)
    if not (queues or is_any) or begin >= start:
        return False
    # Records of these topics may have a handler and no unit.
    odd, placed = table.topics_with_odd_queues(), files.positions.placed
    lost = set[tuple[str, int]]()
    scanner = LogScanner(files.log, begin, start, check_crc=False)
    while (head := scanner.next()) is not None:
        for key, next_offset in _named_offsets(head, scanner):
            topic, queue_id = key
            if key in queues:
                end = queues[key].max_offset
            elif is_any and may_have_folder(*key) and topic.encode("utf-8") not in odd:
                end = placed.get(topic, {}).get(queue_id, 0)
            else:
                continue
            if end < next_offset:
                lost.add(key)
    if scanner.offset < start:  # a bad record: what is behind it cannot be seen
        lost.update(key for key, queue in queues.items() if queue.ends_blank)
    for topic, queue_id in lost:
        log.error("consume_queue_units_lost topic=%s queue_id=%d", topic, queue_id)
    if lost:
        files.consume_queues.before_rebuild()
    files.consume_queues.rebuild([queues[key] for key in lost if key in queues])
    return bool(lost)


def _named_offsets(head: RecordHead, scanner: LogScanner) -> Iterator[tuple[tuple[str, int], int]]:
    """The queues that a record names, each with the next offset that it must have at least."""
    topic = head.topic.decode("utf-8", "replace")
    if (topic, head.queue_id) == (METADATA_TOPIC, POSITIONS_QUEUE):
        record = decode_positions(scanner.body(head))
        for named, positions in record.positions.items() if record is not None else ():
            for queue_id, position in positions.items():
                yield (named, queue_id), position
    elif has_queue_unit(head.sys_flag):
        yield (topic, head.queue_id), head.queue_offset + 1


def _names_its_message(
    commit_log: CommitLog, queue: ConsumeQueue, index: int, unit: tuple[int, int, int]
) -> bool:
    try:
        head = check_record(commit_log, unit[0])
    except CorruptLogError:
        return False
    return head.size == unit[1] and is_message(head, queue, index)


def _write_again(files: StoreFiles, start: int) -> None:
    """After a failed write-back the page cache shows as clean what is on no disk (R40). So the log
    above `start` is written again; queues and index are rebuilt anyway."""
    report = files.suspect_mark.report
    # Only a failed sync makes clean pages doubtful.
    if report is None or report.kind != "fsync" or files.was_clean:
        return
    commit_log = files.log
    offset = max(commit_log.min_offset, min(start, report.offset))
    while not report.discarded and offset < commit_log.max_offset:
        segment, part = commit_log.segment_at(offset), bytes(commit_log.view(offset, _AGAIN_BYTES))
        assert segment is not None
        segment.write(offset - segment.start_offset, part)
        offset += len(part)
    commit_log.datasync_to(commit_log.max_offset)


def _adopt_queues(
    files: StoreFiles, queues: QueueTable, log_end: int, *, are_rebuilt: bool
) -> None:
    """Takes over the queues as found, and positions that no file holds (R38)."""
    log_begin = files.log.min_offset
    if are_rebuilt:
        files.positions.want_from(log_begin)
    queues.log_ends_at(log_end, log_begin)
    for queue in files.consume_queues.queues():
        queue.correct_min_offset(log_begin)  # leaves out what has expired
    queues.adopt_loaded()


def _note_damage(files: StoreFiles, end: int, damage: Suspicion | None, boot_id: str) -> None:
    """After a reboot, what was acked from the page cache may be missing (R17). Noted in either
    mode: controllers may judge it at a later start (R48)."""
    rebooted = files.last_run is not None and not files.last_run.survived(boot_id)
    if damage is not None:
        files.suspect_mark.add(replace(damage, until_level=rebooted))
    if damage is not None or not rebooted:
        return
    if files.suspect_mark.report is not None:  # an earlier, more exact reason stays
        return
    what = "stopped uncleanly under another boot of this machine: acknowledged bytes may be missing"
    log.warning("log_suspect reason=%r log_end=%d", what, end)
    files.suspect_mark.set(Suspicion("", end, what, end, kind="reboot"))


def _are_queues_lost(files: StoreFiles) -> bool:
    """Whether queues, or positions of queues, must be rebuilt from the whole log."""
    if files.has_damaged_queues or files.positions.was_damaged:
        return True
    return not len(files.consume_queues)


def _start_offset(files: StoreFiles) -> int:
    """A record boundary below which log, consume queues and index are whole."""
    commit_log, checkpoint, index = files.log, files.checkpoint, files.index
    if _are_queues_lost(files):
        return commit_log.min_offset
    # The index files are gone: only the whole log gives them back.
    if checkpoint.index_msg_timestamp and index.end_phy_offset < 0:
        return commit_log.min_offset
    offset = checkpoint.recovery_offset
    if offset is not None and offset < commit_log.min_offset:
        # Segments have expired up to behind it. Timestamps might give a later place, if a clock
        # went back.
        return commit_log.min_offset
    if offset is None or offset > commit_log.end_of_segments:
        offset = java_start_offset(
            commit_log,
            checkpoint,
            dispatched_end=files.consume_queues.last_physical_end,
            clean=files.was_clean,
        )
    # In whole seconds, as the index has it after a cut. It may be an old copy.
    is_behind = index.end_timestamp // 1000 < checkpoint.index_msg_timestamp // 1000
    if index.was_cut or is_behind:
        return max(min(offset, index.end_phy_offset), commit_log.min_offset)
    return offset


def recover_log(
    commit_log: CommitLog, start_offset: int, confirmed: Confirmed, *, was_clean: bool
) -> tuple[int, Suspicion | None]:
    """Finds the end of the log by reading it, CRCs checked, from the record boundary
    `start_offset`; the end, and what is damaged there. A torn tail is zeroed, durably; damage is
    left alone. Sets the log's end. After an unclean stop bytes may be in the page cache only: they
    count as flushed once this process flushed them."""
    end, problem = whole_records_end(commit_log, start_offset, commit_log.end_of_segments)
    damage = _find_damage(commit_log, end, problem, confirmed)
    # R24: a torn tail was never acknowledged; damage may have been.
    if damage is None:
        cut_torn_tail(commit_log, end)
    else:
        place = damage.file, damage.offset
        log.error("commit_log_damaged file=%s offset=%d reason=%s", *place, damage.what)
    # What was read after an unclean stop may be in the page cache only.
    commit_log.set_end(end, None if was_clean else start_offset)
    return end, damage


def _find_damage(
    commit_log: CommitLog, end: int, problem: str | None, confirmed: Confirmed
) -> Suspicion | None:
    if commit_log.gap is not None and end == commit_log.end_of_segments:
        path, offset = commit_log.gap
        return Suspicion(
            str(path), offset, "the file is missing, later ones are there", _end_of(commit_log)
        )
    what = problem or "the log ends"
    # A torn write ends the log. If records follow, something in the middle went bad.
    behind = find_valid_record(commit_log, end)
    if behind is None and commit_log.gap is not None:
        behind = commit_log.gap[1] + commit_log.segment_size
    if behind is not None:
        what = f"{what}, but there are records behind it, at {behind}"
    elif end < confirmed.stored_offset:
        what = f"{what}, below the confirmed offset {confirmed.stored_offset}"
    elif end < confirmed.visible_offset:
        what = f"{what}, below what consume queues show, {confirmed.visible_offset}"
    elif is_complete_but_bad(commit_log, end):
        what = f"{what}, and nothing of the record is missing"
    else:
        return None
    last = max(_end_of(commit_log), *confirmed)
    return Suspicion(commit_log.file_of(end), end, what, last)


def is_complete_but_bad(log: CommitLog, offset: int) -> bool:
    """Whether the bytes at `offset`, where no good record begins, were once a whole record (R24).

    A torn write lacks something: a killed process leaves the beginning of a record and zeros, a
    lost page cache zeros in place of any sectors. A record that lacks nothing but fails its CRC was
    whole once, and may have been acknowledged. The property CRC ends a record, so it also reveals
    one with a bad length. A bad record whose message holds a sector of zeros passes for torn. False
    for all zeros.
    """
    segment = log.segment_at(offset)
    if segment is None:
        return False
    start = offset - segment.start_offset
    data_end = segment.data_end(start)
    if data_end - start < _RECORD_SIZE.size:
        return False
    view = segment.buffer
    (size,) = _RECORD_SIZE.unpack_from(view, start)
    end = start + size if FIXED_SIZE_V1 <= size <= segment.size - start else data_end
    # A write may be torn within the CRC's digits, too; the mark behind them may be flipped.
    has_digits = data_end == end - 1 and ends_in_property_crc(view, start, end)
    reaches_its_end = data_end >= end or has_digits
    if not reaches_its_end and not ends_in_property_crc(view, start, data_end):
        return False
    first_sector = start + -start % _SECTOR_SIZE
    return not any(
        view[at : at + _SECTOR_SIZE] == _ZERO_SECTOR
        for at in range(first_sector, max(end, data_end) - _SECTOR_SIZE + 1, _SECTOR_SIZE)
    )


def _end_of(commit_log: CommitLog) -> int:
    """A bound above everything that the log ever held."""
    files = commit_log.detached_files
    if files:
        return int(files[-1].name) + commit_log.segment_size
    for segment in reversed(commit_log.segments):
        data_end = segment.data_end()
        if data_end:
            return segment.start_offset + data_end
    return commit_log.min_offset


def cut_torn_tail(commit_log: CommitLog, end: int) -> None:
    """Makes everything behind `end` zero, durably; one empty segment ahead may stay."""
    keep = commit_log.segment_at(end)  # None where the log ends with its last segment
    while commit_log.segments and commit_log.segments[-1].start_offset >= end:
        last = commit_log.segments[-1]
        if last is keep:
            break
        is_next = last.start_offset == (keep.end_offset if keep else end)
        if is_next and last.data_end() == 0:
            break
        commit_log.drop_last_segment(None)
    if keep is not None:
        data_end = keep.start_offset + keep.data_end(end - keep.start_offset)
        if data_end > end:
            log.warning("torn_tail_cut file=%s offset=%d bytes=%d", keep.path, end, data_end - end)
            commit_log.zero_from(end, data_end)


def java_start_offset(
    commit_log: CommitLog, checkpoint: StoreCheckpoint, *, dispatched_end: int, clean: bool
) -> int:
    """Where Java would begin to read: the start of a segment. After a clean stop the newest segment
    whose first record is good and within the consume queues; else the newest whose first record is
    older than the checkpoint."""
    for segment in reversed(commit_log.segments):
        scanner = LogScanner(commit_log, segment.start_offset, segment.end_offset, check_crc=True)
        head = scanner.next()
        if head is None:
            continue
        if clean:
            if segment.start_offset <= dispatched_end:
                return segment.start_offset
        elif 0 < head.store_timestamp <= checkpoint.min_timestamp:
            return segment.start_offset
    return commit_log.min_offset
