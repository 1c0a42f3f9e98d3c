"""The commands of the controllers' replicated log, their bytes, answers and effects. Pure.

A command holds all that `ControllerState.apply` may look at: the proposer's clock, the liveness it
saw (`live`), the epochs to be replaced (R10). Applied in one order they give one state on every
node. The bytes are canonical JSON (sorted keys, no spaces). It has a version `"v"`, the command's
name as `"type"`, and in `"rules"` the version of the rules by which every node applies it. Without
`"rules"` that is 0: early versions did not write it. A node that cannot read an entry, or does not
know its rules, must stop, or its state would differ.

Effects say what to push and to record. Each node computes them from the state. Performing one twice
does no harm, since views carry their epochs and events their index.

Origin: RocketMQ's `org.apache.rocketmq.controller.impl` (RIP-44), with liveness stamped in as its
jRaft controller does.
"""

from typing import Final, Self

import msgspec

from batonmq.history.event import HistoryEvent
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.role_view import RoleView

VERSION: Final = 1
RULES_VERSION: Final = 4
"""The newest rules that this version knows. Raised with every change of what a command does to the
state: see "A rule of the controllers" in CONTRIBUTING.md."""
COMMAND_SIZE_MAX: Final = 64 * 1024
"""Bytes of one encoded command."""
_BRACKETS_MAX: Final = 512
"""Of a report's JSON. At about a thousand in each other earlier versions give up."""
NO_BROKER: Final = 0
"""In place of a broker id: no broker. Ids start at 1; Java's -1 means the same."""
ANY_EPOCH: Final = -1
"""In place of an expected epoch: any."""
ELECTION_PRIORITY_DEFAULT: Final = 2**31 - 1
"""RocketMQ's `brokerElectionPriority`: the smaller one wins."""


class CommandDecodeError(ValueError):
    """Bytes in the log that are no command of a known version: the process must stop."""


class LiveBroker(msgspec.Struct, frozen=True):
    """One living replica as its newest heartbeat described it; -1 where unknown.

    `epoch` is the last entry of the epoch file, offsets are bytes of the commit log. `master_epoch`
    is the highest that the broker accepted, `sync_state_set_epoch` that of the set in its newest
    view.
    """

    broker_id: int
    incarnation: str = ""
    epoch: int = -1
    max_offset: int = -1
    confirm_offset: int = -1
    election_priority: int = ELECTION_PRIORITY_DEFAULT
    min_offset: int = -1
    master_epoch: int = -1
    sync_state_set_epoch: int = -1

    @property
    def key(self) -> tuple[int, int]:
        """(masterEpoch, setEpoch) of the newest view that it accepted."""
        return (self.master_epoch, self.sync_state_set_epoch)


class NewMember(msgspec.Struct, frozen=True):
    """A member of a proposed SyncStateSet, with the process whose acks were counted (R12)."""

    broker_id: int
    incarnation: str = ""


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """The fields of every command.

    `request_id` is unique and the same in every retry, so that a repeated command gets its first
    answer (R11); empty: no answer is kept. A command with a `controller_epoch` below the current
    one is refused: its leader was deposed. `now_ms` is the proposer's wall clock.
    """

    request_id: str = ""
    controller_epoch: int = 0
    # The rules have no clock of their own: every node must come to the same state.
    now_ms: int = 0

    def stamped(self, *, controller_epoch: int, now_ms: int) -> Self:
        """The same command as the leader of `controller_epoch` proposes it at `now_ms`."""
        # A retry keeps its request id but gets a new stamp: the old one may be of a deposed leader.
        return msgspec.structs.replace(self, controller_epoch=controller_epoch, now_ms=now_ms)


