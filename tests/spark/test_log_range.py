"""Rows of the log are what the broker's decoder says of each record, however the log is cut."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batonmq.protocol.properties import decode_properties
from batonmq.protocol.records.codec import encode_blank
from batonmq.protocol.records.columns import chain, locate
from batonmq.spark.read import log_range
from batonmq.spark.read.columns import table_schema
from batonmq.spark.read.log_range import Block, LogRange, RangeReader
from batonmq.spark.read.message_columns import message_batch, split_properties
from batonmq.spark.read.storage import Storage
from batonmq.spark.read.store_facts import StoreFacts
from tests.spark.log_files import (
    HOST_V4,
    HOST_V6,
    good_at,
    message,
    plain_row,
    plain_scan,
    row_of,
)

FACTS = StoreFacts("/store", "C", "b", 1, (), False, None)
SCHEMA = table_schema("messages", (), with_corrupt=False)
I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02\0"))
PROPERTIES = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "a", "AGS"]), TEXT).map(
        lambda pairs: "".join(f"{k}\x01{v}\x02" for k, v in pairs.items()).encode()
    ),
)
MESSAGES = st.fixed_dictionaries(
    {
        "topic": st.one_of(
            st.sampled_from([b"T", b"%RETRY%g", "Ö".encode()]), st.binary(min_size=1, max_size=200)
        ),
        "queue_id": I32,
        "queue_offset": I64,
        "flag": I32,
        "sys_flag": st.integers(0, 2**31 - 1).map(lambda flag: flag & ~0x30),
        "born_timestamp": st.integers(0, 2**42),
        "born_host": st.sampled_from([HOST_V4, HOST_V6]),
        "store_timestamp": st.integers(0, 2**42),
        "store_host": st.sampled_from([HOST_V4, HOST_V6]),
        "reconsume_times": I32,
        "prepared_transaction_offset": I64,
        "body": st.binary(max_size=300),
        "properties": PROPERTIES.filter(lambda raw: b"__CRC32#" not in raw),
        "append_prop_crc": st.booleans(),
    }
)


def rows_of(data):
    starts, stopped = chain(data, 0, len(data))
    records, good = locate(data, starts)
    assert good == len(starts) and stopped == len(data)
    batch = message_batch(data, records, FACTS, SCHEMA)
    batch.validate(full=True)
    return starts.tolist(), batch.to_pylist()


@settings(deadline=None)
@given(st.lists(MESSAGES, max_size=6))
def test_columns_equal_the_plain_decoder(messages):
    data = b""
    for fields in messages:
        data += message(len(data), **fields)
    starts, rows = rows_of(data)
    assert [row_of(row) for row in rows] == [plain_row(data, at) for at in starts]


class Small:
    """Search windows of a few bytes, so that small logs are cut by them."""

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(log_range, "_SEARCH_MIN", 64)
        self.patch.setattr(log_range, "_SEARCH_MAX", 100)

    def __exit__(self, *_):
        self.patch.undo()


def read_ranges(path, start, size, limit, cuts, window_bytes):
    """(rows, damaged): what all ranges between these cuts yield, in order."""
    rows, damaged = [], []
    edges = [start, *cuts, limit]
    for begin, end in pairwise(edges):
        wanted = LogRange(path, start, start + size, begin, end, limit, begin == start, 2**63 - 1)
        with Small(), Storage("").open(path) as file:
            reader = RangeReader(file, wanted, window_bytes=window_bytes, record_bytes_max=10_000)
            for item in reader.blocks():
                if isinstance(item, Block):
                    batch = message_batch(item.window, item.records, FACTS, SCHEMA)
                    rows += batch.to_pylist()
                else:
                    damaged.append((item.offset, item.size))
    return rows, damaged


START, SIZE = 4096, 4096
NUMBERS = ("queue_id", "queue_offset", "flag", "sys_flag", "reconsume_times")
BARE = dict.fromkeys(NUMBERS, 0) | {
    "topic": b"%RETRY%g",
    "born_timestamp": 0,
    "born_host": HOST_V4,
    "store_timestamp": 0,
    "store_host": HOST_V4,
    "prepared_transaction_offset": 0,
    "body": b"",
    "properties": b"",
    "append_prop_crc": False,
}


@st.composite
def damaged_files(draw):
    """(messages, with a blank?, confirmed bytes, [(at, bytes put there)], cuts, bytes a window)."""
    messages = draw(st.lists(MESSAGES, min_size=1, max_size=8))
    confirmed = draw(st.integers(200, SIZE))
    pieces = st.builds(
        lambda length, zeros: bytes(length) if zeros else b"\xda" * length,
        st.sampled_from([1, 1, 8, 120]),
        st.booleans(),
    )
    damage = draw(st.lists(st.tuples(st.integers(0, confirmed - 1), pieces), max_size=3))
    cuts = draw(st.sets(st.integers(START + 1, START + confirmed - 1), max_size=3))
    window_bytes = draw(st.sampled_from([100, 300, 1000, 10_000]))
    return messages, draw(st.booleans()), confirmed, damage, sorted(cuts), window_bytes


@settings(max_examples=80, deadline=None)
@given(damaged_files())
@example(([BARE] * 3, False, SIZE, [(255, b"\xda")], [], 10_000))  # a time no timestamp holds
def test_any_split_and_window_yields_every_record_and_every_damage_once(tmp_path_factory, case):
    """Flipped bytes, zeroed stretches, blanks; the last bytes cut off."""
    messages, with_blank, confirmed, damage, cuts, window_bytes = case
    start, size = START, SIZE
    data = bytearray()
    for fields in messages:
        record = message(start + len(data), **fields)
        if len(data) + len(record) + 8 <= size:
            data += record
    data += encode_blank(size - len(data)) if with_blank else b""
    data = bytearray(bytes(data).ljust(size, b"\0"))
    for at, piece in damage:
        data[at : at + len(piece)] = piece
    data = bytes(data[:size])
    path = tmp_path_factory.mktemp("log") / f"{start:020d}"
    path.write_bytes(data)
    limit = start + confirmed
    starts, damaged = plain_scan(data[:confirmed], start, start + size)
    if damaged and sum(damaged[-1]) == limit:
        # What is there as a whole, but not confirmed as a whole, is not damaged.
        last = damaged[-1][0] - start
        is_blank = data[last : last + 8] == encode_blank(size - last)
        if is_blank or good_at(data, last, start, start + size) is not None:
            del damaged[-1]
    rows, found = read_ranges(str(path), start, size, limit, cuts, window_bytes)
    assert [row["physical_offset"] for row in rows] == starts
    assert [row_of(row) for row in rows] == [plain_row(data, at - start) for at in starts]
    assert found == damaged


def test_a_size_across_the_confirmed_end_is_reported_once_wherever_a_range_begins(log_files):
    starts = [log_files.add(number=number) for number in range(6)]
    log_files.save()
    path, end = log_files.root / "commitlog" / f"{0:020d}", log_files.end
    data = bytearray(path.read_bytes())
    data[starts[3] : starts[3] + 4] = (end - starts[3] + 40).to_bytes(4, "big")
    path.write_bytes(data)
    near = {at + step for at in (*starts, end) for step in range(-4, 5)}
    for cut in sorted(near & set(range(1, end)) | set(range(1, end, 11))):
        rows, damaged = read_ranges(str(path), 0, 8192, end, [cut], 300)
        assert [row["queue_offset"] for row in rows] == [0, 1, 2, 4, 5], cut
        assert damaged == [(starts[3], starts[4] - starts[3])], cut


def test_a_forged_record_in_a_body_at_a_split_is_reported(log_files):
    """A producer who guesses the offset may put a whole record into a body."""
    log_files.add(number=0)
    begin = log_files.end
    inner_at = begin + 88  # where the body of a record with IPv4 hosts begins
    forged = message(inner_at, body=b"forged")
    log_files.add(body=forged + b"x" * 50)
    log_files.add(number=2)
    log_files.save()
    path = str(log_files.root / "commitlog" / f"{0:020d}")
    whole, none = read_ranges(path, 0, 8192, log_files.end, [], 1000)
    assert len(whole) == 3 and none == []
    _, damaged = read_ranges(path, 0, 8192, log_files.end, [begin + 10], 1000)
    assert damaged[0][0] == inner_at  # behind it the next range finds the rest of the body


def test_only_what_is_asked_for_is_built():
    data = message(0)
    records, _ = locate(data, chain(data, 0, len(data))[0])
    schema = table_schema("messages", ("body", "epoch"), with_corrupt=False)
    batch = message_batch(data, records, FACTS, schema)
    assert batch.schema == pa.schema([("body", pa.binary()), ("epoch", pa.int64())])
    assert batch.to_pylist() == [{"body": b"body 0", "epoch": None}]


# --- property strings of many records at once, against the reader of one ---

PIECE = st.sampled_from([b"\x01", b"\x02", b"TAGS", b"KEYS", b"A", b"\xff", "é".encode(), b"1 2"])
STRINGS = st.lists(st.lists(PIECE, max_size=12).map(b"".join), max_size=8)


@settings(max_examples=200, deadline=None)
@given(STRINGS, st.binary(max_size=5))
def test_maps_and_single_properties_equal_the_plain_reader(strings, gap):
    window, at, length = b"", [], []
    for raw in strings:
        window += gap
        at.append(len(window))
        length.append(len(raw))
        window += raw
    pairs = split_properties(window, np.array(at, np.int64), np.array(length, np.int64))
    expected = [decode_properties(raw) for raw in strings]
    maps = pairs.map_column()
    maps.validate(full=True)
    assert [dict(row) for row in maps.to_pylist()] == expected
    assert [len(row) for row in maps.to_pylist()] == [len(row) for row in expected]
    for name in ("TAGS", "KEYS", "A", "missing"):
        assert pairs.column(name).to_pylist() == [row.get(name) for row in expected]
