"""`mqctl verdict`: what is proven by files alone, who may be restarted, receipts, the bundle."""

import errno
import inspect
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from batonmq.broker.transaction import transaction_service
from batonmq.history.event import HistoryEvent
from batonmq.history.fold import stories
from batonmq.launcher.current import UNFINISHED
from batonmq.mqctl.commands.doctor import without_secrets
from batonmq.mqctl.verdict.evidence import (
    BROKER,
    NAME_SERVER,
    ConsumersEvidence,
    ControllerFacts,
    Evidence,
    LogTail,
    NodeEvidence,
    ProcessFacts,
    StoreEvidence,
    line_ms,
)
from batonmq.mqctl.verdict.evidence import GroupEvidence as Recorded
from batonmq.mqctl.verdict.files import due_ms
from batonmq.mqctl.verdict.gather import from_folders
from batonmq.mqctl.verdict.group_incidents import UNCHECKED
from batonmq.mqctl.verdict.incidents import (
    CROWDED_OUT,
    FILES,
    LAST_WORDS,
    SPACE_AGAIN,
    _lost_stores,
)
from batonmq.mqctl.verdict.judge import INCIDENTS, judge
from batonmq.mqctl.verdict.safety import lineage_doubt, may_restart, safety
from batonmq.protocol.layout import INDEX_HEADER, JOURNAL_MAGIC, UNIT
from batonmq.remoting import budget
from batonmq.store import disk_health
from batonmq.store.checkpoint import StoreCheckpoint
from lab.cluster.mqctl import mqctl as run_mqctl
from tests.mqctl.conftest import Run
from tests.mqctl.test_mqctl_verify import SEGMENT, change, make_log

RECORDS = 60


def event(index: int, kind: str, **fields: Any) -> HistoryEvent:
    return HistoryEvent(log="L", raft_index=index, time_ms=1_000 + index, kind=kind, **fields)


def write_history(folder: Path, members: tuple[int, ...], master: int = 1) -> None:
    """Of three replicas, whose last recorded set is `members`."""
    events = [event(1, "controller_leader_changed", node="n0")]
    for broker in (1, 2, 3):
        events.append(
            event(
                1 + broker,
                "broker_registered",
                broker_name="broker-a",
                broker_id=broker,
                incarnation=f"h1-{broker}",
            )
        )
    events.append(
        event(
            9,
            "elected",
            broker_name="broker-a",
            broker_id=master,
            master_epoch=1,
            sync_state_set=members,
        )
    )
    raft = folder / "raft"
    raft.mkdir(parents=True)
    (raft / "journal").write_bytes(JOURNAL_MAGIC)
    (raft / "meta").write_bytes(b"%08x {}\n" % crc32(b"{}"))
    lines = "".join(each.to_json() + "\n" for each in events)
    (folder / "history-n0.jsonl").write_text(lines)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three equal stores of a group, and their controller's folder; the set is {1, 2}."""
    stores = []
    for broker in (1, 2, 3):
        store = tmp_path / f"store-{broker}"
        make_log(store, RECORDS)
        (store / "brokerIdentity").write_text(f"C#broker-a#{broker}")
        (store / "lives").write_text(f"h1-{broker}\n")
        private = store / "commitlog" / ".baton"
        private.mkdir()
        (private / "log_id").write_text(f"log-{broker}")
        (private / "lineage").write_text("one")
        stores.append(store)
    write_history(tmp_path / "controller", (1, 2))
    return [*stores, tmp_path / "controller"]


def group_of(mqctl: Run, folders: list[Path], *more: str) -> dict[str, Any]:
    ran = mqctl("verdict", *map(str, folders), "--json", *more)
    assert ran.code in (0, 1, 3), ran.err
    (group,) = ran.json["groups"]
    return dict(group)


def test_r1_a_whole_log_of_a_member_proves_that_nothing_is_lost(
    mqctl: Run, folders: list[Path]
) -> None:
    group = group_of(mqctl, folders)
    assert group["state"] == "safe" and len(group["holders"]) == 2
    shutil.rmtree(folders[0])
    folders[0].mkdir()
    group = group_of(mqctl, folders[1:])
    assert group["state"] == "safe" and "is a member" in group["how"]


@pytest.mark.parametrize("here", [slice(2, None), slice(3)])
def test_r1_neither_a_replica_outside_the_set_nor_stores_without_the_history_prove_anything(
    mqctl: Run, folders: list[Path], here: slice
) -> None:
    assert group_of(mqctl, folders[here])["state"] == "unknown"


def test_a_damage_is_no_loss_while_another_member_has_the_bytes(
    mqctl: Run, folders: list[Path]
) -> None:
    change(folders[0], SEGMENT + 300, b"\xff" * 8)
    group = group_of(mqctl, folders)
    assert group["state"] == "safe" and "log is whole" in group["how"]
    assert group["how"].startswith(str(folders[1])), "a damaged log is no proof"
    change(folders[1], 300, b"\xff" * 8)
    group = group_of(mqctl, folders)
    assert group["state"] == "safe" and "is whole" not in group["how"]
    change(folders[1], SEGMENT + 300, b"\xff" * 8)
    group = group_of(mqctl, folders)
    assert group["state"] == "lost"
    (begin, end), *_ = group["lost"]
    assert begin <= SEGMENT + 300 < end
    shown = mqctl("verdict", *map(str, folders)).out
    assert "broker-a: messages are LOST" in shown and f"the log from {begin} to {end}, " in shown


def test_g3_what_a_replica_outside_the_set_had_confirmed_is_no_loss(
    mqctl: Run, folders: list[Path]
) -> None:
    for store in folders[:2]:
        change(store, SEGMENT + 300, b"\xff" * 8)
    assert group_of(mqctl, folders)["state"] == "lost"
    checkpoint = StoreCheckpoint(folders[2] / "checkpoint")
    checkpoint.confirm_phy_offset = checkpoint.recovery_offset = 2 * SEGMENT
    checkpoint.flush()
    assert group_of(mqctl, folders)["state"] == "safe"


