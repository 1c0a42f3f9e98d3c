"""`python -m lab.bench.history_events`: epoch_history over generated events, how time and memory
grow.

For each of `--events` (by default 1 and 10 million) it writes about so many into the histories of
`--controllers` controllers, `--groups` broker groups one behind the other, runs
`python -m batonmq.spark.jobs.epoch_history --no-report` as a process of its own on `--master` with
`--driver-memory`, and prints the wall time, the processor time and the peak memory of all its
processes together: driver JVM and Python workers. Files go to `--folder`, and are removed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lab.bench.cpu import TreeSampler
from lab.bench.run import folder_there
from tests.spark.history.history_writer import HistoryWriter, by_chance

MIB = 1 << 20
EVENTS_AN_INCIDENT = 5


@dataclass(frozen=True, slots=True)
class JobCost:
    """One run of the job; `peak_mib` of all its processes at once, `jvm_mib` of the JVM alone."""

    events: int
    input_mib: int
    wall_s: float
    cpu_s: float
    peak_mib: int
    jvm_mib: int
    failovers: int


class Lines(list[dict[str, Any]]):
    """Events that are written at once: ten million are not held."""

    def __init__(self, files: list[IO[str]]) -> None:
        super().__init__()
        self._files = files

    def append(self, event: dict[str, Any]) -> None:
        line = f"{json.dumps(event)}\n"
        for file in self._files:
            file.write(line)


def write_histories(data: Path, count: int, groups: int, controllers: int) -> None:
    """The same history of each controller, in `data`."""
    data.mkdir()
    with ExitStack() as stack:
        names = [f"history-n{number}.jsonl" for number in range(controllers)]
        log = HistoryWriter()
        log.events = Lines([stack.enter_context((data / name).open("w")) for name in names])
        for number in range(groups):
            incidents = count // groups // EVENTS_AN_INCIDENT
            group = f"broker-{number:02d}"
            by_chance(log, group, number, incidents)


def measured(folder: Path, count: int, asked: argparse.Namespace) -> JobCost:
    """Generate, run, measure, remove. Raises RuntimeError if the job fails."""
    data, out = folder / "data", folder / "out"
    write_histories(data, count, asked.groups, asked.controllers)
    size = sum(path.stat().st_size for path in data.iterdir())
    command = [
        sys.executable, "-m", "batonmq.spark.jobs.epoch_history", "--history", str(data),
        "--output", str(out), "--no-report", "--json",
        "--fail-on", "never", "--master", asked.master,
        "--conf", f"spark.driver.memory={asked.driver_memory}",
        "--conf", f"spark.local.dir={folder}/spark",
    ]  # fmt: skip
    log = folder / "job.log"
    began = time.monotonic()
    with log.open("w") as errors, (folder / "job.json").open("w") as result:
        job = subprocess.Popen(command, stdout=result, stderr=errors, env=os.environ)
        with TreeSampler(job.pid) as used:
            job.wait()
    wall_s = time.monotonic() - began
    if job.returncode:
        raise RuntimeError(f"the job ended with {job.returncode}: {log.read_text()[-2000:]}")
    summary = json.loads((folder / "job.json").read_text())
    if asked.steps:
        print(log.read_text(), end="")
    for made in (data, out, folder / "spark"):
        shutil.rmtree(made, ignore_errors=True)
    return JobCost(
        summary["events"],
        size // MIB,
        wall_s,
        used.cpu_s,
        used.peak // MIB,
        used.peak_java // MIB,
        summary["rows"]["failovers"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="epoch_history over generated events")
    parser.add_argument("--events", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--controllers", type=int, default=1)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--driver-memory", default="1g")
    parser.add_argument("--folder", type=folder_there, help="for the files; default: temporary")
    parser.add_argument("--steps", action="store_true", help="print how long each step took")
    asked = parser.parse_args()
    print("  events  input MiB  wall s  cpu s  events/s  peak MiB  JVM MiB  failovers")
    for count in asked.events:
        folder = Path(tempfile.mkdtemp(prefix="history-events-", dir=asked.folder))
        try:
            cost = measured(folder, count, asked)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(
            f"{cost.events:8d} {cost.input_mib:10d} {cost.wall_s:7.1f} {cost.cpu_s:6.1f} "
            f"{cost.events / cost.wall_s:9.0f} {cost.peak_mib:9d} {cost.jvm_mib:8d} "
            f"{cost.failovers:10d}",
            flush=True,
        )


if __name__ == "__main__":
    main()
