"""Child processes that end with this one, their logs and ports, and waiting for events.

Nothing is imported of what is measured. Independent of batonmq.
"""

import asyncio
import contextlib
import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

ROOT: Final = Path(__file__).resolve().parents[2]
HOST: Final = "127.0.0.1"
PR_SET_PDEATHSIG: Final = 1
STOP_GRACE_S: Final = 15.0
POLL_S: Final = 0.01
POLL_MAX_S: Final = 0.1
READY_S: Final = 60.0
PORTS: Final = [area + row for area in range(11_000, 29_000, 2_000) for row in (0, 10, 20, 60)]
"""Base ports: clusters of up to nine brokers at two of them have no port in common. They end below
the range from which the kernel takes the source ports of connections: a port that is free when a
cluster starts must still be free when one of its brokers restarts."""
CLAIM: Final = 9
"""The port `base + CLAIM`, which no cluster uses, is bound by the process that uses the base."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


class NotInTime(RuntimeError):
    """Something awaited did not happen in time; the text names it."""


def wait_for(
    what: str,
    found: Callable[[], T | None],
    limit_s: float = READY_S,
    diagnostics: Callable[[], str] = lambda: "",
) -> T:
    """Polls until `found()` is true, and returns it. Raises NotInTime with `what` and
    `diagnostics()`."""
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < limit_s:
        result = found()
        if result:
            return result
        # Longer and longer: polling takes the processor from the process that is waited for.
        time.sleep(min(POLL_MAX_S, max(POLL_S, waited_s / 50)))
    raise NotInTime(f"not within {limit_s:.0f} s: {what}\n{diagnostics()}".rstrip())


def _end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, number)


def spawn(
    argv: Sequence[str],
    log: Path,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    end_signal: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Starts a process in its own session, so that ctrl-C reaches only this one. The kernel sends
    it `end_signal` when this process ends."""
    with log.open("ab") as output:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env=None if env is None else dict(env),
            start_new_session=True,
            preexec_fn=partial(_end_with_parent, end_signal),
        )


def spawn_talking(
    argv: Sequence[str], log: Path, *, cwd: Path | None = None
) -> subprocess.Popen[str]:
    """As `spawn`, with pipes to its standard input and output (text, one line each)."""
    with log.open("ab") as errors:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=cwd,
            text=True,
            bufsize=1,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )


class Helper:
    """A Python module as a process that works until its input ends, then prints one JSON line."""

    def __init__(self, module: str, *arguments: str, log: Path) -> None:
        self._module = module
        self._log = log
        self._process = spawn_talking([sys.executable, "-m", module, *arguments], log)

    def wait_ready(self) -> None:
        """Returns when it has printed `ready`. Raises RuntimeError if it prints anything else."""
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"{self._module} did not start, see {self._log}")

    def finish(self) -> dict[str, Any]:
        """Ends it; what it printed. Raises RuntimeError if it failed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            text = self._process.stdout.read()
            code = self._process.wait(STOP_GRACE_S)
        finally:
            self.kill()
        if code or not text:
            raise RuntimeError(f"{self._module} ended with {code}, see {self._log}")
        result: dict[str, Any] = json.loads(text)
        return result

    def kill(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process.kill()
        self._process.wait()


def stop_all(
    processes: Iterable[subprocess.Popen[bytes] | subprocess.Popen[str]],
    grace_s: float = STOP_GRACE_S,
) -> None:
    """SIGTERM to all of them, SIGKILL after `grace_s`; returns when all have been reaped."""
    living = [process for process in processes if process.poll() is None]
    for process in living:
        process.terminate()
    deadline = time.monotonic() + grace_s
    for process in living:
        try:
            process.wait(max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tail(path: Path, size: int = 1500) -> str:
    """The end of a log, for a report of what failed."""
    try:
        return path.read_bytes()[-size:].decode(errors="replace")
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def input_ended() -> asyncio.Event:
    """Set when the standard input of this process has ended. To be called inside the loop."""
    ended = asyncio.Event()

    def read() -> None:
        if not sys.stdin.readline():
            ended.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), read)
    return ended


def ports_of(base: int, brokers: int) -> Iterator[int]:
    """Every port of a cluster with this base (see `batonmq.launcher.layout`)."""
    for i in range(3):
        yield from (base + 100 * i + step for step in (0, 2, 3, 4))
    for j in range(brokers):
        yield from (base + 1035 + 100 * j + step for step in (-2, 0, 1))


_claimed: list[int] = []


def free_base_port(brokers: int) -> int:
    """A base port whose whole range is free. No other process gets that base until this one ends,
    so the ports also stay free while a server of the cluster is down."""
    for base in (*_claimed, *PORTS):
        if not all(map(is_free, ports_of(base, brokers))):
            continue
        if base in _claimed:
            return base
        if claims(base + CLAIM):
            _claimed.append(base)
            return base
    raise RuntimeError(f"no free range of ports in {PORTS}")


def claims(port: int) -> bool:
    """Binds that port until this process ends, unless it is taken."""
    claim = socket.socket()
    try:
        claim.bind((HOST, port))
    except OSError:
        claim.close()
        return False
    claim.detach()  # open until this process ends
    return True


def is_free(port: int) -> bool:
    """Whether a server could listen there."""
    with contextlib.closing(socket.socket()) as attempt:
        # As servers do: else closed connections of earlier ones block a port for a minute.
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((HOST, port))
        except OSError:
            return False
    return True
