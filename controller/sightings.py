"""What this controller saw of each broker process first-hand, and what it holds of it.

The newest session of a broker counts (for brokers that speak only remoting: the newest channel that
carried a 904); whatever is heard of an older one is ignored. A standing is asked for one process
life, named by its incarnation: a closing of one life says nothing about the next.

To be heard is not enough: a broker that no answer reaches has no lease, and no view would reach it
either. So heartbeats tell which answer came back, and a broker whose last round trip is too long
ago counts as silent. (Its side of the connection goes on as if nothing was, for TCP sends what
nobody has confirmed yet.)

`now_ms` is one monotonic clock that counts the machine's sleep. Silence is measured on it less the
time that this loop itself stood still, for nobody could be heard then (SAFETY R8).
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

from controller.liveness_events import (
    HeartbeatFacts,
    RemotingHeartbeat,
    SessionClosed,
    SessionHeartbeat,
    SessionHello,
)

__all__ = ["LivenessConfig", "Sightings", "Standing", "Verdict"]


@dataclass(frozen=True, slots=True)
class LivenessConfig:
    """Times in milliseconds; the defaults are those of R34."""

    session_timeout_ms: int = 800
    round_slack_ms: int = 100
    """How much older than the last heartbeat the last round trip may be: a heartbeat's period."""
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
    """For differences of clocks, and a leader deposed without its knowing, which goes on answering
    for as long as it counts as in touch (raftElectionMinMs, 300)."""


ROUNDS_MAX: Final = 64
"""Heartbeats of some seconds; who has not heard of those is called silent long since."""

Standing = Literal["alive", "unknown", "dead"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where a process life stands. Of a dead one: how that was seen, and when.

    `silent_ms` is how long it had said nothing by then, -1 if it was never heard here.
    """

    standing: Standing
    reason: str = ""
    since_ms: int = 0
    silent_ms: int = -1


_ALIVE: Final = Verdict("alive")
_UNKNOWN: Final = Verdict("unknown")


@dataclass(slots=True)
class _Session:
    """The newest session of a broker. `silent_since_ms` holds the leader's verdict once passed."""

    session_id: int
    incarnation: str
    opened_ms: int
    heard_awake_ms: int
    facts: HeartbeatFacts
    closed_ms: int | None = None
    goodbye: bool = False
    why: str = ""
    """What it said in its goodbye, empty for a planned stop."""
    held_back_ms: int = 0
    silent_since_ms: int | None = None
    silent_ms: int = -1
    """How long it had said nothing when it was closed or called silent."""
    asked: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=ROUNDS_MAX))
    """(sequence, when heard) of the heartbeats whose answers are not known to have arrived."""
    round_awake_ms: int | None = None
    """When the newest heartbeat came whose answer reached the broker; None if it does not say."""


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


