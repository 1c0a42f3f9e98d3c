"""`python -m tests.run`: all tests, in rings, the fast ones first. The runner behind `make test`.

Rings: `fast` (no processes), `process` (real clusters, kill -9), `java` (the stock Java client and
mqadmin against a real cluster), `spark` (the data source, alone and on Spark), `docker` (the
compose project on a container engine). Every ring runs even if one before it failed. What a machine
lacks for a ring is said by name and the ring is left out; with BATONMQ_CI=1 in the environment that
is a failure. `--soak` runs the long versions of the process and the Spark ring instead
(BATONMQ_SOAK=1): many kills.
Exit codes: 0 all good, 1 something failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import engine
from tests.interop.java_tools import FetchError, is_fetched, missing_tools, prepared_classpath

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS_COLLECTED = 5


@dataclass(frozen=True)
class Ring:
    """Tests that need the same things. `prepare` raises Unprepared if they cannot run.

    `missing_for_some`: what only some of them need; those are skipped, the others run.
    """

    name: str
    title: str
    marks: str
    missing: Callable[[], list[str]] = list
    missing_for_some: Callable[[], list[str]] = list
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Outcome:
    """`state`: passed, failed, left out."""

    ring: Ring
    state: str
    seconds: float
    why: str = ""


class Unprepared(Exception):
    """A ring's needs could not be met."""


def _prepare_java() -> None:
    if not is_fetched():
        print("    Maven fetches the stock Java client once, about a minute …", flush=True)
    try:
        prepared_classpath()
    except FetchError as exc:
        raise Unprepared(str(exc)) from exc


def _missing_for_spark() -> list[str]:
    packages = ("numpy", "pyarrow", "pyspark")
    lacking = [name for name in packages if importlib.util.find_spec(name) is None]
    java = ["a JDK 17 (`java`)"] if shutil.which("java") is None else []
    return java + ([f"{', '.join(lacking)} (`make setup-spark`)"] if lacking else [])


def _missing_for_reports() -> list[str]:
    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    selenium = importlib.util.find_spec("selenium") is None
    return programs + (["selenium (`make setup-spark`)"] if selenium else [])


def _prepare_docker() -> None:
    print("    the image of this work tree is built …", flush=True)
    try:
        engine.build_image()
    except subprocess.CalledProcessError as exc:
        raise Unprepared(f"{exc.stdout}{exc.stderr}") from exc


RINGS = (
    Ring(
        "fast",
        "cores, codecs, stores, in one process",
        "not process and not java and not spark and not docker",
    ),
    Ring("process", "real clusters: kill -9, hangs, bad days", "process and not spark"),
    Ring("java", "the stock Java client and mqadmin", "java", missing_tools, prepare=_prepare_java),
    Ring(
        "spark",
        "stores and histories as Spark data frames",
        "spark",
        _missing_for_spark,
        _missing_for_reports,
    ),
    Ring(
        "docker",
        "the compose project: kills, pauses, cut networks",
        "docker",
        engine.missing_tools,
        prepare=_prepare_docker,
    ),
)


def run_ring(ring: Ring, number: str, *, strict: bool, soak: bool) -> Outcome:
    """Runs one ring and shows pytest's own progress."""
    print(f"\n=== {number} {ring.name}: {ring.title}", flush=True)
    lacks = ring.missing()
    if lacks:
        why = f"this machine lacks {' and '.join(lacks)}"
        print(f"    {'missing' if strict else 'left out'}: {why}", flush=True)
        return Outcome(ring, "failed" if strict else "left out", 0.0, why)
    if lacks := ring.missing_for_some():
        print(f"    this machine lacks {' and '.join(lacks)}: what needs it is ", end="")
        print("a failure" if strict else "skipped by name", flush=True)
    began = time.monotonic()
    try:
        ring.prepare()
    except Unprepared as exc:
        print(f"    {exc}", flush=True)
        return Outcome(ring, "failed", time.monotonic() - began, "could not be prepared")
    argv = [sys.executable, "-m", "pytest", "-q", "-m", ring.marks, "--durations=5", "tests"]
    env = os.environ | ({"BATONMQ_SOAK": "1"} if soak else {})
    code = subprocess.run(argv, cwd=ROOT, env=env, check=False).returncode
    seconds = time.monotonic() - began
    if code == NO_TESTS_COLLECTED:
        return Outcome(ring, "failed", seconds, "no test was found")
    return Outcome(ring, "failed" if code else "passed", seconds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.run", description="All tests, ring by ring.")
    parser.add_argument("--soak", action="store_true", help="the long versions: many kills")
    parser.add_argument(
        "--ring", action="append", choices=[ring.name for ring in RINGS], help="only this one"
    )
    arguments = parser.parse_args()
    usual = ["process", "spark"] if arguments.soak else [ring.name for ring in RINGS]
    wanted = arguments.ring or usual
    rings = [ring for ring in RINGS if ring.name in wanted]
    strict = os.environ.get("BATONMQ_CI") == "1"
    outcomes = [
        run_ring(ring, f"{i}/{len(rings)}", strict=strict, soak=arguments.soak)
        for i, ring in enumerate(rings, 1)
    ]
    print("\n=== summary")
    for outcome in outcomes:
        why = f"  ({outcome.why})" if outcome.why else ""
        print(f"    {outcome.ring.name:8} {outcome.state:9} {outcome.seconds:6.0f} s{why}")
    return 1 if any(outcome.state == "failed" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
