"""The effects of the slave core. Frozen values, to be performed in order.

Those of every loop turn are NamedTuples, which cost a third of a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.role_view import RoleView


@dataclass(frozen=True, slots=True)
class Dial:
    """`address` is "" for a Java master: it is asked for it first."""

    address: str


@dataclass(frozen=True, slots=True)
class Hangup:
    reason: str


class SendToMaster(NamedTuple):
    data: bytes


@dataclass(frozen=True, slots=True)
class ProveMaster:
    """Request a Java master's identity at its remoting address (1007), then feed `peer_proved`, or
    `disconnected` if there is no answer."""

    view: RoleView


@dataclass(frozen=True, slots=True)
class TruncateTo:
    """Cut the log (R22), then feed `log_changed`. `unclean`: confirmed bytes, too (R23)."""

    from_offset: int
    offset: int
    unclean: bool = False


@dataclass(frozen=True, slots=True)
class BeginAt:
    """Move the log aside and begin an empty one whose first byte will be `offset`."""

    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class AdoptEpochs:
    """The whole epoch list from now on."""

    entries: tuple[EpochEntry, ...]


@dataclass(frozen=True, slots=True)
class EnterLineage:
    """The log is a part of the history of that name from now on (R47)."""

    name: str


@dataclass(frozen=True, slots=True)
class AppendEpoch:
    epoch: int
    start_offset: int


class AppendLog(NamedTuple):
    """Write `data` at `offset`, which is the log's end. The view is valid until the next read."""

    offset: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class FlushTo:
    """Under haSyncFlush: make all below `offset` durable, then feed `turn_ended` again."""

    offset: int


class Confirm(NamedTuple):
    """All below `offset` is confirmed and here: let readers see the whole messages in it."""

    offset: int


@dataclass(frozen=True, slots=True)
class Following:
    """The history is settled; the log follows from `offset`."""

    offset: int


@dataclass(frozen=True, slots=True)
class Diverged:
    """This replica cannot follow until an operator has acted; reported once per reason."""

    reason: str


SlaveEffect = (
    Dial
    | Hangup
    | SendToMaster
    | ProveMaster
    | TruncateTo
    | BeginAt
    | AdoptEpochs
    | EnterLineage
    | AppendEpoch
    | AppendLog
    | FlushTo
    | Confirm
    | Following
    | Diverged
)
