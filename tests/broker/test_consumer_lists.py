"""Lists of consumers (38) from members that were started again: as long as they were before."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from heartbeats import heartbeat
from lone_broker import Rig, lone_broker, until

from batonmq.broker.consume import client_processor, consumer_manager
from batonmq.broker.consume.client_processor import ConsumerLists
from batonmq.broker.consume.consumer_manager import (
    MOVING_MS,
    PIECE,
    SIGHTING_MS,
    ConsumerManager,
    ConsumerSightings,
)
from batonmq.protocol.bodies import (
    ConsumerData,
    ConsumerSightingsBody,
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, ConnectError, ResponseError
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from tests.shared.turns import counted_turns

CLIENTS = 4_000


class Members:
    """The brokers of one group; each may be started again. Clients are given the broker for their
    heartbeats."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.rigs: dict[str, Rig] = {}
        self._ends: dict[str, contextlib.AsyncExitStack] = {}
        self.clients: dict[str, RemotingClient] = {}

    async def start(self, *names: str) -> None:
        for name in names:
            end = await self._stack.enter_async_context(contextlib.AsyncExitStack())
            self._ends[name] = end
            rig = await end.enter_async_context(lone_broker(self._folder / name))
            self.rigs[name] = rig
            others = lambda me=rig: self._others(me)  # noqa: E731
            rig.service.consumer_lists._others = others

    def _others(self, me: Rig) -> list[str]:
        return [rig.service.address for rig in self.rigs.values() if rig is not me]

    async def stop(self, name: str) -> None:
        """Its address stays known to the others, as that of a member that is dead."""
        await self._ends.pop(name).aclose()

    async def restart(self, name: str) -> None:
        await self.stop(name)
        del self.rigs[name]
        await self.start(name)
        lists = self.rigs[name].service.consumer_lists
        asked = set(self._others(self.rigs[name]))
        await until(lambda: asked <= {at for at, due in lists._copy_at_ms.items() if due is None})

    async def beat(self, client: str, *names: str) -> None:
        if client not in self.clients:
            self.clients[client] = RemotingClient()
            self._stack.push_async_callback(self.clients[client].close)
        for name in names:
            request = RemotingCommand.request(
                RequestCode.HEART_BEAT, {}, heartbeat(client, "T").encode()
            )
            await self.clients[client].call(self.rigs[name].service.address, request)

    async def listed(self, name: str) -> list[str]:
        reply = await self.rigs[name].ask(
            RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"}
        )
        if reply.code != 0:
            return []
        return GetConsumerListByGroupResponseBody.decode(reply.body).consumer_id_list

    async def leave(self, client: str, name: str) -> None:
        goodbye = RemotingCommand.request(
            RequestCode.UNREGISTER_CLIENT, {"clientID": client, "consumerGroup": "g"}
        )
        await self.clients[client].call(self.rigs[name].service.address, goodbye)


@pytest.fixture
@contextlib.asynccontextmanager
async def group(tmp_path: Path) -> AsyncIterator[Members]:
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(30):
        group = Members(tmp_path, stack)
        await group.start("a", "b", "c")
        yield group


async def test_a_member_lists_who_has_not_been_heard_since_its_start(group):
    """1 before any heartbeat. 2 with some. 3 the connections of one client close. 4 one
    leaves."""
    for client in ("c1", "c2", "c3"):
        await group.beat(client, "a", "b", "c")
    await group.restart("a")
    assert await group.listed("a") == ["c1", "c2", "c3"]
    await group.beat("c2", "a")
    assert await group.listed("a") == ["c1", "c2", "c3"]
    await group.clients["c1"].close()
    here = [group.rigs[name].service.clients._clients for name in ("b", "c")]
    await until(lambda: all(len(clients.client_ids("g")) == 2 for clients in here))
    assert await group.listed("a") == ["c2", "c3"]
    # A client says good-bye to one member after the other: the first to hear it is believed.
    await group.leave("c3", "b")
    assert await group.listed("a") == ["c2"]


async def test_a_rolling_restart_between_two_heartbeats_forgets_no_consumer(group):
    await group.beat("c1", "a", "b", "c")
    await group.beat("gone", "a", "b", "c")
    await group.restart("a")
    await group.restart("b")
    await group.leave("gone", "c")
    rig = group.rigs["c"]
    await until(lambda: rig.service.clients._clients.client_ids("g") == ["c1"])
    # The notice of c makes the others ask, so the master learns of it.
    assert await group.listed("a") == ["c1"]
    await group.restart("c")
    assert [await group.listed(name) for name in "abc"] == [["c1"]] * 3


