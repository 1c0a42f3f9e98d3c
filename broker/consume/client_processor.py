"""Clients: heartbeats, the members of a group, the check of a subscription, and the notice to
members that their group changed. Origin: ClientManageProcessor, ConsumerManageProcessor and
Broker2Client in Java.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter
from typing import Final, cast

from msgspec.structs import replace

from batonmq.broker.config import BrokerConfig
from batonmq.broker.consume.consumer_manager import (
    PIECE,
    SIGHTING_MS,
    ConsumerManager,
    ConsumerSightings,
    GroupChanged,
)
from batonmq.broker.filter.consumer_filter import ConsumerFilterManager
from batonmq.broker.filter.subscription_filter import filter_of, is_known, prepared
from batonmq.broker.request_fields import invalid, system_error, text
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import (
    SQL92,
    TAG,
    CheckClientRequestBody,
    ConsumerData,
    ConsumerSightingsBody,
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
    SubscriptionData,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, ConnectError, ResponseError
from batonmq.protocol.sysflag import UNIT_SUB_TOPIC
from batonmq.protocol.topic_name import CLIENT_ID_LENGTH_MAX, is_file_name, retry_topic
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors, Response
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.turns import in_turns, run_in_turns

log = logging.getLogger(__name__)

_NOTICES_AT_ONCE: Final = 128
"""Notices that are sent in one turn (R58)."""

_GROUPS_AT_ONCE: Final = 16
"""Groups of one heartbeat that are handled in one turn: each may put records that create the group
and its retry topic."""

_SUBSCRIPTIONS_AT_ONCE: Final = 256
"""Subscriptions of one heartbeat that are handled in one turn."""

_NAMED_MAX: Final = 8
"""The reply to a heartbeat and the log name so many refused entries at most."""

ASK_MS: Final = 300
"""A replica that does not say in time who is in a group is left out: its client waits meanwhile."""
PIECES_A_TURN: Final = 20
"""Groups whose members a replica reports in one turn: many have a few only."""
COPY_MS: Final = 3000
"""How long a replica may take to tell of all groups."""
COPY_AGAIN_MS: Final = 1000
OWN_NOTICE_MS: Final = 1000
"""How much later a client hears of the change that its own heartbeat made. A stock consumer that
starts sends this heartbeat to one broker after the other. At an earlier notice it would rebalance
with a newer subscription, which it cannot send while the first heartbeat runs; its pulls would be
refused (SUBSCRIPTION_NOT_LATEST) until the next heartbeat, 30 s later."""


class ClientProcessor:
    """Keeps the ConsumerManager and notifies the members of a group that changed."""

    def __init__(
        self,
        clients: ConsumerManager,
        topics: TopicService,
        path: WritePath,
        filters: ConsumerFilterManager,
        sightings: ConsumerSightings,
        config: BrokerConfig,
    ) -> None:
        self._filters = filters
        self._sightings = sightings
        self._config = config
        self._clients = clients
        self._topics = topics
        self._gate = path.gate
        self._clock_ms = path.clock_ms
        # Group -> members that still need the notice of its last change.
        self._notices: dict[str, list[Hashable]] = {}
        # Due time, group, and the sender of the heartbeat that changed it.
        self._own_notices: deque[tuple[int, str, Connection]] = deque()
        # For each heartbeat that is handled in slices: the groups that its client has left since it
        # began.
        self._left_since: dict[Connection, list[set[tuple[str, str]]]] = {}

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.HEART_BEAT, self.heartbeat)
        processors.register(RequestCode.UNREGISTER_CLIENT, self.unregister)
        processors.register(RequestCode.CHECK_CLIENT_CONFIG, self.check_config)

    def heartbeat(
        self, request: RemotingCommand, channel: Connection
    ) -> RemotingCommand | Awaitable[RemotingCommand]:
        """Notes the client's groups and subscriptions (HEART_BEAT, 34). A master creates missing
        groups and retry topics; groups that it cannot create are skipped and named in the
        answer."""
        data = HeartbeatData.decode_request(request.body)
        if not data.client_id:
            raise invalid("heartbeat without a clientID")
        if len(data.client_id) > CLIENT_ID_LENGTH_MAX:
            raise invalid(
                f"clientID: {len(data.client_id)} characters, allowed are {CLIENT_ID_LENGTH_MAX}"
            )
        groups = max(len(data.consumer_data_set), len(data.producer_data_set))
        if groups:
            # Members keep their connection when there are too many connections (R58).
            channel.keep()
        if groups > _GROUPS_AT_ONCE or _may_have_filters(data):
            return self._heard_in_slices(request, channel, data)
        refused: list[str] = []
        is_changed = self._heard(request, channel, data, refused)
        return _heartbeat_reply(request, is_changed=is_changed, refused=refused)

    async def _heard_in_slices(
        self, request: RemotingCommand, channel: Connection, data: HeartbeatData
    ) -> RemotingCommand:
        """`heartbeat` for a client in many groups."""
        left: set[tuple[str, str]] = set()
        self._left_since.setdefault(channel, []).append(left)
        consumers, producers = data.consumer_data_set, data.producer_data_set
        is_changed = False
        refused: list[str] = []
        try:
            async for each in in_turns(_subscriptions(data)):
                if _is_new_filter(each):
                    # Compiling a long filter here would block the loop, so a thread does it (R58).
                    await prepared(each.sub_string)
            for begin in range(0, max(len(consumers), len(producers)), _GROUPS_AT_ONCE):
                if channel.closed:
                    break  # it has left all groups
                end = begin + _GROUPS_AT_ONCE
                some = replace(
                    data,
                    consumer_data_set=[
                        c for c in consumers[begin:end] if ("consumer", c.group_name) not in left
                    ],
                    producer_data_set=[
                        p for p in producers[begin:end] if ("producer", p.group_name) not in left
                    ],
                )
                is_changed |= self._heard(request, channel, some, refused)
                await asyncio.sleep(0)
        finally:
            others = [other for other in self._left_since.pop(channel) if other is not left]
            # Other heartbeats of this connection are still handled in slices.
            if others:
                self._left_since[channel] = others
        return _heartbeat_reply(request, is_changed=is_changed, refused=refused)

    def _heard(
        self, request: RemotingCommand, channel: Connection, data: HeartbeatData, refused: list[str]
    ) -> bool:
        """Returns whether a group changed. Appends to `refused` why entries were skipped."""
        # A slave writes no records; it only notes who is connected here.
        consumers = [
            c
            for c in data.consumer_data_set
            if _is_short(
                f"{c.group_name}{c.consume_type}{c.message_model}{c.consume_from_where}", refused
            )
            and (data.without_sub or self._has_space(c, refused))
            and (self._gate.refusal is not None or self._exists(c, refused))
        ]
        producers = [p for p in data.producer_data_set if _is_short(p.group_name, refused)]
        data = replace(data, consumer_data_set=consumers, producer_data_set=producers)
        changes = self._clients.heartbeat(
            data, channel, request.language, request.version, self._clock_ms()
        )
        if not data.without_sub:
            for consumer in data.consumer_data_set:
                self._filters.register(consumer.group_name, consumer.subscription_data_set)
        self.notify(changes, sender=channel)
        return bool(changes)

    def _exists(self, consumer: ConsumerData, refused: list[str]) -> bool:
        """Creates a consumer's group and its retry topic if they are missing; returns whether they
        exist."""
        name, unit = consumer.group_name, UNIT_SUB_TOPIC if consumer.unit_mode else 0
        try:
            group, retry = self._topics.group(name, writable=True), retry_topic(name)
            # A legal group name may be too long for a retry topic: such a group consumes without
            # send-back.
            if self._topics.get(retry) is None and is_file_name(retry):
                self._topics.of_group(retry, max(1, group.retry_queue_nums), unit)
        except BatonError as error:
            _note_refused(name, str(error), refused)
            return False
        return True

    def _has_space(self, data: ConsumerData, refused: list[str]) -> bool:
        if self._clients.has_space(data):
            return True
        reason = "the subscriptions of all groups take as much memory as they may"
        _note_refused(data.group_name, reason, refused)
        return False

    def unregister(self, request: RemotingCommand, channel: Connection) -> RemotingCommand:
        """Removes the client from the groups that it names (UNREGISTER_CLIENT, 35)."""
        producer, consumer = request.ext.get("producerGroup"), request.ext.get("consumerGroup")
        changes = self._clients.unregister(channel, producer, consumer)
        for left in self._left_since.get(channel, ()):
            # A later slice of its heartbeat must not add it again.
            left.update((("producer", producer or ""), ("consumer", consumer or "")))
        now_ms = self._clock_ms()
        for change in changes:
            self._sightings.left(change.group, change.left, now_ms)
        self.notify(changes)
        return RemotingCommand.response_to(request)

    async def check_config(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Checks a subscription when a consumer starts (CHECK_CLIENT_CONFIG, 46). Refuses an
        expression that does not compile with SUBSCRIPTION_PARSE_FAILED (23), SQL92 where it is
        disabled with SYSTEM_ERROR (1)."""
        asked = CheckClientRequestBody.decode_request(request.body).subscription_data
        kind = asked.expression_type or TAG
        sql92 = self._config.enable_property_filter
        if sql92 and kind == SQL92:
            await prepared(asked.sub_string)
        filter_of(kind, asked.sub_string, sql92=sql92)
        return RemotingCommand.response_to(request)

    def disconnected(self, channel: Connection) -> None:
        """Removes the client of a closed connection from all its groups. It may be moving to
        another replica, so replicas that ask still get the time of its last heartbeat."""

        def leave_some() -> bool:
            changes = self._clients.channel_closed(channel)
            now_ms = self._clock_ms()
            for change in changes:
                self._sightings.closed(change.group, change.left, change.heard_ms, now_ms)
            self.notify(changes)
            return self._clients.is_known(channel)

        run_in_turns(leave_some)

    def expire(self, now_ms: int) -> bool:
        """Drops a slice of the clients that went silent; returns whether there may be more."""
        changes = self._clients.expire(now_ms)
        self.notify(changes)
        return bool(changes)

    def notify(self, changes: list[GroupChanged], sender: Connection | None = None) -> None:
        """Sends each member of a changed group a notice (NOTIFY_CONSUMER_IDS_CHANGED, 40), so that
        it rebalances now. Large or many groups get one notice at the next tick for all changes
        until then. The `sender` of the heartbeat that caused the change gets its notice
        OWN_NOTICE_MS later."""
        waiting: dict[str, tuple[Hashable, ...]] = {}
        left = _NOTICES_AT_ONCE  # R58: a heartbeat may change many groups
        for change in changes:
            # The same heartbeat may have joined the group again, with filters.
            if not change.channels and change.group not in self._clients.groups:
                self._filters.unregister(change.group)
            config = self._topics.groups.get(change.group)
            if config is not None and not config.notify_consumer_ids_changed_enable:
                continue
            if len(change.channels) > _NOTICES_AT_ONCE:
                waiting[change.group] = change.channels
                continue
            others = tuple(channel for channel in change.channels if channel is not sender)
            if sender is not None and len(others) < len(change.channels):
                due_ms = self._clock_ms() + OWN_NOTICE_MS
                self._own_notices.append((due_ms, change.group, sender))
            if len(others) > left or change.group in self._notices:
                waiting[change.group] = others
            else:
                left -= len(others)
                _send_notices(change.group, others)
        for group, channels in waiting.items():
            self._notices[group] = list(channels)

    def tick(self) -> bool:
        """Sends a slice of the pending notices; returns whether there are more to send now."""
        own = self._own_notices
        for _ in range(_NOTICES_AT_ONCE):
            if not own or own[0][0] > self._clock_ms():
                break
            _, group, sender = own.popleft()
            _send_notices(group, (sender,))
        for group, members in self._notices.items():
            _send_notices(group, members[-_NOTICES_AT_ONCE:])
            del members[-_NOTICES_AT_ONCE:]
            if not members:
                del self._notices[group]
            break
        return bool(self._notices) or bool(own and own[0][0] <= self._clock_ms())