class Sightings:
    """All brokers' sessions and channels on this node, by (brokerName, id)."""

    def __init__(self, config: LivenessConfig) -> None:
        self._config = config
        self._brokers: dict[tuple[str, int], _Broker] = {}
        self._gate_opened_ms: int | None = None
        self._gate_opened_awake_ms = 0
        self._last_ms: int | None = None
        self._slept_ms = 0
        self._drained_ms = 0

    def notice_time(self, now_ms: int) -> None:
        """To be told of every event and question: a gap means that this process stood still."""
        if self._last_ms is not None:
            gap_ms = now_ms - self._last_ms - self._config.tick_ms
            if gap_ms > self._config.stall_ms:
                self._slept_ms += gap_ms
            if gap_ms >= self._config.session_timeout_ms:
                self._drained_ms = now_ms + self._config.drain_ms
        self._last_ms = now_ms

    def gate_opened(self, now_ms: int) -> None:
        """From now on verdicts count; silence is measured from here on."""
        self._gate_opened_ms = now_ms
        self._gate_opened_awake_ms = self._awake_ms(now_ms)
        for broker in self._brokers.values():
            if broker.session is not None:
                broker.session.silent_since_ms = None

    def gate_closed(self) -> None:
        self._gate_opened_ms = None

    # --- what is heard ---

    def hello(self, event: SessionHello, now_ms: int) -> str:
        """Takes the session as the newest; or gives the incarnation that still lives (R18)."""
        broker = self._broker(event.broker_name, event.broker_id)
        first = broker.session
        same_life = first is not None and first.incarnation == event.incarnation
        if first is not None and not same_life and self._is_heard(first, now_ms):
            return first.incarnation
        broker.session = _Session(
            session_id=event.session_id,
            incarnation=event.incarnation,
            opened_ms=now_ms,
            heard_awake_ms=self._awake_ms(now_ms),
            facts=first.facts if first is not None and same_life else HeartbeatFacts(),
        )
        return ""

    def heartbeat(self, event: SessionHeartbeat, now_ms: int) -> str | None:
        """The incarnation of the session that was heard; None if it is not the newest."""
        session = self._open_session(event.broker_name, event.broker_id, event.session_id)
        if session is None:
            return None
        session.heard_awake_ms = self._awake_ms(now_ms)
        session.facts = event.facts
        session.asked.append((event.sequence, session.heard_awake_ms))
        while event.answered and session.asked and session.asked[0][0] <= event.answered:
            session.round_awake_ms = session.asked.popleft()[1]
        if self._is_heard(session, now_ms):
            session.silent_since_ms = None
        return session.incarnation

    def closed(self, event: SessionClosed, now_ms: int) -> bool:
        """Whether that was the newest session; others' closings are of no interest."""
        session = self._open_session(event.broker_name, event.broker_id, event.session_id)
        if session is None:
            return False
        session.closed_ms = now_ms
        if session.silent_since_ms is None:
            session.silent_ms = self._awake_ms(now_ms) - session.heard_awake_ms
        session.goodbye, session.why = event.goodbye, event.why
        if not event.goodbye and session.silent_since_ms is None:
            broker = self._broker(event.broker_name, event.broker_id)
            # R8: who was not answered for so long has dialled anew, and may wait in the socket.
            hold_back_ms = self._hold_back_ms(broker, session.incarnation, now_ms)
            session.held_back_ms = max(hold_back_ms, self._drained_ms - now_ms)
            if now_ms >= self._drained_ms:
                # A closing that this node slept through says nothing about the broker (R6, R8).
                broker.verdicts.append((now_ms, session.incarnation))
        return True

    def remoting_heartbeat(self, event: RemotingHeartbeat, now_ms: int) -> bool:
        """Whether the broker was not heard over a channel just before."""
        broker = self._broker(event.broker_name, event.broker_id)
        first = broker.channel is None or broker.channel.closed_ms is not None
        broker.channel = _Channel(
            channel_id=event.channel_id,
            timeout_ms=event.timeout_ms,
            heard_awake_ms=self._awake_ms(now_ms),
            facts=event.facts,
        )
        return first

    def channel_closed(self, channel_id: int, now_ms: int) -> list[str]:
        """The groups of which a broker's newest channel that was, in order of name."""
        names: set[str] = set()
        for (broker_name, _), broker in self._brokers.items():
            channel = broker.channel
            if channel is not None and channel.channel_id == channel_id:
                channel.closed_ms = now_ms
                names.add(broker_name)
        return sorted(names)

    # --- what is held ---

    def facts(
        self, broker_name: str, broker_id: int, incarnation: str, now_ms: int
    ) -> HeartbeatFacts | None:
        """The newest facts of that process life; None unless it was heard within its timeout."""
        broker = self._brokers.get((broker_name, broker_id))
        if broker is None:
            return None
        session, channel = broker.session, broker.channel
        if (
            session is not None
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

    def judge(
        self, broker_name: str, broker_id: int, incarnation: str, registered_ms: int, now_ms: int
    ) -> Verdict:
        """Where that process life stands; `registered_ms` is when it was seen registering."""
        if self.facts(broker_name, broker_id, incarnation, now_ms) is not None:
            return _ALIVE
        broker = self._brokers.get((broker_name, broker_id), _Broker())
        session, channel = broker.session, broker.channel
        if session is not None and session.incarnation == incarnation:
            return self._judge_session(broker, session, now_ms)
        if session is not None and session.closed_ms is None and session.opened_ms > registered_ms:
            return Verdict("dead", "master_restarted", session.opened_ms)
        if channel is not None and not incarnation:
            return self._judge_channel(channel, now_ms)
        return self._judge_unseen(registered_ms, now_ms)

    def _awake_ms(self, now_ms: int) -> int:
        return now_ms - self._slept_ms

    def _broker(self, broker_name: str, broker_id: int) -> _Broker:
        return self._brokers.setdefault((broker_name, broker_id), _Broker())

    def _open_session(self, broker_name: str, broker_id: int, session_id: int) -> _Session | None:
        """The broker's newest session if it is that one and still open."""
        session = self._broker(broker_name, broker_id).session
        if session is None or session.session_id != session_id or session.closed_ms is not None:
            return None
        return session

    def _is_heard(self, session: _Session, now_ms: int) -> bool:
        silent_ms = self._awake_ms(now_ms) - session.heard_awake_ms
        silent_ms = max(silent_ms, self._deaf_for_ms(session, now_ms))
        return session.closed_ms is None and silent_ms <= self._config.session_timeout_ms

    def _deaf_for_ms(self, session: _Session, now_ms: int) -> int:
        """How long no answer has reached it, less what is usual. Only the leader's matter."""
        if session.round_awake_ms is None or self._gate_opened_ms is None:
            return 0
        round_ms = self._silent_for_ms(session.round_awake_ms, now_ms)
        return round_ms - self._config.round_slack_ms

    def _silent_for_ms(self, heard_awake_ms: int, now_ms: int) -> int:
        """How long it was silent since it was heard and, on the leader, since the gate opened."""
        if self._gate_opened_ms is not None:
            heard_awake_ms = max(heard_awake_ms, self._gate_opened_awake_ms)
        return self._awake_ms(now_ms) - heard_awake_ms

    def _hold_back_ms(self, broker: _Broker, incarnation: str, now_ms: int) -> int:
        """R6: nothing for the first verdict on a process within the window, then ever longer."""
        oldest_ms = now_ms - self._config.flap_window_ms
        broker.verdicts = [each for each in broker.verdicts if each[0] > oldest_ms]
        repeated = sum(1 for _, life in broker.verdicts if life == incarnation)
        if repeated == 0:
            return 0
        delay_ms = self._config.flap_delay_ms << min(repeated - 1, 16)
        return min(delay_ms, self._config.flap_delay_max_ms)

    def _judge_session(self, broker: _Broker, session: _Session, now_ms: int) -> Verdict:
        if session.silent_since_ms is not None:
            return Verdict("dead", "session_silent", session.silent_since_ms, session.silent_ms)
        if session.closed_ms is not None:
            if now_ms < session.closed_ms + session.held_back_ms:
                return _UNKNOWN
            reason = "goodbye" if session.goodbye else "session_closed"
            if session.why:
                reason += f": {session.why}"
            return self._judge_closing(session.closed_ms, reason, session.silent_ms, now_ms)
        limit_ms = self._config.session_timeout_ms + self._hold_back_ms(
            broker, session.incarnation, now_ms
        )
        deaf_ms = self._deaf_for_ms(session, now_ms)
        if max(self._silent_for_ms(session.heard_awake_ms, now_ms), deaf_ms) <= limit_ms:
            return _UNKNOWN
        silent_ms = max(self._awake_ms(now_ms) - session.heard_awake_ms, deaf_ms)
        if self._gate_opened_ms is not None:
            broker.verdicts.append((now_ms, session.incarnation))
            session.silent_since_ms = now_ms
            session.silent_ms = silent_ms
        return Verdict("dead", "session_silent", now_ms, silent_ms)

    def _judge_closing(self, closed_ms: int, reason: str, silent_ms: int, now_ms: int) -> Verdict:
        """R5: an old closing, seen before the gate opened, gets a full timeout from then."""
        opened_ms = self._gate_opened_ms
        old = opened_ms is not None and opened_ms - closed_ms >= self._config.closure_young_ms
        if old and self._silent_for_ms(0, now_ms) <= self._config.session_timeout_ms:
            return _UNKNOWN
        return Verdict("dead", reason, closed_ms, silent_ms)

    def _judge_channel(self, channel: _Channel, now_ms: int) -> Verdict:
        if channel.closed_ms is not None:
            return self._judge_closing(channel.closed_ms, "channel_closed", -1, now_ms)
        if self._silent_for_ms(channel.heard_awake_ms, now_ms) <= channel.timeout_ms:
            return _UNKNOWN
        silent_ms = self._awake_ms(now_ms) - channel.heard_awake_ms
        return Verdict("dead", "heartbeat_silent", now_ms, silent_ms)

    def _judge_unseen(self, registered_ms: int, now_ms: int) -> Verdict:
        """R35: never heard of. Dead only after a full timeout in which it could have come."""
        timeout_ms = self._config.session_timeout_ms
        if self._gate_opened_ms is None or now_ms - registered_ms <= timeout_ms:
            return _UNKNOWN
        if self._silent_for_ms(0, now_ms) <= timeout_ms:
            return _UNKNOWN
        return Verdict("dead", "never_seen", now_ms)
