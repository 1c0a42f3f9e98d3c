"""`python -m lab.faults clients`: what stock Java clients see of a fault, and the tables of it.

A cluster as `batonmq up` runs it, its processes supervised. One program with the senders and one
with the consumers live through all trials of all faults.

With `--host-gone` the host of the master is gone: kill -9, and from then on no packet to or from
its address arrives, so nothing answers or refuses. No supervisor helps then. Each node, and the
clients, have a network namespace of their own.
"""

import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from batonmq.runtime.clock import wall_ms
from lab.cluster.cluster import GROUP, Sections
from lab.cluster.frames import OK
from lab.cluster.held import HOSTS, PROBE_HOST, HeldCluster
from lab.cluster.java import JavaError, JavaProgram, missing_tools, prepared_classpath
from lab.cluster.network import Namespaces, why_not
from lab.cluster.network_commands import between
from lab.cluster.stock_load import CONSUMERS, POLL_S, SENDERS, GivenTotals, Seen, StockLoad
from lab.cluster.up import ClusterProcess

TOPIC: Final = "StockClients"
GO_ON: Final = 600
KINDS_GO_ON: Final = 200
REPLICAS: Final = 3
Progress = Callable[[str], None]
Broker = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClientFault:
    """`strike` does it to a broker of a whole cluster, to `victims` one after the other."""

    name: str
    title: str
    strike: Callable[[ClusterProcess, Broker], object]
    victims: Callable[[ClusterProcess], list[Broker]] = lambda cluster: [cluster.master()]


def _switch(cluster: ClusterProcess, heir: Broker) -> None:
    reply = cluster.elect(heir["address"])
    assert reply.code == OK, reply


def _sends(number: signal.Signals) -> Callable[[ClusterProcess, Broker], object]:
    return lambda cluster, broker: cluster.kill(broker, number)


def _members(cluster: ClusterProcess) -> list[Broker]:
    return [broker for broker in cluster.brokers if broker["name"] == GROUP]


CLIENT_FAULTS: Final = (
    ClientFault(
        "switch",
        "planned switch, as `mqctl electMaster`",
        _switch,
        lambda cluster: cluster.slaves()[:1],
    ),
    ClientFault("kill", "kill -9 of the master", _sends(signal.SIGKILL)),
    ClientFault("hang", "the master hangs (SIGSTOP)", _sends(signal.SIGSTOP)),
    ClientFault(
        "stop", "the master is stopped (SIGTERM), as in a rolling restart", _sends(signal.SIGTERM)
    ),
    ClientFault("rolling", "SIGTERM of each broker in turn", _sends(signal.SIGTERM), _members),
)
CLIENT_FAULTS_BY_NAME: Final = {fault.name: fault for fault in CLIENT_FAULTS}


@dataclass(frozen=True, slots=True)
class ClientRun:
    """The cluster, and who lives through the faults. `kinds`: of senders and consumers every kind,
    with a thread each, instead of one sender with four threads and a push consumer."""

    trials: int
    replica_routes: bool
    kinds: bool
    folder: Path
    progress: Progress

    @property
    def go_on(self) -> int:
        return KINDS_GO_ON if self.kinds else GO_ON

    @property
    def routes(self) -> Sections:
        """Settings of the name servers."""
        return {"namesrv": {"replicaRoutes": self.replica_routes}}

    def start(
        self, stack: ExitStack, name_servers: str, senders: dict[str, int] | None = None
    ) -> StockLoad:
        classpath = prepared_classpath()

        def java(name: str, *arguments: str) -> JavaProgram:
            return JavaProgram(classpath, self.folder / f"java-{arguments[2]}", name, *arguments)

        if senders or not self.kinds:
            return StockLoad(java, stack, name_servers, TOPIC, senders=senders)
        senders = dict.fromkeys(SENDERS, 1)
        return StockLoad(java, stack, name_servers, TOPIC, senders=senders, consumers=CONSUMERS)


def run_clients(faults: Sequence[ClientFault], run: ClientRun) -> int:
    """The exit code: as `play`, and 1 if this machine lacks Java."""
    if lacks := missing_tools():
        run.progress(f"stock clients are left out: this machine lacks {' and '.join(lacks)}")
        return 1
    with (
        ClusterProcess(run.folder / "cluster", overrides=run.routes, respawn=True) as cluster,
        ExitStack() as stack,
    ):
        cluster.wait_in_sync(REPLICAS)
        load = run.start(stack, cluster.name_servers)

        def suffer(fault: ClientFault) -> None:
            for victim in fault.victims(cluster):
                fault.strike(cluster, victim)
                load.go_on(run.go_on)
                cluster.wait_in_sync(REPLICAS)

        return play(faults, run, load, suffer, pause_s=POLL_S)