def _is_short(text: str, refused: list[str]) -> bool:
    """R58: whether the text may be kept while its client is in a group."""
    if len(text) <= CLIENT_ID_LENGTH_MAX:
        return True
    _note_refused(text, f"{len(text)} characters, allowed are {CLIENT_ID_LENGTH_MAX}", refused)
    return False


def _note_refused(group: str, reason: str, refused: list[str]) -> None:
    if len(refused) < _NAMED_MAX:
        log.warning("heartbeat_entry_refused group=%r reason=%s", group[:64], reason)
        refused.append(f"consumer group {group[:64]!r}: {reason}")


def _subscriptions(data: HeartbeatData) -> Iterator[SubscriptionData]:
    if data.without_sub:
        return iter(())
    of_groups = map(attrgetter("subscription_data_set"), data.consumer_data_set)
    return chain.from_iterable(of_groups)


def _is_new_filter(subscription: SubscriptionData) -> bool:
    """Whether the subscription has an SQL92 expression that is not compiled yet."""
    return subscription.expression_type not in (TAG, "") and not is_known(subscription.sub_string)


def _may_have_filters(data: HeartbeatData) -> bool:
    """True also if there are too many subscriptions to check in this turn."""
    first = list(islice(_subscriptions(data), _SUBSCRIPTIONS_AT_ONCE + 1))
    return len(first) > _SUBSCRIPTIONS_AT_ONCE or any(map(_is_new_filter, first))


