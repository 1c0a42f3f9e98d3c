"""The schema of an event: all that is derived from it, or sent as it, agrees with the struct."""

import json

import msgspec
import pytest

from batonmq.controller.endpoints.grpc_endpoint import event_to_pb
from batonmq.history.event import (
    NOTED_KINDS,
    ON_BROKER_CLOCK,
    REPORTED_KINDS,
    TIME_MS_MAX,
    TIMES,
    EventDetail,
    EventKind,
    HistoryEvent,
    checked_event,
    lenient_event,
)
from batonmq.proto.controller.v1 import controller_pb2 as pb

FIELDS = {field.name: field for field in msgspec.structs.fields(HistoryEvent)}


def test_the_names_of_fields_are_those_of_the_struct():
    required = {name for name, field in FIELDS.items() if field.required}
    assert required == {"log", "raft_index", "time_ms", "kind"}
    assert set(TIMES) <= FIELDS.keys()
    assert {FIELDS[name].type for name in TIMES} == {int}


def test_a_message_to_clients_has_fields_of_the_struct_and_its_json():
    proto = {field.name: field for field in pb.HistoryEvent.DESCRIPTOR.fields}
    assert proto.keys() <= FIELDS.keys()
    for name, field in proto.items():
        types = {field.TYPE_INT64: int, field.TYPE_INT32: int, field.TYPE_STRING: str}
        assert types[field.type] is FIELDS[name].type
    event = HistoryEvent(
        log="l", raft_index=7, time_ms=9, kind=EventKind.ELECTED, broker_name="b", broker_id=2,
        master_epoch=3, sync_state_set_epoch=4, json="{}",
    )  # fmt: skip
    sent = event_to_pb(event)
    assert lenient_event(sent.json) == event
    for name in proto.keys() - {"json"}:
        assert getattr(sent, name) == getattr(event, name)


def test_columns_of_arrow_are_the_fields_of_the_struct():
    pa = pytest.importorskip("pyarrow")
    from batonmq.spark.read.columns import HISTORY_COLUMNS, TABLES

    assert [column.field for column in HISTORY_COLUMNS] == [n for n in FIELDS if n != "gap"]
    names = [column.name for column in HISTORY_COLUMNS]
    assert TABLES["history"].names == ["file", "controller", "line_offset", *names]
    arrow = {str: {pa.string()}, int: {pa.int64(), pa.int32()}, bool: {pa.bool_()}}
    arrow[tuple[int, ...]] = {pa.list_(pa.int64())}
    for column in HISTORY_COLUMNS:
        kind = FIELDS[column.field].type
        times = {pa.timestamp("us", "UTC")}
        assert column.type in (times if column.field in TIMES else arrow[kind])


def test_kinds_on_a_brokers_clock_are_reported_and_never_noted():
    assert ON_BROKER_CLOCK == REPORTED_KINDS - NOTED_KINDS
    assert HistoryEvent(log="", raft_index=1, time_ms=1, kind="opened", broker_id=2).clock == (
        "broker 2"
    )
    noted = HistoryEvent(log="", raft_index=1, time_ms=1, kind="switch_failed", node="n1")
    assert noted.clock == "controller n1"


def test_a_line_of_any_version_is_read_with_defaults():
    line = {"kind": "new", "raft_index": True, "time_ms": "9", "set_before": [1, "x"], "more": 1}
    line |= {"broker_id": 3, "json": '{"heldMs": "x", "sessions": 2}'}
    event = lenient_event(json.dumps(line))
    assert event == HistoryEvent(
        log="", raft_index=-1, time_ms=0, kind="new", broker_id=3, json=line["json"]
    )
    assert event.detail == EventDetail(sessions=2)
    assert lenient_event(b"[1]") is lenient_event(b"{") is lenient_event(b"\xff") is None
    assert lenient_event(b'{"x":' + b"[" * 100_000) is None


def test_null_is_the_default_of_a_field_and_a_time_that_no_calendar_has_is_0():
    """Two controllers that write one event so say the same."""
    line = {"log": "l", "raft_index": 7, "time_ms": 9, "kind": "new"}
    event = checked_event(json.dumps(line).encode())
    assert (event.key, event.time_ms, event.node) == (("l", 7, 0), 9, "")
    for given in {"node": None}, {"set_before": None}, {"proposed_ms": TIME_MS_MAX + 1}:
        assert checked_event(json.dumps(line | given).encode()) == event
    with pytest.raises(ValueError, match="node"):
        checked_event(json.dumps(line | {"node": 1}).encode())


def test_an_event_reads_its_own_line():
    event = HistoryEvent(
        log="l", raft_index=7, time_ms=9, kind="drained", set_before=(1, 2), gap=True,
        json='{"heldMs": 5}',
    )  # fmt: skip
    assert lenient_event(event.to_json()) == event
    assert event.detail.held_ms == 5
