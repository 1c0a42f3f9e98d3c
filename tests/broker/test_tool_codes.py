"""What stock tools ask a broker beyond a topic and a group: overviews, groups that go, settings."""

import asyncio
import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from heartbeats import heartbeat
from lone_broker import Rig, run_with_broker, topic_header, until

from batonmq.broker.admin_processor import WITHOUT_EFFECT
from batonmq.broker.status import running_for
from batonmq.protocol.bodies import SubscriptionGroupWrapper
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.fastjson import loads
from batonmq.protocol.records.codec import decode_record, decode_records
from batonmq.protocol.topic_name import OUR_TOPICS, TOOLS_CONSUMER, TRANS_HALF_TOPIC
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime import runtime_settings
from batonmq.runtime.properties_text import parse_properties

SYSTEM = "CID_RMQ_SYS_TRANS"
EXPORTER_NUMBERS = """
msgPutTotalTodayNow sendThreadPoolQueueHeadWaitTimeMills queryThreadPoolQueueHeadWaitTimeMills
msgGetTotalTodayNow queryThreadPoolQueueSize bootTimestamp msgPutTotalYesterdayMorning
msgGetTotalYesterdayMorning pullThreadPoolQueueSize commitLogMinOffset
pullThreadPoolQueueHeadWaitTimeMills dispatchMaxBuffer brokerVersion consumeQueueDiskRatio
pageCacheLockTimeMills commitLogDiskRatio commitLogMaxOffset getMessageEntireTimeMax
msgPutTotalTodayMorning putMessageTimesTotal msgGetTotalTodayMorning sendThreadPoolQueueSize
startAcceptSendRequestTimeStamp putMessageEntireTimeMax earliestMessageTimeStamp
remainTransientStoreBufferNumbs queryThreadPoolQueueCapacity putMessageAverageSize
dispatchBehindBytes putMessageSizeTotal sendThreadPoolQueueCapacity pullThreadPoolQueueCapacity
"""
PUT_TIMES = (
    "<=0ms 0~10ms 10~50ms 50~100ms 100~200ms 200~500ms 500ms~1s 1~2s 2~3s 3~4s 4~5s 5~10s 10s~"
)
GOLDEN = Path(__file__).parents[1] / "golden" / "java-5.3.3-tools" / "remoting"


async def committed(rig: Rig, group: str = "g") -> str:
    reply = await rig.committed(group)
    return reply.ext["offset"]


async def known_groups(rig: Rig) -> set[str]:
    reply = await rig.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    return set(SubscriptionGroupWrapper.decode(reply.body).subscription_group_table)


async def test_a_group_is_deleted_with_its_offsets_or_without(rig):
    for _ in range(3):
        await rig.send()
    for clean, left in (("false", "2"), ("true", "0")):
        await rig.pull(commit=2)
        assert "g" in await known_groups(rig)
        asked = {"groupName": "g", "cleanOffset": clean}
        assert (await rig.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, asked)).code == 0
        assert "g" not in await known_groups(rig)
        assert await committed(rig) == left
    kept = await rig.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": SYSTEM})
    assert (kept.code, SYSTEM in await known_groups(rig)) == (29, True)
    assert (await rig.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP)).code == 29


async def test_a_group_made_again_right_behind_its_deletion_stays(rig):
    topics = rig.service.topics
    await rig.pull()
    topics.delete_group("g", with_offsets=True)
    config = topics.groups.get("g")
    assert config is not None
    end = topics.put_group(config)
    await rig.service.path.wait_confirmed(end, "the group")
    assert "g" in await known_groups(rig)


async def test_a_group_loses_the_right_to_read_a_topic(rig):
    await rig.send()
    for readable, code in (("false", 16), ("true", 0)):
        asked = {"group": "g", "topic": "T", "readable": readable}
        reported = await rig.ask(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, asked)
        assert json.loads(reported.body) == {**asked, "readable": readable == "true"}
        assert (await rig.pull()).code == code
    asked = {"group": "g", "topic": "T"}
    reported = await rig.ask(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, asked)
    assert json.loads(reported.body)["readable"] is True
    assert rig.service.tables.groups.wrapper().forbidden_table == {}