async def test_who_does_not_answer_is_left_out(group, monkeypatch):
    """One is dead, one hangs."""
    monkeypatch.setattr(client_processor, "ASK_MS", 20)

    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    await group.beat("c1", "b")
    await group.restart("a")
    await group.stop("b")
    handlers = group.rigs["c"].service.endpoint.processors.handlers
    handlers[RequestCode.BATON_GET_CONSUMER_SIGHTINGS] = hang
    await group.beat("c2", "a")
    assert await group.listed("a") == ["c1", "c2"]


def test_no_sighting_counts_longer_than_a_heartbeat_takes_and_the_newest_wins(monkeypatch):
    clients = ConsumerManager()
    sightings = ConsumerSightings(clients)
    sightings.learn(ConsumerSightingsBody(group="g", seen={"old": 30_000, "new": 0}), 100_000)
    sightings.learn(ConsumerSightingsBody(group="g", left={"new": 10_000, "old": 31_000}), 100_000)
    assert sightings.client_ids("g", 100_000) == ["new", "old"]
    sightings.left("g", "new", 100_001)
    assert sightings.client_ids("g", 100_001) == ["old"]
    (piece,) = sightings.pieces("", 105_000)
    assert piece == ConsumerSightingsBody(group="g", seen={"old": 35_000}, left={"new": 4_999})
    sightings.learn(ConsumerSightingsBody(group="g", seen={"too old": SIGHTING_MS}), 105_000)
    assert sightings.client_ids("g", 110_000) == []
    assert not sightings.forget(100_001 + SIGHTING_MS) and not sightings._came
    assert list(sightings.pieces("", 105_000)) == []
    monkeypatch.setattr(consumer_manager, "SIGHTINGS_MAX", 2)  # R58
    sightings.learn(ConsumerSightingsBody(group="g", seen=dict.fromkeys("abc", 0)), 110_000)
    assert sightings.client_ids("g", 110_000) == ["b", "c"]


@pytest.mark.counts_turns
@pytest.mark.parametrize("groups", [1, CLIENTS], ids=["of one group", "each of its own group"])
async def test_thousands_of_consumers_cost_one_question_at_a_time_and_no_long_turn(
    group, groups, monkeypatch
):
    monkeypatch.setattr(client_processor, "ASK_MS", 60_000)
    monkeypatch.setattr(client_processor, "COPY_MS", 60_000)
    a, b = group.rigs["a"].service, group.rigs["b"].service
    for number in range(CLIENTS):
        name = "g" if groups == 1 else f"g{number}"
        beat = heartbeat(f"c{number}", "T", group=name)
        b.clients._clients.heartbeat(beat, number, 0, 479, b.path.clock_ms())
    asked = 0
    tell = b.endpoint.processors.handlers[RequestCode.BATON_GET_CONSUMER_SIGHTINGS]

    def counted(request: RemotingCommand, channel: object) -> object:
        nonlocal asked
        asked += request.ext["consumerGroup"] == "g"
        return tell(request, channel)

    b.endpoint.processors.handlers[RequestCode.BATON_GET_CONSUMER_SIGHTINGS] = counted
    with counted_turns() as turns:
        await a.consumer_lists._copy(b.address)
        known = a.consumer_lists._sightings._groups
        assert sum(len(clients) for clients in known.values()) == CLIENTS
        if groups == 1:
            lists = await asyncio.gather(*(group.listed("a") for _ in range(10)))
            assert {len(ids) for ids in lists} == {CLIENTS}
    # The second answers all who came while the first ran, a third those whose request came later.
    assert asked in ((2, 3) if groups == 1 else (0,))
    # The list itself is made in one go, once a question.
    assert turns.lines < (14 if groups == 1 else 8) * PIECE, turns.lines


