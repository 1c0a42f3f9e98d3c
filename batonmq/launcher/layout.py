"""Which processes a local cluster has, where they listen, and the configuration file of each.

Pure. The port rule is a contract with outside scripts: name server i listens on P + 100·i with its
embedded controller on +2 (remoting), +3 (gRPC), +4 (Raft); broker j, counted through all groups, on
P + 1035 + 100·j, its HA port +1, the same handlers on -2. `/metrics` of each is on +5. A cluster
that grew keeps the numbers of its brokers, so what is added comes behind them.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal

if TYPE_CHECKING:
    from batonmq.auth.signature import Credentials
    from batonmq.runtime.tls import ClientTls, Mode

CLUSTER_NAME: Final = "DefaultCluster"
DEFAULT_BASE_PORT: Final = 9876
DEFAULT_WATCHDOG_S: Final = 2.0
"""Above the session time-out (0.8 s): a broker that is silent so long is deposed already. Below the
3 s that stock clients wait for an answer, so that their retry finds another member."""
LEAST_WATCHDOG_S: Final = 1.0
MAX_BROKERS: Final = 26
HOST: Final = "127.0.0.1"
PYTHON_SUFFIX: Final = ".python"
SECTIONS: Final = (
    "namesrv",
    "controller",
    "broker",
    "store",
    "ha",
    "replicas",
    "metrics",
    "tls",
    "auth",
)

Settings = Mapping[str, Mapping[str, object]]


Stage = Literal["disabled", "accept", "dial", "permissive", "enforcing"]
STAGES: Final[Mapping[Stage, tuple[Mode, Mode, bool]]] = {
    "disabled": ("disabled", "disabled", False),
    "accept": ("permissive", "permissive", False),
    "dial": ("permissive", "permissive", True),
    "permissive": ("permissive", "enforcing", True),
    "enforcing": ("enforcing", "enforcing", True),
}
"""From plain to TLS only: serverMode, nodeMode, and whether the process dials with TLS. Processes
of neighbouring stages work together, so a running cluster goes through them one by one."""


class LayoutError(ValueError):
    """The options describe no cluster; the text says why and what is allowed."""


@dataclass(frozen=True, slots=True)
class NodeFiles:
    index: int
    port: int
    data_dir: Path
    config: Path
    pid_file: Path
    host: str = field(default=HOST, kw_only=True)

    MODULE: ClassVar[str]

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def python_file(self) -> Path:
        """Names the interpreter of another installation, while `mqctl roll` goes over to it."""
        return self.config.with_suffix(PYTHON_SUFFIX)

    @property
    def argv(self) -> list[str]:
        files = ["-c", str(self.config), "--pid-file", str(self.pid_file)]
        # -P: a file in the folder where it is started must not hide a module.
        return [sys.executable, "-P", "-m", self.MODULE, *files]


@dataclass(frozen=True, slots=True)
class NameServerNode(NodeFiles):
    """A name server process with its embedded controller."""

    MODULE: ClassVar[str] = "batonmq.namesrv.main"

    @property
    def name(self) -> str:
        return f"namesrv-{self.index}"

    @property
    def names(self) -> tuple[str, ...]:
        """The node names in its certificate."""
        return (f"namesrv/{self.name}", f"controller/{self.controller_id}")

    @property
    def controller_id(self) -> str:
        return f"n{self.index}"

    @property
    def controller_address(self) -> str:
        return f"{self.host}:{self.port + 2}"

    @property
    def grpc_address(self) -> str:
        return f"{self.host}:{self.port + 3}"

    @property
    def ports(self) -> tuple[int, ...]:
        # Name server, and of the controller its remoting, gRPC and Raft ports.
        return tuple(self.port + step for step in (0, 2, 3, 4))


@dataclass(frozen=True, slots=True)
class BrokerNode(NodeFiles):
    group: str

    MODULE: ClassVar[str] = "batonmq.broker.main"

    @property
    def name(self) -> str:
        return f"{self.group}-{self.index}"

    @property
    def names(self) -> tuple[str, ...]:
        """The node names in its certificate."""
        return (f"broker/{self.group}/{self.index}",)

    @property
    def ha_address(self) -> str:
        return f"{self.host}:{self.port + 1}"

    @property
    def ports(self) -> tuple[int, ...]:
        # RocketMQ's second port for clients, the first one, replication.
        return (self.port - 2, self.port, self.port + 1)


Node = NameServerNode | BrokerNode


def tls_folder_of(data_dir: Path) -> Path:
    """The authority and certificates of a cluster with TLS."""
    return data_dir / "conf" / "tls"


@dataclass(frozen=True, slots=True)
class Layout:
    data_dir: Path
    name_servers: tuple[NameServerNode, ...]
    brokers: tuple[BrokerNode, ...]
    overrides: Settings = field(default_factory=dict)
    secure: Stage = "disabled"
    """`accept` and `dial` only while `mqctl secure` changes the running cluster."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*self.name_servers, *self.brokers)

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(broker.group for broker in self.brokers))

    @property
    def name_server_addresses(self) -> str:
        return ";".join(node.address for node in self.name_servers)

    @property
    def cluster_file(self) -> Path:
        return self.data_dir / "cluster.json"

    @property
    def planned_cluster_file(self) -> Path:
        """`cluster.json` without pids and roles, written before any process starts."""
        return self.data_dir / "conf" / "cluster.json"

    @property
    def lock_file(self) -> Path:
        return self.data_dir / "run" / "up.lock"

    @property
    def raft_password_file(self) -> Path:
        return self.data_dir / "conf" / "raft-password"

    @property
    def tls_folder(self) -> Path:
        return tls_folder_of(self.data_dir)

    def certificate_of(self, node: Node) -> Path:
        return self.tls_folder / f"{node.name}.pem"

    @property
    def client_tls(self) -> ClientTls | None:
        """How tools dial this cluster."""
        if self.secure in ("disabled", "accept"):
            return None
        from batonmq.runtime.tls import ClientTls

        admin = str(self.tls_folder / "admin.pem")
        trust = str(self.tls_folder / "ca.pem")
        return ClientTls(trust_cert_path=trust, cert_path=admin, key_path=admin)

    @property
    def credentials(self) -> Credentials | None:
        """With what its supervisor signs. Raises ValueError for settings that are wrong."""
        settings = self.overrides.get("auth", {})
        if not settings.get("authenticationEnabled"):
            return None
        from batonmq.auth.config import CREDENTIALS_FILE, AuthConfig

        given, file = "innerClientAuthenticationCredentials", CREDENTIALS_FILE
        return AuthConfig(
            inner_client_authentication_credentials=str(settings.get(given, "")),
            inner_client_authentication_credentials_file=str(settings.get(file, "")),
        ).node


