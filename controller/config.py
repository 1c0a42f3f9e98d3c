"""Settings of one controller node: the `controller:` section.

RocketMQ's keys keep their spelling and meaning (`ControllerConfig`, without `JraftConfig`). Values
that depend on each other are checked together (R34): a lease longer than the session timeout, or a
Raft election slower than the failover budget, is an error at the start.

A peer's address in `controllerDLegerPeers` is its remoting port; `grpcPortOffset` and
`raftPortOffset` give the other two.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from batonmq.history.file import FILE_SIZE_DEFAULT, FILES_DEFAULT
from batonmq.runtime.lease_times import check_lease_times
from batonmq.runtime.runtime_settings import ChangeRules, RuntimeSettings, listed_keys
from batonmq.runtime.section import LogFormat, LogLevel, Ranges, Section

_RAFT_ELECTION_BELOW_MS: Final = 800
"""A failover may take 1,000 ms, and after a Raft election the gate, the election, the push and the
first write take 200 of them (R34)."""

RUNTIME_KEYS: Final = frozenset(
    {
        "enableElectUncleanMaster",
        "notifyBrokerRoleChanged",
        "electMasterMaxRetryCount",
        "isProcessReadEvent",
        "scanNotActiveBrokerInterval",
        "scanInactiveMasterInterval",
        "brokerGroupsMax",
        "groupReplicasMax",
        "brokerReplicasMax",
        "controllerRulesMax",
        "logLevel",
    }
)
"""Keys that may be changed while the node runs. The others say where it runs, or must be the same
on all nodes: they are read from the file at the start."""

# No slash in an id: it is part of the name of the history's file (R46).
_INNER_HOST = re.compile(r"(?P<id>[^\s;/-]+)-(?P<host>[^\s;:]+)")
_PEER = re.compile(r"(?P<id>[^\s;/-]+)-(?P<host>[^\s;]+):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class Peer:
    """One controller node: its id in the group and the addresses of its three ports.

    Admin tools dial `host`; brokers and other nodes dial `inner_host` if it is not empty.
    """

    node_id: str
    host: str
    port: int
    grpc_port: int
    raft_port: int
    inner_host: str = ""

    @property
    def remoting_address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def grpc_address(self) -> str:
        return f"{self.inner_host or self.host}:{self.grpc_port}"

    @property
    def raft_address(self) -> str:
        return f"{self.inner_host or self.host}:{self.raft_port}"


@dataclass(frozen=True, slots=True)
class RaftTimings:
    """Raft's own times, in milliseconds."""

    election_min_ms: int
    election_max_ms: int
    heartbeat_ms: int
    tick_ms: int


def parse_peers(text: str, grpc_port_offset: int, raft_port_offset: int) -> tuple[Peer, ...]:
    """Reads `n0-host:9878;n1-host:9978` in its order. Raises ValueError saying what is wrong."""
    peers: list[Peer] = []
    for item in filter(None, (part.strip() for part in text.split(";"))):
        match = _PEER.fullmatch(item)
        if match is None:
            raise ValueError(f"controllerDLegerPeers: {item!r} is not of the form id-host:port")
        port = int(match["port"])
        peer = Peer(
            match["id"], match["host"], port, port + grpc_port_offset, port + raft_port_offset
        )
        if not 0 < port <= 65_535 - max(grpc_port_offset, raft_port_offset):
            raise ValueError(
                f"controllerDLegerPeers: port {port} of {match['id']} leaves no ports for the "
                "gRPC and Raft ports above it"
            )
        if any(peer.node_id == known.node_id for known in peers):
            raise ValueError(f"controllerDLegerPeers: id {peer.node_id} is listed twice")
        if any(peer.remoting_address == known.remoting_address for known in peers):
            raise ValueError(f"controllerDLegerPeers: {peer.remoting_address} is listed twice")
        peers.append(peer)
    if not peers:
        raise ValueError("controllerDLegerPeers: needs at least one id-host:port")
    return tuple(peers)


def parse_inner_hosts(text: str) -> dict[str, str]:
    """Reads `n0-host;n1-host`: id to host. Raises ValueError saying what is wrong."""
    hosts: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        match = _INNER_HOST.fullmatch(item)
        if match is None:
            raise ValueError(f"controllerInnerHosts: {item!r} is not of the form id-host")
        if match["id"] in hosts:
            raise ValueError(f"controllerInnerHosts: id {match['id']} is listed twice")
        hosts[match["id"]] = match["host"]
    return hosts


