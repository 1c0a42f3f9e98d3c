"""kill -9 at every disk call of an operation, one call after the other, each in a child of its own.

`walk_kills(prepare, operation, check)`: for n = 0, 1, … a folder is prepared, a child carries the
operation out and is killed at its n-th call that changes the disk, and `check` looks at what is
left: usually it does the operation again, without faults. The walk ends with the first n at which
the operation came to its end.
"""

import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from lab.cluster.fault_points import SpoiledDiskCalls, parse_disk_faults

KILLS = {"before": "kill before changes *", "during": "kill during pwrite *"}


def in_child(operation: Callable[[], object], rules: str = "") -> int:
    """Its exit status as `os.waitpid` gives it: 9 if it was killed, 256 if it raised."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        SpoiledDiskCalls(parse_disk_faults(rules))
        operation()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def walk_kills(
    prepare: Callable[[int], Path],
    operation: Callable[[Path], object],
    check: Callable[[Path], object],
    moment: Literal["before", "during"] = "before",
) -> int:
    """The number of calls at which it was killed. Fails if the operation raises in the child."""
    for number in itertools.count():
        folder = prepare(number)
        status = in_child(partial(operation, folder), f"{KILLS[moment]} after {number}")
        if status == 0:
            return number
        assert status == signal.SIGKILL, f"kill number {number}: status {status}"
        try:
            check(folder)
        except BaseException as error:
            error.add_note(f"killed {moment} call number {number}; left: {_files(folder)}")
            raise
    raise AssertionError("endless")


def _files(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}
