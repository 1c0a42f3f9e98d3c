"""What this node observed of each broker process, and whether it counts as dead. Pure.

Only the newest session of a broker counts; of a broker that speaks only remoting, the newest
channel with a BROKER_HEARTBEAT (904). A verdict is about one process, named by its incarnation.

Heartbeats alone are not enough: a broker that receives no answers has no lease, and would receive
no role view. So heartbeats report which answer arrived, and a broker whose last round trip is too
long ago counts as silent, even if its own heartbeats arrive.

`now_ms` is one monotonic clock that counts the machine's sleep. `awake_ms` is the same without the
times in which this loop stood still, since nothing could be received then (R8); silence is measured
by it.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

from msgspec.structs import replace

from batonmq.controller.liveness import events as ev
from batonmq.controller.rules.commands import LiveBroker
from batonmq.controller.rules.election import LastHeard
from batonmq.protocol.incarnation import is_hash
from batonmq.runtime.backoff import pause_ms


@dataclass(frozen=True, slots=True)
class LivenessConfig:
    """Times in milliseconds; the defaults are those of R34."""

    session_timeout_ms: int = 800
    first_contact_ms: int = 1_500
    """How long a broker may take to reach this node for the first time. An attempt to connect to an
    address that does not answer, such as a stopped container's, takes 1 s."""
    follower_heartbeat_ms: int = 500
    """Between two heartbeats of a broker to a controller that does not lead."""
    first_check_ms: int = 250
    """After the gate opened, silence from before it counts only after this time: heartbeats may be
    in the socket."""
    java_timeout_ms: int = 10_000
    """Of a broker that speaks only remoting, until its heartbeat names another: Java's default. It
    looks for the leader every 3 s, so a new leader may hear nothing from it for a while."""
    round_slack_ms: int = 100
    """How much older than the last heartbeat the last round trip may be: the heartbeats' period."""
    heard_ms: int = 650
    """How old the newest heartbeat to a follower may be: above brokerSessionFollowerHeartbeatMs
    (500), and below the session time-out, so that the follower's report reaches the leader
    first."""
    closure_young_ms: int = 2_000
    tick_ms: int = 50
    stall_ms: int = 100
    drain_ms: int = 300
    flap_window_ms: int = 10_000
    flap_delay_ms: int = 200
    flap_delay_max_ms: int = 5_000
    retry_ms: int = 100
    retry_max_ms: int = 2_000
    outcome_timeout_ms: int = 3_000
    master_lease_ms: int = 600
    lease_margin_ms: int = 500
    """For clock drift, and for a deposed leader that still answers: at most raftElectionMinMs
    (300)."""

    @property
    def unseen_timeout_ms(self) -> int:
        """A broker that this node never saw is dead after this time (R35)."""
        return max(self.session_timeout_ms, self.first_contact_ms)


ROUNDS_MAX: Final = 64
"""Unanswered heartbeats that are kept: those of 6 s. A broker without an answer for so long counts
as silent already."""

Liveness = Literal["alive", "unknown", "dead"]


@dataclass(frozen=True, slots=True)
class SilenceVerdict:
    """Whether a process is alive; of a dead one, how and when that was seen.

    `silent_ms` is how long it had been silent by then, -1 if nothing was ever received.
    """

    state: Liveness
    reason: str = ""
    since_ms: int = 0
    silent_ms: int = -1

    @property
    def silent(self) -> bool:
        """Whether silence is the only reason; else something was seen, such as a closed session."""
        return self.reason in ("session_silent", "heartbeat_silent", "never_seen")


_ALIVE: Final = SilenceVerdict("alive")
_UNKNOWN: Final = SilenceVerdict("unknown")


