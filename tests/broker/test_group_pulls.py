"""Pulls of a group: lite pulls (361), SQL92 filters (46, heartbeats), what its settings forbid, and
reads from slaves."""

import asyncio
import json
from pathlib import Path
from typing import Any

from lone_broker import lone_broker, pull_header, spoil, until

from batonmq.broker.consume import pull_request
from batonmq.broker.filter.consumer_filter import ConsumerFilterManager, bloom_bits
from batonmq.protocol.bodies import (
    BROADCASTING,
    CLUSTERING,
    CheckClientRequestBody,
    ConsumerData,
    HeartbeatData,
    SubscriptionData,
    SubscriptionGroupConfig,
)
from batonmq.protocol.codes import READ_REPLICA_FIELD, ResponseCode
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.records.codec import decode_records
from batonmq.remoting.command import RemotingCommand

GOLDEN = Path(__file__).parents[1] / "golden" / "java-5.3.3"
CONFIG = GOLDEN / "store" / "b0" / "config"


def sql_pull(expression: str, offset: int = 0, suspend_ms: int = 0) -> dict[str, str]:
    filter_ = {"expressionType": "SQL92", "subscription": expression}
    return pull_header(offset, suspend_ms=suspend_ms) | filter_


def bodies(reply: RemotingCommand) -> list[bytes]:
    return [message.body for message in decode_records(reply.body)]


def heartbeat(
    expression: str, version: int, model: str = CLUSTERING, kind: str = "SQL92", **fields: Any
) -> bytes:
    subscription = SubscriptionData(
        topic="T", sub_string=expression, expression_type=kind, sub_version=version
    )
    consumer = ConsumerData(
        group_name="g", message_model=model, subscription_data_set=[subscription]
    )
    return HeartbeatData(client_id="me@1", consumer_data_set=[consumer], **fields).encode()


def check_body(kind: str, expression: str) -> bytes:
    subscription = SubscriptionData(topic="T", sub_string=expression, expression_type=kind)
    return CheckClientRequestBody("me@1", "g", None, subscription).encode()


async def test_the_golden_lite_pull_is_answered(tmp_path):
    """361 as DefaultLitePullConsumer of Java sends it; litePullMessageEnable switches it off."""
    golden = json.loads((GOLDEN / "remoting" / "broker-361.json").read_text())
    header = json.loads(golden["examples"][0]["request"]["header"])
    fields = header["extFields"] | {"topic": "T", "queueId": "0"}

    async with lone_broker(tmp_path / "on") as rig:
        await rig.send(body=b"one")
        reply = await rig.ask(361, fields)
        assert (reply.code, bodies(reply), reply.ext["nextBeginOffset"]) == (0, [b"one"], "1")
        assert set(reply.ext) == set(
            json.loads(golden["examples"][0]["response"]["header"])["extFields"]
        )
    async with lone_broker(tmp_path / "off", broker={"lite_pull_message_enable": False}) as rig:
        await rig.send()
        reply = await rig.ask(361, fields)
        assert reply.code == 16 and "litePullMessageEnable" in (reply.remark or "")


async def test_an_sql92_filter_of_a_pull(rig):
    """Only what passes comes; a held pull is woken by the first message that passes, not before."""
    for number in range(6):
        await rig.send(body=b"%d" % number, a=str(number))
    reply = await rig.ask(11, sql_pull("a BETWEEN 2 AND 3 OR a = '5'"))
    assert (reply.code, bodies(reply)) == (0, [b"2", b"3", b"5"])
    held = asyncio.ensure_future(rig.ask(11, sql_pull("a > 90", 6, suspend_ms=20_000)))
    await until(lambda: rig.service.pull.held == 1)
    await rig.send(body=b"7", a="7")
    assert not held.done() and rig.service.pull.held == 1
    await rig.send(body=b"91", a="91")
    assert bodies(await held) == [b"91"]
    bad = await rig.ask(11, sql_pull("a LIKE 'x'"))
    assert bad.code == 23 and "LIKE" in (bad.remark or "")


