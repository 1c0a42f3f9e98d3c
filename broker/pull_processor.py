"""Pull (11): reading a queue, waiting for its next message, and the tag filter.

Reads end at confirmOffset (SAFETY G4), so nothing that a consumer saw is ever taken back. A pull
that finds nothing is held; the dispatch of a message wakes it in the same loop turn. A new master,
whose confirmOffset lags behind its log, holds a pull between its visible end and its log end
instead of calling the offset wrong (R28).
Origin: PullMessageProcessor, PullRequestHoldService in Java.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from batonmq.broker.consumer_manager import ConsumerManager
from batonmq.broker.offset_clamp import commit_refusal, where_to_go_on
from batonmq.broker.pull_hold import Held, PullHold
from batonmq.broker.relay import Relay
from batonmq.broker.replies import pull_frame, pull_header, refusal, refusal_of
from batonmq.broker.topics import TopicService
from batonmq.broker.write_path import WritePath
from batonmq.protocol.bodies import PERM_READ
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, BrokerRefusal, CorruptLogError
from batonmq.protocol.role_view import Role
from batonmq.protocol.sysflag import (
    PULL_CLASS_FILTER,
    PULL_COMMIT_OFFSET,
    PULL_SUBSCRIPTION,
    PULL_SUSPEND,
)
from batonmq.protocol.tags import tags_code
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.headers import PullFields, PullFrame, decode_pull
from batonmq.store.consumer_offset import ConsumerOffsetManager
from batonmq.store.reader import GetMessageResult, GetMessageStatus

log = logging.getLogger(__name__)

SHORT_POLLING_MS: Final = 1000
SWEEP_MS: Final = 5000
MAX_REPLY_BYTES: Final = 15 * 1024 * 1024

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


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """A checked pull. `wanted` are tag hashes, None for all. `ours`: this project's client asks,
    which follows the master by itself."""

    channel: Connection
    opaque: int
    group: str
    topic: str
    queue_id: int
    max_num: int
    max_bytes: int
    wanted: frozenset[int] | None
    ours: bool


class PullProcessor:
    """The raw handler of 11, and the holder of pulls that wait. Times are ms, monotonic."""

    def __init__(
        self,
        path: WritePath,
        topics: TopicService,
        clients: ConsumerManager,
        offsets: ConsumerOffsetManager,
        *,
        long_polling: bool,
        damaged: Callable[[str], None],
        relay: Relay,
    ) -> None:
        """`damaged` is called with the fault when a reader meets a bad record of the log."""
        self._store = path.store
        self._topics = topics
        self._clients = clients
        self._offsets = offsets
        self._gate = path.gate
        self._clock_ms = path.clock_ms
        self._long_polling = long_polling
        self._damaged = damaged
        self._relay = relay
        self._hold: PullHold[Pull] = PullHold()
        self._next_sweep_ms = 0
        self.messages_total = 0

    def register(self, processors: Processors) -> None:
        processors.register_raw(RequestCode.PULL_MESSAGE, self.pull)

    @property
    def held(self) -> int:
        """How many pulls wait right now."""
        return len(self._hold)

    def pull(self, channel: Connection, kind: int, header: bytes, body: bytes) -> None:
        """11."""
        request = decode_pull(kind, header)
        if not self._gate.is_master:
            self._pull_elsewhere(request, channel, kind, header, body)
            return
        try:
            pull = self._checked(channel, request)
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
        return ext.suspend_timeout_millis if self._long_polling else SHORT_POLLING_MS

    def _pull_elsewhere(
        self, request: PullFrame, channel: Connection, kind: int, header: bytes, body: bytes
    ) -> None:
        """On a member that is not master. A slave gives what it shows (R28), and lets a pull at the
        end of its queue wait; the rest only the master can judge. Its progress goes with 15."""
        if self._gate.role is Role.SLAVE and self._relay.enabled and not request.is_ours:
            try:
                pull = self._checked(channel, request)
                suspend_ms = self._suspend_ms(request.ext)
                deadline_ms = self._clock_ms() + suspend_ms
                at = request.ext.queue_offset
                if self._answers_as_slave(pull, at, deadline_ms, suspend_ms > 0):
                    return
            except BatonError as exc:
                log.debug("pull_passed_on topic=%s why=%s", request.ext.topic, exc)
            taken = self._relay.take_raw(channel, self.pull, kind, header, body)
        else:
            taken = self._relay.take_raw(channel, self.pull, kind, header, body, for_any_role=True)
        if not taken:
            channel.write(
                refusal(
                    request.opaque,
                    ResponseCode.SYSTEM_BUSY,
                    "this broker is not the master and serves no pulls: ask the name server",
                )
            )

    def _answers_as_slave(self, pull: Pull, at: int, deadline_ms: int, may_hold: bool) -> bool:
        """Whether this replica's queue alone answers a pull at offset `at`."""
        shown = self._store.queries
        begins = shown.min_offset_in_queue(pull.topic, pull.queue_id)
        ends = shown.max_offset_in_queue(pull.topic, pull.queue_id)
        if not begins <= at <= ends or (at == ends and not may_hold):
            return False
        self._answer_or_hold(pull, at, deadline_ms, may_hold)
        return True

    def arrived(self, topic: str, queue_id: int, max_offset: int) -> None:
        """Dispatch made messages of a queue visible: the pulls that wait for them are answered."""
        if not len(self._hold):
            return
        for held in self._hold.arrived(topic, queue_id, max_offset):
            self._answer_or_hold(held.pull, held.offset, held.deadline_ms, True)

    def tick(self, now_ms: int) -> None:
        """Answers expired pulls; every 5 s checks all queues, as a safeguard."""
        for held in self._hold.expired(now_ms):
            self._answer_or_hold(held.pull, held.offset, held.deadline_ms, False)
        if now_ms >= self._next_sweep_ms:
            self._next_sweep_ms = now_ms + SWEEP_MS
            for topic, queue_id in self._hold.queues():
                self.arrived(
                    topic, queue_id, self._store.queries.max_offset_in_queue(topic, queue_id)
                )

    def disconnected(self, channel: Connection) -> None:
        self._hold.drop_owner(channel)

    def role_changed(self) -> None:
        """Those who follow the master by themselves are told at once; a slave serves the others."""
        for held in self._hold.take_all():
            if self._relay.enabled and not held.pull.ours:
                self._hold.hold(held)
                continue
            held.pull.channel.write(
                refusal(
                    held.pull.opaque,
                    ResponseCode.SYSTEM_BUSY,
                    "the role of this broker changed: ask the name server for the master",
                )
            )

    def _checked(self, channel: Connection, request: PullFrame) -> Pull:
        ext = request.ext
        self._check_group(ext.consumer_group)
        config = self._topics.get(ext.topic)
        if config is None:
            raise BrokerRefusal(
                ResponseCode.TOPIC_NOT_EXIST, f"topic {ext.topic} does not exist on this broker"
            )
        if not config.perm & PERM_READ:
            raise BrokerRefusal(
                ResponseCode.NO_PERMISSION, f"topic {ext.topic} may not be read: perm {config.perm}"
            )
        if not 0 <= ext.queue_id < config.read_queue_nums:
            raise BrokerRefusal(
                ResponseCode.SYSTEM_ERROR,
                f"queueId {ext.queue_id} of topic {ext.topic}:"
                f" it has {config.read_queue_nums} queues",
            )
        if ext.sys_flag & PULL_CLASS_FILTER:
            raise BrokerRefusal(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED, "class filters are not supported"
            )
        return Pull(
            channel,
            request.opaque,
            ext.consumer_group,
            ext.topic,
            ext.queue_id,
            max(1, ext.max_msg_nums),
            min(ext.max_msg_bytes or MAX_REPLY_BYTES, MAX_REPLY_BYTES),
            self._wanted(ext),
            request.is_ours,
        )

    def _commit(self, ext: PullFields) -> None:
        """The pull's progress, unless it would not last: the client commits it again."""
        queue = (ext.topic, ext.queue_id)
        if commit_refusal(self._gate, self._store, *queue, ext.commit_offset) is None:
            self._offsets.commit(ext.consumer_group, *queue, ext.commit_offset)

    def _check_group(self, group: str) -> None:
        config = self._topics.group(group, writable=self._gate.refusal is None)
        if not config.consume_enable:
            raise BrokerRefusal(
                ResponseCode.NO_PERMISSION, f"group {group} may not consume: consumeEnable is false"
            )

    def _wanted(self, ext: PullFields) -> frozenset[int] | None:
        if ext.sys_flag & PULL_SUBSCRIPTION:
            kind = ext.expression_type or "TAG"
            if kind != "TAG":
                raise BrokerRefusal(
                    ResponseCode.SUBSCRIPTION_PARSE_FAILED,
                    f"expression type {kind} is not supported, TAG is",
                )
            return wanted_tags(ext.subscription or "*")
        subscription = self._clients.subscription(ext.consumer_group, ext.topic)
        if subscription is None:
            raise BrokerRefusal(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"group {ext.consumer_group} has no subscription of {ext.topic} here",
            )
        if subscription.sub_version < ext.sub_version:
            raise BrokerRefusal(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the subscription of {ext.topic} known here is older than the pull's",
            )
        return wanted_tags(subscription.sub_string or "*")

    def _answer_or_hold(self, pull: Pull, offset: int, deadline_ms: int, may_hold: bool) -> None:
        if pull.channel.closed:
            return
        try:
            result = self._store.queries.get_message(
                pull.topic, pull.queue_id, offset, pull.max_num, pull.max_bytes, pull.wanted
            )
        except CorruptLogError as exc:
            log.error("corrupt_record_not_served file=%s offset=%d", exc.file, exc.offset)
            if not self._store.trust.reason and (fault := self._store.trust.fault_at(exc.offset)):
                self._damaged(fault)  # a replica that has the whole record should lead (G8)
            pull.channel.write(refusal(pull.opaque, ResponseCode.SYSTEM_ERROR, str(exc)))
            return
        code = self._code(pull, offset, result)
        if code == ResponseCode.SUCCESS:
            self.messages_total += result.message_count
        elif may_hold and self._waits(code, result):
            waits_from = (
                result.next_begin_offset if code == ResponseCode.PULL_RETRY_IMMEDIATELY else offset
            )
            self._hold.hold(
                Held(pull.topic, pull.queue_id, waits_from, deadline_ms, pull.channel, pull)
            )
            return
        next_offset = result.next_begin_offset
        if code == ResponseCode.PULL_NOT_FOUND:
            next_offset = offset
        elif code == ResponseCode.PULL_OFFSET_MOVED and offset > next_offset:
            committed = self._offsets.query(pull.group, pull.topic, pull.queue_id)
            next_offset = where_to_go_on(self._gate, next_offset, committed)
        header = pull_header(
            pull.opaque,
            code,
            result.status.name,
            next_offset,
            result.min_offset,
            result.max_offset,
        )
        pull.channel.write(pull_frame(header, result.size, result.parts))

    def _waits(self, code: int, result: GetMessageResult) -> bool:
        """Whether a pull with this outcome may wait for the next message."""
        if code == ResponseCode.PULL_NOT_FOUND:
            return True
        # Nothing matched up to the visible end: waiting from there costs no round trips.
        return (
            result.status is GetMessageStatus.NO_MATCHED_MESSAGE
            and result.next_begin_offset >= result.max_offset
        )

    def _code(self, pull: Pull, offset: int, result: GetMessageResult) -> int:
        if result.status in _NOTHING_THERE:
            reaches = self._store.queries.next_offset_in_queue(pull.topic, pull.queue_id)
            if offset <= reaches:
                return ResponseCode.PULL_NOT_FOUND
            return ResponseCode.PULL_OFFSET_MOVED
        if (
            result.status is GetMessageStatus.OFFSET_OVERFLOW_BADLY
            and offset <= self._store.queries.next_offset_in_queue(pull.topic, pull.queue_id)
        ):
            return ResponseCode.PULL_NOT_FOUND  # R28: the log reaches there, confirmation lags
        return _CODES[result.status]


def wanted_tags(expression: str) -> frozenset[int] | None:
    """Tag hashes of `a || b`; None for `*` or nothing, which is everything."""
    tags = [tag.strip() for tag in expression.split("||")]
    if not expression.strip() or "*" in tags:
        return None
    return frozenset(tags_code(tag) for tag in tags if tag)