class RegisterBroker(Command, frozen=True, kw_only=True, tag="register_broker"):
    """Registers a broker, the first time or again: CONTROLLER_REGISTER_BROKER (1003) or gRPC.

    - `broker_id`: NO_BROKER asks for an id. `register_check_code` is the same at each attempt, so a
      repeated one gets the same id.
    - `incarnation`: empty for a broker that speaks only remoting. Such a broker must have applied
      for its id before (APPLY_BROKER_ID, 1013).
    - `epoch`, `max_offset`, `confirm_offset`: of its log, -1 where unknown. `accepted_epoch`: the
      highest masterEpoch that it accepted.
    - `suspect`: why its log may lack bytes that it acked (R17). `earlier_lives`: the incarnations
      that wrote in its data folder before.
    - `confirm_floor`: the highest confirmOffset that the leader knows of; a member has reached it.
    - `owner`: the hash of its data folder's secret. `is_stranger`: the leader lets it have an id of
      another owner (R59).
    - `live`: the reply names only a living master, and a second process of a living replica is
      refused (R18).
    """

    broker_name: str
    cluster_name: str = ""
    broker_id: int = NO_BROKER
    register_check_code: str = ""
    address: str = ""
    ha_address: str = ""
    incarnation: str = ""
    log_id: str = ""
    learner: bool = False
    epoch: int = -1
    max_offset: int = -1
    confirm_offset: int = -1
    election_priority: int = ELECTION_PRIORITY_DEFAULT
    suspect: str = ""
    accepted_epoch: int = -1
    earlier_lives: tuple[str, ...] = ()
    confirm_floor: int = -1
    live: tuple[LiveBroker, ...] = ()
    owner: str = ""
    is_stranger: bool = False


class ApplyBrokerId(Command, frozen=True, kw_only=True, tag="apply_broker_id"):
    """Takes the id that GET_NEXT_BROKER_ID offered (APPLY_BROKER_ID, 1013).

    `register_check_code` is `address;millis`.
    """

    broker_name: str
    cluster_name: str = ""
    broker_id: int = NO_BROKER
    register_check_code: str = ""


class AlterSyncStateSet(Command, frozen=True, kw_only=True, tag="alter_sync_state_set"):
    """The master (id, incarnation, epoch) replaces the set of `sync_state_set_epoch`.

    CONTROLLER_ALTER_SYNC_STATE_SET (1001), or gRPC. `confirm_offset` is the master's at proposal,
    -1 if unknown. `live`: the group's living replicas.
    """

    broker_name: str
    master_broker_id: int
    master_epoch: int
    sync_state_set_epoch: int
    new_set: tuple[NewMember, ...]
    master_incarnation: str = ""
    confirm_offset: int = -1
    reason: str = ""
    live: tuple[LiveBroker, ...] = ()


class ElectMaster(Command, frozen=True, kw_only=True, tag="elect_master"):
    """Replaces the master of `expected_master_epoch`: CONTROLLER_ELECT_MASTER (1002), gRPC, or the
    leader's own election.

    - `broker_id`: the requesting broker, NO_BROKER for the leader. With `designate` only that
      broker may win.
    - `unclean`: allows a winner from outside the SyncStateSet, which an operator names (G5).
    - `confirm_floor`: the offset that a candidate must reach (R16), -1 if unknown.
    - `drained_offset`: in a planned switch (R33) the end of the old master's log, which the
      designated broker has acked; else 0.
    - `cut_later_acks`: the operator accepts that an old master out of sight may still acknowledge
      writes, and that these are cut (R44).
    - For the history: `reason`, `detected_ms` (wall clock) and `node` say why, when and where the
      need was seen; `silent_ms` how long the master had been silent, -1 if unknown.
    """

    broker_name: str
    cluster_name: str = ""
    broker_id: int = NO_BROKER
    designate: bool = False
    unclean: bool = False
    expected_master_epoch: int = ANY_EPOCH
    confirm_floor: int = -1
    drained_offset: int = 0
    reason: str = ""
    detected_ms: int = 0
    silent_ms: int = -1
    node: str = ""
    cut_later_acks: bool = False
    live: tuple[LiveBroker, ...] = ()


class CleanBrokerData(Command, frozen=True, kw_only=True, tag="clean_broker_data"):
    """Removes replicas (CLEAN_BROKER_DATA, 1011); no `broker_ids` means the whole group."""

    broker_name: str
    cluster_name: str = ""
    broker_ids: tuple[int, ...] = ()
    clean_living_broker: bool = False
    # As the leader saw it: nodes see different brokers, and must decide alike.
    live: tuple[LiveBroker, ...] = ()
    reason: str = ""
    """Who asked, for the history."""


