"""Which group needs an election: the leader's judgement, without a clock or a socket.

Every controller keeps its `Sightings` of every broker; only behind an open gate does it decide
anything (`ProposeElect`, `AliveChanged`). A wrong verdict costs an election, never a message
(SAFETY R1). A verdict rests on what this node saw first-hand (R5):

- The newest session of a broker counts; whatever is heard of an older one is ignored, its closing
  above all (RocketMQ issue 11045 evicted a healthy master so).
- A closing is a verdict at once, a silence after `session_timeout_ms`. A closing seen before the
  gate opened counts only if it was younger than `closure_young_ms` then.
- Not heard of is not dead: silence is counted from the gate's opening (R35), or from the
  registration of that process life.
- A second life of an id is refused while the session of the first lives (R18).
- Repeated verdicts on one process are held back longer and longer (R6); a new process is judged
  afresh, since it proves that the old one ended.
- If this loop itself stood still, all deadlines move by as long (R8).

Elections are level-triggered (R10): each tick looks at every group, so a lost trigger or a failed
proposal is made good by the next look. An election names the masterEpoch that it replaces, so
proposing it twice elects once.

Origin: RocketMQ's DefaultBrokerHeartbeatManager and ControllerManager#onBrokerInactive.
"""

from dataclasses import dataclass, field
from typing import Final

from controller.commands import NO_BROKER, LiveBroker
from controller.elect_policy import FIRST_ELECTION_SETTLE_MS, choose_master, why_forgetful
from controller.groups import BrokerGroup, ReplicaRecord, living_replicas
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
from controller.sightings import LivenessConfig, Sightings, Verdict
from controller.state import ControllerState
from protocol.codes import ResponseCode

__all__ = ["LivenessConfig", "LivenessCore"]

CONFIRM_SETTLE_MS: Final = 1_000
"""Age at which a heard confirmOffset binds candidates (R16): by then every living member's own
heartbeat is newer than it."""


FORGETFUL_SETTLE_MS: Final = 1_000
"""How long a replica has to know more than this controller before that is said: for a moment it may
have heard a newer view from another node."""


@dataclass(slots=True)
class _ConfirmFloor:
    """The highest confirmOffset heard of a group, and what of it is old enough to bind."""

    heard: int = -1
    ageing: int = -1
    settled: int = -1

    def age(self) -> None:
        self.settled, self.ageing = self.ageing, self.heard


@dataclass(slots=True)
class _Proposal:
    """An election proposed for that epoch; not again before `next_ms`."""

    master_epoch: int
    next_ms: int
    delay_ms: int


@dataclass(slots=True)
class _Watch:
    """What the core keeps of one group. `registered_ms`: when (id, incarnation) was first seen."""

    registered_ms: dict[tuple[int, str], int] = field(default_factory=dict)
    ids_changed_ms: int = 0
    dead: frozenset[int] = frozenset()
    restless: bool = False
    blocked: str = ""
    needs_operator: bool = False
    forgetful: str = ""
    forgetful_since_ms: int | None = None
    proposal: _Proposal | None = None
    master_answered_ms: int = 0
    floor: _ConfirmFloor = field(default_factory=_ConfirmFloor)
    unclean_epoch: int = 0