async def test_the_filter_comes_from_heartbeats(rig):
    """24 before the first heartbeat, 25 for an older version, 27 for one that does not compile."""
    silent = pull_header(expressionType="SQL92", sysFlag=0, subVersion=5)
    await rig.send(body=b"no", colour="red")
    await rig.send(body=b"yes", colour="blue")
    assert (await rig.ask(11, silent)).code == 24
    await rig.ask(34, body=heartbeat("colour = 'blue'", 4))
    assert [(await rig.ask(11, silent)).code for _ in range(2)] == [25, 25]
    await rig.ask(34, body=heartbeat("colour = 'blue'", 5))
    assert bodies(await rig.ask(11, silent)) == [b"yes"]
    await rig.ask(34, body=heartbeat("colour = ", 6))
    assert (await rig.ask(11, silent)).code == 27


async def test_a_subscription_that_no_heartbeat_brings_for_a_while_is_read_without_filter(
    rig, monkeypatch
):
    """A stock client that changes its version while a heartbeat runs announces it 30 s later. It
    compares tags itself; with heartbeats V2 it is asked for its subscriptions."""
    for tag in ("red", "blue"):
        await rig.send(body=tag.encode(), TAGS=tag)
    late = pull_header(sysFlag=0, subVersion=5)
    await rig.ask(34, body=heartbeat("red", 4, kind="TAG"))
    assert [(await rig.ask(11, late)).code for _ in range(2)] == [25, 25]
    monkeypatch.setattr(pull_request, "UNANNOUNCED_MS", 0)
    assert bodies(await rig.ask(11, late)) == [b"red", b"blue"]
    monkeypatch.setattr(pull_request, "UNANNOUNCED_MS", 60_000)
    assert (await rig.ask(11, late | {"subVersion": "6"})).code == 25
    without = heartbeat("", 0, without_sub=True)
    answers = [(await rig.ask(34, body=without)).ext["IS_SUB_CHANGE"] for _ in range(2)]
    assert answers == ["true", "false"]
    await rig.ask(34, body=heartbeat("blue", 6, kind="TAG"))
    assert bodies(await rig.ask(11, late)) == [b"blue"]


async def test_46_tells_at_the_start_what_a_pull_would_refuse(tmp_path):
    golden = json.loads((GOLDEN / "remoting" / "broker-46.json").read_text())
    asked = bytes.fromhex(golden["examples"][0]["request"]["body_hex"])

    async with lone_broker(tmp_path / "on") as rig:
        assert (await rig.ask(46, body=asked)).code == 0
        assert (await rig.ask(46, body=check_body("TAG", "a || b"))).code == 0
        bad = await rig.ask(46, body=check_body("SQL92", "a >"))
        assert bad.code == 23 and "refused" in (bad.remark or "")
        assert (await rig.ask(46, body=check_body("XPATH", "/a"))).code == 23
    async with lone_broker(tmp_path / "off", broker={"enable_property_filter": False}) as rig:
        await rig.send()
        for reply in (
            await rig.ask(46, body=check_body("SQL92", "a > 1")),
            await rig.ask(11, sql_pull("a > 1")),
        ):
            assert reply.code == 1 and "SQL92" in (reply.remark or "")


def test_consumer_filter_json_as_java_has_it(tmp_path):
    """A file of Java's is read, all dead; what is written has its members and its Bloom bits."""
    now = [1_800_000_000_000]
    path = tmp_path / "consumerFilter.json"
    golden = (CONFIG / "consumerFilter.json").read_bytes()
    path.write_bytes(golden)
    filters = ConsumerFilterManager(path, clock_ms=lambda: now[0])
    filters.load()
    known = filters.get("gold_broadcast", "GoldTopic")
    assert known is not None and known.dead and known.expression == "colour is not null"
    assert bloom_bits("gold_broadcast#GoldTopic") == known.bloom_filter_data.bit_pos

    again = SubscriptionData(
        topic="GoldTopic",
        sub_string=known.expression,
        expression_type="SQL92",
        sub_version=known.client_version,
    )
    filters.register("gold_broadcast", [again])
    for write in filters.writes_due():
        write()
    written, before = json.loads(path.read_bytes()), json.loads(golden)
    data = before["filterDataByTopic"]["GoldTopic"]["groupFilterData"]["gold_broadcast"]
    data |= {"dead": False, "deadTime": 0}
    assert written == before

    filters.register("gold_broadcast", [])
    now[0] += 25 * 3600 * 1000
    filters.register(
        "other", [SubscriptionData(topic="U", sub_string="a = 1", expression_type="SQL92")]
    )
    for write in filters.writes_due():
        write()
    assert list(json.loads(path.read_bytes())["filterDataByTopic"]) == ["U"], "dead for a day"


