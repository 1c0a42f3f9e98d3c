"""The commit-log record: golden logs byte for byte, and properties over made-up records."""

import json
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.protocol import message as message_module
from batonmq.protocol.message_id import encode_offset_msg_id, host_bytes, host_text, split_address
from batonmq.protocol.records import codec
from batonmq.protocol.records.faults import CorruptRecord
from batonmq.protocol.sysflag import BORN_HOST_V6, COMPRESSED, STORE_HOST_V6
from tests.records import record_of as encode_record

STORE = Path(__file__).parents[2] / "golden/java-5.3.3/store"

I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
HOST = st.one_of(
    st.tuples(st.ip_addresses(v=4), st.integers(0, 65535)),
    st.tuples(st.ip_addresses(v=6), st.integers(0, 65535)),
).map(lambda pair: host_bytes(str(pair[0]), pair[1]))
PAIR = st.tuples(
    st.from_regex(r"[A-Za-z_]{1,8}", fullmatch=True), st.from_regex(r"[ -~]{1,12}", fullmatch=True)
)
PROPERTIES = st.lists(PAIR, max_size=4).map(
    lambda pairs: "".join(f"{k}\x01{v}\x02" for k, v in pairs).encode()
)
RECORD = st.fixed_dictionaries(
    {
        "topic": st.integers(1, 255).map(lambda n: b"T" * n),
        "queue_id": I32,
        "queue_offset": I64,
        "physical_offset": st.integers(0, 2**63 - 1),
        "flag": I32,
        "sys_flag": st.integers(0, 0x7FF).map(lambda f: f & ~(BORN_HOST_V6 | STORE_HOST_V6)),
        "born_timestamp": I64,
        "born_host": HOST,
        "store_timestamp": I64,
        "store_host": HOST,
        "reconsume_times": I32,
        "prepared_transaction_offset": I64,
        "body": st.binary(max_size=64),
        "properties": PROPERTIES,
    }
)
ONE = {
    "topic": b"GoldTopic", "queue_id": 3, "queue_offset": 7, "physical_offset": 1000, "flag": 0,
    "sys_flag": 0, "born_timestamp": 1, "born_host": host_bytes("127.0.0.1", 1),
    "store_timestamp": 2, "store_host": host_bytes("127.0.0.1", 2), "reconsume_times": 0,
    "prepared_transaction_offset": 0, "body": b"hello", "properties": b"TAGS\x01a\x02",
}  # fmt: skip

OWN = {
    "queue_id", "body", "properties", "born_timestamp", "born_host", "flag",
    "reconsume_times", "prepared_transaction_offset",
}  # fmt: skip


def naive_crc_digits(record: bytes) -> bytes:
    """Java `MessageDecoder.createCrc32`, step by step: ten times the last decimal digit."""
    crc = zlib.crc32(record[: -codec.CRC_TAIL_SIZE]) & 0x7FFFFFFF
    digits = bytearray()
    for _ in range(10):
        digits.append(ord("0") + crc % 10)
        crc //= 10
    return bytes(digits)


@pytest.mark.parametrize("store", ["b0", "b1"])
def test_golden_records_decode_to_their_lines_and_encode_to_the_same_bytes(store: str) -> None:
    """All 22 records of a Java log; the property string is taken verbatim from the record."""
    (segment,) = (STORE / store / "commitlog").iterdir()
    log = segment.read_bytes()
    lines = (STORE / store / "commitlog.decoded.jsonl").read_text().splitlines()
    position = 0
    for line in lines:
        want = json.loads(line)
        message = codec.decode_record(log, position, check_crc=True)
        head = codec.scan_record(log, position, check_crc=True)
        assert head is not None and head.kind == "message"
        assert {
            "bodyCRC": message.body_crc,
            "bodyHex": message.body.hex(),
            "bornHost": message.born_host,
            "bornTimestamp": message.born_timestamp,
            "flag": message.flag,
            "msgId": message.msg_id,
            "physicalOffset": message.physical_offset,
            "position": position,
            "preparedTransactionOffset": message.prepared_transaction_offset,
            "properties": message.properties,
            "queueId": message.queue_id,
            "queueOffset": message.queue_offset,
            "reconsumeTimes": message.reconsume_times,
            "size": message.store_size,
            "storeHost": message.store_host,
            "storeTimestamp": message.store_timestamp,
            "sysFlag": message.sys_flag,
            "topic": message.topic,
        } == want
        again = encode_record(
            topic=head.topic,
            queue_id=head.queue_id,
            queue_offset=head.queue_offset,
            physical_offset=head.physical_offset,
            flag=message.flag,
            sys_flag=head.sys_flag,
            born_timestamp=message.born_timestamp,
            born_host=host_bytes(*split_address(message.born_host)),
            store_timestamp=head.store_timestamp,
            store_host=host_bytes(*split_address(message.store_host)),
            reconsume_times=message.reconsume_times,
            prepared_transaction_offset=message.prepared_transaction_offset,
            body=message.body,
            properties=head.properties,
            append_prop_crc=False,
        )
        assert again == log[position : position + head.size]
        position += head.size
    assert (len(lines), position) == (22, 6760)
    with pytest.raises(CorruptRecord, match="zeros"):
        codec.scan_record(log, position)


