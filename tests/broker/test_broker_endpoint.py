"""A whole broker behind its endpoint, outside controller mode: the answer to each code."""

import asyncio
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from heartbeats import heartbeat
from lone_broker import (
    Rig,
    lone_broker,
    long_send_header,
    make_group,
    position,
    run_with_broker,
    send_header,
    topic_header,
    until,
)

from batonmq.broker.tables.topic_config import topic_config
from batonmq.protocol.batch import BatchItem, encode_batch
from batonmq.protocol.bodies import SubscriptionGroupConfig, TopicConfigAndMappingSerializeWrapper
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.message_id import decode_offset_msg_id
from batonmq.protocol.records.codec import NewMessage, decode_records
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Processors
from batonmq.remoting.endpoint import RemotingClient
from batonmq.store.appender import EncodedBatch

GOLDEN = Path(__file__).parents[1] / "golden" / "java-5.3.3"


async def test_send_and_pull_a_message(rig):
    reply = await rig.send(body=b"hello", TAGS="TagA", KEYS="k1 k2")
    assert reply.code == 0
    assert reply.ext["queueOffset"] == "0" and reply.ext["transactionId"] == "KEY1"
    address, offset = decode_offset_msg_id(reply.ext["msgId"])
    assert (address, offset) == (rig.service.address, int(reply.ext["msgId"][16:], 16))
    pulled = await rig.pull()
    assert (pulled.code, pulled.ext["nextBeginOffset"]) == (0, "1")
    (message,) = decode_records(pulled.body)
    assert (message.body, message.tags, message.properties["CLUSTER"]) == (
        b"hello",
        "TagA",
        "DefaultCluster",
    )


def test_a_start_says_how_long_store_and_role_took(tmp_path, caplog):
    """So a start that is late on a busy machine names what it waited for."""

    async def play(_: Rig) -> None:
        (started,) = (r.getMessage() for r in caplog.records if "broker_started" in r.getMessage())
        assert re.search(r" store_ms=\d+ role_ms=\d+$", started)

    with caplog.at_level(logging.INFO):
        run_with_broker(tmp_path, play)


async def test_v1_batch_and_oneway(rig):
    assert (await rig.ask(10, long_send_header(properties="UNIQ_KEY\x01V1\x02"), b"one")).code == 0
    items = [BatchItem(b"two", b"UNIQ_KEY\x01B1\x02"), BatchItem(b"three", b"TAGS\x01x\x02")]
    batch = await rig.ask(320, send_header("T", 0, {}) | {"m": "true"}, encode_batch(items))
    assert (batch.code, batch.ext["queueOffset"]) == (0, "1")
    assert len(batch.ext["msgId"].split(",")) == 2
    await rig.client.oneway(
        rig.service.address, RemotingCommand.request(310, send_header("T", 0, {}), b"four")
    )
    bodies: list[bytes] = []
    while len(bodies) < 4:
        pulled = await rig.pull(offset=len(bodies), suspend_ms=5000)
        bodies += [message.body for message in decode_records(pulled.body)]
    assert bodies == [b"one", b"two", b"three", b"four"]


@pytest.mark.parametrize(
    ("ext", "body", "code", "named"),
    [
        ({"b": "bad topic!"}, b"x", 29, "bad topic!"),
        ({"b": "SCHEDULE_TOPIC_XXXX"}, b"x", 16, "SCHEDULE_TOPIC_XXXX"),
        ({"b": "T", "c": "NoTemplate"}, b"x", 17, "create it with mqctl updateTopic"),
        ({"e": "7"}, b"x", 29, "queueId 7"),
        ({"e": "seven"}, b"x", 1, "queueId"),
        ({"b": "TBW102"}, b"x" * (5 << 20), 13, "maxMessageSize"),
        ({"i": "k\x01" + "v" * 40_000}, b"x", 13, "properties"),
    ],
)
async def test_a_bad_send_is_refused_by_name(rig, ext, body, code, named):
    reply = await rig.ask(310, send_header("T", 0, {}) | ext, body)
    assert reply.code == code and named in (reply.remark or "")
    assert (await rig.send("After")).code == 0, "the broker continues"


