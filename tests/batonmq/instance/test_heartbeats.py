"""Which brokers hear of a client's members."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from batonmq.client.instance.heartbeats import ClientMember, Heartbeats
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.bodies import ConsumerData
from batonmq.protocol.codes import RequestCode
from batonmq.remoting.command import RemotingCommand


class Producer(ClientMember):
    def producer_group(self) -> str:
        return "p"


class Consumer(ClientMember):
    def consumer_data(self) -> ConsumerData:
        return ConsumerData(group_name="g")


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ((), []),
        ((Producer(),), ["m:1"]),
        ((Consumer(),), ["m:1", "s:1"]),
        ((Producer(), Consumer()), ["m:1", "s:1"]),
    ],
    ids=["nobody", "a producer", "a consumer", "both"],
)
def test_slaves_hear_of_consumers_and_masters_of_all(
    members: tuple[ClientMember, ...], told: list[str]
) -> None:
    """A slave that becomes master has the groups complete, so nobody's queues move."""
    asked: list[str] = []

    async def invoke(address: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        assert request.code == RequestCode.HEART_BEAT
        asked.append(address)
        return RemotingCommand.response_to(request)

    connections: Any = SimpleNamespace(
        client_id="c",
        options=SimpleNamespace(request_timeout_ms=1),
        remoting=SimpleNamespace(invoke=invoke),
    )
    route = TopicRoute("T", (), (), {"b": {0: "m:1", 2: "s:1"}}, {})
    heartbeats = Heartbeats(connections, SimpleNamespace(all=lambda: [route]))  # type: ignore[arg-type]
    for member in members:
        heartbeats.add(member)
    asyncio.run(heartbeats.send())
    assert sorted(asked) == told
