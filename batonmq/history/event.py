"""An event of the failover history: its fields, kinds and JSON form. Pure. Events are made when a
command is applied, so all controllers have the same ones in the same order. The key is (log,
raft_index, part): `log` is the random name of the replicated log, since a log that starts again
counts from 1; `part` numbers the events of one command. Times are wall clocks in ms."""

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Final, TypeVar

import msgspec

from batonmq.protocol.fastjson import NOT_JSON

HISTORY_EVENTS_MAX: Final = 2_000  # Events kept in the replicated state; the files keep more.
REPORT_SIZE_MAX: Final = 2_048
"""Characters that a broker may add to a report, so that a full history stays small."""
REASON_SIZE_MAX: Final = 200

EventKey = tuple[str, int, int]  # (log, raft index, part): unique.


_FULL_DISK = re.compile(r"disk full, writes refused for (\d+) ms: ")


def full_disk_reason(refused_ms: int, why: str) -> str:
    """The reason of a switch that a master with a full disk asks for."""
    return f"disk full, writes refused for {refused_ms} ms: {why}"


def refused_ms_of(reason: str) -> int:
    """How long a master had refused writes before such a switch, -1 for any other reason."""
    found = _FULL_DISK.match(reason)
    return int(found[1]) if found else -1


class EventKind(StrEnum):
    """Brokers send REPORTED_KINDS, controllers NOTED_KINDS; the others follow from commands."""

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


NOTED_KINDS: Final = frozenset(
    {
        EventKind.PUSHED,
        EventKind.ELECTION_BLOCKED,
        EventKind.SWITCH_REQUESTED,
        EventKind.SWITCH_FAILED,
    }
)
ON_BROKER_CLOCK: Final = frozenset(
    {
        EventKind.ROLE_CHANGED,
        EventKind.OPENED,
        EventKind.FIRST_ACK,
        EventKind.TRUNCATED,
        EventKind.LEASE_LOST,
        EventKind.LEASE_BACK,
        EventKind.DIVERGED,
        EventKind.DRAINED,
    }
)
"""Kinds whose `time_ms` is the reporting broker's."""
REPORTED_KINDS: Final = ON_BROKER_CLOCK | {EventKind.SWITCH_FAILED}
"""Kinds accepted as a broker's report. A failed switch comes on the session instead, and a
controller notes it on its own clock."""


class EventDetail(msgspec.Struct, frozen=True, rename="camel"):
    """What a report or note adds, in the event's `json`. A field that is not there has its default.

    | kind | fields |
    |---|---|
    | role_changed | role (MASTER, SLAVE) |
    | opened | max_offset, confirm_offset, offsets_clamped: offsets of groups that were set to the
      end of their queue, after an unclean election |
    | first_ack | confirm_offset, waited_ms: how long the first acknowledged write had waited |
    | truncated | from_offset, to_offset: the log's end before and after |
    | lease_back | away_ms, writes_refused |
    | diverged | reason |
    | drained | target (broker id), drained_offset, held_ms: how long sends had been held |
    | pushed | applied_ms (wall clock), sessions: to how many brokers |
    | election_blocked | operator: an operator has to decide |
    | switch_requested | master (broker id) |
    """

    role: str = ""
    reason: str = ""
    operator: bool = False
    writes_refused: bool | None = None
    master: int = 0
    target: int = 0
    sessions: int = 0
    applied_ms: int = 0
    away_ms: int = 0
    from_offset: int = 0
    to_offset: int = 0
    drained_offset: int = -1
    held_ms: int = -1
    waited_ms: int = -1
    offsets_clamped: int = 0
    max_offset: int = -1
    confirm_offset: int = -1