async def test_how_far_every_group_is(rig):
    for _ in range(3):
        await rig.send()
    await rig.pull(commit=2)
    await rig.pull(group="other", commit=3)
    reply = await rig.ask(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "false"})
    body = loads(reply.body)
    assert (body["brokerAddr"], body["totalDiff"]) == (rig.service.address, 1)
    groups = {name: of for table in body["consumeStatsList"] for name, of in table.items()}
    assert set(groups) == {SYSTEM, "g", "other"}
    (stats,) = groups["g"]
    assert len(stats["offsetTable"]) == 4
    ordered = await rig.ask(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "true"})
    assert {"other": []} in loads(ordered.body)["consumeStatsList"]
    topics = await rig.ask(RequestCode.QUERY_TOPICS_BY_CONSUMER, {"group": "g"})
    assert json.loads(topics.body)["topicList"] == ["T"]


async def test_producers_and_subscriptions(rig):
    await rig.ask(34, body=heartbeat("me@1", "T").encode())
    producers = json.loads((await rig.ask(RequestCode.GET_ALL_PRODUCER_INFO)).body)["data"]
    assert list(producers) == ["p"]
    (one,) = producers["p"]
    assert (one["clientId"], one["language"]) == ("me@1", "PYTHON")
    assert one["lastUpdateTimestamp"] > 1_700_000_000_000
    for topic, is_there in (("T", True), ("U", False)):
        asked = {"group": "g", "topic": topic}
        reported = await rig.ask(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, asked)
        assert ("subscriptionData" in json.loads(reported.body)) == is_there


async def test_units_of_a_queue(rig):
    for _ in range(3):
        await rig.send()
    asked = {"topic": "T", "queueId": "0", "index": "1", "count": "5"}
    body = json.loads((await rig.ask(RequestCode.QUERY_CONSUME_QUEUE, asked)).body)
    assert (body["minQueueIndex"], body["maxQueueIndex"]) == (0, 3)
    first, second = body["queueData"]
    assert first["physicOffset"] + first["physicSize"] == second["physicOffset"]
    counts = [
        ({"count": count}, 29 * (count in ("0", "1025"))) for count in ["0", "1", "1024", "1025"]
    ]
    for other, code in (({"queueId": "3"}, 1), *counts):
        assert (await rig.ask(RequestCode.QUERY_CONSUME_QUEUE, asked | other)).code == code
    for group, online in (("g", False), ("h", True)):
        if online:
            await rig.ask(RequestCode.HEART_BEAT, body=heartbeat("c", "T", group="h").encode())
        named = asked | {"consumerGroup": group}
        body = json.loads((await rig.ask(RequestCode.QUERY_CONSUME_QUEUE, named)).body)
        assert (body.get("subscriptionData") is not None) == online
        assert body["filterData"] == ("null" if online else f"{group}@T is not online!")


async def test_rocketmq_exporter_reads_every_key_that_it_needs(rig):
    """`BrokerRuntimeStats` of the exporter: a key that it cannot parse costs all of the broker."""
    await rig.send()
    await rig.pull()
    found = json.loads((await rig.ask(RequestCode.GET_BROKER_RUNTIME_INFO)).body)["table"]
    for key in EXPORTER_NUMBERS.split():
        float(found[key])
    for key in ("putTps", "getMissTps", "getTransferedTps", "getTotalTps", "getFoundTps"):
        assert len([float(part) for part in found[key].split(" ")]) == 3
    times = dict(part.split(":") for part in found["putMessageDistributeTime"].split())
    assert list(times) == [f"[{name}]" for name in PUT_TIMES.split()]
    assert sum(map(int, times.values())) == 1
    capacity = found["commitLogDirCapacity"].split(" ")
    assert (float(capacity[2]), float(capacity[6])) > (0, 0)
    assert found["remainHowManyDataToFlush"].split(" ")[1][0] in "BKMGTPE"


async def test_tools_get_no_crc_among_the_properties(rig):
    """12, 33, and pulls of TOOLS_CONSUMER, which mqadmin shows; the log keeps it."""
    await rig.send()
    store = rig.service.store
    ((offset, size, _),) = store.queries.units("T", 0, 0, 1)
    record = store.queries.look_message_by_offset(offset)
    assert record is not None and b"__CRC32#" in bytes(record)
    shown = [
        (await rig.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(offset)})).body,
        (await rig.pull(group=TOOLS_CONSUMER)).body,
    ]
    for body in shown:
        (message,) = decode_records(body)
        assert (message.store_size, "__CRC32#" in message.properties) == (size - 20, False)
        assert message.body == decode_record(bytes(record)).body


