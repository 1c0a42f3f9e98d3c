"""`python -m lab.faults table`: every fault many times, and the table of what it cost."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.cluster.checks import BrokenPromise
from lab.cluster.network import why_not
from lab.faults.figures import FaultFigures, markdown
from lab.faults.trial import Fault, Lab, Trial, make_network

Progress = Callable[[str], None]


@dataclass(slots=True)
class TableResults:
    """What was measured: `trials` of `Trial.document()`, and what was found outside of them."""

    file: Path | None
    trials: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def save(self) -> None:
        if self.file is not None:
            document = {"trials": self.trials, "findings": self.findings}
            self.file.write_text(json.dumps(document, indent=1))

    def row(self, fault: type[Fault]) -> FaultFigures:
        """The row of a fault, from all that is known of it."""
        trials = [one for one in self.trials if one["fault"] == fault.name]
        rules = [rule for one in trials for rule, _ in one["findings"]]
        rules += [one["rule"] for one in self.findings if one["fault"] == fault.name]
        return FaultFigures(
            fault.name,
            fault.title,
            fault.peer,
            fault.limit_s,
            fault.median_limit_s,
            [one["seconds"] for one in trials if one["seconds"] is not None],
            rules.count("lost"),
            len(rules) - rules.count("lost"),
            [one["elections"] for one in trials],
        )


def run_table(
    faults: Sequence[type[Fault]],
    *,
    trials: int,
    seed: int,
    folder: Path,
    json_file: Path | None,
    progress: Progress,
) -> int:
    """One cluster per fault, kept in `folder` if anything was found. The exit code: 1 if a promise
    was broken or a fault could not be measured, else 0. A missed limit shows in the table."""
    missing = why_not()
    if missing:
        progress(
            f"no network namespaces here ({missing}): what cuts or slows the network is left out"
        )
    progress(f"seed {seed}, {trials} trials of each fault")
    results = TableResults(json_file)
    rows: list[FaultFigures] = []
    for fault in faults:
        wanted = min(trials, fault.trials_at_most or trials)
        if fault.needs_cuts and missing:
            rows.append(FaultFigures(fault.name, fault.title, fault.peer, left_out=missing))
            progress(f"{fault.name}: left out, {missing}")
            continue
        began = time.monotonic()
        _measure(fault, wanted, seed, folder / fault.name, results, progress)
        results.save()
        progress(f"{fault.name}: {time.monotonic() - began:.0f} s in all")
        rows.append(results.row(fault))
    progress("")
    progress(markdown(rows))
    bad = [row for row in rows if not row.left_out and (row.lost or row.other or not row.seconds)]
    return 1 if bad else 0


def _measure(
    fault: type[Fault],
    trials: int,
    seed: int,
    folder: Path,
    results: TableResults,
    progress: Progress,
) -> None:
    rng = random.Random(f"{seed} {fault.name}")
    shutil.rmtree(folder, ignore_errors=True)
    findings: list[BrokenPromise] = []
    subject = fault()
    bad = False
    try:
        with Lab(folder, make_network(), fresh=True, secure=fault.secure) as lab:
            for number in range(1, trials + 1):
                trial = lab.trial(subject, rng)
                results.trials.append(trial.document())
                progress(_line(fault, number, trials, trial))
                bad |= bool(trial.findings)
                for finding in trial.findings[:20]:
                    progress(f"  !! {finding.rule}: {finding.text}")
            findings += lab.close_and_compare()
    except (RuntimeError, OSError) as exc:
        findings.append(BrokenPromise("stuck", f"{type(exc).__name__}: {exc}"))
    for finding in findings[:20]:
        progress(f"  !! {finding.rule}: {finding.text}")
    results.findings += [
        {"fault": fault.name, "rule": one.rule, "text": one.text} for one in findings
    ]
    if findings or bad:
        progress(f"  kept: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _line(fault: type[Fault], number: int, trials: int, trial: Trial) -> str:
    seconds = "-" if trial.seconds is None else f"{trial.seconds * 1000:.0f} ms"
    return (
        f"  {fault.name} {number}/{trials}: {seconds}, gap {trial.gap_s * 1000:.0f} ms,"
        f" after the end {trial.heal_gap_s * 1000:.0f} ms, whole in {trial.whole_s:.1f} s,"
        f" {trial.acked} acked" + (f", {len(trial.findings)} FINDINGS" if trial.findings else "")
    )
