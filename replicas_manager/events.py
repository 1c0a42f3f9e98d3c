"""Events into, and effects out of, the role state machine (`state`). Pure.

`controller` and `target` are addresses. Effects must be performed in order; `SaveIdentity` must be
durable before the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """A HeartbeatAnswer. `sent_ms`: the send time by our own clock, echoed. `no_lease`: the
    recorded master is another process, or none."""

    controller: str
    sent_ms: int
    leader: bool
    controller_epoch: int
    leader_grpc_address: str
    master_epoch: int
    sync_state_set_epoch: int
    no_lease: bool = False


@dataclass(frozen=True, slots=True)
class ViewReceived:
    """A role view. `pushed`: in order on the session, so its alive flags are current; else in the
    answer to a call."""

    controller: str
    view: RoleView
    pushed: bool = True


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
    """No answer (timeout, no connection). The call may have taken effect, or may do so later."""

    call: Call
    what: str


@dataclass(frozen=True, slots=True)
class ProposalRequested:
    """The HA service proposes a set. `based_on`: (masterEpoch, setEpoch) of its view."""

    new_set: frozenset[int]
    reason: str
    confirm_offset: int
    based_on: tuple[int, int]
    processes: Mapping[int, str] | None = None
    """Broker id -> incarnation in that view: the processes whose acks were counted (R12)."""


@dataclass(frozen=True, slots=True)
class SuspicionChanged:
    """`suspect`: why the log may lack acknowledged bytes (R17); empty once it is whole again."""

    suspect: str


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    """NOTIFY_BROKER_ROLE_CHANGED (1008) came to the remoting endpoint: only a hint."""

    master_epoch: int
    sync_state_set_epoch: int


@dataclass(frozen=True, slots=True)
class ActionFailed:
    """A role change failed in the broker."""

    view: RoleView


@dataclass(frozen=True, slots=True)
class EpochStored:
    """`master_epoch` is durable as the highest accepted (R2)."""

    master_epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
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
    | Tick
)


@dataclass(frozen=True, slots=True)
class SendRegister:
    """RegisterBroker; id 0 requests an id. The check code makes repetitions harmless.

    `suspect`: why the log is suspect (R17), the same in each repetition.
    """

    target: str
    broker_id: int
    request_id: str
    suspect: str


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
    """(broker id, incarnation in the view), ascending (R12)."""
    confirm_offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class FetchView:
    """GetReplicaInfo: a newer view exists, and its push did not come."""

    target: str


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
    broker_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class ProposalRefused:
    code: int
    remark: str


@dataclass(frozen=True, slots=True)
class ProposalUnknown:
    pass


@dataclass(frozen=True, slots=True)
class LeaseChanged:
    valid: bool
    master_epoch: int


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
    fields: tuple[tuple[str, int | str], ...] = field(default=())
    warning: bool = False


RoleAction = BecomeMaster | BecomeSlave | StandDown

Call = SendRegister | SendElect | SendAlter | FetchView
"""Each is one unary call to a controller, and ends in `Replied` or `Unanswered`."""

Effect = (
    SendRegister
    | SaveIdentity
    | OpenSessions
    | CloseSession
    | SendHeartbeat
    | SendElect
    | SendAlter
    | FetchView
    | BecomeMaster
    | BecomeSlave
    | StandDown
    | AdoptView
    | SetDead
    | ProposalRefused
    | ProposalUnknown
    | LeaseChanged
    | DropSessions
    | HistoryReport
    | Notice
)
