"""What the liveness core is told, and what it wants done: values; see `controller.liveness`."""

from dataclasses import dataclass

from controller.commands import ELECTION_PRIORITY_DEFAULT
from controller.state import ControllerState
from protocol.codes import ResponseCode

__all__ = [
    "AliveChanged",
    "ElectionBlocked",
    "ElectionEnded",
    "GateClosed",
    "GateOpened",
    "HeartbeatFacts",
    "LivenessEffect",
    "LivenessEvent",
    "ProposeElect",
    "RefuseSession",
    "RemotingChannelClosed",
    "RemotingHeartbeat",
    "SessionClosed",
    "SessionHeartbeat",
    "SessionHello",
    "StateApplied",
    "Tick",
]


@dataclass(frozen=True, slots=True)
class HeartbeatFacts:
    """What a heartbeat tells of the broker's log; -1 where it does not. See `LiveBroker`."""

    epoch: int = -1
    max_offset: int = -1
    confirm_offset: int = -1
    election_priority: int = ELECTION_PRIORITY_DEFAULT
    min_offset: int = -1
    master_epoch: int = -1
    sync_state_set_epoch: int = -1


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionHello:
    """A broker process opened a session. `session_id` is new on this node."""

    broker_name: str
    broker_id: int
    incarnation: str
    session_id: int


@dataclass(frozen=True, slots=True)
class SessionHeartbeat:
    """`answered`: the newest sequence whose answer has reached the broker, 0 if it does not say."""

    broker_name: str
    broker_id: int
    session_id: int
    facts: HeartbeatFacts = HeartbeatFacts()
    sequence: int = 0
    answered: int = 0


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The session ended; with `goodbye` the broker said that it stops, and `why` unless planned."""

    broker_name: str
    broker_id: int
    session_id: int
    goodbye: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class RemotingHeartbeat:
    """Request 904, with the timeout that the broker chose. `channel_id` names the connection."""

    broker_name: str
    broker_id: int
    channel_id: int
    timeout_ms: int
    facts: HeartbeatFacts = HeartbeatFacts()


@dataclass(frozen=True, slots=True)
class RemotingChannelClosed:
    channel_id: int


@dataclass(frozen=True, slots=True)
class GateOpened:
    """This node decides from now on."""


@dataclass(frozen=True, slots=True)
class GateClosed:
    """This node decides nothing any more; it goes on listening."""


@dataclass(frozen=True, slots=True)
class StateApplied:
    """The replicated state moved on. Told of each state, leader or not, before any effect."""

    state: ControllerState


@dataclass(frozen=True, slots=True)
class ElectionEnded:
    """A `ProposeElect` came to an end: applied, refused, failed or unknown.

    Which of them does not matter here: if the need stands, it is proposed again a little later.
    """

    broker_name: str
    expected_master_epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; expected every `tick_ms`."""


LivenessEvent = (
    SessionHello
    | SessionHeartbeat
    | SessionClosed
    | RemotingHeartbeat
    | RemotingChannelClosed
    | GateOpened
    | GateClosed
    | StateApplied
    | ElectionEnded
    | Tick
)


# --- effects ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProposeElect:
    """Propose ElectMaster for the group, then tell `ElectionEnded`.

    `reason` goes into the history; `detected_ms` is when the need was seen, on the clock of
    `now_ms`, and `silent_ms` how long the master had said nothing by then, -1 if unknown.
    """

    broker_name: str
    expected_master_epoch: int
    reason: str
    detected_ms: int
    silent_ms: int = -1


@dataclass(frozen=True, slots=True)
class AliveChanged:
    """Another replica of the group is held for dead, or no longer: push its view again."""

    broker_name: str


@dataclass(frozen=True, slots=True)
class RefuseSession:
    """Answer the session's hello with this code and end it."""

    session_id: int
    code: ResponseCode
    remark: str


@dataclass(frozen=True, slots=True)
class ElectionBlocked:
    """The group needs an election that nobody may win now. Said once per reason.

    With `operator` only an operator can decide it (R19); else it waits for a member to come back.
    """

    broker_name: str
    reason: str
    operator: bool = True


LivenessEffect = ProposeElect | AliveChanged | RefuseSession | ElectionBlocked
