"""Which group needs an election: the leader's decision. Pure.

Every controller observes all brokers (`BrokerSessions`), but decides only while its gate is open. A
wrong verdict costs an election, never a message (R1). A verdict uses what this node saw itself
(R5):

- Only the newest session of a broker counts (RocketMQ issue 11045: the late close of an older one
  evicted a healthy master).
- A closed session counts as a death at once; silence does after `session_timeout_ms`. A session
  that closed more than `closure_young_ms` before the gate opened gets a full timeout again.
- A new leader keeps counting the silence that it saw as a follower (R51). For a broker that never
  had a session here it counts from the opening of the gate (R35), or from the registration.
- A second process with the same id is refused while the first one's session lasts (R18).
- Repeated verdicts on one process are delayed longer each time (R6). A new process begins without
  delay.
- If this loop stood still, all deadlines move by as long (R8).
- A process that another controller hears is not dead. The controller that hears more gets the lead
  (R50, `hearing`).

Each tick checks groups again, so a lost trigger or a failed proposal is repaired. An election names
the masterEpoch that it replaces, so proposing it twice elects once (R10).

Origin: RocketMQ's DefaultBrokerHeartbeatManager and ControllerManager#onBrokerInactive.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from batonmq.controller.liveness import events as ev
from batonmq.controller.liveness.broker_sessions import (
    BrokerSessions,
    LivenessConfig,
    SilenceVerdict,
)
from batonmq.controller.liveness.hearing import Hearing
from batonmq.controller.rules.commands import LiveBroker
from batonmq.controller.rules.elect_policy import FIRST_ELECTION_SETTLE_MS, why_stale
from batonmq.controller.rules.election import (
    ElectionFacts,
    LastHeard,
    LastSeen,
    last_seen,
    members_of,
    own_election,
)
from batonmq.controller.rules.groups import BrokerGroup, ReplicaRecord, living_replicas
from batonmq.controller.rules.state import ControllerState
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.incarnation import is_hash
from batonmq.runtime.backoff import pause_ms
from batonmq.runtime.recent_events import RecentEvents, records_event

GROUPS_A_TURN: Final = 64
"""Groups checked in one turn of the loop after a snapshot, or when the gate opens (R58). A check
takes about 50 µs then, with the view pushed."""
GROUPS_A_TICK: Final = 256
"""Groups checked in a tick: about 10 µs each, twice as much if the group needs an election."""
FRESH_GROUPS_A_TICK: Final = 16
"""The same, of groups that never had a master: their brokers ask for the first election
themselves."""

CONFIRM_SETTLE_MS: Final = 1_000
"""The age at which a reported confirmOffset counts as floor (R16): by then each living member has
sent a newer heartbeat, so that its own log end here is not the older figure."""

STALE_SETTLE_MS: Final = 1_000
"""How long a replica must know newer epochs before that is reported: another controller may have
sent it a newer view that is not applied here yet."""


class _GroupRotation:
    """Takes turns through the groups, `at_once` at a time."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._last = ""

    def next_of(self, names: list[str]) -> list[str]:
        """All of `names`, which are sorted, or the next `at_once` of them."""
        if len(names) > self._at_once:
            # By name, not by position: groups may have been added or removed since.
            begin = bisect(names, self._last)
            names = (names[begin:] + names[:begin])[: self._at_once]
            self._last = names[-1]
        return names


@dataclass(slots=True)
class _ConfirmFloor:
    """The highest confirmOffset reported in a group, and the highest that is old enough to count as
    floor."""

    newest: int = -1
    ageing: int = -1
    settled: int = -1

    def age(self) -> None:
        self.settled, self.ageing = self.ageing, self.newest


@dataclass(slots=True)
class _Proposal:
    """How often an election that replaces `master_epoch` was proposed; the next one at
    `next_ms`."""

    master_epoch: int
    times: int
    next_ms: int


