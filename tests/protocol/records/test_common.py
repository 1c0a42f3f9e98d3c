"""The quick way through common records agrees with the careful one, for good and bad bytes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.protocol.properties import find_property
from batonmq.protocol.records.codec import scan_record
from batonmq.protocol.records.common import quick_record, quick_size
from batonmq.protocol.records.faults import CorruptRecord
from tests.records import record_of as encode_record

HOST = bytes(8)
OFFSET = 4096
ROOM = 4096

properties_of = st.lists(
    st.tuples(
        st.sampled_from([b"TAGS", b"KEYS", b"UNIQ_KEY", b"MYTAGS", b"WAIT"]),
        st.binary(max_size=12).map(lambda raw: raw.replace(b"\1", b"").replace(b"\2", b"")),
    ),
    max_size=6,
).map(lambda pairs: b"".join(b"%b\x01%b\x02" % pair for pair in pairs))


def record_of(topic: bytes, body: bytes, properties: bytes, *, crc: bool = True) -> bytes:
    return encode_record(
        topic=topic,
        queue_id=3,
        queue_offset=77,
        physical_offset=OFFSET,
        flag=5,
        sys_flag=0,
        born_timestamp=1,
        born_host=HOST,
        store_timestamp=2,
        store_host=HOST,
        reconsume_times=0,
        prepared_transaction_offset=0,
        body=body,
        properties=properties,
        append_prop_crc=crc,
    )


@given(st.binary(min_size=1, max_size=127), st.binary(max_size=300), properties_of)
def test_the_same_fields_as_the_careful_way(topic, body, properties):
    record = record_of(topic, body, properties)
    view = memoryview(b"##" + record + b"behind")
    head = scan_record(view, 2, check_crc=True)
    assert quick_record(view, 2, ROOM, OFFSET) == (
        head.size,
        head.queue_id,
        head.queue_offset,
        head.store_timestamp,
        head.topic,
        find_property(head.properties, b"TAGS"),
        find_property(head.properties, b"KEYS"),
        find_property(head.properties, b"UNIQ_KEY"),
    )
    assert quick_size(view, 2, len(record) + 8, OFFSET) == len(record)
    assert quick_size(view, 2, len(record) + 7, OFFSET) == 0
    assert quick_size(view, 2, ROOM, OFFSET + 1) == 0
    assert quick_size(view[: len(record) + 1], 2, ROOM, OFFSET) == 0


@settings(max_examples=300)
@given(st.data(), properties_of)
def test_no_changed_byte_passes(data, properties):
    """Whatever the quick way takes, the careful way takes, too."""
    record = bytearray(record_of(b"T", b"some body", properties))
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    view = memoryview(bytes(record))
    assert quick_size(view, 0, ROOM, OFFSET) == 0
    try:
        careful = scan_record(view, 0, check_crc=True)
    except CorruptRecord:
        careful = None
    assert careful is None or b"__CRC32#" not in careful.properties


@given(st.binary(max_size=200))
def test_bytes_of_nonsense_are_no_record(raw):
    assert quick_record(memoryview(raw), 0, ROOM, OFFSET) is None


def test_a_record_without_property_crc_is_left_to_the_careful_way():
    record = memoryview(record_of(b"T", b"body", b"TAGS\x01a\x02", crc=False))
    assert scan_record(record, 0, check_crc=True) is not None
    assert quick_record(record, 0, ROOM, OFFSET) is None
