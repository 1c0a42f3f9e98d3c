"""The record of a run against the tables of its history: what agrees, and every way not to."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from lab.cluster.acks import Ack, key_of
from lab.cluster.checks import BrokenPromise
from lab.cluster.held import GroupState
from lab.cluster.probe import acked_line
from lab.faults.aftermath import summary
from lab.faults.aftermath.compare import HistoryComparison, compare, contiguous, stream_wrong
from lab.faults.aftermath.fault_records import (
    DOZEN,
    FAILOVER,
    FEW,
    PLANNED,
    FaultRecord,
    fault_record,
    kind_of,
)
from lab.faults.aftermath.jobs import JobResult
from lab.faults.aftermath.summary import AftermathResult
from lab.faults.aftermath.tables import FailoverRow, MastershipRow, SetChangeRow, Tables
from lab.faults.harmless import SwitchFault
from lab.faults.kills import KillMaster
from lab.faults.trial import Trial, TrialSpan

GROUP = "broker-a"
KILL = FaultRecord(
    1, "kill-master", "kill -9 master", FAILOVER, ("broker-a-0",), (1,), GROUP,
    10_000, 10_010, 10_060, 13_000, 55.0, 1, 2, 1, 2, 3, 5,
)  # fmt: skip
SWITCH = FaultRecord(
    2, "planned-switch", "a switch", PLANNED, ("broker-a-1",), (2,), GROUP,
    20_000, 20_010, 20_020, 21_500, 20.0, 2, 3, 2, 3, 5, 6,
)  # fmt: skip


def failover(epoch: int, before: int, master: int, at_ms: int, kind: str = FAILOVER) -> FailoverRow:
    times = {"detected_at": at_ms, "elected_at": at_ms + 2, "first_ack_at": at_ms + 30}
    changed = kind != PLANNED
    return FailoverRow(
        GROUP, epoch, kind, "session_closed", before, master, times, 30, 0, changed, 45
    )


def change(epoch: int, at_ms: int, left: int = 0, joined: int = 0) -> SetChangeRow:
    sets = (frozenset({one} - {0}) for one in (joined, left))
    return SetChangeRow(GROUP, at_ms, epoch, *sets, frozenset({1, 2, 3} - {left}))


TABLES = Tables(
    [failover(1, 0, 1, 1_000), failover(2, 1, 2, 10_012), failover(3, 2, 3, 20_012, PLANNED)],
    [
        MastershipRow(GROUP, 1, 1, 1_002, 10_012),
        MastershipRow(GROUP, 2, 2, 10_014, 20_014),
        MastershipRow(GROUP, 3, 3, 20_014, None),
    ],
    [change(4, 10_014, left=1), change(5, 12_000, joined=1)],
)


def with_failover(number: int, **changes: object) -> Tables:
    rows = list(TABLES.failovers)
    rows[number] = replace(rows[number], **changes)  # type: ignore[arg-type]
    return replace(TABLES, failovers=rows)


def compared(tables: Tables, *records: FaultRecord) -> HistoryComparison:
    return compare(records or (KILL, SWITCH), tables)


def everything_wrong(found: HistoryComparison) -> str:
    return "\n".join([*(text for one in found.faults for text in one.wrong), *found.wrong])


def test_a_history_that_agrees() -> None:
    found = compared(TABLES)
    assert found.agrees, everything_wrong(found)
    assert [[row.epoch for row in one.failovers] for one in found.faults] == [[2], [3]]
    assert found.unplanned == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"master": 3}, "broker 3 is master, the controllers recorded 2"),
        ({"master_before": 3}, "the old master is broker 3, it was 1"),
        ({"kind": PLANNED}, "none was requested"),
        ({"kind": "unclean_election"}, "no failover among unclean_election"),
        ({"unavailable_ms": 156}, "no gap above 55 ms"),
        ({"times_ms": {"detected_at": 9_850, "elected_at": 10_012}}, "detected_at is 50 ms"),
        ({"times_ms": {"elected_at": 13_101}}, "elected_at is 1 ms outside"),
        ({"times_ms": {}}, "when it was elected is not recorded"),
        ({"epoch": 4}, "not in failovers"),
    ],
)
def test_a_row_that_differs_is_reported(changes: dict[str, object], expected: str) -> None:
    found = compared(with_failover(1, **changes))
    assert not found.agrees
    assert expected in everything_wrong(found)


def test_an_unknown_cost_is_no_contradiction() -> None:
    assert compared(with_failover(1, unavailable_ms=None)).agrees


def test_the_cost_of_two_losses_in_a_row_may_hold_two_gaps() -> None:
    """The first of two new masters was lost before its first ack was recorded."""
    twice = replace(KILL, epoch_after=3, master_after=3, set_epoch_after=6)
    times = {"elected_at": 10_900}

    def cost(unavailable_ms: int) -> HistoryComparison:
        rows = list(with_failover(1, unavailable_ms=None).failovers)
        rows[2] = replace(rows[2], kind=FAILOVER, times_ms=times, unavailable_ms=unavailable_ms)
        return compared(replace(TABLES, failovers=rows), twice)

    assert cost(210).agrees
    assert "unavailable for 211 ms" in everything_wrong(cost(211))


def test_a_switch_told_as_a_failover_is_pointed_out() -> None:
    assert "no planned_switch" in everything_wrong(compared(with_failover(2, kind=FAILOVER)))


def test_a_busy_machine_may_elect_once_more_while_a_fault_lasts() -> None:
    twice = replace(KILL, epoch_after=3, master_after=3, set_epoch_after=6)
    assert compared(with_failover(2, kind=FAILOVER, times_ms={"elected_at": 10_900}), twice).agrees
    skipped = with_failover(2, kind=FAILOVER, times_ms={"elected_at": 10_900}, master_before=1)
    assert "follows broker 1, not 2" in everything_wrong(compared(skipped, twice))


def test_an_election_between_two_faults_is_named_and_no_contradiction() -> None:
    later = replace(SWITCH, epoch_before=3, epoch_after=4, master_before=3, master_after=1,
                    set_epoch_before=6, set_epoch_after=7)  # fmt: skip
    tables = Tables(
        [*with_failover(2, kind=FAILOVER).failovers, failover(4, 3, 1, 20_012, PLANNED)],
        [
            *TABLES.masterships[:2],
            MastershipRow(GROUP, 3, 3, 20_014, 20_014),
            MastershipRow(GROUP, 4, 1, 20_014, None),
        ],
        [*TABLES.set_changes, change(6, 15_000)],
    )
    found = compared(tables, KILL, later)
    assert found.agrees, everything_wrong(found)
    assert [row.epoch for row in found.unplanned] == [3]


def test_an_election_after_the_last_fault_is_pointed_out() -> None:
    assert "epoch 3 is in failovers, and was not when" in everything_wrong(compared(TABLES, KILL))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (TABLES.set_changes[1:], "set changes [5] are recorded, the controllers made 2 after 3"),
        ([*TABLES.set_changes, change(5, 12_001)], "set changes [4, 5, 5] are recorded"),
        ([*TABLES.set_changes, change(6, 20_014)], "1 of them without a change"),
        ([change(4, 10_014), *TABLES.set_changes[1:]], "did not leave the set and join it again"),
    ],
)
def test_every_step_of_the_set_is_recorded_once(changes: list[SetChangeRow], expected: str) -> None:
    assert expected in everything_wrong(compared(replace(TABLES, set_changes=changes)))


def test_masterships_neither_overlap_nor_stay_open() -> None:
    assert contiguous(TABLES.masterships) == []
    overlapping = [replace(TABLES.masterships[0], ended_ms=10_015), *TABLES.masterships[1:]]
    assert "overlap by 1 ms" in contiguous(overlapping)[0]
    endless = [replace(TABLES.masterships[0], ended_ms=None), *TABLES.masterships[1:]]
    assert "has no end" in contiguous(endless)[0]


def test_the_two_tables_name_the_same_masters() -> None:
    other = [*TABLES.masterships[:2], replace(TABLES.masterships[2], broker_id=1)]
    found = compared(replace(TABLES, masterships=other))
    assert "master is 3 in failovers, 1 in masterships" in everything_wrong(found)


def test_a_stream_has_every_event_once() -> None:
    kept = [("log", 1, 0), ("log", 1, 1), ("log", 2, 0), ("other", 1, 0)]
    assert stream_wrong(kept, kept) == []
    assert "('log', 1, 0) 2 times" in stream_wrong([*kept, kept[0]], kept)[0]
    assert stream_wrong([*kept[:1], *kept[2:]], kept) == ["the stream lacks ('log', 1, 1)"]
    assert "no history does" in stream_wrong([("log", 9, 0), *kept], kept)[0]


def test_a_deed_takes_ids_and_the_wall_clock_from_what_was_seen() -> None:
    before = GroupState(0, 1, 3, frozenset({0, 1, 2}), {0: 1, 1: 3, 2: 2})
    after = replace(before, master=2, master_epoch=2, set_epoch=5)
    span = TrialSpan(1.0, 1.25, 2.0, 3.5, 1.3, 0.05, before, after, ("namesrv-1", "broker-a-1"))
    trial = Trial("kill-master", 0.05, 0.04, 0.0, 0.5, 1, 9, [], span)
    names = tuple(f"broker-a-{index}" for index in range(3))
    done = fault_record(7, KillMaster(), trial, names=names, wall_s=1_000.0)
    assert (done.began_ms, done.at_ms, done.first_ack_ms) == (1_001_000, 1_001_250, 1_001_300)
    assert (done.master_before, done.master_after, done.elections) == (1, 2, 1)
    assert done.processes == ("namesrv-1", "broker-a-1") and done.brokers == (3,)
    assert done.affected == "namesrv-1, broker-a-1 (broker 3)"
    assert done.gap_ms == 50.0
    unaffected = replace(span, affected=())
    trial = replace(trial, span=unaffected)
    planned = fault_record(8, SwitchFault(), trial, names=names, wall_s=0.0)
    assert planned.processes == ("broker-a-0",) and planned.kind == PLANNED


def test_the_demo_does_a_dozen_failovers_of_many_kinds() -> None:
    least = sum((fault.elections or (0, 0))[0] for fault in DOZEN)
    assert least >= 12
    assert len(set(DOZEN)) >= 8
    assert {kind_of(fault()) for fault in DOZEN} == {"", FAILOVER, PLANNED}
    assert set(FEW) <= set(DOZEN)
    named = [fault.name for fault in DOZEN]
    assert not any(one == two for one, two in itertools.pairwise(named))


def test_an_acked_line_says_where_the_message_is() -> None:
    answer = {"msgId": "0A", "queueId": "3", "queueOffset": "17"}
    line = acked_line("fault", Ack(9, 4, 0, 1.0, 2.0), answer)
    wanted = {
        "topic": "Faults", "broker": "broker-a", "queue_id": 3, "queue_offset": 17,
        "unique_key": key_of("fault", 9), "msg_id": "0A", "producer": "fault-4", "number": 9,
    }  # fmt: skip
    assert json.loads(json.dumps(line)) == wanted


AUDITED = [
    {"severity": "critical", "kind": "missing", "count": 1_204, "replicas": ["broker-a#2"]},
    {"severity": "critical", "kind": "lost", "count": 3, "replicas": []},
    {"severity": "info", "kind": "lagging", "count": 1, "replicas": ["broker-a#3"]},
]


def test_the_summary_shows_each_fault_with_its_failovers_and_what_is_wrong() -> None:
    good = AftermathResult([KILL, SWITCH], 1_234, [], compared(TABLES), JobResult(0, {}, 1.0), 17)
    text = "\n".join(summary.lines(good))
    assert "failover: session closed" in text and "1 -> 2" in text and "45 ms" in text
    assert text.startswith("all good: ") and "broker-a-0 (broker 1)" in text
    assert "away from broker-a-1 (broker 2)" in text
    assert "agrees with every one" in text and "1,234" in text and "none is missing" in text
    assert "17 events streamed" in text and "each once" in text
    assert good.is_good
    bad = replace(
        good,
        comparison=compared(with_failover(1, master=3)),
        audit=JobResult(1, {"kinds": AUDITED}, 1.0),
        findings=[BrokenPromise("lost", "a write")],
        stream_wrong=["the stream lacks one"],
    )
    text = "\n".join(summary.lines(bad))
    assert "DISAGREEMENTS" in text and "broker 3 is master" in text
    assert text.startswith("NOT GOOD: ")
    assert "critical: 1,204 missing in broker-a#2" in text and "critical: 3 lost\n" in text
    assert "lagging" not in text
    assert "FOUND" in text and "lost: a write" in text and "the stream lacks one" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"comparison": None},
        {"comparison": compared(with_failover(1, master=3))},
        {"audit": None},
        {"audit": JobResult(1, {}, 1.0)},
        {"findings": [BrokenPromise("lost", "a write")]},
        {"stream_wrong": ["the stream lacks one"]},
    ],
)
def test_a_run_is_good_only_if_everything_is(changes: dict[str, Any]) -> None:
    good = AftermathResult([KILL], 1, [], compared(TABLES), JobResult(0, {}, 1.0))
    assert good.is_good and not replace(good, **changes).is_good
