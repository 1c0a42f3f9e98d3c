"""One group of Java brokers and brokers of ours, under name servers and controllers of one kind."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final, Self

from batonmq.launcher.layout import BrokerNode, NameServerNode, plan
from batonmq.launcher.preparation import write_configs
from lab.cluster import frames, java
from lab.cluster.cluster import OwnProcesses
from lab.cluster.connection import ask, ha_status
from lab.cluster.network import Network, placed
from lab.cluster.processes import ROOT, STOP_GRACE_S, free_base_port, spawn, stop_all
from lab.cluster.queues import first_messages
from lab.cluster.stores import log_bytes
from lab.cluster.writer import Writer, number_in, wait_acks

SMALL: Final[Mapping[str, object]] = {**java.SMALL_FILES, **java.NO_WARMING}
OURS: Final = {
    "store": {"mappedFileSizeCommitLog": java.SEGMENT},
    "ha": {"haSendHeartbeatInterval": 200},
}


def inside(network: Network | None, name: str) -> AbstractContextManager[None]:
    """What starts meanwhile is in that process's network."""
    return nullcontext() if network is None else network.inside(name)


def spawn_ours(
    network: Network | None, node: NameServerNode | BrokerNode, log: Path
) -> subprocess.Popen[bytes]:
    with inside(network, node.name):
        return spawn(node.argv, log, cwd=ROOT)


class MixedNameServers:
    """The name servers of a group with their controllers, of one kind."""

    def __init__(
        self,
        nodes: Sequence[NameServerNode],
        network: Network | None,
        java_heap: Sequence[str] | None,
    ) -> None:
        """`java_heap`: that of RocketMQ's; None: of ours."""
        self._nodes = nodes
        self._network = network
        self._java_heap = java_heap
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self._processes = list(map(self._start, self._nodes))

    def _start(self, node: NameServerNode) -> subprocess.Popen[bytes]:
        if self._java_heap is None:
            return spawn_ours(self._network, node, node.data_dir / "process.log")
        home, ports = node.data_dir / "home", [one.port for one in self._nodes]
        settings = java.name_server_settings(ports, node.index, home)
        return java.start_server(java.NAMESRV_MAIN, settings, home, self._java_heap)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def kill(self, place: int) -> None:
        """By kill -9; waits for the end."""
        self._processes[place].kill()
        self._processes[place].wait()

    def stop(self) -> None:
        stop_all(self._processes, STOP_GRACE_S if self._java_heap is None else 0.0)