# Without `gc` a million of them cost half: they hold no objects that could refer to them.
class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One line of the history; fields that do not apply keep their default and are left out.

    `kind` is an EventKind, or one of a newer controller. `time_ms` is the proposer's clock and
    never goes back; for REPORTED_KINDS and NOTED_KINDS the sender's. `broker_id`: the broker that
    won, registered or reports, 0: none. `set_before` and `sync_state_set` ascend. `node`: the
    controller that proposed an election, noted the event, or leads now after `node_before`.
    `detected_ms`: when the need for an election was seen, on the clock of `node`; `reason`: how;
    `silent_ms`: how long the master had been silent (-1 unknown); `proposed_ms`: when that node
    proposed. `started_ms`: start of a new leading controller; `leader_seen_ms`: when it last had a
    leader, itself included (0: never since). Offsets are bytes, -1 unknown. `json` is an
    EventDetail. `gap` belongs to a file: it may lack events of its log before this one."""

    log: str
    raft_index: int
    part: int = 0
    time_ms: int
    kind: str
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
    def key(self) -> EventKey:
        return (self.log, self.raft_index, self.part)

    @property
    def clock(self) -> str:
        """Whose clock `time_ms` is, for people."""
        if self.kind in ON_BROKER_CLOCK:
            return f"broker {self.broker_id}"
        return f"controller {self.node}".rstrip()

    @property
    def detail(self) -> EventDetail:
        """`json`, decoded at each call; a field of the wrong type has its default."""
        if not self.json:
            return _NO_DETAIL
        try:
            return _decode_detail(self.json)
        except NOT_JSON:
            return _lenient(EventDetail, _object(self.json))

    def to_json(self) -> str:
        """One line of JSON without the line end, as in the file."""
        return msgspec.json.encode(self, order="sorted").decode()


TIMES: Final = ("time_ms", "detected_ms", "proposed_ms", "started_ms", "leader_seen_ms")
"""Fields of HistoryEvent that are times; 0 if they do not apply."""

TIME_MS_MAX: Final = 253_370_764_799_999
"""The last time that Python and SQL know, less than a day before the year 9999 begins anywhere."""

_decode_event: Final = msgspec.json.Decoder(HistoryEvent).decode
_decode_detail: Final = msgspec.json.Decoder(EventDetail).decode
_NO_DETAIL: Final = EventDetail()
_ABSENT: Final = {"log": "", "raft_index": -1, "time_ms": 0, "kind": ""}
"""What stands for a required field that a line lacks."""


def lenient_event(line: bytes | str) -> HistoryEvent | None:
    """The event of a line of any version; a missing or wrong field gets its default, an index -1.
    None if it is no JSON object."""
    try:
        return _decode_event(line)
    # One bad field must not hide the event: explaining is all that the history does.
    except NOT_JSON:
        raw = _object(line)
        return _lenient(HistoryEvent, raw) if raw is not None else None


def _object(text: bytes | str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


_Kind = TypeVar("_Kind", bound=msgspec.Struct)


def _lenient(kind: type[_Kind], raw: Mapping[str, Any] | None) -> _Kind:
    """An event with the fields of `raw` that have the right type."""
    made: dict[str, Any] = {}
    for field in _fields(kind):
        try:
            made[field.name] = msgspec.convert((raw or {})[field.encode_name], field.type)
        except (KeyError, msgspec.ValidationError):
            if field.required:
                made[field.name] = _ABSENT[field.name]
    return kind(**made)


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def _checking(*, nullable: bool) -> msgspec.json.Decoder[Any]:
    """Of events whose numbers fit 64 bits (`part`: 32) and whose times a calendar has. `nullable`:
    times are any numbers, and what need not be there may be null, which is None then."""
    made: list[Any] = []
    for field in _fields(HistoryEvent):
        bits = 31 if field.name == "part" else 63
        least, most = -(1 << bits), (1 << bits) - 1
        if field.name in TIMES and not nullable:
            least, most = 0, TIME_MS_MAX
        number: Any = Annotated[int, msgspec.Meta(ge=least, le=most)]
        numbers: dict[Any, Any] = {int: number, tuple[int, ...]: tuple[number, ...]}
        kind = numbers.get(field.type, field.type)
        if field.required:
            made.append((field.name, kind))
        elif nullable:
            made.append((field.name, kind | None, None))
        else:
            made.append((field.name, kind, field.default))
    bases: tuple[type[msgspec.Struct], ...] = () if nullable else (HistoryEvent,)
    return msgspec.json.Decoder(
        msgspec.defstruct("HistoryEvent", made, bases=bases, frozen=True, kw_only=True, gc=False)
    )


_CHECKED: Final = _checking(nullable=False)
_NULLABLE: Final = _checking(nullable=True)


def checked_event(line: bytes) -> HistoryEvent:
    """The event of a line in which every known field is right; null stands for the default, and a
    time that no calendar has is 0. Raises ValueError."""
    try:
        text = line.decode()
        try:
            event: HistoryEvent = _CHECKED.decode(text)
            return event
        except NOT_JSON:
            found = msgspec.structs.asdict(_NULLABLE.decode(text))
    except NOT_JSON as error:
        raise ValueError(str(error)) from error
    known = {name: value for name, value in found.items() if value is not None}
    wild = (name for name in TIMES if not 0 <= known.get(name, 0) <= TIME_MS_MAX)
    made: HistoryEvent = msgspec.convert(known | dict.fromkeys(wild, 0), _CHECKED.type)
    return made
