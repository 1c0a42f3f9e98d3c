"""`RoleView` and `Replica` to and from their messages of `baton.controller.v1`.

On the wire a missing master is id 0, and lists ascend; in Python it is None, and the set is a set.
"""

from collections.abc import Iterable
from typing import Any

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.protocol.role_view import Replica, RoleView

# What a message and its twin in Python have under the same names.
_OF_VIEW = tuple(field.name for field in pb.RoleView.DESCRIPTOR.fields)
_OF_REPLICA = tuple(field.name for field in pb.Replica.DESCRIPTOR.fields)


def role_view_to_pb(view: RoleView) -> pb.RoleView:
    replicas = sorted(view.replicas, key=lambda replica: replica.broker_id)
    return pb.RoleView(
        **_fields(_OF_VIEW, view)
        | {
            "master_broker_id": view.master_broker_id or 0,
            "sync_state_set": sorted(view.sync_state_set),
            "replicas": [pb.Replica(**_fields(_OF_REPLICA, replica)) for replica in replicas],
        }
    )


def role_view_from_pb(message: pb.RoleView) -> RoleView:
    """An empty message gives a view with an empty broker name."""
    return RoleView(
        **_fields(_OF_VIEW, message)
        | {
            "master_broker_id": message.master_broker_id or None,
            "sync_state_set": frozenset(message.sync_state_set),
            "replicas": tuple(Replica(**_fields(_OF_REPLICA, one)) for one in message.replicas),
        }
    )


def _fields(names: Iterable[str], of: object) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}
