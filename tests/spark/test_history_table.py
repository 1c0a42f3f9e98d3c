"""Histories of controllers as a table, against the events that were written."""

import codecs
import json
import re
from datetime import UTC, datetime

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batonmq.history.event import TIME_MS_MAX, EventKind, HistoryEvent, checked_event
from batonmq.history.file import HistoryFile
from batonmq.spark.read import history_table
from batonmq.spark.read.columns import TABLES
from batonmq.spark.read.damage import Damage, DamagedFile
from batonmq.spark.read.history_table import plan_history, read_history
from batonmq.spark.read.storage import LOCAL, TextPart
from tests.spark.table_rows import read

SCHEMA = TABLES["history"]
TIMES = {
    "time_ms": "time",
    "detected_ms": "detected_at",
    "proposed_ms": "proposed_at",
    "started_ms": "started_at",
    "leader_seen_ms": "leader_seen_at",
}

# `gap` is of one controller's file, not of the event.
FIELDS = [name for name in HistoryEvent.__struct_fields__ if name != "gap"]
UNKNOWN_IS_MINUS_ONE = ("max_offset", "confirm_offset", "silent_ms")


def event(index, **fields):
    plain = {"log": "log-a", "raft_index": index, "time_ms": 1000 + index}
    return HistoryEvent(**{**plain, "kind": EventKind.ELECTED, **fields})


EVENTS = [
    event(1),
    event(
        2, part=3, kind=EventKind.SET_ALTERED, broker_name="broker-ä", broker_id=2,
        incarnation="i", address="127.0.0.1:1", master_epoch=4, sync_state_set_epoch=5,
        controller_epoch=6, node="n0", node_before="n1", master_before=1, set_before=(1, 2),
        sync_state_set=(2,), max_offset=0, confirm_offset=2**40, unclean=True, reason="shrink",
        detected_ms=17, silent_ms=0, proposed_ms=18, started_ms=19, leader_seen_ms=20,
        json='{"a":"\\n"}',
    ),
    event(3, kind=EventKind.FIRST_ACK, sync_state_set=()),
]  # fmt: skip


def expected(event):
    """The row of an event: what does not apply is null, times are timestamps in UTC."""
    row = {}
    for name in FIELDS:
        value = getattr(event, name)
        if name in TIMES:
            value = None if value == 0 else datetime.fromtimestamp(value / 1000, UTC)
            name = TIMES[name]
        elif value in ("", ()) or (name in UNKNOWN_IS_MINUS_ONE and value == -1):
            value = None
        elif isinstance(value, tuple):
            value = list(value)
        row[name] = value
    return row


def read_all(path):
    """Batches and damage of a file, read as one range."""
    return list(read_history(TextPart(LOCAL, str(path), 0, path.stat().st_size), SCHEMA))


def rows_of(items):
    rows = [row for item in items if not isinstance(item, Damage) for row in item.to_pylist()]
    return [{name: row[name] for name in expected(EVENTS[0])} for row in rows]


def write(path, events, **limits):
    file = HistoryFile(path, **limits)
    for each in events:
        file.append([each])
    file.close()


def test_a_file_that_was_empty_when_it_was_planned_is_read(tmp_path):
    path = tmp_path / "history-n0.jsonl"
    write(path, EVENTS)
    items = list(read_history(TextPart(LOCAL, str(path)), SCHEMA))
    assert rows_of(items) == [expected(each) for each in EVENTS]


def test_every_field_of_an_event_is_a_column():
    names = {TIMES.get(name, name) for name in FIELDS}
    assert set(SCHEMA.names) == names | {"file", "controller", "line_offset"}


def test_rows_are_the_events(tmp_path):
    path = tmp_path / "history-n0.jsonl"
    write(path, EVENTS)
    rows = read_all(path)
    assert rows_of(rows) == [expected(each) for each in EVENTS]
    first = rows[0].to_pylist()
    assert {(row["file"], row["controller"]) for row in first} == {(str(path), "n0")}
    lines = path.read_bytes().splitlines(keepends=True)
    assert [row["line_offset"] for row in first] == [0, len(lines[0]), len(lines[0] + lines[1])]


