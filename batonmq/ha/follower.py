"""One replica as its master sees it: what it acked, whether and when it may join. Pure.

Rules R13 (joining) and R14 (who was slow) of SAFETY.md, as far as they concern one replica alone;
`sync_state` decides for the set as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from batonmq.runtime.backoff import pause_ms

RATE_WINDOW_MS = 100


@dataclass(frozen=True, slots=True)
class SyncPolicy:
    """The numbers behind the decisions; times in ms, sizes in bytes."""

    min_in_sync_replicas: int = 1
    sync_flush: bool = False
    slave_silent_ms: int = 600
    """R14: the age at which an unacked byte, or the last ping of a pinging slave, is too old."""
    quiet_slave_ms: int = 15_000
    """The same for a slave that does not answer heartbeats (Java acks every 5 s when idle)."""
    join_ms: int = 200
    """R13: how long a joining slave may hold confirmOffset."""
    join_lag_bytes_max: int = 16 << 20
    join_near_bytes: int = 64 << 10
    """So near a slave may join whatever its rate; a farther one must be fast enough."""
    join_fresh_ms: int = 100
    """Nobody joins whose newest ack is older: a hung or cut-off slave may be near as well."""
    join_pause_ms: int = 1_000
    """After a join in vain, and doubled with each further one up to `join_pause_ms_max`. The same
    for a member that was slow again within `calm_ms` of its last joining."""
    join_pause_ms_max: int = 60_000
    calm_ms: int = 60_000
    tables_ms: int = 5_000
    """R42: how long a member may lack the tables of this mastership."""
    retry_ms: int = 50
    retry_ms_max: int = 1_000
    tick_ms: int = 50
    calm_tick_ms: int = 200
    """The same while no replica is late, or to be added."""
    calm_ack_ms: int = 300
    """Who has not acked for so long is looked at every `tick_ms`: that is below `slave_silent_ms`
    by more than a calm tick."""
    stall_ms: int = 100
    """R8: a tick that comes later than this shifts every deadline by which others are judged."""


@dataclass(slots=True)
class Follower:
    """A replica as its newest connection shows it. `ack` is -1 until that connection acked."""

    broker_id: int
    absent_since_ms: int
    connection_id: int | None = None
    learner: bool = False
    whole: bool = True
    """False: its log begins later than ours, so it lacks old messages (R13)."""
    tables_epoch: int | None = None
    """The master of which epoch it holds the tables of, -1 of none (R42); None for a Java broker,
    which does not say."""
    tables_stale: bool = False
    """It says that it has not followed them lately, while the epoch stayed the same."""
    tables_since_ms: int = 0
    """Since when it lacks those of this mastership."""
    ack: int = -1
    ack_ms: int = 0
    pongs: int = 0
    held: int = -1
    """The last ack of any connection: a new connection alone is no progress (R14)."""
    judged_from_ms: int = 0
    """Bytes that are older than this have been unacked since then only."""
    rate: float = 0.0
    """Bytes per second by its acks, over the last `RATE_WINDOW_MS` in which it acked."""
    rate_ms: int = 0
    rate_ack: int = 0
    joined_ms: int = -1 << 40
    joins_in_vain: int = 0
    join_after_ms: int = 0
    slow: bool = False
    """Whether the proposal to remove it was for slowness."""
    times_slow: int = 0
    barred_until_ms: int = 0

    @property
    def following(self) -> bool:
        return self.connection_id is not None and self.ack >= 0

    def holds_tables(self, master_epoch: int) -> bool:
        """R42: topics, groups and consumer offsets of that mastership, as far as it says."""
        return self.tables_epoch is None or self.tables_epoch == master_epoch

    def follows_tables(self, master_epoch: int) -> bool:
        """It holds them, and as they are now. A stale member stays in the set, for it has every
        acknowledged message; no planned switch hands over to it."""
        return self.holds_tables(master_epoch) and not self.tables_stale

    def epoch_begins(self, now_ms: int) -> None:
        """Its master was elected again: its acks and tables are those of an earlier epoch."""
        if self.following:
            self.absent_since_ms = now_ms
        self.ack = -1
        self.ack_ms = self.tables_since_ms = now_ms
        self.pongs = 0
        self.rate = 0.0

    def measure_rate(self, first: bool, now_ms: int) -> None:
        """At an ack, `first` if it is the connection's first one."""
        if not first:
            seconds = (now_ms - self.rate_ms) / 1000
            self.rate = (self.ack - self.rate_ack) / seconds
        self.rate_ms, self.rate_ack = now_ms, self.ack

    def acks_flow(self, policy: SyncPolicy, written: int, now_ms: int) -> bool:
        """Whether its newest ack is fresh or, without heartbeats (Java), acks all there is."""
        if self.pongs < 2 and self.ack >= written:
            return True
        return now_ms - self.ack_ms <= policy.join_fresh_ms

    def is_near(self, policy: SyncPolicy, written: int) -> bool:
        """Whether it will reach confirmOffset in the short time for which that stands still."""
        lag = written - self.ack
        within_reach = max(policy.join_near_bytes, self.rate * policy.join_ms / 1000)
        return lag <= min(within_reach, policy.join_lag_bytes_max)

    def is_calm(self, policy: SyncPolicy, unacked_ms: int | None, now_ms: int) -> bool:
        """Whether it follows, acked a moment ago, and leaves no byte unacked that is older:
        `unacked_ms` is when the oldest one was written. Then nothing is due before the next calm
        tick, and R8 loses nothing by it."""
        return (
            self.following
            and now_ms - self.ack_ms <= policy.calm_ack_ms
            and (unacked_ms is None or now_ms - unacked_ms <= policy.tick_ms)
        )

    def joined(self, now_ms: int) -> None:
        """This replica is a member from now on."""
        self.joined_ms = self.judged_from_ms = now_ms
        self.joins_in_vain = 0
        self.slow = False

    def joined_in_vain(self, policy: SyncPolicy, now_ms: int) -> None:
        """It delayed writes for nothing: its time was up, or it disconnected."""
        self.joins_in_vain += 1
        self.join_after_ms = now_ms + _pause_ms(policy, self.joins_in_vain)

    def left(self, policy: SyncPolicy, now_ms: int) -> None:
        """It is no member any more. A slave that is slow again and again delays every write for as
        long as R14 takes, so from the second time on it may join again later and later."""
        if not self.slow:
            return
        self.slow = False
        calm = now_ms - self.joined_ms >= policy.calm_ms
        self.times_slow = 1 if calm else self.times_slow + 1
        if self.times_slow > 1:
            self.barred_until_ms = now_ms + _pause_ms(policy, self.times_slow - 1)

    def postpone(self, stall_ms: int) -> None:
        """R8: for so long this process did not run."""
        self.absent_since_ms += stall_ms
        self.ack_ms += stall_ms
        self.judged_from_ms += stall_ms
        self.tables_since_ms += stall_ms


def _pause_ms(policy: SyncPolicy, times: int) -> int:
    return pause_ms(policy.join_pause_ms, policy.join_pause_ms_max, times)
