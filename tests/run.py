"""`python -m tests.run`: all tests, in rings. The runner behind `make test`.

Rings: `fast` (no processes), `java` (the stock Java client and mqadmin against a real cluster),
`spark` (the data source, alone and on Spark), `process` (real clusters, kill -9), `sim` (simulated
lives), `docker` (the compose project on a container engine). Every ring runs even if one
before it failed. To use two cores most rings share their files out to workers of pytest, and
run beside each other (`tests.rings`): the output of each is shown when those before it are over.
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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tests import running
from tests.rings import RINGS, Ring, Unprepared

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS_COLLECTED = 5
RETRIED_MAX = 5
"""More failed tests than this are no matter of a busy machine."""
SOAK_LIMIT_S = 4 * 3600
LOOK_S = 0.2
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
    """pytest over one ring, begun. Its output is kept in a file until `show`."""

    def __init__(
        self,
        ring: Ring,
        number: str,
        *,
        strict: bool,
        soak: bool,
        prepared: Future[None] | None = None,
    ) -> None:
        """`prepared`: what became of `ring.prepare`, which is over."""
        self.ring = ring
        self.outcome: Outcome | None = None
        self._began = time.monotonic()
        self._shown = 0
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  see stop
        self._limit_s = SOAK_LIMIT_S if soak else ring.limit_s
        self._notes = tempfile.TemporaryDirectory(prefix="running-")
        self._cache = Path(self._notes.name, "cache")
        self._process: subprocess.Popen[bytes] | None = None
        self._print(f"\n=== {number} {ring.name}: {ring.title}")
        lacks, some_lack = ring.missing(), ring.missing_for_some()
        if lacks:
            why = f"this machine lacks {' and '.join(lacks)}"
            self._print(f"    {'missing' if strict else 'left out'}: {why}")
            self.outcome = Outcome(ring, "failed" if strict else "left out", 0.0, why)
            return
        if some_lack:
            then = "a failure" if strict else "skipped by name"
            self._print(
                f"    this machine lacks {' and '.join(some_lack)}: what needs it is {then}"
            )
        try:
            if prepared is not None:
                prepared.result()
        except Unprepared as exc:
            self._print(f"    {exc}")
            self.outcome = Outcome(ring, "failed", self._seconds(), "could not be prepared")
            return
        env = os.environ | ({"BATONMQ_SOAK": "1"} if soak else {})
        # Servers start a thousand times: without compiled modules each start takes twice as long.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        if sys.stdout.isatty():
            env["PY_COLORS"] = "1"  # pytest sees a file
        env[running.FOLDER] = self._notes.name
        self._process = subprocess.Popen(
            ["nice", "-n", str(ring.niceness), *ring.argv, *ring.cached_in(self._cache)],
            cwd=ROOT,
            env=env,
            stdout=self._output,
            stderr=self._output,
        )

    def look(self) -> Outcome | None:
        """None while it runs. One that is over its limit is ended."""
        if self.outcome is not None or self._process is None:
            return self.outcome
        code = self._process.poll()
        if code is None:
            if self._seconds() > self._limit_s:
                self._end_hung()
        elif code == NO_TESTS_COLLECTED:
            self.outcome = Outcome(self.ring, "failed", self._seconds(), "no test was found")
        elif code:
            failed = failed_tests(self._cache)
            self.outcome = Outcome(self.ring, "failed", self._seconds(), failed=failed)
        else:
            self.outcome = Outcome(self.ring, "passed", self._seconds())
        return self.outcome

    def stop(self) -> None:
        """Ends pytest if it still runs. Output that was not shown yet is lost."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
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
        self.outcome = Outcome(self.ring, "failed", self._seconds(), why)

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _print(self, line: str) -> None:
        self._output.write(f"{line}\n".encode())
        self._output.flush()

    def show(self) -> None:
        """What came since the last call; where pytest writes next stays as it is."""
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


def run_all(rings: Sequence[Ring], *, strict: bool, soak: bool) -> list[Outcome]:
    """Prepares all, begins each ring when it is prepared and those that it comes after are over,
    and shows them in their order."""
    runs: dict[str, Run] = {}
    over: dict[str, Outcome] = {}
    names = {ring.name for ring in rings}
    pool = ThreadPoolExecutor()
    prepared = {ring.name: pool.submit(_prepare, ring) for ring in rings}
    try:
        while len(over) < len(rings):
            for number, ring in enumerate(rings, 1):
                is_next = names.intersection(ring.after) <= over.keys()
                if ring.name not in runs and is_next and prepared[ring.name].done():
                    runs[ring.name] = Run(
                        ring,
                        f"{number}/{len(rings)}",
                        strict=strict,
                        soak=soak,
                        prepared=prepared[ring.name],
                    )
            for name, run in runs.items():
                if outcome := run.look():
                    over[name] = outcome
            _show(rings, runs, over)
            time.sleep(LOOK_S)
        return [over[ring.name] for ring in rings]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for run in runs.values():
            run.stop()


def _prepare(ring: Ring) -> None:
    if not ring.missing():
        ring.prepare()


def _show(rings: Sequence[Ring], runs: dict[str, Run], over: dict[str, Outcome]) -> None:
    """All up to the first that is not over."""
    for ring in rings:
        if ring.name in runs:
            runs[ring.name].show()
        if ring.name not in over:
            return


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
    began = time.monotonic()
    outcomes = run_all(rings, strict=strict, soak=arguments.soak)
    outcomes = [retried(each) if each.state == "failed" else each for each in outcomes]
    print("\n=== summary")
    for outcome in outcomes:
        why = f"  ({outcome.why})" if outcome.why else ""
        print(f"    {outcome.ring.name:8} {outcome.state:9} {outcome.seconds:6.0f} s{why}")
    print(f"    {'all':18} {time.monotonic() - began:6.0f} s")
    return 1 if any(outcome.state == "failed" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
