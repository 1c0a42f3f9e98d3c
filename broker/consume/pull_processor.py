"""Pull (PULL_MESSAGE, 11) and lite pull (LITE_PULL_MESSAGE, 361): read a queue, or wait for its
next matching message.

Reads end at confirmOffset (G4), so a consumer never sees a message that may be cut. A pull that
finds nothing is held; dispatch wakes it in the same loop turn as the message. A new master, whose
confirmOffset lags behind its log, holds a pull between its visible end and its log end and does not
correct the offset (R28).
Origin: PullMessageProcessor, PullRequestHoldService in Java.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from batonmq.broker.config import BrokerConfig
from batonmq.broker.consume.held_requests import HeldPull, PullHold
from batonmq.broker.consume.pull_request import Pull, PullChecks
from batonmq.broker.consume.read_checks import ReadForbiddenError
from batonmq.broker.relay import Relay
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.offset_clamp import (
    PositionReport,
    commit_refusal,
    next_pull_offset,
    where_reset,
)
from batonmq.broker.tables.offset_resets import OffsetReset
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.codes import LONG_MAX, MASTER_ID, RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, CorruptLogError
from batonmq.protocol.records.codec import without_crc
from batonmq.protocol.role_view import Role
from batonmq.protocol.sysflag import PULL_COMMIT_OFFSET, PULL_SUSPEND
from batonmq.protocol.topic_name import TOOLS_CONSUMER
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.headers import (
    PullFields,
    PullFlags,
    PullFrame,
    PullOffsets,
    decode_pull,
    pull_frame,
    pull_header,
    refusal,
    refusal_of,
)
from batonmq.remoting.intake import SLICE_BYTES
from batonmq.runtime.turns import for_each
from batonmq.store.reader import GetMessageResult, GetMessageStatus

log = logging.getLogger(__name__)

SHORT_POLLING_MS: Final = 1000
"""How long a pull waits with longPollingEnable false, as in Java."""
SUSPEND_MAX_MS: Final = 300_000
"""Bounds the different deadlines of held pulls (R58); stock clients wait for 15 to 30 s."""
SWEEP_MS: Final = 5000
"""How often all queues are looked at, as in Java. Dispatch wakes held pulls before."""
PULLED_MAX: Final = 1 << 17
"""Clients choose groups, topics and queues (R58)."""
_SLICE: Final = 128
"""Held pulls that are answered, or queues that are swept, in one turn of the loop (R58)."""
GO_BACK: Final = "NO_MATCHED_MESSAGE"
"""The status of a slave's answer that sends the client back to the master."""

_CODES: Final = {
    GetMessageStatus.FOUND: ResponseCode.SUCCESS,
    GetMessageStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetMessageStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}
_NOTHING_THERE: Final = (
    GetMessageStatus.NO_MATCHED_LOGIC_QUEUE,
    GetMessageStatus.NO_MESSAGE_IN_QUEUE,
)


@dataclass(slots=True)
class _WakeRound:
    """Answers, in slices, the held pulls of a queue that wait for offsets below `max_offset`.
    `left`: how many pulls are still to be looked at. `then_to`: the `max_offset` of the next round;
    0: none."""

    max_offset: int
    left: int
    then_to: int = 0


