"""`python -m faults clients`: what stock Java clients see of a fault, and the table of it.

A cluster as `batonmq up` runs it, with `replicaRoutes`, its processes supervised. One producer and
one push consumer live through all trials of all faults.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from batonmq.process.clock import wall_ms
from faults.figures import median
from lab.java import JavaError, JavaProgram, missing_tools, prepared_classpath
from lab.mqctl import mqctl
from lab.stock_load import PROGRAM, SOURCES, Seen, StockLoad, program_folder
from lab.up import GROUP, ClusterProcess

TOPIC: Final = "StockClients"
GO_ON: Final = 600
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ClientFault:
    """`strike` does it to a whole cluster; the folder is a home for `mqctl`."""

    name: str
    title: str
    strike: Callable[[ClusterProcess, Path], None]


def _switch(cluster: ClusterProcess, home: Path) -> None:
    other = str(cluster.slaves()[0]["id"])
    where = {"CONTROLLER_ADDR": ";".join(cluster.controllers)}
    done = mqctl("electMaster", "-bn", GROUP, "-b", other, home=home, env=where)
    assert done.code == 0, done


def _kill(cluster: ClusterProcess, _: Path) -> None:
    cluster.kill(cluster.master())


def _hang(cluster: ClusterProcess, _: Path) -> None:
    cluster.kill(cluster.master(), signal.SIGSTOP)


def _stop(cluster: ClusterProcess, _: Path) -> None:
    cluster.kill(cluster.master(), signal.SIGTERM)


CLIENT_FAULTS: Final = (
    ClientFault("switch", "planned switch, `mqctl electMaster`", _switch),
    ClientFault("kill", "kill -9 of the master", _kill),
    ClientFault("hang", "the master hangs (SIGSTOP)", _hang),
    ClientFault("stop", "the master is stopped (SIGTERM), as in a rolling restart", _stop),
)
CLIENT_FAULTS_BY_NAME: Final = {fault.name: fault for fault in CLIENT_FAULTS}


def run_clients(
    faults: Sequence[ClientFault],
    *,
    trials: int,
    replicas: int,
    groups: int,
    replica_routes: bool,
    folder: Path,
    progress: Progress,
) -> int:
    """The exit code: 1 if an acknowledged message did not come, or if this machine lacks Java."""
    if lacks := missing_tools():
        progress(f"stock clients are left out: this machine lacks {' and '.join(lacks)}")
        return 1
    seen: dict[str, list[Seen]] = {fault.name: [] for fault in faults}
    routes = {"namesrv": {"replicaRoutes": replica_routes}}
    with (
        ClusterProcess(
            folder / "cluster", replicas=replicas, groups=groups, overrides=routes, respawn=True
        ) as cluster,
        ExitStack() as stack,
    ):
        cluster.wait_in_sync(replicas)
        load = _started_load(stack, folder, cluster.name_servers)
        load.go_on()
        for fault in [fault for _ in range(trials) for fault in faults]:
            began_ms = wall_ms()
            fault.strike(cluster, folder)
            load.go_on(GO_ON)
            cluster.wait_in_sync(replicas)
            seen[fault.name].append(load.since(began_ms))
            progress(f"  {fault.name}: {seen[fault.name][-1]}")
        try:
            twice = load.finish()
        except JavaError as error:
            progress(f"LOST: {error}")
            return 1
    progress(_table(faults, seen))
    progress(f"every acknowledged message came, {twice} of them more than once")
    return 0


def _started_load(stack: ExitStack, folder: Path, name_servers: str) -> StockLoad:
    classpath = prepared_classpath(SOURCES)
    producer, consumer = (
        stack.enter_context(
            JavaProgram(
                classpath,
                program_folder(folder, role),
                PROGRAM,
                *StockLoad.arguments(name_servers, TOPIC, role),
            )
        )
        for role in ("produce", "consume")
    )
    return StockLoad(producer, consumer)


def _table(faults: Sequence[ClientFault], seen: dict[str, list[Seen]]) -> str:
    lines = [
        "| fault | longest time without an ack: median, most | failed sends: median, most"
        " | longest time without a message: median, most | trials |",
        "|---|---|---|---|---|",
    ]
    for fault in faults:
        trials = seen[fault.name]
        if not trials:
            continue
        acks = [one.ack_gap_ms / 1000 for one in trials]
        failed = [float(one.failed) for one in trials]
        messages = [one.message_gap_ms / 1000 for one in trials]
        lines.append(
            f"| {fault.title} | {median(acks):.2f} s, {max(acks):.2f} s"
            f" | {median(failed):.0f}, {max(failed):.0f}"
            f" | {median(messages):.2f} s, {max(messages):.2f} s | {len(trials)} |"
        )
    return "\n".join(lines)
