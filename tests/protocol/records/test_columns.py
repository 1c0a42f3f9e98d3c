"""All readers of records give one answer, of good records and of damaged ones."""

import struct
import subprocess
import sys
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.protocol.layout import record_layout
from batonmq.protocol.properties import find_property
from batonmq.protocol.records import codec, columns
from batonmq.protocol.records.common import quick_record, quick_size
from batonmq.protocol.records.faults import CorruptRecord, RecordFault
from batonmq.protocol.records.search import candidates
from tests.records import record_of

HOST_V4, HOST_V6 = bytes(8), bytes(range(20))
BASE = 4096
I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
MESSAGES = st.fixed_dictionaries(
    {
        "topic": st.binary(min_size=1, max_size=200),
        "queue_id": I32,
        "queue_offset": I64,
        "flag": I32,
        "sys_flag": st.sampled_from([0, 0, 0, 4, 8, 12]) | I32,
        "born_timestamp": I64,
        "born_host": st.sampled_from([HOST_V4, HOST_V4, HOST_V6]),
        "store_timestamp": I64,
        "store_host": st.sampled_from([HOST_V4, HOST_V4, HOST_V6]),
        "reconsume_times": I32,
        "prepared_transaction_offset": I64,
        "body": st.binary(max_size=60),
        "properties": st.sampled_from(
            [b"", b"TAGS\x01a\x02KEYS\x01k\x02", b"0123456789\x02", b"KEYS\x01k\x02\0", b"no pair"]
        ),
        "append_prop_crc": st.booleans(),
    }
)
PLAIN = {
    "topic": b"T", "queue_id": 3, "queue_offset": 7, "flag": 5, "sys_flag": 0, "born_timestamp": 1,
    "born_host": HOST_V4, "store_timestamp": 2, "store_host": HOST_V4, "reconsume_times": 0,
    "prepared_transaction_offset": 0, "body": b"body", "properties": b"TAGS\x01a\x02",
    "append_prop_crc": True,
}  # fmt: skip
#: Where a field of numbers may go wrong, by its width in bytes.
LIMITS = {
    width: [0, 1, (1 << 8 * width - 1) - 1, 1 << 8 * width - 1, (1 << 8 * width) - 1]
    for width in (1, 2, 4, 8)
}


def log_of(*messages, base=BASE):
    """(bytes, starts) of records one behind the other, the first one at log offset `base`."""
    data, starts = bytearray(), []
    for fields in messages:
        starts.append(len(data))
        data += record_of(**{**PLAIN, **fields, "physical_offset": base + len(data)})
    return data, starts


def fields_of(message):
    """(offset, width) of each number of a record, by name; positions are in the record."""
    layout = record_layout(len(message["born_host"]), len(message["store_host"]))
    widths = {">u4": 4, ">i4": 4, ">i8": 8}
    found = {n: (layout.at[n], widths[kind]) for n, kind in layout.dtype if kind in widths}
    topic_at = layout.size + len(message["body"])
    topic_width = 1 if len(message["topic"]) <= 127 else 2
    found["topic_length"] = topic_at, topic_width
    found["properties_length"] = topic_at + topic_width + len(message["topic"]), 2
    return found


def sign(data, start, end):
    """Give the bytes of a record the property CRC that a writer would have given them."""
    crc = zlib.crc32(data[start : end - codec.CRC_TAIL_SIZE]) & 0x7FFFFFFF
    data[end - codec.CRC_TAIL_SIZE : end] = codec.crc_tail(crc)


@st.composite
def logs(draw):
    """(bytes, end of the file): records, of which one may have a number at its limits, as it lies
    on the disk or as a wrong writer would have signed it; or any byte is another."""
    messages = draw(st.lists(MESSAGES, min_size=1, max_size=4))
    data, starts = log_of(*messages)
    file_end = BASE + len(data) + draw(st.sampled_from([0, 7, 8, 9, 1000]))
    damage = draw(st.sampled_from(["none", "limit", "signed limit", "flip", "cut"]))
    if damage in ("limit", "signed limit"):
        which = draw(st.integers(0, len(starts) - 1))
        end = [*starts, len(data)][which + 1]
        at, width = draw(st.sampled_from(sorted(fields_of(messages[which]).values())))
        at += starts[which]
        now = int.from_bytes(data[at : at + width])
        near = [(now + step) % (1 << 8 * width) for step in (-20, -12, -1, 1, 12, 20)]
        data[at : at + width] = draw(st.sampled_from(near + LIMITS[width])).to_bytes(width)
        if damage == "signed limit":
            sign(data, starts[which], end)
    elif damage == "flip":
        data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    elif damage == "cut":
        del data[draw(st.integers(0, len(data))) :]
    return bytes(data), file_end