async def test_settings_and_system_topics(rig, tmp_path):
    reply = await rig.ask(RequestCode.GET_BROKER_CONFIG)
    settings = parse_properties(reply.body.decode())
    assert json.loads(reply.ext["version"])["counter"] == 0
    assert settings["brokerName"] == "broker-a"
    assert settings["storePathRootDir"] == str(tmp_path)
    for code in (*WITHOUT_EFFECT, RequestCode.RESET_MASTER_FLUSH_OFFSET):
        reply = await rig.ask(code)
        assert reply.code == 0 and bool(reply.body) == (code == 354)
    reply = await rig.ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    topics = json.loads(reply.body)["topicList"]
    assert {"TBW102", "SCHEDULE_TOPIC_XXXX", *OUR_TOPICS} <= set(topics)
    assert {"useTLS", "traceOn", "clientCallbackExecutorThreads"} <= settings.keys()
    registered = rig.service.status.registration()
    assert registered is not None
    assert not any(topic.encode() in registered.body for topic in OUR_TOPICS)


def test_settings_change_while_the_broker_runs_and_outlast_a_restart(tmp_path):
    """25."""

    async def update(rig: Rig, text: str) -> RemotingCommand:
        return await rig.ask(RequestCode.UPDATE_BROKER_CONFIG, body=text.encode())

    async def settings(rig: Rig) -> tuple[dict[str, str], int]:
        reply = await rig.ask(RequestCode.GET_BROKER_CONFIG)
        return parse_properties(reply.body.decode()), json.loads(reply.ext["version"])["counter"]

    async def play(rig: Rig) -> None:
        assert (await rig.send("New")).code == 17
        assert (await update(rig, "autoCreateTopicEnable=true\nmaxMessageSize=20000\n")).code == 0
        assert (await rig.send("New")).code == 0
        assert (await rig.send("New", b"x" * 20001)).code == 13
        now, version = await settings(rig)
        assert (now["autoCreateTopicEnable"], now["maxMessageSize"], version) == (
            "true",
            "20000",
            1,
        )
        for text, code, why in (
            ("brokerName=b", 16, "brokerName is changed only in the file, at a restart; while run"),
            ("maxMesageSize=5", 29, "maxMesageSize: unknown key, did you mean maxMessageSize?"),
            ("configBlackList=", 16, "configBlackList"),
            ("rocketmqHome=/tmp", 16, "rocketmqHome"),
            ("maxMessageSize=many", 1, "maxMessageSize is 'many': a whole number is allowed"),
            ("maxMessageSize=30000\ndeleteWhen=25", 1, "deleteWhen must list hours 00 to 23"),
            ("diskMaxUsedSpaceRatio=101", 1, "diskMaxUsedSpaceRatio is 101: 1 to 100 are allowed"),
            ("defaultMessageRequestMode=PUSH", 1, "one of POP, PULL is allowed"),
        ):
            refused = await update(rig, text)
            assert (refused.code, why in (refused.remark or "")) == (code, True), refused.remark
        bad = await rig.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"\xff")
        assert bad.code == 1 and "UTF-8" in (bad.remark or "")
        assert await settings(rig) == (now, 1), "all or none"
        unused = await update(rig, "waitTimeMillsInSendQueue=9")
        assert unused.code == 0, "a key of Java's broker"
        assert unused.remark == "without effect in BatonMQ: waitTimeMillsInSendQueue"
        assert await settings(rig) == (now, 1)
        # Named, but as they are.
        assert (await update(rig, "brokerName=broker-a\nmaxMessageSize=20000")).code == 0

    async def again(rig: Rig) -> None:
        assert (await settings(rig))[0]["maxMessageSize"] == "20000"
        assert (await rig.send("New", b"x" * 20001)).code == 13

    off: dict[str, object] = {"auto_create_topic_enable": False}
    run_with_broker(tmp_path, play, broker=off)
    run_with_broker(tmp_path, again, broker=off)
    kept = tmp_path / "config" / "broker.properties"
    assert kept.read_text() == "autoCreateTopicEnable=true\nmaxMessageSize=20000\n"
    kept.write_text("maxMessageSize=0\n")
    with pytest.raises(ValueError, match=r"broker\.properties: maxMessageSize is 0, at"):
        run_with_broker(tmp_path, again, broker=off)


