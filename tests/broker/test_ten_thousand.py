"""10,000 topics, groups and offsets: their bodies are written without a step in Python for each."""

from __future__ import annotations

from pathlib import Path

from batonmq.protocol.bodies import (
    ConsumerOffsetSerializeWrapper,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
    TopicConfig,
)
from batonmq.store.consumer_offset import ConsumerOffsetManager
from batonmq.store.subscription_group import SubscriptionGroupManager
from batonmq.store.topic_config import TopicConfigManager
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