def test_one_bad_unit_of_a_queue_is_no_missing_end_of_the_log(
    mqctl: Run, folders: list[Path]
) -> None:
    queue = folders[0] / "consumequeue" / "T" / "0"
    queue.mkdir(parents=True)
    (queue.parent / "²").mkdir()  # Python's isdigit() is true for it
    end = group_of(mqctl, folders)["endOffset"]
    (queue / f"{0:020}").write_bytes(UNIT.struct.pack(end + 9_000, 100, 0))
    ran = mqctl("verdict", *map(str, folders), "--json")
    assert ran.json["incidents"][0]["incident"] == "consume-queue-damaged"
    (queue / f"{0:020}").write_bytes(UNIT.struct.pack(end, 100, 0))
    ran = mqctl("verdict", *map(str, folders), "--json")
    assert ran.json["incidents"][0]["incident"] == "log-tail-missing"


@pytest.mark.parametrize(
    ("header", "is_good"),
    [
        ((9, 9, 0, 0, 0, 1), True),
        ((9, 10, 300, 700, 2, 3), True),
        ((9, 10, 700, 300, 2, 3), False),
        ((9, 9, 0, 0, 900, 1_000), False),  # more entries than the file can hold
    ],
)
def test_an_index_whose_header_cannot_be_is_named(
    mqctl: Run, folders: list[Path], header: tuple[int, ...], is_good: bool
) -> None:
    (folders[0] / "index").mkdir()
    path = folders[0] / "index" / "20261128000000000"
    path.write_bytes(INDEX_HEADER.struct.pack(*header) + bytes(1_000))
    ran = mqctl("verdict", *map(str, folders), "--json")
    assert [each["incident"] for each in ran.json["incidents"]][:1] == (
        [] if is_good else ["index-damaged"]
    )


@pytest.mark.parametrize(
    ("rule", "file", "text"),
    [
        ("r12: another process was registered", "lives", "h1-9\n"),
        ("r17: its broker noted it", "suspect", '{"kind": "fsync", "what": "it failed"}'),
        ("r17: another boot", "abort", "7\n0-0\ncached\n"),
        ("r47: another history", "commitlog/.baton/lineage", "two"),
    ],
)
def test_r17_r47_a_store_that_would_not_be_elected_proves_nothing(
    mqctl: Run, folders: list[Path], rule: str, file: str, text: str
) -> None:
    for store in folders[:2]:
        (store / file).write_text(text)
        if file.endswith("lineage"):
            (folders[2] / file).write_text("three")
            break
    group = group_of(mqctl, [*folders[:1], *folders[2:]] if "lineage" in file else folders)
    assert group["state"] == "unknown", rule


def test_a_receipt_that_cannot_be_written_is_an_error_with_its_file(
    mqctl: Run, folders: list[Path], tmp_path: Path
) -> None:
    file = tmp_path / "none" / "receipt.json"
    ran = mqctl("verdict", *map(str, folders), "--receipt", str(file))
    assert ran.code == 1 and f"mqctl: {file}: No such file or directory" in ran.err
    assert "internal error" not in ran.err


def test_a_receipt_holds_for_copies_and_for_no_other_bytes(
    mqctl: Run, folders: list[Path], tmp_path: Path
) -> None:
    receipt = tmp_path / "receipt.json"
    group_of(mqctl, folders, "--receipt", str(receipt))
    assert json.loads(receipt.read_text())["groups"][0]["syncStateSet"] == [1, 2]
    copy = tmp_path / "copy"
    shutil.copytree(folders[1], copy)
    assert mqctl("verdict", "--check", str(receipt), str(copy)).code == 0
    assert mqctl("verdict", "--check", str(receipt), str(folders[2])).code == 1
    change(copy, SEGMENT + 300, b"\xff")
    ran = mqctl("verdict", "--check", str(receipt), str(copy))
    assert ran.code == 1 and "other bytes" in ran.out
    receipt.write_text("[]")
    assert mqctl("verdict", "--check", str(receipt), str(copy)).code == 1


def test_a_full_disk_is_no_cause_once_it_has_space_again() -> None:
    """Unless the process ended of it."""
    evidence = live((1, 2, 3), {2, 3})
    full = "2026-11-28T11:50:00.000 ERROR x [Errno 28] No space left on device"

    def found(*after: str, ended_well: bool = False) -> list[str]:
        lines = (full, *after)
        log = LogTail(lines, ended_well=ended_well, last_ms=line_ms(lines[-1]))
        facts: dict[str, Any] = {"folder": "/d/broker-1", "process": ProcessFacts(), "log": log}
        space = {"free_bytes": 1 << 30, "disk_bytes": 2 << 30}
        judged = judge(but(evidence, 0, asked=False, refused=None, **facts, **space))
        return [each.incident for each in judged.causes]

    assert "disk-full" in found()
    assert "disk-full" not in found(ended_well=True)
    assert "disk-full" not in found("2026-11-28T11:58:00.000 INFO x it works")


def test_what_a_broker_says_of_its_disk_is_not_contradicted_by_free_space() -> None:
    """Its state decides: it tries again every second, or there is no space for what waits."""
    evidence = live((1, 2, 3), {1, 2, 3})
    told = "its disk is full: /d/log: No space left on device (/d: Total : 1.0 GiB, Free : 0 B)"
    space: dict[str, Any] = {"folder": "/d", "disk_bytes": 1 << 30}

    def cause(free: int, *told: str, **facts: Any) -> str:
        judged = judge(but(evidence, 0, problems=told, free_bytes=free, **space, **facts))
        return next((each.cause for each in judged.causes if each.incident == "disk-full"), "")

    again = cause(103 << 20, told)
    assert "is full" not in again and "103 MiB are free now" in again and "again" in again
    assert "its disk is full; 0 MiB are free" in cause(0, told)
    assert "more than 90 % of it is used" in cause(103 << 20, "its disk is full: " + WATERMARK)
    # It had space again before it was killed; the line of that has the text of the error too.
    lines = (
        "2026-11-28T11:59:00.000 WARNING x disk_full reason=[Errno 28] No space left on device",
        "2026-11-28T11:59:20.000 INFO x disk_has_space reason=/d/log: No space left on device",
    )
    for count, is_full in ((1, True), (2, False)):
        log = LogTail(lines[:count], last_ms=line_ms(lines[count - 1]))
        ended: dict[str, Any] = {"log": log, "asked": False, "process": ProcessFacts()}
        assert bool(cause(103 << 20, **ended)) == is_full