@dataclass(slots=True)
class _Session:
    """The newest session of a broker. `silent_since_ms` is set once the leader judged it silent."""

    session_id: int
    incarnation: str
    opened_ms: int
    received_awake_ms: int
    seen: LiveBroker
    closed_ms: int | None = None
    goodbye: bool = False
    why: str = ""
    """The reason in its goodbye, empty for a planned stop."""
    held_back_ms: int = 0
    silent_since_ms: int | None = None
    silent_ms: int = -1
    """How long it had been silent when it was closed or judged silent."""
    unanswered: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=ROUNDS_MAX))
    """(sequence, awake_ms) of the heartbeats whose answers the broker has not reported yet."""
    round_awake_ms: int | None = None
    """When the newest heartbeat came whose answer has reached the broker; None if none is known."""


@dataclass(slots=True)
class _Channel:
    """The newest connection over which a broker sent BROKER_HEARTBEAT (904)."""

    channel_id: int
    timeout_ms: int
    received_awake_ms: int
    seen: LiveBroker
    closed_ms: int | None = None


@dataclass(slots=True)
class _Broker:
    session: _Session | None = None
    channel: _Channel | None = None


class BrokerSessions:
    """All brokers' sessions and channels on this node, by (brokerName, id)."""

    def __init__(self, config: LivenessConfig) -> None:
        self._config = config
        self._brokers: dict[tuple[str, int], _Broker] = {}
        self._verdicts: dict[str, list[int]] = {}
        """By process: the times of the verdicts on it within the flap window; the newest process
        last. Not in `_brokers`, because a process may be removed and register again."""
        self._gate_opened_ms: int | None = None
        self._gate_opened_awake_ms = 0
        self._last_ms: int | None = None
        self._slept_ms = 0
        self._drained_ms = 0

    def notice_time(self, now_ms: int) -> None:
        """Must be called with every event and question."""
        if self._last_ms is not None:
            # There is a tick every `tick_ms`: a longer gap means that this loop stood still.
            gap_ms = now_ms - self._last_ms - self._config.tick_ms
            if gap_ms > self._config.stall_ms:
                self._slept_ms += gap_ms
            if gap_ms >= self._config.session_timeout_ms:
                self._drained_ms = now_ms + self._config.drain_ms
        self._last_ms = now_ms

    def led_for_ms(self, now_ms: int) -> int:
        """How long this node has led, without the times in which it stood still (R8)."""
        if self._gate_opened_ms is None:
            return 0
        return self._awake_ms(now_ms) - self._gate_opened_awake_ms

    def gate_opened(self, now_ms: int) -> None:
        """From now on verdicts count. For silence from before, see `_unheard_for_ms`."""
        self._gate_opened_ms = now_ms
        self._gate_opened_awake_ms = self._awake_ms(now_ms)
        # Verdicts of an earlier lead of this node: the broker may have been heard since.
        for broker in self._brokers.values():
            if broker.session is not None:
                broker.session.silent_since_ms = None

    def gate_closed(self) -> None:
        self._gate_opened_ms = None

    # Events.

    def hello(self, event: ev.SessionHello, now_ms: int, registered: str = "") -> str:
        """Makes the session the newest one and returns ""; or returns the incarnation of another
        process that is alive (R18). `registered`: the incarnation recorded for this id."""
        broker = self._broker(event.broker_name, event.broker_id)
        older = broker.session
        same_process = older is not None and older.incarnation == event.incarnation
        # R59: the registered process has proven itself, so it displaces one that is not registered.
        proven = is_hash(registered) and event.incarnation == registered
        if older is not None and not (same_process or proven) and self._is_recent(older, now_ms):
            return older.incarnation
        broker.session = _Session(
            session_id=event.session_id,
            incarnation=event.incarnation,
            opened_ms=now_ms,
            received_awake_ms=self._awake_ms(now_ms),
            # A process that connects again keeps its last report until its next heartbeat.
            seen=older.seen
            if older is not None and same_process
            else LiveBroker(event.broker_id, event.incarnation),
        )
        return ""

    def heartbeat(self, event: ev.SessionHeartbeat, now_ms: int) -> str | None:
        """The incarnation of the session; None if it is not the newest."""
        session = self._open_session(event.broker_name, event.seen.broker_id, event.session_id)
        if session is None:
            return None
        session.received_awake_ms = self._awake_ms(now_ms)
        session.seen = replace(event.seen, incarnation=session.incarnation)
        unanswered = session.unanswered
        unanswered.append((event.sequence, session.received_awake_ms))
        while event.answered and unanswered and unanswered[0][0] <= event.answered:
            session.round_awake_ms = unanswered.popleft()[1]
        if self._is_recent(session, now_ms):
            session.silent_since_ms = None
        return session.incarnation

    def closed(self, event: ev.SessionEnded, now_ms: int, *, is_registered: bool) -> bool:
        """Whether that was the newest session; the closing of an older one is ignored."""
        session = self._open_session(event.broker_name, event.broker_id, event.session_id)
        if session is None:
            return False
        session.closed_ms = now_ms
        # R58: any number of brokers that are not registered may come and go.
        if not is_registered:
            del self._brokers[event.broker_name, event.broker_id]
            return True
        if session.silent_since_ms is None:
            session.silent_ms = self._awake_ms(now_ms) - session.received_awake_ms
        session.goodbye, session.why = event.goodbye, event.why
        if not event.goodbye and session.silent_since_ms is None:
            # R8: while this node stood still the broker may have closed the session and dialled
            # again: its Hello may be queued behind this event.
            hold_back_ms = self._hold_back_ms(session.incarnation, now_ms)
            session.held_back_ms = max(hold_back_ms, self._drained_ms - now_ms)
            if now_ms >= self._drained_ms:
                # A closing during a stall of this node says nothing about the broker (R6, R8).
                self._note_verdict(session.incarnation, now_ms)
        return True

    def remoting_heartbeat(self, event: ev.RemotingHeartbeat, now_ms: int) -> bool:
        """Whether the broker had no open channel before."""
        broker = self._broker(event.broker_name, event.seen.broker_id)
        first = broker.channel is None or broker.channel.closed_ms is not None
        broker.channel = _Channel(
            channel_id=event.channel_id,
            timeout_ms=event.timeout_ms,
            received_awake_ms=self._awake_ms(now_ms),
            seen=event.seen,
        )
        return first

    def channel_closed(self, channel_id: int, now_ms: int) -> list[str]:
        """The groups, by name, of the brokers whose newest channel that was."""
        names: set[str] = set()
        for (broker_name, _), broker in self._brokers.items():
            channel = broker.channel
            if channel is not None and channel.channel_id == channel_id:
                channel.closed_ms = now_ms
                names.add(broker_name)
        return sorted(names)

    # Questions.

    def seen(
        self, broker_name: str, broker_id: int, incarnation: str, now_ms: int
    ) -> LiveBroker | None:
        """The newest heartbeat of that process; None unless it came within the timeout."""
        broker = self._brokers.get((broker_name, broker_id))
        if broker is None:
            return None
        session, channel = broker.session, broker.channel
        if (
            session is not None
            and session.incarnation == incarnation
            and self._is_recent(session, now_ms)
        ):
            return session.seen
        if (
            channel is not None
            and channel.closed_ms is None
            and not incarnation
            and self._awake_ms(now_ms) - channel.received_awake_ms <= channel.timeout_ms
        ):
            return channel.seen
        return None

    def hears(self, broker_name: str, broker_id: int, incarnation: str, now_ms: int) -> bool:
        """Whether this node hears that process: what followers report to the leader (R50)."""
        if self.seen(broker_name, broker_id, incarnation, now_ms) is None:
            return False
        session = self._brokers[broker_name, broker_id].session
        if self._gate_opened_ms is not None or session is None:
            return True
        if session.incarnation != incarnation:
            return True  # it speaks remoting
        # Stricter than `seen`: heartbeats to followers are rarer, and a hang must be reported
        # before the leader judges it.
        config, awake_ms = self._config, self._awake_ms(now_ms)
        answered = session.round_awake_ms
        return awake_ms - session.received_awake_ms <= config.heard_ms and (
            answered is None or awake_ms - answered <= 2 * config.heard_ms
        )

    def last_heard(
        self, broker_name: str, broker_id: int, incarnation: str, now_ms: int
    ) -> LastHeard:
        """What was last heard of that process, however long ago."""
        broker = self._brokers.get((broker_name, broker_id), _Broker())
        session, channel = broker.session, broker.channel
        if session is not None and session.incarnation == incarnation:
            silent_ms = self._awake_ms(now_ms) - session.received_awake_ms
            return LastHeard(session.seen, silent_ms, session.goodbye)
        if channel is not None and not incarnation:
            return LastHeard(channel.seen, self._awake_ms(now_ms) - channel.received_awake_ms)
        return LastHeard()

    def judge(
        self, broker_name: str, broker_id: int, incarnation: str, registered_ms: int, now_ms: int
    ) -> SilenceVerdict:
        """Whether that process is alive; `registered_ms` is when its registration was seen."""
        if self.seen(broker_name, broker_id, incarnation, now_ms) is not None:
            return _ALIVE
        broker, config = self._brokers.get((broker_name, broker_id), _Broker()), self._config
        session, channel = broker.session, broker.channel
        if session is not None and session.incarnation == incarnation:
            return self._judge_session(session, now_ms)
        if (
            session is not None
            and session.closed_ms is None
            and session.opened_ms > registered_ms
            and not is_hash(incarnation)  # R59: else one that is not registered says nothing of it
        ):
            # A name of an earlier version proves nothing: a newer process there is a restart.
            return SilenceVerdict("dead", "master_restarted", session.opened_ms)
        if channel is not None and not incarnation:
            return self._judge_channel(channel, now_ms)
        # Java brokers send a heartbeat each second at best, and have no stream that could break.
        timeout_ms = config.unseen_timeout_ms if incarnation else config.java_timeout_ms
        return self._judge_unseen(registered_ms, now_ms, timeout_ms)

    def _awake_ms(self, now_ms: int) -> int:
        return now_ms - self._slept_ms

    def _broker(self, broker_name: str, broker_id: int) -> _Broker:
        return self._brokers.setdefault((broker_name, broker_id), _Broker())

    def _open_session(self, broker_name: str, broker_id: int, session_id: int) -> _Session | None:
        """That session, if it is the broker's newest one and still open."""
        broker = self._brokers.get((broker_name, broker_id))
        session = broker.session if broker is not None else None
        # RocketMQ issue 11045: a late closing of an old connection evicted a healthy master.
        if session is None or session.session_id != session_id or session.closed_ms is not None:
            return None
        return session

    def _is_recent(self, session: _Session, now_ms: int) -> bool:
        silent_ms = self._awake_ms(now_ms) - session.received_awake_ms
        # R5: a broker that receives no answers has no lease and would receive no view.
        silent_ms = max(silent_ms, self._deaf_for_ms(session, now_ms))
        return session.closed_ms is None and silent_ms <= self._config.session_timeout_ms

    def _deaf_for_ms(self, session: _Session, now_ms: int) -> int:
        """For how long no answer has reached it, beyond `round_slack_ms`; 0 on a follower, whose
        answers grant no lease."""
        if session.round_awake_ms is None or self._gate_opened_ms is None:
            return 0
        round_ms = self._silent_for_ms(session.round_awake_ms, now_ms)
        return round_ms - self._config.round_slack_ms

    def _silent_for_ms(self, received_awake_ms: int, now_ms: int) -> int:
        """How long it was silent; on the leader, since the gate opened at the earliest."""
        if self._gate_opened_ms is not None:
            received_awake_ms = max(received_awake_ms, self._gate_opened_awake_ms)
        return self._awake_ms(now_ms) - received_awake_ms

    def _unheard_for_ms(self, session: _Session, now_ms: int) -> int:
        """How long it was silent, also before the gate opened (R51). From that time the period of
        heartbeats to a follower is taken off."""
        since_open_ms = self._silent_for_ms(session.received_awake_ms, now_ms)
        # Heartbeats that were on their way while the gate opened must be read first.
        if self._gate_opened_ms is None or since_open_ms < self._config.first_check_ms:
            return since_open_ms
        silent_ms = self._awake_ms(now_ms) - session.received_awake_ms
        return max(since_open_ms, silent_ms - self._config.follower_heartbeat_ms)

    def _note_verdict(self, incarnation: str, now_ms: int) -> None:
        oldest_ms = now_ms - self._config.flap_window_ms
        kept = [each for each in self._verdicts.pop(incarnation, ()) if each > oldest_ms]
        self._verdicts[incarnation] = [*kept, now_ms]
        while self._verdicts[oldest := next(iter(self._verdicts))][-1] <= oldest_ms:
            del self._verdicts[oldest]

    def _hold_back_ms(self, incarnation: str, now_ms: int) -> int:
        """R6: how long a verdict on the process waits: 0 for the first one within the window, then
        longer each time."""
        oldest_ms = now_ms - self._config.flap_window_ms
        # By process: a restarted broker must not wait for the faults of the one before it.
        repeated = sum(each > oldest_ms for each in self._verdicts.get(incarnation, ()))
        if repeated == 0:
            return 0
        return pause_ms(self._config.flap_delay_ms, self._config.flap_delay_max_ms, repeated)

    def _judge_session(self, session: _Session, now_ms: int) -> SilenceVerdict:
        if session.silent_since_ms is not None:
            return SilenceVerdict(
                "dead", "session_silent", session.silent_since_ms, session.silent_ms
            )
        if session.closed_ms is not None:
            # R6: a link that breaks repeatedly must not cause one election after another.
            if now_ms < session.closed_ms + session.held_back_ms:
                return _UNKNOWN
            reason = "goodbye" if session.goodbye else "session_closed"
            if session.why:
                reason += f": {session.why}"
            return self._judge_closing(session.closed_ms, reason, session.silent_ms, now_ms)
        hold_back_ms = self._hold_back_ms(session.incarnation, now_ms)
        limit_ms = self._config.session_timeout_ms + hold_back_ms
        deaf_ms = self._deaf_for_ms(session, now_ms)
        if max(self._unheard_for_ms(session, now_ms), deaf_ms) <= limit_ms:
            return _UNKNOWN
        silent_ms = max(self._awake_ms(now_ms) - session.received_awake_ms, deaf_ms)
        if self._gate_opened_ms is not None:
            self._note_verdict(session.incarnation, now_ms)
            session.silent_since_ms = now_ms
            session.silent_ms = silent_ms
        return SilenceVerdict("dead", "session_silent", now_ms, silent_ms)

    def _judge_closing(
        self, closed_ms: int, reason: str, silent_ms: int, now_ms: int
    ) -> SilenceVerdict:
        """The verdict on a session or channel that closed at `closed_ms`."""
        # R5: one that closed long before the gate opened says little by now. The broker gets a full
        # timeout from the opening to connect again.
        opened_ms = self._gate_opened_ms
        old = opened_ms is not None and opened_ms - closed_ms >= self._config.closure_young_ms
        if old and self._silent_for_ms(0, now_ms) <= self._config.session_timeout_ms:
            return _UNKNOWN
        return SilenceVerdict("dead", reason, closed_ms, silent_ms)

    def _judge_channel(self, channel: _Channel, now_ms: int) -> SilenceVerdict:
        if channel.closed_ms is not None:
            return self._judge_closing(channel.closed_ms, "channel_closed", -1, now_ms)
        if self._silent_for_ms(channel.received_awake_ms, now_ms) <= channel.timeout_ms:
            return _UNKNOWN
        silent_ms = self._awake_ms(now_ms) - channel.received_awake_ms
        return SilenceVerdict("dead", "heartbeat_silent", now_ms, silent_ms)

    def _judge_unseen(self, registered_ms: int, now_ms: int, timeout_ms: int) -> SilenceVerdict:
        """R35: a broker that was never seen is dead only after a full timeout to connect."""
        if self._gate_opened_ms is None or now_ms - registered_ms <= timeout_ms:
            return _UNKNOWN
        if self._silent_for_ms(0, now_ms) <= timeout_ms:
            return _UNKNOWN
        return SilenceVerdict("dead", "never_seen", now_ms)
