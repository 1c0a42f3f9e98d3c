"""Which brokers hear of a client's members."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from batonmq.client.consumer.lite_pull_consumer import LitePullConsumer
from batonmq.client.consumer.options import MessageModel, PushConsumerOptions
from batonmq.client.consumer.pop_consumer import PopConsumer
from batonmq.client.consumer.pull_consumer import PullConsumer
from batonmq.client.consumer.push_consumer import PushConsumer
from batonmq.client.errors import ClientError
from batonmq.client.instance.heartbeats import ClientMember, Heartbeats
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.bodies import ConsumerData, HeartbeatData
from batonmq.protocol.codes import RequestCode
from batonmq.remoting.command import RemotingCommand

NS = ["h:1"]


class Producer(ClientMember):
    def producer_group(self) -> str:
        return "p"


class Consumer(ClientMember):
    def consumer_data(self) -> ConsumerData:
        return ConsumerData(group_name="g")


def started(*members: ClientMember) -> tuple[Heartbeats, list[tuple[str, RemotingCommand]]]:
    """And what they send."""
    sent: list[tuple[str, RemotingCommand]] = []

    async def invoke(address: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        sent.append((address, request))
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
    return heartbeats, sent


@pytest.mark.parametrize(
    ("members", "reported"),
    [
        ((), []),
        ((Producer(),), ["m:1"]),
        ((Consumer(),), ["m:1", "s:1"]),
        ((Producer(), Consumer()), ["m:1", "s:1"]),
    ],
    ids=["nobody", "a producer", "a consumer", "both"],
)
def test_slaves_hear_of_consumers_and_masters_of_all(
    members: tuple[ClientMember, ...], reported: list[str]
) -> None:
    """A slave that becomes master has the groups complete, so no queue moves."""
    heartbeats, sent = started(*members)
    asyncio.run(heartbeats.send())
    assert {request.code for _, request in sent} <= {RequestCode.HEART_BEAT}
    assert sorted(address for address, _ in sent) == reported


def consumers(kinds: str) -> list[ClientMember]:
    """Of one group. p: push, b: broadcasting, l: lite, a: lite that assigns, q: pull, o: POP."""
    made: list[ClientMember] = []
    for kind in kinds:
        if kind in "pb":
            model = MessageModel.CLUSTERING if kind == "p" else MessageModel.BROADCASTING
            options = PushConsumerOptions(model)
            push = PushConsumer(
                "g", lambda messages, context: None, name_servers=NS, options=options
            )
            push.subscribe("A")
            made.append(push)
        elif kind in "la":
            lite = LitePullConsumer("g", name_servers=NS)
            if kind == "l":
                lite.subscribe("B")
            made.append(lite)
        else:
            made.append((PullConsumer if kind == "q" else PopConsumer)("g", name_servers=NS))
    return made


@pytest.mark.parametrize("kinds", ["oo", "qq", "pq", "qp", "po", "al", "la", "pb", "bb"])
def test_consumers_of_a_group_that_do_not_both_share_its_queues_may_share_an_instance(
    kinds: str,
) -> None:
    heartbeats, _ = started(*consumers(kinds))
    assert len(heartbeats.members) == 2


@pytest.mark.parametrize("kinds", ["pp", "pl", "lp", "ll", "pqp"])
def test_two_consumers_that_share_the_queues_of_a_group_need_an_instance_each(kinds: str) -> None:
    *others, last = consumers(kinds)
    heartbeats, _ = started(*others)
    with pytest.raises(ClientError, match="a consumer of group g already"):
        heartbeats.add(last)


def test_consumers_of_a_group_share_a_heartbeat_whose_first_is_the_one_that_shares_queues() -> None:
    """Of two `ConsumerData` of a group, brokers keep the subscriptions of the last only."""
    pull, push = consumers("qp")
    pull._subscribe("B", "*")  # type: ignore[attr-defined]
    heartbeats, sent = started(pull, push)
    asyncio.run(heartbeats.send())
    (data,) = HeartbeatData.decode(sent[0][1].body).consumer_data_set
    assert data.consume_type == "CONSUME_PASSIVELY"
    assert [subscription.topic for subscription in data.subscription_data_set] == ["A", "B"]
    assert heartbeats.members == (push, pull), "the first one answers operators"


@pytest.mark.parametrize("kind", [Producer, Consumer])
def test_a_client_leaves_a_group_with_its_last_member(kind: type[ClientMember]) -> None:
    first, last = kind(), kind()
    heartbeats, sent = started(first, last)
    asyncio.run(heartbeats.remove(first))
    assert not sent
    asyncio.run(heartbeats.remove(last))
    assert [request.code for _, request in sent] == [RequestCode.UNREGISTER_CLIENT]
