"""Ids and handles of messages, and Java's string hash, against naive versions."""

import base64
import time
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.protocol import tags
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.message_id import (
    UniqIdGenerator,
    decode_handle,
    decode_offset_msg_id,
    encode_offset_msg_id,
    host_bytes,
    host_text,
    split_address,
)
from batonmq.protocol.pop import PopHandle, PoppedQueue, order_count_info
from batonmq.protocol.tags import java_string_hash, tags_code

IP = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


def naive_hash(text: str) -> int:
    """s[0]*31^(n-1) + ... + s[n-1] over UTF-16 units, in 32 bits."""
    value = 0
    for char in text:
        units = [ord(char)]
        if ord(char) > 0xFFFF:
            rest = ord(char) - 0x10000
            units = [0xD800 + (rest >> 10), 0xDC00 + (rest & 0x3FF)]
        for unit in units:
            value = (31 * value + unit) % 2**32
    return value - 2**32 if value >= 2**31 else value


@given(st.text(max_size=40) | st.text(min_size=250, max_size=520))
def test_the_hash_is_javas(text: str) -> None:
    assert java_string_hash(text) == naive_hash(text)
    assert tags_code(text) == tags_code(text.encode("utf-8", "replace")) == naive_hash(text)


def test_known_hashes() -> None:
    hashes = [java_string_hash(t) for t in ("", "TagA", "polygenelubricants")]
    assert hashes == [0, 2598919, -(2**31)]
    assert java_string_hash("\ud800") == 0xD800, "half a pair is a unit"
    assert tags_code(None) == tags_code(b"") == 0


def test_the_tag_cache_is_bounded() -> None:
    for number in range(10_000):
        tags_code(f"tag-{number}")
    assert tags_code("tag-9999") == naive_hash("tag-9999")
    assert len(tags._codes) <= tags._CACHE_MAX


@given(IP, st.integers(0, 65535), st.integers(0, 2**63 - 1))
def test_offset_ids_go_there_and_back(ip: str, port: int, offset: int) -> None:
    host = host_bytes(ip, port)
    msg_id = encode_offset_msg_id(host, offset)
    assert msg_id == msg_id.upper() and len(msg_id) == (32 if len(host) == 8 else 56)
    address, decoded = decode_offset_msg_id(msg_id)
    assert decoded == offset and address == host_text(host)
    assert host_bytes(*split_address(address)) == host


def test_a_golden_offset_id() -> None:
    assert encode_offset_msg_id(host_bytes("127.0.0.1", 30911), 0x109) == (
        "7F000001000078BF0000000000000109"
    )


SPACED = "7F000001000078BF0000000000000109" + " " * 24


@pytest.mark.parametrize("bad", ["", "7F", "Z" * 32, "7F 0000010000000078BF0000000000000", SPACED])
def test_other_texts_are_no_offset_id(bad: str) -> None:
    with pytest.raises(ValueError):
        decode_offset_msg_id(bad)


def test_uniq_keys_differ_and_begin_anew_with_the_month() -> None:
    """The clock passes midnight of New Year: the time part starts again, the counter continues."""
    midnight_ms = int(time.mktime(datetime(2026, 1, 1).timetuple())) * 1000
    now_ms = [midnight_ms - 1]
    generator = UniqIdGenerator(bytes([10, 0, 0, 1]), 70000, lambda: now_ms[0], instance_hash=-2)
    before = generator.next()
    now_ms[0] = midnight_ms + 5
    after = generator.next()
    assert before.startswith("0A000001" + f"{70000 & 0xFFFF:04X}" + "FFFFFFFE")
    assert before[20:28] == f"{31 * 86_400_000 - 1:08X}" and before[28:] == "0000"
    assert after[20:28] == "00000005" and after[28:] == "0001"
    ids = {generator.next() for _ in range(1000)}
    assert len(ids) == 1000 and {len(i) for i in ids} == {32}
    assert len(UniqIdGenerator(b"\0" * 16, 1, lambda: 0).next()) == 56


def test_uniq_keys_go_on_when_their_counter_is_full() -> None:
    generator = UniqIdGenerator(bytes(4), 1, lambda: 0)
    counters = [generator.next()[28:] for _ in range(0x10001)]
    assert counters[-2:] == ["FFFF", "0000"] and len(set(counters)) == 0x10000


@pytest.mark.parametrize("text", ["v2 T broker-a 1 K", "v1 T broker-a 1", "v1 T broker-a x K"])
def test_what_no_broker_gave_is_no_recall_handle(text: str) -> None:
    with pytest.raises(ValueError, match="version v1"):
        decode_handle(base64.urlsafe_b64encode(text.encode()).decode())


def test_a_pop_handle_may_end_with_the_offset_that_javas_proxy_appends() -> None:
    handle = "1 2 3 4 0 broker-a 6 7"
    assert PopHandle.decode(f"{handle} 8").encode() == handle
    for end in ("x", "-8", "8 9"):
        with pytest.raises(RemoteProtocolError, match="allowed is what POP gave"):
            PopHandle.decode(f"{handle} {end}")


@pytest.mark.parametrize("at", [3, 6])
def test_numbers_of_a_pop_handle_fit_their_fields(at: int) -> None:
    words = ["1", "2", "3", "4", "0", "broker-a", "6", "7"]
    assert PopHandle.decode(" ".join(words)).encode() == " ".join(words)
    words[at] = str(2**31)
    with pytest.raises(RemoteProtocolError, match="too large"):
        PopHandle.decode(" ".join(words))


def test_a_queue_popped_in_order_shows_the_least_of_its_counts() -> None:
    """Clients take it for those that are not named: 0 is a first delivery."""
    assert order_count_info([PoppedQueue("0", 3, [5, 6], [0, 2])]) == "0 qo3%6 2;0 3 0"