def test_the_compressed_golden_body_inflates() -> None:
    (segment,) = (STORE / "b0/commitlog").iterdir()
    lines = (STORE / "b0/commitlog.decoded.jsonl").read_text().splitlines()
    compressed = next(json.loads(line) for line in lines if json.loads(line)["sysFlag"] & 1)
    message = codec.decode_record(segment.read_bytes(), compressed["position"])
    assert len(message.uncompressed_body()) == 6000


@given(RECORD, st.booleans(), st.binary(max_size=9))
def test_any_record_decodes_to_what_was_encoded(
    fields: dict[str, object], prop_crc: bool, before: bytes
) -> None:
    record = encode_record(**fields, append_prop_crc=prop_crc)  # type: ignore[arg-type]
    buf = before + record + b"\xff" * 5
    message = codec.decode_record(buf, len(before), check_crc=True)
    head = codec.scan_record(buf, len(before), check_crc=True)
    assert head is not None
    topic, body, raw = fields["topic"], fields["body"], fields["properties"]
    born, store = fields["born_host"], fields["store_host"]
    assert isinstance(topic, bytes) and isinstance(body, bytes) and isinstance(raw, bytes)
    assert isinstance(born, bytes) and isinstance(store, bytes)
    assert head.size == message.store_size == len(record)
    parts = len(topic) + len(body) + len(raw) + len(born) + len(store)
    assert head.size == 75 + (len(topic) > 127) + 20 * prop_crc + parts
    assert (head.topic, buf[head.body_offset :][: head.body_len]) == (topic, body)
    for name in ("queue_id", "queue_offset", "physical_offset", "store_timestamp", "flag"):
        assert getattr(head, name) == fields[name] == getattr(message, name)
    for name in ("reconsume_times", "prepared_transaction_offset"):
        assert getattr(head, name) == fields[name] == getattr(message, name)
    assert (message.body, message.born_timestamp) == (body, fields["born_timestamp"])
    assert (message.born_host, message.store_host) == (host_text(born), host_text(store))
    assert message.msg_id == encode_offset_msg_id(store, message.physical_offset)
    assert bool(message.sys_flag & BORN_HOST_V6) == (len(born) == 20)
    assert bool(message.sys_flag & STORE_HOST_V6) == (len(store) == 20)
    assert head.properties.startswith(raw)
    assert (
        codec.raw_properties(record) == codec.raw_properties(buf[len(before) :]) == head.properties
    )
    assert (struct.unpack_from(">I", record, 4)[0] == codec.MAGIC_V2) == (len(topic) > 127)
    if prop_crc:
        assert record[-11:-1] == naive_crc_digits(record)
        assert message.properties["__CRC32#"] == record[-11:-1].decode()
    else:
        assert head.properties == raw


@given(RECORD, st.data())
def test_r24_the_property_crc_finds_every_flipped_byte(
    fields: dict[str, object], data: st.DataObject
) -> None:
    """Any one byte of a record changed, be it head, body, topic or properties, is noticed; a
    larger size alone may also read as a record that has not wholly come."""
    record = bytearray(encode_record(**fields, append_prop_crc=True))  # type: ignore[arg-type]
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    try:
        head = codec.scan_record(record, 0, check_crc=True)
    except CorruptRecord:
        return
    assert head is None and at < 4


@pytest.mark.parametrize("bit", range(8))
def test_r24_the_body_crc_finds_a_flip_in_a_body_of_one_byte(bit: int) -> None:
    record = bytearray(encode_record(**{**ONE, "body": b"h"}, append_prop_crc=False))  # type: ignore[arg-type]
    record[record.rindex(b"h\x09GoldTopic")] ^= 1 << bit
    with pytest.raises(CorruptRecord, match="body CRC"):
        codec.scan_record(record, 0, check_crc=True)


