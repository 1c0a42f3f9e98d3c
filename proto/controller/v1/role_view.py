"""`RoleView` and `Replica` to and from their messages of `baton.controller.v1`.

On the wire a missing master is id 0, and lists ascend; in Python it is None, and the set is a set.
"""

from typing import Any

from google.protobuf.message import Message

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.protocol.role_view import Replica, RoleView


def role_view_to_pb(view: RoleView) -> pb.RoleView:
    replicas = sorted(view.replicas, key=lambda replica: replica.broker_id)
    return pb.RoleView(
        **_fields(pb.RoleView, view)
        | {
            "master_broker_id": view.master_broker_id or 0,
            "sync_state_set": sorted(view.sync_state_set),
            "replicas": [pb.Replica(**_fields(pb.Replica, replica)) for replica in replicas],
        }
    )


def role_view_from_pb(message: pb.RoleView) -> RoleView:
    """An empty message gives a view with an empty broker name."""
    return RoleView(
        **_fields(pb.RoleView, message)
        | {
            "master_broker_id": message.master_broker_id or None,
            "sync_state_set": frozenset(message.sync_state_set),
            "replicas": tuple(Replica(**_fields(pb.Replica, one)) for one in message.replicas),
        }
    )


def _fields(kind: type[Message], of: object) -> dict[str, Any]:
    """What the message and its twin in Python have under the same names."""
    return {field.name: getattr(of, field.name) for field in kind.DESCRIPTOR.fields}
