"""`python -m lab.faults table`: every fault many times, and the table of what it cost."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.cluster.checks import BrokenPromise
from lab.cluster.network import why_not
from lab.faults.figures import FaultFigures, markdown
from lab.faults.trial import Fault, Lab, Trial, make_network

Progress = Callable[[str], None]


def run_table(
    faults: Sequence[type[Fault]], *, trials: int, seed: int, folder: Path, progress: Progress
) -> int:
    """One cluster per fault, kept in `folder` if anything was found. The exit code: 1 if a promise
    was broken or a fault could not be measured, else 0. A missed limit shows in the table."""
    missing = why_not()
    if missing:
        progress(
            f"no network namespaces here ({missing}): what cuts or slows the network is left out"
        )
    progress(f"seed {seed}, {trials} trials of each fault")
    rows: list[FaultFigures] = []
    for fault in faults:
        wanted = min(trials, fault.trials_at_most or trials)
        limits = fault.limit_s, fault.median_limit_s
        row = FaultFigures(fault.title, fault.peer, *limits)
        rows.append(row)
        if fault.needs_cuts and missing:
            row.left_out = missing
            progress(f"{fault.name}: left out, {missing}")
            continue
        began = time.monotonic()
        _measure(fault, wanted, seed, folder / fault.name, row, progress)
        progress(f"{fault.name}: {time.monotonic() - began:.0f} s in all")
    progress("")
    progress(markdown(rows))
    bad = [row for row in rows if not row.left_out and (row.lost or row.other or not row.seconds)]
    return 1 if bad else 0


def _measure(
    fault: type[Fault], trials: int, seed: int, folder: Path, row: FaultFigures, progress: Progress
) -> None:
    rng = random.Random(f"{seed} {fault.name}")
    shutil.rmtree(folder, ignore_errors=True)
    subject = fault()

    def found(findings: Sequence[BrokenPromise]) -> None:
        row.found(finding.rule for finding in findings)
        for finding in findings[:20]:
            progress(f"  !! {finding.rule}: {finding.text}")

    try:
        with Lab(folder, make_network(), fresh=True, secure=fault.secure) as lab:
            for number in range(1, trials + 1):
                trial = lab.trial(subject, rng)
                row.add(trial.seconds, trial.elections)
                progress(_line(fault, number, trials, trial))
                found(trial.findings)
            found(lab.close_and_compare())
    except (RuntimeError, OSError) as exc:
        found([BrokenPromise("stuck", f"{type(exc).__name__}: {exc}")])
    if row.lost or row.other:
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