async def test_limits_and_filters_take_effect_while_the_broker_runs(rig):
    """25 again: what pulls, queries, timers and filters look at."""

    async def update(text: str) -> None:
        assert (await rig.ask(RequestCode.UPDATE_BROKER_CONFIG, body=text.encode())).code == 0

    for number in range(6):
        await rig.send("T", b"%d" % number, KEYS="k")
    service = rig.service
    read = service.store.queries
    assert read.get_message("T", 0, 0, 32).message_count == 6
    await update("maxTransferCountOnMessageInMemory=4\nmaxMsgsNumBatch=2")
    assert read.get_message("T", 0, 0, 32).message_count == 4
    await update("accessMessageInMemoryMaxRatio=0\nmaxTransferCountOnMessageInDisk=3")
    assert read.get_message("T", 0, 0, 32).message_count == 3
    assert len(read.query_message("T", "k", 32, 0, 2**62).parts) == 2
    subscription = {"topic": "T", "subString": "a = 1", "expressionType": "SQL92"}
    asked = {"clientId": "c", "group": "g", "subscriptionData": subscription}
    code, body = RequestCode.CHECK_CLIENT_CONFIG, json.dumps(asked).encode()
    assert (await rig.ask(code, body=body)).code == 0
    await update("enablePropertyFilter=false\ntimerWheelEnable=false")
    assert (await rig.ask(code, body=body)).code == 1
    reply = await rig.send("T", TIMER_DELAY_MS="60000")
    assert (reply.code, "timerWheelEnable" in (reply.remark or "")) == (1, True)


async def test_what_java_s_admin_asks_is_answered_as_by_a_java_broker(rig):
    """The golden requests of 25, 303, 314, 316 and 323, and 61: the same codes and members."""

    def members(body: bytes) -> object:
        found = loads(body) if body else None
        if found and "consumeTimeSpanSet" in found:
            first = found["consumeTimeSpanSet"][0]
            return {name for name in first if not name.endswith("Str")}, first["messageQueue"]
        if found and "timingCount" in found:
            return {topic: each["count"] for topic, each in found["timingCount"].items()}
        return found

    made = {"topic": "GoldTools", "readQueueNums": "2", "writeQueueNums": "2", "perm": "6"}
    assert (await rig.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, made)).code == 0
    for _ in range(3):
        await rig.send("GoldTools")
    await rig.send("GoldTools", TIMER_DELAY_SEC="600")
    await rig.pull("GoldTools", group="gold_consumer", commit=2)
    for file in sorted(GOLDEN.glob("*.json")):
        content = json.loads(file.read_text())
        for example in content["examples"]:
            asked, java = example["request"], example["response"]
            ext = json.loads(asked["header"]).get("extFields", {})
            reply = await rig.ask(content["code"], ext, bytes.fromhex(asked["body_hex"]))
            assert reply.code == json.loads(java["header"])["code"], file.name
            assert members(reply.body) == members(bytes.fromhex(java["body_hex"])), file.name
            assert reply.code == 0 or reply.remark


async def test_a_setting_that_cannot_be_kept_is_not_in_force(rig, monkeypatch):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(runtime_settings, "replace_file", full)
    reply = await rig.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"maxMessageSize=20000")
    assert reply.code == 1 and (await rig.send("T", b"x" * 20001)).code == 0


async def test_queues_of_topics_that_are_not_there_go_on_every_member(rig, monkeypatch):
    """316, two at once. As one deletion that the log carries; what is the broker's own stays."""
    for topic in "TU":
        assert (await rig.send(topic)).code == 0
    assert (await rig.send(TRAN_MSG="true", PGROUP="pg")).code == 0
    rig.service.tables.topics.delete("U")  # as a Java broker's folder may be
    rig.service.tables.topics.delete(TRANS_HALF_TOPIC)
    deleted, real = [], rig.service.topics.delete_topic

    def delete_topic(topic: str) -> int:
        deleted.append(topic)
        return real(topic)

    monkeypatch.setattr(rig.service.topics, "delete_topic", delete_topic)
    queries = rig.service.store.queries
    copies = Mock(side_effect=queries.topics)
    monkeypatch.setattr(queries, "topics", copies)
    clean = RequestCode.CLEAN_UNUSED_TOPIC
    assert [one.code for one in await asyncio.gather(rig.ask(clean), rig.ask(clean))] == [0, 0]
    assert deleted == ["U"]
    assert copies.call_count <= 4, "all names are copied once a request, and for each unused topic"
    topics = queries.topics()
    assert "T" in topics and "U" not in topics
    assert (await rig.send("U")).ext["queueOffset"] == "0"