@dataclass(slots=True)
class _Watch:
    """What the core keeps of one group.

    `registered_ms`: when (id, incarnation) was first seen registered. `unsettled`: some replica is
    dead, or there is no master, so each heartbeat may change a decision and triggers a check.
    """

    registered_ms: dict[tuple[int, str], int] = field(default_factory=dict)
    ids_changed_ms: int = 0
    dead: frozenset[int] | None = frozenset()
    unsettled: bool = False
    blocked: str = ""
    needs_operator: bool = False
    stale: str = ""
    stale_since_ms: int | None = None
    proposal: _Proposal | None = None
    master_answered_ms: int = 0
    floor: _ConfirmFloor = field(default_factory=_ConfirmFloor)
    unclean_epoch: int = 0

    def changed(self, group: BrokerGroup, old: BrokerGroup | None, now_ms: int) -> None:
        """`group` is the newest record, `old` the one before it."""
        known = self.registered_ms
        self.registered_ms = {each: known.get(each, now_ms) for each in group.processes}
        ids = {record.broker_id for record in group.replicas}
        if old is None or ids != {record.broker_id for record in old.replicas}:
            self.ids_changed_ms = now_ms
        # R7: a new master may acknowledge before this node answers its first heartbeat (R36).
        if group.master_broker_id and (old is None or old.master_epoch != group.master_epoch):
            self.master_answered_ms = now_ms
        # R16: what was confirmed before an unclean election may be cut by it.
        if group.unclean_epoch != self.unclean_epoch:
            self.unclean_epoch = group.unclean_epoch
            self.floor = _ConfirmFloor()

    def gate_opened(self) -> None:
        self.proposal = None
        self.blocked, self.needs_operator = "", False
        self.stale, self.stale_since_ms = "", None
        self.dead = None  # this node's last pushed view may be from long before it led: push again

    def propose(self, master_epoch: int, config: LivenessConfig, now_ms: int) -> bool:
        """Whether to propose an election that replaces `master_epoch` now; counted if so."""
        last, times = self.proposal, 1
        if last is not None and last.master_epoch == master_epoch:
            if now_ms < last.next_ms:
                return False
            times = last.times + 1
        self.proposal = _Proposal(master_epoch, times, now_ms + config.outcome_timeout_ms)
        return True

    def election_ended(self, master_epoch: int, config: LivenessConfig, now_ms: int) -> None:
        last = self.proposal
        if last is not None and last.master_epoch == master_epoch:
            pause = pause_ms(config.retry_ms, config.retry_max_ms, last.times)
            last.next_ms = now_ms + pause


