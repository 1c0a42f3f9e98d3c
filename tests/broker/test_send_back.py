"""Retries and dead letters: 36 step by step, its fallback 310, the settings of groups that act."""

import json
from pathlib import Path

import pytest
from lone_broker import Rig, lone_broker, send_header

from batonmq.protocol.bodies import (
    LockBatchRequestBody,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
)
from batonmq.protocol.message import MessageExt, MessageQueue
from batonmq.protocol.numbers import INT_MAX
from batonmq.protocol.records.codec import decode_records
from batonmq.remoting.command import RemotingCommand

GOLDEN = Path(__file__).parents[1] / "golden" / "java-5.3.3"


async def records(rig: Rig, topic: str, queue: int = 0) -> list[MessageExt]:
    pulled = await rig.pull(topic, queue=queue, group="reader")
    return decode_records(pulled.body) if pulled.code == 0 else []


async def give_back(
    rig: Rig, offset: object, level: object = 0, group: str = "g", **ext: str
) -> RemotingCommand:
    header = {"offset": str(offset), "group": group, "delayLevel": str(level), **ext}
    return await rig.ask(36, header)


async def stored_offset(rig: Rig, topic: str = "T") -> int:
    return (await records(rig, topic))[-1].physical_offset


async def test_the_golden_send_back_is_stored_as_java_stores_it(rig):
    """The request as the Java client wrote it, and the delayed record that its broker made of it:
    the same place, counts and properties."""
    golden = json.loads((GOLDEN / "remoting" / "broker-36.json").read_text())
    fields = json.loads(golden["examples"][0]["request"]["header"])["extFields"]
    decoded = (GOLDEN / "store" / "b0" / "commitlog.decoded.jsonl").read_text().splitlines()
    wanted = next(
        line
        for line in map(json.loads, decoded)
        if line["properties"].get("REAL_TOPIC") == "%RETRY%gold_consumer"
    )
    given = {
        name: value
        for name, value in wanted["properties"].items()
        if name in ("TAGS", "KEYS", "UNIQ_KEY")
    }
    await rig.send("GoldTopic", b"hello 0", **given)
    first = (await records(rig, "GoldTopic"))[0]
    reply = await rig.ask(36, fields | {"offset": str(first.physical_offset)})
    assert (reply.code, reply.body) == (0, b"")
    (again,) = await records(rig, wanted["topic"], wanted["queueId"])
    assert again.reconsume_times == wanted["reconsumeTimes"]
    assert (again.topic, again.queue_id) == (wanted["topic"], wanted["queueId"])
    assert (again.body, again.born_host) == (first.body, first.born_host)
    assert again.born_timestamp == first.born_timestamp
    ours = dict(again.properties)
    for name in ("DELAY", "REAL_TOPIC", "REAL_QID", "RETRY_TOPIC", "WAIT", *given):
        assert ours[name] == wanted["properties"][name], name
    assert ours["ORIGIN_MESSAGE_ID"] == first.msg_id
    assert set(wanted["properties"]) - set(ours) <= {"WAIT"}


@pytest.mark.parametrize(
    ("times", "level", "ext", "dead", "delay"),
    [
        (0, 0, {}, False, "3"),
        (2, 0, {}, False, "5"),
        (2, 1, {}, False, "1"),
        (0, -1, {}, True, "0"),
        (16, 0, {}, True, "0"),
        (15, 0, {}, False, "18"),
        (2, 0, {"maxReconsumeTimes": "2"}, True, "0"),
        (16, 0, {"maxReconsumeTimes": "20"}, False, "18"),
    ],
)
async def test_the_level_and_the_end_of_retries(rig, times, level, ext, dead, delay):
    """Level 3 and one more each time, or what the consumer names; at the limit, or with a negative
    level, the dead letters."""
    header = send_header("T", 0, {"TAGS": "a", "KEYS": "k"}) | {"j": str(times)}
    assert (await rig.ask(310, header, b"body")).code == 0
    first = (await records(rig, "T"))[0]
    assert (await give_back(rig, first.physical_offset, level, **ext)).code == 0
    queue = 0 if dead else int(delay) - 1
    (again,) = await records(rig, "%DLQ%g" if dead else "SCHEDULE_TOPIC_XXXX", queue)
    assert (again.reconsume_times, again.properties["DELAY"]) == (times + 1, delay)
    assert (again.body, again.tags, again.properties["RETRY_TOPIC"]) == (b"body", "a", "T")
    config = rig.service.topics.get("%DLQ%g" if dead else "%RETRY%g")
    assert config is not None and (config.perm, config.read_queue_nums) == (6, 1)


