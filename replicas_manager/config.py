"""Configuration of the ReplicasManager, and checks of its times (R34).

Keys are spelled as in RocketMQ's broker.conf where RocketMQ has them (`controllerAddr`,
`brokerElectionPriority`, `asyncLearner`, `storePathBrokerIdentity`). `controllerProtocol` is ours.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from batonmq.auth.signature import Signer
from batonmq.protocol.numbers import PORT_MAX, host_and_port
from batonmq.runtime.lease_times import PAUSE_ALLOWED_MS, check_lease_times, silence_above_ms
from batonmq.runtime.tls import Tls

Protocol = Literal["grpc", "remoting"]
"""The protocol of the controllers: gRPC for ours, remoting for RocketMQ's."""

GRPC_PORT_OFFSET = 1
"""A controller's gRPC port is its remoting port plus this."""

ELECTION_PRIORITY_LAST = 2**31 - 1
"""Java's default of brokerElectionPriority: the smaller number wins."""


@dataclass(frozen=True, slots=True)
class SessionTimings:
    """Times of the controller sessions in ms; `check` compares them."""

    heartbeat_ms: int = 100
    """brokerSessionHeartbeatMs: a master's heartbeat period to the leader, and every broker's to
    all controllers while no leader is known. Slaves, which renew no lease, take twice that."""
    follower_heartbeat_ms: int = 500
    """brokerSessionFollowerHeartbeatMs: the heartbeat period to controllers that do not lead."""
    session_timeout_ms: int = 800
    """brokerSessionTimeoutMs: the silence after which the leading controller declares a broker
    dead."""
    master_lease_ms: int = 600
    """masterLeaseMs, from the send time of the last heartbeat that the leader answered."""

    def check(self) -> None:
        """Raises ValueError naming the keys that contradict each other."""
        if self.heartbeat_ms < 1:
            raise ValueError(f"brokerSessionHeartbeatMs={self.heartbeat_ms}: must be at least 1")
        check_lease_times(self.heartbeat_ms, self.master_lease_ms, self.session_timeout_ms)
        # R51: a follower that becomes leader counts the silence that it saw, so it must have heard
        # each living broker within the time-out.
        if not 2 * self.heartbeat_ms <= self.follower_heartbeat_ms < self.session_timeout_ms:
            raise ValueError(
                f"brokerSessionFollowerHeartbeatMs={self.follower_heartbeat_ms} must lie between "
                f"2 x brokerSessionHeartbeatMs={self.heartbeat_ms} and "
                f"brokerSessionTimeoutMs={self.session_timeout_ms}"
            )


@dataclass(frozen=True, slots=True)
class ReplicasManagerConfig:
    """The settings of one broker's ReplicasManager."""

    cluster_name: str
    broker_name: str
    address: str
    """host:port of the broker's remoting endpoint, as other machines dial it."""
    ha_address: str
    """host:port of the HA endpoint, as slaves dial it."""
    controllers: tuple[str, ...]
    """Addresses of all controllers under `protocol`; see `controller_addresses`."""
    identity_path: Path
    """storePathBrokerIdentity; the temporary identity is beside it as `<name>-temp`."""
    role_path: Path
    """File of the highest masterEpoch accepted (R2)."""
    election_priority: int = ELECTION_PRIORITY_LAST
    learner: bool = False
    """asyncLearner: receives data, but is never in the set and never requests its election."""
    timings: SessionTimings = field(default_factory=SessionTimings)
    protocol: Protocol = "grpc"
    tls: Tls | None = None
    sign: Signer | None = None
    """Signs requests to controllers; None: they are unsigned."""


def remoting_timings(heartbeat_ms: int, timeout_ms: int) -> SessionTimings:
    """Times for RocketMQ's controllers: `brokerHeartbeatInterval`, and
    `controllerHeartBeatTimeoutMills`, the silence after which they declare this broker dead. A
    master sends twice as often. Raises ValueError naming the keys if they contradict each other."""
    lease_ms = 2 * heartbeat_ms + PAUSE_ALLOWED_MS + heartbeat_ms // 4
    if heartbeat_ms < 100 or timeout_ms <= silence_above_ms(lease_ms):
        raise ValueError(
            f"brokerHeartbeatInterval={heartbeat_ms} must be at least 100, and "
            f"controllerHeartBeatTimeoutMills={timeout_ms} above it by far: here above "
            f"{silence_above_ms(lease_ms):.0f}"
        )
    return SessionTimings(
        heartbeat_ms=heartbeat_ms // 2,
        follower_heartbeat_ms=heartbeat_ms,
        session_timeout_ms=timeout_ms,
        master_lease_ms=lease_ms,
    )


def controller_addresses(
    controller_addr: str, controller_grpc_addr: str = "", protocol: Protocol = "grpc"
) -> tuple[str, ...]:
    """For remoting the addresses in `controllerAddr` (separated by `;`). For gRPC those in
    `controllerGrpcAddr` or, without it, one port above each of `controllerAddr`. Raises ValueError
    naming the key and the bad part."""
    if protocol == "remoting":
        return _addresses(controller_addr, "controllerAddr", 0)
    if controller_grpc_addr.strip():
        return _addresses(controller_grpc_addr, "controllerGrpcAddr", 0)
    return _addresses(controller_addr, "controllerAddr", GRPC_PORT_OFFSET)


def _addresses(text: str, key: str, port_offset: int) -> tuple[str, ...]:
    found: list[str] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        address = host_and_port(part)
        if address is None:
            raise ValueError(f"{key}: {part!r} is not host:port")
        host, port = address[0], address[1] + port_offset
        if port > PORT_MAX:
            raise ValueError(f"{key}: {part!r} leaves no gRPC port above it")
        found.append(f"{host}:{port}")
    if not found:
        raise ValueError(f"{key}: names no controller; give host:port, several joined by ';'")
    return tuple(found)