def _heartbeat_reply(
    request: RemotingCommand, *, is_changed: bool, refused: list[str]
) -> RemotingCommand:
    ext = {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": str(is_changed).lower()}
    remark = f"left out: {'; '.join(refused)}" if refused else ""
    return RemotingCommand.response_to(request, remark=remark, ext=ext)


def _send_notices(group: str, channels: Iterable[Hashable]) -> None:
    notice = RemotingCommand.request(
        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group}
    )
    for channel in channels:
        connection = cast(Connection, channel)
        if not connection.closed:
            connection.oneway(notice)


@dataclass(slots=True)
class _Questions:
    """Queries about one group: how many were begun, the result of the last one, and how many
    requests wait for them."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: int = 0
    waiting: int = 0
    client_ids: list[str] = field(default_factory=list)


class ConsumerLists:
    """Lists the members of groups, also those that only other replicas have seen. `others` returns
    the addresses of these replicas.

    A stock client sends its next heartbeat up to 30 s after this broker started or became master.
    With a list that is too short a queue gets two readers, and a client that is missing from it
    stops all its queues. So for SIGHTING_MS the broker asks the other replicas
    (BATON_GET_CONSUMER_SIGHTINGS, 60003) before it lists a group. They answer from their own
    knowledge only, so queries never cascade.
    """

    def __init__(
        self,
        clients: ConsumerManager,
        sightings: ConsumerSightings,
        client: RemotingClient,
        others: Callable[[], list[str]],
        clock_ms: Callable[[], int],
    ) -> None:
        self._clients = clients
        self._sightings = sightings
        self._client = client
        self._others = others
        self._clock_ms = clock_ms
        self._unsure_until_ms = 0
        self._copies_until_ms = 0
        self._questions: dict[str, _Questions] = {}
        # Address -> when to ask this replica for all groups again; None once it has answered.
        self._copy_at_ms: dict[str, int | None] = {}
        self._copies: set[asyncio.Task[None]] = set()
        # Unreachable addresses, so that not each group dials them again.
        self._ask_from_ms: dict[str, int] = {}

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.GET_CONSUMER_LIST_BY_GROUP, self.consumer_list)
        sightings = RequestCode.BATON_GET_CONSUMER_SIGHTINGS
        processors.register(sightings, self.answer_sightings, large=True)

    def started(self) -> None:
        """The broker has started: no consumer has sent it a heartbeat yet."""
        # Each replica is also asked once for all that it knows: it may restart before the next
        # heartbeats, too.
        self._unsure_until_ms = self._copies_until_ms = self._clock_ms() + SIGHTING_MS

    def became_master(self) -> None:
        """The broker became master: only the previous master may know some consumers."""
        self._unsure_until_ms = self._clock_ms() + SIGHTING_MS
        self._sightings.became_master()

    def role_left(self) -> None:
        self._sightings.role_left(self._clock_ms())

    async def consumer_list(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The members of a group, for a rebalance (GET_CONSUMER_LIST_BY_GROUP, 38). Raises
        BrokerRefusal if there are none."""
        group = text(request, "consumerGroup")
        ids = await self.client_ids(group)
        if not ids:
            raise system_error(f"no consumer of group {group} is connected here")
        body = GetConsumerListByGroupResponseBody(consumer_id_list=ids).encode()
        return RemotingCommand.response_to(request, body=body)

    async def client_ids(self, group: str) -> list[str]:
        """The members of a group, for the assignment of its queues."""
        if self._clock_ms() < self._unsure_until_ms:
            return await self._asked(group)
        return self._clients.client_ids(group)

    async def answer_sightings(self, request: RemotingCommand, _: Connection) -> Response:
        """What this replica knows of the members of one group or of all
        (BATON_GET_CONSUMER_SIGHTINGS, 60003), as one JSON object per line."""
        lines = []
        sent = 0
        pieces = self._sightings.pieces(request.ext.get("consumerGroup", ""), self._clock_ms())
        for piece in pieces:
            lines.append(piece.encode())
            sent += len(piece.seen) + len(piece.left)
            if sent >= PIECE or len(lines) % PIECES_A_TURN == 0:
                sent = 0
                await asyncio.sleep(0)
        return RemotingCommand.response_to(request, body=b"\n".join(lines))

    def tick(self, now_ms: int) -> bool:
        """Asks replicas that have not answered yet, and drops old sightings; returns whether there
        may be more to drop."""
        if now_ms < self._copies_until_ms:
            for address in self._others():
                again_ms = self._copy_at_ms.get(address, 0)
                if again_ms is not None and again_ms <= now_ms:
                    # Do not ask again before this attempt has timed out.
                    self._copy_at_ms[address] = now_ms + COPY_MS + COPY_AGAIN_MS
                    copy = asyncio.create_task(self._copy(address), name="consumer-sightings")
                    # The loop keeps only weak references: without this one the task could be
                    # garbage-collected.
                    self._copies.add(copy)
                    copy.add_done_callback(self._copies.discard)
        return self._sightings.forget(now_ms)

    async def close(self) -> None:
        for copy in self._copies:
            copy.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)

    async def _asked(self, group: str) -> list[str]:
        """Returns the result of a query that began after this call."""
        questions = self._questions.setdefault(group, _Questions())
        # A running query may be older than the latest change. The next one serves all that wait.
        wanted = questions.begun + 1
        questions.waiting += 1
        try:
            async with questions.lock:
                if questions.begun < wanted:
                    questions.begun += 1
                    now_ms = self._clock_ms()
                    asks = (
                        self._ask(address, group, ASK_MS)
                        for address in self._others()
                        if self._ask_from_ms.get(address, 0) <= now_ms
                    )
                    await asyncio.gather(*asks)
                    questions.client_ids = self._sightings.client_ids(group, self._clock_ms())
                return questions.client_ids
        finally:
            questions.waiting -= 1
            if not questions.waiting:  # R58: clients choose the names
                del self._questions[group]

    async def _copy(self, address: str) -> None:
        if await self._ask(address, "", COPY_MS):
            self._copy_at_ms[address] = None
        else:
            self._copy_at_ms[address] = self._clock_ms() + COPY_AGAIN_MS

    async def _ask(self, address: str, group: str, timeout_ms: int) -> bool:
        """Asks one replica for a group, or for all (""). Returns False if it should be asked
        again."""
        code = RequestCode.BATON_GET_CONSUMER_SIGHTINGS
        request = RemotingCommand.request(code, {"consumerGroup": group})
        try:
            reply = await self._client.call(address, request, timeout_ms)
            for line in reply.body.splitlines():
                # A line names up to 500 clients, so give the loop a turn after each.
                self._sightings.learn(ConsumerSightingsBody.decode(line), self._clock_ms())
                await asyncio.sleep(0)
        except ResponseError as error:
            log.info("consumers_not_learned address=%s group=%s reason=%s", address, group, error)
            return error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED  # a Java broker never will
        except BatonError as error:
            if isinstance(error, ConnectError):
                self._ask_from_ms[address] = self._clock_ms() + COPY_AGAIN_MS
            log.info("consumers_not_learned address=%s group=%s reason=%s", address, group, error)
            return False
        return True
