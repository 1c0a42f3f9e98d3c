"""`python -m faults table`: every fault many times, and the table of what it cost."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from faults.cluster import NotWhole
from faults.fault import Fault
from faults.figures import Row, markdown
from faults.lab import Lab, Trial, make_network
from faults.net import why_not
from faults.records import Finding

Say = Callable[[str], None]


def row_of(fault: type[Fault]) -> Row:
    return Row(fault.name, fault.title, fault.peer, fault.limit_s, fault.median_limit_s)


def run_table(
    faults: Sequence[type[Fault]],
    *,
    trials: int,
    seed: int,
    folder: Path,
    json_file: Path | None,
    say: Say,
) -> int:
    """One cluster per fault, kept in `folder` if anything was found. The exit code: 1 if a promise
    was broken or a fault could not be measured, else 0. A missed limit shows in the table."""
    missing = why_not()
    if missing:
        say(f"no network namespaces here ({missing}): what cuts or slows the network is left out")
    say(f"seed {seed}, {trials} trials of each fault")
    documents: list[dict[str, Any]] = []
    rows: list[Row] = []
    bad = False
    for fault in faults:
        row = row_of(fault)
        rows.append(row)
        if fault.needs_cuts and missing:
            row.left_out = missing
            say(f"{fault.name}: left out, {missing}")
            continue
        began = time.monotonic()
        bad |= not _measure(fault, row, trials, seed, folder / fault.name, documents, say)
        say(f"{fault.name}: {time.monotonic() - began:.0f} s in all")
        if json_file is not None:
            json_file.write_text(json.dumps({"seed": seed, "trials": documents}, indent=1))
    say("")
    say(markdown(rows))
    return 1 if bad else 0


def _measure(
    fault: type[Fault],
    row: Row,
    trials: int,
    seed: int,
    folder: Path,
    documents: list[dict[str, Any]],
    say: Say,
) -> bool:
    """Whether everything held."""
    rng = random.Random(f"{seed} {fault.name}")
    shutil.rmtree(folder, ignore_errors=True)
    findings: list[Finding] = []
    subject = fault()
    try:
        with Lab(folder, make_network()) as lab:
            for number in range(1, min(trials, fault.trials_at_most or trials) + 1):
                trial = lab.trial(subject, rng)
                documents.append(trial.document())
                if trial.seconds is not None:
                    row.seconds.append(trial.seconds)
                findings += trial.findings
                say(_line(fault, number, trials, trial))
            findings += lab.close_and_compare()
    except (NotWhole, RuntimeError, OSError) as exc:
        findings.append(Finding("stuck", f"{type(exc).__name__}: {exc}"))
    row.lost = sum(one.rule == "lost" for one in findings)
    row.other = len(findings) - row.lost
    for finding in findings[:20]:
        say(f"  !! {finding.rule}: {finding.text}")
        documents.append({"fault": fault.name, "finding": [finding.rule, finding.text]})
    if findings:
        say(f"  kept: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return not findings


def _line(fault: type[Fault], number: int, trials: int, trial: Trial) -> str:
    seconds = "-" if trial.seconds is None else f"{trial.seconds * 1000:.0f} ms"
    return (
        f"  {fault.name} {number}/{trials}: {seconds}, gap {trial.gap_s * 1000:.0f} ms,"
        f" after the end {trial.heal_gap_s * 1000:.0f} ms, whole in {trial.whole_s:.1f} s,"
        f" {trial.acked} acked" + (f", {len(trial.findings)} FINDINGS" if trial.findings else "")
    )