class BecomeController(Command, frozen=True, kw_only=True, tag="become_controller"):
    """A new Raft leader opens its gate. Raises the controller epoch, which fences older commands.

    `nonce` is random per attempt, and its request id. For the history: `started_ms` of the process,
    `leader_seen_ms` when it last knew of a leader (wall clock, 0: never).
    """

    node: str
    nonce: str
    started_ms: int = 0
    leader_seen_ms: int = 0


class ReportEvent(Command, frozen=True, kw_only=True, tag="report_event"):
    """An event that a broker saw itself (role_changed, opened, first_ack, truncated, ...).

    `time_ms` is the broker's wall clock; `json` holds further fields, as a JSON object.
    """

    broker_name: str
    broker_id: int
    kind: str
    master_epoch: int = 0
    time_ms: int = 0
    json: str = ""


class NoteEvent(Command, frozen=True, kw_only=True, tag="note_event"):
    """An event that a controller saw itself (pushed, election_blocked, ...), only for the history.

    `broker_id` is the broker concerned, NO_BROKER if none. `time_ms` is the wall clock of `node`, 0
    for that of the proposal; `json` holds more fields, as a JSON object.
    """

    broker_name: str
    kind: str
    node: str
    broker_id: int = NO_BROKER
    master_epoch: int = 0
    time_ms: int = 0
    reason: str = ""
    json: str = ""


AnyCommand = (
    RegisterBroker
    | ApplyBrokerId
    | AlterSyncStateSet
    | ElectMaster
    | CleanBrokerData
    | BecomeController
    | ReportEvent
    | NoteEvent
)


class _Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    v: int
    command: AnyCommand
    rules: int = 0


# Sorted keys: nodes compare digests of what they applied, so one command has one spelling.
_encoder = msgspec.json.Encoder(order="sorted")
_decoder = msgspec.json.Decoder(_Envelope)


def encode(command: AnyCommand, rules: int = 0) -> bytes:
    """The canonical bytes of `command`, to be applied by `rules`. Raises ValueError for one that no
    log may have: above COMMAND_SIZE_MAX bytes, or with JSON that is nested too deeply."""
    if isinstance(command, ReportEvent | NoteEvent):
        brackets = command.json.count("[") + command.json.count("{")
        if brackets > _BRACKETS_MAX:
            # A node of an earlier version stops when it applies such an entry, and at each start.
            raise ValueError(f"a report with {brackets} brackets; at most {_BRACKETS_MAX}")
    raw = _encoder.encode(_Envelope(VERSION, command, rules))
    if len(raw) > COMMAND_SIZE_MAX:
        # Refused before it enters the log: every node keeps and sends each entry whole.
        raise ValueError(f"a command of {len(raw)} bytes; at most {COMMAND_SIZE_MAX} are allowed")
    return raw


def decode(raw: bytes) -> tuple[AnyCommand, int]:
    """The command in `raw` and its rules. Raises CommandDecodeError if this version cannot read
    it."""
    try:
        envelope = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CommandDecodeError(f"not a command: {error}") from error
    # Skipping an entry of a newer version would give this node another state than its peers have.
    if envelope.v != VERSION:
        raise CommandDecodeError(f"a command of version {envelope.v}; known is {VERSION}")
    return envelope.command, envelope.rules


class CommandResult(msgspec.Struct, frozen=True):
    """The answer to one command: RocketMQ's code and remark.

    `view` is the group after it, also with most refusals; None for an unknown group. `alive` in it
    is taken from the command. `broker_id`: as registered or applied for. `master_alive`: whether
    the view's master lives. `controller_epoch` answers BecomeController.
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
    """A registration of the group changed; both epochs are the same."""

    view: RoleView


class HistoryAppended(msgspec.Struct, frozen=True):
    """One more line of the history."""

    event: HistoryEvent


Effect = RoleChanged | SetChanged | ReplicasChanged | HistoryAppended
