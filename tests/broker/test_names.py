"""Names of requests: checked where they enter, and again where they become paths (R46)."""

import json
from pathlib import Path

import pytest
from lone_broker import (
    Rig,
    end_of,
    lone_broker,
    messages,
    position,
    run_with_broker,
    topic_header,
    until,
)
from test_pop import pop

from batonmq.broker.config import BrokerConfig, ReplicasConfig
from batonmq.protocol.codes import ResponseCode

BAD = ["a/b", "../commitlog", "..", "a\0b", "a\nb", "é", "g" * 256, "/x"]


def tree(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["../commitlog", "..", ".", "T/", "/etc/x", "a\0b", "n" * 256])
async def test_r46_215_of_what_is_no_topic_is_refused(rig, tmp_path, name):
    assert (await rig.send("T", b"kept")).code == 0
    before = rig.service.store.max_phy_offset
    reply = await rig.ask(215, {"topic": name})
    assert reply.code == ResponseCode.INVALID_PARAMETER
    assert rig.service.store.max_phy_offset == before
    assert (tmp_path / "commitlog").is_dir()
    assert [m.body for m in await messages(rig, "T")] == [b"kept"]


async def test_text_that_no_file_could_contain_ends_no_broker(rig):
    """The tables of filters and locks are files: a write of one that fails ends the process."""
    half, queue = "\ud800", {"topic": "T", "brokerName": "b", "queueId": 0}
    filter_ = {"topic": "T", "subString": f"a = '{half}'", "expressionType": "SQL92"}
    consumer = {"groupName": "g", "subscriptionDataSet": [filter_]}
    bodies = {
        34: [
            {"clientID": half, "consumerDataSet": []},
            {"clientID": "c", "consumerDataSet": [consumer]},
        ],
        41: [{"consumerGroup": "g", "clientId": half, "mqSet": [queue]}],
        200: [{"groupName": "g", "attributes": {"+a": half}}],
    }
    assert (await rig.send("T", b"x")).code == 0
    for code, wanted in bodies.items():
        for body in wanted:
            reply = await rig.ask(code, body=json.dumps(body).encode())
            assert reply.code and "half of a surrogate pair" in (reply.remark or "")
    assert (await rig.send("T", b"x")).code == 0


@pytest.mark.parametrize("group", BAD)
async def test_r46_no_request_lets_a_bad_group_in(rig, group):
    queue = {"topic": "T", "brokerName": "b", "queueId": 0}
    await rig.send("T", b"x")
    before = rig.service.store.max_phy_offset
    subscription = {"topic": "T", "subString": "*"}
    consumer = {"groupName": group, "subscriptionDataSet": [subscription]}
    replies = [
        await rig.ask(
            34, body=json.dumps({"clientID": "c", "consumerDataSet": [consumer]}).encode()
        ),
        await rig.commit(1, group=group),
        await rig.ask(36, {"offset": "0", "group": group, "delayLevel": "-1"}),
        await rig.ask(200, body=json.dumps({"groupName": group}).encode()),
        await rig.ask(207, {"groupName": group}),
        await rig.ask(353, {"group": group, "topic": "T", "readable": "false"}),
        await rig.ask(
            41,
            body=json.dumps({"consumerGroup": group, "clientId": "c", "mqSet": [queue]}).encode(),
        ),
        await rig.ask(
            401, body=json.dumps({"consumerGroup": group, "topic": "T", "mode": "POP"}).encode()
        ),
        await rig.send(f"%RETRY%{group}", b"x"),
        await rig.send(f"%DLQ%{group}", b"x"),
        await rig.pull("T", group=group),
        await pop(rig, topic="T", consumerGroup=group),
    ]
    assert {reply.code for reply in replies[1:]} == {ResponseCode.INVALID_PARAMETER}
    assert rig.service.store.max_phy_offset == before
    assert group not in rig.service.topics.groups