async def test_the_template_of_new_topics_follows_the_configuration(tmp_path):
    """defaultTopicQueueNums bounds the queues of a topic that its first message creates;
    autoCreateTopicEnable false leaves no template."""

    async with lone_broker(tmp_path / "few", broker={"default_topic_queue_nums": 2}) as rig:
        await rig.send()
        created = rig.service.tables.topics.get("T")
        assert created is not None and created.write_queue_nums == 2
    async with lone_broker(tmp_path / "none", broker={"auto_create_topic_enable": False}) as rig:
        assert (await rig.send()).code == 17
        assert rig.service.tables.topics.get("TBW102") is None


async def test_a_held_pull_is_woken_by_the_message_it_waits_for(rig):
    await rig.send()
    waiting = asyncio.create_task(rig.pull(offset=1, suspend_ms=60_000, tags="TagB"))
    await until(lambda: rig.service.pull.held > 0)
    await rig.send(TAGS="TagA")
    await rig.send(body=b"wanted", TAGS="TagB")
    pulled = await waiting
    assert [m.body for m in decode_records(pulled.body)] == [b"wanted"]
    assert pulled.ext["nextBeginOffset"] == "3"


async def test_an_empty_pull_is_answered_when_its_time_is_over(rig):
    await rig.send()
    pulled = await rig.pull(offset=1, suspend_ms=60)
    assert (pulled.code, pulled.ext["nextBeginOffset"]) == (19, "1")
    assert (await rig.pull(offset=99)).code == 21
    assert (await rig.pull("Nowhere")).code == 17
    assert (await rig.pull(queue=9)).code == 29


async def test_the_first_read_of_a_pull_that_may_wait_is_answered_as_in_java(rig):
    """DefaultMQPullConsumer.pullBlockIfNotFound shows the answer to its caller."""
    below = await rig.pull("Empty", offset=-1, suspend_ms=60_000)
    assert below.code == 17
    assert (await rig.ask(17, topic_header("Empty"))).code == 0
    below = await rig.pull("Empty", offset=-1, suspend_ms=60_000)
    assert (below.code, below.ext["nextBeginOffset"]) == (21, "0")
    await rig.send(TAGS="A")
    unmatched = await rig.pull(tags="B", suspend_ms=60_000)
    assert (unmatched.code, unmatched.ext["nextBeginOffset"]) == (20, "1")


async def test_r28_offsets_for_clients_are_confirmed_ones(rig):
    """Max offset, search by time and the pull's own maxOffset all come from the consume queue,
    which ends at confirmOffset; the earliest and the group's offset likewise."""
    for _ in range(3):
        await rig.send()
    where = {"topic": "T", "queueId": "0"}
    assert (await rig.ask(30, where)).ext["offset"] == "3"
    assert (await rig.ask(31, where)).ext["offset"] == "0"
    assert (await rig.ask(29, where | {"timestamp": "0"})).ext["offset"] == "0"
    assert (await rig.ask(29, where | {"timestamp": str(2**50)})).ext["offset"] == "3"
    assert int((await rig.ask(32, where)).ext["timestamp"]) > 0
    bad = await rig.ask(29, where | {"timestamp": "0", "boundaryType": "middle"})
    assert bad.code == 29 and "lower and upper" in (bad.remark or "")


async def test_group_offsets(rig):
    where = position()
    rig.service.topics.put_topic(topic_config("T", 1))
    for _ in range(2):
        assert (await rig.ask(14, where | {"setZeroIfNotFound": "false"})).code == 22
        assert (await rig.committed()).ext["offset"] == "0"
        await rig.send()  # a consumer that saw the queue empty begins with this message
    refused = await rig.commit(5, topic="Nowhere")
    assert (refused.code, refused.remark) == (26, "Group g not exist!")
    assert rig.service.tables.groups.get("g") is None
    await make_group(rig)
    assert (await rig.commit(5)).code == 0
    assert (await rig.committed()).ext["offset"] == "5"
    assert (await rig.ask(15, where)).code == 29
    for queue_id, code in (("-1", 29), ("65536", 29), ("65535", 0)):
        commit = where | {"queueId": queue_id, "commitOffset": "0"}
        assert (await rig.ask(15, commit)).code == code
    assert b'"T@g":{"0":5,"65535":0}' in (await rig.ask(43)).body


