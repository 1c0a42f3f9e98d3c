"""Events and effects of the liveness core, as values. Pure."""

from dataclasses import dataclass

from batonmq.controller.rules.commands import LiveBroker
from batonmq.controller.rules.state import ControllerState
from batonmq.protocol.codes import ResponseCode

Process = tuple[str, int, str]
"""(brokerName, id, incarnation) of a registered process."""

# Events.


@dataclass(frozen=True, slots=True)
class SessionHello:
    """A broker process opened a session. `session_id` is new on this node."""

    broker_name: str
    broker_id: int
    incarnation: str
    session_id: int


@dataclass(frozen=True, slots=True)
class SessionHeartbeat:
    """`seen` need not name the incarnation: the session does."""

    broker_name: str
    session_id: int
    seen: LiveBroker
    sequence: int = 0
    answered: int = 0
    """The newest sequence whose answer has reached the broker; 0 if it does not report that. A
    broker that no answer reaches counts as silent (R5)."""


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The session ended; `goodbye`: the broker announced it, with `why` unless it was planned."""

    # The id shows whether it was the newest one: the late end of an older one says nothing.
    broker_name: str
    broker_id: int
    session_id: int
    goodbye: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class RemotingHeartbeat:
    """BROKER_HEARTBEAT (904), with the broker's timeout. `channel_id` names the connection."""

    broker_name: str
    channel_id: int
    timeout_ms: int
    seen: LiveBroker


@dataclass(frozen=True, slots=True)
class RemotingChannelClosed:
    channel_id: int


@dataclass(frozen=True, slots=True)
class GateOpened:
    """This node decides from now on."""


@dataclass(frozen=True, slots=True)
class GateClosed:
    """From now on this node decides nothing. It still takes every other event: if it leads again
    it must know who is silent (R51)."""


@dataclass(frozen=True, slots=True)
class StateApplied:
    """The replicated state changed. Passed in for each state, on every node."""

    # Before the effects of its command are carried out: a view shows who is alive in the new state.
    state: ControllerState


@dataclass(frozen=True, slots=True)
class ElectionEnded:
    """A `ProposeElect` ended: applied, refused, failed or unknown. If the group still needs an
    election, the core proposes it again a little later."""

    broker_name: str
    expected_master_epoch: int


@dataclass(frozen=True, slots=True)
class PeerReported:
    """Another controller hears all registered processes but `unheard`, by the state after entry
    `index` of the log."""

    # Those that it does not hear are few; and of a process that it does not know yet the report
    # must not say that it hears it, hence the index.
    node: str
    index: int
    unheard: frozenset[Process]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; expected every `tick_ms`."""


@dataclass(frozen=True, slots=True)
class ContinueChecks:
    """Some groups are still to be checked. As an effect: pass it in as an event in the next turn of
    the loop."""


LivenessEvent = (
    SessionHello
    | SessionHeartbeat
    | SessionEnded
    | RemotingHeartbeat
    | ContinueChecks
    | RemotingChannelClosed
    | GateOpened
    | GateClosed
    | StateApplied
    | ElectionEnded
    | PeerReported
    | Tick
)


# Effects.


@dataclass(frozen=True, slots=True)
class ProposeElect:
    """Propose ElectMaster for the group, then pass `ElectionEnded` in.

    `reason` goes into the history; `detected_ms` is when the need was seen, on the clock of
    `now_ms`, and `silent_ms` how long the master had been silent by then, -1 if unknown.
    """

    broker_name: str
    # R10: proposed twice, or beside the election that a broker asks for, it elects once.
    expected_master_epoch: int
    reason: str
    detected_ms: int
    silent_ms: int = -1


@dataclass(frozen=True, slots=True)
class AliveChanged:
    """Another replica of the group counts as dead, or no longer does: push the view again."""

    broker_name: str


@dataclass(frozen=True, slots=True)
class RefuseSession:
    """Answer the session's hello with this code and end it."""

    session_id: int
    code: ResponseCode
    remark: str


@dataclass(frozen=True, slots=True)
class ElectionBlocked:
    """The group needs an election that no replica may win now. Returned once for each reason.

    With `operator` only an operator can decide (R19); else the group waits until a member returns.
    """

    broker_name: str
    reason: str
    operator: bool = True


@dataclass(frozen=True, slots=True)
class ReportHearing:
    """Report to the leader what this node hears (`PeerReported`); at once if it `changed`."""

    index: int
    unheard: frozenset[Process]
    changed: bool = False


@dataclass(frozen=True, slots=True)
class OfferLead:
    """Hand the lead to that controller (R50)."""

    node: str
    why: str


LivenessEffect = (
    ProposeElect
    | AliveChanged
    | RefuseSession
    | ElectionBlocked
    | ReportHearing
    | OfferLead
    | ContinueChecks
)
