"""The launcher's side of `process/fork_server`: asks it for servers, and waits for their end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from batonmq.process.fork_server import Start, end_with_parent, take_orphans_in

LOADED: Final = ("batonmq.broker.main", "batonmq.broker.service", "batonmq.namesrv.main")


class ServerProcess:
    """A server that was forked for us: our child. Needs a running loop."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        """Its exit code, or the negative number of the signal that ended it."""
        return await asyncio.shield(self._ended)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self._ended.set_result(os.waitstatus_to_exitcode(status))


class ForkServer:
    """Starts servers. The process behind it is started again if it has ended: no server ends with
    it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = asyncio.Lock()

    def load(self) -> None:
        """Begins to load the servers' code, if that has not begun: the first `start` waits less."""
        if self._process is not None and self._process.poll() is None:
            return
        take_orphans_in()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "batonmq.process.fork_server", *LOADED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=_apart,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a fork has one thread
        )

    async def start(
        self, argv: Sequence[str], log: Path, environ: Mapping[str, str]
    ) -> ServerProcess:
        """`argv` as for a start by hand: `python -P -m MODULE …`. Raises OSError if there can be
        no further process, or its code cannot be loaded."""
        start = Start(argv[3], list(argv), str(log), dict(environ), os.getpid())
        async with self._one_at_a_time:
            self.load()
            pid = await asyncio.to_thread(self._ask, msgspec.json.encode(start))
        if not pid:
            raise OSError(errno.EAGAIN, "the kernel refuses another process")
        return ServerProcess(pid)

    def _ask(self, request: bytes) -> int:
        assert self._process is not None
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(request + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise OSError(errno.ESRCH, "the process that loads the servers has ended")
        return int(answer)

    def close(self) -> None:
        """Ends the process behind it; the servers live."""
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()


def _apart() -> None:
    end_with_parent()
    os.setsid()
