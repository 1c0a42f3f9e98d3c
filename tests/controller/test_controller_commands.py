"""The bytes of commands: canonical, versioned, and unreadable ones refused loudly."""

import json
import sys

import pytest

from batonmq.controller.endpoints.grpc_endpoint import command_of
from batonmq.controller.raft.log import Commit, Machine
from batonmq.controller.rules.commands import (
    COMMAND_SIZE_MAX,
    AlterSyncStateSet,
    CommandDecodeError,
    ElectMaster,
    LiveBroker,
    RegisterBroker,
    ReportEvent,
    decode,
    encode,
)
from batonmq.history.event import REPORT_SIZE_MAX
from batonmq.proto.controller.v1 import controller_pb2 as pb

ELECT = ElectMaster(
    request_id="q", broker_name="broker-a", reason="session_closed", live=(LiveBroker(1, "x"),)
)


def test_bytes_are_canonical_json_with_a_version():
    raw = encode(ELECT)
    plain = json.loads(raw)
    assert plain["v"] == 1
    assert plain["command"]["type"] == "elect_master"
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    assert raw.decode() == canonical
    assert decode(raw) == (ELECT, 0)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"\xff\x00",
        b'{"v":2,"command":{"type":"elect_master","broker_name":"a"}}',
        b'{"v":1,"command":{"type":"promote","broker_name":"a"}}',
        b'{"v":1,"command":{"type":"elect_master"}}',
        b'{"v":1,"command":{"type":"elect_master","broker_name":3}}',
    ],
)
def test_bytes_that_are_no_known_command_are_refused(raw):
    with pytest.raises(CommandDecodeError):
        decode(raw)


def test_a_command_larger_than_the_log_takes_is_not_encoded():
    report = ReportEvent(
        broker_name="broker-a", broker_id=1, kind="opened", json="x" * COMMAND_SIZE_MAX
    )
    with pytest.raises(ValueError, match="bytes"):
        encode(report)


NESTED = '{"x":' + "[" * 1000 + "]" * 1000 + "}"


def test_r58_a_report_at_which_earlier_versions_end_is_not_encoded():
    assert len(NESTED) <= REPORT_SIZE_MAX
    with pytest.raises(ValueError, match="1001 brackets; at most 512"):
        encode(ReportEvent(broker_name="broker-a", broker_id=1, kind="opened", json=NESTED))


@pytest.mark.parametrize(("text", "ok"), [(NESTED, True), ("[" * REPORT_SIZE_MAX, False)])
@pytest.mark.parametrize("depth", [0, 500])
def test_r58_nodes_apply_a_nested_report_of_an_earlier_log_alike(text, ok, depth):
    """Python gives up at about a thousand lists in each other, sooner on a deep stack."""
    machine, kept = Machine(), sys.getrecursionlimit()
    machine.commit(encode(RegisterBroker(broker_name="broker-a", broker_id=1, incarnation="x")), 1)
    report = ReportEvent(broker_name="broker-a", broker_id=1, kind="opened", json="TEXT")
    raw = encode(report).replace(b'"TEXT"', json.dumps(text).encode())

    def commit(deeper: int) -> Commit:
        return commit(deeper - 1) if deeper else machine.commit(raw, 2)

    assert commit(depth).result.ok == ok
    assert machine.state.history[-1].json == (text if ok else "")
    assert sys.getrecursionlimit() == kept


@pytest.mark.parametrize(
    ("kind", "request_kind", "converted"),
    [
        (RegisterBroker, pb.RegisterBrokerRequest, {}),
        (AlterSyncStateSet, pb.AlterSyncStateSetRequest, {"new_set": ()}),
        (ElectMaster, pb.ElectMasterRequest, {}),
        (ReportEvent, pb.ReportEventRequest, {}),
    ],
)
def test_each_field_of_a_request_but_its_secrets_is_a_field_of_its_command(
    kind, request_kind, converted
):
    given = {
        field.name: ["x"]
        if field.name == "earlier_lives"
        else "x"
        if field.type == field.TYPE_STRING
        else True
        if field.type == field.TYPE_BOOL
        else 7
        for field in request_kind.DESCRIPTOR.fields
        if field.name not in converted and field.name not in ("secret", "owner_secret")
    }
    command = command_of(kind, request_kind(**given), **converted)
    made = {name: getattr(command, name) for name in given}
    assert made == {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    assert decode(encode(command)) == (command, 0)