class MixedGroup(OwnProcesses[int]):
    """Brokers by their place, from 0 on: a folder, a port and an id of its own, whichever kind of
    broker runs there. `java_controllers`: so many name servers of RocketMQ with its controllers,
    0 for one of ours. `java_heap`, `java_keys`: of RocketMQ's processes, and of its brokers, beside
    all-ack; small ones, for tests, unless others are given. `network`: with a host for each
    process, by its name."""

    limit_s = java.LIMIT_S
    reply_s = 1.0

    def __init__(
        self,
        folder: Path,
        places: int = 3,
        namesrv: Mapping[str, object] | None = None,
        *,
        java_controllers: int = 0,
        java_heap: Sequence[str] = java.SMALL_HEAP,
        java_keys: Mapping[str, object] = SMALL,
        network: Network | None = None,
    ) -> None:
        super().__init__()
        self.folder = folder
        self._java_heap, self._java_keys = java_heap, java_keys
        self._network = network
        protocol = {"controllerProtocol": "remoting"} if java_controllers else {}
        self._layout = plan(
            folder / "data",
            controllers=java_controllers or 1,
            replicas=places,
            base_port=free_base_port(places),
            overrides={**OURS, "namesrv": dict(namesrv or {}), "replicas": protocol},
        )
        if network is not None:
            self._layout = placed(self._layout, network)
        nodes = self._layout.name_servers
        self._name_servers = MixedNameServers(
            nodes, network, java_heap if java_controllers else None
        )

    def __enter__(self) -> Self:
        write_configs(self._layout)
        self._name_servers.start()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__()
        self._name_servers.stop()

    @property
    def name_server(self) -> str:
        return self._layout.name_servers[0].address

    @property
    def name_servers(self) -> str:
        return self._layout.name_server_addresses

    def name_server_pids(self) -> list[int]:
        return self._name_servers.pids

    @property
    def controllers(self) -> list[str]:
        return [node.controller_address for node in self._layout.name_servers]

    def node(self, place: int) -> BrokerNode:
        return self._layout.brokers[place]

    def address(self, place: int) -> str:
        return self.node(place).address

    @property
    def addresses(self) -> list[str]:
        """Of the brokers that run."""
        return [self.address(place) for place in sorted(self._processes)]

    def store(self, place: int) -> Path:
        return self.node(place).data_dir

    # Processes.

    def start_ours(self, place: int) -> None:
        node = self.node(place)
        self._processes[place] = spawn_ours(self._network, node, node.data_dir / "process.log")

    def start_java(self, place: int, **more: object) -> None:
        """With Java's defaults but for all-ack, `java_keys` and `more`."""
        node = self.node(place)
        settings = java.broker_settings(
            node.host, node.port, self.name_servers, node.data_dir, ";".join(self.controllers)
        )
        with inside(self._network, node.name):
            self._processes[place] = java.start_server(
                java.BROKER_MAIN,
                {**settings, **self._java_keys, **more},
                node.data_dir / "home",
                self._java_heap,
            )

    def kill_controller(self) -> None:
        """kill -9 of the leading one."""
        self._name_servers.kill(self.controllers.index(self.controller))

    def restart_controllers(self) -> None:
        """kill -9 of all, then a new start of each."""
        for place in range(len(self.controllers)):
            self._name_servers.kill(place)
        self._name_servers.start()

    # What the group is.

    def master(self) -> int | None:
        """The place of the master that the controller records."""
        state = self.group_state() or {}
        address = state.get("masterAddress")
        places = {node.address: place for place, node in enumerate(self._layout.brokers)}
        return places.get(address) if address else None

    def in_sync(self) -> set[int]:
        """The places of the SyncStateSet."""
        replicas = (self.group_state() or {}).get("inSyncReplicas", [])
        places = {node.address: place for place, node in enumerate(self._layout.brokers)}
        return {places[replica["brokerAddress"]] for replica in replicas}

    def broker_id(self, place: int) -> int:
        return self.id_of(self.address(place))

    def is_open(self, place: int) -> bool:
        """Whether that broker acts as master."""
        status = ha_status(self.address(place), timeout_s=1.0)
        return status is not None and status.master

    def is_level(self, slaves: int) -> bool:
        """Whether the master has so many slaves with its whole log in its set."""
        master = self.master()
        if master is None:
            return False
        status = ha_status(self.address(master), timeout_s=1.0)
        return status is not None and status.is_level(slaves)

    def epochs(self, place: int) -> list[tuple[int, int]]:
        """(epoch, start) of each epoch of that broker's log."""
        reply = ask(self.address(place), frames.EPOCHS)
        return [(entry["epoch"], entry["startOffset"]) for entry in reply.json["epochList"]]

    # Waiting.

    def wait_in_sync(self, *places: int, limit_s: float = java.LIMIT_S) -> None:
        """Until the set is exactly those, and each has the whole log."""
        self.wait_for(
            f"the set {places}",
            lambda: self.in_sync() == set(places) and self.is_level(len(places) - 1),
            limit_s,
        )

    def logs(self) -> list[Path]:
        return sorted(self.folder.rglob("process.log"))

    def diagnostics(self) -> str:
        return f"state: {json.dumps(self.group_state())}\n{super().diagnostics()}"


@contextmanager
def steady_load(group: MixedGroup, topic: str, *places: int) -> Iterator[Writer]:
    """Writes to these brokers, all of which are in the set when it begins."""
    addresses = [group.address(place) for place in places]
    with Writer(addresses, topic, 0, pause_s=0.002) as writer:
        wait_acks(writer, 20)
        group.wait_in_sync(*places)
        yield writer


def wait_master(group: MixedGroup, load: Writer, place: int) -> None:
    """Until that broker acknowledges."""
    group.wait_for(f"place {place} as master", lambda: group.master() == place)
    wait_acks(load, 50)


def nothing_lost(group: MixedGroup, load: Writer) -> None:
    """Each acknowledged message is at the master, where its ack said, and no two orders."""
    acks, master = list(load.acks), group.master()
    assert master is not None
    stored = first_messages(group.address(master), load.topic, acks[-1].queue_offset + 1)
    numbers = [number_in(message.body)[1] for message in stored]
    lost = [ack for ack in acks if numbers[ack.queue_offset] != ack.number]
    assert not lost, f"{len(lost)} of {len(acks)} acknowledged messages lost, first {lost[0]}"
    assert numbers == sorted(numbers)


def logs_equal(group: MixedGroup, *places: int) -> int:
    """The logs of these brokers, of which the first is ours, are the same to the byte, and so are
    their epochs, but for some without a byte. Returns where they end. No writes meanwhile."""
    status = ha_status(group.address(places[0]))
    assert status is not None
    end = status.max_offset
    first, *others = places
    for place in others:
        assert log_bytes(group.store(first), end) == log_bytes(group.store(place), end), place
        ours, theirs = group.epochs(first), group.epochs(place)
        starts = {start for _, start in ours} ^ {start for _, start in theirs}
        assert starts <= {end}, (ours, theirs)
        assert set(ours) >= set(theirs) or set(theirs) >= set(ours), (ours, theirs)
    return end