WATERMARK = "more than 90 % of it is used"


@pytest.mark.parametrize(
    ("count", "limit", "age_s", "found"),
    [
        (42, 64, 5, True),
        (0, 0, 5, True),  # another user's process: only the log can be read
        (42, 64, 900, False),
        (400, 65_536, 5, False),  # 16,384 connections are the limit, not descriptors
    ],
)
def test_a_broker_at_its_limit_of_descriptors_is_not_called_hung(
    count: int, limit: int, age_s: int, found: bool
) -> None:
    """Recorded: it closes connections long before all 64 descriptors are in use."""
    evidence = live((1, 2, 3), {1, 2, 3})
    at = f"2026-11-28T11:{60 - age_s // 60 - 1:02}:55.000"
    line = f"{at} WARNING batonmq.remoting.budget connections_crowded_out open=13 ended=7"
    evidence = but(
        evidence,
        1,
        refused="connection ended: closed by the peer",
        process=ProcessFacts(77, False, count, limit),
        log=LogTail((line,), last_ms=line_ms(line)),
    )
    first, *rest = judge(evidence).causes
    assert (first.incident == "descriptors-exhausted") == found
    if found:
        used = f"{count} of its {limit} file descriptors are in use"
        assert (used if limit else "it has too few file descriptors") in first.cause
        assert not any("hung" in each.incident for each in rest)
        assert "LimitNOFILE" in first.repairs[0].what


@pytest.mark.parametrize("process", [ProcessFacts(77), None])
@pytest.mark.parametrize(
    ("why", "incident", "advice"),
    [
        ("the certificate of the peer is refused: expired", "certificate-refused", "secure rotate"),
        ("connection ended: closed by the peer", "connections-closed", "BATONMQ_TLS_TRUST"),
    ],
)
def test_a_port_that_refuses_this_client_is_the_cause_and_no_process_is_killed(
    process: ProcessFacts | None, why: str, incident: str, advice: str
) -> None:
    judged = judge(but(live((1, 2, 3), {1, 2, 3}), 0, refused=why, process=process))
    first = judged.causes[0]
    assert (first.incident, first.subject) == (incident, "broker-1")
    assert why in first.cause and advice in f"{first.repairs[0].what} {first.repairs[0].command}"
    assert not any("kill" in r.command for each in judged.findings for r in each.repairs)


def test_the_first_three_lines_say_state_cause_and_command(mqctl: Run, folders: list[Path]) -> None:
    change(folders[0], SEGMENT + 300, b"\xff" * 8)
    ran = mqctl("verdict", *map(str, folders))
    state, cause, do, *rest = ran.out.splitlines()
    assert state.startswith("degraded: log-middle-damaged") and ran.code == 3
    assert cause.startswith("cause:") and rest
    assert any("moveAside" in line for line in ran.out.splitlines()), do
    shown = [line for line in ran.out.splitlines() if not line.startswith(("next:", "  "))]
    assert max(map(len, shown)) <= 80


def test_the_time_line_of_a_cluster_that_has_ended_is_read_from_its_files(tmp_path: Path) -> None:
    write_history(tmp_path / "namesrv-0" / "controller", (1, 2))
    nodes = {"nameServers": [], "controllers": [], "brokers": [], "supervisorPid": 0}
    (tmp_path / "cluster.json").write_text(json.dumps(nodes))
    ran = run_mqctl("timeline", "--json", home=tmp_path, env={"BATONMQ_DATA": str(tmp_path)})
    assert "has ended: read from its files" in ran.err
    assert [story["masterBrokerId"] for story in ran.json if story["brokerName"]] == [1]


@pytest.mark.parametrize(
    ("left", "incident"),
    [
        ("", "cluster-stopped"),
        ("up.sock", "cluster-stopped"),  # of an earlier version, which left it
        (UNFINISHED, "cluster-killed"),
    ],
)
def test_the_kill_of_a_supervisor_is_no_stop(tmp_path: Path, left: str, incident: str) -> None:
    """The kernel ends its processes with SIGTERM, and each says that it stops."""
    log = tmp_path / "broker-0" / "process.log"
    log.parent.mkdir()
    log.write_text("2026-11-30T00:00:00.000 INFO    m server_stopped name=broker pid=7\n")
    broker = {"config": "broker-0.yaml", "address": "h:1", "name": "broker-a"}
    document = {"brokers": [broker], "supervisorPid": 0}
    (tmp_path / "cluster.json").write_text(json.dumps(document))
    (tmp_path / "run" / left).mkdir(parents=True)
    causes = judge(from_folders([tmp_path], lambda: True)).causes
    assert incident in {each.incident for each in causes}


def test_what_needs_a_new_start_while_it_runs_is_restarted_by_its_supervisor(
    tmp_path: Path,
) -> None:
    """`batonmq broker -c` was offered, which finds the folder in use."""
    pid_file = tmp_path / "run" / "broker-0.pid"
    broker = {"config": "broker-0.yaml", "address": "h:1", "name": "broker-a"}
    document = {"brokers": [broker], "supervisorPid": os.getpid()}
    (tmp_path / "cluster.json").write_text(json.dumps(document))
    argv = [sys.executable, "-c", "print(flush=True); input()", "--pid-file", str(pid_file)]
    for runs, start in ((True, "mqctl up restart h:1"), (False, "batonmq broker -c")):
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()  # before, its command line may not be there yet
            pid_file.parent.mkdir(exist_ok=True)
            pid_file.write_text(str(process.pid if runs else 0))
            (node,) = from_folders([tmp_path], lambda: True).nodes
            process.communicate(b"\n")
        assert node.start.startswith(start)


# Who may be restarted.


def live(members: tuple[int, ...], alive: set[int], controllers: int = 3) -> Evidence:
    brokers = [
        NodeEvidence(
            f"broker-{i}",
            BROKER,
            f"h:{i}",
            "g",
            asked=True,
            refused=None if i in alive else "refused",
        )
        for i in (1, 2, 3)
    ]
    servers = [
        NodeEvidence(
            f"namesrv-{i}",
            NAME_SERVER,
            f"n:{i}",
            asked=True,
            refused=None if i < controllers else "refused",
            controller=ControllerFacts("", f"n{i}"),
        )
        for i in range(3)
    ]
    group = Recorded(
        "g",
        master=1,
        last_master=1,
        members=members,
        replicas={i: f"h:{i}" for i in (1, 2, 3)},
        alive=frozenset(alive),
        is_current=True,
    )
    nodes = (*brokers, *servers)
    return Evidence(1, nodes=nodes, groups=(group,), leader="n", is_live=True)