async def test_members_are_notified_of_each_other(rig):
    """34 makes group and retry topic, 38 lists the members, 40 notifies the others, 35 leaves."""
    noticed: list[str] = []
    processors = Processors()
    processors.register(40, lambda cmd, _: noticed.append(cmd.ext["consumerGroup"]))
    other = RemotingClient(processors)

    join = RemotingCommand.request(34, {}, heartbeat("c1", "T").encode())
    await other.invoke(rig.service.address, join, 3000)
    await rig.ask(34, body=heartbeat("c2", "T").encode())
    listed = await rig.ask(38, {"consumerGroup": "g"})
    assert json.loads(listed.body) == {"consumerIdList": ["c1", "c2"]}
    await until(lambda: len(noticed) >= 2)
    assert rig.service.tables.topics.get("%RETRY%g") is not None
    await rig.ask(35, {"clientID": "c2", "consumerGroup": "g"})
    await other.close()
    while (await rig.ask(38, {"consumerGroup": "g"})).code == 0:
        pass


async def test_topics_and_groups_are_changed(rig):
    create = topic_header("New")
    assert (await rig.ask(17, create)).code == 0
    assert (await rig.ask(17, create | {"perm": "9"})).code == 29
    assert (await rig.ask(17, create | {"topic": "TBW102"})).code == 29
    table = TopicConfigAndMappingSerializeWrapper.decode((await rig.ask(21, vip=True)).body)
    assert table.topic_config_table["New"].write_queue_nums == 4
    group = SubscriptionGroupConfig(group_name="g9", retry_max_times=3)
    assert (await rig.ask(200, body=group.encode())).code == 0
    assert b'"retryMaxTimes":3' in (await rig.ask(201)).body
    await rig.send("New")
    assert (await rig.ask(215, {"topic": "New"})).code == 0
    assert (await rig.pull("New")).code == 17
    assert (await rig.ask(45)).code == 0


async def test_the_send_that_made_its_topic_is_answered_when_name_servers_know_it(rig, monkeypatch):
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(rig.service.send, "_when_known", waiting.append)
    sends = [asyncio.ensure_future(rig.send()) for _ in range(2)]
    await until(lambda: len(waiting) == 2)
    assert not any(sent.done() for sent in sends)
    for known in waiting:
        known()
    assert [(await sent).code for sent in sends] == [0, 0]
    assert (await rig.send()).code == 0
    assert len(waiting) == 2, "it is known now"


async def test_a_topic_that_was_made_is_answered_when_name_servers_know_it(rig, monkeypatch):
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(rig.service.registrar, "when_known", waiting.append)
    made = asyncio.ensure_future(rig.ask(17, topic_header()))
    await until(lambda: len(waiting) == 1)
    assert not made.done()
    waiting[0]()
    assert (await made).code == 0


async def test_queries_by_key_and_id(rig):
    sent = await rig.send(body=b"find me", KEYS="blue green")
    window = {"topic": "T", "maxNum": "10", "beginTimestamp": "0", "endTimestamp": str(2**50)}
    for key in ("blue", "green", "KEY1"):
        found = await rig.ask(12, window | {"key": key})
        assert [m.body for m in decode_records(found.body)] == [b"find me"]
    assert (await rig.ask(12, window | {"key": "red"})).code == 22
    offset = decode_offset_msg_id(sent.ext["msgId"])[1]
    by_id = await rig.ask(33, {"offset": str(offset)})
    assert decode_records(by_id.body)[0].body == b"find me"
    assert (await rig.ask(33, {"offset": str(offset + 1)})).code == 1


async def test_status_and_codes_that_are_not_supported(rig):
    table = json.loads((await rig.ask(28, vip=True)).body)["table"]
    assert table["brokerVersionDesc"] and table["brokerRole"] == "MASTER"
    assert table["earliestMessageTimeStamp"] == "-1"
    await rig.send()
    table = json.loads((await rig.ask(28)).body)["table"]
    assert int(table["earliestMessageTimeStamp"]) > 1_700_000_000_000
    assert json.loads((await rig.ask(907)).body)["master"] is True
    assert (await rig.ask(1007)).code == 1
    for unknown in (308, 513, 902, 4711):
        assert (await rig.ask(unknown)).code == 3


async def test_everything_survives_a_restart(tmp_path):
    async with lone_broker(tmp_path) as rig:
        await rig.send(body=b"kept", KEYS="k")
        await make_group(rig)
        await rig.commit(1)
    async with lone_broker(tmp_path) as rig:
        (message,) = decode_records((await rig.pull()).body)
        assert message.body == b"kept"
        assert (await rig.send()).ext["queueOffset"] == "1"
        assert (await rig.committed()).ext["offset"] == "1"