class LivenessCore:
    """`now_ms` of all calls is one monotonic clock that counts sleep (R8).

    Every node passes all events in, ticks too, whether its gate is open or not.
    """

    def __init__(self, config: LivenessConfig | None = None) -> None:
        self._config = config or LivenessConfig()
        self._sessions = BrokerSessions(self._config)
        self._watches: dict[str, _Watch] = {}
        self._state = ControllerState()
        self._gate_opened_ms: int | None = None
        self._aged_ms = 0
        self._elected = _GroupRotation(GROUPS_A_TICK)
        self._fresh = _GroupRotation(FRESH_GROUPS_A_TICK)
        self._unchecked: dict[str, None] = {}
        self._is_continued = False
        self._hearing = Hearing()
        self.recent_events = RecentEvents()

    # Questions.

    def live(self, broker_name: str, now_ms: int) -> tuple[LiveBroker, ...]:
        """The registered replicas with a heartbeat within their timeout, ascending."""
        self._sessions.notice_time(now_ms)
        group = self._state.group(broker_name)
        return tuple(
            seen
            for record in (group.replicas if group else ())
            if (
                seen := self._sessions.seen(
                    broker_name, record.broker_id, record.incarnation, now_ms
                )
            )
            is not None
        )

    def presumed_alive(self, broker_name: str, now_ms: int) -> frozenset[int]:
        """The registered replicas that are not dead: `alive` in the views for brokers."""
        self._sessions.notice_time(now_ms)
        group = self._state.group(broker_name)
        if group is None:
            return frozenset()
        return frozenset(record.broker_id for record in group.replicas) - self._dead(group, now_ms)

    def confirm_floor(self, broker_name: str) -> int:
        """The highest confirmOffset that candidates must reach, -1 if none (R16)."""
        floor = self._watch(broker_name).floor
        group = self._state.group(broker_name)
        # If the whole set is suspect the newest one counts at once: these logs do not grow, so a
        # later heartbeat shows no higher end (R17).
        return floor.newest if group is not None and group.is_suspect else floor.settled

    def confirm_newest(self, broker_name: str) -> int:
        """The highest confirmOffset reported, -1 if none. A restarted member whose log ends below
        it is suspect (R17)."""
        return self._watch(broker_name).floor.newest

    def problems(self) -> tuple[str, ...]:
        """Texts for operators: the groups in which an operator has to decide (R19), and why."""
        if self._gate_opened_ms is None:
            return ()
        return tuple(
            f"{broker_name}: {why}"
            for broker_name, watch in sorted(self._watches.items())
            if (why := watch.stale or (watch.blocked if watch.needs_operator else ""))
        )

    def election_facts(self, broker_name: str, now_ms: int) -> ElectionFacts:
        watch = self._watch(broker_name)
        return ElectionFacts(
            joined_for_ms=now_ms - watch.ids_changed_ms,
            suspect_wait_ms=self._suspect_wait_ms(broker_name, now_ms),
            unclean_wait_ms=self.unclean_wait_ms(broker_name, now_ms),
            members=self._last_seen(broker_name, now_ms),
            confirmed=watch.floor.newest,
        )

    def unclean_wait_ms(self, broker_name: str, now_ms: int) -> int:
        """How long an unclean election must still wait for the last master's lease to end (R7)."""
        lease_ms = self._config.master_lease_ms + self._config.lease_margin_ms
        if self._gate_opened_ms is None:
            return lease_ms
        # The leader before may have renewed the lease until this gate opened, and a little later:
        # lease_margin_ms is longer than a leader answers without a new majority.
        answered_ms = max(self._watch(broker_name).master_answered_ms, self._gate_opened_ms)
        return max(0, answered_ms + lease_ms - now_ms)

    def _suspect_wait_ms(self, broker_name: str, now_ms: int) -> int:
        """How long the election of a suspect must still wait (R17): until each replica has reported
        its log, or has had the time for that."""
        waits_ms = self._config.unseen_timeout_ms - self._sessions.led_for_ms(now_ms)
        group = self._state.group(broker_name)
        here = {seen.broker_id for seen in self.live(broker_name, now_ms) if seen.max_offset >= 0}
        if group is None or all(each.learner or each.broker_id in here for each in group.replicas):
            return 0
        return max(0, waits_ms)

    def unheard_ms(self, broker_name: str, broker_id: int, now_ms: int) -> int:
        """How long the registered process of that replica has been silent (R59); 0 if a peer hears
        it now. Counted from when this node began to lead, or the process registered, at the
        earliest."""
        self._sessions.notice_time(now_ms)
        group = self._state.group(broker_name)
        record = group.replica(broker_id) if group is not None else None
        if group is None or record is None or broker_id in self.elsewhere(group, now_ms):
            return 0
        process = (broker_id, record.incarnation)
        heard = self._sessions.last_heard(broker_name, *process, now_ms)
        since_ms = self._watch(broker_name).registered_ms.get(process, now_ms)
        silent_ms = now_ms - since_ms if heard.silent_ms < 0 else heard.silent_ms
        return min(silent_ms, self._sessions.led_for_ms(now_ms))

    def _last_seen(self, broker_name: str, now_ms: int) -> tuple[LastSeen, ...]:
        """What this node last saw of each member (`members_of`), ascending (R44, R49)."""
        self._sessions.notice_time(now_ms)
        group = self._state.group(broker_name)
        if group is None:
            return ()
        name, sessions, found = broker_name, self._sessions, []
        members = members_of(group)
        for record in group.replicas:
            if record.broker_id in members:
                process = (record.broker_id, record.incarnation)
                heard = sessions.last_heard(name, *process, now_ms)
                lives = sessions.seen(name, *process, now_ms) is not None
                found.append(last_seen(group, record, heard, lives=lives))
        return tuple(found)

    def never_saw(self) -> tuple[str, ...]:
        """The groups, by name, with a member that never had a session here: for a whole timeout
        this node cannot judge whether that member is alive (R35)."""
        unheard = LastHeard()
        return tuple(
            name
            for name in self._state.broker_names()
            for group in [self._state.groups[name]]
            if any(
                record.broker_id in group.sync_state_set
                and self._sessions.last_heard(name, record.broker_id, record.incarnation, 0)
                == unheard
                for record in group.replicas
            )
        )

    # Events.

    @records_event
    def handle(self, event: ev.LivenessEvent, now_ms: int) -> list[ev.LivenessEffect]:
        """Takes one event and returns what to do, in order."""
        self._sessions.notice_time(now_ms)
        match event:
            case ev.SessionHello():
                return self._session_hello(event, now_ms)
            case ev.SessionHeartbeat():
                incarnation = self._sessions.heartbeat(event, now_ms)
                if incarnation is None:
                    return []
                return self._heartbeat_received(event, incarnation, now_ms)
            case ev.SessionEnded():
                known = self._state.is_registered(event.broker_name, event.broker_id)
                newest = self._sessions.closed(event, now_ms, is_registered=known)
                return self._check(event.broker_name, now_ms) if newest else []
            case ev.RemotingHeartbeat():
                if not self._state.is_registered(event.broker_name, event.seen.broker_id):
                    return []  # R58: else a stranger could add any number of entries
                first = self._sessions.remoting_heartbeat(event, now_ms)
                beat = self._heartbeat_received(event, "", now_ms)
                return beat + self._check(event.broker_name, now_ms) if first else beat
            case ev.RemotingChannelClosed():
                return self._check_many(
                    self._sessions.channel_closed(event.channel_id, now_ms), now_ms
                )
            case ev.GateOpened():
                self._gate_opened_ms = now_ms
                self._sessions.gate_opened(now_ms)
                for watch in self._watches.values():
                    watch.gate_opened()
                return self._check_many(self._state.broker_names(), now_ms)
            case ev.GateClosed():
                self._gate_opened_ms, self._unchecked = None, {}
                self._sessions.gate_closed()
                return []
            case ev.StateApplied():
                return self._state_applied(event.state, now_ms)
            case ev.ElectionEnded():
                watch = self._watch(event.broker_name)
                watch.election_ended(event.expected_master_epoch, self._config, now_ms)
                return []
            case ev.PeerReported():
                names = sorted(self._hearing.peer_reported(event, now_ms))
                return [effect for name in names for effect in self._check(name, now_ms)]
            case ev.ContinueChecks():
                self._is_continued = False
                return self._check_many(list(islice(self._unchecked, GROUPS_A_TURN)), now_ms)
            case ev.Tick():
                return self._tick(now_ms)

    def _watch(self, broker_name: str) -> _Watch:
        watch = self._watches.get(broker_name)
        if watch is None:
            watch = _Watch()
            if broker_name in self._state.groups:  # R58: no request adds one by naming a group
                self._watches[broker_name] = watch
        return watch

    def _session_hello(self, event: ev.SessionHello, now_ms: int) -> list[ev.LivenessEffect]:
        group = self._state.group(event.broker_name)
        record = group.replica(event.broker_id) if group else None
        registered = record.incarnation if record else ""
        leads = self._gate_opened_ms is not None
        if leads and is_hash(registered) and registered != event.incarnation:
            # R59: only the leader refuses: a follower may not have applied the registration yet.
            remark = (
                f"registered as broker {event.broker_id} of {event.broker_name} is process "
                f"{registered}, not {event.incarnation}"
            )
            code = ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
            return [ev.RefuseSession(event.session_id, code, remark)]
        living = self._sessions.hello(event, now_ms, registered)
        if not living:
            return self._check(event.broker_name, now_ms)
        remark = (
            f"another process with id {event.broker_id} of {event.broker_name} is alive "
            f"(incarnation {living})"
        )
        code = ResponseCode.CONTROLLER_BROKER_ID_INVALID
        return [ev.RefuseSession(event.session_id, code, remark)]

    def _heartbeat_received(
        self, event: ev.SessionHeartbeat | ev.RemotingHeartbeat, incarnation: str, now_ms: int
    ) -> list[ev.LivenessEffect]:
        watch, group = self._watch(event.broker_name), self._state.group(event.broker_name)
        seen = event.seen
        record = group.replica(seen.broker_id) if group else None
        if group is not None and record is not None and record.incarnation == incarnation:
            # R3: another process of the master's id has no lease that an election must wait for.
            leads = (seen.broker_id, incarnation) == (
                group.master_broker_id,
                group.master_incarnation,
            )
            # R43: a member that still has its log from before an unclean election reports what was
            # confirmed then, and that is cut.
            is_old = group.unclean_epoch > 0 and seen.epoch < group.unclean_epoch
            if seen.broker_id in group.sync_state_set and not is_old:
                confirmed = seen.confirm_offset
                # R59: a master's log has all that is confirmed, so more cannot be right. Of another
                # member more counts: a suspect may know a confirmOffset above its own end (R17).
                if leads and seen.max_offset >= 0:
                    confirmed = min(confirmed, seen.max_offset)
                watch.floor.newest = max(watch.floor.newest, confirmed)
            if leads and self._gate_opened_ms is not None:
                watch.master_answered_ms = now_ms
        return self._check(event.broker_name, now_ms) if watch.unsettled else []

    def _check_many(self, names: Sequence[str], now_ms: int) -> list[ev.LivenessEffect]:
        """Checks GROUPS_A_TURN of the groups now, the others in later turns (ContinueChecks)."""
        self._unchecked.update(dict.fromkeys(names[GROUPS_A_TURN:]))
        effects: list[ev.LivenessEffect] = []
        for broker_name in names[:GROUPS_A_TURN]:
            self._unchecked.pop(broker_name, None)
            effects += self._check(broker_name, now_ms)
        if self._unchecked and not self._is_continued:
            self._is_continued = True
            effects.append(ev.ContinueChecks())
        return effects

    def _state_applied(self, state: ControllerState, now_ms: int) -> list[ev.LivenessEffect]:
        before, self._state = self._state, state
        for broker_name in before.broker_names():
            if broker_name not in state.groups:
                self._watches.pop(broker_name, None)
                self._hearing.removed(broker_name)
        changed = []
        for broker_name in state.broker_names():
            group, old = state.groups[broker_name], before.group(broker_name)
            if group is not old:
                self._watch(broker_name).changed(group, old, now_ms)
                known = [(broker_name, *each) for each in group.processes]
                self._hearing.registered(broker_name, known, state.applied_index)
                changed.append(broker_name)
        return self._check_many(changed, now_ms)

    def _tick(self, now_ms: int) -> list[ev.LivenessEffect]:
        if now_ms - self._aged_ms >= CONFIRM_SETTLE_MS:
            self._aged_ms = now_ms
            for watch in self._watches.values():
                watch.floor.age()
        groups, names = self._state.groups, self._state.broker_names()
        # R58: a stranger may register many groups that never get a master. They are checked in
        # turns of their own, so that no other group waits for them.
        elected = self._elected.next_of([name for name in names if groups[name].master_epoch])
        fresh = self._fresh.next_of([name for name in names if not groups[name].master_epoch])
        names = (*elected, *fresh)
        effects = [effect for name in names for effect in self._check(name, now_ms)]
        for broker_name in names:
            effects += self._check_stale(groups[broker_name], now_ms)
        return effects

    def _check_stale(self, group: BrokerGroup, now_ms: int) -> list[ev.LivenessEffect]:
        """R19: reports once that a replica knows of newer epochs than are recorded here."""
        if self._gate_opened_ms is None:
            return []
        watch = self._watch(group.broker_name)
        live = self.live(group.broker_name, now_ms)
        why = why_stale(group, living_replicas(group, live))
        if not why:
            watch.stale, watch.stale_since_ms = "", None
            return []
        if watch.stale_since_ms is None:
            watch.stale_since_ms = now_ms
        if why == watch.stale or now_ms - watch.stale_since_ms < STALE_SETTLE_MS:
            return []
        watch.stale = why
        return [] if why == watch.blocked else [ev.ElectionBlocked(group.broker_name, why)]

    # Decisions.

    def _dead(self, group: BrokerGroup, now_ms: int) -> frozenset[int]:
        judged = frozenset(
            record.broker_id
            for record in group.replicas
            if self._judge(group, record, now_ms).state == "dead"
        )
        # R50: a process that a peer hears is only out of reach of this node.
        return judged - self.elsewhere(group, now_ms) if judged else judged

    def elsewhere(self, group: BrokerGroup, now_ms: int) -> frozenset[int]:
        """The replicas that this node does not hear, but a peer does."""
        name = group.broker_name
        processes = [(name, *process) for process in group.processes]
        unheard = frozenset(each for each in processes if not self._sessions.hears(*each, now_ms))
        self._hearing.heard(name, unheard)
        return self._hearing.elsewhere(unheard, now_ms) if unheard else frozenset()

    def _judge(self, group: BrokerGroup, record: ReplicaRecord, now_ms: int) -> SilenceVerdict:
        process = (record.broker_id, record.incarnation)
        registered_ms = self._watch(group.broker_name).registered_ms.get(process, now_ms)
        return self._sessions.judge(group.broker_name, *process, registered_ms, now_ms)

    def _check(self, broker_name: str, now_ms: int) -> list[ev.LivenessEffect]:
        """Decides what the group needs now. Nothing while the gate is closed."""
        group = self._state.group(broker_name)
        if group is None:
            return []
        elsewhere = self.elsewhere(group, now_ms)
        if self._gate_opened_ms is None:
            return [*self._hearing.report(self._state.applied_index, now_ms)]
        watch = self._watch(broker_name)
        effects: list[ev.LivenessEffect] = []
        dead = self._dead(group, now_ms)
        if dead != watch.dead:
            watch.dead = dead
            effects.append(ev.AliveChanged(broker_name))
        master = group.replica(group.master_broker_id)
        watch.unsettled = bool(dead or elsewhere or group.needs_election) or master is None
        if master is not None and not watch.unsettled:
            watch.blocked, watch.needs_operator = "", False
        need = self._need(group, master, elsewhere, now_ms) if watch.unsettled else None
        if need is not None:
            effects += self._elect(group, need, elsewhere, now_ms)
        urgent = need is not None and group.master_epoch > 0
        effects += self._hearing.offer(broker_name, elsewhere, urgent=urgent, now_ms=now_ms)
        return effects

    def _need(
        self,
        group: BrokerGroup,
        master: ReplicaRecord | None,
        elsewhere: frozenset[int],
        now_ms: int,
    ) -> SilenceVerdict | None:
        """Why and since when the group needs an election; None if it does not."""
        watch = self._watch(group.broker_name)
        if master is not None:
            if group.needs_election:
                process = (master.broker_id, master.incarnation)
                since_ms = watch.registered_ms.get(process, now_ms)
                return SilenceVerdict("unknown", group.needs_election, since_ms)
            verdict = self._judge(group, master, now_ms)
            # R50: if a peer hears it, only the link to this node is silent. A closed session is
            # different: it is newer than any report of a peer, so it counts.
            is_heard = verdict.silent and master.broker_id in elsewhere
            return verdict if verdict.state == "dead" and not is_heard else None
        if group.master_epoch > 0:
            return SilenceVerdict("unknown", "no_master", now_ms)
        # The brokers of a new group ask for its first election. This one is for a lost request.
        if now_ms - watch.ids_changed_ms < FIRST_ELECTION_SETTLE_MS:
            return None
        return SilenceVerdict("unknown", "first_election", now_ms)

    def _elect(
        self, group: BrokerGroup, need: SilenceVerdict, elsewhere: frozenset[int], now_ms: int
    ) -> list[ev.LivenessEffect]:
        watch = self._watch(group.broker_name)
        name = group.broker_name
        own = own_election(
            group,
            self.live(name, now_ms),
            confirm_floor=self.confirm_floor(name),
            suspect_wait_ms=self._suspect_wait_ms(name, now_ms),
            heard_elsewhere=bool(elsewhere),
            master_died=need.state == "dead",
        )
        if own is None:
            return []
        known, watch.blocked, watch.needs_operator = watch.blocked, own.refusal, own.needs_operator
        if not own.propose:
            if own.refusal == known:
                return []
            return [ev.ElectionBlocked(name, own.refusal, operator=own.needs_operator)]
        if not watch.propose(group.master_epoch, self._config, now_ms):
            return []
        return [
            ev.ProposeElect(
                group.broker_name, group.master_epoch, need.reason, need.since_ms, need.silent_ms
            )
        ]