def but(evidence: Evidence, at: int, **facts: Any) -> Evidence:
    """The evidence with other facts of the node at that place."""
    nodes = list(evidence.nodes)
    nodes[at] = replace(nodes[at], **facts)
    return replace(evidence, now_ms=NOW, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("members", "alive", "allowed"),
    [
        ((1, 2, 3), {1, 2, 3}, {1: True, 2: True, 3: True}),
        ((1, 2), {1, 2, 3}, {1: True, 2: True, 3: True}),
        ((1, 2), {1, 3}, {1: False, 2: True, 3: True}),
        ((1,), {1, 2, 3}, {1: False, 2: True, 3: True}),
    ],
)
def test_no_restart_takes_the_last_copy_in_sync(
    members: tuple[int, ...], alive: set[int], allowed: Mapping[int, bool]
) -> None:
    evidence = live(members, alive)
    found = {
        i: may_restart(evidence, node).allowed for i, node in enumerate(evidence.brokers("g"), 1)
    }
    assert found == allowed


STARTS = "2026-11-28T11:59:58.000 INFO x server_started name=broker pid=77"
SERVES = "2026-11-28T11:59:59.000 INFO x broker_started address=h:2"


@pytest.mark.parametrize(
    ("why", "lines", "incident"),
    [
        ("no answer to GET_BROKER_RUNTIME_INFO within 450 ms", (STARTS, SERVES), "slave-hung"),
        ("no connection within 450 ms", (), "slave-hung"),
        ("no answer to GET_BROKER_RUNTIME_INFO within 450 ms", (STARTS,), "slave-away"),
        ("answered SERVICE_NOT_AVAILABLE (14): the broker is starting", (STARTS,), "slave-away"),
        ("Connection reset by peer", (STARTS, SERVES), "slave-away"),
        ("Connection refused", (), "slave-away"),  # it stops, or has just begun
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", (STARTS, SERVES), "slave-away"),
    ],
)
def test_only_silence_is_called_hung_and_not_that_of_a_start(
    why: str, lines: tuple[str, ...], incident: str
) -> None:
    """A broker that recovers its log holds questions for longer than the verdict waits."""
    evidence = live((1, 2, 3), {1, 2, 3})
    log = LogTail(lines, last_ms=NOW)
    first = judge(but(evidence, 1, process=ProcessFacts(77), refused=why, log=log)).causes[0]
    assert (first.incident, first.subject) == (incident, "broker-2")
    assert (why in first.cause) == (incident == "slave-away")
    is_killed = any("kill" in repair.command for repair in first.repairs)
    assert is_killed == (incident == "slave-hung")


def test_that_one_process_hangs_does_not_explain_why_another_does() -> None:
    evidence = but(live((1, 2, 3), {1, 2, 3}), 0, process=ProcessFacts(77), refused="no answer")
    evidence = but(evidence, 1, process=ProcessFacts(78), refused="no answer")
    causes = [each.incident for each in judge(evidence).causes]
    assert causes == ["master-hung", "slave-hung"]


def test_a_process_that_ended_behind_a_proxy_is_started_again() -> None:
    evidence = live((1, 2, 3), {1, 2, 3})
    why = "connection ended: closed by the peer"
    gone: Any = {"folder": "/d/broker-1", "process": ProcessFacts(), "start": "batonmq broker"}
    first = judge(but(evidence, 1, refused=why, **gone)).causes[0]
    assert (first.incident, first.repairs[0].command) == ("slave-killed", "batonmq broker")


def test_a_broker_that_the_controllers_refuse_is_not_behind_a_cut_network() -> None:
    evidence = live((1, 2), {1, 2})
    refused = ("is not registered: id 3 of g belongs to another data folder",)
    judged = judge(but(evidence, 2, refused=None, problems=refused))
    named = {each.incident for each in judged.causes}
    assert "not-registered" in named and "controllers-unreached" not in named


def test_files_of_another_user_are_named_with_what_to_do() -> None:
    words = "broker: /data/broker-1/commitlog/.baton: Permission denied"
    log = LogTail((words,), last_words=words)
    ended: Any = {"folder": "/data/broker-1", "process": ProcessFacts(), "log": log}
    first = judge(but(live((1, 2, 3), {1, 3}), 1, **ended)).causes[0]
    assert (first.incident, first.subject) == ("permission-denied", "broker-2")
    assert "/data/broker-1/commitlog/.baton" in first.cause and "chown" in first.repairs[0].what


@pytest.mark.parametrize(
    ("process", "why", "command"),
    [
        (ProcessFacts(77, True), "no answer", "kill -CONT 77"),
        (ProcessFacts(77), "no answer", "kill -9 77"),
        (ProcessFacts(77), "Connection refused", "mqctl health --watch --within 60"),
        (ProcessFacts(77), "connection ended: closed by the peer", "mqctl health"),
        (ProcessFacts(77), "the certificate of the peer is refused: expired", "mqctl health"),
    ],
)
def test_the_last_copy_that_runs_is_not_started_twice_and_killed_only_if_it_hangs(
    process: ProcessFacts, why: str, command: str
) -> None:
    evidence = but(live((3,), {1, 2}), 2, process=process, refused=why)
    group = replace(evidence.groups[0], master=0)
    found = judge(replace(evidence, groups=(group,)))
    (away,) = [each for each in found.findings if each.incident == "members-away"]
    commands = [repair.command for repair in away.repairs]
    assert commands[0] == command and not any("batonmq broker" in c for c in commands)
    assert any("kill -9" in each for each in commands) == (why == "no answer")