def test_rotated_files_of_several_controllers(tmp_path):
    """A folder gives all `history-*.jsonl` in it, full ones too, and nothing else."""
    events = [event(index, reason="x" * 200) for index in range(1, 30)]
    write(tmp_path / "history-n0.jsonl", events, size_max=2000, files=100)
    write(tmp_path / "history-n1.jsonl", events[:5])
    (tmp_path / "other.jsonl").write_text("no history\n")
    assert len(list(tmp_path.glob("history-n0.0*.jsonl"))) > 1
    rows = read(tmp_path, table="history")
    of_n0 = sorted(row["raft_index"] for row in rows if row["controller"] == "n0")
    assert of_n0 == list(range(1, 30))
    assert sum(row["controller"] == "n1" for row in rows) == 5
    with pytest.raises(FileNotFoundError, match=r"history-<controller>\.jsonl"):
        (tmp_path / "empty").mkdir()
        plan_history([(LOCAL, str(tmp_path / "empty"))], 1000)


@pytest.mark.parametrize("split_bytes", [29, 1000, 100_000])
@pytest.mark.parametrize("batch_bytes", [1, 500, 1 << 20])
def test_any_split_yields_every_line_once(tmp_path, monkeypatch, split_bytes, batch_bytes):
    monkeypatch.setattr(history_table, "_BATCH_BYTES", batch_bytes)
    events = [event(index, reason="x" * (index % 150)) for index in range(1, 40)]
    path = tmp_path / "history-n0.jsonl"
    write(path, events)
    ranges = plan_history([(LOCAL, str(path))], split_bytes)
    rows = [rows_of(read_history(each, SCHEMA)) for each in ranges]
    assert [row for part in rows for row in part] == [expected(each) for each in events]


def test_a_file_that_another_replaced_since_it_was_listed_fails_by_its_name(tmp_path):
    """A controller begins a file of the same name when one is full."""
    path = tmp_path / "history-n0.jsonl"
    write(path, EVENTS)
    (wanted,) = plan_history([(LOCAL, str(path))], 1 << 20)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(OSError, match=r"history-n0\.jsonl ends at \d+, \d+ bytes were listed"):
        list(read_history(wanted, SCHEMA))


def test_a_bad_line_costs_itself_only_and_a_torn_one_is_not_there(tmp_path):
    path = tmp_path / "history-n0.jsonl"
    write(path, EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    bad = [b"garbage\n", b'{"log":1,"raft_index":"x","time_ms":1,"kind":"elected"}\n', b"{}\n"]
    path.write_bytes(lines[0] + bad[0] + lines[1] + bad[1] + bad[2] + lines[2] + b'{"log":"lo')
    items = read_all(path)
    assert rows_of(items) == [expected(each) for each in EVENTS]
    damages = [item for item in items if isinstance(item, Damage)]
    assert [item.offset for item in damages] == [
        len(lines[0]),
        len(lines[0] + bad[0] + lines[1]),
        len(lines[0] + bad[0] + lines[1] + bad[1]),
    ]
    with pytest.raises(DamagedFile, match=r"history-n0\.jsonl: no event"):
        read(path, table="history")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"reason": b'"\xff\xfe"'}, "can't decode byte 0xff"),
        ({"time_ms": b"9" * 30}, "time_ms"),
        ({"broker_id": b'"1"'}, "broker_id"),
        ({"set_before": b"[[1]]"}, "set_before"),
        ({"part": b"2147483648"}, "part"),
        ({"json": b"[" * 100_000}, "json"),
    ],
)
def test_a_line_that_no_column_can_hold_costs_itself_only(tmp_path, given, reason):
    fields = {"log": b'"l"', "raft_index": b"1", "time_ms": b"5", "kind": b'"elected"'}

    def line(fields):
        return b"{" + b", ".join(b'"%s": %s' % (k.encode(), v) for k, v in fields.items()) + b"}\n"

    path = tmp_path / "history-n0.jsonl"
    path.write_bytes(line(fields) + line(fields | given) + line(fields))
    items = read_all(path)
    (damage,) = [item for item in items if isinstance(item, Damage)]
    assert re.search(reason, damage.reason), damage.reason
    assert damage.offset == len(line(fields))
    rows = [row for item in items if not isinstance(item, Damage) for row in item.to_pylist()]
    assert [row["kind"] for row in rows] == ["elected", "elected"]