def play(
    faults: Sequence[ClientFault],
    run: ClientRun,
    load: StockLoad,
    suffer: Callable[[ClientFault], None],
    *,
    pause_s: float = 0.0,
) -> int:
    """Every trial, `pause_s` before each, and the table. The exit code: 1 if an acknowledged
    message did not come, if one came that was rolled back, or if an order was broken."""
    seen: dict[str, list[dict[str, Seen]]] = {fault.name: [] for fault in faults}
    load.go_on()
    for fault in [fault for _ in range(run.trials) for fault in faults]:
        time.sleep(pause_s)
        began_ms = wall_ms()
        suffer(fault)
        seen[fault.name].append(load.since(began_ms))
        _tell(run, fault, seen[fault.name][-1], load.reasons(began_ms))
    try:
        given = load.finish()
    except JavaError as error:
        run.progress(f"LOST: {error}")
        return 1
    run.progress(client_table(faults, seen, load.senders, load.consumers))
    return 0 if _judge(given, run.progress) else 1


def _tell(run: ClientRun, fault: ClientFault, seen: dict[str, Seen], reasons: Counter[str]) -> None:
    """One trial, as it happens."""
    figures = (f"{kind} {one.gap_ms} ms, {one.failed} failed" for kind, one in seen.items())
    run.progress(f"  {fault.name}: {'; '.join(figures)}")
    for reason, count in reasons.most_common(5):
        run.progress(f"    {count} x {reason}")


def _judge(given: dict[str, GivenTotals], progress: Progress) -> bool:
    """Whether all is as promised: all were given every acknowledged message before this."""
    for kind, one in given.items():
        progress(
            f"{kind}: every acknowledged message came, {one.twice} of them more than once;"
            f" rolled back and given: {one.rolled_back}"
            + (f"; out of order: {one.out_of_order}" if kind == "orderly" else "")
        )
    return not any(
        one.rolled_back or (kind == "orderly" and one.out_of_order) for kind, one in given.items()
    )


def client_table(
    faults: Sequence[ClientFault],
    seen: dict[str, list[dict[str, Seen]]],
    senders: Sequence[str],
    consumers: Sequence[str],
) -> str:
    """A row for each fault and kind of client, to be pasted."""
    lines = [
        "| fault | client | longest time without an ack or a message: median, most"
        " | failed sends: median, most | trials |",
        "|---|---|---|---|---|",
    ]
    for fault in faults:
        trials = seen[fault.name]
        for kind in (*senders, *consumers) if trials else ():
            gaps = [one[kind].gap_ms / 1000 for one in trials]
            failed = [float(one[kind].failed) for one in trials]
            failures = f"{median(failed):.0f}, {max(failed):.0f}" if kind in senders else "-"
            lines.append(
                f"| {fault.title} | {kind} | {median(gaps):.2f} s, {max(gaps):.2f} s"
                f" | {failures} | {len(trials)} |"
            )
    return "\n".join(lines)


GONE_SENDERS: Final = {"sync": 2, "avoiding": 2}
GONE: Final = ClientFault("gone", "the host of the master is gone", lambda *_: None)


def run_host_gone(run: ClientRun) -> int:
    """The exit code: 1 if an acknowledged message did not come, or if this machine lacks what it
    takes."""
    if lacks := why_not() or " and ".join(missing_tools()):
        run.progress(f"the row is left out: {lacks}")
        return 1
    network = Namespaces(HOSTS)
    with ExitStack() as stack:
        network.open()
        stack.callback(network.close)
        cluster = HeldCluster(run.folder / "cluster", network, run.routes)
        stack.callback(cluster.stop)
        stack.enter_context(network.inside(PROBE_HOST))
        cluster.start()
        load = run.start(stack, cluster.name_servers, GONE_SENDERS)

        def suffer(_: ClientFault) -> None:
            _host_goes(cluster, network)
            load.go_on(run.go_on)
            network.heal()
            cluster.launch_dead()
            cluster.wait_whole()

        return play((GONE,), run, load, suffer)


def _host_goes(cluster: HeldCluster, network: Namespaces) -> None:
    master = cluster.master()
    others = [network.address[host] for host in HOSTS if host != master.name]
    network.cut(between([network.address[master.name]], others))
    master.kill()
