"""Lives seed after seed until one breaks a promise: `python -P -m sim.defects.hunt SEED…`.

It runs in a process of its own, in a copy of the checkout in which a defect is planted, and prints
for each life a line of JSON: seed and violation, null if there is none. It ends at the first one.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterable, Iterator

from sim.life import run_numbered

_LIFE_S_MAX = 90.0
"""Of real time. A life takes a few seconds, and one that spins has no end."""


def main() -> int:
    for seed, violation in hunt(map(int, sys.argv[1:])):
        print(json.dumps([seed, violation]), flush=True)
        if violation is not None:
            return 1
    return 0


def hunt(seeds: Iterable[int]) -> Iterator[tuple[int, str | None]]:
    """Each life in a process of its own, one at a time."""
    context = multiprocessing.get_context("fork")
    with context.Pool(1, maxtasksperchild=1) as pool:
        for seed in seeds:
            try:
                _, outcome = pool.apply_async(run_numbered, (seed,)).get(_LIFE_S_MAX)
            except multiprocessing.TimeoutError:
                yield seed, f"liveness: the life did not end in {_LIFE_S_MAX:.0f} s of real time"
                return
            yield seed, outcome.violation


if __name__ == "__main__":
    sys.exit(main())
