"""Between the messages of `baton.controller.v1` and the plain values of this package."""

from __future__ import annotations

from baton.controller.v1 import controller_pb2 as pb
from protocol.role_view import Replica, RoleView


def role_view_of(message: pb.RoleView) -> RoleView:
    """A view as plain values. An empty message gives a view with an empty broker name."""
    return RoleView(
        cluster_name=message.cluster_name,
        broker_name=message.broker_name,
        master_broker_id=message.master_broker_id or None,
        master_address=message.master_address,
        master_ha_address=message.master_ha_address,
        master_incarnation=message.master_incarnation,
        master_epoch=message.master_epoch,
        sync_state_set_epoch=message.sync_state_set_epoch,
        sync_state_set=frozenset(message.sync_state_set),
        replicas=tuple(
            Replica(
                broker_id=replica.broker_id,
                address=replica.address,
                ha_address=replica.ha_address,
                alive=replica.alive,
                learner=replica.learner,
                incarnation=replica.incarnation,
                log_id=replica.log_id,
            )
            for replica in message.replicas
        ),
        raft_index=message.raft_index,
        unclean_epoch=message.unclean_epoch,
    )
