"""Headers and frames: golden ones, made-up ones, malformed ones."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.protocol.codes import LanguageCode, RequestCode
from batonmq.protocol.errors import BrokerRefusal, RemoteProtocolError
from batonmq.remoting.command import (
    TYPE_BINARY,
    TYPE_JSON,
    FrameReader,
    RemotingCommand,
    decode_frame,
    encode_frame,
    encode_header,
    peek_code,
    peek_is_response,
    receive_buffer,
)

GOLDEN = Path(__file__).parents[1] / "golden"

I32 = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
COMMAND = st.builds(
    RemotingCommand,
    st.integers(0, 0xFFFF),
    flag=st.integers(0, 3),
    opaque=I32,
    language=st.sampled_from(LanguageCode),
    version=st.integers(0, 32767),
    remark=st.none() | TEXT.filter(bool),
    ext=st.dictionaries(TEXT.filter(bool), TEXT.filter(bool), max_size=5),
    body=st.binary(max_size=30),
)


def same(one: RemotingCommand, other: RemotingCommand) -> bool:
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("code", "flag", "opaque", "language", "version", "remark", "ext", "body")
    )


def test_golden_frames_come_out_of_the_reader_and_go_back_into_the_same_bytes() -> None:
    reader, seen = FrameReader(receive_buffer()), {TYPE_JSON: 0, TYPE_BINARY: 0}
    for file in sorted(GOLDEN.glob("*/remoting/*.json")):
        for example in json.loads(file.read_text())["examples"]:
            for message in (example["request"], example.get("response")):
                if message is None:
                    continue
                text, body = message["header"], bytes.fromhex(message["body_hex"])
                binary = text.startswith("hex:")
                header = bytes.fromhex(text[4:]) if binary else text.encode()
                length, mark = 4 + len(header) + len(body), binary << 24 | len(header)
                frame = length.to_bytes(4) + mark.to_bytes(4) + header + body
                reader.get_buffer()[: len(frame)] = frame
                ((serialize_type, got_header, got_body),) = reader.received(len(frame))
                cmd = decode_frame(got_header, got_body, serialize_type)
                assert encode_frame(cmd) == frame, file.name
                assert peek_code(serialize_type, header) == cmd.code
                assert peek_is_response(serialize_type, header) == cmd.is_response
                seen[serialize_type] += 1
    assert seen[TYPE_JSON] > 200 and seen[TYPE_BINARY] > 15


@given(COMMAND, st.sampled_from([TYPE_JSON, TYPE_BINARY]))
def test_commands_go_there_and_back(cmd: RemotingCommand, serialize_type: int) -> None:
    cmd.serialize_type = serialize_type
    frame = encode_frame(cmd)
    length, mark = int.from_bytes(frame[:4]), int.from_bytes(frame[4:8])
    header_len = mark & 0xFFFFFF
    assert length == len(frame) - 4 and mark >> 24 == serialize_type
    header, body = frame[8 : 8 + header_len], frame[8 + header_len :]
    again = decode_frame(header, body, serialize_type)
    if serialize_type == TYPE_BINARY and not cmd.is_response:
        cmd.code = again.code if again.code & 0xFFFF == cmd.code else cmd.code
    assert same(again, cmd)
    assert peek_is_response(serialize_type, header) == cmd.is_response


def test_pop_codes_above_16_bits_arrive_whole_in_binary_headers() -> None:
    pop_codes = [code for code in RequestCode if code > 0xFFFF]
    assert {int(code) & 0xFFFF for code in pop_codes} == {*range(3442, 3449), 3543}
    for code in pop_codes:
        header = encode_header(RemotingCommand(code, serialize_type=TYPE_BINARY))
        assert decode_frame(header, b"", TYPE_BINARY).code == code
        assert peek_code(TYPE_BINARY, header) == code
    # In a JSON header 3442 is 3442.
    assert decode_frame(b'{"code":3442}', b"", TYPE_JSON).code == 3442


def test_an_empty_binary_value_is_absent_as_in_java() -> None:
    cmd = RemotingCommand(1, ext={"a": "", "b": "x"}, serialize_type=TYPE_BINARY)
    assert decode_frame(encode_header(cmd), b"", TYPE_BINARY).ext == {"b": "x"}


def test_headers_of_other_languages_are_understood() -> None:
    """Key order, blanks, unknown keys, numbers as values, nulls, ordinals: all of it is seen."""
    header = (
        b'{ "language": "GO", "flag": 1, "opaque": 3, "extFields": {"n": 5, "b": true, "x": null},'
        b' "remark": null, "new": [1], "code": 0 }'
    )
    cmd = decode_frame(header, b"", TYPE_JSON)
    assert (cmd.language, cmd.opaque, cmd.ext) == (LanguageCode.GO, 3, {"n": "5", "b": "true"})
    assert cmd.is_response and cmd.remark is None
    assert peek_code(TYPE_JSON, header) == 0 and peek_is_response(TYPE_JSON, header)
    other = decode_frame(b'{"code":1,"language":"KLINGON"}', b"", TYPE_JSON)
    assert other.language == LanguageCode.OTHER and not other.has_ext


def test_a_flag_inside_a_field_is_not_the_frames_flag() -> None:
    cmd = RemotingCommand(10, flag=1, ext={"x": '"flag":0'})
    assert peek_is_response(TYPE_JSON, encode_header(cmd))


NESTED = b"[" * 50_000 + b"]" * 50_000


@pytest.mark.parametrize(
    ("serialize_type", "header", "what"),
    [
        (TYPE_JSON, b"nonsense", "JSON header b'nonsense'"),
        (TYPE_JSON, b'{"opaque":1}', "code"),
        (TYPE_JSON, b'{"code":"x"}', "code"),
        (TYPE_JSON, b'{"code":1,"remark":"\xff"}', "JSON header"),
        (TYPE_JSON, b"[]", "JSON header"),
        (TYPE_JSON, b"", "JSON header"),
        (TYPE_JSON, b'{"code":1,"x":%b}' % NESTED, "JSON header"),
        (TYPE_JSON, b'{"code":1,"extFields":{"a":1},"x":%b}' % NESTED, "JSON header"),
        (TYPE_BINARY, b"\x00\x01", "cut off"),
        (TYPE_BINARY, b"\x00" * 17, "remark"),
        (TYPE_BINARY, b"\x00" * 13 + b"\x7f\x00\x00\x00" + b"\x00" * 9, "remark"),
        (TYPE_BINARY, b"\x00" * 17 + b"\x00\x00\x00\x09abc", "fields of 9 bytes"),
        (TYPE_BINARY, b"\x00" * 17 + b"\x00\x00\x00\x03\x00\x09a", "cut off"),
        (TYPE_BINARY, b"\x00" * 17 + b"\x00\x00\x00\x01\x00", "cut off"),
        (TYPE_BINARY, b"\x00" * 17 + b"\x00\x00\x00\x08\x00\x01a\x00\x00\x00\x01\xff", "UTF-8"),
        (7, b"{}", "type 7"),
    ],
)
def test_malformed_headers_say_what_is_wrong(serialize_type: int, header: bytes, what: str) -> None:
    with pytest.raises(RemoteProtocolError, match=what):
        decode_frame(header, b"", serialize_type)


@given(COMMAND, st.data())
def test_a_bent_binary_header_is_read_or_refused_never_more(
    cmd: RemotingCommand, data: st.DataObject
) -> None:
    cmd.serialize_type = TYPE_BINARY
    header = bytearray(encode_header(cmd))
    header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(header[: data.draw(st.integers(0, len(header)))])
    for bent in (bytes(header), cut):
        try:
            decode_frame(bent, b"", TYPE_BINARY)
        except RemoteProtocolError:
            pass


def test_fields_have_the_types_that_are_asked_for() -> None:
    cmd = RemotingCommand.request(
        RequestCode.SEND_MESSAGE, {"n": 5, "b": True, "x": None, "c": RequestCode.HEART_BEAT}
    )
    assert cmd.ext == {"n": "5", "b": "true", "c": "34"}
    assert (cmd.require_int("n"), cmd.get_bool("b"), cmd.get_int("y", -1)) == (5, True, -1)
    with pytest.raises(BrokerRefusal, match="<x> is null"):
        cmd.require("x")
    with pytest.raises(BrokerRefusal, match="<b> is no whole number: 'true'"):
        cmd.require_int("b")
    # As Java's Long.parseLong: no digits of other scripts, no `_`, nothing beyond 64 bits.
    for text in ("1_000", "\u0663", " 5", "9" * 19):
        cmd.ext["n"] = text
        with pytest.raises(BrokerRefusal, match="<n> is no whole number"):
            cmd.get_int("n", 0)