def scalar_answer(data, file_end):
    """(heads, fault): the good records from the first on, and what ends them."""
    heads, at = [], 0
    while at < len(data):
        try:
            head = codec.scan_in_file(data, at, BASE + at, file_end, check_crc=True)
        except CorruptRecord as error:
            return heads, error.fault
        if head is None or head.kind == "blank":
            break
        heads.append((at, head))
        at += head.size
    return heads, None


def numpy_answer(data, file_end):
    """(records, marked): all whose parts fit together, and which of them are suspected."""
    starts, _ = columns.chain(data, 0, len(data))
    records, _ = columns.locate(data, starts)
    return records, columns.suspects(data, records, BASE, file_end)


@settings(max_examples=200, deadline=None)
@given(logs())
def test_r24_one_answer_of_all_readers(case):
    data, file_end = case
    heads, _ = scalar_answer(data, file_end)
    records, marked = numpy_answer(data, file_end)
    assert records.start[: len(heads)].tolist() == [at for at, _ in heads]
    # What ends the good records is not located, or marked.
    assert len(records) == len(heads) or marked[len(heads)]
    common = columns.are_common(data, records, BASE, file_end)
    for row, (at, head) in enumerate(heads):
        assert not marked[row] or ends_in_digits_of_its_own(head)
        assert row_of(data, records, row) == head
        quick = quick_record(memoryview(data), at, file_end - BASE - at, BASE + at, False)
        assert common[row] == (quick is not None)
        assert quick is None or quick == quick_of(head)


def ends_in_digits_of_its_own(head):
    """Such a record is left to the reference: its last bytes look like those of a property CRC."""
    tail = head.properties[-11:]
    return b"__CRC32#" not in head.properties and tail[-1:] == b"\x02" and tail[:-1].isdigit()


def row_of(data, records, row):
    """A row in the form of the scalar reader's answer."""
    at = {name: int(getattr(records, name)[row]) for name in records.__slots__}
    topic = data[at["topic_at"] :][: at["topic_length"]]
    properties = data[at["properties_at"] :][: at["properties_length"]]
    return (
        at["size"], "message", at["queue_id"], at["queue_offset"], at["physical_offset"],
        at["sys_flag"], at["store_ms"], topic, properties, at["body_at"], at["body_length"],
        at["flag"], at["reconsume_times"], at["prepared"],
    )  # fmt: skip


def quick_of(head):
    found = (find_property(head.properties, name) for name in (b"TAGS", b"KEYS", b"UNIQ_KEY"))
    return (
        head.size, head.queue_id, head.queue_offset, head.store_timestamp, head.topic, *found,
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(logs())
def test_r24_many_common_records_are_checked_as_one_is(case):
    """They end at the first that is not common, or bad, or not whole."""
    data, file_end = case
    view, offset = memoryview(data), BASE
    while size := quick_size(view, offset - BASE, file_end - offset, offset):
        offset += size
    assert columns.checked_end(view, BASE, BASE, file_end) == offset


def damaged(message, *changes, signed=False):
    """A record with (field, number) changed; `signed`: by a writer that was wrong itself."""

    def made():
        data, _ = log_of(message, base=BASE + len(BEFORE))
        fields = fields_of({**PLAIN, **message})
        for name, number in changes:
            at, width = fields[name]
            data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width)
        if signed:
            sign(data, 0, len(data))
        return bytes(data)

    return made


def replaced(at, piece, **message):
    def made():
        data = damaged(message)()
        at_ = at % len(data)
        return data[:at_] + piece + data[at_ + len(piece) :]

    return made


BEFORE, _ = log_of({}, {"topic": b"L" * 130, "born_host": HOST_V6})
NO_CRC = {"append_prop_crc": False}
#: What shows each fault behind two good records, and how much room its file has behind that.
SHOWN = {
    RecordFault.ZEROS: (lambda: bytes(200), 100),
    RecordFault.MAGIC: (damaged({}, ("magic", codec.MAGIC_V1 ^ 1)), 100),
    RecordFault.BLANK_SIZE: (lambda: codec.encode_blank(7), 100),
    RecordFault.SIZE_TOO_SMALL: (damaged({}, ("size", 90)), 100),
    RecordFault.SIZE_OF_HOSTS: (damaged({"properties": b""} | NO_CRC, ("sys_flag", 0x30)), 100),
    RecordFault.SIZE_TOO_LARGE: (damaged({}, ("size", 1 << 31)), 100),
    RecordFault.BODY_LENGTH: (damaged({}, ("body_length", -1), signed=True), 100),
    RecordFault.TOPIC_LENGTH: (damaged({}, ("topic_length", 255), signed=True), 100),
    RecordFault.PARTS: (damaged({}, ("properties_length", 1), signed=True), 100),
    RecordFault.PROPERTY_CRC: (damaged({}, ("flag", 0)), 100),
    RecordFault.PROPERTY_CRC_NAME: (replaced(-20, b"-"), 100),
    RecordFault.BODY_CRC: (replaced(88, b"B", **NO_CRC), 100),
    RecordFault.MISPLACED: (damaged({}, ("physical_offset", 0), signed=True), 100),
    RecordFault.LEAVES_FILE: (damaged({}, ("size", 1000)), 0),
    RecordFault.NO_SPACE_BEHIND: (damaged({}), 7),
    RecordFault.BLANK_WITHIN_FILE: (lambda: codec.encode_blank(300).ljust(300, b"\0"), 9),
    RecordFault.TORN_PROPERTIES: (replaced(-1, b"\0", **NO_CRC), 100),
}
#: Of decoders, and of what a store finds at the end of its log (`tests/store`).
ELSEWHERE = {RecordFault.CUT_OFF, RecordFault.BLANK, RecordFault.SIZE_WRONG, RecordFault.NOT_WHOLE}