def test_r46_a_group_too_long_for_retries_loses_nothing(tmp_path):
    """255 characters are legal. It consumes; what it gives back is refused and stays with it."""
    group = "g" * 251

    async def play(rig: Rig) -> None:
        sent = await rig.send("T", b"fails")
        offset = str(int(sent.ext["msgId"][16:], 16))
        beat = {"clientID": "c", "consumerDataSet": [{"groupName": group}]}
        assert (await rig.ask(34, body=json.dumps(beat).encode())).code == 0
        assert (await rig.pull("T", group=group)).code == 0
        for level in ("-1", "0"):
            reply = await rig.ask(36, {"offset": offset, "group": group, "delayLevel": level})
            assert reply.code == ResponseCode.INVALID_PARAMETER and "255" in reply.remark
        too_long = await pop(rig, topic="T", consumerGroup=group)
        assert too_long.code == ResponseCode.INVALID_PARAMETER and "too long" in too_long.remark
        fits = "g" * 248
        reply = await rig.ask(36, {"offset": offset, "group": fits, "delayLevel": "-1"})
        assert reply.code == 0 and end_of(rig, f"%DLQ%{fits}") == 1

    run_with_broker(tmp_path, play)
    run_with_broker(tmp_path, lambda rig: check_dead_letter(rig, "g" * 248))


async def check_dead_letter(rig: Rig, group: str) -> None:
    assert end_of(rig, f"%DLQ%{group}") == 1


async def test_r46_retries_of_two_pairs_stay_apart(rig, clock):
    pairs = [("pay", "core_orders"), ("pay_core", "orders")]
    for group, topic in pairs:
        await rig.send(topic, group.encode())
        assert (await pop(rig, topic=topic, consumerGroup=group)).code == 0
    clock.ahead_ms += 61_000
    for group, topic in pairs:
        retry = f"%RETRY%{group}+{topic}"
        await until(lambda retry=retry: end_of(rig, retry) == 1)
        assert [m.body for m in await messages(rig, retry)] == [group.encode()]
    assert (await rig.ask(215, {"topic": "core_orders"})).code == 0
    assert end_of(rig, "%RETRY%pay_core+orders") == 1


async def test_r46_a_shared_retry_topic_of_before_stays_while_another_pair_has_it(rig):
    shared = "%RETRY%pay_core_orders"
    for group, topic in (("pay", "core_orders"), ("pay_core", "orders")):
        await rig.send(topic, b"x")
        await pop(rig, topic=topic, consumerGroup=group)
        assert (await rig.commit(1, group=group, topic=topic)).code == 0
    rig.service.topics.of_group(shared, 1)
    assert (await rig.ask(215, {"topic": "core_orders"})).code == 0
    assert shared in rig.service.topics.topics
    assert (await rig.ask(215, {"topic": "orders"})).code == 0
    await until(lambda: "orders" not in rig.service.topics.topics)


