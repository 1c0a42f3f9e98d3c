"""The registration body in both of its forms."""

import contextlib
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.protocol import register_body
from batonmq.protocol.bodies import DataVersion, TopicConfig, TopicConfigAndMappingSerializeWrapper
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.fastjson import REQUEST_SIZE_MAX, FastjsonError, loads
from batonmq.protocol.register_body import INFLATED_SIZE_MAX, RegisterBrokerBody, crc32_of
from tests.protocol.compressed_body import compressed, ended, registered

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
        typed = registered(body)
        assert len(typed.topic_config_serialize_wrapper.topic_config_table) > 5
        again = registered(compressed(typed))
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
    assert registered(data, version) == body
    assert registered(body.encode(), version) == body


def test_an_empty_body_registers_nothing() -> None:
    assert registered(b"") == RegisterBrokerBody()


def one_topic(text: bytes) -> bytes:
    """A compressed body that is whole but for what `text` says of its topic."""
    version, topic, filters = (struct.pack(">i", len(each)) + each for each in (b"{}", text, b"[]"))
    return zlib.compress(version + struct.pack(">i", 1) + topic + filters)


def test_a_body_of_one_topic_is_read() -> None:
    read = registered(one_topic(b"A 1 1 6 SINGLE_TAG"))
    assert list(read.topic_config_serialize_wrapper.topic_config_table) == ["A"]


@given(st.data())
def test_a_cut_or_bent_stream_is_refused(data: st.DataObject) -> None:
    inflated = zlib.decompress(compressed(body_of(TopicConfig(topic_name="A"))))
    cut = data.draw(st.integers(0, len(inflated) - 1))
    try:
        registered(zlib.compress(inflated[:cut]))
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
        b'{"x":%b%b}' % (b"[" * 5_000, b"]" * 5_000),
        zlib.compress(struct.pack(">i2s2i", 2, b"{}", 0, 10_000) + b"[" * 5_000 + b"]" * 5_000),
        zlib.compress(struct.pack(">i2si", 2, b"{}", 0) + struct.pack(">i1s", 1, b"5")),
    ],
)
def test_malformed_bodies_name_themselves(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="RegisterBrokerBody"):
        registered(data)


def test_members_of_no_registration_are_left_out() -> None:
    """Keys that are objects, as fastjson writes them, are no JSON."""
    data = b'{"offsetTable":{{"queueId":3}:{"maxOffset":4}},"filterServerList":["f:1"]}'
    assert registered(data).filter_server_list == ["f:1"]


