"""Effects of the slave core, to be performed in order. Those of every loop turn are NamedTuples,
which cost a third of a frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from batonmq.epoch.entry import EpochEntry
from batonmq.ha.node_secret import Unproven
from batonmq.protocol.role_view import RoleView


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to `address`; "" for a Java master: first ask it for its HA address."""

    address: str


@dataclass(frozen=True, slots=True)
class Hangup:
    reason: str


class SendToMaster(NamedTuple):
    data: bytes


@dataclass(frozen=True, slots=True)
class ProveMaster:
    """Ask the Java master for its identity (GET_BROKER_EPOCH_CACHE, 1007), then feed `peer_proved`,
    or `disconnected` without an answer."""

    view: RoleView


@dataclass(frozen=True, slots=True)
class TruncateTo:
    """Cut the log (R22), then feed `log_changed`. `unclean`: also confirmed bytes (R23)."""

    from_offset: int
    offset: int
    unclean: bool = False


@dataclass(frozen=True, slots=True)
class BeginAt:
    """Set the log aside and begin an empty one at `offset`."""

    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class AdoptEpochs:
    """Replace the epoch list by this one."""

    entries: tuple[EpochEntry, ...]


@dataclass(frozen=True, slots=True)
class EnterLineage:
    """Store that the log belongs to this lineage from now on (R47)."""

    name: str


@dataclass(frozen=True, slots=True)
class AppendEpoch:
    epoch: int
    start_offset: int


class AppendLog(NamedTuple):
    """Write `data` at the log's end, `offset`. `data` is valid until the next read."""

    offset: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class FlushTo:
    """With haSyncFlush: make all bytes below `offset` durable, then feed `turn_ended`."""

    offset: int


class Confirm(NamedTuple):
    """Let readers see the whole messages below `offset`."""

    offset: int


@dataclass(frozen=True, slots=True)
class Following:
    """The histories fit: the log continues from `offset`."""

    offset: int


@dataclass(frozen=True, slots=True)
class Diverged:
    """This replica cannot follow: an operator must act. Reported once per reason."""

    reason: str


SlaveEffect = (
    Dial
    | Unproven
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
