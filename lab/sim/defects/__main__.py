"""`python -m lab.sim.defects`: whether the checkers of the simulation find what is planted.

    python -m lab.sim.defects --jobs 2             all defects, and a table
    python -m lab.sim.defects --only NAME          one of them (again and again: several)
    python -m lab.sim.defects --seeds 200          with up to so many lives for each
    python -m lab.sim.defects --search             from seed 1 on; the seed goes into the patch

Exit codes: 0 all are found, 1 one is not, or its patch no longer applies, 2 wrong usage.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from lab.sim.ambient import real_seconds
from lab.sim.defects.patches import Defect, PatchError, defects_in, noting
from lab.sim.defects.runner import DefectResult, Runner, line_of

FOLDER = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    options = _parser().parse_args(arguments)
    try:
        defects = _chosen(defects_in(folder), options.only)
    except PatchError as error:
        sys.exit(str(error))
    began = real_seconds()
    done = 0

    def say(line: str) -> None:
        nonlocal done
        done += 1
        print(f"[{real_seconds() - began:5.0f} s] {line}", file=sys.stderr, flush=True)

    runner = Runner(say, jobs=options.jobs, seeds_max=options.seeds, search=options.search)
    findings = runner.run(defects)
    if options.search:
        _note(folder, findings)
    _show(findings, real_seconds() - began)
    return 0 if all(finding.found for finding in findings) else 1


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lab.sim.defects", description="planted defects, and who finds them"
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="that one")
    parser.add_argument("--jobs", type=_count, default=1, help="defects at a time")
    parser.add_argument("--seeds", type=_count, default=60, help="lives for each, at most")
    parser.add_argument("--search", action="store_true", help="from seed 1 on, and note the finder")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _chosen(defects: list[Defect], names: list[str] | None) -> list[Defect]:
    if not names:
        return defects
    known = {defect.name: defect for defect in defects}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PatchError(f"no defect {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [known[name] for name in names]


def _note(folder: Path, findings: Sequence[DefectResult]) -> None:
    for finding in findings:
        if finding.seed is not None:
            path = folder / f"{finding.name}.patch"
            path.write_text(noting(path.read_text("utf-8"), finding.seed), "utf-8")


def _show(findings: Sequence[DefectResult], seconds: float) -> None:
    for finding in findings:
        print(f"{line_of(finding)}\n    {finding.what}")
    lost = [finding.name for finding in findings if not finding.found]
    lives = sum(finding.lives for finding in findings)
    print(
        f"{len(findings) - len(lost)} of {len(findings)} defects found, {lives} lives,"
        f" {seconds:.0f} s" + (f"; not found: {', '.join(lost)}" if lost else "")
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)  # what was begun is ended and removed, as by an interrupt
    sys.exit(main())
