"""`python -m lab.faults clients --host-gone`: the host of the master is gone, as stock clients see
it.

kill -9, and from then on no packet to or from its address arrives: none answers, and none
refuses. No supervisor helps here. Each node has a network namespace of its own, the clients, too.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from lab.cluster.held import HOSTS, PROBE_HOST, HeldCluster
from lab.cluster.java import missing_tools
from lab.cluster.network import Namespaces, why_not
from lab.cluster.network_commands import between
from lab.faults.clients import ClientFault, ClientRun, play

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