class Lonely:
    """The lists of a member whose only other one answers with `error`."""

    def __init__(self, error: BatonError) -> None:
        self.now_ms = 0
        self._call = AsyncMock(side_effect=error)
        clients = ConsumerManager()
        sightings, client = ConsumerSightings(clients), Mock(call=self._call)
        self.lists = ConsumerLists(
            clients, sightings, client, lambda: ["other:1"], lambda: self.now_ms
        )

    @property
    def asked(self) -> int:
        return self._call.await_count

    async def tick(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.lists.tick(now_ms)
        await asyncio.gather(*self.lists._copies)


@pytest.fixture
def dead() -> Lonely:
    """The other one cannot be reached."""
    return Lonely(ConnectError("other:1", "refused"))


async def test_a_java_member_is_asked_for_all_only_once():
    """It answers 60003 with 3, and always will."""
    java = Lonely(ResponseError(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "no", "other:1"))
    java.lists.started()
    for now_ms in range(0, SIGHTING_MS, 1_000):
        await java.tick(now_ms)
    assert java.asked == 1


async def test_who_cannot_be_reached_is_dialled_once_a_second_however_many_groups_ask(dead):
    dead.lists.started()
    for asked, dead.now_ms in ((1, 0), (1, 999), (2, 1_000), (2, 1_050), (3, 2_000)):
        for number in range(5):
            assert await dead.lists.client_ids(f"g{number}") == []
        assert dead.asked == asked


def test_a_connection_that_closes_is_a_good_bye_to_who_has_not_just_led():
    """1 a consumer is killed while a member follows or leads. 2 after a switch one closes its
    connection to the former master, and is heard by another later, or not. 3 it counts for as long
    as its heartbeat does. 4 its good-bye counts at once."""
    sightings = ConsumerSightings(ConsumerManager())
    sightings.role_left(80_000)
    sightings.closed("g", "killed", 79_000, 81_000)
    sightings.became_master()
    sightings.closed("g", "killed too", 79_000, 82_000)
    assert sightings.client_ids("g", 82_000) == []
    (piece,) = sightings.pieces("g", 82_000)
    assert piece == ConsumerSightingsBody(group="g", left={"killed": 1_000, "killed too": 0})
    sightings.role_left(99_000)
    sightings.role_left(99_500)  # fenced, and then a slave
    sightings.closed("g", "c1", 90_000, 100_000)
    sightings.closed("g", "silent", 50_000, 100_000)
    assert sightings.client_ids("g", 100_000) == ["c1"]
    assert sightings.client_ids("g", 90_000 + SIGHTING_MS) == []
    sightings.left("g", "c1", 102_000)
    sightings.closed("g", "c1", 90_000, 103_000)  # its connection closes behind the good-bye
    assert sightings.client_ids("g", 103_000) == []
    sightings.closed("g", "later", 120_000, 99_000 + MOVING_MS)
    assert sightings.client_ids("g", 99_000 + MOVING_MS) == []


async def test_a_service_tells_its_sightings_of_its_roles(group):
    service = group.rigs["a"].service
    sightings = service.consumer_lists._sightings
    assert sightings._leads  # a master outside controller mode
    service.role_left()
    sightings.closed("g", "c", service.path.clock_ms(), service.path.clock_ms())
    assert sightings.client_ids("g", service.path.clock_ms()) == ["c"]


async def test_a_new_master_asks_the_others_and_a_copy_that_failed_is_asked_for_again(dead):
    """Some consumers may have been heard by the master before only."""
    assert await dead.lists.client_ids("g") == [] and not dead.asked
    dead.lists.became_master()
    assert await dead.lists.client_ids("g") == [] and dead.asked == 1
    dead.lists.started()
    for at_ms in (2_000, 2_900, 3_000, 4_000):
        await dead.tick(at_ms)
    assert dead.asked == 4


def test_r58_who_asks_for_all_groups_compares_no_names():
    """To sort half a million names takes half a second, and any client may ask (60003)."""

    class Name(str):
        __slots__ = ()

        def __lt__(self, other: str) -> bool:
            raise AssertionError("names are sorted")

    clients = ConsumerManager()
    sightings = ConsumerSightings(clients)
    groups = {f"here{number}" for number in range(3)}
    data = HeartbeatData(
        client_id="c", consumer_data_set=[ConsumerData(group_name=Name(each)) for each in groups]
    )
    clients.heartbeat(data, "channel", 0, 0, 1)
    for name in ("here0", "elsewhere"):
        sightings.learn(ConsumerSightingsBody(group=Name(name), seen={"d": 0}), 1)
    pieces = list(sightings.pieces("", 1))
    assert {piece.group for piece in pieces} == groups | {"elsewhere"}
    assert {piece.group for piece in pieces if "d" in piece.seen} == {"here0", "elsewhere"}


async def test_r58_a_group_that_was_asked_for_leaves_nothing_behind():
    """Any client may ask, for any name."""
    clients = ConsumerManager()
    lists = ConsumerLists(clients, ConsumerSightings(clients), Mock(), list, lambda: 0)
    lists.started()
    for number in range(5):
        assert await lists.client_ids(f"g{number}") == []
    await asyncio.gather(*(lists.client_ids("g") for _ in range(3)))
    assert not lists._questions
