"""What applying a command answers and what it sets off.

The result is the answer of both doors: RocketMQ's code and remark, and the group as it stands after
the command. Effects tell the leader's shell what to push. They follow from the state alone, so each
node computes them, but only the leader behind an open gate performs them, and performing one twice
does no harm: views carry their epochs, events their index.
"""

import msgspec

from controller.history import HistoryEvent
from protocol.codes import ResponseCode
from protocol.role_view import RoleView

__all__ = [
    "CommandResult",
    "ControllerChanged",
    "Effect",
    "GroupRemoved",
    "HistoryAppended",
    "ReplicasChanged",
    "RoleChanged",
    "SetChanged",
]


class CommandResult(msgspec.Struct, frozen=True):
    """The answer to one command.

    `view` is the group after it (also with most refusals: 2000, 2001, 2002 and 2011 callers need
    it), None where the group is not known; `alive` in it follows the command's stamped liveness.
    `broker_id` is the id of a registered or applied broker. `master_alive` says whether the view's
    master lives: 1003 names it only then. `controller_epoch` answers BecomeController.
    """

    code: ResponseCode
    remark: str = ""
    view: RoleView | None = None
    broker_id: int = 0
    master_alive: bool = False
    controller_epoch: int = 0

    @property
    def ok(self) -> bool:
        return self.code is ResponseCode.SUCCESS


class RoleChanged(msgspec.Struct, frozen=True):
    """The group has another master, none, or the same one in a new epoch."""

    view: RoleView


class SetChanged(msgspec.Struct, frozen=True):
    """The SyncStateSet changed within the master's epoch."""

    view: RoleView


class ReplicasChanged(msgspec.Struct, frozen=True):
    """What is registered of the group's replicas changed; both epochs stand."""

    view: RoleView


class GroupRemoved(msgspec.Struct, frozen=True):
    """The group is known no more."""

    broker_name: str


class ControllerChanged(msgspec.Struct, frozen=True):
    """`node` leads the controllers from `controller_epoch` on."""

    node: str
    nonce: str
    controller_epoch: int


class HistoryAppended(msgspec.Struct, frozen=True):
    """One more line of the history."""

    event: HistoryEvent


Effect = (
    RoleChanged | SetChanged | ReplicasChanged | GroupRemoved | ControllerChanged | HistoryAppended
)
