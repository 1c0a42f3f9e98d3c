"""A process that has loaded the servers' code and forks servers on request.

`python -P -m batonmq.runtime.fork_server MODULE…` reads requests from its standard input, a Unix
socket of whole messages (SOCK_SEQPACKET): a JSON object each, with the listening sockets for the
new process. The answer is its pid, 0 if the kernel refuses. It ends when the other side closes.
Between requests it imports the modules in order, which is most of a server's start: a cluster
starts in a third of the time.

A new process is forked twice, so that the requester becomes its parent (PR_SET_CHILD_SUBREAPER),
and this process may end earlier. It has its own session, its command line is `argv`, and it gets
SIGTERM when its parent ends.
"""

import ctypes
import fcntl
import gc
import importlib
import os
import select
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import setproctitle

from batonmq.runtime.service_manager import LISTEN_FDS, LISTEN_PID

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
MESSAGE_BYTES_MAX: Final = 1 << 20
LISTENERS_MAX: Final = 16
HIGH_FD: Final = 500  # Above every descriptor of this process, below the usual limit of 1024.
_ADOPTED_POLL_S: Final = 0.0005
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Start(msgspec.Struct, frozen=True):
    """A request. `module`: one of the loaded ones; its `main()` reads `sys.argv` and returns an
    exit code. `argv`: the whole command line, with arguments after `module`; for another
    interpreter it is executed. `log`: the file for output. `parent`: the requester's pid."""

    module: str
    argv: list[str]
    log: str
    environ: dict[str, str]
    parent: int


def take_orphans_in() -> None:
    """Makes this process the parent of orphaned descendants."""
    if _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_with_parent() -> None:
    """Lets the kernel send SIGTERM to this process when its parent ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def serve(channel: socket.socket, modules: Sequence[str]) -> Callable[[], int] | None:
    """Imports `modules` and forks for each request. Returns None when the other side closes; in
    each new process the function that it must run."""
    to_load = list(reversed(modules))
    while True:
        if to_load and not select.select([channel], [], [], 0)[0]:
            _load(to_load.pop())
            continue
        message, listeners, _, _ = socket.recv_fds(channel, MESSAGE_BYTES_MAX, LISTENERS_MAX)
        if not message:
            return None
        start = msgspec.json.decode(message, type=Start)
        while start.module in to_load:
            _load(to_load.pop())
        reading, writing = os.pipe()
        try:
            between = os.fork()
        except OSError as exc:
            print(f"fork server: {start.module}: {exc.strerror}", file=sys.stderr)
            between = -1
        if between == 0:
            if _fork_again(writing) == 0:
                channel.detach()  # else it would close descriptor 0, now another file
                return _become(start, listeners)
            os._exit(0)
        os.close(writing)
        for fd in listeners:
            os.close(fd)
        if between > 0:
            os.waitpid(between, 0)
        with open(reading, "rb") as pipe:
            channel.send(pipe.read() or b"0")


def _load(module: str) -> None:
    importlib.import_module(module)
    gc.collect()
    gc.freeze()  # pages that no collection touches stay shared


def _fork_again(writing: int) -> int:
    """As `os.fork`; the parent writes the pid, or nothing if fork fails."""
    try:
        pid = os.fork()
    except OSError:
        return -1
    if pid:
        os.write(writing, b"%d" % pid)
    return pid


def _become(start: Start, listeners: Sequence[int]) -> Callable[[], int]:
    """Turns this fork into the new server; returns its main function."""
    os.setsid()
    while os.getppid() != start.parent:
        if os.getppid() == 1:
            os._exit(1)  # the requester has ended
        time.sleep(_ADOPTED_POLL_S)
    end_with_parent()
    if os.getppid() != start.parent:
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH_FD) for fd in (nothing, log, log, *listeners)]
    for to, fd in enumerate(kept):  # 0, 1, 2, and from 3 as LISTEN_FDS has it
        os.dup2(fd, to)
    os.closerange(len(kept), HIGH_FD + len(kept))
    setproctitle.setproctitle(shlex.join(start.argv))  # before the environment moves away from argv
    os.environ.clear()
    os.environ.update(start.environ)
    os.environ |= {LISTEN_FDS: str(len(listeners)), LISTEN_PID: str(os.getpid())}
    if start.argv[0] != sys.executable:  # another installation: run its own code
        os.execve(start.argv[0], start.argv, dict(os.environ))
    sys.argv = [start.module, *start.argv[start.argv.index(start.module) + 1 :]]
    main: Callable[[], int] = importlib.import_module(start.module).main
    return main


def main(modules: Sequence[str]) -> int:
    """Returns the exit code of this process and of each fork."""
    run = serve(socket.socket(fileno=0), modules)
    return 0 if run is None else run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
