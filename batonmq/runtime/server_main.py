"""The main function of every server process: arguments, settings, signals, exit code.
`run_server("broker", SECTIONS, serve)` is all of a main module. Exit codes: 0 after SIGTERM or
SIGINT, 1 if the service cannot run or had to stop, 2 for bad arguments or configuration."""

import argparse
import asyncio
import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from batonmq.protocol.errors import BatonError, ConfigError
from batonmq.runtime import disk
from batonmq.runtime.clock import boot_s
from batonmq.runtime.durable_file import show_file
from batonmq.runtime.followed_files import FollowedFiles
from batonmq.runtime.log_lines import JsonFormatter, LineFormatter, LineLimit
from batonmq.runtime.metrics import Metrics, MetricsConfig
from batonmq.runtime.service_manager import manager_of_this_process
from batonmq.runtime.settings import load_settings
from batonmq.runtime.start_retry import StartRetry
from batonmq.runtime.tasks import Tasks
from batonmq.runtime.tls import Tls, TlsConfig, TlsError

log = logging.getLogger(__name__)

LOG_FORMAT: Final = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s %(message)s"
LOG_TIMES: Final = "%Y-%m-%dT%H:%M:%S"
LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
START_HOOK: Final = "BATONMQ_START_HOOK"
"""A module that a server loads first. Tests inject faults this way."""


class ServerMain:
    """The settings of a service by section, and the two ways to end it."""

    def __init__(self, name: str, sections: Mapping[str, Any]) -> None:
        self.sections = sections
        self.metrics = Metrics(sections.get("metrics", MetricsConfig()), name)
        self.tls = _tls_of(sections.get("tls", TlsConfig()))
        """Follows its files, also at SIGHUP."""
        self._stop = asyncio.Event()
        self.failure: BaseException | None = None
        self.manager = manager_of_this_process()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        if self.tls is not None:
            self.tls.watch()
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        loop.set_exception_handler(_ends_on_a_broken_invariant)

    def _reload(self) -> None:
        # Without a handler the signal would end the process.
        log.info("reload_asked files=%d", len(FollowedFiles.watched))
        for files in FollowedFiles.watched:
            files.reload_soon()

    def fail(self, exc: BaseException) -> None:
        """Stops the process as on SIGTERM, with exit code 1."""
        if self.failure is None:
            self.failure = exc
        self._stop.set()

    def serving(self) -> None:
        """Reports to the service manager that this process serves; from now on its loop is watched.
        Objects from the start are excluded from garbage collection, which saves 20 ms per scan with
        10,000 queues."""
        gc.freeze()
        self.manager.serving()

    async def stopped(self) -> None:
        """Waits, while it serves, for a signal or a failure."""
        self.serving()
        await self.stop_requested()

    async def stop_requested(self) -> None:
        """Waits for a signal or a failure before it serves."""
        await self._stop.wait()
        self.manager.stopping()


async def started(start: Coroutine[Any, Any, None], stopped: Awaitable[object]) -> bool:
    """Awaits `start`. Returns False if the process must stop first: a start may wait for disk space
    endlessly (R45)."""
    starting, stopping = asyncio.ensure_future(start), asyncio.ensure_future(stopped)
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    for task in (starting, stopping):
        task.cancel()
    await asyncio.wait((starting, stopping))
    if starting.cancelled():
        return False
    starting.result()
    return True


def _tls_of(config: TlsConfig) -> Tls | None:
    """The certificates; None if all ports are plain. Raises TlsError."""
    if not config.is_on:
        return None
    # Imported here, so that starts without TLS do not wait for it.
    from batonmq.runtime.authority import check_certificate

    return Tls(config, check_certificate)


