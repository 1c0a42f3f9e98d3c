"""Which test each process of pytest runs, and its stacks, as files of a folder.

The runner makes the folder and names it in the environment. A process writes `PID.test` while a
test runs, and at SIGUSR1 its stacks into `PID.stacks`. pytest may have several (`-n`).
"""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDER = "BATONMQ_RUNNING_TESTS"
STACKS_S = 20.0
"""How long a process gets to begin with its stacks."""


def show_stacks_on_demand() -> None:
    """In a process of pytest, once; without a runner nothing happens."""
    if folder := os.environ.get(FOLDER):
        file = os.open(Path(folder, f"{os.getpid()}.stacks"), os.O_CREAT | os.O_WRONLY)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


@contextlib.contextmanager
def noted(test: str) -> Iterator[None]:
    """While this process runs that test."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        yield
        return
    file = Path(folder, f"{os.getpid()}.test")
    whole = file.with_suffix(".new")
    whole.write_text(test)
    whole.rename(file)
    try:
        yield
    finally:
        file.unlink()


def running_tests(folder: Path) -> dict[int, str]:
    """The test of each process that runs one, by its pid."""
    found = {}
    for file in sorted(folder.glob("*.test")):
        with contextlib.suppress(FileNotFoundError):  # that test has just ended
            found[int(file.stem)] = file.read_text()
    return found


def ask_for_stacks(folder: Path, pids: list[int]) -> None:
    """Returns when each has begun to write: it writes them whole before it ends."""
    send(signal.SIGUSR1, pids)
    files = [folder / f"{pid}.stacks" for pid in pids]
    deadline = time.monotonic() + STACKS_S
    while time.monotonic() < deadline and not all(file.stat().st_size for file in files):
        time.sleep(0.02)


def stacks_of(folder: Path, pid: int) -> str:
    return (folder / f"{pid}.stacks").read_text()


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """To those that still run."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