class PullProcessor:
    """Answers or holds pulls. Times are ms of a monotonic clock."""

    def __init__(
        self,
        path: WritePath,
        checks: PullChecks,
        offsets: ConsumerOffsetManager,
        config: BrokerConfig,
        *,
        relay: Relay,
    ) -> None:
        self._store = path.store
        self._stats = path.stats
        self._checks = checks
        self._offsets = offsets
        self._resets = offsets.resets
        # Held pulls wait for a message at the old offset, which may never come.
        self._resets.on_begin = self._was_reset
        self._gate = path.gate
        self._clock_ms = path.clock_ms
        self._config = config
        self._relay = relay
        self._hold: PullHold[Pull] = PullHold()
        # Queues with more woken pulls than one turn can answer.
        self._waking: dict[tuple[str, int], _WakeRound] = {}
        self._next_sweep_ms = 0
        self._to_sweep: list[tuple[str, int]] = []
        self.messages_total = self.found_total = self.missed_total = self._answered_bytes = 0
        """Messages read; reads that found some; reads that found none."""
        self.longest_read_ms = 0
        self.pulled: dict[tuple[str, str, int], int] = {}
        """(Group, topic, queue id) -> where the group pulls next, since this role began; the newest
        PULLED_MAX."""
        self.on_reset: Callable[[str, str, int], None] = lambda group, topic, queue_id: None
        """Called on the master when a reset of a group in a queue is confirmed."""

    def register(self, processors: Processors) -> None:
        processors.register_raw(RequestCode.PULL_MESSAGE, self.pull)
        processors.register_raw(RequestCode.LITE_PULL_MESSAGE, self.pull)

    @property
    def held(self) -> int:
        return len(self._hold)

    def pull(self, channel: Connection, kind: int, header: bytes, body: bytes) -> None:
        """PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361)."""
        request = decode_pull(kind, header)
        if not (self._gate.is_master or self._gate.is_acting):
            self._pull_elsewhere(request, channel, kind, header, body)
            return
        try:
            pull = self._checks.checked(channel, request)
        except ReadForbiddenError as exc:
            channel.write(refusal_of(request.opaque, exc, {"forbiddenType": str(exc.kind.value)}))
            return
        except BatonError as exc:
            channel.write(refusal_of(request.opaque, exc))
            return
        ext = request.ext
        if ext.sys_flag & PULL_COMMIT_OFFSET and ext.commit_offset >= 0:
            self._commit(ext)
        suspend_ms = self._suspend_ms(ext)
        self._answer_or_hold(pull, ext.queue_offset, self._clock_ms() + suspend_ms, suspend_ms > 0)

    def _suspend_ms(self, ext: PullFields) -> int:
        if not ext.sys_flag & PULL_SUSPEND:
            return 0
        if not self._config.long_polling_enable:
            return SHORT_POLLING_MS
        return min(ext.suspend_timeout_millis, SUSPEND_MAX_MS)

    def _pull_elsewhere(
        self, request: PullFrame, channel: Connection, kind: int, header: bytes, body: bytes
    ) -> None:
        """A pull at a replica that is not master. A slave serves offsets below its confirmOffset
        (R28), and holds a pull at the end of its queue; it passes others on to the master. The
        pull's commit offset is ignored: clients also send it to the master (UPDATE_CONSUMER_OFFSET,
        15)."""
        marked = self._config.slave_read_enable and bool(request.ext.read_replica)
        taken = False
        # Without a role the pull waits for one. Our own client marks a read from a slave: without
        # the mark it takes this broker for the master.
        if self._gate.role is not Role.SLAVE or (request.is_ours and not marked):
            taken = self._relay.take_raw(channel, self.pull, kind, header, body, for_any_role=True)
        elif self._relay.enabled or self._config.slaves_serve_pulls:
            if self._answered_as_slave(request, channel, marked=marked):
                return
            taken = self._relay.take_raw(channel, self.pull, kind, header, body)
        if not taken:
            remark = "this broker is not the master and serves no pulls: ask the name server"
            channel.write(refusal(request.opaque, ResponseCode.SYSTEM_BUSY, remark))

    def _answered_as_slave(self, request: PullFrame, channel: Connection, *, marked: bool) -> bool:
        """Answers or holds the pull; returns False if this slave cannot. A `marked` client, which
        the master sent here, is sent back as soon as there is nothing to read."""
        at = request.ext.queue_offset
        try:
            pull = self._checks.checked(channel, request)
        except BatonError as exc:
            # Tables of a slave may lag: perhaps the master knows the topic, the group or the
            # subscription.
            log.debug("pull_passed_on topic=%s reason=%s", request.ext.topic, exc)
            return False
        begins, ends = self._visible(pull.topic, pull.queue_id)
        is_reset = self._resets.runs(pull.group.group_name, pull.topic, pull.queue_id)
        suspend_ms = 0 if marked else self._suspend_ms(request.ext)
        # At the end a pull may wait, because the next message reaches this replica, too.
        is_here = begins <= at < ends or (at == ends and suspend_ms > 0)
        if is_here and not is_reset and not self._is_old(pull, at):
            self._answer_or_hold(pull, at, self._clock_ms() + suspend_ms, suspend_ms > 0)
            return True
        if self._relay.enabled and not marked:
            return False
        self._write(pull, ResponseCode.PULL_RETRY_IMMEDIATELY, GO_BACK, at)
        return True

    def arrived(self, topic: str, queue_id: int, max_offset: int) -> None:
        """Messages up to `max_offset` became visible: answers the pulls that wait for them."""
        waiting = self._hold.waiting(topic, queue_id)
        if not waiting:
            return
        queue = topic, queue_id
        # A round is running: another one for these messages will follow it.
        if queue in self._waking:
            running = self._waking[queue]
            running.then_to = max(max_offset, running.then_to)
            return
        # R58: thousands of consumers may wait for one queue: the rest is answered in later turns.
        woken = self._hold.arrived(topic, queue_id, max_offset, _SLICE)
        looked_at = self._answer_or_hold_all(woken, may_hold=True)
        if 0 < looked_at < waiting:
            self._waking[queue] = _WakeRound(max_offset, waiting - looked_at)
            if len(self._waking) == 1:
                asyncio.get_running_loop().call_soon(self._wake_more)

    def _answer_or_hold_all(self, waited: Iterator[HeldPull[Pull]], *, may_hold: bool) -> int:
        """Answers pulls or holds them again, up to SLICE_BYTES of messages; returns how many. An
        error of one does not stop the others."""
        # R58: each answer is a copy, and one message of 4 MiB may wake all of them.
        count, end = 0, self._answered_bytes + SLICE_BYTES
        for held in waited:
            count += 1
            try:
                self._answer_or_hold(held.pull, held.offset, held.deadline_ms, may_hold, True)
            except Exception as error:
                log.exception("pull_failed topic=%s queue=%d", held.topic, held.queue_id)
                remark = f"this pull could not be answered: {error!r}"
                held.pull.refuse(ResponseCode.SYSTEM_ERROR, remark)
            if self._answered_bytes >= end:
                break
        return count

    def _wake_more(self) -> None:
        queue, running = next(iter(self._waking.items()))
        woken = self._hold.arrived(*queue, running.max_offset, min(_SLICE, running.left))
        looked_at = self._answer_or_hold_all(woken, may_hold=True)
        # At most as many as waited when the round began: pulls that are held again, since nothing
        # matched, must not keep it running.
        running.left -= looked_at
        if not looked_at or not running.left:
            del self._waking[queue]
            if running.then_to:
                waiting = self._hold.waiting(*queue)
                self._waking[queue] = _WakeRound(running.then_to, waiting)
        if self._waking:
            asyncio.get_running_loop().call_soon(self._wake_more)

    def queues_deleted(self, topic: str) -> None:
        """Answers the pulls that wait for this topic. If it is created again, offsets begin at 0,
        and these pulls would wait too long (R39)."""
        for_each(
            self._hold.queues_of(topic), lambda queue: self.arrived(topic, queue, LONG_MAX), _SLICE
        )

    def tick(self, now_ms: int) -> bool:
        """Answers expired pulls, and checks all queues every 5 s as a safeguard. Each call does a
        slice; returns whether there is more to do now."""
        end = self._answered_bytes + SLICE_BYTES
        late = self._hold.expired(now_ms, _SLICE)
        self._answer_or_hold_all(late, may_hold=False)
        if now_ms >= self._next_sweep_ms:
            self._next_sweep_ms = now_ms + SWEEP_MS
            self._to_sweep = self._hold.queues()
        for _ in range(min(_SLICE, len(self._to_sweep))):
            if self._answered_bytes >= end:
                break
            topic, queue_id = self._to_sweep.pop()
            self.arrived(topic, queue_id, self._store.queries.max_offset_in_queue(topic, queue_id))
        return bool(self._to_sweep) or self._hold.is_late(now_ms)

    def disconnected(self, channel: Connection) -> None:
        self._hold.drop_owner(channel)

    def role_changed(self) -> None:
        """Refuses held pulls of clients that find the master by themselves; keeps the others, which
        a slave can serve."""
        self.pulled.clear()
        # A new hold: pulls that arrive meanwhile belong to the new role.
        before, self._hold = self._hold, PullHold()
        self._answer_held(before)

    def _answer_held(self, before: PullHold[Pull]) -> None:
        """Refuses or keeps the pulls that were held `before`, a slice per turn."""
        for held in before.take(_SLICE):
            pull = held.pull
            if self._relay.enabled and not pull.ours:
                self._hold.hold(held)
                continue
            remark = "the role of this broker changed: ask the name server for the master"
            pull.refuse(ResponseCode.SYSTEM_BUSY, remark)
        # Messages may have arrived before the pulls were held again: let the next tick sweep.
        self._next_sweep_ms = 0
        if len(before):
            asyncio.get_running_loop().call_soon(self._answer_held, before)

    def _commit(self, ext: PullFields) -> None:
        """Commits the pull's progress. Ignored during a reset or if it is refused: clients commit
        it again."""
        queue = (ext.topic, ext.queue_id)
        if self._resets.runs(ext.consumer_group, *queue):
            return
        progress = PositionReport(ext.consumer_group, *queue, ext.commit_offset)
        if commit_refusal(self._gate, self._store, self._offsets, progress) is None:
            self._offsets.commit(ext.consumer_group, *queue, ext.commit_offset)

    def _was_reset(self, reset: OffsetReset) -> None:
        """A reset began: held pulls of the group get the new offset at once."""
        log.info("offsets_reset group=%s topic=%s", reset.group, reset.topic)
        for queue_id in reset.offsets:
            self.pulled.pop((reset.group, reset.topic, queue_id), None)
            self.arrived(reset.topic, queue_id, LONG_MAX)

    def _answer_or_hold(
        self, pull: Pull, offset: int, deadline_ms: int, may_hold: bool, waited: bool = False
    ) -> None:
        if pull.channel.closed:
            return
        topic, queue_id = pull.topic, pull.queue_id
        may_hold = may_hold and self._hold.has_place(len(pull.wanted or ()))
        if topic in self._store.deleting_topics:
            # R39: read nothing. A new master may have in its log a deletion that was already
            # answered. Either `queues_deleted` or the end of this role follows.
            if may_hold:
                self._keep(pull, offset, deadline_ms)
            else:
                self._write(pull, ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE", offset)
            return
        progress = PositionReport(pull.group.group_name, topic, queue_id, offset)
        reset_to = where_reset(self._gate, self._offsets, progress)
        if reset_to is not None:
            self._move(pull, reset_to)
            return
        if self._is_old(pull, offset):
            self._move(pull, self._visible(topic, queue_id)[0])
            return
        try:
            result = self._read(pull, offset)
        except CorruptLogError as exc:
            log.error("corrupt_record_not_served file=%s offset=%d", exc.file, exc.offset)
            pull.refuse(ResponseCode.SYSTEM_ERROR, str(exc))
            return
        code = self._code(pull, offset, result)
        if code == ResponseCode.SUCCESS:
            self.messages_total += result.message_count
            self._answered_bytes += result.size
            place = pull.group.group_name, topic, queue_id
            self.pulled[place] = result.next_begin_offset
            if len(self.pulled) > PULLED_MAX:
                for oldest in list(islice(self.pulled, 1 + PULLED_MAX // 64)):
                    del self.pulled[oldest]
            self._stats.got(topic, pull.group.group_name, result.message_count, result.size)
        elif may_hold and self._waits(code, result, waited=waited):
            # What was read and did not match is not read again for this pull.
            if code == ResponseCode.PULL_RETRY_IMMEDIATELY:
                offset = result.next_begin_offset
            self._keep(pull, offset, deadline_ms)
            return
        self._write_result(pull, offset, code, result)

    def _keep(self, pull: Pull, offset: int, deadline_ms: int) -> None:
        topic, queue_id, tags = pull.topic, pull.queue_id, len(pull.wanted or ())
        held = HeldPull(topic, queue_id, deadline_ms, pull.channel, offset, pull, tags=tags)
        self._hold.hold(held)

    def _read(self, pull: Pull, offset: int) -> GetMessageResult:
        began_ms = self._clock_ms()
        result = self._store.queries.get_message(
            pull.topic,
            pull.queue_id,
            offset,
            pull.max_num,
            pull.max_bytes,
            pull.wanted,
            pull.matches,
        )
        self.longest_read_ms = max(self.longest_read_ms, self._clock_ms() - began_ms)
        self.found_total += result.message_count > 0
        self.missed_total += not result.message_count
        return result

    def _is_old(self, pull: Pull, offset: int) -> bool:
        """Whether the consumer has an offset from before the topic was deleted and created again
        (R39)."""
        first_offset_of = self._store.queries.min_offset_in_queue
        group = pull.group.group_name
        return self._offsets.is_old(group, pull.topic, pull.queue_id, offset, first_offset_of)

    def _move(self, pull: Pull, offset: int) -> None:
        self._write(pull, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET", offset)

    def _write_result(self, pull: Pull, offset: int, code: int, result: GetMessageResult) -> None:
        next_offset = result.next_begin_offset
        if code == ResponseCode.PULL_NOT_FOUND:
            # R28: do not correct the offset. The log may have unconfirmed messages there.
            next_offset = offset
        elif code == ResponseCode.PULL_OFFSET_MOVED and offset > next_offset:
            group = pull.group.group_name
            committed = self._offsets.query(group, pull.topic, pull.queue_id)
            next_offset = next_pull_offset(self._gate, next_offset, committed)
        header = pull_header(
            pull.opaque,
            code,
            result.status.name,
            PullOffsets(next_offset, result.min_offset, result.max_offset),
            self._flags(pull, is_slow=result.suggest_pulling_from_slave),
        )
        size, parts = result.size, result.parts
        if pull.group.group_name == TOOLS_CONSUMER:
            # mqadmin prints every property.
            parts = [memoryview(without_crc(part)) for part in parts]
            size = sum(map(len, parts))
        pull.channel.write(pull_frame(header, size, parts))

    def _write(self, pull: Pull, code: int, remark: str, next_offset: int) -> None:
        """A reply without messages."""
        offsets = PullOffsets(next_offset, *self._visible(pull.topic, pull.queue_id))
        flags = self._flags(pull, is_slow=False)
        pull.channel.write(
            pull_frame(pull_header(pull.opaque, code, remark, offsets, flags), 0, [])
        )

    def _visible(self, topic: str, queue_id: int) -> tuple[int, int]:
        shown = self._store.queries
        return (
            shown.min_offset_in_queue(topic, queue_id),
            shown.max_offset_in_queue(topic, queue_id),
        )

    def _flags(self, pull: Pull, *, is_slow: bool) -> PullFlags:
        """Suggests the broker to ask next. `is_slow`: the group reads data that has left this
        broker's memory, so a slave should serve it."""
        group, suggested = pull.group, MASTER_ID
        if self._config.slave_read_enable and is_slow:
            suggested = group.which_broker_when_consume_slowly
        elif self._config.slave_read_enable and self._gate.is_master:
            suggested = group.broker_id
        return PullFlags(suggested, group.group_sys_flag, pull.topic_sys_flag)

    def _waits(self, code: int, result: GetMessageResult, *, waited: bool) -> bool:
        """Whether a pull with this result may wait for the next message. `waited`: it has been
        woken."""
        if code == ResponseCode.PULL_NOT_FOUND:
            return True
        # Nothing matched up to the visible end. As in Java a new pull is answered at once: its
        # client may want to know. A woken one keeps waiting there.
        return (
            waited
            and result.status is GetMessageStatus.NO_MATCHED_MESSAGE
            and result.next_begin_offset >= result.max_offset
        )

    def _code(self, pull: Pull, offset: int, result: GetMessageResult) -> int:
        if result.status in _NOTHING_THERE:
            reaches = self._store.queries.next_offset_in_queue(pull.topic, pull.queue_id)
            # R28: the log has messages there, but none is confirmed yet.
            is_there = 0 <= offset <= reaches
            return ResponseCode.PULL_NOT_FOUND if is_there else ResponseCode.PULL_OFFSET_MOVED
        if result.status is GetMessageStatus.OFFSET_OVERFLOW_BADLY and self._gate.is_acting:
            return ResponseCode.PULL_NOT_FOUND  # the absent master has this offset
        return _CODES[result.status]
