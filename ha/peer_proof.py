"""Whether a peer is the master that the view names: the answer to request 1007 (R21). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.role_view import RoleView


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """What a broker says of itself when asked for its epochs (request 1007)."""

    cluster_name: str
    broker_name: str
    broker_id: int
    last_epoch: int


def proof_fault(identity: PeerIdentity, view: RoleView, handshake_epoch: int) -> str:
    """Why that is no proof; "" if it is. A Java master calls itself broker 0.

    `handshake_epoch`: the last epoch that the peer named on the HA connection.
    """
    is_master = (
        identity.cluster_name == view.cluster_name
        and identity.broker_name == view.broker_name
        and identity.broker_id in (0, view.master_broker_id)
        and identity.last_epoch >= view.master_epoch
        and identity.last_epoch == handshake_epoch
    )
    if is_master:
        return ""
    return (
        f"{view.master_address} is {identity.cluster_name}/{identity.broker_name}/"
        f"{identity.broker_id} at epoch {identity.last_epoch}, not the master that was "
        f"named: nothing is cut for it, and nothing taken from it"
    )


__all__ = ["PeerIdentity", "proof_fault"]
