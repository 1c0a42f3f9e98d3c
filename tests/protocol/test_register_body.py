"""The registration body in both of its forms."""

import contextlib
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.protocol import register_body
from batonmq.protocol.bodies import DataVersion, TopicConfig, TopicConfigAndMappingSerializeWrapper
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.register_body import INFLATED_SIZE_MAX, RegisterBrokerBody, crc32_of
from tests.protocol.compressed_body import compressed

GOLDEN = Path(__file__).parents[1] / "golden/java-5.3.3/remoting/namesrv-103.json"


def body_of(*topics: TopicConfig) -> RegisterBrokerBody:
    return RegisterBrokerBody(
        filter_server_list=["f:1"],
        topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
            data_version=DataVersion(counter=3, state_version=2, timestamp=99),
            topic_config_table={topic.topic_name: topic for topic in topics},
        ),
    )


def test_the_golden_crc_is_that_of_its_body() -> None:
    examples = json.loads(GOLDEN.read_text())["examples"]
    assert examples
    for example in examples:
        header = json.loads(example["request"]["header"])
        body = bytes.fromhex(example["request"]["body_hex"])
        assert str(crc32_of(body)) == header["extFields"]["bodyCrc32"]
        typed = RegisterBrokerBody.decode_wire(body)
        assert len(typed.topic_config_serialize_wrapper.topic_config_table) > 5
        again = RegisterBrokerBody.decode_wire(compressed(typed))
        # That form has no place for the mappings' version.
        again.topic_config_serialize_wrapper.mapping_data_version = (
            typed.topic_config_serialize_wrapper.mapping_data_version
        )
        assert again == typed


@pytest.mark.parametrize("version", [399, 413, 479])
def test_the_compressed_form_goes_there_and_back(version: int) -> None:
    """Java says compressed=false even then, so the body itself tells."""
    body = body_of(
        TopicConfig(topic_name="A", perm=7, attributes={"+k": "a b"}), TopicConfig(topic_name="B")
    )
    if version >= 413:
        wrapper = body.topic_config_serialize_wrapper
        wrapper.topic_queue_mapping_info_map = {"A": {"topic": "A", "totalQueues": 8}}
    data = compressed(body, version)
    assert data[0] == 0x78
    assert RegisterBrokerBody.decode_wire(data, version) == body
    assert RegisterBrokerBody.decode_wire(body.encode(), version) == body


def test_an_empty_body_registers_nothing() -> None:
    assert RegisterBrokerBody.decode_wire(b"") == RegisterBrokerBody()


def one_topic(text: bytes) -> bytes:
    """A compressed body that is whole but for what `text` says of its topic."""
    version, topic, filters = (struct.pack(">i", len(each)) + each for each in (b"{}", text, b"[]"))
    return zlib.compress(version + struct.pack(">i", 1) + topic + filters)


def test_a_body_of_one_topic_is_read() -> None:
    read = RegisterBrokerBody.decode_wire(one_topic(b"A 1 1 6 SINGLE_TAG"))
    assert list(read.topic_config_serialize_wrapper.topic_config_table) == ["A"]


@given(st.data())
def test_a_cut_or_bent_stream_is_refused(data: st.DataObject) -> None:
    inflated = zlib.decompress(compressed(body_of(TopicConfig(topic_name="A"))))
    cut = data.draw(st.integers(0, len(inflated) - 1))
    try:
        RegisterBrokerBody.decode_wire(zlib.compress(inflated[:cut]))
    except RemoteProtocolError as error:
        assert "RegisterBrokerBody" in str(error) or "DataVersion" in str(error)
    else:
        assert cut == len(inflated) - 4, "only the mapping count may be absent"


@pytest.mark.parametrize(
    "data",
    [
        b"\x78\x9cnonsense",
        zlib.compress(struct.pack(">i", -1)),
        one_topic(b"A 1"),
        one_topic(b"A 1 1  SINGLE_TAG"),
        compressed(body_of())[:-3],
        b"{no json",
    ],
)
def test_malformed_bodies_name_themselves(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="RegisterBrokerBody"):
        RegisterBrokerBody.decode_wire(data)


def test_r58_a_large_plain_body_is_standard_json() -> None:
    """Java's dialect is read by Python code: 16 MiB of it would hold a name server for seconds."""
    loose = b'"readQueueNums":"4"'
    for topics, is_read in ((5_000, True), (10_000, False)):
        body = body_of(*(TopicConfig(topic_name=f"T{number}") for number in range(topics)))
        plain = body.encode()
        assert RegisterBrokerBody.decode_wire(plain) == body
        dialect = plain.replace(b'"readQueueNums":16', loose, 1)
        assert loose in dialect
        if is_read:
            RegisterBrokerBody.decode_wire(dialect)
        else:
            with pytest.raises(RemoteProtocolError, match="only as standard JSON"):
                RegisterBrokerBody.decode_wire(dialect)


@pytest.mark.parametrize("form", ["plain", "compressed"])
def test_r58_topics_are_decoded_some_hundred_at_once(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 topics with names and attributes as long as they may be have 6 MB."""
    attributes = {"+message.type": "NORMAL"}
    topics = [TopicConfig(topic_name=f"{n:0127d}", attributes=attributes) for n in range(10_000)]
    body = body_of(*topics)
    data = body.encode() if form == "plain" else compressed(body)
    decoded = [0]
    for name in ("_decode_topic", "_topic_of"):
        monkeypatch.setattr(register_body, name, counting(getattr(register_body, name), decoded))
    steps, most = RegisterBrokerBody.decode_steps(data), 0
    while True:
        decoded[0] = 0
        try:
            next(steps)
        except StopIteration as end:
            read = end.value
            break
        most = max(most, decoded[0])
    assert read == body and 0 < most <= 256


def counting(call: Callable[..., object], count: list[int]) -> Callable[..., object]:
    def counted(*args: object) -> object:
        count[0] += 1
        return call(*args)

    return counted


@pytest.mark.parametrize("place", ["topicConfigTable", "topicQueueMappingInfoMap"])
def test_r58_one_topic_of_a_large_body_has_a_limit(place: str) -> None:
    entry = b'"T":{"attributes":{"a":"%b"}}' % (b"x" * (1 << 20))
    data = b'{"topicConfigSerializeWrapper":{"%b":{%b}}}' % (place.encode(), entry)
    with pytest.raises(RemoteProtocolError, match="topic 'T' has 10"):
        RegisterBrokerBody.decode_wire(data)


def test_r58_a_stream_inflates_in_steps_and_to_a_frame_at_most() -> None:
    with pytest.raises(RemoteProtocolError, match="too long"):
        RegisterBrokerBody.decode_wire(zlib.compress(bytes(INFLATED_SIZE_MAX + 1)))
    largest = zlib.compress((2).to_bytes(4) + b"{}" + bytes(INFLATED_SIZE_MAX - 6))
    assert len(largest) < 20_000
    steps, count = RegisterBrokerBody.decode_steps(largest), 0
    with contextlib.suppress(StopIteration, RemoteProtocolError):
        while True:
            next(steps)
            count += 1
    assert count >= 64
