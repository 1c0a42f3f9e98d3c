"""A short `make demo-spark`: real failovers, and the jobs' tables against what was done.

One cluster lives through four faults; then each job runs once over what it left. The comparison
itself is tested in tests/lab/faults.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.faults.aftermath import summary
from lab.faults.aftermath.fault_records import FEW
from lab.faults.aftermath.run import Aftermath, AftermathOptions
from lab.faults.aftermath.tables import read_tables

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


def test_the_laboratory_itself_found_nothing(run: Aftermath) -> None:
    assert run.result.findings == []
    assert run.result.acked > 0
    assert run.paths.record.read_text() == "".join(one.line() for one in run.result.records)
    acked = [json.loads(line) for line in run.paths.acked.read_text().splitlines()]
    assert len(acked) == run.result.acked


def test_every_table_says_what_was_done(run: Aftermath) -> None:
    """Kinds, masters, times, costs and sets: see `aftermath.compare`. Causes, and how it ends."""
    comparison = run.result.comparison
    assert comparison is not None
    shown = "\n".join(summary.table(comparison))
    assert [one.wrong for one in comparison.faults] == [()] * len(FEW), shown
    assert comparison.wrong == [] and comparison.agrees
    tables = read_tables(run.paths.output("epoch_history"))
    rows = {row.epoch: row for row in tables.failovers}
    assert rows[1].kind == "first_election" and len(rows) == len(tables.failovers)
    causes = {record.what: rows[record.epoch_after].cause for record in run.result.records}
    assert (causes["kill-master"], causes["hang-master"]) == ("session_closed", "session_silent")
    last = tables.masterships[-1]
    assert (last.ended_ms, last.broker_id) == (None, run.result.records[-1].master_after)
    assert tables.set_changes[-1].after == {1, 2, 3}


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
