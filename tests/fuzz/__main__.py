"""`python -m tests.fuzz [--runs N] [--seed S] [--blind] [TARGET ...]`: searches, target by target.

By coverage where atheris is installed, else blindly. A find is kept under `tests/fuzz/found/TARGET`
and ends the search of that target. Exit codes: 0 nothing found, 1 something, 2 wrong usage.
"""

import argparse
import importlib.util
import random
import sys
import tempfile
from pathlib import Path

from tests.fuzz.engine import search
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description="Broken bytes for readers.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--runs", type=int, default=100_000, help="inputs for each target")
    parser.add_argument("--seed", type=int, help="of the changes; by default another each time")
    parser.add_argument("--blind", action="store_true", help="without coverage")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - TARGETS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    seed = arguments.seed or random.randrange(1, 1 << 31)
    blind = arguments.blind or importlib.util.find_spec("atheris") is None
    print(f"seed {seed}, {arguments.runs} inputs a target, {'blind' if blind else 'by coverage'}")
    failed = 0
    for name in arguments.targets or TARGETS:
        with tempfile.TemporaryDirectory() as work:
            good, said = search(name, arguments.runs, seed, None if blind else Path(work))
        print(said, flush=True)
        failed += not good
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