@pytest.mark.parametrize("leads", [True, False])
def test_what_runs_and_refuses_this_client_is_not_free_to_be_restarted(leads: bool) -> None:
    """This host's clock is wrong, or it has no certificate: all run, and none can be asked."""
    evidence = live((1, 2, 3), {1, 2, 3})
    why = "the certificate of the peer is refused: certificate has expired"
    nodes = tuple(replace(node, refused=why) for node in evidence.nodes)
    evidence = replace(evidence, nodes=nodes, is_live=leads, leader="n" if leads else "")
    for node in evidence.nodes:
        found = may_restart(evidence, node)
        assert not found.allowed and "does not serve" not in found.why


@pytest.mark.parametrize(
    ("off_s", "said"), [(86_400, "86400 s ahead of"), (-60, "60 s behind"), (3, ""), (-3, "")]
)
def test_a_running_broker_with_a_wrong_clock_is_named(off_s: int, said: str) -> None:
    """Nothing of it is in this host's files, and a slave stamps nothing."""
    report = {"wallClockMs": str(NOW + off_s * 1000)}
    evidence = but(live((1, 2, 3), {1, 2, 3}), 1, report=report)
    found = judge(evidence).findings
    causes = [each.cause for each in found if each.incident == "clock-skew"]
    assert causes == ([f"broker-2: its clock is {said} this host's"] if said else [])
    # Its answer came that much later: both clocks agree.
    evidence = but(evidence, 1, answered_ms=NOW + off_s * 1000)
    assert "clock-skew" not in {f.incident for f in judge(evidence).findings}


def test_no_restart_takes_the_controllers_majority() -> None:
    for up, allowed in ((3, True), (2, False)):
        evidence = live((1, 2, 3), {1, 2, 3}, controllers=up)
        first = next(iter(evidence.name_servers()))
        assert may_restart(evidence, first).allowed is allowed
    evidence = replace(live((1, 2, 3), {1, 2, 3}), leader="")
    master, slave, _ = evidence.brokers("g")
    assert not may_restart(evidence, master).allowed
    assert not may_restart(evidence, slave).allowed
    assert "writes would wait until it is back" in may_restart(evidence, slave).why
    # All three run, and none leads: their disks are full, or their network is cut.
    assert not may_restart(evidence, first).allowed


def test_a_master_that_dies_without_a_quorum_is_not_what_to_mend() -> None:
    """Two members could be elected: neither to start the third nor an unclean election helps."""
    evidence = replace(
        live((1, 2, 3), {2, 3}, controllers=1),
        leader="",
        controllers={"n:0": None, "n:1": "refused", "n:2": "refused"},
    )
    found = judge(evidence)
    assert (found.state, found.causes[0].incident) == ("down", "quorum-lost")
    assert "g cannot get a master before a majority runs" in found.causes[0].cause
    said = [repair for finding in found.findings for repair in finding.repairs]
    assert not any("--unclean" in repair.command for repair in said)
    (masterless,) = (f for f in found.findings if f.incident == "no-master")
    assert (masterless.symptom_of, masterless.repairs) == ("quorum-lost", ())


def test_controllers_that_only_refuse_this_client_are_a_majority() -> None:
    whys = ("connection ended: closed by the peer", "the certificate of the peer is refused")
    controllers = dict(zip(("n:0", "n:1", "n:2"), (None, *whys), strict=True))
    evidence = replace(live((1, 2, 3), {1, 2, 3}), leader="", controllers=controllers)
    assert not {"quorum-lost", "no-leader"} & {each.incident for each in judge(evidence).findings}


def test_controllers_that_are_stopped_continue_and_are_not_started_twice() -> None:
    evidence = live((1, 2, 3), {1, 2, 3}, controllers=1)
    nodes = tuple(
        node
        if node.runs
        else replace(node, process=ProcessFacts(70 + at, True), refused="no answer")
        for at, node in enumerate(evidence.nodes)
    )
    controllers = {"n:0": None, "n:1": "no answer", "n:2": "no answer"}
    first = judge(replace(evidence, nodes=nodes, leader="", controllers=controllers)).causes[0]
    assert first.incident == "quorum-lost"
    kills = ["kill -CONT 74", "kill -9 74", "kill -CONT 75", "kill -9 75"]
    assert [each.command for each in first.repairs] == kills


def test_what_was_not_read_makes_nothing_safe() -> None:
    """Between two masters: a running broker's log is not read, so it ends at 0 in the evidence."""
    store = StoreEvidence("f", group="g", log_id="x")
    evidence = live((2, 3), {2, 3})
    nodes = tuple(
        replace(node, store=replace(store, broker_id=at), process=ProcessFacts(pid=at))
        if node.kind == BROKER
        else node
        for at, node in enumerate(evidence.nodes, 1)
    )
    evidence = replace(evidence, nodes=nodes)
    found = safety(evidence, "g")
    assert (found.state, found.end) == ("unknown", -1)
    assert "broker-2, broker-3 are not read while they run" in found.how
    report = {"commitLogMaxOffset": "900"}
    nodes = tuple(replace(node, report=report) if node.kind == BROKER else node for node in nodes)
    found = safety(replace(evidence, nodes=nodes), "g")
    assert (found.state, found.end) == ("safe", 900)
    assert "its log ends at 900" in found.how
    # Without a leading controller the set may be an older one.
    assert safety(replace(evidence, nodes=nodes, leader=""), "g").state == "unknown"


@pytest.mark.parametrize("windows", [0, 1, 2])
def test_logs_that_were_not_read_in_time_prove_nothing(folders: list[Path], windows: int) -> None:
    """`windows`: how many parts of all logs are read before the time is over."""
    left = iter(range(windows))
    evidence = from_folders(folders, lambda: next(left, None) is not None)
    found = safety(evidence, "broker-a")
    assert (found.state, found.end) == ("unknown", -1 if windows == 0 else found.end)
    assert "not read" in found.how
    unread = [each for each in evidence.absent if "were not read in time" in each.why]
    assert len(unread) == 3, evidence.absent


