"""The differences if the peer of an HA connection is a Java broker. Pure. A Java broker does not
name itself on the connection. As a slave it counts by its registered id. As a master it is asked at
its remoting address for its HA port (EXCHANGE_BROKER_HA_INFO, 906) and its identity
(GET_BROKER_EPOCH_CACHE, 1007). If an epoch begins at the same offset as the one before, its epoch
list lacks it."""

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
    """Whether the view's master is a Java broker: controllers record incarnations only for ours."""
    return not view.master_incarnation


def heartbeat_epoch(entry: EpochEntry, next_offset: int) -> int:
    """The epoch in a heartbeat to a Java slave: NO_EPOCH before the slave gets a byte of
    `entry`."""
    # Java would note the empty epoch, refuse the next one (which begins at the same offset) and
    # assign later bytes to the wrong epoch. At its next connection it would cut them, even if
    # confirmed.
    return NO_EPOCH if next_offset <= entry.start_offset else entry.epoch


class JavaMaster(Protocol):
    """Asks the Java broker at a view's `master_address`."""

    async def ha_address(self, view: RoleView) -> str:
        """Its HA address, which Java's controllers do not know. Raises BatonError."""

    async def identity(self, view: RoleView) -> PeerIdentity:
        """Its identity (R21). Any exception means that there is no proof."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The reply to GET_BROKER_EPOCH_CACHE (1007): who a broker is, and its last epoch.
    `table_epoch`: the masterEpoch in its topic table (GET_ALL_TOPIC_CONFIG, 21), -1 if that was not
    asked."""

    cluster_name: str
    broker_name: str
    broker_id: int
    last_epoch: int
    table_epoch: int = -1


def proof_fault(identity: PeerIdentity, view: RoleView, handshake_epoch: int) -> str:
    """Why the reply does not prove that the peer is the master of `view`; "" if it does.
    `handshake_epoch`: the last epoch in the peer's HA handshake."""
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
    """Up to which offset (exclusive) equal epochs prove equal bytes, if a Java master's list lacks
    the epoch it acts in. Java's list refused that epoch, because it began where the one before
    began. So that entry covers bytes of two masters. The acting master had no bytes of the earlier
    epoch, or its list would have accepted the next: our bytes after the entry's start are from
    another master.
    """
    start = master.entries[-1].start_offset if master.entries else 0
    return min(own.max_offset, max(start, own.confirm_offset))
