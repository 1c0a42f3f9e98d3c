"""10,000 topics, groups and offsets: their bodies are written without a step in Python for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from batonmq.broker.consume.consumer_manager import ConsumerManager
from batonmq.broker.pop.assignment import popped_share
from batonmq.broker.relay import SLICE, WAIT_MS, Relay
from batonmq.broker.role_gate import RoleGate
from batonmq.protocol.allocation import STRATEGIES
from batonmq.protocol.bodies import (
    ConsumerOffsetSerializeWrapper,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
    TopicConfig,
)
from batonmq.protocol.codes import LanguageCode, RequestCode
from batonmq.protocol.message import MessageQueue
from batonmq.remoting.command import RemotingCommand
from batonmq.store.consumer_offset import ConsumerOffsetManager
from batonmq.store.subscription_group import SubscriptionGroupManager
from batonmq.store.topic_config import TopicConfigManager
from tests.broker.heartbeats import heartbeat
from tests.shared.turns import counted_turns

MANY = 10_000
LINES_MAX = 200


def test_bodies_of_large_tables_are_encoded_in_one_go(tmp_path: Path) -> None:
    topics = TopicConfigManager(tmp_path / "topics.json")
    topics.put_all(TopicConfig(topic_name=f"T{number}") for number in range(MANY))
    groups = SubscriptionGroupManager(tmp_path / "groups.json")
    groups.put_all(SubscriptionGroupConfig(group_name=f"g{number}") for number in range(MANY))
    offsets = ConsumerOffsetManager(tmp_path / "offsets.json")
    for number in range(MANY):
        offsets.commit(f"g{number}", f"T{number}", 0, number)
    bodies: list[bytes] = []
    with counted_turns() as turns:
        for encode in (topics.encode_json, groups.encode_json, offsets.encode_for_slaves):
            turns.run(lambda encode=encode: bodies.append(encode()))
    assert turns.lines < LINES_MAX
    table = SubscriptionGroupWrapper.decode(bodies[1]).subscription_group_table
    assert b"null" not in bodies[1] and table["g77"] == groups.get("g77")
    sent = ConsumerOffsetSerializeWrapper.decode(bodies[2])
    assert sent.offset_table["T77@g77"] == {0: 77} and sent.data_version == offsets.data_version


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


def test_ten_thousand_that_waited_too_long_are_refused_in_slices() -> None:
    class Channel:
        closed = False
        replies = 0

        def reply(self, *_: object) -> None:
            self.replies += 1

        def handle(self, *_: object) -> None:
            raise AssertionError("there is no master")

    channel, relay = Channel(), Relay(RoleGate(), lambda: 0, enabled=True)
    for _ in range(MANY):
        send = RemotingCommand.request(RequestCode.SEND_MESSAGE)
        send.language = LanguageCode.JAVA
        assert relay.take(channel, send)  # type: ignore[arg-type]
    assert relay.tick(WAIT_MS - 1) is False and channel.replies == 0
    calls = 0
    while relay.tick(WAIT_MS):
        calls += 1
        assert channel.replies == calls * SLICE
    assert channel.replies == MANY and len(relay) == 0
