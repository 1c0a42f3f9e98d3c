"""A stock producer with every setting at its default, while the master changes.

How long no send of it is acknowledged, and how many sends fail; a stock consumer reads along and
must be given every acknowledged message (`lab.cluster.stock_load`). A killed broker is started
again at once: ours by `batonmq up`, Java's by this program, as a service manager would.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from batonmq.runtime.clock import wall_ms
from lab.bench.report import Mark, ReportRow
from lab.bench.run import BenchPart, BenchRun, progress
from lab.bench.side import ClusterSide
from lab.cluster.java import JavaProgram, prepared_classpath
from lab.cluster.processes import wait_for
from lab.cluster.stock_load import POLL_S, StockLoad

TOPIC: Final = "StockClients"
FULL_S: Final = 120.0


def rows() -> list[ReportRow]:
    return [
        ReportRow("client_switch", "planned switch: a stock producer without an ack", "s", "less"),
        ReportRow("client_switch_failed", "  its failed sends", "sends", "less", Mark(limit=0)),
        ReportRow(
            "client_kill", "kill -9, started again: a stock producer without an ack", "s", "less"
        ),
        ReportRow("client_kill_failed", "  its failed sends", "sends", "less"),
    ]


def _kill(side: ClusterSide) -> None:
    master = side.master_address()
    side.kill_broker(master)
    side.start_broker(master)


FAULTS: Final[dict[str, Callable[[ClusterSide], None]]] = {
    "client_switch": lambda side: side.switch_master(),
    "client_kill": _kill,
}


def measure(run: BenchRun, table: dict[str, ReportRow]) -> None:
    classpath = prepared_classpath()
    for name in run.sides:
        trials = run.count(3, 1)
        with run.side(name, supervised=True) as side, ExitStack() as stack:
            progress(f"clients: {name}, {trials} trials")
            side.wait_whole()

            def java(program: str, *arguments: str, side: ClusterSide = side) -> JavaProgram:
                return JavaProgram(
                    classpath, side.folder / f"java-{arguments[2]}", program, *arguments
                )

            load = StockLoad(java, stack, side.name_servers, TOPIC)
            load.go_on()
            for _ in range(trials):
                for key, strike in FAULTS.items():
                    _trial(side, load, strike, table, key)
            given = load.finish()
            run.note("clients", name, {kind: one.twice for kind, one in given.items()})


def _trial(
    side: ClusterSide,
    load: StockLoad,
    strike: Callable[[ClusterSide], None],
    table: dict[str, ReportRow],
    key: str,
) -> None:
    time.sleep(POLL_S)
    began_ms = wall_ms()
    strike(side)
    load.go_on()
    wait_for("a full and level set", side.full, FULL_S)
    seen = load.since(began_ms)["sync"]
    table[key].samples(side.name).append(seen.gap_ms / 1000)
    table[f"{key}_failed"].samples(side.name).append(seen.failed)
    progress(f"  {key}: {seen.gap_ms} ms, {seen.failed} failed")


PART = BenchPart(
    "clients", "a stock producer while the master changes", rows, measure, needs_programs=True
)