async def test_a_retry_comes_back_to_its_group_and_remembers_where_it_began(rig):
    """The second retry keeps the first topic and the first id."""
    await rig.send(body=b"again")
    first = (await records(rig, "T"))[0]
    await give_back(rig, first.physical_offset, 1)
    pulled = await rig.pull("%RETRY%g", suspend_ms=5_000)
    (once,) = decode_records(pulled.body)
    await give_back(rig, once.physical_offset, -1)
    (dead,) = await records(rig, "%DLQ%g")
    assert (dead.body, dead.reconsume_times) == (b"again", 2)
    assert dead.properties["RETRY_TOPIC"] == "T"
    assert dead.properties["ORIGIN_MESSAGE_ID"] == first.msg_id


@pytest.mark.parametrize(
    ("ext", "code", "named"),
    [
        ({"offset": "7"}, 1, "look message by offset failed, 7"),
        ({"offset": "99999999"}, 1, "look message by offset failed"),
        ({"offset": "x"}, 29, "offset"),
        ({"delayLevel": ""}, 29, "delayLevel"),
        ({"group": ""}, 29, "group"),
        ({"group": "unknown"}, 26, "unknown"),
        ({"group": "readonly"}, 16, "may not be written"),
        ({"maxReconsumeTimes": "many"}, 29, "maxReconsumeTimes"),
    ],
)
async def test_what_cannot_be_given_back_is_refused_and_not_stored(tmp_path, ext, code, named):
    async with lone_broker(tmp_path, broker={"auto_create_subscription_group": False}) as rig:
        for group in ("g", "reader", "readonly"):
            await rig.ask(200, body=SubscriptionGroupConfig(group_name=group).encode())
        topic = {"topic": "%RETRY%readonly", "readQueueNums": "1", "writeQueueNums": "1"}
        assert (await rig.ask(17, topic | {"perm": "4"})).code == 0
        await rig.send()
        offset = await stored_offset(rig)
        await give_back(rig, offset, 1)
        before = rig.service.store.appender.messages_total
        header = {"offset": str(offset), "group": "g", "delayLevel": "0"} | ext
        reply = await rig.ask(36, header)
        assert reply.code == code and named in (reply.remark or "")
        assert rig.service.store.appender.messages_total == before


async def test_a_group_without_retry_queues_drops_and_says_so_by_success(rig):
    group = SubscriptionGroupConfig(group_name="g", retry_queue_nums=0)
    await rig.ask(200, body=group.encode())
    await rig.send()
    before = rig.service.store.max_phy_offset
    assert (await give_back(rig, await stored_offset(rig))).code == 0
    assert rig.service.topics.get("%RETRY%g") is None
    assert rig.service.tables.groups.get("reader") is not None
    assert not await records(rig, "SCHEDULE_TOPIC_XXXX", 2)
    assert rig.service.store.max_phy_offset >= before


