"""`python -m tests.run`: all tests, in rings, the fast ones first. The runner behind `make test`.

Rings: `fast` (no processes), `java` (the stock Java client and mqadmin against a real cluster),
`spark` (the data source, alone and on Spark), `process` (real clusters, kill -9), `sim` (simulated
lives), `docker` (the compose project on a container engine). Every ring runs even if one
before it failed. To use two cores most rings share their files out to workers of pytest, and
some run beside the ring before them (`tests.rings`): their output is shown when that one is done.
What a machine lacks for a ring is named and the ring is left out; with BATONMQ_CI=1 in the
environment that is a failure. A ring that takes longer than its limit fails: the tests that run
then are named, with the stacks of their threads. Up to five failed tests of a ring run once more
when nothing else runs on the machine: the summary names those that pass only then. `--soak` runs
the long versions of the Spark and the process ring instead (BATONMQ_SOAK=1), many kills, and two
rings of its own: `search` (property tests with new seeds) and `fuzz` (broken input by the million).
Exit codes: 0 all good, 1 something failed, 2 wrong usage.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests import running
from tests.rings import RINGS, Ring, Unprepared

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS_COLLECTED = 5
RETRIED_MAX = 5
"""More failed tests than this are no matter of a busy machine."""
SOAK_LIMIT_S = 4 * 3600
STOP_S = 30.0
"""How long a hung ring gets to end its clusters before it is killed."""


@dataclass(frozen=True)
class Outcome:
    """`state`: passed, failed, left out."""

    ring: Ring
    state: str
    seconds: float
    why: str = ""
    failed: tuple[str, ...] = ()


class Run:
    """pytest over one ring: begun, and finished later. Its output is shown now or, `quiet`, kept in
    a file until `finish` shows it."""

    def __init__(self, ring: Ring, number: str, *, strict: bool, soak: bool, quiet: bool) -> None:
        self.ring = ring
        self._title = f"\n=== {number} {ring.name}: {ring.title}"
        self._began = time.monotonic()
        self._shown = 0
        self._output = tempfile.TemporaryFile() if quiet else None  # noqa: SIM115  see stop
        self._limit_s = SOAK_LIMIT_S if soak else ring.limit_s
        self._notes = tempfile.TemporaryDirectory(prefix="running-")
        self._cache = Path(self._notes.name, "cache")
        self._process: subprocess.Popen[bytes] | None = None
        self._outcome: Outcome | None = None
        self._print(self._title)
        lacks, some_lack = ring.missing(), ring.missing_for_some()
        if lacks:
            why = f"this machine lacks {' and '.join(lacks)}"
            self._print(f"    {'missing' if strict else 'left out'}: {why}")
            self._outcome = Outcome(ring, "failed" if strict else "left out", 0.0, why)
            return
        if some_lack:
            then = "a failure" if strict else "skipped by name"
            self._print(
                f"    this machine lacks {' and '.join(some_lack)}: what needs it is {then}"
            )
        try:
            ring.prepare()
        except Unprepared as exc:
            self._print(f"    {exc}")
            self._outcome = Outcome(ring, "failed", self._seconds(), "could not be prepared")
            return
        env = os.environ | ({"BATONMQ_SOAK": "1"} if soak else {})
        # Servers start a thousand times: without compiled modules each start takes twice as long.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env[running.FOLDER] = self._notes.name
        self._process = subprocess.Popen(
            ["nice", "-n", str(ring.niceness), *ring.argv, *ring.cached_in(self._cache)],
            cwd=ROOT,
            env=env,
            stdout=self._output,
            stderr=self._output,
        )

    def finish(self) -> Outcome:
        """Waits for the end, and shows meanwhile what was kept and what still comes."""
        while self._is_running():
            if time.monotonic() - self._began > self._limit_s:
                self._end_hung()
            self._show_more()
            time.sleep(0.2)
        self._show_more()
        if self._outcome is not None:
            return self._outcome
        assert self._process is not None
        code = self._process.wait()
        if code == NO_TESTS_COLLECTED:
            return Outcome(self.ring, "failed", self._seconds(), "no test was found")
        if not code:
            return Outcome(self.ring, "passed", self._seconds())
        return Outcome(self.ring, "failed", self._seconds(), failed=failed_tests(self._cache))

    def stop(self) -> None:
        """Ends pytest if it still runs. Output that was not shown yet is lost."""
        if self._is_running():
            assert self._process is not None
            self._process.terminate()
            self._process.wait()
        if self._output is not None:
            self._output.close()
        self._notes.cleanup()

    def _end_hung(self) -> None:
        """Names its tests, shows where their threads are, ends them."""
        assert self._process is not None
        notes = Path(self._notes.name)
        tests = running.running_tests(notes)
        why = f"longer than {self._limit_s:.0f} s, in {' and '.join(tests.values()) or 'no test'}"
        running.ask_for_stacks(notes, list(tests))
        pids = [self._process.pid, *tests]
        running.send(signal.SIGINT, pids)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        running.send(signal.SIGKILL, pids)
        self._process.wait()
        self._print(f"\n    {self.ring.name}: {why}; their threads:")
        for pid, test in tests.items():
            self._print(f"{test}\n{running.stacks_of(notes, pid)}")
        self._outcome = Outcome(self.ring, "failed", self._seconds(), why)

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _seconds(self) -> float:
        """Since it began, to its last word if that was kept, else until now."""
        silent = time.time() - os.fstat(self._output.fileno()).st_mtime if self._output else 0.0
        return time.monotonic() - self._began - silent

    def _print(self, line: str) -> None:
        if self._output is None:
            print(line, flush=True)
        else:
            self._output.write(f"{line}\n".encode())
            self._output.flush()

    def _show_more(self) -> None:
        """From where the last call stopped; where pytest writes next stays as it is."""
        if self._output is None:
            return
        size = os.fstat(self._output.fileno()).st_size
        sys.stdout.flush()
        sys.stdout.buffer.write(os.pread(self._output.fileno(), size - self._shown, self._shown))
        sys.stdout.flush()
        self._shown = size


def failed_tests(cache: Path) -> tuple[str, ...]:
    """Ids of the tests that failed, of which pytest's cache plugin keeps a list."""
    with contextlib.suppress(FileNotFoundError):
        return tuple(json.loads((cache / "v" / "cache" / "lastfailed").read_bytes()))
    return ()


