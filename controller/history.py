"""The events of the failover history.

An event is made while a command is applied, so every node has the same ones in the same order. It
is named by (log, raft_index, part): `log` is the random name that the replicated log got from its
first leader, since a log that is begun anew counts its indexes from 1 again; `part` tells apart
several events of one command. Times are wall clocks, for people to read.
"""

from enum import StrEnum
from typing import Final

import msgspec

__all__ = [
    "HISTORY_EVENTS_MAX",
    "NOTED_KINDS",
    "REASON_SIZE_MAX",
    "REPORTED_KINDS",
    "REPORT_SIZE_MAX",
    "EventKind",
    "HistoryEvent",
]

HISTORY_EVENTS_MAX: Final = 2_000
"""Events kept in the replicated state; the file keeps all."""


REPORT_SIZE_MAX: Final = 2_048
"""Characters of what a broker may add to a report, so that a full history stays small."""
REASON_SIZE_MAX: Final = 200


class EventKind(StrEnum):
    """What can happen. REPORTED_KINDS come from brokers, NOTED_KINDS from controllers; the others
    follow from commands."""

    BROKER_REGISTERED = "broker_registered"
    ELECTED = "elected"
    ELECTION_FAILED = "election_failed"
    SET_ALTERED = "set_altered"
    BROKER_CLEANED = "broker_cleaned"
    CONTROLLER_LEADER_CHANGED = "controller_leader_changed"
    ROLE_CHANGED = "role_changed"
    OPENED = "opened"
    FIRST_ACK = "first_ack"
    TRUNCATED = "truncated"
    LEASE_LOST = "lease_lost"
    LEASE_BACK = "lease_back"
    DIVERGED = "diverged"
    DRAINED = "drained"
    PUSHED = "pushed"
    ELECTION_BLOCKED = "election_blocked"
    SWITCH_REQUESTED = "switch_requested"
    SWITCH_FAILED = "switch_failed"


REPORTED_KINDS: Final = frozenset(
    {
        EventKind.ROLE_CHANGED,
        EventKind.OPENED,
        EventKind.FIRST_ACK,
        EventKind.TRUNCATED,
        EventKind.LEASE_LOST,
        EventKind.LEASE_BACK,
        EventKind.DIVERGED,
        EventKind.DRAINED,
        EventKind.SWITCH_FAILED,
    }
)
NOTED_KINDS: Final = frozenset(
    {
        EventKind.PUSHED,
        EventKind.ELECTION_BLOCKED,
        EventKind.SWITCH_REQUESTED,
        EventKind.SWITCH_FAILED,
    }
)


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the history. Fields that do not apply keep their default and are left out.

    `time_ms` is the proposer's clock and never goes back; for reported and noted kinds it is that
    of who tells it. `broker_id` is who it is about (winner, registered, reporting), 0 if nobody.
    `set_before` and `sync_state_set` ascend. `node` is the controller that proposed an election,
    noted the event, or leads from now on after `node_before`. `detected_ms` is when the need for an
    election was seen, on the clock of `node`, `reason` how, and `silent_ms` how long the master had
    said nothing by then (-1 unknown); `proposed_ms` is when that node proposed. `started_ms` is
    when the process of a new leading controller was started, `leader_seen_ms` when it last knew of
    a leader, itself included (0: never in its life). Offsets are bytes, -1 where unknown. `json`
    holds what was added to a report or note, as text of a JSON object. `gap` belongs to a file, not
    to the event: its log may have events in front of this one that the file never got.
    """

    log: str
    raft_index: int
    part: int = 0
    time_ms: int
    kind: EventKind
    broker_name: str = ""
    broker_id: int = 0
    incarnation: str = ""
    address: str = ""
    master_epoch: int = 0
    sync_state_set_epoch: int = 0
    controller_epoch: int = 0
    node: str = ""
    node_before: str = ""
    master_before: int = 0
    set_before: tuple[int, ...] = ()
    sync_state_set: tuple[int, ...] = ()
    max_offset: int = -1
    confirm_offset: int = -1
    unclean: bool = False
    reason: str = ""
    detected_ms: int = 0
    silent_ms: int = -1
    proposed_ms: int = 0
    started_ms: int = 0
    leader_seen_ms: int = 0
    json: str = ""
    gap: bool = False

    @property
    def key(self) -> tuple[str, int, int]:
        """(log, raft_index, part): no two events share it."""
        return (self.log, self.raft_index, self.part)

    def to_json(self) -> str:
        """The event as one line of JSON, without the line end; the form in the file."""
        return msgspec.json.encode(self, order="sorted").decode()
