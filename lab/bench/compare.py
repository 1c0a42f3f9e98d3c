"""`python -m lab.bench.compare`: every part on both sides, then one table of medians, ratios and
marks.

A part that fails is reported and does not keep the others from running. Whatever was started ends
with this process, on ctrl-C too.
"""

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Final

from lab.bench import (
    part_catchup,
    part_clients,
    part_consume,
    part_failover,
    part_features,
    part_sends,
    part_start,
)
from lab.bench.report import ReportRow, table
from lab.bench.run import (
    SIDES,
    BenchPart,
    BenchRun,
    folder_there,
    machine_facts,
    names_among,
    progress,
)
from lab.cluster.java import PEER_VERSION, JavaError, is_fetched, missing_tools, prepared_classpath
from lab.cluster.processes import ROOT

PARTS: Final = (
    part_start.PART,
    part_failover.PART,
    part_clients.PART,
    part_sends.PART,
    part_consume.PART,
    part_catchup.PART,
    part_features.PART,
)
DISK_NEEDED: Final = 10 << 30
DISK_NEEDED_QUICK: Final = 6 << 30


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 if every part ran (marks may be missed), 1 if one failed, 2 for usage."""
    options = _parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    classpath = ""
    try:
        if "java" in options.sides or any(part.needs_programs for part in parts):
            classpath = _prepare_java()
        _check_disk(options.folder, DISK_NEEDED_QUICK if options.quick else DISK_NEEDED)
    except (JavaError, OSError) as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(
        prefix="batonmq-bench-", dir=options.folder, ignore_cleanup_errors=True
    ) as folder:
        run = BenchRun(options.rounds, options.quick, options.sides, Path(folder), classpath)
        try:
            return _run_all(run, parts, options.json)
        except KeyboardInterrupt:
            print("bench: interrupted; all processes have ended", file=sys.stderr)
            return 130


def _prepare_java() -> str:
    lacks = missing_tools()
    if lacks:
        raise JavaError(f"not installed: {' and '.join(lacks)}")
    if not is_fetched():
        progress(f"fetching RocketMQ {PEER_VERSION} with Maven (about 90 MB, once)")
    return prepared_classpath(ROOT / "lab" / "bench" / "java")


def _run_all(run: BenchRun, parts: list[BenchPart], json_file: Path | None) -> int:
    rows: list[ReportRow] = []
    failures: dict[str, str] = {}
    began = time.time()
    machine = {**machine_facts(), "Java peer": PEER_VERSION}
    try:
        for part in parts:
            progress(f"== {part.what} ==")
            own = part.rows()
            rows += own
            try:
                part.measure(run, {row.key: row for row in own})
            except Exception as exc:  # a part may fail in any way; the others still run
                failures[part.name] = "".join(traceback.format_exception(exc))
                progress(f"FAILED: {part.name}: {exc}")
    finally:
        progress("done")
        _print(run, rows, failures, machine)
        if json_file is not None:
            document = {
                "startedAt": int(began * 1000),
                "seconds": time.time() - began,
                "machine": machine,
                "quick": run.quick,
                "rounds": run.rounds,
                "rows": [row.to_json() for row in rows],
                "raw": run.raw,
                "failures": failures,
            }
            json_file.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if failures else 0


def _print(
    run: BenchRun, rows: list[ReportRow], failures: dict[str, str], machine: dict[str, object]
) -> None:
    print(", ".join(f"{what} {value}" for what, value in machine.items()))
    if run.noise:
        noise = f"{statistics.median(run.noise):.0f} % ({max(run.noise):.0f} % at most)"
        print(f"Processor use of others while measuring: {noise} of one core.")
    print("Medians (least-most, samples)." + (" A QUICK run: no figures to quote." * run.quick))
    print()
    print(table(rows))
    for name, text in failures.items():
        print(f"\n{name} FAILED:\n{text}")


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder} has {free / 2**30:.1f} GiB free, {needed >> 30} are needed"
            " (--folder takes another place)"
        )


def _interrupt(number: int, frame: object) -> None:
    # Once: a second signal must not break the stopping of what runs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lab.bench.compare", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--rounds", type=int, help="rounds of each row (5; quick 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, raw, here")
    parser.add_argument("--only", type=names_among(names), default=(), metavar=",".join(names))
    parser.add_argument("--sides", type=names_among(SIDES), default=SIDES, metavar=",".join(SIDES))
    parser.add_argument("--quick", action="store_true", help="short: shows that it works, no more")
    parser.add_argument(
        "--folder", type=folder_there, default=tempfile.gettempdir(), help="where stores are put"
    )
    options = parser.parse_args(argv)
    if options.rounds is None:
        options.rounds = 1 if options.quick else 5
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
