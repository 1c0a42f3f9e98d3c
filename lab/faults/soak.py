"""`python -m lab.faults soak`: faults of the table at random, some together with a kill, for a
long time, while consumer groups read along.

Every action and finding is a line of the log. A cluster runs for some minutes and its logs are
compared byte by byte; then a new one is started, so that starts are tested as well and the disk
does not fill. The folder of a cluster with a finding is kept.
"""

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from lab.cluster.checks import BrokenPromise
from lab.cluster.network import why_not
from lab.cluster.processes import NotInTime
from lab.faults.catalogue import FAULTS
from lab.faults.trial import FIRST_ACK_S, Fault, Lab, make_network

CLUSTER_S: Final = 480.0
DOUBLE: Final = 0.3
"""How often a process is killed while a fault still lasts."""
REMARKS: Final = frozenset({"elections"})
"""Logged, but no finding: a busy machine has more elections, and they lose no message."""
PACE: Final = ("--interval-ms", "4")


class Log:
    """Writes JSON lines to a file, and shows findings."""

    def __init__(self, path: Path, progress: Callable[[str], None]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        self._progress = progress
        self.path = path
        self.findings = 0
        self.remarks = 0
        self.kinds: Counter[str] = Counter()
        """How often each fault was done."""

    def write(self, what: str, **fields: object) -> None:
        line = {"time": time.time_ns() // 1_000_000, "what": what, **fields}
        self._file.write(json.dumps(line, default=str) + "\n")
        self._file.flush()

    def found(self, findings: list[BrokenPromise], **fields: object) -> None:
        for finding in findings:
            self.findings += 1
            self.write("finding", rule=finding.rule, text=finding.text, **fields)
            self._progress(f"!! {finding.rule}: {finding.text}")

    def close(self) -> None:
        self._file.close()


def run_soak(
    *, minutes: float, seed: int, folder: Path, progress: Callable[[str], None], queues: int = 0
) -> int:
    """The exit code: 1 as soon as a promise was broken or a cluster did not come back. `queues`:
    how many more queues are written beside the load."""
    missing = why_not()
    if missing:
        progress(
            f"no network namespaces here ({missing}): what cuts or slows the network is left out"
        )
    choice = [f for f in FAULTS if f.in_soak and not (f.needs_cuts and missing)]
    rng = random.Random(seed)
    log = Log(folder / f"soak-{seed}.jsonl", progress)
    progress(f"seed {seed}, {minutes:g} minutes, log {log.path}")
    end = time.monotonic() + minutes * 60
    clusters = trials = acked = 0
    while time.monotonic() < end and not log.findings:
        clusters += 1
        home = folder / f"cluster-{clusters}"
        shutil.rmtree(home, ignore_errors=True)
        until = min(end, time.monotonic() + CLUSTER_S)
        done = _one_cluster(home, choice, until, rng, log, progress, queues)
        trials += done[0]
        acked += done[1]
        if not log.findings:
            shutil.rmtree(home, ignore_errors=True)
        else:
            progress(f"kept: {home}")
    progress(", ".join(f"{name} {count}" for name, count in sorted(log.kinds.items())))
    log.write(
        "end", kinds=log.kinds, trials=trials, acked=acked, clusters=clusters, findings=log.findings
    )
    log.close()
    outcome = f"{log.findings} FINDINGS" if log.findings else "nothing lost, nothing broken"
    progress(f"{trials} faults in {clusters} clusters, {acked} acknowledged: {outcome}")
    progress(f"faults with other elections than expected: {log.remarks}")
    if log.findings:
        progress(f"seed {seed}, log {log.path}")
    return 1 if log.findings else 0


def _one_cluster(
    home: Path,
    choice: list[type[Fault]],
    until: float,
    rng: random.Random,
    log: Log,
    progress: Callable[[str], None],
    queues: int,
) -> tuple[int, int]:
    """One cluster: (faults done, writes acknowledged)."""
    trials = acked = 0
    subjects = {fault.name: fault() for fault in choice}
    try:
        with Lab(home, make_network(), load=PACE, consumed=True, queues=queues) as lab:
            log.write("cluster", folder=home, network=type(lab.network).__name__)
            lab.wait_many()
            while time.monotonic() < until and not log.findings:
                name = rng.choice(sorted(subjects))
                if rng.random() < DOUBLE:
                    log.write("fault", name=name, and_then="a kill")
                    found, notes = _with_a_kill(lab, subjects[name], rng)
                    names = f"{name}, {notes['killed']} killed"
                else:
                    log.write("fault", name=name)
                    trial = lab.trial(subjects[name], rng)
                    found, notes, names = trial.findings, asdict(trial), name
                trials += 1
                log.kinds[name] += 1
                log.write("over", name=names, notes=notes)
                remarks = [one for one in found if one.rule in REMARKS]
                log.remarks += len(remarks)
                log.found([one for one in found if one not in remarks], name=names)
                progress(f"  {names}: {len(lab.load.acks)} acked")
            if not log.findings:
                log.found(lab.close_and_compare(), name="end of a cluster")
            acked = len(lab.load.acks) + lab.many_acked
    except (RuntimeError, OSError) as exc:
        log.found([BrokenPromise("stuck", f"{type(exc).__name__}: {exc}")])
    return trials, acked


def _with_a_kill(
    lab: Lab, fault: Fault, rng: random.Random
) -> tuple[list[BrokenPromise], dict[str, object]]:
    """While a fault lasts, any process that still runs is killed. That may be more than the group
    survives, so only safety is checked until everything is restored."""
    fault.prepare(lab, rng)
    lab.cluster.wait_whole()
    injected = fault.inject(lab, rng)
    try:
        time.sleep(rng.uniform(0.0, 0.5))
        victim = rng.choice([p for p in lab.cluster.processes if p.runs and not p.stopped])
        victim.kill()
        time.sleep(rng.uniform(0.0, 2.0))
    finally:
        with suppress(NotInTime):
            fault.heal(lab, injected)
        lab.restore()
    group = lab.cluster.wait_whole()
    lab.must_ack(FIRST_ACK_S)
    return lab.verify(group), {"killed": victim.name}
