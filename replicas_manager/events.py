"""Events into, and effects out of, the role state machine (`state`). Pure.

`controller` and `target` are addresses. Effects must be performed in order; `SaveIdentity` must be
durable before the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batonmq.protocol.role_view import RoleView


@dataclass(frozen=True, slots=True)
class Started:
    """The process and its store are open: begin to register."""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """The stream to `controller` is open, and its Hello is queued."""

    controller: str


@dataclass(frozen=True, slots=True)
class SessionClosed:
    controller: str


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """`controller` refuses this session, e.g. because another incarnation has one (R18)."""

    controller: str
    code: int
    remark: str


@dataclass(frozen=True, slots=True)
class AnswerReceived:
    """A HeartbeatAnswer."""

    controller: str
    sent_ms: int
    """When the heartbeat was sent, by our own clock: the lease counts from then (R5)."""
    leader: bool
    controller_epoch: int
    leader_grpc_address: str
    master_epoch: int
    sync_state_set_epoch: int
    no_lease: bool = False
    """The recorded master is another process, or none. The epochs alone do not show that:
    controllers that lost their state may give the same epoch to another process (R7)."""


@dataclass(frozen=True, slots=True)
class ViewReceived:
    controller: str
    view: RoleView
    pushed: bool = True
    """It came in order on the session. Views in answers to calls may overtake each other, so who is
    alive is taken from pushed ones only."""


@dataclass(frozen=True, slots=True)
class LeaderHinted:
    """`target` answered CONTROLLER_NOT_LEADER (2007). `leader`: its hint, or ""."""

    target: str
    leader: str


@dataclass(frozen=True, slots=True)
class Replied:
    """A controller answered `call`. `broker_id`: the registered id, or 0."""

    call: Call
    code: int
    remark: str
    view: RoleView | None = None
    broker_id: int = 0


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No answer (timeout, no connection)."""

    # R11: the call may have taken effect, or may do so later. So it is repeated with its request
    # id, and is no refusal.
    call: Call
    what: str


@dataclass(frozen=True, slots=True)
class ProposalRequested:
    """The HA service proposes a set."""

    new_set: frozenset[int]
    reason: str
    confirm_offset: int
    based_on: tuple[int, int]
    """(masterEpoch, setEpoch) of the view that the broker had: a newer one may have come since."""
    processes: Mapping[int, str] | None = None
    """Broker id -> incarnation in that view: the processes whose acks were counted (R12)."""


@dataclass(frozen=True, slots=True)
class SuspicionChanged:
    """`suspect`: why the log may lack acknowledged bytes (R17); empty once it is whole again."""

    suspect: str


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    """NOTIFY_BROKER_ROLE_CHANGED (1008) came to the remoting endpoint."""

    # Only a hint to fetch the view: it names no process, so it cannot make a master (R3).
    master_epoch: int
    sync_state_set_epoch: int


@dataclass(frozen=True, slots=True)
class ActionFailed:
    """A role change failed in the broker."""

    view: RoleView


@dataclass(frozen=True, slots=True)
class EpochStored:
    """`master_epoch` is durable as the highest accepted (R2)."""

    # Heartbeats name it only from now on: a crash must not take back what controllers know.
    master_epoch: int


@dataclass(frozen=True, slots=True)
class TimeCame:
    """The time `next_deadline_ms` has come (extra ticks do no harm)."""


Event = (
    Started
    | SessionOpened
    | SessionClosed
    | SessionRefused
    | AnswerReceived
    | ViewReceived
    | LeaderHinted
    | Replied
    | Unanswered
    | ProposalRequested
    | SuspicionChanged
    | NoticeReceived
    | ActionFailed
    | EpochStored
    | TimeCame
)


@dataclass(frozen=True, slots=True)
class SendRegister:
    """RegisterBroker; id 0 requests an id. The check code makes repetitions harmless."""

    target: str
    broker_id: int
    request_id: str
    suspect: str
    """Why the log is suspect (R17). The same in each repetition, or it would be unknown which of
    them the controllers recorded."""


@dataclass(frozen=True, slots=True)
class SaveIdentity:
    """Make the assigned id durable, then remove the temporary identity."""

    broker_id: int


@dataclass(frozen=True, slots=True)
class OpenSessions:
    """The process is registered: keep a session with every controller from now on."""

    broker_id: int


@dataclass(frozen=True, slots=True)
class CloseSession:
    """The session is silent: close the connection and connect again."""

    # TCP may show it as alive: the kernel of a process that was stopped still acknowledges.
    controller: str
    reason: str


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    controller: str
    sequence: int
    sent_ms: int
    master_epoch: int
    sync_state_set_epoch: int


@dataclass(frozen=True, slots=True)
class SendElect:
    target: str
    expected_master_epoch: int
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SendAlter:
    """AlterSyncStateSet. With the same `request_id` it is the same request again."""

    target: str
    request_id: str
    master_epoch: int
    sync_state_set_epoch: int
    members: tuple[tuple[int, str], ...]
    """(broker id, incarnation), ascending. With the incarnations controllers refuse a member of
    which another process is registered by now: its acks were not counted (R12)."""
    confirm_offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class FetchView:
    """GetReplicaInfo: a newer view exists, and its push did not come."""

    target: str


# What the broker does in the three roles is said in `link.BrokerActions`.


@dataclass(frozen=True, slots=True)
class BecomeMaster:
    view: RoleView


@dataclass(frozen=True, slots=True)
class BecomeSlave:
    view: RoleView


@dataclass(frozen=True, slots=True)
class StandDown:
    view: RoleView


@dataclass(frozen=True, slots=True)
class AdoptView:
    """The role stays, but the set, an address or an incarnation changed. This ends a proposal in
    flight: `view` has the recorded set (R11)."""

    view: RoleView


@dataclass(frozen=True, slots=True)
class SetDead:
    """The replicas, never this one, that the leading controller declares dead."""

    broker_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class ProposalRefused:
    """For good: this request cannot take effect any more."""

    code: int
    remark: str


@dataclass(frozen=True, slots=True)
class ProposalUnknown:
    """Whether the set changed is unknown, so both sets stay required (R11)."""


@dataclass(frozen=True, slots=True)
class LeaseChanged:
    """Of a master; without a lease it may still serve (R36)."""

    valid: bool


@dataclass(frozen=True, slots=True)
class DropSessions:
    """Close all controller sessions, so that the controllers elect again."""

    reason: str


@dataclass(frozen=True, slots=True)
class HistoryReport:
    """An event for the controllers' history."""

    kind: str
    fields: tuple[tuple[str, int | str], ...] = ()


@dataclass(frozen=True, slots=True)
class Notice:
    """A log line: `event` and fields. `warning`: for operators."""

    event: str
    fields: tuple[tuple[str, int | str], ...] = ()
    warning: bool = False


RoleAction = BecomeMaster | BecomeSlave | StandDown

Call = SendRegister | SendElect | SendAlter | FetchView
"""Each is one unary call to a controller, and ends in `Replied` or `Unanswered`."""

Effect = (
    Call
    | RoleAction
    | SaveIdentity
    | OpenSessions
    | CloseSession
    | SendHeartbeat
    | AdoptView
    | SetDead
    | ProposalRefused
    | ProposalUnknown
    | LeaseChanged
    | DropSessions
    | HistoryReport
    | Notice
)
