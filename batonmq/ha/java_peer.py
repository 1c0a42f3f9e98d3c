"""What is different if the broker at the other end of an HA connection is Java's. Pure.

A Java broker does not name itself on the connection. As a slave it counts by its registered id. As
a master it is asked through its remoting address: where its HA port is (request 906), and who it is
(1007). Its epoch list lacks an epoch that begins where the one before began.
"""

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
    """Questions to the Java broker at a view's master_address: it names itself on no connection."""

    async def ha_address(self, view: RoleView) -> str:
        """Where it sends its log: Java's controllers do not know it. Raises BatonError."""

    async def identity(self, view: RoleView) -> PeerIdentity:
        """The broker's identity (R21). Whatever this raises means that there is no proof."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """A broker's reply to request 1007: who it is, and its last epoch.

    `table_epoch`: the masterEpoch that it stamped into its topic table when it became master (21),
    -1 if that was not asked. Java's list lacks an epoch that begins where the one before began.
    """

    cluster_name: str
    broker_name: str
    broker_id: int
    last_epoch: int
    table_epoch: int = -1


def proof_fault(identity: PeerIdentity, view: RoleView, handshake_epoch: int) -> str:
    """Why that is no proof of a Java master; "" if it is. A Java master reports broker id 0.

    `handshake_epoch`: the last epoch that the peer named on the HA connection.
    """
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
    """How far equal epochs prove equal bytes, if the list of a Java master lacks the epoch in which
    it acts: exclusive end.

    That list refused its own epoch, which began where the one before began. So the bytes of its
    master are filed under that one, and there an epoch has two masters. It had none of that epoch's
    own bytes, else its list had taken the next one: ours behind the start of it are foreign.
    """
    start = master.entries[-1].start_offset if master.entries else 0
    return min(own.max_offset, max(start, own.confirm_offset))