def _ends_on_a_broken_invariant(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ends the process after a failed assertion in a callback, like kill -9. asyncio would only log
    it, and the timer that it came from would not be set again: the process would live on without
    heartbeats, in a wrong state. Other replicas take over; the next start trusts only the disk."""
    loop.default_exception_handler(context)
    broken = context.get("exception")
    if isinstance(broken, AssertionError):
        log.critical("process_ends reason=%r", f"a rule of its own does not hold: {broken}")
        os._exit(1)


Serve = Callable[[ServerMain], Awaitable[None]]


def run_server(
    name: str,
    sections: Mapping[str, type[msgspec.Struct]],
    serve: Serve,
    without_effect: Set[str] = frozenset(),
) -> int:
    """Runs one service to its end; returns the exit code. `without_effect`: as in
    `load_settings`."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("-c", "--config", required=True, type=Path, metavar="FILE")
    parser.add_argument("--pid-file", type=Path, help="where to write this process's id")
    parser.add_argument("--check", action="store_true", help="read the settings, start nothing")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="INFO")
    arguments = parser.parse_args()
    faulthandler.enable()  # a signal such as SIGBUS prints the stack
    # gRPC's C core writes a line to stderr for each closed connection.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    to_stderr = _log_to_stderr(arguments.log_level)
    try:
        loaded = load_settings(
            arguments.config, sections, environ=os.environ, without_effect=without_effect
        )
    except ConfigError as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        return 2
    except OSError as exc:
        print(f"{name}: {arguments.config}: {exc.strerror}", file=sys.stderr)
        return 2
    if arguments.check:
        return 0
    if any(getattr(section, "log_format", "") == "json" for section in loaded.values()):
        to_stderr.setFormatter(JsonFormatter(datefmt=LOG_TIMES))
    try:
        _run_start_hook(os.environ)
    except (ImportError, BatonError, OSError) as exc:
        print(f"{name}: {START_HOOK}: {exc}", file=sys.stderr)
        return 2
    pid_file = arguments.pid_file
    try:
        if pid_file is not None:
            _show_pid(pid_file)
            pid_file = None
    except OSError as exc:
        if not disk.is_short(exc):
            print(f"{name}: --pid-file {pid_file}: {exc.strerror}", file=sys.stderr)
            return 1
        # Not fatal on a full disk: the start itself waits for space.
        log.error("pid_file_not_written path=%s reason=%s", pid_file, exc.strerror)
    return uvloop.run(_run(name, loaded, serve, pid_file))


def _show_pid(path: Path) -> None:
    show_file(path, f"{os.getpid()}\n")


def _log_to_stderr(level: str) -> logging.Handler:
    to_stderr = logging.StreamHandler(sys.stderr)
    to_stderr.setFormatter(LineFormatter(LOG_FORMAT, LOG_TIMES))
    to_stderr.addFilter(LineLimit())
    logging.basicConfig(level=level, handlers=[to_stderr])
    return to_stderr


def _run_start_hook(environ: Mapping[str, str]) -> None:
    """Calls `at_start(environ)` of the module that START_HOOK names, if any."""
    if module := environ.get(START_HOOK):
        importlib.import_module(module).at_start(environ)


async def _run(name: str, sections: Mapping[str, Any], serve: Serve, pid_file: Path | None) -> int:
    """`pid_file`: one that the full disk refused; it is written once there is space."""
    try:
        main = ServerMain(name, sections)
    except TlsError as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        return 1
    keep_what_is_loaded()
    gc.callbacks.append(ShortCollections())
    log.info("server_started name=%s pid=%d", name, os.getpid())
    tasks = Tasks()
    if pid_file is not None:
        show = partial(asyncio.to_thread, _show_pid, pid_file)
        tasks.spawn(StartRetry(pid_file.parent).wait(show), "pid-file")
    try:
        await main.metrics.start()
        await serve(main)
    except (BatonError, OSError, ValueError) as exc:
        print(f"{name}: {disk.described(exc)}", file=sys.stderr)
        return 1
    finally:
        await tasks.close()
        await main.metrics.close()
        if main.tls is not None:
            main.tls.close()
        main.manager.close()
    if main.failure is not None:
        print(f"{name}: stopped: {disk.described(main.failure)}", file=sys.stderr)
        return 1
    # By this line `mqctl verdict` distinguishes a stopped process from a killed one.
    log.info("server_stopped name=%s pid=%d", name, os.getpid())
    return 0


COLLECTION_MAX_S: Final = 0.02


class ShortCollections:
    """Excludes the survivors of a garbage collection longer than COLLECTION_MAX_S from later ones.
    A collection stops the loop, and takes longer with larger tables: 160 ms with 30,000 topics. The
    survivors are mostly table entries, which reference counting still frees."""

    def __init__(self) -> None:
        self._begin_s = 0.0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._begin_s = boot_s()
        elif boot_s() - self._begin_s > COLLECTION_MAX_S:
            gc.freeze()


def keep_what_is_loaded() -> None:
    gc.collect()
    gc.freeze()
