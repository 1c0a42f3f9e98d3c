"""What this node observed of each broker process, and whether it counts as dead. Pure.

Only the newest session of a broker counts (of a broker that speaks only remoting: the newest
channel with a heartbeat, request 904). A verdict is about one process, named by its incarnation.

Heartbeats alone are not enough: a broker that no answer reaches has no lease, and no view would
reach it. So heartbeats report which answer arrived, and a broker whose last round trip is too long
ago counts as silent. Its own heartbeats may still arrive.

`now_ms` is one monotonic clock that counts the machine's sleep. Silence is measured without the
time in which this loop itself stood still, since nothing could be received then (R8).
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
    """What a broker needs to reach this node for the first time, if that is longer. An attempt to
    connect to an address that answers nothing, such as a stopped container's, takes 1 s."""
    follower_heartbeat_ms: int = 500
    """Between two heartbeats of a broker to a controller that does not lead."""
    first_look_ms: int = 250
    """No verdict of silence sooner after the gate opened: heartbeats may be on their way."""
    java_timeout_ms: int = 10_000
    """Of a broker that speaks only remoting, until it names its own: Java's default. It looks for
    controllers every 3 s, so a new leader may hear nothing of it for a while."""
    round_slack_ms: int = 100
    """How much older than the last heartbeat the last round trip may be: a heartbeat's period."""
    heard_ms: int = 650
    """How old the newest heartbeat to a follower may be: above brokerSessionFollowerHeartbeatMs,
    and so far below the session time-out that the follower's report arrives before that."""
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
        """After so long a broker that this node never saw is dead (R35)."""
        return max(self.session_timeout_ms, self.first_contact_ms)


ROUNDS_MAX: Final = 64
"""Heartbeats of some seconds: a broker without an answer for so long is silent already."""

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
        """Whether it rests on silence alone, and not on what was seen to happen."""
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
    """(sequence, awake_ms) of the heartbeats whose answers are not known to have arrived."""
    round_awake_ms: int | None = None
    """When the newest heartbeat came whose answer reached the broker; None if not reported."""


@dataclass(slots=True)
class _Channel:
    """The newest connection over which a broker sent 904."""

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
        """By process, when there were verdicts within the flap window; the newest process last.
        They outlast `_brokers`: a process may be removed and register again."""
        self._gate_opened_ms: int | None = None
        self._gate_opened_awake_ms = 0
        self._last_ms: int | None = None
        self._slept_ms = 0
        self._drained_ms = 0

    def notice_time(self, now_ms: int) -> None:
        """Must be called with every event and question: a gap means that this loop stood still."""
        if self._last_ms is not None:
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
        """From now on verdicts count; of silence seen before, see `_unheard_for_ms`."""
        self._gate_opened_ms = now_ms
        self._gate_opened_awake_ms = self._awake_ms(now_ms)
        for broker in self._brokers.values():
            if broker.session is not None:
                broker.session.silent_since_ms = None

    def gate_closed(self) -> None:
        self._gate_opened_ms = None

    # Events.

    def hello(self, event: ev.SessionHello, now_ms: int, registered: str = "") -> str:
        """Makes the session the newest one; else returns the incarnation still alive (R18).

        `registered`: the incarnation recorded for this id. It has proven itself where that is
        possible, so it displaces a process that is not registered (R59)."""
        broker = self._broker(event.broker_name, event.broker_id)
        older = broker.session
        same_process = older is not None and older.incarnation == event.incarnation
        proven = is_hash(registered) and event.incarnation == registered
        if older is not None and not (same_process or proven) and self._is_recent(older, now_ms):
            return older.incarnation
        broker.session = _Session(
            session_id=event.session_id,
            incarnation=event.incarnation,
            opened_ms=now_ms,
            received_awake_ms=self._awake_ms(now_ms),
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

    def closed(self, event: ev.SessionClosed, now_ms: int, *, is_registered: bool) -> bool:
        """Whether that was the newest session; closings of others are ignored. A broker that is not
        registered is forgotten: any number of them may come and go."""
        session = self._open_session(event.broker_name, event.broker_id, event.session_id)
        if session is None:
            return False
        session.closed_ms = now_ms
        if not is_registered:
            del self._brokers[event.broker_name, event.broker_id]
            return True
        if session.silent_since_ms is None:
            session.silent_ms = self._awake_ms(now_ms) - session.received_awake_ms
        session.goodbye, session.why = event.goodbye, event.why
        if not event.goodbye and session.silent_since_ms is None:
            # R8: a broker without an answer for so long has dialled again; its Hello may be queued.
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
        """Whether this node hears that process, as followers report it to the leader (R50)."""
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
        # R5: what hears no answer gets no view and no lease, however well it is heard.
        silent_ms = max(silent_ms, self._deaf_for_ms(session, now_ms))
        return session.closed_ms is None and silent_ms <= self._config.session_timeout_ms

    def _deaf_for_ms(self, session: _Session, now_ms: int) -> int:
        """How long no answer has reached it, beyond the usual. Only a leader's answers count."""
        if session.round_awake_ms is None or self._gate_opened_ms is None:
            return 0
        # The broker is heard, but hears nothing: it has no lease and would get no view.
        round_ms = self._silent_for_ms(session.round_awake_ms, now_ms)
        return round_ms - self._config.round_slack_ms

    def _silent_for_ms(self, received_awake_ms: int, now_ms: int) -> int:
        """How long it was silent; on the leader at most the time since the gate opened."""
        if self._gate_opened_ms is not None:
            received_awake_ms = max(received_awake_ms, self._gate_opened_awake_ms)
        return self._awake_ms(now_ms) - received_awake_ms

    def _unheard_for_ms(self, session: _Session, now_ms: int) -> int:
        """How long it was silent. Silence before the gate opened counts, too (R51), beyond the
        pause that brokers make between heartbeats to a controller that does not lead."""
        since_open_ms = self._silent_for_ms(session.received_awake_ms, now_ms)
        # What was on its way while the gate opened must be read before silence counts.
        if self._gate_opened_ms is None or since_open_ms < self._config.first_look_ms:
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
        """R6: 0 for the first verdict on a process within the window, then longer each time."""
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
            # R6: a link that breaks again and again must not cause one election after
            # another.
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
        """R5: an old closing, seen before the gate opened, gets a full timeout from then."""
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
        """R35: never seen. Dead only after a full timeout in which it could have connected."""
        if self._gate_opened_ms is None or now_ms - registered_ms <= timeout_ms:
            return _UNKNOWN
        if self._silent_for_ms(0, now_ms) <= timeout_ms:
            return _UNKNOWN
        return SilenceVerdict("dead", "never_seen", now_ms)