@pytest.mark.parametrize("time_ms", [1_760_000_000_000_000, 2**63 - 1, -(2**63)])
def test_a_field_of_a_later_version_and_a_time_that_no_timestamp_holds_do_not_hurt(
    tmp_path, time_ms
):
    path = tmp_path / "history-n0.jsonl"
    line = {"log": "l", "raft_index": 1, "time_ms": time_ms, "kind": "new", "detected_ms": 7}
    path.write_text(json.dumps(line | {"new_field": [1]}) + "\n")
    (row,) = rows_of(read_all(path))
    assert (row["time"], row["detected_at"]) == (None, datetime.fromtimestamp(0.007, UTC))
    assert row["kind"] == "new"


VALUES = (
    b"null", b"true", b"0", b"-0", b"-1", b"2147483648", b"9223372036854775808", b"1.0", b"1e3",
    b"%d" % TIME_MS_MAX, b"%d" % (TIME_MS_MAX + 1), b"-9223372036854775808", b"01", b"NaN",
    b'"l"', b'""', b'"a}"', b'"a}\n{b"', b'"\xff"', b'"\xc3\xa4"', b'"\\ud800"',
    b'"\\ud83d\\ude00"', b'"\\u0000"', b'"\\x"', b"[]", b"[1,2]", b"[null]", b"[1,null]",
    b'["1"]', b"[[1]]",
    b"[9223372036854775808]", b"{}", b'{"a":{}}', b"[" * 2000 + b"]" * 2000,
)  # fmt: skip
GOOD = {b"log": b'"l"', b"raft_index": b"1", b"time_ms": b"5", b"kind": b'"elected"'}
KEY = st.sampled_from(
    [*(name.encode() for name in HistoryEvent.__struct_fields__), b"new", b"l\xff"]
)
FIELD = st.tuples(KEY, st.sampled_from(VALUES))
SEPARATOR = st.sampled_from([b"\n"] * 20 + [b"\r\n", b"\n\n", b"", b" ", b"x\n", b"\n ", b",\n"])


def line_of(changed, more):
    fields = [*(GOOD | dict(changed)).items(), *more]
    return b"{" + b",".join(b'"%s":%s' % field for field in fields) + b"}"


LINE = st.builds(line_of, st.lists(FIELD, max_size=2), st.lists(FIELD, max_size=1))
PLAIN = line_of((), ())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.just(PLAIN) | LINE, SEPARATOR), min_size=1, max_size=4))
@example([(PLAIN, b""), (PLAIN, b"\n"), (b"", b"\n")])  # as many values as lines
@example([(codecs.BOM_UTF8 + PLAIN, b"\n")])
@example([(PLAIN, b""), (PLAIN, b"\n"), (PLAIN[:-1], b"\n"), (b"}", b"\n")])
@example([(line_of([(name, value)], ()), b"\n") for name in (b"json", b"part") for value in VALUES])
def test_lines_at_once_are_the_events_of_each_line(parts):
    """Arrow's reader makes the same rows as the reader of one line, or leaves them to it."""
    text = b"".join(part for pair in parts for part in pair).rpartition(b"\n")[0] + b"\n"
    fast = history_table._by_arrow(text, text.count(b"\n"))
    if fast is not None:
        each = history_table.event_rows(SCHEMA, map(checked_event, text.split(b"\n")[:-1]))
        assert history_table._finished(SCHEMA, fast, {}).equals(each)


def test_good_lines_are_read_at_once():
    """Else the property above would hold of a reader that leaves everything to the slow one."""
    lines = [each.to_json().encode() for each in EVENTS] + [line_of([(b"reason", b"null")], ())]
    text = b"\n".join(lines) + b"\n"
    assert history_table._by_arrow(text, len(lines)).num_rows == len(lines)
