"""The whole cluster in its world, run step by step and checked."""

import asyncio
import contextlib
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.sim.ambient import ambient
from lab.sim.decisions import fault_of_vote
from lab.sim.hosts import BROKERS, CONTROLLERS, BrokerHost, ControllerHost, Host
from lab.sim.loop import process_here
from lab.sim.master_duties import Standing
from lab.sim.promises import Promises
from lab.sim.settings import Settings
from lab.sim.sightings import Sightings
from lab.sim.world import Tell, Violation, World

_WATCH_S = 0.05
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Where files of a life lie; None: in the machine's folder for such."""


class SimCluster(World):
    """A world with the hosts of one cluster."""

    def __init__(self, seed: int, settings: Settings, root: Path, tell: Tell | None = None) -> None:
        super().__init__(seed, settings, root, tell)
        self.brokers: dict[int, BrokerHost] = {}
        self.promises = Promises(self, self.brokers)
        self.brokers.update({n: BrokerHost(self, n, self.promises) for n in BROKERS})
        self.controllers = {n: ControllerHost(self, n, self.promises) for n in CONTROLLERS}
        sightings = self.promises.sightings = Sightings(
            self.brokers.values(), self.controllers.values(), lambda: self.now_s, self.violate
        )
        self.old_volumes: Sequence[Path] = ()
        """Disks of the brokers of an earlier cluster, in lives that meet them."""
        self.checks: list[Callable[[], None]] = [
            self._check_cores,
            self.promises.check_r1,
            self.promises.lineage.check,
            sightings.check,
            Standing(
                self, self.brokers.values(), lambda: self.promises.group, self.promises.host_of
            ).check,
        ]
        self.network.raft_watch = self._watch_vote

    def _watch_vote(self, sender: str, receiver: str, message: Any) -> None:
        fault = fault_of_vote(self.disks.host(sender.rpartition(":")[0]), message, receiver)
        if fault:
            self.violate(fault)

    @property
    def hosts(self) -> list[Host]:
        return [*self.brokers.values(), *self.controllers.values()]

    @property
    def master(self) -> BrokerHost | None:
        """The broker that takes writes; the first one while there are two."""
        return next((host for host in self.brokers.values() if host.is_open), None)

    def check(self) -> None:
        """Raises the first violation, or what a callback raised."""
        if self.violations:
            raise self.violations[0]
        if self.loop.errors:
            error = self.loop.errors[0]
            if isinstance(error, BaseException):
                raise error
            raise Violation(error)
        for check in self.checks:
            check()
        if self.violations:
            raise self.violations[0]

    def _check_cores(self) -> None:
        for host in self.brokers.values():
            ha, manager = host.ha, host.manager
            if ha is None or manager is None:
                continue
            if ha._master is not None:
                ha._master.core.check_invariants()
            if ha._slave is not None:
                ha._slave.core.check_invariants()
            if manager._state is not None:
                manager._state.check_invariants()

    def run(self, seconds: float) -> None:
        """Lets `seconds` pass; raises Violation or what the code raised."""
        end_s = self.loop.time() + seconds

        async def watch() -> None:
            while self.loop.time() < end_s:
                await asyncio.sleep(min(_WATCH_S, end_s - self.loop.time() + 1e-4))
                self.check()

        task = self.loop.create_task(watch())
        try:
            self.loop.run_until_complete(task)
        except RuntimeError:
            self.check()
            raise
        self.check()

    def until(
        self,
        done: Callable[[], object],
        seconds: float,
        what: str | Callable[[], str] = "the group does not become so",
        step_s: float = 0.25,
    ) -> None:
        """Lets time pass until `done()`. Raises Violation with `what` after so many seconds."""
        end_s = self.now_s + seconds
        while not done():
            if self.now_s >= end_s:
                text = what if isinstance(what, str) else what()
                raise Violation(f"liveness: {text} ({seconds:g} s were not enough)")
            self.run(step_s)

    def close(self) -> None:
        self.network.muted = True  # no process is left to notice the ends
        for host in self.hosts:
            host.kill()
        self.loop.finish()


class _Telling(logging.Handler):
    """Log lines of the servers, as things that happened."""

    def __init__(self, cluster: SimCluster) -> None:
        super().__init__()
        self._cluster = cluster
        self._names = {host.address: host.name for host in cluster.hosts}

    def emit(self, record: logging.LogRecord) -> None:
        process = process_here()
        host = process.host if process is not None else "world"
        name = record.name.removeprefix("batonmq.")
        self._cluster.tell(self._names.get(host, host), f"{name}: {record.getMessage()}")


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """The working folder is an empty one in memory. So paths of files, which are logged, stored and
    replicated, are the same in every run."""
    root = tempfile.mkdtemp(prefix="batonmq-sim-", dir=MEMORY)
    try:
        with contextlib.chdir(root):
            yield
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def cluster_of(
    seed: int, settings: Settings, *, tell: Tell | None = None, logs: int | None = None
) -> Iterator[SimCluster]:
    """A cluster on disks in memory, and around it nothing of the real machine. `logs`: from which
    level on lines of the servers' logs are traced, too."""
    with _own_folder():
        cluster = SimCluster(seed, settings, Path(), tell)
        with _around(cluster, logs), ambient(seed, cluster.network, cluster.clocks, cluster.disks):
            try:
                yield cluster
            finally:
                cluster.close()


@contextlib.contextmanager
def _around(cluster: SimCluster, logs: int | None) -> Iterator[None]:
    """Its loop, logs and warnings in place of those of this process."""
    handler, logger = _Telling(cluster), logging.getLogger()
    before_level, before_disabled = logger.level, logging.root.manager.disable
    if logs is None:
        logging.disable(logging.CRITICAL)
    else:
        logging.disable(logging.NOTSET)
        logger.addHandler(handler)
        logger.setLevel(logs)
    asyncio.set_event_loop(cluster.loop)
    around = warnings.catch_warnings()
    around.__enter__()
    warnings.simplefilter("ignore", RuntimeWarning)  # work that a killed process never began
    try:
        yield
    finally:
        around.__exit__(None, None, None)
        asyncio.set_event_loop(None)
        logging.disable(before_disabled)
        logger.removeHandler(handler)
        logger.setLevel(before_level)
