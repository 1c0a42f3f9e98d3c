"""What the client sends, held against the frames of a Java 5.3.3 client."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake_cluster import FakeCluster

from batonmq import ConsumeContext, ConsumeFromWhere, ConsumeStatus, PushConsumer
from batonmq.client.consumer.options import PushConsumerOptions
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.message import MessageExt
from batonmq.remoting.command import RemotingCommand
from tests.shared.waiting import until

GOLDEN = Path(__file__).parents[2] / "golden" / "java-5.3.3" / "remoting"

# The namespace marker some Java consumers add.
NOISE = {"ReqT"}
# A Java push consumer relies on the heartbeat for these; carried, a new master needs none.
CARRIED = {"subscription"}


def java_requests(code: int) -> list[dict[str, Any]]:
    examples = json.loads((GOLDEN / f"broker-{code}.json").read_text())["examples"]
    return [e["request"] for e in examples]


def java_keys(code: int) -> set[str]:
    header = json.loads(java_requests(code)[0]["header"])
    return set(header.get("extFields", {})) - NOISE


async def consumer_traffic(cluster: FakeCluster) -> dict[int, list[RemotingCommand]]:
    """One message fails and goes back, its offset is stored, queues are locked and unlocked."""
    found: dict[int, list[RemotingCommand]] = {}

    async def listener(messages: Sequence[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        return ConsumeStatus.RECONSUME_LATER

    cluster.add_topic("GoldTopic")
    broker = cluster.master()
    broker.store("GoldTopic", 0, b"x", "TAGS\x01TagA\x02")
    for orderly in (False, True):
        consumer = PushConsumer(
            f"gold{orderly}",
            listener,
            orderly=orderly,
            name_servers=cluster.name_server_addresses,
            options=PushConsumerOptions(from_where=ConsumeFromWhere.FIRST),
        )
        consumer.subscribe("GoldTopic", "TagA || TagT")
        async with consumer:
            if not orderly:
                await until(lambda: bool(broker.sent_back))
    for request in broker.requests:
        found.setdefault(request.code, []).append(request)
    return found


async def test_consumer_requests_carry_the_fields_of_a_java_client(cluster: FakeCluster) -> None:
    traffic = await consumer_traffic(cluster)
    assert set(traffic[RequestCode.PULL_MESSAGE][0].ext) == java_keys(11) | CARRIED
    assert int(traffic[RequestCode.PULL_MESSAGE][0].ext["sysFlag"]) & 6 == 6
    for code in (14, 35, 36, 38, 41, 42):
        assert set(traffic[code][0].ext) == java_keys(code), code
    assert java_keys(15) <= set(traffic[15][0].ext)

    for code in (41, 42):
        ours = json.loads(traffic[code][0].body)
        java = json.loads(bytes.fromhex(java_requests(code)[0]["body_hex"]))
        assert ours.keys() == java.keys()
        assert ours["mqSet"][0].keys() == java["mqSet"][0].keys()


async def test_heartbeat_has_the_shape_of_a_java_consumers(cluster: FakeCluster) -> None:
    ours = json.loads((await consumer_traffic(cluster))[RequestCode.HEART_BEAT][0].body)
    java = next(
        body
        for request in java_requests(34)
        if (body := json.loads(bytes.fromhex(request["body_hex"])))["consumerDataSet"]
    )
    assert ours.keys() == java.keys()
    (consumer,), (java_consumer, *_) = ours["consumerDataSet"], java["consumerDataSet"]
    assert consumer.keys() == java_consumer.keys()
    assert consumer["consumeFromWhere"] == "CONSUME_FROM_FIRST_OFFSET"
    assert consumer["consumeType"] == "CONSUME_PASSIVELY"
    assert consumer["messageModel"] == "CLUSTERING"
    subscriptions = {s["topic"]: s for s in consumer["subscriptionDataSet"]}
    assert subscriptions.keys() == {"GoldTopic", "%RETRY%goldFalse"}
    java_subscription = java_consumer["subscriptionDataSet"][0]
    assert subscriptions["GoldTopic"].keys() == java_subscription.keys()
    assert subscriptions["GoldTopic"]["tagsSet"] == ["TagA", "TagT"]
