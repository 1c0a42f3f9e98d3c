"""A process that has loaded the servers' code and forks one for each that is asked for.

`python -P -m batonmq.process.fork_server MODULE…` imports the modules, then reads requests from
its standard input, a JSON object a line, and answers each with the pid of the new process, a line:
0 if the kernel refuses one.
It ends with its input. Importing takes longer than anything else in the start of a server, so a
cluster starts in a third of the time, and one that was killed is back at once.

A new process is no child of this one: it is forked twice, so the kernel gives it to the nearest
process above that takes orphans in (PR_SET_CHILD_SUBREAPER, see `take_orphans_in`), which is who
asked. The end of this process is thus no server's end. The new process leads a session of its own,
its command line is `argv`, and SIGTERM comes to it when its parent ends.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, TextIO

import msgspec
import setproctitle

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
_ADOPTED_POLL_S: Final = 0.0005
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Start(msgspec.Struct, frozen=True):
    """A request. `module`: one of those that were loaded, with a `main()` that returns an exit code
    and reads `sys.argv`. `argv`: the whole command line, as for a start by hand; what follows
    `module` in it are the arguments. `log`: where output goes. `parent`: the pid of who asks."""

    module: str
    argv: list[str]
    log: str
    environ: dict[str, str]
    parent: int


def take_orphans_in() -> None:
    """From now on this process is the parent of whom its descendants leave behind."""
    if _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_with_parent() -> None:
    """SIGTERM comes to this process when its parent ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def serve(requests: TextIO, answers: TextIO) -> Callable[[], int] | None:
    """Forks for each request. Returns None at the end of the input; in each new process, what is
    left to do there."""
    for line in requests:
        start = msgspec.json.decode(line, type=Start)
        reading, writing = os.pipe()
        try:
            between = os.fork()
        except OSError as exc:
            print(f"fork server: {start.module}: {exc.strerror}", file=sys.stderr)
            between = -1
        if between == 0:
            if _fork_again(writing) == 0:
                return _become(start)
            os._exit(0)
        os.close(writing)
        if between > 0:
            os.waitpid(between, 0)
        with open(reading, "rb") as pipe:
            answers.write(pipe.read().decode() or "0\n")
        answers.flush()
    return None


def _fork_again(writing: int) -> int:
    """As `os.fork`; the parent writes the pid, or nothing if there can be no further process."""
    try:
        pid = os.fork()
    except OSError:
        return -1
    if pid:
        os.write(writing, b"%d\n" % pid)
    return pid


def _become(start: Start) -> Callable[[], int]:
    """In the new process, which runs what this returns."""
    os.setsid()
    while os.getppid() != start.parent:
        if os.getppid() == 1:
            os._exit(1)  # who asked has ended
        time.sleep(_ADOPTED_POLL_S)
    end_with_parent()
    if os.getppid() != start.parent:
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for of, to in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(of, to)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    setproctitle.setproctitle(shlex.join(start.argv))  # before the environment moves away from argv
    os.environ.clear()
    os.environ.update(start.environ)
    sys.argv = [start.module, *start.argv[start.argv.index(start.module) + 1 :]]
    main: Callable[[], int] = importlib.import_module(start.module).main
    return main


def main(modules: Sequence[str]) -> int:
    """The exit code, of this process and of each that it forks."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # pages that no collection touches stay shared
    run = serve(sys.stdin, sys.stdout)
    return 0 if run is None else run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
