"""`python -m lab.faults clients --host-gone`: the host of the master is gone, as stock clients see
it.

kill -9, and from then on no packet to or from its address arrives: none answers, and none
refuses. No supervisor helps here. Each node has a network namespace of its own, the clients, too.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from batonmq.runtime.clock import wall_ms
from lab.cluster.held import HOSTS, PROBE_HOST, HeldCluster
from lab.cluster.java import JavaError, missing_tools
from lab.cluster.network import Namespaces, why_not
from lab.cluster.network_commands import between
from lab.cluster.stock_load import Seen
from lab.faults.clients import ClientFault, ClientRun, client_table, tell

GONE_SENDERS: Final = {"sync": 2, "avoiding": 2}
GONE: Final = ClientFault("gone", "the host of the master is gone", lambda *_: None)


def run_host_gone(run: ClientRun) -> int:
    """The exit code: 1 if an acknowledged message did not come, or if this machine lacks what it
    takes."""
    if lacks := why_not() or " and ".join(missing_tools()):
        run.progress(f"the row is left out: {lacks}")
        return 1
    seen: list[dict[str, Seen]] = []
    network = Namespaces(HOSTS)
    with ExitStack() as stack:
        network.open()
        stack.callback(network.close)
        routes = {"namesrv": {"replicaRoutes": run.replica_routes}}
        cluster = HeldCluster(run.folder / "cluster", network, routes)
        stack.callback(cluster.stop)
        stack.enter_context(network.inside(PROBE_HOST))
        cluster.start()
        load = run.start(stack, cluster.name_servers, GONE_SENDERS)
        load.go_on()
        for _ in range(run.trials):
            began_ms = wall_ms()
            _host_goes(cluster, network)
            load.go_on(run.go_on)
            network.heal()
            cluster.launch_dead()
            cluster.wait_whole()
            seen.append(load.since(began_ms))
            tell(run, GONE, seen[-1], load.reasons(began_ms))
        try:
            given = load.finish()
        except JavaError as error:
            run.progress(f"LOST: {error}")
            return 1
    run.progress(client_table((GONE,), {GONE.name: seen}, load.senders, load.consumers))
    run.progress(f"every acknowledged message came: {given}")
    return 0


def _host_goes(cluster: HeldCluster, network: Namespaces) -> None:
    group = cluster.wait_whole()
    assert group.master is not None
    master = cluster.brokers[group.master]
    others = [network.address[host] for host in HOSTS if host != master.name]
    network.cut(between([network.address[master.name]], others))
    master.kill()