@dataclass(frozen=True, slots=True)
class LastPlan:
    """The size that a data folder's cluster has. `brokers`: (number, group) of each."""

    controllers: int = 3
    base_port: int = DEFAULT_BASE_PORT
    brokers: tuple[tuple[int, str], ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group for _, group in self.brokers)) or new_groups(1)

    @property
    def replicas(self) -> int:
        """How many replicas its largest group has."""
        return max(Counter(group for _, group in self.brokers).values(), default=3)


def plan(
    data_dir: Path,
    *,
    controllers: int | None = None,
    replicas: int | None = None,
    groups: int | None = None,
    base_port: int | None = None,
    overrides: Settings | None = None,
    owners: Mapping[int, str] | None = None,
    last: LastPlan | None = None,
    secure: Stage = "disabled",
) -> Layout:
    """Lays a cluster out. Raises LayoutError for numbers that make none.

    `owners`: numbers of broker folders that are there -> the group of each. A number stays with
    its group: in another one its store would be another group's log (R47). What is None is as in
    `last`; without that three controllers, and one group of three replicas."""
    last = last or LastPlan()
    controllers = last.controllers if controllers is None else controllers
    base_port = last.base_port if base_port is None else base_port
    if replicas is None and groups is None and last.brokers:
        # As they are: after `mqctl up` groups may differ in size.
        numbers = list(last.brokers)
    else:
        names = last.groups if groups is None else new_groups(groups)
        numbers = _numbers(last.replicas if replicas is None else replicas, names, owners or {})
    _check(controllers, replicas, groups, base_port, overrides or {}, numbers)
    data_dir = data_dir.absolute()
    return Layout(
        data_dir,
        tuple(
            NameServerNode(i, base_port + 100 * i, *_files(data_dir, f"namesrv-{i}"))
            for i in range(controllers)
        ),
        tuple(_broker(data_dir, base_port, number, group) for number, group in numbers),
        overrides or {},
        secure=secure,
    )


