"""The progress of a group on its way to the brokers (R31): it never falls, none is forgotten."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from batonmq.client.consumer.offset_store import RemoteOffsetStore
from batonmq.client.consumer.push_consumer import PushConsumer
from batonmq.client.instance.routes import RouteTable
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.errors import BatonError, ConnectError
from batonmq.protocol.message import MessageQueue

Q0, Q1 = (MessageQueue("T", "broker-a", number) for number in (0, 1))


def store(*, address: str | None = "h:1") -> RemoteOffsetStore:
    """On a client whose routes name one master; `remoting.oneway` notes what is sent."""
    routes = RouteTable(Mock(), Mock())
    name_master(routes, address)
    client = Mock(routes=routes, remoting=Mock(oneway=AsyncMock()))
    made = RemoteOffsetStore(client, "g")
    made._calls = Mock(commit_offset=AsyncMock())
    return made


def name_master(routes: RouteTable, address: str | None, topic: str = "T") -> None:
    """A route of the topic arrives."""
    of_group = {0: address} if address is not None else {2: "h:9"}
    routes._adopt(TopicRoute(topic, (), (), {"broker-a": of_group, "broker-b": of_group}, {}))


def sent(made: RemoteOffsetStore) -> list[tuple[str, str]]:
    calls = made._client.remoting.oneway.await_args_list  # type: ignore[attr-defined]
    return [(call.args[1].ext["queueId"], call.args[1].ext["commitOffset"]) for call in calls]


def test_progress_never_falls_but_by_a_reset() -> None:
    made = store()
    made.update(Q0, 7)
    made.update(Q0, 5)
    assert made.known(Q0) == 7
    made.reset(Q0, 3)
    assert made.known(Q0) == 3


def test_each_offset_is_sent_once_until_it_changes() -> None:
    made = store()
    made.update(Q0, 7)
    made.update(Q1, 9)
    asyncio.run(made.persist())
    asyncio.run(made.persist())
    assert sent(made) == [("0", "7"), ("1", "9")]
    made.update(Q0, 8)
    asyncio.run(made.persist())
    assert sent(made)[2:] == [("0", "8")]


def test_what_could_not_be_sent_is_sent_again() -> None:
    made = store()
    made.update(Q0, 7)
    made._client.remoting.oneway.side_effect = [ConnectError("h:1", "refused"), None]  # type: ignore[attr-defined]
    asyncio.run(made.persist())
    asyncio.run(made.persist())
    assert sent(made) == [("0", "7"), ("0", "7")]


def test_without_a_master_progress_waits() -> None:
    made = store(address=None)
    made.update(Q0, 7)
    asyncio.run(made.persist())
    assert sent(made) == []
    name_master(made._client.routes, "h:1")
    asyncio.run(made.persist())
    assert sent(made) == [("0", "7")]


def test_a_stale_route_of_another_topic_sends_no_progress_to_the_old_master() -> None:
    made = store(address="new:1")
    routes = made._client.routes
    name_master(routes, "old:1", topic="C")
    made.update(Q0, 7)
    asyncio.run(made.persist())
    oneway = made._client.remoting.oneway
    assert [call.args[0] for call in oneway.await_args_list] == ["new:1"]  # type: ignore[attr-defined]
    assert routes.is_master("new:1") and routes.is_master("old:1")


def test_what_a_stale_route_sent_to_the_old_master_is_sent_again_to_the_new_one() -> None:
    made = store(address="old:1")
    name_master(made._client.routes, "new:1", topic="C")
    made.update(Q0, 7)
    asyncio.run(made.persist())
    name_master(made._client.routes, "new:1")
    asyncio.run(made.persist())
    asyncio.run(made.persist())
    oneway = made._client.remoting.oneway
    assert [call.args[0] for call in oneway.await_args_list] == ["old:1", "new:1"]  # type: ignore[attr-defined]


def test_a_failover_sends_the_offsets_of_that_broker_again() -> None:
    made = store()
    other = MessageQueue("T", "broker-b", 0)
    made.update(Q0, 7)
    made.update(other, 9)
    asyncio.run(made.persist())
    made.resend({"broker-a"})
    asyncio.run(made.persist())
    assert sent(made) == [("0", "7"), ("0", "9"), ("0", "7")]


def test_a_queue_that_is_given_up_hands_over_what_is_not_stored() -> None:
    made = store()
    made.update(Q0, 7)
    made.update(Q1, 9)
    asyncio.run(made.persist())
    made.update(Q0, 8)
    asyncio.run(made.release([Q0, Q1]))
    calls = made._calls.commit_offset.await_args_list  # type: ignore[attr-defined]
    assert [call.args[1:3] for call in calls] == [(Q0, 8)]
    assert made.known(Q0) is None and made.known(Q1) is None


@pytest.mark.parametrize("failure", [OSError("no space left on device"), BatonError("no master")])
def test_progress_that_could_not_be_stored_is_stored_the_next_time(failure: Exception) -> None:
    outcomes = [failure, failure]

    async def persist() -> None:
        if not outcomes:
            raise asyncio.CancelledError
        raise outcomes.pop()

    consumer: Any = Mock(options=Mock(persist_ms=0), _offsets=Mock(persist=persist), group="g")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(PushConsumer._persist_loop(consumer))
    assert outcomes == []


def test_progress_is_handed_over_when_nothing_more_can_be_consumed() -> None:
    """1. Pulling ends. 2. The last listener calls end, and commit. 3. What they committed goes to
    the next owner."""
    steps: list[str] = []

    def step(name: str) -> AsyncMock:
        return AsyncMock(side_effect=lambda *_: steps.append(name))

    reader = Mock(stop=step("reading ends"))
    consumer: Any = Mock(_readers={Q0: reader}, _offsets=Mock(release=step("handed over")))
    service: Any = Mock(release=step("calls end"))
    asyncio.run(PushConsumer._give_up(consumer, [Q0], service))
    assert steps == ["reading ends", "calls end", "handed over"]
    assert consumer._readers == {}