async def test_the_settings_of_a_group_count(rig):
    """225 makes several; retryQueueNums spreads the retries, retryMaxTimes ends them; 352 shows."""
    groups = [
        SubscriptionGroupConfig(group_name="g", retry_queue_nums=3, retry_max_times=1),
        SubscriptionGroupConfig(group_name="h"),
    ]
    body = SubscriptionGroupList(group_config_list=groups).encode()
    assert (await rig.ask(225, body=body)).code == 0
    shown = await rig.ask(352, {"group": "g"})
    assert SubscriptionGroupConfig.decode(shown.body) == groups[0]
    assert b'"retryMaxTimes":16' in (await rig.ask(352, {"group": "new"})).body
    assert rig.service.tables.groups.get("new") is None, "to ask makes none"
    with_attribute = SubscriptionGroupConfig(group_name="j", attributes={"+priority.factor": "1"})
    assert (await rig.ask(200, body=with_attribute.encode())).code == 29
    for bad in (SubscriptionGroupConfig(), with_attribute):
        both = SubscriptionGroupList([SubscriptionGroupConfig(group_name="i"), bad])
        assert (await rig.ask(225, body=both.encode())).code == 29
    assert rig.service.tables.groups.get("i") is None
    await rig.send()
    offset = await stored_offset(rig)
    for _ in range(12):
        assert (await give_back(rig, offset, 1)).code == 0
    waiting = await records(rig, "SCHEDULE_TOPIC_XXXX", 0)
    assert {record.properties["REAL_QID"] for record in waiting} <= {"0", "1", "2"}
    assert len({record.properties["REAL_QID"] for record in waiting}) > 1
    config = rig.service.topics.get("%RETRY%g")
    assert config is not None and config.read_queue_nums == 3
    assert (await give_back(rig, waiting[0].physical_offset)).code == 0
    (dead,) = await records(rig, "%DLQ%g")
    assert dead.reconsume_times == 2


async def test_the_fallback_310_into_the_retry_topic(rig):
    """A client whose 36 failed sends by itself: a retry up to the limit (greater, not equal), then,
    or from a group that consumes in order, a dead letter that waits no more."""

    def fallback(times: int, **more: str) -> dict[str, str]:
        properties = {"DELAY": "3", "RETRY_TOPIC": "T"}
        return send_header("%RETRY%g", 0, properties) | {"j": str(times), "l": "2"} | more

    assert (await rig.ask(310, fallback(2), b"retry")).code == 0
    assert [m.body for m in await records(rig, "SCHEDULE_TOPIC_XXXX", 2)] == [b"retry"]
    assert (await rig.ask(310, fallback(3), b"dead")).code == 0
    lock = LockBatchRequestBody(
        client_id="c", consumer_group="g", mq_set=[MessageQueue("T", "broker-a", 0)]
    )
    assert (await rig.ask(41, body=lock.encode())).code == 0
    assert (await rig.ask(310, fallback(1), b"in order")).code == 0
    dead = await records(rig, "%DLQ%g")
    assert [m.body for m in dead] == [b"dead", b"in order"]
    config = rig.service.topics.get("%DLQ%g")
    assert config is not None and config.write_queue_nums == 1, "no template is asked"
    assert {m.properties["DELAY"] for m in dead} == {"-1"}
    batch = fallback(1) | {"m": "true"}
    assert (await rig.ask(320, batch, b"")).code == 13


async def test_what_a_consumer_sends_back_is_no_part_of_a_transaction(rig):
    """Old clients leave TRAN_MSG in it. As a half message it could be rolled back, and be lost."""
    properties = {"TRAN_MSG": "true", "PGROUP": "pg", "RETRY_TOPIC": "T", "DELAY": "1"}
    for times in (1, 17):
        header = send_header("%RETRY%g", 0, properties) | {"j": str(times)}
        assert (await rig.ask(310, header, b"%d" % times)).code == 0
    assert [m.body for m in await records(rig, "SCHEDULE_TOPIC_XXXX")] == [b"1"]
    assert [m.body for m in await records(rig, "%DLQ%g")] == [b"17"]


async def test_a_count_at_its_limit_can_be_given_back(rig):
    assert (await rig.ask(310, send_header("T", 0, {}) | {"j": str(INT_MAX)}, b"x")).code == 0
    assert (await give_back(rig, await stored_offset(rig))).code == 0
    (dead,) = await records(rig, "%DLQ%g")
    assert dead.reconsume_times == INT_MAX


async def test_what_is_given_back_has_the_crc_of_its_own_record_only(rig):
    """That of the record that failed would be read in its place, and the retry pass for damage."""
    await rig.send("T", b"failed")
    assert (await give_back(rig, await stored_offset(rig))).code == 0
    store = rig.service.store
    begin = await stored_offset(rig)
    raw = bytes(store.log.view(begin, store.max_phy_offset - begin))
    records_behind = decode_records(raw)[1:]
    assert records_behind and raw.count(b"__CRC32#") == 1 + len(records_behind)