class LivenessCore:
    """See the module. `now_ms` of all calls is one monotonic clock that counts sleep (R8).

    Events are told to it on every node, ticks too, whether the gate is open or not.
    """

    def __init__(self, config: LivenessConfig | None = None) -> None:
        self._config = config or LivenessConfig()
        self._sightings = Sightings(self._config)
        self._watches: dict[str, _Watch] = {}
        self._state = ControllerState()
        self._gate_opened_ms: int | None = None
        self._aged_ms = 0

    # --- questions ---

    def live(self, broker_name: str, now_ms: int) -> tuple[LiveBroker, ...]:
        """The registered replicas heard within their timeout, ascending: what commands carry."""
        self._sightings.notice_time(now_ms)
        group = self._state.group(broker_name)
        live: list[LiveBroker] = []
        for record in group.replicas if group else ():
            facts = self._sightings.facts(broker_name, record.broker_id, record.incarnation, now_ms)
            if facts is not None:
                live.append(_live_broker(record, facts))
        return tuple(live)

    def presumed_alive(self, broker_name: str, now_ms: int) -> frozenset[int]:
        """The registered replicas not held for dead: `alive` in the views that brokers get.

        Masters drop the others from their set at once (R14), so unknown is not told as dead.
        """
        self._sightings.notice_time(now_ms)
        group = self._state.group(broker_name)
        if group is None:
            return frozenset()
        return frozenset(record.broker_id for record in group.replicas) - self._dead(group, now_ms)

    def confirm_floor(self, broker_name: str) -> int:
        """The highest confirmOffset heard of the group that binds candidates, -1 if none (R16)."""
        return self._watch(broker_name).floor.settled

    def confirm_heard(self, broker_name: str) -> int:
        """The highest confirmOffset heard of the group, -1 if none: what the log of a member that
        starts anew must reach (R17). It need not settle: nothing above that log's end could be
        confirmed while the member was away."""
        return self._watch(broker_name).floor.heard

    def problems(self) -> tuple[str, ...]:
        """What keeps groups without a master until an operator decides, for people (R19)."""
        if self._gate_opened_ms is None:
            return ()
        return tuple(
            f"{broker_name}: {why}"
            for broker_name, watch in sorted(self._watches.items())
            if (why := watch.forgetful or (watch.blocked if watch.needs_operator else ""))
        )

    def unclean_wait_ms(self, broker_name: str, now_ms: int) -> int:
        """How long an unclean election must still wait for the last master's lease to end (R7).

        Only a leader's answers grant a lease, so the others' need no waiting. What an earlier
        leader answered was before this gate opened, or in the margin after it, which is longer than
        the time that a leader goes on answering by a majority's last word; one that wakes from a
        stall answers nothing before it has asked a majority (`BrokerWatch`).
        """
        lease_ms = self._config.master_lease_ms + self._config.lease_margin_ms
        if self._gate_opened_ms is None:
            return lease_ms
        answered_ms = max(self._watch(broker_name).master_answered_ms, self._gate_opened_ms)
        return max(0, answered_ms + lease_ms - now_ms)

    # --- events ---

    def handle(self, event: LivenessEvent, now_ms: int) -> list[LivenessEffect]:
        """Takes one event in and gives what is to be done, in order."""
        self._sightings.notice_time(now_ms)
        match event:
            case SessionHello():
                return self._session_hello(event, now_ms)
            case SessionHeartbeat():
                incarnation = self._sightings.heartbeat(event, now_ms)
                return [] if incarnation is None else self._heard(event, incarnation, now_ms)
            case SessionClosed():
                newest = self._sightings.closed(event, now_ms)
                return self._look_at(event.broker_name, now_ms) if newest else []
            case RemotingHeartbeat():
                first = self._sightings.remoting_heartbeat(event, now_ms)
                effects = self._heard(event, "", now_ms)
                return effects + (self._look_at(event.broker_name, now_ms) if first else [])
            case RemotingChannelClosed():
                names = self._sightings.channel_closed(event.channel_id, now_ms)
                return self._look_at_each(names, now_ms)
            case GateOpened():
                return self._gate_opened(now_ms)
            case GateClosed():
                self._gate_opened_ms = None
                self._sightings.gate_closed()
                return []
            case StateApplied():
                return self._state_applied(event.state, now_ms)
            case ElectionEnded():
                self._election_ended(event, now_ms)
                return []
            case Tick():
                return self._tick(now_ms)

    def _watch(self, broker_name: str) -> _Watch:
        return self._watches.setdefault(broker_name, _Watch())

    def _session_hello(self, event: SessionHello, now_ms: int) -> list[LivenessEffect]:
        living = self._sightings.hello(event, now_ms)
        if not living:
            return self._look_at(event.broker_name, now_ms)
        remark = (
            f"another process with id {event.broker_id} of {event.broker_name} lives "
            f"(incarnation {living})"
        )
        code = ResponseCode.CONTROLLER_BROKER_ID_INVALID
        return [RefuseSession(event.session_id, code, remark)]

    def _heard(
        self, event: SessionHeartbeat | RemotingHeartbeat, incarnation: str, now_ms: int
    ) -> list[LivenessEffect]:
        watch, group = self._watch(event.broker_name), self._state.group(event.broker_name)
        record = group.replica(event.broker_id) if group else None
        if group is not None and record is not None and record.incarnation == incarnation:
            if event.broker_id in group.sync_state_set:
                watch.floor.heard = max(watch.floor.heard, event.facts.confirm_offset)
            if event.broker_id == group.master_broker_id and self._gate_opened_ms is not None:
                watch.master_answered_ms = now_ms
        return self._look_at(event.broker_name, now_ms) if watch.restless else []

    def _gate_opened(self, now_ms: int) -> list[LivenessEffect]:
        self._gate_opened_ms = now_ms
        self._sightings.gate_opened(now_ms)
        for broker_name, watch in self._watches.items():
            watch.proposal = None
            watch.blocked, watch.needs_operator = "", False
            watch.forgetful, watch.forgetful_since_ms = "", None
            group = self._state.group(broker_name)
            watch.dead = self._dead(group, now_ms) if group else frozenset()
        # Brokers go by what this node last told them, which may be of long before it led.
        names = self._state.broker_names()
        told: list[LivenessEffect] = [AliveChanged(broker_name) for broker_name in names]
        return told + self._look_at_each(names, now_ms)

    def _state_applied(self, state: ControllerState, now_ms: int) -> list[LivenessEffect]:
        before, self._state = self._state, state
        for broker_name in before.broker_names():
            if broker_name not in state.groups:
                self._watches.pop(broker_name, None)
        effects: list[LivenessEffect] = []
        for broker_name in state.broker_names():
            group, old = state.groups[broker_name], before.group(broker_name)
            if group is not old:
                self._group_changed(group, old, now_ms)
                effects += self._look_at(broker_name, now_ms)
        return effects

    def _group_changed(self, group: BrokerGroup, old: BrokerGroup | None, now_ms: int) -> None:
        watch = self._watch(group.broker_name)
        lives = [(record.broker_id, record.incarnation) for record in group.replicas]
        watch.registered_ms = {life: watch.registered_ms.get(life, now_ms) for life in lives}
        ids = {record.broker_id for record in group.replicas}
        if old is None or ids != {record.broker_id for record in old.replicas}:
            watch.ids_changed_ms = now_ms
        if group.unclean_epoch != watch.unclean_epoch:
            watch.unclean_epoch = group.unclean_epoch
            watch.floor = _ConfirmFloor()

    def _election_ended(self, event: ElectionEnded, now_ms: int) -> None:
        proposal = self._watch(event.broker_name).proposal
        if proposal is not None and proposal.master_epoch == event.expected_master_epoch:
            proposal.next_ms = now_ms + proposal.delay_ms

    def _tick(self, now_ms: int) -> list[LivenessEffect]:
        if now_ms - self._aged_ms >= CONFIRM_SETTLE_MS:
            self._aged_ms = now_ms
            for watch in self._watches.values():
                watch.floor.age()
        names = self._state.broker_names()
        effects = self._look_at_each(names, now_ms)
        for broker_name in names:
            effects += self._look_for_oblivion(self._state.groups[broker_name], now_ms)
        return effects

    def _look_for_oblivion(self, group: BrokerGroup, now_ms: int) -> list[LivenessEffect]:
        """R19: says once that a replica knows more than is recorded here, master or not."""
        if self._gate_opened_ms is None:
            return []
        watch = self._watch(group.broker_name)
        live = self.live(group.broker_name, now_ms)
        why = why_forgetful(group, living_replicas(group, live))
        if not why:
            watch.forgetful, watch.forgetful_since_ms = "", None
            return []
        if watch.forgetful_since_ms is None:
            watch.forgetful_since_ms = now_ms
        if why == watch.forgetful or now_ms - watch.forgetful_since_ms < FORGETFUL_SETTLE_MS:
            return []
        watch.forgetful = why
        return [] if why == watch.blocked else [ElectionBlocked(group.broker_name, why)]

    # --- deciding ---

    def _dead(self, group: BrokerGroup, now_ms: int) -> frozenset[int]:
        return frozenset(
            record.broker_id
            for record in group.replicas
            if self._judge(group, record, now_ms).standing == "dead"
        )

    def _judge(self, group: BrokerGroup, record: ReplicaRecord, now_ms: int) -> Verdict:
        life = (record.broker_id, record.incarnation)
        registered_ms = self._watch(group.broker_name).registered_ms.get(life, now_ms)
        return self._sightings.judge(group.broker_name, *life, registered_ms, now_ms)

    def _look_at_each(
        self, broker_names: tuple[str, ...] | list[str], now_ms: int
    ) -> list[LivenessEffect]:
        return [
            effect for broker_name in broker_names for effect in self._look_at(broker_name, now_ms)
        ]

    def _look_at(self, broker_name: str, now_ms: int) -> list[LivenessEffect]:
        """Decides what the group needs now. Nothing while the gate is closed."""
        group = self._state.group(broker_name)
        if self._gate_opened_ms is None or group is None:
            return []
        watch = self._watch(broker_name)
        effects: list[LivenessEffect] = []
        dead = self._dead(group, now_ms)
        if dead != watch.dead:
            watch.dead = dead
            effects.append(AliveChanged(broker_name))
        master = group.replica(group.master_broker_id)
        watch.restless = bool(dead) or master is None or bool(group.needs_election)
        if master is not None and not watch.restless:
            watch.blocked, watch.needs_operator = "", False
        if watch.restless:
            need = self._need(group, master, now_ms)
            if need is not None:
                effects += self._elect(group, need, now_ms)
        return effects

    def _need(
        self, group: BrokerGroup, master: ReplicaRecord | None, now_ms: int
    ) -> Verdict | None:
        """Why and since when the group needs an election; None if it does not."""
        watch = self._watch(group.broker_name)
        if master is not None:
            if group.needs_election:
                life = (master.broker_id, master.incarnation)
                since_ms = watch.registered_ms.get(life, now_ms)
                return Verdict("unknown", group.needs_election, since_ms)
            verdict = self._judge(group, master, now_ms)
            return verdict if verdict.standing == "dead" else None
        if group.master_epoch > 0:
            return Verdict("unknown", "no_master", now_ms)
        # Brokers ask for the first election themselves; this only makes good a lost request.
        if now_ms - watch.ids_changed_ms < FIRST_ELECTION_SETTLE_MS:
            return None
        return Verdict("unknown", "first_election", now_ms)

    def _elect(self, group: BrokerGroup, need: Verdict, now_ms: int) -> list[LivenessEffect]:
        watch = self._watch(group.broker_name)
        choice = choose_master(
            group,
            self.live(group.broker_name, now_ms),
            confirm_floor=watch.floor.settled,
        )
        if choice.blocked:
            if choice.refusal == watch.blocked:
                return []
            watch.blocked, watch.needs_operator = choice.refusal, True
            return [ElectionBlocked(group.broker_name, choice.refusal)]
        # Without a candidate only a dead master is worth a command: it is deposed.
        if choice.winner == NO_BROKER and need.standing != "dead":
            if group.master_epoch == 0 or choice.refusal == watch.blocked:
                return []
            watch.blocked, watch.needs_operator = choice.refusal, False
            return [ElectionBlocked(group.broker_name, choice.refusal, operator=False)]
        watch.blocked, watch.needs_operator = choice.refusal, False
        return self._propose(group, need, now_ms)

    def _propose(self, group: BrokerGroup, need: Verdict, now_ms: int) -> list[LivenessEffect]:
        watch = self._watch(group.broker_name)
        last = watch.proposal
        delay_ms = self._config.retry_ms
        if last is not None and last.master_epoch == group.master_epoch:
            if now_ms < last.next_ms:
                return []
            delay_ms = min(last.delay_ms * 2, self._config.retry_max_ms)
        watch.proposal = _Proposal(
            master_epoch=group.master_epoch,
            next_ms=now_ms + self._config.outcome_timeout_ms,
            delay_ms=delay_ms,
        )
        return [
            ProposeElect(
                group.broker_name,
                group.master_epoch,
                need.reason,
                need.since_ms,
                need.silent_ms,
            )
        ]


def _live_broker(record: ReplicaRecord, facts: HeartbeatFacts) -> LiveBroker:
    return LiveBroker(
        broker_id=record.broker_id,
        incarnation=record.incarnation,
        epoch=facts.epoch,
        max_offset=facts.max_offset,
        confirm_offset=facts.confirm_offset,
        election_priority=facts.election_priority,
        min_offset=facts.min_offset,
        master_epoch=facts.master_epoch,
        sync_state_set_epoch=facts.sync_state_set_epoch,
    )
