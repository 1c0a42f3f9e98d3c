"""A short `make demo-spark`: real failovers, and the jobs' tables against what was done.

One cluster lives through four faults; then each job runs once over what it left. The comparison
itself is tested in tests/lab/faults; here the tables are also held against the record by hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from lab.faults.aftermath import summary
from lab.faults.aftermath.compare import TOLERANCE_MS
from lab.faults.aftermath.fault_schedule import FEW
from lab.faults.aftermath.run import Aftermath, AftermathOptions
from lab.faults.aftermath.tables import Tables, read_tables

GROUP = "broker-a"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Aftermath:
    """The cluster has lived and ended; the history was read."""
    folder = tmp_path_factory.mktemp("aftermath")
    options = AftermathOptions(folder, seed=1, faults=FEW, stream=False)
    aftermath = Aftermath(options, lambda text, bad: None)
    aftermath.run_cluster()
    aftermath.compare_history()
    return aftermath


@pytest.fixture(scope="module")
def tables(run: Aftermath) -> Tables:
    return read_tables(run.paths.output("epoch_history"))


def shown(run: Aftermath) -> str:
    assert run.result.comparison is not None
    return "\n".join(summary.table(run.result.comparison))


def test_the_laboratory_itself_found_nothing(run: Aftermath) -> None:
    assert run.result.findings == []
    assert run.result.acked > 0
    assert run.paths.record.read_text() == "".join(one.line() for one in run.result.records)
    acked = [json.loads(line) for line in run.paths.acked.read_text().splitlines()]
    assert len(acked) == run.result.acked


def test_every_table_tells_what_was_done(run: Aftermath) -> None:
    comparison = run.result.comparison
    assert comparison is not None
    assert [one.wrong for one in comparison.faults] == [()] * len(FEW), shown(run)
    assert comparison.wrong == [] and comparison.agrees


def test_each_failover_has_its_kind_its_masters_its_epoch_and_its_time(
    run: Aftermath, tables: Tables
) -> None:
    rows = {row.epoch: row for row in tables.failovers}
    assert rows[1].kind == "first_election"
    assert len(rows) == len(tables.failovers)
    for record in run.result.records:
        mine = [rows[epoch] for epoch in range(record.epoch_before + 1, record.epoch_after + 1)]
        if record.what == "kill-slave":
            assert mine == [] or all(row.kind == "failover" for row in mine), shown(run)
            continue
        first, last = mine[0], mine[-1]
        wanted = "planned_switch" if record.what == "planned-switch" else "failover"
        assert wanted in [row.kind for row in mine]
        assert (first.master_before, last.master) == (record.master_before, record.master_after)
        assert all(row.group == GROUP for row in mine)
        for moment in last.times_ms.values():
            assert record.began_ms - TOLERANCE_MS <= moment <= record.ended_ms + TOLERANCE_MS
        assert last.unavailable_ms is not None
        assert last.unavailable_ms <= record.gap_ms * len(mine) + TOLERANCE_MS
    causes = {record.what: rows[record.epoch_after].cause for record in run.result.records}
    assert causes["kill-master"] == "session_closed"
    assert causes["hang-master"] == "session_silent"


def test_masterships_follow_each_other_without_a_gap(run: Aftermath, tables: Tables) -> None:
    reigns = tables.masterships
    assert [row.epoch for row in reigns] == [row.epoch for row in tables.failovers]
    assert [row.broker_id for row in reigns] == [row.master for row in tables.failovers]
    assert all(one.ended_ms == two.began_ms for one, two in pairwise(reigns))
    assert reigns[-1].ended_ms is None
    assert reigns[-1].broker_id == run.result.records[-1].master_after


def test_set_changes_are_the_controllers_own_steps(run: Aftermath, tables: Tables) -> None:
    """The affected broker leaves and comes back; the set is full at the end."""
    assert tables.set_changes[-1].after == {1, 2, 3}
    slave = next(record for record in run.result.records if record.what == "kill-slave")
    inside = [
        row
        for row in tables.set_changes
        if slave.set_epoch_before < row.epoch <= slave.set_epoch_after
    ]
    (affected,) = slave.brokers
    assert affected in inside[0].left and affected in inside[-1].joined
    assert len(inside) == slave.set_epoch_after - slave.set_epoch_before


def test_the_report_is_one_page(run: Aftermath) -> None:
    page = run.paths.report("epoch_history").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert GROUP in page


def test_nothing_acknowledged_is_missing_in_any_store(run: Aftermath, tmp_path: Path) -> None:
    """The audit as an operator runs it: mqctl finds the stores and a folder for the output."""
    hidden = ("NAMESRV_ADDR", "BATONMQ_DATA")
    environ = {key: value for key, value in os.environ.items() if key not in hidden}
    environ |= {"HOME": str(tmp_path), "BATONMQ_DATA": str(run.paths.data)}
    program = "from batonmq.mqctl.main import main; main()"
    arguments = ["--acked", str(run.paths.acked), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", program, "messageAudit", *arguments],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert "3 stores" in done.stderr
    (output,) = (run.paths.data / "analysis").iterdir()
    assert f"--output {output}" in done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((output / "summary.json").read_text())
    acked = summary["acked"]
    assert acked["entries"] == acked["found"] == run.result.acked
    assert (acked["lost"], acked["elsewhere"], acked["not_everywhere"]) == (0, 0, 0)