@pytest.mark.parametrize("fault", [fault for fault in RecordFault if fault not in ELSEWHERE])
def test_r24_each_fault_is_seen_by_all_readers(fault):
    make, room = SHOWN[fault]
    bad = make()
    data = bytes(BEFORE) + bad
    file_end = BASE + len(data) + room
    heads, seen = scalar_answer(data, file_end)
    assert (len(heads), seen) == (2, fault)
    records, marked = numpy_answer(data, file_end)
    assert len(records) == 2 or marked.tolist()[:3] == [False, False, True]
    view, at = memoryview(data), len(BEFORE)
    assert quick_record(view, at, len(bad) + room, BASE + at) is None


@pytest.mark.parametrize("fault", list(RecordFault))
def test_a_fault_tells_its_numbers(fault):
    numbers = dict.fromkeys(("size", "magic", "length", "parts", "offset"), 7)
    error = CorruptRecord(fault, **numbers)
    assert error.what == str(error) and "{" not in error.what


def test_a_decoder_refuses_a_blank_and_what_is_cut_off():
    data, _ = log_of({})
    for made, fault in (
        (codec.encode_blank(8), RecordFault.BLANK),
        (bytes(data[:-1]), RecordFault.CUT_OFF),
    ):
        with pytest.raises(CorruptRecord) as raised:
            codec.decode_record(made)
        assert raised.value.fault is fault


@pytest.mark.parametrize("magic", [codec.MAGIC_V1, codec.MAGIC_V2, codec.MAGIC_BLANK])
@settings(deadline=None)
@given(size=st.integers(0, 200), noise=st.binary(max_size=200))
def test_noise_behind_a_magic_leads_no_reader_out_of_the_window(magic, size, noise):
    data = struct.pack(">II", size, magic) + noise
    heads, _ = scalar_answer(data, BASE + len(data))
    records, marked = numpy_answer(data, BASE + len(data))
    assert len(heads) == 0 and (len(records) == 0 or marked[0])


@settings(deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=4), st.binary(max_size=40))
def test_candidates_are_places_that_name_themselves(messages, before):
    data, starts = log_of(*messages, base=1000 + len(before))
    found = list(candidates(before + bytes(data), 1000))
    wanted = [len(before) + start for start in starts]
    assert [at for at in found if at in wanted] == wanted
    copy, _ = log_of({"body": bytes(data)}, base=77)
    assert list(candidates(bytes(copy), 77)) == [0]  # a copy within a body names another place


@pytest.mark.parametrize("module", ["protocol.records.search", "client", "broker.main"])
def test_records_are_read_without_numpy(module):
    """A client is installed without it, and no broker waits for it at its start."""
    program = f"import sys; sys.modules['numpy'] = None; import batonmq.{module}"
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)


def test_properties_of_32_kib_are_no_record_to_any_reader():
    """Their length is an i16; of a writer that was wrong itself, with a CRC that fits."""
    long = b"k\x01" + b"v" * (1 << 15) + b"\x02"
    data, _ = log_of({"properties": b""})
    at, _ = fields_of({**PLAIN, "properties": b""})["properties_length"]
    data[at : at + 2] = (len(long) + codec.CRC_TAIL_SIZE).to_bytes(2)
    data[at + 2 : at + 2] = long
    data[:4] = len(data).to_bytes(4)
    sign(data, 0, len(data))
    file_end = BASE + len(data) + 100
    assert scalar_answer(data, file_end) == ([], RecordFault.PARTS)
    assert len(numpy_answer(data, file_end)[0]) == 0
    assert quick_record(memoryview(data), 0, len(data) + 100, BASE) is None
