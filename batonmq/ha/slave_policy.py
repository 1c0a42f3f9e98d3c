"""The limits of the slave core, and its two timers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from batonmq.runtime.backoff import Backoff, pause_ms

EPOCHS_AHEAD_MAX: Final = 1 << 20
"""How far a frame's epoch may be above that of the role view: the master may hear of its election
first, and controllers that forgot the group begin up to a million above all that is reported."""


@dataclass(frozen=True, slots=True)
class SlavePolicy:
    """Times in ms."""

    segment_size: int = 1  # in bytes: an empty log begins at one of its multiples
    sync_flush: bool = False
    sync_from_last_file: bool = False
    async_learner: bool = False
    retry_ms: int = 20
    retry_ms_max: int = 1_000
    diverged_retry_ms: int = 1_000
    diverged_retry_ms_max: int = 60_000
    dial_ms: int = 1_000  # to connect; TCP's own retries double each time
    connect_ms: int = 3_000  # for the handshake's answer, and for the proof
    keepalive_ms: int = 1_000
    housekeeping_ms: int = 20_000
    silence_limit_ms: int = 2_000
    """The longest silence of a master that sends something every haSendHeartbeatInterval; for
    others `housekeeping_ms`."""
    backlog_window_ms: int = 20
    backlog_lag_bytes: int = 2 << 20
    """How far readers may lag behind the confirmed end while a backlog arrives."""
    tick_ms: int = 100
    stall_ms: int = 100


NEVER_MS: Final = 1 << 62


class Redial:
    """When a slave connects again, and whether it has reported why it cannot follow. After a lost
    connection: soon, then with pauses of up to a second. For a lasting reason (another history,
    damage, a full disk): reported once, retried after a second, then with pauses of up to a minute,
    without an end."""

    def __init__(self, policy: SlavePolicy, now_ms: int) -> None:
        self.at_ms = now_ms
        """When to connect, if there is no connection."""
        self._lost = Backoff(policy.retry_ms, policy.retry_ms_max)
        self._policy = policy
        self._diverged_times = 0
        self._diverged_reason = ""
        self._stuck_times = 0
        self._stuck_reason = ""
        self._stuck_offset = -1

    def progress(self) -> None:
        """Another master was elected, or the obstacle is gone: pauses are short again."""
        self._lost.reset()
        self._diverged_times = 0

    def served(self) -> None:
        """The master sends what this log needs next. If the histories differ again later, also for
        the same reason, that is news."""
        self.progress()
        self._diverged_reason = ""

    def later(self, now_ms: int) -> None:
        """A connection ended or failed: sets the next attempt."""
        self.at_ms = now_ms + self._lost.next_ms()

    def diverged(self, reason: str, now_ms: int) -> bool:
        """The slave cannot follow: sets the next attempt. Returns whether `reason` must be
        reported."""
        self._diverged_times += 1
        self._pause(self._diverged_times, now_ms)
        before, self._diverged_reason = self._diverged_reason, reason
        return reason != before

    def stuck(self, offset: int, reason: str, now_ms: int) -> bool:
        """As `diverged`, but a master that serves this slave ends nothing: each new connection
        brings good bytes below `offset`."""
        if offset != self._stuck_offset:
            self._stuck_offset, self._stuck_times, self._stuck_reason = offset, 0, ""
        self._stuck_times += 1
        self._pause(self._stuck_times, now_ms)
        before, self._stuck_reason = self._stuck_reason, reason
        return reason != before

    def _pause(self, times: int, now_ms: int) -> None:
        first_ms, max_ms = self._policy.diverged_retry_ms, self._policy.diverged_retry_ms_max
        self.at_ms = now_ms + pause_ms(first_ms, max_ms, times)


class MasterSilence:
    """The master's silence and its limit."""

    def __init__(self, policy: SlavePolicy, now_ms: int) -> None:
        self.read_ms = now_ms
        self._policy = policy
        self._ticked_ms = now_ms
        self._beat_ms: int | None = None
        self._regular_beats = 0

    @property
    def wakeup_ms(self) -> int:
        return self._ticked_ms + self._policy.tick_ms

    def begin(self, now_ms: int) -> None:
        """A connection begins."""
        self.read_ms = self._ticked_ms = now_ms

    def end_connection(self) -> None:
        self._beat_ms = None
        self._regular_beats = 0

    def tick(self, now_ms: int) -> int:
        """Returns the silence in ms, without times in which this process did not run (R8)."""
        late_ms = now_ms - self._ticked_ms - self._policy.tick_ms
        self._ticked_ms = now_ms
        if late_ms > self._policy.stall_ms:
            # R8: this process was stopped, so the silence is not the master's
            self.read_ms += late_ms
        return now_ms - self.read_ms

    def note_beat(self, now_ms: int) -> None:
        if self._beat_ms is not None:
            is_soon = now_ms - self._beat_ms <= 1_000
            self._regular_beats = self._regular_beats + 1 if is_soon else 0
        self._beat_ms = now_ms

    def limit_ms(self, *, beats_regularly: bool) -> int:
        """`beats_regularly`: a BatonMQ master. A Java master counts as regular after two heartbeats
        with less than a second before each."""
        policy = self._policy
        if beats_regularly or self._regular_beats >= 2:
            return policy.silence_limit_ms
        return policy.housekeeping_ms