def retried(outcome: Outcome) -> Outcome:
    """The failed tests of a ring once more, one after the other, with the machine to themselves."""
    tests = outcome.failed
    if outcome.why or not 0 < len(tests) <= RETRIED_MAX:
        return outcome
    names = ", ".join(tests)
    print(f"\n=== once more, alone: {names}", flush=True)
    env = os.environ.copy()
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, env=env)
    if done.returncode:
        return replace(outcome, why=f"also alone: {names}")
    return replace(outcome, state="passed", why=f"only alone: {names}")


def run_group(rings: Sequence[tuple[Ring, str]], *, strict: bool, soak: bool) -> list[Outcome]:
    """Runs rings side by side: the first one is seen at work, the others when their turn comes."""
    runs: list[Run] = []
    try:
        for ring, number in (*rings[1:], rings[0]):
            quiet = ring is not rings[0][0]
            runs.append(Run(ring, number, strict=strict, soak=soak, quiet=quiet))
        return [run.finish() for run in (runs[-1], *runs[:-1])]
    finally:
        for run in runs:
            run.stop()


def grouped(rings: Sequence[Ring]) -> list[list[tuple[Ring, str]]]:
    """Rings with their numbers, together where they run side by side."""
    groups: list[list[tuple[Ring, str]]] = []
    for number, ring in enumerate(rings, 1):
        named = (ring, f"{number}/{len(rings)}")
        if groups and ring.beside_others:
            groups[-1].append(named)
        else:
            groups.append([named])
    return groups


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.run", description="All tests, ring by ring.")
    parser.add_argument("--soak", action="store_true", help="the long versions: many kills")
    parser.add_argument(
        "--ring", action="append", choices=[ring.name for ring in RINGS], help="only this one"
    )
    arguments = parser.parse_args()
    usual = [ring.name for ring in RINGS if (ring.soaks if arguments.soak else ring.in_test)]
    wanted = arguments.ring or usual
    rings = [ring for ring in RINGS if ring.name in wanted]
    strict = os.environ.get("BATONMQ_CI") == "1"
    groups, began = grouped(rings), time.monotonic()
    outcomes = [
        each for group in groups for each in run_group(group, strict=strict, soak=arguments.soak)
    ]
    outcomes = [retried(each) if each.state == "failed" else each for each in outcomes]
    print("\n=== summary")
    for outcome in outcomes:
        why = f"  ({outcome.why})" if outcome.why else ""
        print(f"    {outcome.ring.name:8} {outcome.state:9} {outcome.seconds:6.0f} s{why}")
    print(f"    {'all':18} {time.monotonic() - began:6.0f} s")
    return 1 if any(outcome.state == "failed" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
