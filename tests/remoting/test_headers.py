"""Typed headers of the hot requests: golden ones of both kinds, and named errors."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal, RemoteProtocolError
from batonmq.remoting.command import (
    TYPE_BINARY,
    TYPE_JSON,
    RemotingCommand,
    decode_frame,
    encode_header,
)
from batonmq.remoting.headers import decode_pull, decode_send

GOLDEN = Path(__file__).parents[1] / "golden"


def golden_requests(*codes: int) -> Iterator[tuple[int, bytes]]:
    for code in codes:
        for file in sorted(GOLDEN.glob(f"*/remoting/broker-{code}.json")):
            for example in json.loads(file.read_text())["examples"]:
                text = example["request"]["header"]
                if text.startswith("hex:"):
                    yield TYPE_BINARY, bytes.fromhex(text[4:])
                else:
                    yield TYPE_JSON, text.encode()


def test_golden_sends_of_both_header_types_decode_to_their_fields() -> None:
    types = set()
    for serialize_type, header in golden_requests(310, 320):
        cmd = decode_frame(header, b"", serialize_type)
        frame = decode_send(serialize_type, header)
        assert (frame.code, frame.opaque, frame.flag) == (cmd.code, cmd.opaque, cmd.flag)
        assert frame.ext.topic == cmd.ext["b"] and frame.ext.queue_id == int(cmd.ext["e"])
        assert frame.ext.properties == cmd.ext["i"]
        assert frame.ext.born_timestamp == int(cmd.ext["g"])
        assert frame.ext.batch is (cmd.ext["m"] == "true")
        types.add(serialize_type)
    assert types == {TYPE_JSON, TYPE_BINARY}


def test_golden_pulls_of_both_header_types_decode_to_their_fields() -> None:
    types = set()
    for serialize_type, header in golden_requests(11, 361):
        cmd = decode_frame(header, b"", serialize_type)
        frame = decode_pull(serialize_type, header)
        assert (frame.code, frame.opaque) == (cmd.code, cmd.opaque)
        assert frame.ext.consumer_group == cmd.ext["consumerGroup"]
        assert frame.ext.queue_offset == int(cmd.ext["queueOffset"])
        assert frame.ext.sys_flag == int(cmd.ext["sysFlag"])
        assert frame.ext.subscription == cmd.ext.get("subscription")
        types.add(serialize_type)
    assert types == {TYPE_JSON, TYPE_BINARY}


SEND = {
    "a": "g", "b": "T", "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": "17", "h": "0",
}  # fmt: skip
LONG = {
    "producerGroup": "g", "topic": "T", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4",
    "queueId": "1", "sysFlag": "0", "bornTimestamp": "17", "flag": "0", "properties": "TAGS\x01a",
}  # fmt: skip


def header_of(code: int, ext: dict[str, str], serialize_type: int) -> bytes:
    return encode_header(RemotingCommand(code, opaque=9, ext=ext, serialize_type=serialize_type))


@pytest.mark.parametrize("serialize_type", [TYPE_JSON, TYPE_BINARY])
def test_a_send_with_long_names_has_the_same_shape(serialize_type: int) -> None:
    frame = decode_send(serialize_type, header_of(10, LONG, serialize_type))
    assert frame.code == 10 and frame.opaque == 9
    assert frame.ext.topic == "T" and frame.ext.born_timestamp == 17
    assert frame.ext.properties == "TAGS\x01a" and frame.ext.batch is None


def test_a_send_with_long_names_may_have_its_code_last() -> None:
    header = json.dumps({"opaque": 9, "extFields": LONG, "code": 10}).encode()
    assert decode_send(TYPE_JSON, header).ext.topic == "T"
    with pytest.raises(BrokerRefusal, match="<bornTimestamp> is malformed"):
        decode_send(TYPE_JSON, header.replace(b'"17"', b'"x"'))


@pytest.mark.parametrize("serialize_type", [TYPE_JSON, TYPE_BINARY])
@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("b", None, "<b (topic)> is null"),
        ("e", None, "<e (queueId)> is null"),
        ("e", "x1", "<e (queueId)> is malformed"),
        ("d", "2147483648", "<d (defaultTopicQueueNums)> is malformed"),
        ("g", "9223372036854775808", "<g (bornTimestamp)> is malformed"),
    ],
)
def test_a_bad_field_of_a_send_is_named(
    serialize_type: int, field: str, value: str | None, named: str
) -> None:
    ext = {name: text for name, text in SEND.items() if name != field}
    if value is not None:
        ext[field] = value
    with pytest.raises(BrokerRefusal) as caught:
        decode_send(serialize_type, header_of(310, ext, serialize_type))
    assert caught.value.code == ResponseCode.SYSTEM_ERROR
    assert named in caught.value.remark


@pytest.mark.parametrize("serialize_type", [TYPE_JSON, TYPE_BINARY])
def test_a_missing_field_of_a_pull_is_named(serialize_type: int) -> None:
    ext = {"consumerGroup": "g", "queueId": "0"}
    with pytest.raises(BrokerRefusal, match="<topic> is null"):
        decode_pull(serialize_type, header_of(11, ext, serialize_type))


def test_a_send_without_any_fields_is_answered_not_dropped() -> None:
    with pytest.raises(BrokerRefusal, match="<extFields> is null"):
        decode_send(TYPE_JSON, b'{"code":310,"opaque":1}')


@pytest.mark.parametrize("decode", [decode_send, decode_pull])
def test_bytes_that_are_no_header_are_a_protocol_error(decode: object) -> None:
    assert callable(decode)
    for serialize_type, header in [
        (TYPE_JSON, b"no json"),
        (TYPE_JSON, b'{"code":310,"remark":"\xff"'),
        (TYPE_BINARY, b"\x01\x36\x00"),
    ]:
        with pytest.raises(RemoteProtocolError):
            decode(serialize_type, header)
