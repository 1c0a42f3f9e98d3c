"""The progress of a group on its way to the brokers (R31): it never falls, none is forgotten."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock, Mock

from batonmq.client.consumer.offset_store import RemoteOffsetStore
from batonmq.protocol.errors import ConnectError
from batonmq.protocol.message import MessageQueue

Q0, Q1 = (MessageQueue("T", "broker-a", number) for number in (0, 1))


def store(*, address: str | None = "h:1") -> RemoteOffsetStore:
    """On a client whose route names one master; `remoting.oneway` notes what is sent."""
    routes = Mock(master_of=lambda name: address)
    client = Mock(routes=routes, remoting=Mock(oneway=AsyncMock()))
    made = RemoteOffsetStore(client, "g")
    made._calls = Mock(commit_offset=AsyncMock())
    return made


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
    made._client.routes.master_of = lambda name: "h:1"  # type: ignore[method-assign]
    asyncio.run(made.persist())
    assert sent(made) == [("0", "7")]


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
