"""Who lives, and which group needs an election: the leader's judgement, without a clock or socket.

Every controller keeps this knowledge of every broker that holds a session with it; only behind an
open gate does it decide anything (`ProposeElect`, `AliveChanged`). A wrong verdict costs an
election, never a message (SAFETY R1). The verdict rests on what this node saw first-hand (R5):

- The newest session of a broker counts; whatever is heard of an older one is ignored, its closing
  above all (RocketMQ issue 11045 evicted a healthy master so).
- A closing is a verdict at once, a silence after `session_timeout_ms`. A closing seen before the
  gate opened counts only if it was younger than `closure_young_ms` then.
- Not heard of is not dead: silence is counted from the gate's opening (R35), or from the
  registration of that process life.
- A second life of an id is refused while the session of the first lives (R18).
- Repeated verdicts on one process are held back longer and longer (R6); a new process is judged
  afresh, since it proves that the old one died.
- If this loop itself stood still, all deadlines move by as long (R8).

Elections are level-triggered (R10): each tick looks at every group, so a lost trigger or a failed
proposal is made good by the next look. An election names the masterEpoch that it replaces, so
proposing it twice elects once.

Origin: RocketMQ's DefaultBrokerHeartbeatManager and ControllerManager#onBrokerInactive.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from controller.commands import NO_BROKER, LiveBroker
from controller.elect_policy import FIRST_ELECTION_SETTLE_MS, choose_master
from controller.groups import BrokerGroup, ReplicaRecord
from controller.liveness_events import (
    AliveChanged,
    ElectionBlocked,
    ElectionEnded,
    GateClosed,
    GateOpened,
    HeartbeatFacts,
    LivenessEffect,
    LivenessEvent,
    ProposeElect,
    RefuseSession,
    RemotingChannelClosed,
    RemotingHeartbeat,
    SessionClosed,
    SessionHeartbeat,
    SessionHello,
    StateApplied,
    Tick,
)
from controller.state import ControllerState
from protocol.codes import ResponseCode

__all__ = ["LivenessConfig", "LivenessCore"]

CONFIRM_SETTLE_MS: Final = 1_000
"""Age at which a heard confirmOffset binds candidates (R16): by then every living member's own
heartbeat is newer than it."""


@dataclass(frozen=True, slots=True)
class LivenessConfig:
    """Times in milliseconds; the defaults are those of R34."""

    session_timeout_ms: int = 800
    closure_young_ms: int = 2_000
    tick_ms: int = 50
    stall_ms: int = 100
    flap_window_ms: int = 10_000
    flap_delay_ms: int = 200
    flap_delay_max_ms: int = 5_000
    retry_ms: int = 100
    retry_max_ms: int = 2_000
    outcome_timeout_ms: int = 3_000
    master_lease_ms: int = 600
    lease_margin_ms: int = 200


# --- knowledge --------------------------------------------------------------------------------

Standing = Literal["alive", "unknown", "dead"]


@dataclass(frozen=True, slots=True)
class _Verdict:
    standing: Standing
    reason: str = ""
    since_ms: int = 0


_ALIVE: Final = _Verdict("alive")
_UNKNOWN: Final = _Verdict("unknown")


@dataclass(slots=True)
class _Session:
    """The newest session of one broker. `heard_awake_ms` leaves out time that this loop slept."""

    session_id: int
    incarnation: str
    opened_ms: int
    heard_ms: int
    heard_awake_ms: int
    facts: HeartbeatFacts
    closed_ms: int | None = None
    goodbye: bool = False
    held_back_ms: int = 0
    silent_since_ms: int | None = None


@dataclass(slots=True)
class _Channel:
    """The newest connection over which a broker sent 904."""

    channel_id: int
    timeout_ms: int
    heard_awake_ms: int
    facts: HeartbeatFacts
    closed_ms: int | None = None


@dataclass(slots=True)
class _Broker:
    session: _Session | None = None
    channel: _Channel | None = None
    # (when, incarnation) of the verdicts within the flap window
    verdicts: list[tuple[int, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    """What is kept per group beside its brokers.

    `registered_ms` says when a process life (id, incarnation) was first seen registered.
    """

    brokers: dict[int, _Broker] = field(default_factory=dict)
    registered_ms: dict[tuple[int, str], int] = field(default_factory=dict)
    ids_changed_ms: int = 0
    dead: frozenset[int] = frozenset()
    restless: bool = False
    blocked: str = ""
    proposal: "_Proposal | None" = None
    master_answered_ms: int = 0
    confirm_heard: int = -1
    confirm_ageing: int = -1
    confirm_settled: int = -1
    unclean_epoch: int = 0


@dataclass(slots=True)
class _Proposal:
    """An election proposed for that epoch; not again before `next_ms`."""

    master_epoch: int
    next_ms: int
    delay_ms: int


class LivenessCore:
    """See the module. `now_ms` of all calls is one monotonic clock that counts sleep (R8)."""

    def __init__(self, config: LivenessConfig | None = None) -> None:
        self._config = config or LivenessConfig()
        self._groups: dict[str, _Group] = {}
        self._state = ControllerState()
        self._gate_opened_ms: int | None = None
        self._gate_opened_awake_ms = 0
        self._slept_ms = 0
        self._last_ms: int | None = None
        self._settled_ms = 0

    # --- questions ---

    def live(self, broker_name: str, now_ms: int) -> tuple[LiveBroker, ...]:
        """The registered replicas heard within their timeout, ascending: what commands carry."""
        group, known = self._state.group(broker_name), self._groups.get(broker_name)
        if group is None or known is None:
            return ()
        live: list[LiveBroker] = []
        for record in group.replicas:
            broker = known.brokers.get(record.broker_id)
            facts = self._facts_if_heard(broker, record.incarnation, now_ms) if broker else None
            if facts is not None:
                live.append(
                    LiveBroker(
                        broker_id=record.broker_id,
                        incarnation=record.incarnation,
                        epoch=facts.epoch,
                        max_offset=facts.max_offset,
                        confirm_offset=facts.confirm_offset,
                        election_priority=facts.election_priority,
                        min_offset=facts.min_offset,
                        master_epoch=facts.master_epoch,
                    )
                )
        return tuple(live)

    def presumed_alive(self, broker_name: str, now_ms: int) -> frozenset[int]:
        """The registered replicas not held for dead: `alive` in the views that brokers get.

        Masters drop the others from their set at once (R14), so unknown is not told as dead.
        """
        group = self._state.group(broker_name)
        if group is None:
            return frozenset()
        ids = frozenset(record.broker_id for record in group.replicas)
        return ids - self._dead(group, self._known(broker_name), now_ms)

    def confirm_floor(self, broker_name: str) -> int:
        """The highest confirmOffset heard of the group that binds candidates, -1 if none (R16)."""
        known = self._groups.get(broker_name)
        return -1 if known is None else known.confirm_settled

    def unclean_wait_ms(self, broker_name: str, now_ms: int) -> int:
        """How long an unclean election must still wait for the last master's lease to end (R7)."""
        if self._gate_opened_ms is None:
            return self._config.master_lease_ms + self._config.lease_margin_ms
        answered_ms = max(self._known(broker_name).master_answered_ms, self._gate_opened_ms)
        over_ms = answered_ms + self._config.master_lease_ms + self._config.lease_margin_ms
        return max(0, over_ms - now_ms)

    # --- events ---

    def handle(self, event: LivenessEvent, now_ms: int) -> list[LivenessEffect]:
        """Takes one event in and gives what is to be done, in order."""
        self._notice_own_stall(now_ms)
        match event:
            case SessionHello():
                return self._session_hello(event, now_ms)
            case SessionHeartbeat():
                return self._session_heartbeat(event, now_ms)
            case SessionClosed():
                return self._session_closed(event, now_ms)
            case RemotingHeartbeat():
                return self._remoting_heartbeat(event, now_ms)
            case RemotingChannelClosed():
                return self._channel_closed(event, now_ms)
            case GateOpened():
                return self._gate_opened(now_ms)
            case GateClosed():
                self._gate_opened_ms = None
                return []
            case StateApplied():
                return self._state_applied(event.state, now_ms)
            case ElectionEnded():
                return self._election_ended(event, now_ms)
            case Tick():
                return self._tick(now_ms)

    def _notice_own_stall(self, now_ms: int) -> None:
        """R8: ticks should come; a gap means that this process slept, and heard nobody then."""
        if self._last_ms is not None:
            gap_ms = now_ms - self._last_ms - self._config.tick_ms
            if gap_ms > self._config.stall_ms:
                self._slept_ms += gap_ms
        self._last_ms = now_ms

    def _awake_ms(self, now_ms: int) -> int:
        return now_ms - self._slept_ms

    def _known(self, broker_name: str) -> _Group:
        return self._groups.setdefault(broker_name, _Group())

    def _broker(self, broker_name: str, broker_id: int) -> _Broker:
        return self._known(broker_name).brokers.setdefault(broker_id, _Broker())

    def _session_hello(self, event: SessionHello, now_ms: int) -> list[LivenessEffect]:
        broker = self._broker(event.broker_name, event.broker_id)
        first = broker.session
        if (
            first is not None
            and first.closed_ms is None
            and first.incarnation != event.incarnation
            and self._is_heard(first, now_ms)
        ):
            remark = (
                f"another process with id {event.broker_id} of {event.broker_name} lives "
                f"(incarnation {first.incarnation})"
            )
            code = ResponseCode.CONTROLLER_BROKER_ID_INVALID
            return [RefuseSession(event.session_id, code, remark)]
        same_life = first is not None and first.incarnation == event.incarnation
        broker.session = _Session(
            session_id=event.session_id,
            incarnation=event.incarnation,
            opened_ms=now_ms,
            heard_ms=now_ms,
            heard_awake_ms=self._awake_ms(now_ms),
            facts=first.facts if first is not None and same_life else HeartbeatFacts(),
        )
        return self._look_at(event.broker_name, now_ms)

    def _session_heartbeat(self, event: SessionHeartbeat, now_ms: int) -> list[LivenessEffect]:
        session = self._newest_session(event.broker_name, event.broker_id, event.session_id)
        if session is None:
            return []
        session.heard_ms = now_ms
        session.heard_awake_ms = self._awake_ms(now_ms)
        session.silent_since_ms = None
        session.facts = event.facts
        return self._heard(
            event.broker_name, event.broker_id, session.incarnation, event.facts, now_ms
        )

    def _newest_session(self, broker_name: str, broker_id: int, session_id: int) -> _Session | None:
        """The broker's session if it is that one and still open."""
        session = self._broker(broker_name, broker_id).session
        if session is None or session.session_id != session_id or session.closed_ms is not None:
            return None
        return session

    def _heard(
        self,
        broker_name: str,
        broker_id: int,
        incarnation: str,
        facts: HeartbeatFacts,
        now_ms: int,
    ) -> list[LivenessEffect]:
        known, group = self._known(broker_name), self._state.group(broker_name)
        record = group.replica(broker_id) if group else None
        if group is not None and record is not None and record.incarnation == incarnation:
            if broker_id in group.sync_state_set:
                known.confirm_heard = max(known.confirm_heard, facts.confirm_offset)
            if broker_id == group.master_broker_id and self._gate_opened_ms is not None:
                known.master_answered_ms = now_ms
        return self._look_at(broker_name, now_ms) if known.restless else []

    def _session_closed(self, event: SessionClosed, now_ms: int) -> list[LivenessEffect]:
        session = self._newest_session(event.broker_name, event.broker_id, event.session_id)
        if session is None:
            return []
        session.closed_ms = now_ms
        session.goodbye = event.goodbye
        broker = self._broker(event.broker_name, event.broker_id)
        if not event.goodbye and session.silent_since_ms is None:
            session.held_back_ms = self._pass_verdict(broker, session.incarnation, now_ms)
        return self._look_at(event.broker_name, now_ms)

    def _hold_back_ms(self, broker: _Broker, incarnation: str, now_ms: int) -> int:
        """R6: nothing for the first verdict on a process within the window, then ever longer."""
        oldest_ms = now_ms - self._config.flap_window_ms
        broker.verdicts = [each for each in broker.verdicts if each[0] > oldest_ms]
        repeated = sum(1 for _, life in broker.verdicts if life == incarnation)
        if repeated == 0:
            return 0
        delay_ms = self._config.flap_delay_ms << min(repeated - 1, 16)
        return min(delay_ms, self._config.flap_delay_max_ms)

    def _pass_verdict(self, broker: _Broker, incarnation: str, now_ms: int) -> int:
        held_back_ms = self._hold_back_ms(broker, incarnation, now_ms)
        broker.verdicts.append((now_ms, incarnation))
        return held_back_ms

    def _remoting_heartbeat(self, event: RemotingHeartbeat, now_ms: int) -> list[LivenessEffect]:
        broker = self._broker(event.broker_name, event.broker_id)
        first = broker.channel is None or broker.channel.closed_ms is not None
        broker.channel = _Channel(
            channel_id=event.channel_id,
            timeout_ms=event.timeout_ms,
            heard_awake_ms=self._awake_ms(now_ms),
            facts=event.facts,
        )
        effects = self._heard(event.broker_name, event.broker_id, "", event.facts, now_ms)
        return effects or (self._look_at(event.broker_name, now_ms) if first else [])

    def _channel_closed(self, event: RemotingChannelClosed, now_ms: int) -> list[LivenessEffect]:
        effects: list[LivenessEffect] = []
        for broker_name in sorted(self._groups):
            for broker in self._groups[broker_name].brokers.values():
                channel = broker.channel
                if channel is not None and channel.channel_id == event.channel_id:
                    channel.closed_ms = now_ms
                    effects += self._look_at(broker_name, now_ms)
        return effects

    def _gate_opened(self, now_ms: int) -> list[LivenessEffect]:
        self._gate_opened_ms = now_ms
        self._gate_opened_awake_ms = self._awake_ms(now_ms)
        for broker_name, known in self._groups.items():
            known.proposal = None
            known.blocked = ""
            group = self._state.group(broker_name)
            for broker in known.brokers.values():
                if broker.session is not None:
                    broker.session.silent_since_ms = None
            if group is not None:
                known.dead = self._dead(group, known, now_ms)
        return self._look_at_all(now_ms)

    def _state_applied(self, state: ControllerState, now_ms: int) -> list[LivenessEffect]:
        before, self._state = self._state, state
        effects: list[LivenessEffect] = []
        for broker_name in state.broker_names():
            group = state.groups[broker_name]
            old = before.group(broker_name)
            if group is not old:
                self._group_changed(group, old, now_ms)
                effects += self._look_at(broker_name, now_ms)
        for broker_name in before.broker_names():
            if broker_name not in state.groups:
                brokers = self._known(broker_name).brokers
                self._groups[broker_name] = _Group(brokers=brokers)
        return effects

    def _group_changed(self, group: BrokerGroup, old: BrokerGroup | None, now_ms: int) -> None:
        known = self._known(group.broker_name)
        lives = {(record.broker_id, record.incarnation) for record in group.replicas}
        known.registered_ms = {life: known.registered_ms.get(life, now_ms) for life in lives}
        ids = {record.broker_id for record in group.replicas}
        if old is None or ids != {record.broker_id for record in old.replicas}:
            known.ids_changed_ms = now_ms
        if group.unclean_epoch != known.unclean_epoch:
            known.unclean_epoch = group.unclean_epoch
            known.confirm_heard = known.confirm_ageing = known.confirm_settled = -1

    def _election_ended(self, event: ElectionEnded, now_ms: int) -> list[LivenessEffect]:
        proposal = self._known(event.broker_name).proposal
        if proposal is not None and proposal.master_epoch == event.expected_master_epoch:
            proposal.next_ms = now_ms + proposal.delay_ms
        return []

    def _tick(self, now_ms: int) -> list[LivenessEffect]:
        if now_ms - self._settled_ms >= CONFIRM_SETTLE_MS:
            self._settled_ms = now_ms
            for known in self._groups.values():
                known.confirm_settled = known.confirm_ageing
                known.confirm_ageing = known.confirm_heard
        return self._look_at_all(now_ms)

    # --- judging ---

    def _is_heard(self, session: _Session, now_ms: int) -> bool:
        return self._awake_ms(now_ms) - session.heard_awake_ms <= self._config.session_timeout_ms

    def _facts_if_heard(
        self, broker: _Broker, incarnation: str, now_ms: int
    ) -> HeartbeatFacts | None:
        """The newest facts of that process life, None unless it was heard within its timeout."""
        session, channel = broker.session, broker.channel
        if (
            session is not None
            and session.closed_ms is None
            and session.incarnation == incarnation
            and self._is_heard(session, now_ms)
        ):
            return session.facts
        if (
            channel is not None
            and channel.closed_ms is None
            and not incarnation
            and self._awake_ms(now_ms) - channel.heard_awake_ms <= channel.timeout_ms
        ):
            return channel.facts
        return None

    def _dead(self, group: BrokerGroup, known: _Group, now_ms: int) -> frozenset[int]:
        return frozenset(
            record.broker_id
            for record in group.replicas
            if self._judge(record, known, now_ms).standing == "dead"
        )

    def _judge(self, record: ReplicaRecord, known: _Group, now_ms: int) -> _Verdict:
        """What is held of the process life that `record` registered."""
        broker = known.brokers.get(record.broker_id, _Broker())
        if self._facts_if_heard(broker, record.incarnation, now_ms) is not None:
            return _ALIVE
        session, channel = broker.session, broker.channel
        registered_ms = known.registered_ms.get((record.broker_id, record.incarnation), 0)
        if session is not None and session.incarnation == record.incarnation:
            return self._judge_session(broker, session, now_ms)
        if session is not None and session.closed_ms is None and session.opened_ms > registered_ms:
            return _Verdict("dead", "master_restarted", session.opened_ms)
        if channel is not None and not record.incarnation:
            return self._judge_channel(channel, now_ms)
        return self._judge_unseen(registered_ms, now_ms)

    def _judge_session(self, broker: _Broker, session: _Session, now_ms: int) -> _Verdict:
        if session.closed_ms is not None:
            reason = "goodbye" if session.goodbye else "session_closed"
            if session.silent_since_ms is not None:
                return _Verdict("dead", "session_silent", session.silent_since_ms)
            if now_ms < session.closed_ms + session.held_back_ms:
                return _UNKNOWN
            return self._judge_closing(session.closed_ms, reason, now_ms)
        if session.silent_since_ms is None:
            limit_ms = self._config.session_timeout_ms + self._hold_back_ms(
                broker, session.incarnation, now_ms
            )
            if self._silent_for_ms(session.heard_awake_ms, now_ms) <= limit_ms:
                return _UNKNOWN
            if self._gate_opened_ms is None:
                return _Verdict("dead", "session_silent", now_ms)
            self._pass_verdict(broker, session.incarnation, now_ms)
            session.silent_since_ms = now_ms
        return _Verdict("dead", "session_silent", session.silent_since_ms)

    def _silent_for_ms(self, heard_awake_ms: int, now_ms: int) -> int:
        """How long it was silent since it was heard and, on the leader, since the gate opened."""
        if self._gate_opened_ms is not None:
            heard_awake_ms = max(heard_awake_ms, self._gate_opened_awake_ms)
        return self._awake_ms(now_ms) - heard_awake_ms

    def _judge_closing(self, closed_ms: int, reason: str, now_ms: int) -> _Verdict:
        """R5: an old closing, seen before the gate opened, gets a full timeout from then."""
        opened_ms = self._gate_opened_ms
        old = opened_ms is not None and opened_ms - closed_ms >= self._config.closure_young_ms
        if old and self._silent_for_ms(0, now_ms) <= self._config.session_timeout_ms:
            return _UNKNOWN
        return _Verdict("dead", reason, closed_ms)

    def _judge_channel(self, channel: _Channel, now_ms: int) -> _Verdict:
        if channel.closed_ms is not None:
            return self._judge_closing(channel.closed_ms, "channel_closed", now_ms)
        if self._silent_for_ms(channel.heard_awake_ms, now_ms) <= channel.timeout_ms:
            return _UNKNOWN
        return _Verdict("dead", "heartbeat_silent", now_ms)

    def _judge_unseen(self, registered_ms: int, now_ms: int) -> _Verdict:
        """R35: never heard of. Dead only after a full timeout in which it could have come."""
        if self._gate_opened_ms is None:
            return _UNKNOWN
        if now_ms - registered_ms <= self._config.session_timeout_ms:
            return _UNKNOWN
        if self._silent_for_ms(0, now_ms) <= self._config.session_timeout_ms:
            return _UNKNOWN
        return _Verdict("dead", "never_seen", now_ms)

    # --- deciding ---

    def _look_at_all(self, now_ms: int) -> list[LivenessEffect]:
        effects: list[LivenessEffect] = []
        for broker_name in self._state.broker_names():
            effects += self._look_at(broker_name, now_ms)
        return effects

    def _look_at(self, broker_name: str, now_ms: int) -> list[LivenessEffect]:
        """Decides what the group needs now. Nothing while the gate is closed."""
        group = self._state.group(broker_name)
        if self._gate_opened_ms is None or group is None:
            return []
        known = self._known(broker_name)
        effects: list[LivenessEffect] = []
        dead = self._dead(group, known, now_ms)
        if dead != known.dead:
            known.dead = dead
            effects.append(AliveChanged(broker_name))
        master = group.replica(group.master_broker_id)
        known.restless = bool(dead) or master is None or bool(group.needs_election)
        if known.restless:
            effects += self._elect_if_needed(group, known, master, now_ms)
        return effects

    def _elect_if_needed(
        self, group: BrokerGroup, known: _Group, master: ReplicaRecord | None, now_ms: int
    ) -> list[LivenessEffect]:
        need = self._need(group, known, master, now_ms)
        if need is None:
            return []
        choice = choose_master(
            group,
            self.live(group.broker_name, now_ms),
            confirm_floor=known.confirm_settled,
        )
        if choice.blocked:
            if choice.refusal == known.blocked:
                return []
            known.blocked = choice.refusal
            return [ElectionBlocked(group.broker_name, choice.refusal)]
        master_is_dead = master is not None and not group.needs_election
        if choice.winner == NO_BROKER and not master_is_dead:
            return []
        return self._propose(group, known, need, now_ms)

    def _need(
        self, group: BrokerGroup, known: _Group, master: ReplicaRecord | None, now_ms: int
    ) -> _Verdict | None:
        """Why and since when an election is needed; None if it is not."""
        if group.needs_election:
            life = (group.master_broker_id, master.incarnation if master else "")
            since_ms = known.registered_ms.get(life, now_ms)
            return _Verdict("dead", group.needs_election, since_ms)
        if master is not None:
            verdict = self._judge(master, known, now_ms)
            return verdict if verdict.standing == "dead" else None
        if group.master_epoch > 0:
            return _Verdict("dead", "no_master", now_ms)
        # Brokers ask for the first election themselves; this only makes good a lost request.
        if now_ms - known.ids_changed_ms < FIRST_ELECTION_SETTLE_MS:
            return None
        return _Verdict("dead", "first_election", now_ms)

    def _propose(
        self, group: BrokerGroup, known: _Group, need: _Verdict, now_ms: int
    ) -> list[LivenessEffect]:
        proposal = known.proposal
        delay_ms = self._config.retry_ms
        if proposal is not None and proposal.master_epoch == group.master_epoch:
            if now_ms < proposal.next_ms:
                return []
            delay_ms = min(proposal.delay_ms * 2, self._config.retry_max_ms)
        known.proposal = _Proposal(
            master_epoch=group.master_epoch,
            next_ms=now_ms + self._config.outcome_timeout_ms,
            delay_ms=delay_ms,
        )
        return [ProposeElect(group.broker_name, group.master_epoch, need.reason, need.since_ms)]
