"""Whether the peer of an HA connection is the replica that it should be (R21, R41). Pure. BatonMQ
brokers name themselves on the connection (`wire`), and each compares the name with the one that
controllers recorded, without a round trip. A Java slave counts by its registered id; for a Java
master see `java_peer`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from msgspec import structs

from batonmq.ha.lineage import LogSamples, take_samples
from batonmq.ha.node_secret import NodeSecret
from batonmq.ha.wire import HAIdentity, SlaveHandshake
from batonmq.protocol.role_view import Replica, RoleView

STRANGERS_MAX: Final = 64
"""The most connections to one HA port that have not shown which replica they are (R58)."""


class ProofVerdict(Enum):
    COUNTS = "counts"  # the registered process, or a registered Java slave
    AWAITED = "awaited"
    """It names a process or id that this master does not know yet: a new process often connects
    before the view that registers it arrives."""
    REFUSED = "refused"


class Registrations:
    """The registered replicas by the newest role view. `secret`: of the nodes, which they also
    prove; None: they do not."""

    def __init__(
        self, own: HAIdentity, replicas: Sequence[Replica] = (), secret: NodeSecret | None = None
    ) -> None:
        self.own = own
        self.secret = secret
        self._replicas: dict[int, Replica] = {}
        self.renew(replicas)

    def renew(self, replicas: Sequence[Replica]) -> None:
        self._replicas = {replica.broker_id: replica for replica in replicas}

    def judge(self, handshake: SlaveHandshake) -> tuple[ProofVerdict, str]:
        """Judges a connection by its handshake; if it does not count, with the reason."""
        own, broker_id, identity = self.own, handshake.broker_id, handshake.identity
        if broker_id == own.broker_id:
            return ProofVerdict.REFUSED, f"slave claims to be broker {broker_id}, this master"
        registered = self._replicas.get(broker_id)
        if identity is None:
            if registered is None:
                return ProofVerdict.AWAITED, f"broker {broker_id} is not registered"
            if not registered.incarnation:  # a Java broker: nothing to compare
                return ProofVerdict.COUNTS, ""
            return (
                ProofVerdict.REFUSED,
                f"it claims to be broker {broker_id} and does not name its process, which is"
                f" registered as incarnation {registered.incarnation}",
            )
        named = (identity.cluster_name, identity.broker_name, identity.broker_id)
        if named != (own.cluster_name, own.broker_name, broker_id):
            return (
                ProofVerdict.REFUSED,
                f"it is {identity}, no replica {broker_id} of {own.cluster_name}/{own.broker_name}",
            )
        if registered is None:
            return ProofVerdict.AWAITED, f"{identity} is not registered"
        is_registered = identity.incarnation == registered.incarnation and (
            # older controllers record none
            not registered.log_id or identity.log_id == registered.log_id
        )
        if is_registered:
            return ProofVerdict.COUNTS, ""
        return (
            ProofVerdict.AWAITED,
            f"it is {identity}, registered are incarnation {registered.incarnation}"
            f" and log {registered.log_id}",
        )


def master_introduced(
    own: HAIdentity, slave: HAIdentity, points: Sequence[int], samples: LogSamples | None
) -> HAIdentity:
    """A master's identity frame for a slave that named itself, with the samples that the slave
    wants (R47). `points`: the master's own."""
    # without samples only epochs are compared
    if samples is None:
        return own
    taken = tuple(take_samples(samples, points, slave.points, slave.disputed))
    return structs.replace(own, samples=taken, lineage=samples.lineage)


def master_fault(identity: HAIdentity | None, view: RoleView) -> str:
    """Why the peer is not the master of `view`; "" if it is."""
    if identity is None:
        return f"{view.master_ha_address} does not name itself: nothing is taken from it"
    is_master = (
        identity.cluster_name == view.cluster_name
        and identity.broker_name == view.broker_name
        and identity.broker_id == view.master_broker_id
        and identity.incarnation == view.master_incarnation
    )
    if is_master:
        return ""
    return (
        f"{view.master_ha_address} is {identity}, not the master that was elected:"
        " nothing is cut for it, and nothing taken from it"
    )