def test_a_log_that_may_not_be_read_proves_nothing(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    evidence = from_folders(folders, lambda: True)
    assert safety(evidence, "broker-a").state == "unknown"
    whys = [each.why for each in evidence.absent if each.name.startswith("log of")]
    assert whys == ["cannot be read: Permission denied"] * 3


def test_a_log_whose_folder_may_not_be_read_is_no_lost_store(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id is in that folder, too."""
    (folders[0] / "commitlog/.baton/log_id").unlink()
    hidden, listed = folders[0] / "commitlog", Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path == hidden:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    evidence = from_folders(folders, lambda: True)
    store, *_ = evidence.stores("broker-a")
    assert not store.is_empty and not list(_lost_stores(evidence))
    whys = [each.why for each in evidence.absent if each.name.startswith("log of")]
    assert whys == ["cannot be read: Permission denied"]


def test_a_disk_that_fails_at_any_look_costs_only_what_is_there(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad page of a queue ended the command, on the day for which it was made."""
    for name in ("config/topics.json", "consumequeue/T/0/" + "0" * 20, "index/1", "suspect"):
        (folders[0] / name).parent.mkdir(parents=True, exist_ok=True)
        (folders[0] / name).write_bytes(bytes(40))
    looks: list[str] = []
    number = 0

    def fails(path: str) -> bool:
        if str(folders[0].parent) in path:
            looks.append(path)
        return str(folders[0].parent) in path and len(looks) == number

    fail_looks(monkeypatch, fails)
    while number <= len(looks):
        looks.clear()
        number += 1
        judge(from_folders([folders[0], folders[3]], lambda: True))
    assert number > 50


def fail_looks(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[str], bool], number: int = errno.EIO
) -> None:
    """Each look at a path of which `fails` is true raises this error."""

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any, *args: Any, **more: Any) -> Any:
            if fails(str(path)):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **more)

        return look

    for owner, call in ((os, "stat"), (os, "scandir"), (os, "listdir"), (os, "open"), (io, "open")):
        monkeypatch.setattr(owner, call, guarded(getattr(owner, call)))


PRIVATE = "commitlog/.baton"


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize(
    ("unread", "here"),
    [
        *(
            (tuple(f"store-{broker}/{file}" for broker in (1, 2)), (0, 1, 2))
            for file in ("lives", "suspect", "abort", "checkpoint", "masterEpoch")
        ),
        (tuple(f"store-{broker}/{PRIVATE}/lineage" for broker in (1, 2)), (0, 1, 2)),
        (tuple(f"store-{broker}/{PRIVATE}/log_id" for broker in (1, 2)), (0, 1, 2)),
        ((f"store-3/{PRIVATE}/lineage",), (0, 2)),
    ],
)
def test_r12_r17_r47_what_cannot_be_read_may_speak_against_a_store(
    folders: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    unread: tuple[str, ...],
    here: tuple[int, ...],
    number: int,
) -> None:
    """An unreadable note counted as none: a suspect log proved that nothing is lost."""
    fail_looks(monkeypatch, lambda path: path.endswith(unread), number)
    evidence = from_folders([*(folders[at] for at in here), folders[3]], lambda: True)
    found = safety(evidence, "broker-a")
    assert found.state == "unknown" and "cannot be read" in found.how
    named = {each.incident for each in judge(evidence).findings}
    assert ("disk-failing" in named) == (number == errno.EIO)
    assert "store-lost" not in named


