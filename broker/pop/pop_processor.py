"""Requests for popped messages: POP, peek, notification and polling info.

A pop puts a record that names the messages in flight, and they are sent when that record is
confirmed. A request that finds nothing is held (`PopHold`). Origin: PopMessageProcessor,
PeekMessageProcessor, NotificationProcessor, PollingInfoProcessor.
"""

import asyncio
import logging
from collections import deque
from typing import Final

from batonmq.broker.config import BrokerConfig
from batonmq.broker.consume.held_requests import ALL_MAX, PopHold
from batonmq.broker.consume.read_checks import consuming_group, readable_topic
from batonmq.broker.pop.pop_reader import BUDGET, PopReader, QueueSlice, Walk
from batonmq.broker.pop.pop_request import LATE_MS, PopChecks, PopRequest
from batonmq.broker.pop.pop_service import PopService
from batonmq.broker.pop.pop_table import NO_POSITION, Key, Popped, PopRecord, PopTable
from batonmq.broker.request_fields import number, system_error, text
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, BrokerRefusal, CorruptLogError
from batonmq.protocol.pop import (
    ORDER_QUEUE,
    PoppedQueue,
    msg_offset_info,
    order_count_info,
    start_offset_info,
)
from batonmq.remoting.budget import MEMORY_MAX
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.intake import SLICE_BYTES

log = logging.getLogger(__name__)

SLICE: Final = 64
"""Woken or expired requests per turn of the loop; fewer where they get SLICE_BYTES together, or
look at LOOKS_A_TURN queues."""
LOOKS_A_TURN: Final = 4 * BUDGET