async def test_several_topics_are_made_at_once_or_none(rig):

    def body(*topics: dict[str, object]) -> bytes:
        return json.dumps({"topicConfigList": list(topics)}).encode()

    one = {"topicName": "A", "readQueueNums": 2, "writeQueueNums": 3, "perm": 6}
    one["attributes"] = {"+message.type": "FIFO"}
    two = {"topicName": "B", "readQueueNums": 4, "writeQueueNums": 4, "perm": 4}
    code = RequestCode.UPDATE_AND_CREATE_TOPIC_LIST
    topics = rig.service.tables.topics
    for wrong, why in (
        ({**two, "perm": 8}, "perm of topic B is 8"),
        ({**two, "readQueueNums": 0}, "readQueueNums of topic B is 0, allowed are 1 to 65536"),
        ({**two, "topicName": "a b"}, "a b"),
        ({**two, "topicName": "TBW102"}, "is a system topic"),
        ({**two, "attributes": {"message.type": "FIFO"}}, "+key=value sets one"),
    ):
        refused = await rig.ask(code, body=body(one, wrong))
        assert refused.code != 0 and why in refused.remark and topics.get("A") is None
    assert (await rig.ask(code, body=body(one, two))).code == 0
    made = [topics.get(name) for name in "AB"]
    assert [(c.read_queue_nums, c.write_queue_nums, c.perm) for c in made if c] == [
        (2, 3, 6),
        (4, 4, 4),
    ]
    assert made[0] is not None and made[0].attributes == {"message.type": "FIFO"}
    assert (await rig.send("A")).code == 0 and (await rig.send("B")).code == 16


@pytest.mark.parametrize("topic", ["DefaultCluster", "broker-a", "DefaultCluster_REPLY_TOPIC"])
async def test_topics_of_cluster_and_broker_stay_as_they_are(rig, topic):
    """As in Java; without the last one replies to requests go nowhere."""
    before = rig.service.topics.existing(topic)
    for code, fields in ((17, topic_header(topic, 9)), (215, {"topic": topic})):
        refused = await rig.ask(code, fields)
        assert refused.code == 29 and "is a system topic" in refused.remark
    assert rig.service.topics.existing(topic) == before


async def test_the_kernel_reads_ahead_in_the_log_or_does_not(rig, tmp_path):
    """2004, as setCommitLogReadAheadMode of mqadmin."""

    def is_random() -> bool:
        maps = Path("/proc/self/smaps").read_text()
        of_log = maps.partition(f"{tmp_path}/commitlog/")[2]
        return " rr" in of_log.partition("VmFlags:")[2].partition("\n")[0]

    await rig.send()
    for mode in ("1", "0"):
        fields = {"READ_AHEAD_MODE": mode}
        reply = await rig.ask(RequestCode.SET_COMMITLOG_READ_MODE, fields)
        assert reply.remark == f"set commitlog readahead mode success, mode: {mode}"
        assert is_random() == (mode == "1")
    for fields in ({"READ_AHEAD_MODE": "2"}, {}):
        assert (await rig.ask(RequestCode.SET_COMMITLOG_READ_MODE, fields)).code == 29


async def test_expired_segments_are_deleted_on_request(rig):
    asked: list[bool] = []
    rig.service.store.expirer.clean_expired = lambda *, manual=False: asked.append(manual) or 0
    for code in (RequestCode.DELETE_EXPIRED_COMMITLOG, RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE):
        assert (await rig.ask(code)).code == 0
    assert asked == [True, True]


async def test_the_runtime_table_has_what_monitors_of_java_brokers_read(rig):
    """28. A monitor that parses each of these keys as a number ends at the first that is absent."""
    numbers = (
        *(f"{queue}ThreadPoolQueue{what}"
          for queue in ("send", "pull", "litePull", "query", "ack")
          for what in ("Size", "Capacity", "HeadWaitTimeMills")),
        "bootTimestamp", "dispatchMaxBuffer", "remainTransientStoreBufferNumbs",
        "startAcceptSendRequestTimeStamp", "EndTransactionQueueSize",
        "EndTransactionThreadPoolQueueCapacity", "timerReadBehind", "timerOffsetBehind",
    )  # fmt: skip
    await rig.send(TIMER_DELAY_SEC="60")
    await rig.send(DELAY="1")
    await until(lambda: len(rig.service.features.timers) == 1)
    delays = rig.service.features.progress
    await until(lambda: delays.delays == {1: 1})
    table = loads((await rig.ask(RequestCode.GET_BROKER_RUNTIME_INFO)).body)["table"]
    assert [key for key in numbers if not table[key].isdigit()] == []
    assert (table["timerCongestNum"], table["scheduleMessageOffset_1"]) == ("1", "1,1")
    assert float(table["putMessageAverageSize"]) > 0
    assert re.fullmatch(r"\[ 0 days, 0 hours, 0 minutes, \d+ seconds \]", table["runtime"])


def test_a_time_in_javas_words():
    assert running_for(((49 * 60 + 3) * 60 + 4) * 1000) == (
        "[ 2 days, 1 hours, 3 minutes, 4 seconds ]"
    )
