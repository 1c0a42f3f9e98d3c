"""fastjson's dialect: what Java writes that is not JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.protocol.bodies import BrokerData, ResetOffsetBody, TopicConfig, TopicList
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.fastjson import FastjsonError, _JsonReader, loads
from batonmq.protocol.json_body import encode_json, encode_queue_map
from batonmq.protocol.message import MessageQueue

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(VALUES, st.booleans())
def test_standard_json_reads_the_same_the_slow_way(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert _JsonReader(text).read_all() == json.loads(text)


@given(VALUES, st.integers(0, 200))
def test_cut_or_bent_text_never_ends_in_anything_but_a_named_error(value: object, at: int) -> None:
    text = json.dumps(value)
    for bent in (text[:at], text[:at] + "}" + text[at:], "{" + text[at:]):
        try:
            loads(bent)
        except FastjsonError as error:
            assert error.position >= 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{0:"a:1",2:"b:2"}', {"0": "a:1", "2": "b:2"}),
        ("{'a':'it\\'s'}", {"a": "it's"}),
        ("{a:1,b:true}", {"a": 1, "b": True}),
        ("{-1:1L}", {"-1": 1}),
        ("[1,,2,]", [1, 2]),
        ('{"a":1.5E2}', {"a": 150.0}),
        ('{0:"\\ud83d\\ude00\\x41"}', {"0": "\U0001f600A"}),
        ('{{"q":0,"t":"T"}:1}', {(("q", 0), ("t", "T")): 1}),
        (' \n\t{\r"a" : [ ] }\n', {"a": []}),
    ],
)
def test_dialect(text: str, value: object) -> None:
    assert loads(text) == value
    assert loads(text.encode()) == value


def test_references_are_followed() -> None:
    """fastjson writes an instance once and points at it afterwards."""
    value = loads('{"a":{"x":{"v":1}},"b":{"$ref":"$.a.x"},"c":[{"$ref":"$.a"}]}')
    assert value["b"] == {"v": 1}
    assert value["c"][0] == {"x": {"v": 1}}
    assert loads('{"a":[5,{"k.x":7}],"b":{"$ref":"$.a[1]"}}')["b"] == {"k.x": 7}
    assert loads('{"k.x":{"v":1},"b":{"$ref":"$.k\\\\.x"}}')["b"] == {"v": 1}
    with pytest.raises(FastjsonError, match="nowhere"):
        loads('{"b":{"$ref":"$.a"}}')


@pytest.mark.parametrize("text", ["", "{", '{"a"}', '{"a":}', "[1", '"a', "nope", "{1:2}x", "\\"])
def test_other_text_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(FastjsonError, match="at character"):
        loads(text)


def test_deep_nesting_is_refused_rather_than_followed() -> None:
    with pytest.raises(FastjsonError, match="nested"):
        loads("{0:" * 5000)


def test_bodies_take_the_dialect_unknown_members_nulls_and_numbers_in_quotes() -> None:
    data = BrokerData.decode(b'{"brokerAddrs":{0:"h:1","2":"h:2"},"brokerName":"b","new":[{}]}')
    assert data.broker_addrs == {0: "h:1", 2: "h:2"}
    topic = TopicConfig.decode(b'{"attributes":null,"perm":"4","topicName":"T"}')
    assert (topic.attributes, topic.perm, topic.topic_name) == ({}, 4, "T")
    assert TopicList.decode(b'{"topicList":["a"]}').topic_list == ["a"]
    with pytest.raises(RemoteProtocolError, match="TopicConfig"):
        TopicConfig.decode(b'{"perm":[]}')


def test_nulls_are_not_written() -> None:
    assert b"null" not in TopicList(topic_list=["x:null"]).encode().replace(b'"x:null"', b"")
    assert encode_json({"a": None, "b": [{"c": None}]}) == b'{"b":[{}]}'


def test_queue_keyed_maps_go_there_and_back() -> None:
    body = ResetOffsetBody(offset_table={MessageQueue('T"', "b", 0): 5})
    assert body.encode() == b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T\\""}:5}}'
    assert ResetOffsetBody.decode(body.encode()) == body
    as_text = json.dumps({"offsetTable": {'{"brokerName":"b","queueId":0,"topic":"T"}': 1}})
    assert ResetOffsetBody.decode(as_text.encode()).offset_table == {MessageQueue("T", "b", 0): 1}
    with pytest.raises(RemoteProtocolError):
        ResetOffsetBody.decode(b'{"offsetTable":{"x":1}}')


def test_depth_is_how_deep_not_how_many() -> None:
    assert loads("[" + "{'a':[]}," * 2_000 + "]") == [{"a": []}] * 2_000


@pytest.mark.parametrize("reference", ["..", "$", "@"])
def test_r58_a_reference_to_what_holds_it_stands_for_endless_values(reference: str) -> None:
    with pytest.raises(FastjsonError, match="more than"):
        loads(json.dumps({"a": {"b": {"c": {"$ref": reference}}}}))


@pytest.mark.parametrize("text", ["[1 2]", "['a' 'b']", "{a:1 b:2}"])
def test_two_values_without_a_comma_are_no_list(text: str) -> None:
    with pytest.raises(FastjsonError, match="comma"):
        loads(text)


@pytest.mark.parametrize("escape", ["\\u-001", "\\u+041", "\\u 041", "\\u0_41", "\\x-1", "\\u04"])
def test_an_escape_has_hexadecimal_digits_only(escape: str) -> None:
    with pytest.raises(FastjsonError, match="hexadecimal digits"):
        loads(f"{{a:'{escape}'}}")


@pytest.mark.parametrize("text", ["\\udc00\\ud800", "\\ud800", "a\\ud800\\u0041", "\\ud800\\ud800"])
def test_half_of_a_surrogate_pair_is_no_text(text: str) -> None:
    for quoted in (f'"{text}"', f"'{text}'", f"{{'{text}':1}}"):
        with pytest.raises(FastjsonError, match="half of a surrogate pair"):
            loads(quoted)


def test_nulls_of_values_by_queue_are_left_out() -> None:
    written = encode_queue_map({MessageQueue("T", "b", 0): {"a": None, "c": 1}})
    assert written == b'{{"brokerName":"b","queueId":0,"topic":"T"}:{"c":1}}'
