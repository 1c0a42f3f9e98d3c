"""One replica as its master sees it: its acks, and whether it may join the set (R13) or is too slow
(R14). `sync_state` decides for the whole set. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from batonmq.runtime.backoff import pause_ms

RATE_WINDOW_MS = 100


@dataclass(frozen=True, slots=True)
class SyncPolicy:
    """Times in ms, sizes in bytes."""

    min_in_sync_replicas: int = 1
    sync_flush: bool = False
    slave_silent_ms: int = 600
    """R14: the maximum age of an unacked byte, or of the last answer to a heartbeat."""
    quiet_slave_ms: int = 15_000
    """The same for slaves that do not answer heartbeats; an idle Java slave acks every 5 s."""
    join_ms: int = 200  # R13: how long a joining slave may hold confirmOffset back.
    join_lag_bytes_max: int = 16 << 20
    join_near_bytes: int = 64 << 10
    """A slave this near may join at any speed; one further away must be fast enough."""
    join_fresh_ms: int = 100
    """A slave with an older ack may not join, however near it is: it may be hung or cut off."""
    join_pause_ms: int = 1_000
    """The pause after a failed join, or after a removal for slowness within `calm_ms` of the last
    join; doubles up to `join_pause_ms_max`."""
    join_pause_ms_max: int = 60_000
    calm_ms: int = 60_000
    tables_ms: int = 5_000  # R42: how long a member may lack the tables of this mastership.
    retry_ms: int = 50
    retry_ms_max: int = 1_000
    tick_ms: int = 50
    calm_tick_ms: int = 200  # The tick period while no replica is late or about to join.
    calm_ack_ms: int = 300
    """While a replica has not acked for this long, ticks come every `tick_ms`. It is below
    `slave_silent_ms` by more than a calm tick."""
    stall_ms: int = 100
    """R8: if a tick is later than this, the deadlines of other replicas are postponed."""


@dataclass(slots=True)
class Follower:
    """A replica, by its newest connection. `ack` is -1 until that connection acked, and without
    one."""

    broker_id: int
    absent_since_ms: int
    connection_id: int | None = None
    learner: bool = False
    whole: bool = True  # False: its log begins after ours, so it lacks old messages (R13)
    tables_epoch: int | None = None
    """The epoch of the master whose tables it has; -1: none (R42). None: a Java broker, which does
    not report it."""
    tables_stale: bool = False
    """It reported that its tables are outdated, in the same epoch."""
    tables_since_ms: int = 0  # since when it lacks the tables of this mastership
    ack: int = -1
    ack_ms: int = 0
    pongs: int = 0  # acks of the same offset within a second: two show that it answers heartbeats
    held: int = -1  # the last ack of any connection: a new connection alone is no progress (R14)
    judged_from_ms: int = 0  # older bytes count as unacked since this moment
    rate: float = 0.0  # bytes per second acked in the last RATE_WINDOW_MS
    rate_ms: int = 0  # when `rate` was measured, and `ack` at that moment
    rate_ack: int = 0
    joined_ms: int = -1 << 40
    joins_in_vain: int = 0
    join_after_ms: int = 0
    slow: bool = False  # whether its removal was proposed because it was slow
    times_slow: int = 0
    barred_until_ms: int = 0

    @property
    def following(self) -> bool:
        return self.ack >= 0

    def holds_tables(self, master_epoch: int) -> bool:
        """Whether it has the tables of this mastership (R42). Always true for a Java broker, which
        does not report it."""
        return self.tables_epoch is None or self.tables_epoch == master_epoch

    def follows_tables(self, master_epoch: int) -> bool:
        """Whether its tables are also current. If not, it stays in the set, since it has every
        acknowledged message, but no planned switch chooses it."""
        return self.holds_tables(master_epoch) and not self.tables_stale

    def epoch_begins(self, now_ms: int) -> None:
        """The master was elected again: acks and tables of the earlier epoch no longer count."""
        if self.following:
            self.absent_since_ms = now_ms
        self.ack = -1
        # R8: all its deadlines begin with the new epoch.
        self.ack_ms = self.tables_since_ms = now_ms

    def measure_rate(self, first: bool, now_ms: int) -> None:
        """Call after an ack; `first`: the first one of the connection."""
        if not first:
            seconds = (now_ms - self.rate_ms) / 1000
            self.rate = (self.ack - self.rate_ack) / seconds
        self.rate_ms, self.rate_ack = now_ms, self.ack

    def acks_flow(self, policy: SyncPolicy, written: int, now_ms: int) -> bool:
        """Whether its newest ack is fresh, or covers the whole log."""
        # A Java slave acks an idle log only every 5 s: an ack of everything is as good as a fresh
        # one.
        if self.pongs < 2 and self.ack >= written:
            return True
        return now_ms - self.ack_ms <= policy.join_fresh_ms

    def is_near(self, policy: SyncPolicy, written: int) -> bool:
        """Whether it can reach confirmOffset within the time for which that may be held back."""
        lag = written - self.ack
        # How much it can catch up at its rate while confirmOffset is held back.
        within_reach = max(policy.join_near_bytes, self.rate * policy.join_ms / 1000)
        return lag <= min(within_reach, policy.join_lag_bytes_max)

    def is_calm(self, policy: SyncPolicy, unacked_ms: int | None, now_ms: int) -> bool:
        """Whether it follows, acked recently and has no old unacked byte (`unacked_ms`: when the
        oldest was written). Then nothing is due before the next calm tick (R8)."""
        return (
            self.following
            and now_ms - self.ack_ms <= policy.calm_ack_ms
            and (unacked_ms is None or now_ms - unacked_ms <= policy.tick_ms)
        )

    def joined(self, now_ms: int) -> None:
        self.joined_ms = self.judged_from_ms = now_ms
        self.joins_in_vain = 0

    def joined_in_vain(self, policy: SyncPolicy, now_ms: int) -> None:
        """It held writes back and did not join: its time ran out, or it disconnected."""
        self.joins_in_vain += 1
        self.join_after_ms = now_ms + _pause_ms(policy, self.joins_in_vain)

    def left(self, policy: SyncPolicy, now_ms: int) -> None:
        """It left the set. A repeatedly slow replica delays all writes each time (R14), so it waits
        longer before each new join."""
        # leaving for another reason delays no writes
        if not self.slow:
            return
        self.slow = False
        calm = now_ms - self.joined_ms >= policy.calm_ms  # long in the set: not slow repeatedly
        self.times_slow = 1 if calm else self.times_slow + 1
        if self.times_slow > 1:
            self.barred_until_ms = now_ms + _pause_ms(policy, self.times_slow - 1)

    def postpone(self, stall_ms: int) -> None:
        """R8: this process did not run for that long."""
        self.absent_since_ms += stall_ms
        self.ack_ms += stall_ms
        self.judged_from_ms += stall_ms
        self.tables_since_ms += stall_ms


def _pause_ms(policy: SyncPolicy, times: int) -> int:
    return pause_ms(policy.join_pause_ms, policy.join_pause_ms_max, times)