def test_filters_follow_the_newest_subscription_of_each_topic(tmp_path):
    """A member with older code heartbeats, too; and what is not subscribed any more is dead."""

    def wanted(topic: str, expression: str, version: int) -> SubscriptionData:
        return SubscriptionData(
            topic=topic, sub_string=expression, expression_type="SQL92", sub_version=version
        )

    filters = ConsumerFilterManager(tmp_path / "consumerFilter.json")
    filters.register("g", [wanted("T", "a = 2", 2), wanted("U", "b = 1", 1)])
    filters.register("g", [wanted("T", "a = 1", 1)])
    kept, dropped = filters.get("g", "T"), filters.get("g", "U")
    assert kept is not None and dropped is not None
    assert (kept.expression, kept.dead) == ("a = 2", False) and dropped.dead


async def test_what_a_group_may_not(rig):
    """consumeEnable, consumeBroadcastEnable and the sysFlags that travel with every answer."""
    await rig.send()
    group = SubscriptionGroupConfig(group_name="g", consume_broadcast_enable=False)
    group.group_sys_flag, group.consume_enable = 5, False
    await rig.ask(200, body=group.encode())
    refused = await rig.pull()
    assert (refused.code, refused.ext["forbiddenType"]) == (16, "2")
    group.consume_enable = True
    await rig.ask(200, body=group.encode())
    found = await rig.pull()
    assert (found.code, found.ext["groupSysFlag"]) == (0, "5")
    await rig.ask(34, body=heartbeat("a = 1", 1, BROADCASTING))
    refused = await rig.ask(11, pull_header(sysFlag=0))
    assert (refused.code, refused.ext["forbiddenType"]) == (16, "4")


async def test_who_is_far_behind_is_sent_to_a_slave_and_back(tmp_path):
    """slaveReadEnable: the master suggests whichBrokerWhenConsumeSlowly; a slave that was asked on
    purpose answers what it shows (R28), then 20 with the master's id."""
    reads = {"slave_read_enable": True}
    async with lone_broker(tmp_path, broker=reads, access_message_in_memory_max_ratio=0) as rig:
        for body in (b"one", b"two"):
            await rig.send(body=body)
        first = await rig.pull(count=1)
        assert (first.code, first.ext["suggestWhichBrokerId"]) == (0, "1")
        rig.service.path.gate.follow(1, "127.0.0.1:1")
        asked = pull_header(1) | {READ_REPLICA_FIELD: "true"}
        found = await rig.ask(11, asked)
        assert (found.code, bodies(found)) == (0, [b"two"])
        for offset in (2, 9):
            back = await rig.ask(11, asked | {"queueOffset": str(offset)})
            assert (back.code, back.ext["nextBeginOffset"]) == (20, str(offset))
            assert back.ext["suggestWhichBrokerId"] == "0"
        assert (await rig.pull(offset=1)).code == 2, "not on purpose: it looks for the master"


async def test_without_slave_read_enable_no_pull_is_sent_to_a_slave(tmp_path):
    async with lone_broker(tmp_path, access_message_in_memory_max_ratio=0) as rig:
        await rig.send()
        assert (await rig.pull()).ext["suggestWhichBrokerId"] == "0"
        rig.service.path.gate.follow(1, "127.0.0.1:1")
        asked = pull_header() | {READ_REPLICA_FIELD: "true"}
        assert (await rig.ask(11, asked)).code == 2


async def test_g8_a_bad_record_is_not_served_and_reported_once(tmp_path):
    """It went bad on the disk between two clean starts; the second one reads no old records."""

    async with lone_broker(tmp_path) as rig:
        for body in (b"good", b"rotten", b"last"):
            assert (await rig.send(body=body)).code == 0
        await rig.pull()
    log = spoil(tmp_path, b"rotten")
    async with lone_broker(tmp_path) as rig:
        reported: list[CorruptLogError] = []
        rig.service.store.scrub._on_found = reported.append  # a whole replica should lead
        assert bodies(await rig.pull(count=1)) == [b"good"]
        for _ in range(2):
            refused = await rig.pull(offset=1)
            assert refused.code == ResponseCode.SYSTEM_ERROR
            assert str(log) in (refused.remark or "")
        assert len(reported) == 1