def _broker(data_dir: Path, base_port: int, number: int, group: str) -> BrokerNode:
    # 9876 + 1035 is 10911, the port of RocketMQ's brokers.
    port = base_port + 1035 + 100 * number
    return BrokerNode(number, port, *_files(data_dir, f"broker-{number}"), group)


def _files(data_dir: Path, name: str) -> tuple[Path, Path, Path]:
    """Data folder, settings and pid file of a process."""
    return data_dir / name, data_dir / "conf" / f"{name}.yaml", data_dir / "run" / f"{name}.pid"


def grown(
    layout: Layout, group: str, owners: Mapping[int, str] | None = None
) -> tuple[Layout, BrokerNode]:
    """With one broker more in `group`: in a folder that it had before, else in a new one
    (`owners` as in `plan`). "" is a new group. Raises LayoutError."""
    owners = {**(owners or {}), **{node.index: node.group for node in layout.brokers}}
    if not group:
        taken = set(owners.values())
        group = next((name for name in new_groups(MAX_BROKERS) if name not in taken), "")
    elif group not in owners.values():
        known = ", ".join(sorted(set(owners.values())))
        raise LayoutError(f"there is no group {group!r}; there is {known}")
    if len(layout.brokers) >= MAX_BROKERS or not group:
        raise LayoutError(f"{MAX_BROKERS} brokers are the most that one cluster here can have")
    used = {node.index for node in layout.brokers}
    own = sorted(n for n, owner in owners.items() if owner == group and n not in used)
    number = own[0] if own else next(n for n in itertools.count() if n not in owners)
    base_port = layout.name_servers[0].port
    _check_ports(base_port, len(layout.name_servers), number)
    node = _broker(layout.data_dir, base_port, number, group)
    groups = list(dict.fromkeys((*layout.groups, group)))
    brokers = sorted((*layout.brokers, node), key=lambda b: (groups.index(b.group), b.index))
    return replace(layout, brokers=tuple(brokers)), node


def new_groups(count: int) -> tuple[str, ...]:
    return tuple(f"broker-{chr(ord('a') + each)}" for each in range(min(count, MAX_BROKERS)))


def _numbers(
    replicas: int, groups: Sequence[str], owners: Mapping[int, str]
) -> list[tuple[int, str]]:
    """(number, group) of each broker: of a new cluster counted through all groups."""
    free = (number for number in itertools.count() if number not in owners)
    found = []
    for group in groups:
        own = sorted(number for number, owner in owners.items() if owner == group)
        # `_check` refuses more; a huge number must not keep this loop busy.
        count = min(replicas, MAX_BROKERS)
        found += [(n, group) for n in itertools.islice(itertools.chain(own, free), count)]
    return found


