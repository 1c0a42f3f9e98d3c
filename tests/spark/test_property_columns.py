"""Property strings of many records at once, against the reader of one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.protocol.properties import decode_properties
from batonmq.spark.read.message_columns import split_properties

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
