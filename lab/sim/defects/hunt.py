"""Lives seed after seed until one breaks a promise: `python -P -m lab.sim.defects.hunt KIND SEED…`.

KIND is `plain` for lives without the broker's features, or `any`.

It runs in a process of its own, in a copy of the checkout in which a defect is planted, and prints
for each life a line of JSON: seed and violation, null if there is none. It ends at the first one. A
life that does not come to its end is no find: it says nothing of the checkers.
"""

import json
import multiprocessing
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection

from lab.sim.life import run_numbered

LIFE_S_MAX = 90
"""Of processor time, however busy the machine is. A life takes a few seconds."""


class LifeError(Exception):
    """A life without an outcome: it took too long, or its process was killed."""


def main() -> int:
    try:
        for seed, violation in hunt(map(int, sys.argv[2:]), plain=sys.argv[1] == "plain"):
            print(json.dumps([seed, violation]), flush=True)
            if violation is not None:
                return 1
    except LifeError as error:
        sys.exit(str(error))
    return 0


def hunt(
    seeds: Iterable[int], seconds_max: int = LIFE_S_MAX, *, plain: bool = False
) -> Iterator[tuple[int, str | None]]:
    """Each life in a process of its own, one at a time. Raises LifeError."""
    context = multiprocessing.get_context("fork")
    for seed in seeds:
        outcome, answer = context.Pipe(duplex=False)
        process = context.Process(
            target=_live, args=(seed, plain, seconds_max, answer), daemon=True
        )
        process.start()
        answer.close()  # else no reader would see that the life's end is closed
        try:
            violation = outcome.recv()
        except EOFError:
            process.join()
            raise LifeError(f"seed {seed}: {_ended(process.exitcode, seconds_max)}") from None
        finally:
            outcome.close()
        process.join()
        yield seed, violation


def _live(seed: int, plain: bool, seconds_max: int, answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds_max, seconds_max + 1))
    answer.send(run_numbered(seed, plain=plain)[1].violation)


def _ended(exit_code: int | None, seconds_max: int) -> str:
    if exit_code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"the life did not end in {seconds_max} s of processor time, or was killed"
    return f"the life ended without an outcome, exit code {exit_code}"


if __name__ == "__main__":
    sys.exit(main())