async def test_sync_flush_answers_after_the_disk_has_it(tmp_path):
    """R15: under SYNC_FLUSH what is confirmed is flushed."""
    async with lone_broker(tmp_path, flush_disk_type="SYNC_FLUSH") as rig:
        for _ in range(3):
            assert (await rig.send()).code == 0
            store = rig.service.store
            assert store.confirm_offset <= store.log.flushed_offset


async def test_a_broker_continues_a_java_store(tmp_path):
    """The golden directory of a Java broker: old messages are pulled, new ones appended."""
    folder = tmp_path / "store"
    shutil.copytree(GOLDEN / "store" / "b0", folder)
    async with lone_broker(folder, max_hash_slot_num=1000, max_index_num=4000) as rig:
        before = [
            message
            for queue in range(4)
            for message in decode_records((await rig.pull("GoldTopic", queue=queue)).body)
        ]
        assert {m.properties.get("KEYS") for m in before} >= {"key0", "key1"}
        sent = await rig.send("GoldTopic", b"ours", queue=1)
        assert sent.code == 0
        offset = int(sent.ext["queueOffset"])
        assert decode_offset_msg_id(sent.ext["msgId"])[1] >= 6760
        (again,) = decode_records((await rig.pull("GoldTopic", queue=1, offset=offset)).body)
        assert again.body == b"ours"


def many(count: int) -> list[BatchItem]:
    return [BatchItem(b"m%d" % n, b"UNIQ_KEY\x01%032X\x02" % n) for n in range(count)]


async def test_r58_a_large_batch_is_stored_as_a_whole_over_several_turns(rig):
    """Sends of others pass meanwhile; its messages follow each other in their queue."""
    items, fields = many(3_000), send_header("T", 0, {}) | {"m": "true"}
    batch = asyncio.ensure_future(rig.ask(320, fields, encode_batch(items)))
    other = await rig.send(body=b"other")
    reply = await batch
    assert other.code == reply.code == 0
    ids = reply.ext["msgId"].split(",")
    assert len(ids) == len(set(ids)) == 3_000
    store, first = rig.service.store, int(reply.ext["queueOffset"])
    await until(lambda: store.queries.max_offset_in_queue("T", 0) == 3_001)
    bodies: list[bytes] = []
    while len(bodies) < 3_000:
        found = store.queries.get_message("T", 0, first + len(bodies), 32)
        bodies += [each.body for each in decode_records(b"".join(found.parts))]
    assert bodies[:3_000] == [item.body for item in items]


async def test_r4_a_large_batch_stores_nothing_if_the_role_changes_meanwhile(rig, monkeypatch):
    assert (await rig.send()).code == 0
    gate, end = rig.service.path.gate, rig.service.store.max_phy_offset
    fields = send_header("T", 0, {}) | {"m": "true"}
    add = EncodedBatch.add

    def closes(batch: EncodedBatch, message: NewMessage) -> None:
        gate.close("the role has changed")
        add(batch, message)

    monkeypatch.setattr(EncodedBatch, "add", closes)
    reply = await rig.ask(320, fields, encode_batch(many(1_000)))
    assert reply.code != 0 and "the role has changed" in (reply.remark or "")
    assert rig.service.store.end_turn() == end


async def test_r58_a_bad_message_at_the_end_of_a_large_batch_refuses_all_of_it(rig):
    fields = send_header("T", 0, {}) | {"m": "true"}
    body = encode_batch([*many(1_000), BatchItem(b"x", b"DELAY\x013\x02")])
    assert (await rig.send()).code == 0
    end = rig.service.store.max_phy_offset
    reply = await rig.ask(320, fields, body)
    assert reply.code == ResponseCode.MESSAGE_ILLEGAL and "DELAY" in (reply.remark or "")
    assert rig.service.store.end_turn() == end


async def test_r15_a_send_is_refused_while_too_few_are_in_sync(tmp_path):
    async with lone_broker(tmp_path, min_in_sync_replicas=2) as rig:
        reply = await rig.send("NewTopic")
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert "not enough: 1, minInSyncReplicas is 2" in (reply.remark or "")
        assert rig.service.store.end_turn() == 0, "nothing was written, the topic neither"
