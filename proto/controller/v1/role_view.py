"""`RoleView` and `Replica` to and from their messages of `baton.controller.v1`.

On the wire a missing master is id 0, and lists ascend; in Python it is None, and the set is a set.
"""

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.protocol.role_view import Replica, RoleView


def role_view_to_pb(view: RoleView) -> pb.RoleView:
    return pb.RoleView(
        cluster_name=view.cluster_name,
        broker_name=view.broker_name,
        master_broker_id=view.master_broker_id or 0,
        master_address=view.master_address,
        master_ha_address=view.master_ha_address,
        master_incarnation=view.master_incarnation,
        master_epoch=view.master_epoch,
        sync_state_set_epoch=view.sync_state_set_epoch,
        sync_state_set=sorted(view.sync_state_set),
        replicas=[
            _replica_to_pb(replica)
            for replica in sorted(view.replicas, key=lambda replica: replica.broker_id)
        ],
        raft_index=view.raft_index,
        unclean_epoch=view.unclean_epoch,
    )


def role_view_from_pb(message: pb.RoleView) -> RoleView:
    """An empty message gives a view with an empty broker name."""
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
        replicas=tuple(_replica_from_pb(replica) for replica in message.replicas),
        raft_index=message.raft_index,
        unclean_epoch=message.unclean_epoch,
    )


def _replica_to_pb(replica: Replica) -> pb.Replica:
    return pb.Replica(
        broker_id=replica.broker_id,
        address=replica.address,
        ha_address=replica.ha_address,
        alive=replica.alive,
        learner=replica.learner,
        incarnation=replica.incarnation,
        log_id=replica.log_id,
    )


def _replica_from_pb(message: pb.Replica) -> Replica:
    return Replica(
        broker_id=message.broker_id,
        address=message.address,
        ha_address=message.ha_address,
        alive=message.alive,
        learner=message.learner,
        incarnation=message.incarnation,
        log_id=message.log_id,
    )
