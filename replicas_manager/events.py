"""Events that go into, and effects that come out of, the role state machine (`state.py`).

All are frozen. `controller` and `target` are gRPC addresses. Effects are to be performed in the
order given; `SaveIdentity` and `PersistRole` must be durable before the next effect is performed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.role_view import RoleView

# ---------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Started:
    """The process is up, its store is open: begin to register."""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """The stream to `controller` is there and its Hello has been queued."""

    controller: str


@dataclass(frozen=True, slots=True)
class SessionClosed:
    controller: str


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """`controller` does not take this session, e.g. another incarnation lives (R18)."""

    controller: str
    code: int
    remark: str


@dataclass(frozen=True, slots=True)
class AnswerReceived:
    """A HeartbeatAnswer; `sent_ms` is this process's own clock, echoed."""

    controller: str
    sent_ms: int
    leader: bool
    controller_epoch: int
    leader_grpc_address: str
    master_epoch: int
    sync_state_set_epoch: int


@dataclass(frozen=True, slots=True)
class ViewReceived:
    """A role view. `pushed`: on the session, in order, so that its alive flags are current."""

    controller: str
    view: RoleView
    pushed: bool = True


@dataclass(frozen=True, slots=True)
class LeaderHinted:
    """`target` answered a call with 2007 and says that `leader` leads ("" if it does not know)."""

    target: str
    leader: str


@dataclass(frozen=True, slots=True)
class RegisterReplied:
    target: str
    code: int
    remark: str
    broker_id: int
    view: RoleView | None


@dataclass(frozen=True, slots=True)
class RegisterFailed:
    """No answer: timeout, no connection."""

    target: str
    what: str


@dataclass(frozen=True, slots=True)
class ElectReplied:
    target: str
    code: int
    remark: str
    view: RoleView | None


@dataclass(frozen=True, slots=True)
class ElectFailed:
    target: str
    what: str


@dataclass(frozen=True, slots=True)
class AlterReplied:
    request_id: str
    target: str
    code: int
    remark: str
    view: RoleView | None


@dataclass(frozen=True, slots=True)
class AlterFailed:
    """No answer: the Alter may or may not have been, or may yet be, committed."""

    request_id: str
    target: str
    what: str


@dataclass(frozen=True, slots=True)
class FetchFailed:
    target: str
    what: str


@dataclass(frozen=True, slots=True)
class ProposalRequested:
    """The HA service asks for a set. `based_on` is the (masterEpoch, setEpoch) it last heard of."""

    new_set: frozenset[int]
    reason: str
    confirm_offset: int
    based_on: tuple[int, int]


@dataclass(frozen=True, slots=True)
class FactsChanged:
    """Something that controllers should hear of at once, e.g. the first epoch entry of a master."""


@dataclass(frozen=True, slots=True)
class SuspicionChanged:
    """Why the log may miss what it acknowledged (R17), empty from when it is whole again."""

    suspect: str


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    """NOTIFY_BROKER_ROLE_CHANGED (1008) came on the remoting door: only a hint to ask."""

    master_epoch: int
    sync_state_set_epoch: int


@dataclass(frozen=True, slots=True)
class ActionFailed:
    """A role change of the broker raised."""

    view: RoleView


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that `next_deadline_ms` named has come (or any other)."""


Event = (
    Started
    | SessionOpened
    | SessionClosed
    | SessionRefused
    | AnswerReceived
    | ViewReceived
    | LeaderHinted
    | RegisterReplied
    | RegisterFailed
    | ElectReplied
    | ElectFailed
    | AlterReplied
    | AlterFailed
    | FetchFailed
    | ProposalRequested
    | FactsChanged
    | SuspicionChanged
    | NoticeReceived
    | ActionFailed
    | Tick
)

# --------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class SendRegister:
    """RegisterBroker; id 0 asks for one, the check code makes asking again harmless.

    `suspect` is what it says of the log (R17): the same each time that the request is repeated.
    """

    target: str
    broker_id: int
    request_id: str
    suspect: str


@dataclass(frozen=True, slots=True)
class SaveIdentity:
    """Make the assigned id durable, remove the temporary identity."""

    broker_id: int


@dataclass(frozen=True, slots=True)
class OpenSessions:
    """Registered: keep a session with every controller from now on."""

    broker_id: int


@dataclass(frozen=True, slots=True)
class CloseSession:
    """The session is silent: drop the connection and dial again."""

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
    """AlterSyncStateSet. Sent again with the same `request_id` it is the same request."""

    target: str
    request_id: str
    master_epoch: int
    sync_state_set_epoch: int
    members: tuple[tuple[int, str], ...]
    """(broker id, incarnation as the view has it), ascending (R12)."""
    confirm_offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class FetchView:
    """GetReplicaInfo: a newer view is known to exist and its push did not come."""

    target: str


@dataclass(frozen=True, slots=True)
class PersistRole:
    """Make `master_epoch` durable as the highest accepted (R2)."""

    master_epoch: int


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
    view: RoleView


@dataclass(frozen=True, slots=True)
class SetDead:
    broker_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class ProposalApplied:
    view: RoleView


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
class ReportEvent:
    """For the controllers' history."""

    kind: str
    fields: tuple[tuple[str, int | str], ...] = ()


@dataclass(frozen=True, slots=True)
class Notice:
    """A line for the log: `event` and fields; `warning` where somebody should look."""

    event: str
    fields: tuple[tuple[str, int | str], ...] = field(default=())
    warning: bool = False


RoleAction = BecomeMaster | BecomeSlave | StandDown

Effect = (
    SendRegister
    | SaveIdentity
    | OpenSessions
    | CloseSession
    | SendHeartbeat
    | SendElect
    | SendAlter
    | FetchView
    | PersistRole
    | BecomeMaster
    | BecomeSlave
    | StandDown
    | AdoptView
    | SetDead
    | ProposalApplied
    | ProposalRefused
    | ProposalUnknown
    | LeaseChanged
    | ReportEvent
    | Notice
)