async def test_r46_tables_and_records_with_bad_names_open(tmp_path):
    config = tmp_path / "config"
    config.mkdir(parents=True)
    topic = {"topicName": "a/b", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    (config / "topics.json").write_text(
        json.dumps({"topicConfigTable": {"a/b": topic, "T": {**topic, "topicName": "T"}}})
    )
    (config / "subscriptionGroup.json").write_text(
        json.dumps({"subscriptionGroupTable": {"..": {"groupName": ".."}, "g": {"groupName": "g"}}})
    )
    bad = {"v": 1, "deletedTopics": ["../commitlog", ".."], "groups": {"x/y": {"groupName": "x/y"}}}

    async with lone_broker(tmp_path) as rig:
        topics = rig.service.topics
        assert "a/b" not in topics.topics and "T" in topics.topics
        assert ".." not in topics.groups and "g" in topics.groups
        rig.service.topics._append(json.dumps(bad).encode())  # as an earlier version wrote it
        assert (await rig.send("T", b"kept")).code == 0
    async with lone_broker(tmp_path) as rig:
        assert [m.body for m in await messages(rig, "T")] == [b"kept"]
        assert (tmp_path / "commitlog").is_dir() and "x/y" not in rig.service.topics.groups


@pytest.mark.parametrize("name", ["a/b", "..", "x\n", "n" * 229, ""])
def test_r46_names_in_the_configuration(name):
    for key in ("broker_name", "broker_cluster_name"):
        with pytest.raises(ValueError, match="is "):
            BrokerConfig(**{key: name})


@pytest.mark.parametrize(
    ("kind", "field", "value", "key"),
    [
        (BrokerConfig, "slave_sync_interval", 0, "slaveSyncIntervalMs"),
        (BrokerConfig, "default_topic_queue_nums", 0, "defaultTopicQueueNums"),
        (BrokerConfig, "default_topic_queue_nums", 65_537, "defaultTopicQueueNums"),
        (ReplicasConfig, "broker_heartbeat_interval", 0, "brokerHeartbeatInterval"),
    ],
)
def test_a_pause_of_no_time_and_a_topic_without_queues_are_refused(kind, field, value, key):
    """Such a pause would ask or send without an end, for all of the processor."""
    with pytest.raises(ValueError, match=f"{key} is {value}: .* allowed"):
        kind(**{field: value})


@pytest.mark.parametrize("field", ["commitOffset", "queueId"])
@pytest.mark.parametrize("number", [str(10**30), "9" * 5000, str(-(10**20)), "1_0"])
async def test_r46_numbers_have_64_bits(rig, field, number):
    await rig.send("T")
    reply = await rig.ask(15, position() | {"commitOffset": "1", field: number})
    assert reply.code == ResponseCode.INVALID_PARAMETER
    assert "64 bits" in reply.remark and len(reply.remark) < 300


async def test_r58_no_setting_of_a_group_or_topic_is_large(rig):
    """A heartbeat makes the retry topic of a group, and tools list each queue of a topic."""
    for settings in ({"retryQueueNums": 65_537}, {"groupRetryPolicy": {"custom": "x" * 20_000}}):
        config = {"groupName": "g"} | settings
        for code, body in ((200, config), (225, {"groupConfigList": [config]})):
            reply = await rig.ask(code, body=json.dumps(body).encode())
            assert reply.code == ResponseCode.INVALID_PARAMETER and "allowed are" in reply.remark
    reply = await rig.ask(17, topic_header("T", topicFilterType="x" * 65))
    assert reply.code == ResponseCode.INVALID_PARAMETER and "topicFilterType" in reply.remark
    topics = rig.service.topics
    assert "g" not in topics.groups and topics.get("T") is None
    topics.of_group("%RETRY%earlier", 1 << 31)
    assert topics.get("%RETRY%earlier").read_queue_nums == 65_536


async def test_r58_topics_and_groups_have_a_limit(tmp_path):
    async with lone_broker(
        tmp_path, broker={"topics_max": 40, "subscription_groups_max": 20}
    ) as rig:
        topics = rig.service.topics
        codes = [(await rig.send(f"T{n}", b"x")).code for n in range(30)]
        assert codes == sorted(codes) and set(codes) == {0, ResponseCode.NO_PERMISSION}
        assert len(topics.topics) == 40
        refused = await rig.send("another", b"x")
        assert "topicsMax is 40" in refused.remark
        assert (await rig.send("T0", b"x")).code == 0
        codes = [(await rig.pull("T0", group=f"g{n}")).code for n in range(30)]
        assert set(codes) == {0, ResponseCode.NO_PERMISSION}
        beat = {"clientID": "c", "consumerDataSet": [{"groupName": "g0"}]}
        assert (await rig.ask(34, body=json.dumps(beat).encode())).code == 0
        assert "%RETRY%g0" in topics.topics  # of a group that is there
        pairs = [(group, topic) for topic in ("T0", "T1") for group in topics.groups.table]
        for group, topic in pairs[:21]:
            forbid = {"group": f"{group}-no", "topic": topic, "readable": "false"}
            mode = {"consumerGroup": group, "topic": topic, "mode": "POP"}
            replies = [
                await rig.ask(353, forbid),
                await rig.ask(401, body=json.dumps(mode).encode()),
            ]
        assert all("subscriptionGroupsMax is 20" in (each.remark or "") for each in replies)
        assert (await rig.ask(353, forbid | {"readable": "true"})).code == 0