def test_r58_a_large_plain_body_is_standard_json() -> None:
    """Java's dialect is read by Python code: 16 MiB of it would keep a name server busy."""
    loose = b'"readQueueNums":"4"'
    for topics, is_read in ((5_000, True), (10_000, False)):
        body = body_of(*(TopicConfig(topic_name=f"T{number}") for number in range(topics)))
        plain = body.encode()
        assert registered(plain) == body
        dialect = plain.replace(b'"readQueueNums":16', loose)
        assert dialect.count(loose) == topics
        if is_read:
            read = registered(dialect)
            table = read.topic_config_serialize_wrapper.topic_config_table
            assert len(table) == topics and table["T0"].read_queue_nums == 4
        else:
            with pytest.raises(RemoteProtocolError, match="only as standard JSON"):
                registered(dialect)


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
    if form == "plain":
        table = register_body._Table
        monkeypatch.setattr(
            table, "_add", counting(table._add, decoded, lambda text: text.count(b"{") // 2)
        )
    else:
        topic_of = counting(register_body._topic_of, decoded)
        monkeypatch.setattr(register_body, "_topic_of", topic_of)
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


def counting(
    call: Callable[..., object], count: list[int], weigh: Callable[..., int] = lambda _: 1
) -> Callable[..., object]:
    def counted(*args: object) -> object:
        count[0] += weigh(args[-1])
        return call(*args)

    return counted


@pytest.mark.parametrize("place", ["topicConfigTable", "topicQueueMappingInfoMap"])
def test_r58_one_topic_of_a_large_body_has_a_limit(place: str) -> None:
    entry = b'"T":{"attributes":{"a":"%b"}}' % (b"x" * (1 << 20))
    data = b'{"topicConfigSerializeWrapper":{"%b":{%b}}}' % (place.encode(), entry)
    with pytest.raises(RemoteProtocolError, match=f"{place}: no entry of at most 65536 bytes"):
        registered(data)


def test_r58_a_stream_inflates_in_steps_and_to_a_frame_at_most() -> None:
    with pytest.raises(RemoteProtocolError, match="too long"):
        registered(zlib.compress(bytes(INFLATED_SIZE_MAX + 1)))
    largest = zlib.compress((2).to_bytes(4) + b"{}" + bytes(INFLATED_SIZE_MAX - 6))
    assert len(largest) < 20_000
    steps, count = RegisterBrokerBody.decode_steps(largest), 0
    with contextlib.suppress(StopIteration, RemoteProtocolError):
        while True:
            next(steps)
            count += 1
    assert count >= 64


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(st.dictionaries(TEXTS, TEXTS, max_size=3), st.lists(TEXTS, max_size=5, unique=True))
def test_r58_in_steps_a_plain_body_is_read_as_at_once(
    attributes: dict[str, str], names: list[str]
) -> None:
    """Also names and attributes with braces, quotes and commas."""
    body = body_of(*(TopicConfig(topic_name=name, attributes=attributes) for name in names))
    data = body.encode()
    assert RegisterBrokerBody.decode_at_once(data) == body
    assert ended(register_body._decode_plain(data)) == body


def test_r58_a_table_counts_only_in_its_place() -> None:
    """What looks like one in a text, or elsewhere, is none."""
    table = b'"topicConfigTable":{"T":{}}'
    for text in (
        b'{"filterServerList":[],%b}' % table,
        b'{"topicConfigSerializeWrapper":{"x":{%b}}}' % table,
        b'{"topicConfigSerializeWrapper":{%b,%b}}' % (table, table),
        b'{"topicConfigSerializeWrapper":{"topicConfigTable":0}}',
    ):
        with pytest.raises(RemoteProtocolError, match="once"):
            ended(register_body._decode_plain(text + b" " * REQUEST_SIZE_MAX))


def references(count: int) -> bytes:
    """An object that stands for 2^count values."""
    lists = [b'"a0":[1,1]']
    for number in range(1, count):
        reference = b'{"$ref":"$.a%d"}' % (number - 1)
        lists.append(b'"a%d":[%b,%b]' % (number, reference, reference))
    return b"{%b}" % b",".join(lists)


def piece(text: bytes) -> bytes:
    return struct.pack(">i", len(text)) + text


def packed(topics: Sequence[bytes] = (), mappings: Sequence[bytes] = (), **more: bytes) -> bytes:
    """The compressed form, of any texts."""
    counted = [
        struct.pack(">i", len(each)) + b"".join(map(piece, each)) for each in (topics, mappings)
    ]
    version, filters = piece(more.get("version", b"{}")), piece(more.get("filters", b"[]"))
    return zlib.compress(version + counted[0] + filters + counted[1])


@pytest.mark.parametrize(
    "data",
    [
        packed([b"T 1 1 6 SINGLE_TAG " + references(40)]),
        packed(mappings=[references(40)]),
        packed(filters=references(40)),
        packed(version=b"[%b]" % references(40)),
        b'{"filterServerList":[1],"x":%b}' % references(40),
        b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":{"perm":"6","x":%b}}}}'
        % references(40),
    ],
    ids=["attributes", "mapping", "filters", "version", "plain", "plain table"],
)
def test_r58_references_do_not_multiply(data: bytes) -> None:
    """2 KiB stood for 2^40 values."""
    with pytest.raises(RemoteProtocolError, match=r"values|Expected|reference"):
        registered(data)


def test_r58_a_long_list_that_is_named_often_is_not_listed_each_time() -> None:
    often = b"[%b]" % b",".join([b'{"$ref":"$.a"}'] * 2_000)
    text = b'{"a":[%b],"b":%b}' % (b",".join([b"1"] * 1_000), often)
    with pytest.raises(FastjsonError, match="more than 4096 values"):
        loads(text, is_request=True)


@pytest.mark.parametrize("kind", ["topics", "mappings"])
def test_r58_a_compressed_body_of_many_small_entries_has_a_limit(kind: str) -> None:
    """16 MiB of `{}` are 16 KiB on the wire, and held a name server for seconds."""
    texts = {"topics": b"T 1 1 6 SINGLE_TAG", "mappings": b"{}"}
    many = [texts[kind]] * (register_body.TOPICS_MAX + 1)
    with pytest.raises(RemoteProtocolError, match="at most 131072 are allowed"):
        registered(packed(**{kind: many}))


def test_r58_mappings_are_read_in_steps() -> None:
    steps = RegisterBrokerBody.decode_steps(packed(mappings=[b'{"topic":"T"}'] * 10_000))
    assert sum(1 for _ in steps) >= 10_000 // 256
