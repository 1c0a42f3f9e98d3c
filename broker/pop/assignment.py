"""Which queues a member consumes (QUERY_ASSIGNMENT, 400), and whether a group pulls or pops
(SET_MESSAGE_REQUEST_MODE, 401).

A stock push consumer with `clientRebalance=false` asks for its assignment; on an error it keeps
what it has. With POP all members may share a queue: each gets queueId -1 of each broker group.
Origin: QueryAssignmentProcessor, AssignmentManager in Java.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Final

from batonmq.broker.config import BrokerConfig
from batonmq.broker.request_fields import invalid, system_error
from batonmq.broker.tables.slave_sync import reply_in_turns
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.allocation import STRATEGIES, Allocate, place_of
from batonmq.protocol.bodies import (
    BROADCASTING,
    PERM_READ,
    MessageQueueAssignment,
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    SetMessageRequestModeRequestBody,
    TopicRouteData,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, BrokerRefusal
from batonmq.protocol.message import ROUTE_QUEUES_MAX, MessageQueue, route_problem
from batonmq.protocol.pop import ANY_QUEUE
from batonmq.protocol.topic_name import RETRY_PREFIX, RETRY_TOPIC_LENGTH_MAX
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.turns import in_turns

log = logging.getLogger(__name__)

MODES: Final = ("PULL", "POP")
ROUTE_KEPT_MS: Final = 5000
ROUTES_MAX: Final = 4096
QUEUES_MAX: Final = 2 * ROUTE_QUEUES_MAX
"""Of all routes that are kept (R58)."""
ASSIGNED_MAX: Final = 1 << 17
"""Queues of one answer: more do not fit into a frame."""
ASK_MS: Final = 1000
"""Less than the 3 s that a stock client waits for its assignment."""


def popped_share(
    queues: Sequence[MessageQueue],
    client_ids: Sequence[str],
    own_id: str,
    share_num: int,
    allocate: Allocate,
) -> Sequence[MessageQueue]:
    """The queues that a member pops, sorted: its own share and those of the next `share_num`
    members. If `share_num` covers all members: each broker group as a whole. With more members than
    queues: one queue."""
    if share_num <= 0 or share_num >= len(client_ids) - 1:
        # One assignment a broker group, not one a queue: the broker chooses the queue.
        brokers = sorted(set(map(attrgetter("broker_name"), queues)))
        return [MessageQueue(queues[0].topic, name, ANY_QUEUE) for name in brokers]
    index = place_of(client_ids, own_id)
    # The client's heartbeat may not have come yet: it asks again.
    if index is None:
        return ()
    if len(client_ids) > len(queues):
        return (queues[index % len(queues)],)
    shares = [(index + step) % len(client_ids) for step in range(share_num + 1)]
    # Shares have no queue in common, and each is sorted.
    owned = (allocate(queues, client_ids, client_ids[each]) for each in shares)
    return sorted(chain.from_iterable(owned))


class AssignmentProcessor:
    """Runs on masters; the relay passes on requests of other replicas."""

    def __init__(
        self,
        path: WritePath,
        topics: TopicService,
        members: Callable[[str], Awaitable[list[str]]],
        config: BrokerConfig,
        client: RemotingClient,
        mode_set: Callable[[str, str], None],
    ) -> None:
        """`members` returns the sorted client ids of a group. `client` asks name servers for
        routes. `mode_set` gets group and topic once a change of mode is confirmed."""
        self._path = path
        self._topics = topics
        self._members = members
        self._config = config
        self._client = client
        self._mode_set = mode_set
        self._routes: dict[str, tuple[int, list[MessageQueue]]] = {}
        self._fetches: dict[str, asyncio.Task[list[MessageQueue]]] = {}

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.QUERY_ASSIGNMENT, self.assignment, large=True)
        processors.register(RequestCode.SET_MESSAGE_REQUEST_MODE, self.set_mode)

    async def set_mode(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Sets PULL or POP for a group in a topic (SET_MESSAGE_REQUEST_MODE, 401)."""
        self._path.gate.require_open()
        mode = SetMessageRequestModeRequestBody.decode_request(request.body)
        topic, group = mode.topic, mode.consumer_group
        if mode.mode not in MODES:
            raise invalid(f"mode is {mode.mode[:32]!r}, allowed are PULL and POP")
        if topic.startswith(RETRY_PREFIX):
            what = f"the mode of the retry topic {topic} cannot be set: it is PULL"
            raise BrokerRefusal(ResponseCode.NO_PERMISSION, what)
        self._topics.existing(topic)
        self._topics.group(group, writable=True)
        end = self._topics.put_request_mode(mode)
        await self._path.wait_confirmed(end, f"request mode of group {group}")
        self._mode_set(group, topic)
        return RemotingCommand.response_to(request)

    async def assignment(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The queues of a member (QUERY_ASSIGNMENT, 400). A null list means: keep your queues."""
        asked = QueryAssignmentRequestBody.decode_request(request.body)
        mode = self._mode(asked.topic, asked.consumer_group)
        if len(asked.topic) > RETRY_TOPIC_LENGTH_MAX:  # R58: it would be kept with its route
            raise invalid(f"topic has {len(asked.topic)} characters: none has such a name")
        queues = await self._queues(asked.topic)
        ids = await self._members(asked.consumer_group)
        shares = self._shares(asked, mode, queues, ids)
        if shares is None:
            return RemotingCommand.response_to(request, body=b'{"messageQueueAssignments":null}')
        if len(shares) > ASSIGNED_MAX:
            raise system_error(f"{len(shares)} queues: one answer has at most {ASSIGNED_MAX}")
        assigned = [
            MessageQueueAssignment(message_queue=queue, mode=mode.mode)
            async for queue in in_turns(shares)
        ]
        body = QueryAssignmentResponseBody(message_queue_assignments=assigned)
        return await reply_in_turns(request, body)

    def _mode(self, topic: str, group: str) -> SetMessageRequestModeRequestBody:
        known = self._topics.request_modes.get(topic, group)
        if known is not None:
            return known
        config = self._config
        is_retry = topic.startswith(RETRY_PREFIX)
        return SetMessageRequestModeRequestBody(
            mode="PULL" if is_retry else config.default_message_request_mode,
            pop_share_queue_num=config.default_pop_share_queue_num,
        )

    def _shares(
        self,
        asked: QueryAssignmentRequestBody,
        mode: SetMessageRequestModeRequestBody,
        queues: list[MessageQueue],
        ids: list[str],
    ) -> Sequence[MessageQueue] | None:
        """Sorted. None (the client keeps its queues) without a route, without members, or for an
        unknown strategy."""
        if not queues:
            return None
        # A member that broadcasts reads every queue by itself.
        if asked.message_model == BROADCASTING or not self._config.server_load_balancer_enable:
            return queues
        allocate = STRATEGIES.get(asked.strategy_name)
        if allocate is None or not ids:
            log.info(
                "no_assignment group=%s topic=%s members=%d strategy=%s",
                asked.consumer_group,
                asked.topic,
                len(ids),
                asked.strategy_name[:64],
            )
            return None
        if mode.mode == "POP":
            share_num = mode.pop_share_queue_num
            return popped_share(queues, ids, asked.client_id, share_num, allocate)
        return allocate(queues, ids, asked.client_id)

    async def _queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of all broker groups, sorted."""
        kept = self._routes.get(topic)
        if kept is not None and self._path.clock_ms() - kept[0] < ROUTE_KEPT_MS:
            return kept[1]
        fetch = self._fetches.get(topic)
        if fetch is None:
            fetch = asyncio.create_task(self._fetch(topic), name="assignment-route")
            self._fetches[topic] = fetch
            fetch.add_done_callback(lambda _: self._fetches.pop(topic))
        # Shielded: several requests share this fetch, and cancelling one must not end it for all.
        return await asyncio.shield(fetch)

    async def _fetch(self, topic: str) -> list[MessageQueue]:
        """Asks one name server after the other; without an answer returns the last known route."""
        found: list[MessageQueue] | None = None
        for address in self._config.name_servers:
            ask = RemotingCommand.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
            try:
                reply = await self._client.invoke(address, ask, ASK_MS)
                if reply.code == ResponseCode.SUCCESS:
                    route = TopicRouteData.decode(reply.body)
                    if problem := route_problem(q.read_queue_nums for q in route.queue_datas):
                        log.warning("route_refused topic=%s reason=%s", topic, problem)
                        continue
                    found = await asyncio.to_thread(_readable_queues, topic, route)
                    break
            except (BatonError, OSError) as exc:
                log.debug("route_not_fetched topic=%s address=%s reason=%s", topic, address, exc)
        # Use the last route, so that consumers keep their queues.
        if not found:
            kept = self._routes.get(topic)
            found = kept[1] if kept is not None else self._own_queues(topic)
        # Bounded, since clients choose the topic names; a dropped route is fetched again on demand.
        kept_queues = sum(len(queues) for _, queues in self._routes.values())
        if len(self._routes) >= ROUTES_MAX or kept_queues + len(found) > QUEUES_MAX:
            self._routes.clear()
        self._routes[topic] = self._path.clock_ms(), found
        return found

    def _own_queues(self, topic: str) -> list[MessageQueue]:
        config = self._topics.get(topic)
        count = config.read_queue_nums if config is not None and config.perm & PERM_READ else 0
        return [MessageQueue(topic, self._config.broker_name, each) for each in range(count)]


def _readable_queues(topic: str, route: TopicRouteData) -> list[MessageQueue]:
    return sorted(
        MessageQueue(topic, data.broker_name, queue_id)
        for data in route.queue_datas
        if data.perm & PERM_READ
        for queue_id in range(data.read_queue_nums)
    )
