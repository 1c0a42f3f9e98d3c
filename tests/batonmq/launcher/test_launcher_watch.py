"""What `batonmq up` makes of a group's record at the controllers."""

from __future__ import annotations

from batonmq.launcher.watch import _group
from batonmq.protocol.bodies import ReplicaIdentity, ReplicasInfo

ADDRESS, OTHER = "127.0.0.1:1", "127.0.0.1:2"


def replica(broker_id: int, address: str = ADDRESS, *, alive: bool) -> ReplicaIdentity:
    return ReplicaIdentity(alive=alive, broker_address=address, broker_id=broker_id)


def test_r17_an_earlier_replica_of_an_address_does_not_hide_the_master_on_it() -> None:
    """A restored store is a new replica; the old id of its address is on record until an operator
    forgets it."""
    info = ReplicasInfo(
        in_sync_replicas=[replica(4, alive=True)],
        not_in_sync_replicas=[replica(1, alive=False), replica(2, OTHER, alive=False)],
        master_address=ADDRESS,
        master_broker_id=4,
    )
    group = _group("broker-a", info)
    assert group.in_sync == 1
    state = group.replicas[ADDRESS]
    assert (state.broker_id, state.role, state.in_sync) == (4, "MASTER", True)


def test_a_lost_member_does_not_hide_the_living_replica_on_its_address() -> None:
    info = ReplicasInfo(
        in_sync_replicas=[replica(1, alive=False)],
        not_in_sync_replicas=[replica(4, alive=True)],
    )
    group = _group("broker-a", info)
    assert group.in_sync == 0 and group.replicas[ADDRESS].broker_id == 4
