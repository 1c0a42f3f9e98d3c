"""Every JSON body that the Java cluster sent goes through our typed bodies and back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batonmq.protocol import bodies, fastjson
from batonmq.protocol.bodies import encode_names
from batonmq.protocol.json_body import Json, decode_json
from batonmq.protocol.records.codec import decode_records
from batonmq.protocol.register_body import RegisterBrokerBody

GOLDEN = Path(__file__).parents[1] / "golden"

REQUESTS: dict[int, type[Json]] = {
    34: bodies.HeartbeatData,
    41: bodies.LockBatchRequestBody,
    42: bodies.LockBatchRequestBody,
    46: bodies.CheckClientRequestBody,
    103: RegisterBrokerBody,
    200: bodies.SubscriptionGroupConfig,
    1001: bodies.SyncStateSet,
    1008: bodies.SyncStateSet,
}
RESPONSES: dict[int, type[Json]] = {
    21: bodies.TopicConfigAndMappingSerializeWrapper,
    28: bodies.KVTable,
    38: bodies.GetConsumerListByGroupResponseBody,
    41: bodies.LockBatchResponseBody,
    43: bodies.ConsumerOffsetSerializeWrapper,
    45: bodies.DelayOffsetSerializeWrapper,
    61: bodies.TimerMetricsSerializeWrapper,
    105: bodies.TopicRouteData,
    106: bodies.ClusterInfo,
    201: bodies.SubscriptionGroupWrapper,
    202: bodies.TopicStatsTable,
    206: bodies.TopicList,
    208: bodies.ConsumeStats,
    222: bodies.ResetOffsetBody,
    303: bodies.QueryConsumeTimeSpanBody,
    351: bodies.TopicConfig,
    402: bodies.MessageRequestModeSerializeWrapper,
    907: bodies.HARuntimeInfo,
    1001: bodies.SyncStateSet,
    1002: bodies.ElectMasterResponseBody,
    1003: bodies.SyncStateSet,
    1004: bodies.SyncStateSet,
    1006: bodies.BrokerReplicasInfo,
    1007: bodies.EpochEntryCache,
}
# Records (messages), property texts, and a timer checkpoint in binary.
RECORDS = {11, 12, 361}
NOT_JSON = {25, 26, 60, 1010}
WRAPPER = "topicConfigSerializeWrapper"
# Getters that readers ignore, and two tables that Java sometimes writes empty.
GETTERS = {"consumeTimeStampStr", "maxTimeStampStr", "minTimeStampStr"}
DERIVED_OR_EMPTY = ("groupTopicMap", "topicQueueMappingDetailMap", "topicQueueMappingInfoMap")


def examples() -> Iterator[tuple[str, int, str, bytes]]:
    for file in sorted(GOLDEN.glob("*/remoting/*.json")):
        content = json.loads(file.read_text())
        for example in content["examples"]:
            for kind in ("request", "response"):
                body = bytes.fromhex(example.get(kind, {}).get("body_hex", ""))
                if body:
                    yield file.name, content["code"], kind, body


def normal(value: Any) -> Any:
    """Comparable whatever the order of members; keys as text, as fastjson reads them."""
    if isinstance(value, dict):
        members = {k if isinstance(k, tuple) else str(k): normal(v) for k, v in value.items()}
        return {k: v for k, v in members.items() if k not in GETTERS}
    if isinstance(value, list):
        return [normal(item) for item in value]
    return value


def test_bodies_of_all_golden_frames_survive_decoding_and_encoding() -> None:
    seen = 0
    for name, code, kind, body in examples():
        if (kind == "request" and code in {310, 320, 1009}) or code in NOT_JSON | RECORDS:
            continue
        if code == 1006 and kind == "request":
            assert encode_names(decode_json(list[str], body)) == body
            continue
        table = REQUESTS if kind == "request" else RESPONSES
        typed = table[code].decode(body)
        again = typed.encode()
        assert type(typed).decode(again) == typed
        want, got = normal(fastjson.loads(body)), normal(fastjson.loads(again))
        for inner in (want, got, want.get(WRAPPER, {}), got.get(WRAPPER, {})):
            for derived in DERIVED_OR_EMPTY:
                inner.pop(derived, None)
        assert got == want, (name, kind)
        seen += 1
    assert seen > 60


def test_pull_and_query_replies_are_whole_records() -> None:
    seen = 0
    for name, code, kind, body in examples():
        if code in RECORDS and kind == "response":
            messages = decode_records(body)
            assert sum(m.store_size for m in messages) == len(body), name
            seen += len(messages)
    assert seen > 10


CONFIG: dict[str, type[Json]] = {
    "topics.json": bodies.TopicConfigSerializeWrapper,
    "subscriptionGroup.json": bodies.SubscriptionGroupWrapper,
    "consumerOffset.json": bodies.ConsumerOffsetSerializeWrapper,
    "delayOffset.json": bodies.DelayOffsetSerializeWrapper,
    "messageRequestMode.json": bodies.MessageRequestModeSerializeWrapper,
}


@pytest.mark.parametrize("store", ["b0", "b1"])
@pytest.mark.parametrize("name", sorted(CONFIG))
def test_config_files_of_a_java_broker_decode(store: str, name: str) -> None:
    raw = (GOLDEN / "java-5.3.3/store" / store / "config" / name).read_bytes()
    typed = CONFIG[name].decode(raw)
    want = normal(fastjson.loads(raw))
    want.pop("groupTopicMap", None)  # a derived getter, ignored on load
    assert normal(fastjson.loads(typed.encode())) == want


def test_queue_keyed_maps_are_written_as_fastjson_does() -> None:
    seen = set()
    for _, code, kind, body in examples():
        if code in (202, 208, 222) and kind == "response":
            typed = RESPONSES[code].decode(body)
            assert typed.encode() == body
            seen.add(code)
    assert seen == {202, 208, 222}