class ControllerConfig(Section, frozen=True, kw_only=True, rename="camel"):
    """The `controller:` section. Times are milliseconds unless a key says otherwise."""

    NO_LONGER_USED = frozenset({"historyTopicGroup", "historyTopicDelayMs", "historyTopicBatch"})
    RANGES: ClassVar[Ranges] = {
        "grpc_port_offset": (1, 999),
        "raft_port_offset": (1, 999),
        "history_file_size": (1, None),
        "history_files": (1, None),
        "scan_not_active_broker_interval": (1, None),
        "scan_inactive_master_interval": (1, None),
        "broker_groups_max": (1, None),
        "group_replicas_max": (1, None),
        "broker_replicas_max": (1, None),
        "controller_rules_max": (0, None),
        "broker_session_heartbeat_ms": (1, None),
        "raft_heartbeat_ms": (1, None),
        "raft_tick_ms": (1, None),
        "propose_timeout_ms": (1, None),
    }
    WITHOUT_EFFECT = frozenset(
        {
            "scan_inactive_master_interval",
            "elect_master_max_retry_count",
            "controller_type",
            "mapped_file_size",
            "controller_thread_pool_nums",
            "controller_request_thread_pool_queue_capacity",
            "rocketmq_home",
        }
    )

    # This node and the others.
    controller_group: str = msgspec.field(name="controllerDLegerGroup", default="group1")
    controller_peers: str = msgspec.field(name="controllerDLegerPeers", default="n0-127.0.0.1:9878")
    controller_self_id: str = msgspec.field(name="controllerDLegerSelfId", default="n0")
    controller_inner_hosts: str = ""
    """`n0-host;n1-host`: hosts by which nodes and brokers reach each node if that is not the host
    which admin tools dial (containers, NAT). Empty: the hosts of controllerDLegerPeers."""
    grpc_port_offset: int = 1
    raft_port_offset: int = 2
    bind_address: str = "0.0.0.0"
    raft_bind_address: str = ""
    """Empty: the host of this node's entry in controllerDLegerPeers."""
    raft_password_file: str = ""
    """File of mode 0600 with the password of the Raft port, the same on every controller; `batonmq
    raftPassword FILE` creates one. Empty: none, so anyone who reaches the port may vote and write
    the log."""

    # Files.
    controller_store_path: str = "~/batonmq/controller"
    config_store_path: str = ""
    """Empty: `controller.properties` in controllerStorePath."""
    config_black_list: str = "configBlackList;configStorePath"

    # The failover history: history-<id>.jsonl in controllerStorePath and its full, numbered files.
    history_file_size: int = FILE_SIZE_DEFAULT
    """Bytes; a file that would grow above it becomes a numbered one."""
    history_files: int = FILES_DEFAULT
    """How many are kept, the growing one among them; the oldest goes."""

    # Elections, as RocketMQ names them. RUNTIME_KEYS may be changed while running.
    enable_elect_unclean_master: bool = False
    notify_broker_role_changed: bool = True
    is_process_read_event: bool = False
    scan_not_active_broker_interval: int = 5_000
    scan_inactive_master_interval: int = 5_000
    server_channel_max_idle_time_seconds: int = 120

    # How many may be registered (SAFETY R58); what is registered is never refused. These may be
    # changed while running.
    broker_groups_max: int = 1_000
    group_replicas_max: int = 64
    """Replicas of one group."""
    broker_replicas_max: int = 4_000
    """Replicas of all groups together."""
    controller_rules_max: int = 0
    """The newest rules by which commands are applied while this node leads; 0: the newest that all
    controllers know. May be changed while running, before a return to an earlier version."""
    log_level: LogLevel = ""
    log_format: LogFormat = "text"

    # Sessions of native brokers (SAFETY R5, R34).
    broker_session_heartbeat_ms: int = 100
    broker_session_timeout_ms: int = 800
    master_lease_ms: int = 600

    # Raft.
    raft_election_timeout_min_ms: int = 300
    raft_election_timeout_max_ms: int = 600
    raft_heartbeat_ms: int = 90
    raft_tick_ms: int = 50
    """How often pysyncobj checks its deadlines while this node is not connected to all others, or
    is a candidate. Otherwise it sleeps until a deadline; messages and commands wake it at once."""
    propose_timeout_ms: int = 3_000

    # Without effect here.
    elect_master_max_retry_count: int = 3
    controller_type: str = "DLedger"
    mapped_file_size: int = 1 << 30
    controller_thread_pool_nums: int = 16
    controller_request_thread_pool_queue_capacity: int = 50_000
    rocketmq_home: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_addresses()
        self._check_times()

    def _check_addresses(self) -> None:
        if self.grpc_port_offset == self.raft_port_offset:
            raise ValueError("grpcPortOffset and raftPortOffset: must differ")
        peers = self.peers
        if all(peer.node_id != self.controller_self_id for peer in peers):
            known = ", ".join(peer.node_id for peer in peers)
            raise ValueError(
                f"controllerDLegerSelfId: {self.controller_self_id!r} is not among the peers "
                f"({known})"
            )
        unknown = parse_inner_hosts(self.controller_inner_hosts).keys() - {p.node_id for p in peers}
        if unknown:
            raise ValueError(
                f"controllerInnerHosts: {', '.join(sorted(unknown))} is not among the peers "
                f"({', '.join(peer.node_id for peer in peers)})"
            )
        # The ports of one node can be those of another: 9879 is the gRPC port of 9878.
        addresses = [
            address
            for peer in peers
            for address in (peer.remoting_address, peer.grpc_address, peer.raft_address)
        ]
        if len(set(addresses)) != len(addresses):
            raise ValueError(
                "controllerDLegerPeers: peers on one host must leave ports for each other's gRPC "
                "and Raft ports"
            )

    def _check_times(self) -> None:
        check_lease_times(
            self.broker_session_heartbeat_ms, self.master_lease_ms, self.broker_session_timeout_ms
        )
        if self.raft_election_timeout_max_ms >= _RAFT_ELECTION_BELOW_MS:
            raise ValueError(
                f"raftElectionTimeoutMaxMs: {self.raft_election_timeout_max_ms} must stay below "
                f"{_RAFT_ELECTION_BELOW_MS}"
            )
        if self.raft_election_timeout_max_ms <= self.raft_election_timeout_min_ms:
            raise ValueError(
                f"raftElectionTimeoutMaxMs: {self.raft_election_timeout_max_ms} must exceed "
                f"raftElectionTimeoutMinMs ({self.raft_election_timeout_min_ms})"
            )
        # Two lost heartbeats must not look like a dead leader.
        if self.raft_election_timeout_min_ms <= 3 * self.raft_heartbeat_ms:
            raise ValueError(
                f"raftElectionTimeoutMinMs: {self.raft_election_timeout_min_ms} must exceed "
                f"3 x raftHeartbeatMs ({self.raft_heartbeat_ms})"
            )

    @property
    def peers(self) -> tuple[Peer, ...]:
        peers = parse_peers(self.controller_peers, self.grpc_port_offset, self.raft_port_offset)
        hosts = parse_inner_hosts(self.controller_inner_hosts)
        return tuple(replace(peer, inner_host=hosts.get(peer.node_id, "")) for peer in peers)

    @property
    def self_peer(self) -> Peer:
        return next(peer for peer in self.peers if peer.node_id == self.controller_self_id)

    @property
    def store_path(self) -> str:
        return os.path.expanduser(self.controller_store_path)

    @property
    def raft_password_path(self) -> Path | None:
        if not self.raft_password_file:
            return None
        return Path(os.path.expanduser(self.raft_password_file))

    @property
    def config_path(self) -> str:
        if self.config_store_path:
            return os.path.expanduser(self.config_store_path)
        return os.path.join(self.store_path, "controller.properties")

    @property
    def black_list(self) -> frozenset[str]:
        """Keys that UPDATE_CONTROLLER_CONFIG (1009) may not touch: RocketMQ's fixed three and the
        configured ones."""
        fixed = {"configBlackList", "configStorePath", "rocketmqHome"}
        return listed_keys(self.config_black_list) | fixed

    @property
    def raft_timings(self) -> RaftTimings:
        return RaftTimings(
            self.raft_election_timeout_min_ms,
            self.raft_election_timeout_max_ms,
            self.raft_heartbeat_ms,
            self.raft_tick_ms,
        )


class RuntimeConfig(RuntimeSettings[ControllerConfig]):
    """The settings of a running node, for GET_CONTROLLER_CONFIG (1010) and UPDATE_CONTROLLER_CONFIG
    (1009)."""

    def __init__(self, config: ControllerConfig) -> None:
        remark = "Can not update config {key}"
        path = Path(config.config_path)
        super().__init__(config, ChangeRules(RUNTIME_KEYS, config.black_list, remark, path))

    def as_properties(self) -> str:
        """With the listening port, as Java shows it."""
        lines = super().as_properties().splitlines()
        lines.append(f"listenPort={self.current.self_peer.port}")
        return "\n".join(sorted(lines)) + "\n"
