"""`python -m lab.faults table`: every fault many times, and the table of what it cost.

`FaultFigures` and `markdown` are the figures and the table; `run_table` measures.
"""

import random
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from lab.cluster.checks import BrokenPromise
from lab.cluster.network import why_not
from lab.faults.trial import Fault, Lab, Trial, make_network


@dataclass(slots=True)
class FaultFigures:
    """All trials of one fault. `limit_s` is the longest allowed, `median_limit_s` of the median."""

    title: str
    peer: str = ""
    limit_s: float | None = None
    median_limit_s: float | None = None
    seconds: list[float] = field(default_factory=list)
    lost: int = 0
    other: int = 0
    elections: list[int] = field(default_factory=list)
    left_out: str = ""

    def add(self, seconds: float | None, elections: int) -> None:
        """One trial; `seconds` None: nothing was acknowledged."""
        if seconds is not None:
            self.seconds.append(seconds)
        self.elections.append(elections)

    def found(self, rules: Iterable[str]) -> None:
        """Counts findings by their rule."""
        for rule in rules:
            self.lost += rule == "lost"
            self.other += rule != "lost"

    @property
    def meets_limits(self) -> bool:
        """Whether all trials are within the limits; True where there is no limit."""
        if not self.seconds:
            return False
        if self.limit_s is not None and max(self.seconds) > self.limit_s:
            return False
        return self.median_limit_s is None or median(self.seconds) <= self.median_limit_s


def markdown(rows: Iterable[FaultFigures]) -> str:
    """The table, to be pasted."""
    lines = [
        "| fault | Java peer | limit | median | max | trials | elections | lost | other findings |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.left_out:
            figures = f"left out: {row.left_out} | | 0 | | | "
        elif not row.seconds:
            figures = f"- | - | 0 | - | {row.lost} | {row.other}"
        else:
            worst = f"{max(row.seconds):.3f} s"
            figures = (
                f"{median(row.seconds):.3f} s | {worst if row.meets_limits else f'**{worst}**'}"
                f" | {len(row.seconds)} | {_range(row.elections)} | {row.lost} | {row.other}"
            )
        lines.append(f"| {row.title} | {row.peer or '-'} | {_limit(row)} | {figures} |")
    return "\n".join(lines)


def _limit(row: FaultFigures) -> str:
    parts = []
    if row.median_limit_s is not None:
        parts.append(f"median {row.median_limit_s:g} s")
    if row.limit_s is not None:
        parts.append(f"max {row.limit_s:g} s" if parts else f"{row.limit_s:g} s")
    return ", ".join(parts) or "-"


def _range(counts: Sequence[int]) -> str:
    """`1`, or `0-2` where trials differ."""
    if not counts:
        return "-"
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}-{high}"


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