def _check(
    controllers: int,
    replicas: int | None,
    groups: int | None,
    base_port: int,
    overrides: Settings,
    numbers: Sequence[tuple[int, str]],
) -> None:
    if controllers not in (1, 3, 5):
        raise LayoutError(f"--controllers is {controllers}: a quorum of 1, 3 or 5 is needed")
    few = any(count is not None and count < 1 for count in (replicas, groups))
    many = groups is not None and groups > MAX_BROKERS
    if few or many or not 1 <= len(numbers) <= MAX_BROKERS:
        raise LayoutError(
            f"--groups {1 if groups is None else groups} x --replicas"
            f" {3 if replicas is None else replicas}: at least 1 each,"
            f" {MAX_BROKERS} brokers at the most"
        )
    _check_ports(base_port, controllers, max(number for number, _ in numbers))
    unknown = sorted(set(overrides) - set(SECTIONS))
    if unknown:
        raise LayoutError(
            f"section {unknown[0]!r} of the configuration is unknown;"
            f" allowed are {', '.join(SECTIONS)}"
        )


def _check_ports(base_port: int, controllers: int, last: int) -> None:
    highest = base_port + max(1035 + 100 * last + 5, 100 * (controllers - 1) + 5)
    if base_port < 1024 or highest > 65535:
        raise LayoutError(
            f"--base-port is {base_port}: the ports of this cluster would run to {highest},"
            " allowed are 1024 to 65535"
        )


def _tls_of(layout: Layout, node: Node) -> dict[str, object]:
    if layout.secure == "disabled":
        return {}
    certificate = str(layout.certificate_of(node))
    server_mode, node_mode, dials = STAGES[layout.secure]
    return {
        "serverMode": server_mode,
        "nodeMode": node_mode,
        "tlsEnable": dials,
        "serverCertPath": certificate,
        "serverKeyPath": certificate,
        "serverTrustCertPath": str(layout.tls_folder / "ca.pem"),
    }


def config_of(layout: Layout, node: Node) -> dict[str, dict[str, object]]:
    """The sections of one node's configuration file, the user's overrides on top."""
    if isinstance(node, NameServerNode):
        peers = (f"{peer.controller_id}-{peer.controller_address}" for peer in layout.name_servers)
        sections: dict[str, dict[str, object]] = {
            "namesrv": {
                "listenPort": node.port,
                "bindAddress": node.host,
                "enableControllerInNamesrv": True,
            },
            "controller": {
                "controllerDLegerGroup": "baton",
                "controllerDLegerPeers": ";".join(peers),
                "controllerDLegerSelfId": node.controller_id,
                "controllerStorePath": str(node.data_dir / "controller"),
                "raftPasswordFile": str(layout.raft_password_file),
                "bindAddress": node.host,
            },
        }
    else:
        sections = {
            "broker": {
                "brokerClusterName": CLUSTER_NAME,
                "brokerName": node.group,
                "brokerIP1": node.host,
                "listenPort": node.port,
                "namesrvAddr": layout.name_server_addresses,
            },
            "store": {"storePathRootDir": str(node.data_dir), "haListenPort": node.port + 1},
            "ha": {},
            "replicas": {
                "controllerAddr": ";".join(peer.controller_address for peer in layout.name_servers)
            },
        }
    metrics = layout.overrides.get("metrics", {})
    if metrics.get("metricsExporterType") != "DISABLE":
        sections["metrics"] = {
            "metricsExporterType": "PROM",
            "metricsPromExporterHost": node.host,
            "metricsPromExporterPort": node.port + 5,
        }
    if layout.secure != "disabled" or "tls" in layout.overrides:
        sections["tls"] = _tls_of(layout, node)
    for section, values in layout.overrides.items():
        # Sections of the other kind of process are left out: it would refuse them.
        if section in sections or section == "auth":
            sections.setdefault(section, {}).update(values)
    return sections


def held_addresses(layout: Layout, node: Node) -> list[tuple[str, int]]:
    """Where clients dial a broker. Its sockets are held while it is started again: it answers for
    its group at once. Who asks a name server asks another one."""
    if isinstance(node, NameServerNode):
        return []
    broker = config_of(layout, node)["broker"]
    host = str(broker.get("bindAddress") or broker["brokerIP1"])
    return [(host, node.port), (host, node.port - 2)]
