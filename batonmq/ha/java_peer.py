"""What is different if the broker at the other end of an HA connection is Java's. Pure. A Java
broker does not name itself on the connection. As a slave it counts by its registered id. As a
master it is asked through its remoting address: where its HA port is (request 906), and who it is
(1007). Its epoch list lacks an epoch that begins where the one before began."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.role_view import RoleView

if TYPE_CHECKING:
    from batonmq.ha.received_log import LocalLog
    from batonmq.ha.wire import MasterHandshake

NO_EPOCH: Final = -1


def is_java_master(view: RoleView) -> bool:
    """Controllers record an incarnation for each broker of ours, and none for a Java broker."""
    return not view.master_incarnation


def heartbeat_epoch(entry: EpochEntry, next_offset: int) -> int:
    """The epoch in a heartbeat to a Java slave: NO_EPOCH until the slave gets a byte of `entry`."""
    # Java would note the empty epoch, refuse the next one (it begins at the same offset) and file
    # later bytes under the wrong epoch. At its next connection it would cut them, even confirmed.
    return NO_EPOCH if next_offset <= entry.start_offset else entry.epoch


class JavaMaster(Protocol):
    """Asks the Java broker at a view's master_address."""

    async def ha_address(self, view: RoleView) -> str:
        """Its HA address, which Java's controllers do not know. Raises BatonError."""

    async def identity(self, view: RoleView) -> PeerIdentity:
        """Who it is (R21). Any exception means that there is no proof."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The reply to GET_EPOCH_CACHE (1007): who a broker is, and its last epoch. `table_epoch`: the
    masterEpoch in its topic table (GET_ALL_TOPIC_CONFIG, 21), -1 if that was not asked."""

    cluster_name: str
    broker_name: str
    broker_id: int
    last_epoch: int
    table_epoch: int = -1


def proof_fault(identity: PeerIdentity, view: RoleView, handshake_epoch: int) -> str:
    """Why this does not prove that the peer is the master of `view`; "" if it does.
    `handshake_epoch`: the last epoch that the peer named on the HA connection."""
    is_master = (
        identity.cluster_name == view.cluster_name
        and identity.broker_name == view.broker_name
        and identity.broker_id in (0, view.master_broker_id)
        and max(identity.last_epoch, identity.table_epoch) >= view.master_epoch
        and identity.last_epoch == handshake_epoch
    )
    if is_master:
        return ""
    return (
        f"{view.master_address} is {identity.cluster_name}/{identity.broker_name}/"
        f"{identity.broker_id} at epoch {max(identity.last_epoch, identity.table_epoch)}, not the "
        f"master that was elected: nothing is cut for it, and nothing taken from it"
    )


def shared_with_java(own: LocalLog, master: MasterHandshake) -> int:
    """How far equal epochs prove equal bytes if the master's list lacks the epoch it acts in;
    exclusive. Java's list refused that epoch, which began where the one before began. So the bytes
    of two masters are filed under one epoch. The acting master had none of that epoch's earlier
    bytes, else its list had taken the next one: our bytes behind its start are from another master.
    """
    start = master.entries[-1].start_offset if master.entries else 0
    return min(own.max_offset, max(start, own.confirm_offset))
