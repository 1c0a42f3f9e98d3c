"""The launcher's side of `runtime/fork_server`: asks it for servers, and waits for their end."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from batonmq.runtime.fork_server import Start, end_with_parent, take_orphans_in

ANSWER_BYTES_MAX: Final = 32
LOADED: Final = ("batonmq.namesrv.main", "batonmq.broker.service", "batonmq.broker.main")


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
        # The descriptor stays readable once its process has ended.
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self._ended.set_result(os.waitstatus_to_exitcode(status))


class ForkServer:
    """Starts servers. The process behind it is started again if it has ended: no server ends with
    it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._one_at_a_time = asyncio.Lock()

    def load(self) -> None:
        """Begins to load the servers' code, if that has not begun: the first `start` waits less."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        take_orphans_in()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "batonmq.runtime.fork_server", *LOADED],
                stdin=theirs.fileno(),
                preexec_fn=_apart,
                # gRPC's C core reads its variable as it is loaded; a fork has one thread.
                env={"GRPC_VERBOSITY": "NONE"} | os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )

    async def start(
        self,
        argv: Sequence[str],
        log: Path,
        environ: Mapping[str, str],
        listeners: Sequence[socket.socket],
    ) -> ServerProcess:
        """`argv` as for a start by hand: `python -P -m MODULE …`. It accepts from `listeners`.
        Raises OSError if there can be no further process, or its code cannot be loaded."""
        start = Start(argv[3], list(argv), str(log), dict(environ), os.getpid())
        async with self._one_at_a_time:
            self.load()
            pid = await asyncio.to_thread(self._ask, msgspec.json.encode(start), listeners)
        if not pid:
            raise OSError(errno.EAGAIN, "the kernel refuses another process")
        return ServerProcess(pid)

    def _ask(self, request: bytes, listeners: Sequence[socket.socket]) -> int:
        assert self._channel is not None
        try:
            socket.send_fds(self._channel, [request], [sock.fileno() for sock in listeners])
            answer = self._channel.recv(ANSWER_BYTES_MAX)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if not answer:
            raise OSError(errno.ESRCH, "the process that loads the servers has ended")
        return int(answer)

    def close(self) -> None:
        """Ends the process behind it; the servers live."""
        if self._channel is not None and self._process is not None:
            self._channel.close()
            self._process.wait()


def _apart() -> None:
    end_with_parent()
    os.setsid()