def test_r1_an_unread_master_epoch_may_be_of_a_later_election(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an older record only the last master has everything, if no store knows a newer one."""
    (folders[3] / "history-n0.jsonl").rename(folders[3] / "history-n1.jsonl")
    assert safety(from_folders(folders, lambda: True), "broker-a").state == "safe"
    fail_looks(monkeypatch, lambda path: path.endswith("store-3/masterEpoch"))
    assert safety(from_folders(folders, lambda: True), "broker-a").state == "unknown"


def test_g3_bytes_that_only_an_unread_store_may_have_are_not_called_lost(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(folders[0], SEGMENT + 300, b"\xff" * 8)
    fail_looks(monkeypatch, lambda path: path.endswith("store-2/lives"))
    assert safety(from_folders(folders, lambda: True), "broker-a").state == "unknown"


def test_an_unread_journal_is_no_empty_folder_and_an_unread_queue_no_empty_one(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for queue_id in ("0", "1"):
        queue = folders[0] / "consumequeue" / "T" / queue_id
        queue.mkdir(parents=True)
        (queue / f"{0:020}").write_bytes(unit(0, 5) + unit(100, 5))
    (folders[0] / "config").mkdir()
    table = json.dumps({"offsetTable": {"T@g": {"0": 1, "1": 1}}})
    (folders[0] / "config" / "consumerOffset.json").write_text(table)
    store, *_ = from_folders(folders, lambda: True).stores("broker-a")
    assert store.lags == {("g", "T"): 2}
    unread = ("raft/journal", "raft/meta", "T/1/" + "0" * 20)
    fail_looks(monkeypatch, lambda path: path.endswith(unread))
    evidence = from_folders(folders, lambda: True)
    (controller,) = (node.controller for node in evidence.nodes if node.controller)
    assert not controller.is_empty and len(controller.faults) == 2
    store, *_ = evidence.stores("broker-a")
    assert store.topics == {"T": 2} and not store.lags


def test_r47_an_unread_log_still_shows_another_lineage(folders: list[Path]) -> None:
    """Two of one lineage make the third one foreign, whether there was time to read them or not."""
    (folders[0] / "commitlog/.baton/lineage").write_text("two")
    evidence = from_folders(folders, lambda: False)
    stores = evidence.stores("broker-a")
    assert [bool(lineage_doubt(store, stores)) for store in stores] == [True, False, False]


def test_an_unread_log_without_its_id_is_no_empty_store(folders: list[Path]) -> None:
    (folders[0] / "commitlog/.baton/log_id").unlink()
    store, *_ = from_folders(folders, lambda: False).stores("broker-a")
    assert not store.is_empty


BEGUN = LogTail(("2026-11-30T00:00:00.000 INFO m server_started pid=77",))


@pytest.mark.parametrize(
    ("facts", "allowed", "why"),
    [
        ({}, True, "broker-1, broker-3 have everything"),  # named as in every other line
        ({"problems": ("its disk is full: [Errno 28]",)}, False, "would wait for disk space"),
        # Its recovery would begin again.
        ({"refused": "no", "process": ProcessFacts(77), "log": BEGUN}, False, "still starting"),
        ({"refused": "no", "process": ProcessFacts(0), "log": BEGUN}, True, "does not serve"),
    ],
)
def test_a_slave_is_restarted_only_if_it_would_come_back_at_once(
    facts: dict[str, Any], allowed: bool, why: str
) -> None:
    evidence = but(live((1, 2, 3), {1, 2, 3}), 1, **facts)
    found = may_restart(evidence, evidence.nodes[1])
    assert found.allowed == allowed and why in found.why


def test_a_master_that_only_this_client_cannot_reach_is_the_master() -> None:
    """The leading controller hears it: no election is under way."""
    evidence = but(live((1, 2, 3), {1, 2, 3}), 0, refused="no connection within 450 ms")
    assert not [f for f in judge(evidence).findings if "has no master" in f.cause]


# Who it was when it ended.


def group_event(index: int, kind: str, broker: int, *members: int, **fields: Any) -> HistoryEvent:
    return event(index, kind, broker_name="g", broker_id=broker, sync_state_set=members, **fields)


def failover(index: int, before: int, to: int, *members: int, at: int) -> HistoryEvent:
    times = {"detected_ms": at - 1, "proposed_ms": at, "master_before": before}
    return group_event(
        index, "elected", to, *members, master_epoch=2, set_before=(1, 2, 3), **times
    )


FIRST = group_event(1, "elected", 1, 1, 2, 3, master_epoch=1, proposed_ms=900)
LOST = failover(200, 1, 2, 2, 3, at=1_200)


def altered(at: int, before: tuple[int, ...], *members: int) -> HistoryEvent:
    fields: Any = {"master_epoch": 2, "set_before": before}
    return group_event(at - 1_000, "set_altered", 2, *members, **fields)


@pytest.mark.parametrize(
    ("what", "events", "expected"),
    [
        ("the master's end", [LOST], ("master-killed", 1_199)),
        (
            "it came back at once, as a slave, and no write had waited for the new master",
            [LOST, altered(1_300, (2, 3), 1, 2, 3), altered(1_400, (1, 2, 3), 2, 3)],
            ("slave-killed", 1_400),
        ),
        (
            "as another process that had not caught up",
            [LOST, group_event(300, "broker_registered", 1, incarnation="h1-2")],
            ("slave-killed", 1_199),
        ),
        (
            "it hands over in order to stop",
            [failover(200, 1, 2, 1, 2, 3, at=1_200), altered(1_300, (1, 2, 3), 2, 3)],
            ("master-killed", 1_300),
        ),
        (
            "it handed over, and ended much later",
            [failover(200, 1, 2, 1, 2, 3, at=1_200), altered(9_000, (1, 2, 3), 2, 3)],
            ("slave-killed", 9_000),
        ),
    ],
)
def test_the_role_of_a_broker_is_the_one_in_which_it_ended(
    what: str, events: list[HistoryEvent], expected: tuple[str, int]
) -> None:
    known = group_event(2, "broker_registered", 1, incarnation="h1-1")
    ended: Any = {"folder": "/d/broker-1", "process": ProcessFacts(), "asked": False}
    evidence = but(live((2, 3), {2, 3}), 0, refused=None, **ended)
    group = replace(evidence.groups[0], master=2, last_master=2)
    told = stories([FIRST, known, *events])
    finding = judge(replace(evidence, groups=(group,), stories=told)).findings[0]
    assert (finding.incident, finding.since_ms) == expected, what


# Messages that wait.


def unit(offset: int, due: int) -> bytes:
    return UNIT.struct.pack(offset, 100, due)


def test_the_due_time_of_a_delayed_message_is_in_its_queue(tmp_path: Path) -> None:
    queue = tmp_path / "consumequeue" / "SCHEDULE_TOPIC_XXXX" / "2"
    queue.mkdir(parents=True)
    (queue / f"{0:020}").write_bytes(unit(0, 5_000) + unit(100, 6_000))
    (queue / f"{40:020}").write_bytes(unit(200, 7_000) + bytes(20))
    assert [due_ms(tmp_path, {3: index}) for index in range(5)] == [5_000, 6_000, 7_000, 0, 0]
    assert due_ms(tmp_path, {3: 1, 1: 0}) == 6_000


def waiting(**fields: Any) -> list[tuple[str, str]]:
    """What is said of a master with these facts."""
    evidence = but(live((1, 2, 3), {1, 2, 3}), 0, **fields)
    return [(each.incident, each.subject) for each in judge(evidence).findings]


NOW = line_ms("2026-11-28T12:00:00.000 ")
NOT_CHECKED = "transaction_not_checked group=Payers: no producer of it is here"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"due_ms": NOW - 90_000}, [("delays-stopped", "broker-1")]),
        ({"due_ms": NOW - 9_000}, []),
        ({"due_ms": NOW - 90_000, "report": {"brokerRole": "SLAVE"}}, []),
        (
            {"log": LogTail((f"2026-11-28T11:59:30.000 INFO x {NOT_CHECKED}",))},
            [("transactions-unchecked", "Payers")],
        ),
        ({"log": LogTail((f"2026-11-28T11:29:30.000 INFO x {NOT_CHECKED}",))}, []),
        (
            {"store": StoreEvidence("/s", topics={"TRANS_CHECK_MAX_TIME_TOPIC": 2})},
            [("transactions-given-up", "TRANS_CHECK_MAX_TIME_TOPIC")],
        ),
    ],
)
def test_messages_that_wait_for_ever_are_named(
    fields: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert waiting(**fields) == expected


@pytest.mark.parametrize(
    ("at", "fields", "expected"),
    [
        (0, {"problems": ("refuses writes: its lease ended",)}, "lease-lost"),
        (0, {"problems": ("refuses writes: minInSyncReplicas is 2",)}, "too-few-in-sync"),
        (0, {"problems": ("refuses writes: a sync failed",)}, "refuses-writes"),
        (0, {"problems": ("has no index: /d/index: Input/output error",)}, "index-failed"),
        (0, {"problems": ("cannot read a queue: /d/0: Input/output error",)}, "queue-unreadable"),
        (0, {"problems": ("has set messages aside: 3",)}, "messages-aside"),
        (1, {"problems": ("its audit log is not written: /a: Permission denied",)}, "audit-failed"),
        (0, {"report": {"timerOffsetBehind": "20000"}}, "timers-behind"),
        (1, {"problems": ("is not registered: another has its id",)}, "not-registered"),
        (1, {"problems": ("its log is suspect: another boot",)}, "log-suspect"),
        (1, {"problems": ("its disk is full: [Errno 28]",)}, "disk-full"),
        (
            1,
            {"problems": ("its disk is full: /d/0: Too many open files",)},
            "descriptors-exhausted",
        ),
        (1, {"report": {"a": "b"}, "problems": ("does not join yet: a queue",)}, "slave-stuck"),
        (
            1,
            {"report": {"a": "b"}, "problems": ("cannot follow its master: no answer",)},
            "peers-cut",
        ),
        (1, {"read_only": True, "folder": "/d"}, "disk-read-only"),
        (1, {"process": ProcessFacts(5, False, 99, 100)}, "descriptors-exhausted"),
        (3, {"free_bytes": 0, "disk_bytes": 1 << 30, "folder": "/d"}, "controller-disk-full"),
    ],
)
def test_what_a_running_node_says_of_itself_has_a_name(
    at: int, fields: dict[str, Any], expected: str
) -> None:
    evidence = but(live((1, 2, 3), {1, 2, 3}), at, **fields)
    first, *_ = judge(evidence).causes
    assert (first.incident, first.subject) == (expected, evidence.nodes[at].name)


def test_the_full_disk_of_another_host_is_named_once() -> None:
    says = "its disk is full: /d/0: Disk quota exceeded"
    first, *_ = judge(but(live((1, 2, 3), {1, 2, 3}), 1, problems=(says,), folder="")).causes
    assert first.cause == f"broker-2: {says}"
    assert first.repairs[0].command == "df -h"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"routes": {"n:0": {"g": "h:1"}, "n:1": {"g": "h:2"}}}, "routes-differ"),
        ({"leader": "", "controllers": {"n0": None, "n1": None, "n2": "gone"}}, "no-leader"),
        ({"controllers": {"n0": None, "n1": "gone", "n2": "gone"}}, "quorum-lost"),
        ({"controller_problems": ("n0 and n1 differ at entry 5",)}, "controllers-differ"),
        (
            {"controller_problems": ("its log is a, .. of another group of controllers. Move",)},
            "controllers-differ",
        ),
        ({"consumers": (ConsumersEvidence("c", "T", 9, 0),)}, "consumers-gone"),
        ({"consumers": (ConsumersEvidence("c", "T", 9, 1, 5, 90_000),)}, "consumers-stuck"),
        ({"consumers": (ConsumersEvidence("c", "T", 20_000, 1),)}, "consumers-behind"),
    ],
)
def test_what_the_whole_cluster_shows_has_a_name(fields: dict[str, Any], expected: str) -> None:
    evidence = replace(live((1, 2, 3), {1, 2, 3}), now_ms=NOW, **fields)
    assert judge(evidence).causes[0].incident == expected


def test_a_broker_that_only_the_controllers_do_not_hear_is_named() -> None:
    """It answers here: its way to them is cut. Outside of the set it copies its master."""
    evidence = live((1, 2), {1, 2, 3})
    (group,) = evidence.groups
    cut = replace(evidence, groups=(replace(group, alive=frozenset({1, 2})),))
    assert judge(cut).causes[0].incident == "controllers-unreached"
    judged = judge(but(evidence, 2, report={"commitLogMaxOffset": "5"}))
    assert [each.incident for each in judged.causes] == ["slave-behind"]


def test_the_lines_of_a_log_that_count_are_those_that_are_written() -> None:
    sources = "".join(map(inspect.getsource, (transaction_service, budget, disk_health)))
    for line in (f"{UNCHECKED}group=%s: ", CROWDED_OUT.lstrip(), SPACE_AGAIN.lstrip()):
        assert f'"{line}' in sources, line


def test_a_topic_that_no_table_lists_is_named(mqctl: Run, folders: list[Path]) -> None:
    for store in folders[:3]:
        queue = store / "consumequeue" / "Orders" / "3"
        queue.mkdir(parents=True)
        (queue / f"{0:020}").write_bytes(unit(0, 0))
        (store / "config").mkdir()
        (store / "config" / "topics.json").write_text('{"topicConfigTable": {}}')
    ran = mqctl("verdict", *map(str, folders), "--json")
    first = ran.json["incidents"][0]
    assert (first["incident"], first["subject"]) == ("topic-missing", "Orders")
    assert first["repairs"][0]["command"].endswith("-t Orders -r 4 -w 4")
    # A replica that has not fetched the newest table is no evidence.
    (folders[1] / "config" / "topics.json").write_text('{"topicConfigTable": {"Orders": {}}}')
    assert mqctl("verdict", *map(str, folders), "--json").json["incidents"] == []


# The table and the bundle.


def test_every_name_in_the_tables_is_an_incident() -> None:
    assert {f"{kind}-damaged" for kind in FILES} <= INCIDENTS.keys()
    assert set(LAST_WORDS.values()) <= INCIDENTS.keys()
    for incident in INCIDENTS.values():
        assert set(incident.hides) <= INCIDENTS.keys()
    assert len(INCIDENTS) >= 40


def test_a_bundle_in_no_folder_names_its_file(
    mqctl: Run, folders: list[Path], tmp_path: Path
) -> None:
    bundle = tmp_path / "none" / "b.tar.gz"
    ran = mqctl("doctor", "--bundle", str(bundle), *map(str, folders))
    assert (ran.code, ran.err) == (1, f"mqctl: {bundle}: No such file or directory\n")


def test_a_bundle_has_no_secrets(mqctl: Run, folders: list[Path], tmp_path: Path) -> None:
    bundle = tmp_path / "b.tar.gz"
    assert mqctl("doctor", "--bundle", str(bundle), *map(str, folders)).code == 0
    with tarfile.open(bundle) as archive:
        names = archive.getnames()
    assert {"doctor/verdict.json", "doctor/timeline.txt", "doctor/versions.txt"} <= {*names}
    kept = without_secrets({"a": {"raftPasswordFile": "x", "port": 1}, "accessKey": "y"})
    assert kept == {"a": {"raftPasswordFile": "(removed)", "port": 1}, "accessKey": "(removed)"}
