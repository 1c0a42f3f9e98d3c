"""Which queues a member gets from its broker (QUERY_ASSIGNMENT, 400)."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from batonmq.broker.pop import assignment
from batonmq.broker.pop.assignment import (
    ASSIGNED_MAX,
    ROUTE_KEPT_MS,
    AssignmentProcessor,
    popped_share,
)
from batonmq.protocol.allocation import STRATEGIES
from batonmq.protocol.bodies import (
    BROADCASTING,
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    QueueData,
    TopicConfig,
    TopicRouteData,
)
from batonmq.protocol.errors import BrokerRefusal, ConnectError
from batonmq.protocol.message import ROUTE_QUEUES_MAX, MessageQueue
from batonmq.protocol.pop import ANY_QUEUE
from batonmq.remoting.command import RemotingCommand
from tests.shared.turns import counted_turns

QUEUES = [MessageQueue("T", "a", number) for number in range(4)]
POP = {"default_message_request_mode": "POP", "default_pop_share_queue_num": 0}


@pytest.mark.parametrize(
    ("members", "share_num", "own", "numbers"),
    [
        ("abc", 0, "a", [ANY_QUEUE]),
        ("abc", 2, "a", [ANY_QUEUE]),
        ("abc", 1, "a", [0, 1, 2]),
        ("abc", 1, "b", [2, 3]),
        ("abc", 1, "c", [0, 1, 3]),
        ("abc", 1, "x", []),
        ("abc", 1, "aa", []),
        ("abcd", 1, "d", [0, 3]),
        ("abcdef", 1, "f", [1]),
    ],
)
def test_a_member_pops_its_own_share_and_those_behind_it(members, share_num, own, numbers):
    share = popped_share(QUEUES, list(members), own, share_num, STRATEGIES["AVG"])
    assert sorted(queue.queue_id for queue in share) == numbers


def test_in_a_circle_a_member_gets_each_nth_queue():
    shares = [STRATEGIES["AVG_BY_CIRCLE"](QUEUES, ["a", "b", "c"], own) for own in "abcx"]
    assert [[queue.queue_id for queue in each] for each in shares] == [[0, 3], [1], [2], []]


class Rig:
    """`answers`: of the name servers, one after the other."""

    def __init__(self, members: list[str], *answers: object, **config: object) -> None:
        self.now_ms = 0
        self.config: TopicConfig | None = TopicConfig(read_queue_nums=1)
        self.invoke = AsyncMock(side_effect=answers)
        settings = {
            "name_servers": ("n1", "n2"),
            "broker_name": "own",
            "server_load_balancer_enable": True,
            "default_message_request_mode": "PULL",
            "default_pop_share_queue_num": 1,
        }
        self._processor = AssignmentProcessor(
            Mock(clock_ms=lambda: self.now_ms),
            Mock(get=lambda topic: self.config, request_modes=Mock(get=lambda topic, group: None)),
            AsyncMock(return_value=members),
            SimpleNamespace(**(settings | config)),
            Mock(invoke=self.invoke),
            Mock(),
        )

    async def ask(self, **fields: Any) -> list[tuple[str, int]] | None:
        asked = {"client_id": "m1", "consumer_group": "g", "strategy_name": "AVG", "topic": "T"}
        body = QueryAssignmentRequestBody(**(asked | fields)).encode()
        reply = await self._processor.assignment(RemotingCommand.request(400, {}, body), Mock())
        if reply.body == b'{"messageQueueAssignments":null}':
            return None
        found = QueryAssignmentResponseBody.decode(reply.body).message_queue_assignments
        return [(one.message_queue.broker_name, one.message_queue.queue_id) for one in found]


def route(broker: str, count: int) -> Mock:
    """Of `count` queues of that broker, and some of another one that cannot be read."""
    queues = [
        QueueData(broker_name=broker, read_queue_nums=count, write_queue_nums=count, perm=6),
        QueueData(broker_name="unread", read_queue_nums=2, write_queue_nums=2, perm=2),
    ]
    return Mock(code=0, body=TopicRouteData(queue_datas=queues).encode())


@pytest.mark.parametrize(
    ("fields", "config", "members", "numbers"),
    [
        ({}, {}, ["m1", "m2"], [0, 1]),
        ({"message_model": BROADCASTING}, {}, ["m1", "m2"], [0, 1, 2, 3]),
        ({}, {"server_load_balancer_enable": False}, ["m1", "m2"], [0, 1, 2, 3]),
        ({}, POP, ["m1", "m2"], [ANY_QUEUE]),
        ({"topic": "%RETRY%g"}, POP, ["m1", "m2"], [0, 1]),
        ({"strategy_name": "NONE"}, {}, ["m1", "m2"], None),
        ({}, {}, [], None),
    ],
)
async def test_the_share_of_a_member(fields, config, members, numbers):
    got = await Rig(members, route("a", 4), **config).ask(**fields)
    assert got == (None if numbers is None else [("a", number) for number in numbers])


async def test_a_route_is_kept_for_a_while_and_longer_while_no_name_server_answers():
    gone, unknown = ConnectError("n1", "refused"), Mock(code=17)
    rig = Rig(["m1"], gone, route("a", 2), unknown, OSError(), *[gone] * 6)
    for at_ms, asked in ((0, 2), (ROUTE_KEPT_MS - 1, 2), (ROUTE_KEPT_MS, 4), (9_999, 4)):
        rig.now_ms = at_ms
        assert await rig.ask() == [("a", 0), ("a", 1)]
        assert rig.invoke.await_count == asked
    assert await rig.ask(topic="U") == [("own", 0)], "of a topic without a route its own queues"
    rig.config = TopicConfig(read_queue_nums=1, perm=2)
    assert await rig.ask(topic="V") is None
    rig.config = None
    assert await rig.ask(topic="W") is None


async def test_r58_a_route_of_too_many_queues_counts_as_none():
    """Each queue becomes an object here, and a name server believes what brokers register."""
    rig = Rig(["m1"], *[route("a", ROUTE_QUEUES_MAX + 1)] * 2, route("a", 2))
    assert await rig.ask() == [("own", 0)]
    rig.now_ms = ROUTE_KEPT_MS
    assert await rig.ask() == [("a", 0), ("a", 1)]


@pytest.mark.counts_turns
async def test_r58_all_queues_of_a_wide_topic_are_answered_in_turns():
    rig = Rig(["m1"], route("a", 65_536))
    await rig._processor._queues("T")
    with counted_turns() as turns:
        body = QueryAssignmentRequestBody(topic="T", message_model=BROADCASTING).encode()
        request = RemotingCommand.request(400, {}, body)
        reply = await asyncio.create_task(rig._processor.assignment(request, Mock()))
    assert turns.lines < 10_000
    assert reply.body.count(b'"mode":"PULL"') == 65_536


async def test_r58_an_assignment_that_fits_into_no_frame_and_a_topic_of_no_name_are_refused():
    rig = Rig(["m1"], route("a", ASSIGNED_MAX + 1))
    for fields, named in (({}, "one answer has at most"), ({"topic": "t" * 256}, "256 characters")):
        with pytest.raises(BrokerRefusal, match=named):
            await rig.ask(**fields)
    assert list(rig._processor._routes) == ["T"]


@pytest.mark.parametrize(("routes_max", "queues_max"), [(2, 100), (100, 2)])
async def test_r58_so_many_routes_and_queues_are_kept(monkeypatch, routes_max, queues_max):
    monkeypatch.setattr(assignment, "ROUTES_MAX", routes_max)
    monkeypatch.setattr(assignment, "QUEUES_MAX", queues_max)
    rig = Rig(["m1"], *(route("a", 1) for _ in range(4)))
    for topic, asked in (("T", 1), ("U", 2), ("T", 2), ("V", 3), ("T", 4)):
        assert await rig.ask(topic=topic) == [("a", 0)]
        assert rig.invoke.await_count == asked


async def test_members_that_ask_at_once_share_a_question_which_none_of_them_ends():
    answered = asyncio.Event()

    async def answer(*_: object) -> Mock:
        await answered.wait()
        return route("a", 1)

    rig = Rig(["m1"])
    rig.invoke.side_effect = answer
    first, second = asyncio.ensure_future(rig.ask()), asyncio.ensure_future(rig.ask())
    while not rig.invoke.await_count:  # noqa: ASYNC110
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    answered.set()
    assert await second == [("a", 0)] and rig.invoke.await_count == 1
