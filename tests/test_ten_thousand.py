"""10,000 queues, topics, groups, offsets, clients and broker groups: no turn of the loop walks over
all of them by more than five lines of Python for each, or about 500 of them by a hundred.

Counted by `tests.shared.turns`, not timed. The states are built directly, once. What one call into
C does for a whole table (JSON, a copy, a comparison) counts as the line that calls it; those are in
docs/performance.md, with their times.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from dataclasses import replace as changed
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec.structs import replace

from batonmq.broker.config import BrokerConfig
from batonmq.broker.consume.consumer_manager import ConsumerManager
from batonmq.broker.consume.held_requests import HeldPop, HeldPull, PopHold, PullHold
from batonmq.broker.filter.consumer_filter import DEAD_MAX_MS, ConsumerFilterManager
from batonmq.broker.metrics import BrokerMetrics
from batonmq.broker.pop.assignment import popped_share
from batonmq.broker.relay import SLICE, WAIT_MS, Relay
from batonmq.broker.role_gate import RoleGate
from batonmq.broker.service import BrokerService
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.subscription_group import SubscriptionGroupManager
from batonmq.broker.tables.topic_config import TopicConfigManager
from batonmq.broker.write.pending_acks import PendingAcks
from batonmq.client.consumer.offset_store import RemoteOffsetStore
from batonmq.client.consumer.options import MessageModel, PushConsumerOptions
from batonmq.client.consumer.pull_consumer import PullConsumer
from batonmq.client.consumer.pulling import PullResult, PullStatus
from batonmq.client.consumer.push_consumer import PushConsumer
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.failover import HELD_GAP_MS, Silence, SilenceWatch
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.client.producer.producer import Producer
from batonmq.client.producer.sending import QueuePicker
from batonmq.namesrv.config import NamesrvConfig
from batonmq.namesrv.endpoint import NamesrvEndpoint
from batonmq.namesrv.kv_config import KVConfig
from batonmq.namesrv.state import LIVENESS_DEFAULT_MS, BrokerRegistration, RouteInfoManager
from batonmq.protocol.allocation import STRATEGIES
from batonmq.protocol.bodies import (
    SQL92,
    LockBatchRequestBody,
    LockBatchResponseBody,
    SubscriptionData,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
    TopicConfig,
    TopicConfigAndMappingSerializeWrapper,
)
from batonmq.protocol.codes import MASTER_ADDRESS_HINT, MASTER_EPOCH_HINT, LanguageCode, RequestCode
from batonmq.protocol.errors import ConnectError
from batonmq.protocol.json_body import ENTRIES_AT_ONCE, Body, decoded_in_steps, encoded_pieces
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.register_body import RegisterBrokerBody
from batonmq.remoting.command import RemotingCommand, encode_frame
from batonmq.remoting.connection import PendingRequests, Processors
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.metrics import Metrics, MetricsConfig
from batonmq.runtime.runtime_settings import ChangeRules, RuntimeSettings
from batonmq.runtime.turns import in_slices
from tests.broker.heartbeats import heartbeat
from tests.broker.lone_broker import Rig, lone_broker, until
from tests.shared.turns import counted_turns, uncounted

MANY = 10_000
LINES_MAX = 200
LAST = 100
LATER_MS = 10**15
ASKED = RemotingCommand.request(310)


def test_bodies_of_large_tables_are_written_and_read_in_pieces(tmp_path: Path) -> None:
    """By calls into C of 256 entries each."""
    topics = TopicConfigManager(tmp_path / "topics.json", BrokerConfig())
    topics.put_all(TopicConfig(topic_name=f"T{number}") for number in range(MANY))
    groups = SubscriptionGroupManager(tmp_path / "groups.json")
    groups.put_all(SubscriptionGroupConfig(group_name=f"g{number}") for number in range(MANY))
    offsets = ConsumerOffsetManager(tmp_path / "offsets.json")
    for number in range(MANY):
        offsets.commit(f"g{number}", f"T{number}", 0, number)
    changes: list[tuple[Any, Callable[[], object]]] = [
        (topics, lambda: topics.put(TopicConfig(topic_name="another"))),
        (groups, lambda: groups.put(SubscriptionGroupConfig(group_name="another"))),
        (offsets, lambda: offsets.commit("g0", "T0", 0, 1)),
    ]
    for table, change in changes:
        body: Body = table.wrapper()
        pieces = list(encoded_pieces(body))
        assert len(pieces) > MANY / ENTRIES_AT_ONCE
        assert max(map(len, pieces)) < 1.1 * ENTRIES_AT_ONCE * len(body.encode()) / MANY
        assert b"".join(pieces) == body.encode()
        steps = decoded_in_steps(type(body), body.encode())
        with counted_turns() as turns, pytest.raises(StopIteration) as end:
            while True:
                turns.run(next, steps)
        assert end.value.value == body
        assert turns.count > MANY / ENTRIES_AT_ONCE and turns.lines < 2 * MANY
        before = table.writes_due()
        assert len(before) == 1 and not table.writes_due()
        with counted_turns() as turns:
            turns.run(change)
            turns.run(table.writes_due)
        assert turns.lines < LINES_MAX


def test_null_members_are_left_out_and_texts_that_look_like_them_stay() -> None:
    group = SubscriptionGroupConfig(group_name=',"subscriptionDataSet":null')
    body = group.encode()
    assert b'subscriptionDataSet\\":null' in body and b'"subscriptionDataSet":' not in body
    assert SubscriptionGroupConfig.decode(body) == group


class CountedId(str):
    """A client id that counts how often ids are compared."""

    compared = 0

    def __lt__(self, other: str) -> bool:
        CountedId.compared += 1
        return str.__lt__(self, other)

    def __eq__(self, other: object) -> bool:
        CountedId.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_group_of_ten_thousand_is_never_sorted_or_searched_as_a_whole() -> None:
    """Each member asks for its queues (400) after each change of the group."""
    manager = ConsumerManager()
    ids = [CountedId(f"client-{number * 7919 % MANY:05d}") for number in range(MANY)]
    queues = [MessageQueue("T", "broker-a", number) for number in range(3 * MANY)]
    compared = []

    def turn(turn_of: Callable[[], object]) -> None:
        CountedId.compared = 0
        turn_of()
        compared.append(CountedId.compared)

    for number, client_id in enumerate(ids):
        turn(lambda: manager.heartbeat(heartbeat(client_id, "T"), number, 0, 479, 0))  # noqa: B023
    assert manager.client_ids("g") == sorted(ids)
    manager.heartbeat(heartbeat(ids[0], "T"), "its second channel", 0, 479, 0)
    for number in range(50):
        turn(lambda: manager.channel_closed(number))  # noqa: B023
    members = manager.client_ids("g")
    assert members == sorted({ids[0], *ids[50:]})
    shares = []
    for allocate in STRATEGIES.values():
        turn(lambda: shares.append(allocate(queues, members, ids[0])))  # noqa: B023
        turn(lambda: shares.append(popped_share(queues, members, ids[0], 4, allocate)))  # noqa: B023
    assert [len(share) for share in shares] == [4, 20, 4, 20]
    assert max(compared) < 200


GROUPS, QUEUES = MANY // 2, MANY // 4
"""Of the two situations in which most is done for each of them."""
SITUATIONS: dict[str, tuple[int, Callable[[World], Awaitable[object] | object]]] = {}
"""How many there are of what it is about, and what happens."""


async def each(step: Callable[[int], object], many: int = MANY) -> None:
    """`step` of each number. The last ones, when there is most to walk over, have a counted turn
    each, and so have those at which a limit may be reached: powers of 2 and thousands."""
    counted = [n for n in range(many) if n >= many - LAST or n & (n - 1) == 0 or n % 1000 == 0]
    next_one = 0
    for number in counted:
        with uncounted():
            for other in range(next_one, number):
                step(other)
        await asyncio.sleep(0)
        step(number)
        next_one = number + 1
    await asyncio.sleep(0)


class Channel:
    """A connection of a client."""

    peer = "127.0.0.1:1"
    closed = False
    sent = 0

    def keep(self) -> None:
        """It is a member."""

    def write(self, _: object) -> None:
        self.sent += 1

    def reply(self, *_: object) -> None:
        self.sent += 1

    def oneway(self, *_: object) -> None:
        self.sent += 1

    async def invoke(self, *_: object) -> RemotingCommand:
        return RemotingCommand.response_to(RemotingCommand.request(221), 1)

    def handle(self, *_: object) -> None:
        raise AssertionError("there is no master")

    def close(self, _: str) -> None:
        self.sent += 1

    abort = close

    def drop(self) -> None:
        pass


@dataclass
class World:
    """A broker, and a name server, with MANY of everything."""

    rig: Rig
    channel: Channel = field(default_factory=Channel)
    routes: RouteInfoManager = field(default_factory=RouteInfoManager)
    names_clock_ms: int = 1
    names: NamesrvEndpoint = field(init=False)

    def __post_init__(self) -> None:
        settings = RuntimeSettings(NamesrvConfig(), ChangeRules(frozenset(), frozenset(), "", None))
        self.names = NamesrvEndpoint(
            self.routes, KVConfig(None), settings, lambda: self.names_clock_ms, print
        )

    @property
    def service(self) -> BrokerService:
        return self.rig.service

    def ask(self, code: int, ext: dict[str, str] | None = None, body: bytes = b"") -> Any:
        handler = self.service.endpoint.processors.handlers[code]
        return handler(RemotingCommand.request(code, ext or {}, body), self.channel)  # type: ignore[arg-type]

    def build(self) -> None:
        tables, clients = self.service.tables, self.service.consumers
        tables.topics.put_all(replace(TOPIC, topic_name=f"T{n}") for n in range(MANY))
        tables.topics.put(TopicConfig(topic_name="wide", read_queue_nums=MANY))
        tables.groups.put_all(SubscriptionGroupConfig(group_name=f"g{n}") for n in range(MANY))
        for number in range(MANY):
            tables.offsets.commit(f"g{number}", f"T{number}", 0, number)
            tables.offsets.commit("everywhere", f"T{number}", 0, number)
            beat = heartbeat(f"c{number}", "T1", group="members")
            clients.heartbeat(beat, Channel(), 0, 479, self.service.path.clock_ms())
            own = {name: TopicConfig(topic_name=name) for name in (f"T{number}", f"own{number}")}
            self.routes.register(_broker(number), _registration(own), 0)
        # Each group has T as its second topic. Registered one after the other that takes seconds.
        topics = self.routes._topics
        for number, of_group in enumerate(topics._of_group.values()):
            del topics.groups_of[f"own{number}"], of_group[f"own{number}"]
            of_group["T"] = TOPIC
        topics.groups_of["T"] = tuple(topics._of_group)
        self.routes.check_invariants()


TOPIC = TopicConfig(topic_name="T", read_queue_nums=1, write_queue_nums=1)


def _broker(number: int) -> BrokerRegistration:
    address = f"127.0.0.1:{number}"
    return BrokerRegistration("C", f"b{number}", 0, address, address, number)


def _registration(topics: dict[str, TopicConfig]) -> RegisterBrokerBody:
    wrapper = TopicConfigAndMappingSerializeWrapper(topic_config_table=topics)
    return RegisterBrokerBody(topic_config_serialize_wrapper=wrapper)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:  # of asyncio: its turns can be counted
        yield runner


@pytest.fixture(scope="module")
def world(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    life = lone_broker(tmp_path_factory.mktemp("broker"))
    world = World(runner.run(life.__aenter__()))
    world.build()
    yield world
    runner.run(life.__aexit__(None, None, None))


def situation(name: str, many: int = MANY) -> Callable[[Any], Any]:
    def note(play: Any) -> Any:
        SITUATIONS[name] = many, play
        return play

    return note


@situation("208 progress in 10,000 queues; other requests are in `tests.test_request_cost`")
def _progress(world: World) -> Any:
    return world.ask(208, {"consumerGroup": "g1", "topic": "wide"})


@situation("/metrics with 10,000 topics and groups")
async def _metrics(world: World) -> None:
    stats = world.service.path.stats
    await each(lambda number: stats.put(f"T{number}", 1, 100))
    await each(lambda number: stats.got(f"T{number}", f"g{number}", 1, 100))
    metrics = Metrics(MetricsConfig(), "broker")
    metrics.show(BrokerMetrics(world.service))
    page = b"".join(await metrics.page())
    assert page.count(b"rocketmq_messages_in_total{") == MANY
    assert page.count(b"rocketmq_consumer_lag_messages{") >= 2 * MANY
    assert b"batonmq_metrics_failures{" in page


@situation("60002, 41, 42 queue locks")
async def _locks(world: World) -> None:
    queues = [MessageQueue("wide", "broker-a", number) for number in range(MANY)]
    asked = LockBatchRequestBody(client_id="c", consumer_group="g1", mq_set=queues).encode()
    for code in (41, 41, 60002, 42):
        reply = world.ask(code, body=asked)
        reply = await reply if inspect.isawaitable(reply) else reply
        assert reply.code == 0
        if code == 41:
            assert len(LockBatchResponseBody.decode(reply.body).lock_ok_mq_set) == MANY


@situation("registration at a name server, at first and again")
async def _register(world: World) -> None:
    registration = world.service.status.registration()
    assert registration is not None
    for _ in range(2):
        request = registration.request()  # at the broker
        await asyncio.sleep(0)
        reply = world.names.register_broker(request, world.channel)  # type: ignore[arg-type]
        reply = await reply if inspect.isawaitable(reply) else reply
        assert reply.code == 0
        await asyncio.sleep(0)
    names = world.names
    fields = {"cluster": "DefaultCluster", "brokerName": registration.broker_name}
    for ask in (names.all_topics, names.topics_by_cluster, names.change_write_perm):
        reply = await ask(RemotingCommand.request(0, fields), world.channel)  # type: ignore[arg-type]
        assert reply.code == 0 and (reply.body or reply.ext)
        await asyncio.sleep(0)
    world.names.connection_lost(world.channel)  # type: ignore[arg-type]


@situation("34 of a client with many topics, then groups; it leaves", GROUPS)
async def _heartbeats(world: World) -> None:
    topics = [f"T{number}" for number in range(GROUPS)]
    beat = heartbeat("c", *topics, group="g1")
    groups = heartbeat("c")
    of_group = [heartbeat("c", "T1", group=f"g{number}") for number in range(GROUPS)]
    groups.consumer_data_set = [each.consumer_data_set[0] for each in of_group]
    bodies = [beat.encode(), beat.encode(), groups.encode(), groups.encode()]
    for body in bodies:
        reply = world.ask(34, body=body)
        await reply if inspect.isawaitable(reply) else reply
    manager = world.service.consumers
    assert len(manager.groups) >= GROUPS
    world.service.clients.disconnected(world.channel)  # type: ignore[arg-type]
    await until(lambda: not manager.is_known(world.channel))


@situation("ticks of the broker, and what they write")
async def _ticks(world: World) -> None:
    service = world.service
    await each(lambda number: service.path.stats.put(f"T{number}", 1, 1))
    now_ms = service.path.clock_ms()
    for tick in (service.locks.tick, service.path.stats.tick, service.status.tick):
        tick(now_ms)
        await asyncio.sleep(0)
    service._persist_tables()


@situation("SQL filters of 10,000 groups are written; they are forgotten when dead for a day")
async def _filters(world: World) -> None:
    now_ms = [0]
    filters = ConsumerFilterManager(Path("never written"), clock_ms=lambda: now_ms[0])
    wanted = SubscriptionData(topic="T", sub_string="a = 1", expression_type=SQL92)
    await each(lambda number: filters.register(f"g{number}", [wanted]))
    assert len(filters.writes_due()) == 1 and not filters.writes_due()
    await asyncio.sleep(0)
    await each(lambda number: filters.unregister(f"g{number}"))
    now_ms[0] += DEAD_MAX_MS + 1
    await in_slices(lambda: bool(filters.writes_due()))
    assert not any(filters.get(f"g{number}", "T") for number in range(MANY))


@situation("a producer is chosen for a check")
def _check(world: World) -> None:
    assert world.service.features.producers.channel("p", "T") is not None


@situation("106 of 10,000 broker groups; a registration; a route; silence")
async def _broker_groups(world: World) -> None:
    info = await world.names.cluster_info(RemotingCommand.request(106), world.channel)  # type: ignore[arg-type]
    assert b'"brokerAddrs":{0:"127.0.0.1:77"}' in info.body
    routes = world.routes
    routes.register(_broker(7), _registration({"T": TOPIC, "T7": TOPIC}), 0)
    await asyncio.sleep(0)
    routes.connection_lost("unknown")
    await asyncio.sleep(0)
    routes.delete_topic("T", "C")
    assert "T" not in routes.all_topics() and "T7" in routes.all_topics()
    await asyncio.sleep(0)
    world.names_clock_ms = LIVENESS_DEFAULT_MS + 1
    world.names.scan()
    await until(lambda: not routes.clusters())


class Network(RemotingClient):
    """Of a client whose requests go out at once and are never answered."""

    async def oneway(self, *_: object) -> None:
        pass

    async def invoke(self, *_: object) -> RemotingCommand:
        return await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def client_of(topics: int) -> AsyncIterator[ClientInstance]:
    """It knows the routes of so many topics, of one group whose master is `h:1`."""
    client = ClientInstance("h:9876")
    client.connect(Processors())
    client._remoting = Network()
    group = {"b": {0: "h:1", 2: "h:2"}}
    await each(
        lambda number: client.routes._adopt(TopicRoute(f"T{number}", (), (), group, {})), topics
    )
    yield client
    await client.disconnect()


@situation("a client of 10,000 topics: a new master, heartbeats, the old master's connection")
async def _client_of_topics(_: World) -> None:
    async with client_of(MANY) as client:
        producer = Producer("p", client=client)
        client.heartbeats.add(producer)
        producer._pickers = {f"T{number}": QueuePicker() for number in range(MANY)}
        with uncounted():
            for number, picker in enumerate(producer._pickers.values()):
                picker.broker_failed("b", number)
        refusal = RemotingCommand.response_to(ASKED, 14)
        refusal.ext = {MASTER_ADDRESS_HINT: "h:2", MASTER_EPOCH_HINT: "2"}
        for topic in ("T7", "T8"):
            assert client.routes.hinted_master(topic, "b", refusal) == "h:2"
            assert client.routes.cached(topic).master_address("b") == "h:2"  # type: ignore[union-attr]
            await asyncio.sleep(0)
        last = f"T{MANY - 1}"
        await until(lambda: client.routes.cached(last).master_address("b") == "h:2")  # type: ignore[union-attr]
        await until(lambda: not producer._pickers[last]._avoid_until_ms)
        client._close_if_no_master("h:1")
        beating = asyncio.ensure_future(client.heartbeats.send())
        await asyncio.sleep(0)
        beating.cancel()


async def nought(*_: object, **__: object) -> int:
    """For an AsyncMock, which costs more than all that is counted."""
    return 0


async def agreed(*_: object) -> bool:
    return True


@situation("a consumer of many queues: takes them up, stores progress, gives them up", QUEUES)
async def _client_of_queues(_: World) -> None:
    queues = tuple(MessageQueue("T0", "b", number) for number in range(QUEUES))
    async with client_of(1) as client:
        options = PushConsumerOptions(model=MessageModel.BROADCASTING)
        consumer = PushConsumer("g", lambda *_: None, client=client, options=options)
        consumer.subscribe("T0")
        consumer._offsets = offsets = RemoteOffsetStore(client, "g")
        offsets.read = nought  # type: ignore[method-assign]
        consumer._service = Mock(acquire=agreed, release=agreed)
        routes = client.routes
        routes._adopt(changed(routes.cached("T0"), subscribe_queues=queues))  # type: ignore[type-var]
        await consumer._rebalance()
        assert len(consumer._readers) == QUEUES
        await asyncio.sleep(0)
        await each(lambda number: offsets.update(queues[number], 1), QUEUES)
        consumer.masters_moved(["b"])
        await asyncio.sleep(0)
        await offsets.persist()
        assert not offsets._dirty
        await consumer._give_up(queues, consumer._service)
        assert not consumer._readers


@situation("requests of a client that a silent master holds")
async def _silence(_: World) -> None:
    watch = SilenceWatch()
    silence = Silence("T", "b", "h:1", is_held=True)
    await each(lambda number: watch.begin(silence, number // 2, MANY, MANY))
    assert len(watch.due(MANY)) == 1
    checks = 0
    for now_ms in range(MANY + 1, 2 * MANY, 100):
        checks += len(watch.due(now_ms))
        await asyncio.sleep(0)
    assert 1 < checks <= MANY / HELD_GAP_MS


@situation("pulls of one queue are held, answered, and refused")
async def _pulls(world: World) -> None:
    hold: PullHold[int] = PullHold()
    await each(lambda number: hold.hold(HeldPull("T1", 0, 0, number, 0, number)))
    pull = world.service.pull
    pull._hold, before = hold, pull._hold  # type: ignore[assignment]
    answered: list[int] = []
    pull._answer_or_hold = lambda one, *_: answered.append(one)  # type: ignore[method-assign]
    pull.arrived("T1", 0, 1)
    await until(lambda: len(answered) == MANY)
    assert answered == list(range(MANY)) and not len(hold)
    pull._hold = before
    del pull._answer_or_hold  # type: ignore[method-assign]


@situation("pulls wait in 10,000 queues of a topic that is deleted")
async def _pulls_of_a_deleted_topic(world: World) -> None:
    hold: PullHold[int] = PullHold()
    await each(lambda number: hold.hold(HeldPull("wide", number, LATER_MS, number, 0, number)))
    await each(lambda number: hold.hold(HeldPull(f"T{number}", 0, LATER_MS, number, 0, number)))
    pull = world.service.pull
    pull._hold, before = hold, pull._hold  # type: ignore[assignment]
    answered: list[int] = []
    pull._answer_or_hold = lambda one, *_: answered.append(one)  # type: ignore[method-assign]
    pull.queues_deleted("wide")
    assert len(answered) <= 128
    await until(lambda: len(answered) == MANY)
    assert len(hold) == MANY
    pull._hold = before
    del pull._answer_or_hold  # type: ignore[method-assign]


@situation("POPs of 10,000 groups are held, woken, and expire")
async def _pops(world: World) -> None:
    hold = PopHold()
    await each(
        lambda number: hold.hold(HeldPop("T1", -1, number, number, f"g{number // 2}")), 2 * MANY
    )
    hold.arrived("T1", 0)
    for _ in range(100):
        assert hold.next_ready() is not None
    await asyncio.sleep(0)
    hold.more("T1", "g9")
    await in_slices(lambda: hold.next_ready() is not None)
    assert len(hold) == MANY - 1
    await in_slices(lambda: bool([*hold.expired(2 * MANY, 128)]))


@situation("replies wait for their confirmation, are late, are refused")
async def _acks(world: World) -> None:
    acks = PendingAcks(0)
    reply = encode_frame(RemotingCommand.response_to(ASKED))
    for times in (1, 2):
        await each(lambda number: acks.add(number, 0, world.channel, reply))
        before = world.channel.sent
        if times == 1:
            await in_slices(lambda: acks.expire(0, lambda _: (12, "late")) > 0)
        else:
            assert acks.fail_all(14, "the role changed") == MANY and len(acks) == 0
            await in_slices(acks.answer_failed)
        assert world.channel.sent - before == MANY


@situation("requests on one connection end together")
async def _requests(_: World) -> None:
    loop = asyncio.get_running_loop()
    pending = PendingRequests(loop, lambda *_: TimeoutError())
    for timeout_ms in (0, 10**6):
        waits: list[asyncio.Future[RemotingCommand]] = []
        await each(lambda number: waits.append(pending.add(number, 0, timeout_ms)))  # noqa: B023
        if timeout_ms:
            pending.fail_all(ConnectError("127.0.0.1:1", "it ended"))
        await until(lambda: all(wait.done() for wait in waits[-100:]))  # noqa: B023
        assert all(wait.exception() is not None for wait in waits)


@situation("connections fall idle; an endpoint closes")
async def _connections(_: World) -> None:
    endpoint = RemotingClient()
    channels = [Channel() for _ in range(MANY)]
    for channel in channels:
        channel.last_active_ms = 0  # type: ignore[attr-defined]
    endpoint.connections = set(channels)  # type: ignore[arg-type]
    endpoint.close_idle(10**9)
    await until(lambda: sum(channel.sent for channel in channels[::100]) == MANY // 100)
    closing = asyncio.ensure_future(endpoint.close())
    while sum(channel.sent for channel in channels) < 2 * MANY:
        for _ in range(50):
            await asyncio.sleep(0)
    await each(lambda number: endpoint._disconnected(channels[number]))  # type: ignore[arg-type]
    await closing


@situation("a relay refuses what waits, and ends")
async def _relay(_: World) -> None:
    channel, relay = Channel(), Relay(RoleGate(), lambda: 0, enabled=True)
    send = RemotingCommand.request(RequestCode.CONSUMER_SEND_MSG_BACK)
    send.language = LanguageCode.JAVA
    await each(lambda _: relay.take(channel, send))  # type: ignore[arg-type]
    await relay.close()
    assert channel.sent == MANY and len(relay) == 0


@situation("tables that a slave takes over, new and known")
async def _tables(world: World) -> None:
    mine = world.service.tables
    topics, groups = mine.topics.wrapper().encode(), mine.groups.wrapper().encode()
    offsets, folder = mine.offsets.wrapper().offset_table, Path("never written")
    theirs = (
        TopicConfigManager(folder, BrokerConfig()),
        SubscriptionGroupManager(folder),
        ConsumerOffsetManager(folder),
    )
    for _ in range(2):
        body = TopicConfigAndMappingSerializeWrapper.decode(topics)
        theirs[0].replace_all(body.topic_config_table, body.data_version)
        await asyncio.sleep(0)
        theirs[1].replace_all(SubscriptionGroupWrapper.decode(groups))
        await asyncio.sleep(0)
        assert theirs[2].apply_from_master(1, offsets, 0)
        await asyncio.sleep(0)
    assert theirs[2].table == mine.offsets.table


@pytest.mark.parametrize("name", SITUATIONS)
def test_no_turn_walks_over_all_of_them(world: World, runner: asyncio.Runner, name: str) -> None:
    many, happens = SITUATIONS[name]

    async def play() -> None:
        await asyncio.sleep(0)
        result = happens(world)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, RemotingCommand):
            assert result.code == 0, result.remark

    logging.disable()  # it would take most of the test's time
    with counted_turns() as turns:
        runner.run(play())
    logging.disable(logging.NOTSET)
    assert turns.lines <= 5 * many, f"{turns.lines} lines in one turn"


def test_ten_thousand_that_waited_too_long_are_refused_in_slices() -> None:
    channel, relay = Channel(), Relay(RoleGate(), lambda: 0, enabled=True)
    for _ in range(MANY):
        send = RemotingCommand.request(RequestCode.SEND_MESSAGE)
        send.language = LanguageCode.JAVA
        assert relay.take(channel, send)  # type: ignore[arg-type]
    assert relay.tick(WAIT_MS - 1) is False and channel.sent == 0
    calls = 0
    while relay.tick(WAIT_MS):
        calls += 1
        assert channel.sent == calls * SLICE
    assert channel.sent == MANY and len(relay) == 0


def test_a_poll_looks_at_the_queues_that_changed(runner: asyncio.Runner) -> None:
    """10,000 assigned queues are fetched a few in a turn; after that a message of one of them is
    returned without a look at the others."""
    queues = [MessageQueue("T", "b", number) for number in range(MANY)]
    consumer = PullConsumer("g", name_servers="127.0.0.1:1")
    arrivals: dict[MessageQueue, asyncio.Future[PullResult]] = {}

    async def pull(queue: MessageQueue, *_: object, **__: object) -> PullResult:
        arrivals[queue] = asyncio.get_running_loop().create_future()
        return await arrivals[queue]

    async def play() -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("_check_running", "_subscribe_all"):
                patch.setattr(consumer, name, AsyncMock() if "all" in name else Mock())
            patch.setattr(consumer, "_first_position", nought)
            patch.setattr(consumer, "_pull", pull)
            consumer._subscriptions["T"] = Mock()
            await consumer.assign(queues)
            with counted_turns() as turns:
                assert await consumer.poll(1) == []
                await until(lambda: len(arrivals) == MANY)
            assert turns.lines < MANY
            for number in (7, MANY - 1):
                found = PullResult(PullStatus.FOUND, 1, 0, 1, (Mock(queue_offset=0),))
                arrivals.pop(queues[number]).set_result(found)
                with counted_turns() as turns:
                    assert await consumer.poll(1000) == list(found.messages)
                assert turns.lines < LINES_MAX
                assert consumer.position(queues[number]) == 1
            assert set(arrivals) == set(queues) - {queues[MANY - 1]}
            with counted_turns() as turns:
                await consumer._forget(queues)
            assert turns.lines < MANY

    runner.run(play())