class PopProcessor:
    """Runs on masters; the relay passes on requests of other replicas."""

    def __init__(
        self,
        path: WritePath,
        topics: TopicService,
        service: PopService,
        config: BrokerConfig,
        *,
        has_users: bool,
    ) -> None:
        self._path = path
        self._service = service
        self._topics = topics
        self._checks = PopChecks(topics, config)
        self._reader = PopReader(path.store, topics, service, config, has_users=has_users)
        self._hold: PopHold[PopRequest] = PopHold()
        self._walking: deque[tuple[PopRequest, Walk, bool]] = deque()
        self._looked_at = 0  # queues, as `Walk.cost`
        self._next_slice: asyncio.Handle | None = None
        self._next_walks: asyncio.Handle | None = None
        self.messages_total = 0
        self._given_bytes = self._confirmed_bytes = 0
        service.read_again = self.read_again

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.POP_MESSAGE, self.pop)
        processors.register(RequestCode.PEEK_MESSAGE, self.peek)
        processors.register(RequestCode.NOTIFICATION, self.notification)
        processors.register(RequestCode.POLLING_INFO, self.polling_info)

    @property
    def held(self) -> int:
        return len(self._hold)

    # Requests.

    def pop(self, request: RemotingCommand, connection: Connection) -> None:
        """Pops messages (POP_MESSAGE, 200050)."""
        self._path.gate.require_open()
        now_ms, clock_ms = self._service.now_ms(), self._path.clock_ms()
        pop = self._checks.pop(request, connection, now_ms, clock_ms)
        if pop.deadline_ms < clock_ms - LATE_MS:
            self._time_out(pop)
        else:
            self._begin(pop)

    def notification(self, request: RemotingCommand, connection: Connection) -> None:
        """Answers `hasMsg`, at once or when a message arrives (NOTIFICATION, 200054)."""
        self._path.gate.require_open()
        now_ms, clock_ms = self._service.now_ms(), self._path.clock_ms()
        self._begin(self._checks.notification(request, connection, now_ms, clock_ms))

    async def peek(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        """Shows the next messages of the group without popping them (PEEK_MESSAGE, 200052)."""
        self._path.gate.require_open()
        pop = self._checks.peek(request, connection)
        walk = self._reader.walk(pop)
        self._reader.read_more(pop, walk, peek=True)
        while not walk.is_over:
            await asyncio.sleep(0)
            self._reader.read_more(pop, walk, peek=True)
        is_found = bool(walk.parts)
        return RemotingCommand.response_to(
            request,
            ResponseCode.SUCCESS if is_found else ResponseCode.PULL_NOT_FOUND,
            "FOUND" if is_found else "NO_MESSAGE_IN_QUEUE",
            ext=self._fields(pop, walk, []),
            body=b"".join(part.body for part in walk.parts),
        )

    def polling_info(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """How many requests of the group wait for a queue, or for any queue (-1) (POLLING_INFO,
        200055)."""
        self._path.gate.require_open()
        topic, group = text(request, "topic"), text(request, "consumerGroup")
        readable_topic(self._topics, topic)
        consuming_group(self._topics, group, writable=False)  # a question makes no group
        count = self._hold.count_of(topic, group, number(request, "queueId"))
        return RemotingCommand.response_to(request, ext={"pollingNum": str(count)})

    # Reading and holding.

    def _begin(self, pop: PopRequest) -> None:
        # Held, not refused: the client would only ask again, and this ends in a moment.
        if self._may_read():
            self._continue(pop, self._reader.walk(pop), woken=False)
        else:
            self._wait(pop, woken=False)

    def _may_read(self) -> bool:
        """False during a planned switch, while a new master still reads what is in flight, or while
        too much waits for its confirmation."""
        return self._service.is_loaded and not self._path.hold.active and not self._is_full

    @property
    def _is_full(self) -> bool:
        """R58: answers are in memory until their record is confirmed, which may take seconds."""
        return self._given_bytes - self._confirmed_bytes >= MEMORY_MAX

    def _continue(self, pop: PopRequest, walk: Walk, *, woken: bool) -> None:
        """Reads some more queues, then answers, continues in the next turn, or holds the
        request."""
        if pop.channel.closed:
            return
        if not self._may_read():
            self._wait(pop, woken=woken)
            return
        before = walk.cost
        try:
            try:
                found = self._read(pop, walk)
            finally:
                self._looked_at += walk.cost - before
        except CorruptLogError as exc:
            log.error("corrupt_record_not_served file=%s offset=%d", exc.file, exc.offset)
            self._refuse(pop, exc)
        except BatonError as exc:
            self._refuse(pop, exc)
        else:
            if not found and not walk.is_over:
                self._walk_on(pop, walk, woken=woken)
            elif not found:
                self._wait(pop, woken=woken)

    def _walk_on(self, pop: PopRequest, walk: Walk, *, woken: bool) -> None:
        """Continues in a later turn. All walks of one turn look at LOOKS_A_TURN queues together:
        thousands of requests may ask for a topic of thousands of queues (R58)."""
        if len(self._walking) >= ALL_MAX:
            self._refuse(pop, BrokerRefusal(ResponseCode.POLLING_FULL, "too many POPs in all"))
            return
        self._walking.append((pop, walk, woken))
        if self._next_walks is None:
            self._next_walks = asyncio.get_running_loop().call_soon(self._walk_some)

    def _walk_some(self) -> None:
        self._next_walks, end = None, self._looked_at + LOOKS_A_TURN
        try:
            for _ in range(min(len(self._walking), BUDGET)):
                pop, walk, woken = self._walking.popleft()
                self._continue(pop, walk, woken=woken)
                if self._looked_at >= end:
                    break
        finally:
            if self._walking and self._next_walks is None:
                self._next_walks = asyncio.get_running_loop().call_soon(self._walk_some)

    def _read(self, pop: PopRequest, walk: Walk) -> bool:
        """Returns whether the request is answered, or will be once its record is confirmed."""
        if pop.is_notification:
            if not self._reader.has_more(pop, walk):
                return False
            self._notify(pop, has_message=True)
            return True
        if len(self._service.table) >= self._service.in_flight_max:
            raise BrokerRefusal(
                ResponseCode.POLLING_FULL,
                f"{len(self._service.table)} messages are in flight, at most"
                f" {self._service.in_flight_max} are allowed (popInFlightMax): acknowledge some",
            )
        self._reader.read_more(pop, walk)
        if not walk.parts:
            return False
        self._give(pop, walk)
        return True

    def _wait(self, pop: PopRequest, *, woken: bool) -> None:
        if pop.deadline_ms <= self._path.clock_ms():
            self._time_out(pop)
        elif woken:
            self._hold.hold_again(pop)
        elif self._hold.may_wait(pop):
            self._hold.hold(pop)
        elif pop.is_notification:
            self._notify(pop, has_message=False, full=True)
        else:
            what = f"too many POP requests wait for topic {pop.topic} or in all"
            self._refuse(pop, BrokerRefusal(ResponseCode.POLLING_FULL, what))

    def _give(self, pop: PopRequest, walk: Walk) -> None:
        """Puts the record and gives the messages. Raises PutRefused; then no message is in
        flight."""
        record = PopRecord(popped=[_popped(pop, part, walk.pop_time) for part in walk.parts])
        # First: if this raises, no message is in flight and no position has moved.
        end = self._service.put(record)
        answer = RemotingCommand.response_to(
            pop.request,
            remark="FOUND",
            ext=self._fields(pop, walk, _counts(pop, walk, self._service.table)),
            body=b"".join(part.body for part in walk.parts),
        )
        self.messages_total += walk.count
        self._given_bytes += walk.size
        for part in walk.parts:
            group, topic, _ = part.key
            self._path.stats.got(topic, group, len(part.offsets), len(part.body))

        def outcome(code: int, remark: str) -> None:
            was_full = self._is_full
            self._confirmed_bytes += walk.size
            if was_full and not self._is_full:
                self.read_again(None)
            if code:
                self._refuse(pop, BrokerRefusal(code, f"the pop is not confirmed: {remark}"))
            else:
                pop.channel.reply(pop.request, answer)

        # An orderly group continues only when they are acknowledged.
        moves = [] if pop.order else [(part.key, part.next_offset) for part in walk.parts]
        # R30: if a failover cut the record, the new master would give them to a second consumer.
        self._service.when_confirmed(end, moves, outcome)
        if walk.rest:
            self._hold.more(pop.topic, pop.group)
            self._run_soon()

    def _fields(self, pop: PopRequest, walk: Walk, counts: list[list[int]]) -> dict[str, str]:
        queues = [PoppedQueue(part.flag, part.key[2], part.offsets) for part in walk.parts]
        fields = {
            "popTime": str(walk.pop_time),
            "invisibleTime": str(pop.invisible_ms),
            "reviveQid": str(ORDER_QUEUE if pop.order else 0),
            "restNum": str(walk.rest),
            "startOffsetInfo": start_offset_info(queues),
            "msgOffsetInfo": msg_offset_info(queues),
        }
        if counts:
            fields["orderCountInfo"] = order_count_info(
                queue._replace(counts=each) for queue, each in zip(queues, counts, strict=True)
            )
        return fields

    def _time_out(self, pop: PopRequest) -> None:
        if pop.is_notification:
            self._notify(pop, has_message=False)
        else:
            what = "no message arrived in pollTime"
            self._refuse(pop, BrokerRefusal(ResponseCode.POLLING_TIMEOUT, what))

    def _notify(self, pop: PopRequest, *, has_message: bool, full: bool = False) -> None:
        fields = {"hasMsg": str(has_message).lower(), "pollingFull": str(full).lower()}
        pop.channel.reply(pop.request, RemotingCommand.response_to(pop.request, ext=fields))

    def _refuse(self, pop: PopRequest, error: BatonError) -> None:
        remark = error.remark if isinstance(error, BrokerRefusal) else str(error)
        code = error.code if isinstance(error, BrokerRefusal) else error.response_code
        pop.channel.reply(pop.request, RemotingCommand.refusal_of(pop.request, code, remark))

    # What wakes held requests.

    def arrived(self, topic: str, queue_id: int, _max_offset: int) -> None:
        """The store has new messages in a queue."""
        if len(self._hold) and self._hold.arrived(topic, queue_id):
            self._run_soon()

    def read_again(self, key: Key | None) -> None:
        """A queue (None: any) may be popped again, or its topic was deleted."""
        if key is None:
            self._hold.all_ready()
        else:
            self._hold.arrived(key[1], key[2])
        self._run_soon()

    def _run_soon(self) -> None:
        if self._next_slice is None and len(self._hold):
            self._next_slice = asyncio.get_running_loop().call_soon(self._run_slice)

    def _run_slice(self) -> None:
        self._next_slice = None
        end, looks_end = self._given_bytes + SLICE_BYTES, self._looked_at + LOOKS_A_TURN
        # R58: one message may wake thousands of requests, and each answer is a copy.
        for _ in range(SLICE):
            one = self._hold.next_ready()
            if one is None:
                return
            self._again(one)
            if self._given_bytes >= end or self._looked_at >= looks_end:
                break
        self._run_soon()

    def _again(self, pop: PopRequest) -> None:
        if self._topics.get(pop.topic) is None:
            what = f"topic {pop.topic} was deleted"
            self._refuse(pop, BrokerRefusal(ResponseCode.TOPIC_NOT_EXIST, what))
            return
        try:
            self._continue(pop, self._reader.walk(pop), woken=True)
        except Exception as error:  # of one request: the others of this slice must be answered
            log.exception("pop_failed topic=%s group=%s", pop.topic, pop.group)
            what = f"this request could not be answered: {error!r}"
            self._refuse(pop, system_error(what))

    def tick(self, now_ms: int) -> bool:
        """Answers a slice of the expired requests; returns whether there may be more."""
        end, looks_end = self._given_bytes + SLICE_BYTES, self._looked_at + LOOKS_A_TURN
        for one in self._hold.expired(now_ms, SLICE):
            # As in Java they look once more: what blocks others may be of their own attempt. A
            # client long past its deadline waits no longer: it would not see the messages.
            if one.deadline_ms < now_ms - LATE_MS:
                self._time_out(one)
            else:
                self._again(one)
            if self._given_bytes >= end or self._looked_at >= looks_end:
                break
        return self._hold.is_late(now_ms)

    def disconnected(self, connection: Connection) -> None:
        self._hold.drop_owner(connection)

    def role_changed(self, before: PopHold[PopRequest] | None = None) -> None:
        """Refuses all held requests, a slice per turn; `before` holds the rest."""
        if before is None:
            before, self._hold = self._hold, PopHold()
        what = "the role of this broker changed: ask the name server for the master"
        for one in before.take(SLICE):
            self._refuse(one, BrokerRefusal(ResponseCode.SYSTEM_BUSY, what))
        if len(before):
            asyncio.get_running_loop().call_soon(self.role_changed, before)


def _popped(pop: PopRequest, part: QueueSlice, pop_time: int) -> Popped:
    return Popped(
        key=part.key,
        pop_time=pop_time,
        due=pop_time + pop.invisible_ms,
        offsets=part.offsets,
        last_phy=part.last_phy,
        next=NO_POSITION if pop.order else part.next_offset,
        order=pop.order,
        attempt=pop.attempt,
    )


def _counts(pop: PopRequest, walk: Walk, table: PopTable) -> list[list[int]]:
    """How often each message of an orderly POP has been delivered."""
    orders = [table.order_of(part.key) for part in walk.parts if pop.order]
    return [
        [order.counts.get(offset, 0) for offset in part.offsets]
        for part, order in zip(walk.parts, orders, strict=False)
        if order is not None
    ]