@given(RECORD, st.data())
def test_a_filter_sees_the_properties_or_hears_that_the_record_is_damaged(
    fields: dict[str, object], data: st.DataObject
) -> None:
    """A flipped bit behind the size never leads out of the record."""
    record = bytearray(encode_record(**fields, append_prop_crc=False))  # type: ignore[arg-type]
    record[data.draw(st.integers(4, 91))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert record.endswith(codec.raw_properties(record))
    except CorruptRecord as damage:
        assert damage.what


def test_a_missing_last_separator_is_added_before_the_property_crc() -> None:
    record = encode_record(**{**ONE, "properties": b"TAGS\x01a"}, append_prop_crc=True)  # type: ignore[arg-type]
    head = codec.scan_record(record, check_crc=True)
    assert head is not None and head.properties.startswith(b"TAGS\x01a\x02__CRC32#\x01")


def test_a_torn_record_is_not_whole_yet_but_a_decoder_refuses_it() -> None:
    record = encode_record(**ONE, append_prop_crc=True)  # type: ignore[arg-type]
    for size in range(len(record)):
        assert codec.scan_record(record[:size]) is None
        with pytest.raises(CorruptRecord, match="cut off"):
            codec.decode_record(record[:size])


def test_wrong_crcs_are_named() -> None:
    plain = bytearray(encode_record(**ONE, append_prop_crc=False))  # type: ignore[arg-type]
    plain[88] ^= 1
    with pytest.raises(CorruptRecord, match="body CRC"):
        codec.scan_record(plain, check_crc=True)
    with pytest.raises(CorruptRecord, match="body CRC"):
        codec.decode_records(plain)
    tailed = bytearray(encode_record(**ONE, append_prop_crc=True))  # type: ignore[arg-type]
    tailed[20] ^= 1
    with pytest.raises(CorruptRecord, match="property CRC"):
        codec.scan_record(tailed, check_crc=True)


@pytest.mark.parametrize("at", range(len("__CRC32#")))
def test_r24_a_damaged_name_of_the_property_crc_switches_no_check_off(at: int) -> None:
    record = bytearray(encode_record(**ONE, append_prop_crc=True))  # type: ignore[arg-type]
    record[len(record) - codec.CRC_TAIL_SIZE + at] ^= 1
    with pytest.raises(CorruptRecord, match="name of the property CRC"):
        codec.scan_record(record, check_crc=True)


def test_a_blank_says_how_much_of_its_file_is_left() -> None:
    blank = codec.encode_blank(300)
    assert blank == bytes.fromhex("0000012c cbd43194")
    head = codec.scan_record(blank)
    assert head is not None and (head.kind, head.size) == ("blank", 300)
    with pytest.raises(CorruptRecord, match="blank"):
        codec.decode_record(blank)
    with pytest.raises(CorruptRecord, match="blank of 7 bytes"):
        codec.scan_record(codec.encode_blank(7))


@given(st.binary(min_size=8, max_size=200))
def test_noise_is_never_more_than_corrupt(noise: bytes) -> None:
    for magic in (b"", bytes.fromhex("daa320a7"), bytes.fromhex("daa320ab")):
        buf = noise[:4] + magic + noise[4:] if magic else noise
        for size in (buf, (len(buf)).to_bytes(4) + buf[4:]):
            try:
                codec.scan_record(size, check_crc=True)
            except CorruptRecord as error:
                assert error.what


def test_numbers_that_do_not_fit_are_refused_rather_than_cut() -> None:
    with pytest.raises(struct.error):
        encode_record(**{**ONE, "queue_id": 2**31}, append_prop_crc=True)  # type: ignore[arg-type]
    with pytest.raises(struct.error):
        encode_record(**{**ONE, "properties": b"x" * 32768}, append_prop_crc=False)  # type: ignore[arg-type]


@given(RECORD)
def test_no_sender_decides_how_long_the_hosts_are(fields: dict[str, object]) -> None:
    """With a wrong bit every field behind them is read elsewhere."""
    assert isinstance(fields["sys_flag"], int)
    claimed = fields | {"sys_flag": fields["sys_flag"] | BORN_HOST_V6 | STORE_HOST_V6}
    records = [encode_record(**each, append_prop_crc=False) for each in (fields, claimed)]
    assert records[0] == records[1]


@given(RECORD, st.booleans())
def test_a_message_that_is_stored_again_keeps_all_but_its_place(
    fields: dict[str, object], prop_crc: bool
) -> None:
    """Delivery, transactions and dead letters store messages again; the CRC tail is the place's."""
    record = encode_record(**fields, append_prop_crc=prop_crc)  # type: ignore[arg-type]
    again = codec.message_to_store(record)
    assert isinstance(again, codec.NewMessage) and again.topic.encode() == fields["topic"]
    assert {name: getattr(again, name) for name in OWN} == {name: fields[name] for name in OWN}
    assert (again.sys_flag ^ fields["sys_flag"]) & ~(BORN_HOST_V6 | STORE_HOST_V6) == 0  # type: ignore[operator]


@pytest.mark.parametrize("above", [0, 1])
def test_r57_r58_a_body_inflates_up_to_a_limit(above: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_module, "INFLATED_BODY_SIZE_MAX", 1000)
    body = zlib.compress(bytes(1000 + above))
    if above:
        with pytest.raises(ValueError, match="more than 1000 bytes"):
            message_module.uncompress(body, COMPRESSED)
    else:
        assert message_module.uncompress(body, COMPRESSED) == bytes(1000)


def test_an_incomplete_compressed_body_is_refused() -> None:
    with pytest.raises(zlib.error):
        message_module.uncompress(zlib.compress(b"x" * 100)[:-1], COMPRESSED)
