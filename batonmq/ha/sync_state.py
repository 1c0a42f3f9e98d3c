"""Decides whose acks a write waits for, how far the log is confirmed, and who should join or leave
the set. Pure.

The required set is the recorded SyncStateSet, the members of a proposal whose outcome is unknown,
and joining slaves. Invariants:
- R1: it contains the recorded set. It grows when an expand is proposed and shrinks only when a
  shrink is committed, so every replica that may be elected has been waited for.
- R15: confirmOffset never falls and ends a message; with SYNC_FLUSH it counts the flushed offset.
  It does not move while the set is below minInSyncReplicas or a required member is absent.
- R11: one proposal at a time. After an unknown outcome its members stay required until that request
  is answered or a newer set epoch arrives.
- R18: per broker id only acks of the newest connection count. Origin: Java AutoSwitchHAService
  (computeConfirmOffset, maybeExpand/ShrinkSyncStateSet), RIP-44.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from batonmq.ha.follower import RATE_WINDOW_MS, Follower, SyncPolicy
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.role_view import RoleView
from batonmq.runtime.backoff import Backoff

_ENDS_MAX = 1 << 16
_WRITES_MAX = 128


@dataclass(frozen=True, slots=True)
class SetProposal:
    """A request to the controllers to replace the set of (master_epoch, sync_state_set_epoch)."""

    new_set: frozenset[int]
    add: frozenset[int]
    remove: frozenset[int]
    reason: str
    confirm_offset: int
    master_epoch: int
    sync_state_set_epoch: int


class ConfirmAdvanced(NamedTuple):  # a NamedTuple, made once a turn: a third of the cost
    """All bytes below `offset` are on every required member."""

    offset: int


@dataclass(frozen=True, slots=True)
class ProposeSet:
    proposal: SetProposal


SyncEffect = ConfirmAdvanced | ProposeSet


@dataclass(frozen=True, slots=True)
class RecordedSet:
    """A recorded SyncStateSet; `epoch` is the syncStateSetEpoch. `candidates`: ids that may be
    members (registered, no learners, R12); None: any."""

    members: frozenset[int]
    epoch: int
    candidates: frozenset[int] | None = None

    @classmethod
    def of(cls, view: RoleView) -> RecordedSet:
        candidates = frozenset(r.broker_id for r in view.replicas if not r.learner)
        return cls(
            view.sync_state_set, view.sync_state_set_epoch, candidates if view.replicas else None
        )


class WrittenLog:
    """The end of a master's log. Offsets are exclusive; `written` and `confirm_offset` are ends of
    messages. All below `flushed` is on this broker's disk."""

    def __init__(
        self, *, written: int, flushed: int, confirm_offset: int, now_ms: int, policy: SyncPolicy
    ) -> None:
        self.written = written
        self.flushed = flushed
        self.confirm_offset = confirm_offset
        # Of the inherited bytes only the last is known to end a message, so all are confirmed
        # together.
        self._ends: deque[int] = deque([written] if written > confirm_offset else [])
        # [time of the first byte, end] per grain of time, oldest first.
        self._writes: deque[list[int]] = deque([[now_ms, written]], maxlen=_WRITES_MAX)
        # _WRITES_MAX grains must reach back further than slave_silent_ms.
        self._grain_ms = max(1, policy.slave_silent_ms * 4 // _WRITES_MAX)

    def append(self, written: int, now_ms: int) -> None:
        self.written = written
        self._ends.append(written)
        if len(self._ends) > _ENDS_MAX:
            # Drop every second end: the others still end messages, so confirmOffset only gets
            # coarser.
            self._ends = deque(e for n, e in enumerate(self._ends) if n % 2 or e == written)
        last = self._writes[-1]
        if now_ms - last[0] < self._grain_ms:  # one entry per grain, not per write
            last[1] = written
        else:
            self._writes.append([now_ms, written])

    def confirm(self, limit: int) -> bool:
        """Raises confirmOffset to the last message end up to `limit`; returns False if it stays."""
        ends = self._ends
        confirmed = self.confirm_offset
        while ends and ends[0] <= limit:
            confirmed = ends.popleft()
        if confirmed == self.confirm_offset:
            return False
        self.confirm_offset = confirmed
        return True

    def written_ms(self, offset: int) -> int | None:
        """Roughly when the byte at `offset` was written; None at the log's end."""
        found: int | None = None
        # From the newest: a follower in sync is a few of hundreds behind.
        for written_ms, end in reversed(self._writes):
            if end <= offset:
                break
            found = written_ms
        return found

    def postpone(self, stall_ms: int) -> None:
        """R8: makes all writes this much younger."""
        for written in self._writes:
            written[0] += stall_ms

    def check_invariants(self) -> None:
        assert self.confirm_offset <= self.written, "R15: confirmed what is not written"
        ends = list(self._ends)
        assert ends == sorted(set(ends)) and all(e > self.confirm_offset for e in ends)
        assert not ends or ends[-1] == self.written
        assert bool(ends) == (self.written > self.confirm_offset)


class SyncState:
    """One mastership's view of its replicas. MasterCore records its events."""

    def __init__(
        self,
        broker_id: int,
        master_epoch: int,
        epoch_start_offset: int,
        recorded: RecordedSet,
        log: WrittenLog,
        now_ms: int,
        policy: SyncPolicy,
    ) -> None:
        self.policy = policy
        self.broker_id = broker_id
        self.master_epoch = master_epoch
        self.epoch_start_offset = epoch_start_offset
        self.recorded = recorded.members
        self.sync_state_set_epoch = recorded.epoch
        self.log = log
        self.proposal: SetProposal | None = None
        self.joining: dict[int, int] = {}
        """Broker id -> until when it may hold confirmOffset back."""
        self.dead: frozenset[int] = frozenset()
        self._candidates = recorded.candidates
        self._followers = {
            i: Follower(i, now_ms, judged_from_ms=now_ms)
            for i in sorted(self.recorded)
            if i != self.broker_id
        }
        self._required_others: tuple[int, ...] = ()
        self._retry_at_ms = now_ms
        self._retry = Backoff(policy.retry_ms, policy.retry_ms_max)
        self._ticked_ms = now_ms
        self.tick_ms = policy.tick_ms  # the next tick is due so long after the last
        self._renew_required()

    # -- reading

    @property
    def required_set(self) -> frozenset[int]:
        """This broker, and all members whose acks confirmOffset waits for (R1)."""
        return frozenset(self._required_others) | {self.broker_id}

    @property
    def required_set_whole(self) -> bool:
        return all(self._followers[i].following for i in self._required_others)

    def follower(self, broker_id: int) -> Follower | None:
        return self._followers.get(broker_id)

    # -- the log

    def appended(self, written: int, now_ms: int) -> list[SyncEffect]:
        """The log now ends at `written`, the end of a message."""
        if written <= self.log.written:
            return []
        self.log.append(written, now_ms)
        return self._advance()

    def flushed_to(self, flushed: int, now_ms: int) -> list[SyncEffect]:
        """All below `flushed` is on this broker's disk."""
        if flushed <= self.log.flushed:
            return []
        self.log.flushed = flushed
        return self._settle(now_ms) if self.policy.sync_flush else []

    # -- slaves

    def connected(
        self,
        broker_id: int,
        connection_id: int,
        now_ms: int,
        *,
        learner: bool = False,
        tables_awaited: bool = False,
    ) -> None:
        """A new connection of that id: from now on only its acks count (R18). `tables_awaited`: it
        will report when it has the tables of this mastership (R42)."""
        if broker_id == self.broker_id:
            return
        follower = self._followers.setdefault(broker_id, Follower(broker_id, now_ms))
        if follower.following:
            follower.absent_since_ms = now_ms
        # A new connection must report its tables again: its deadline for them begins now.
        if follower.holds_tables(self.master_epoch):
            follower.tables_since_ms = now_ms
        follower.tables_epoch = -1 if tables_awaited else None
        follower.tables_stale = False
        follower.connection_id = connection_id
        follower.learner = learner
        follower.whole = True
        follower.ack = -1
        follower.pongs = 0
        follower.rate = 0.0

    def disconnected(self, broker_id: int, connection_id: int, now_ms: int) -> list[SyncEffect]:
        follower = self._followers.get(broker_id)
        if follower is None or follower.connection_id != connection_id:
            return []
        if follower.following:
            follower.absent_since_ms = now_ms
        follower.connection_id = None
        follower.ack = -1
        # It no longer holds writes back.
        if self.joining.pop(broker_id, None) is not None:
            follower.joined_in_vain(self.policy, now_ms)
            self._renew_required()
        return self._settle(now_ms)

    def acked(
        self, broker_id: int, connection_id: int, offset: int, now_ms: int
    ) -> list[SyncEffect]:
        """The slave has all bytes below `offset`; the caller checked that they were sent. Acks of
        an older connection, and below 0 (RocketMQ issue 6728), do not count."""
        follower = self._followers.get(broker_id)
        if follower is None or follower.connection_id != connection_id or offset < 0:
            return []
        # The same offset again, soon: this slave answers heartbeats, so its silence is meaningful.
        if offset == follower.ack and now_ms - follower.ack_ms <= 1_000:
            follower.pongs += 1
        follower.ack_ms = now_ms
        first = follower.ack < 0
        if offset > follower.ack:
            follower.ack = follower.held = offset
            if first or now_ms - follower.rate_ms >= RATE_WINDOW_MS:
                follower.measure_rate(first, now_ms)
        # Only these acks can change the set. All others only move confirmOffset (hot path).
        if first or broker_id not in self.recorded:
            return self._settle(now_ms)
        return self._advance()

    def lacks_beginning(self, broker_id: int) -> None:
        """The slave, which is connected, does not get our first bytes on this connection."""
        self._followers[broker_id].whole = False

    def tables_held(
        self, broker_id: int, connection_id: int, epoch: int, now_ms: int
    ) -> list[SyncEffect]:
        """The slave has the tables of the master of `epoch`; -1: none, or outdated ones."""
        follower = self._followers.get(broker_id)
        if follower is None or follower.connection_id != connection_id:
            return []
        follower.tables_stale = epoch < 0 and follower.holds_tables(self.master_epoch)
        if not follower.tables_stale:
            follower.tables_epoch = epoch
        return self._settle(now_ms)

    def set_dead(self, broker_ids: Iterable[int], now_ms: int) -> list[SyncEffect]:
        """The broker ids that the controllers report dead now (R14)."""
        self.dead = frozenset(broker_ids) - {self.broker_id}
        return self._settle(now_ms)

    # -- the recorded set

    def adopt(self, recorded: RecordedSet, now_ms: int) -> list[SyncEffect]:
        """Takes a committed set with a higher epoch (R20), which ends an open proposal (R11)."""
        if recorded.candidates is not None:
            self._candidates = recorded.candidates
        if recorded.epoch > self.sync_state_set_epoch:
            before, self.recorded = self.recorded, recorded.members
            self.sync_state_set_epoch = recorded.epoch
            for broker_id in self.recorded - {self.broker_id}:
                self._followers.setdefault(broker_id, Follower(broker_id, now_ms))
                self.joining.pop(broker_id, None)
            for broker_id in self.recorded - before - {self.broker_id}:
                self._followers[broker_id].joined(now_ms)  # R14 counts from now
            for broker_id in before - self.recorded - {self.broker_id}:
                self._followers[broker_id].left(self.policy, now_ms)
            if self.proposal is not None:
                self.proposal = None
                self._retry.reset()
            self._renew_required()
        return self._settle(now_ms)

    def begin_epoch(
        self, master_epoch: int, epoch_start_offset: int, recorded: RecordedSet, now_ms: int
    ) -> list[SyncEffect]:
        """The same master was elected again. Connections stay; acks and tables of the earlier epoch
        do not count. Controllers that lost their state begin set epochs again."""
        assert master_epoch > self.master_epoch
        for follower in self._followers.values():
            follower.epoch_begins(now_ms)
        # R9: a joining slave must not delay the new epoch's first ack
        self.joining.clear()
        self.master_epoch = master_epoch
        self.epoch_start_offset = epoch_start_offset
        self.sync_state_set_epoch = -1  # so that any set of the new epoch is newer
        return self.adopt(recorded, now_ms)

    def refused(self, code: int, now_ms: int) -> list[SyncEffect]:
        """The controllers refused the open proposal. CONTROLLER_ALTER_SYNC_STATE_SET_FAILED (2013:
        the same set) says nothing about an earlier copy of the request, nor whether our recorded
        set is current. So both sets stay required until a newer one arrives (R11)."""
        if self.proposal is None:
            return []
        if code == ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED:
            return []
        self.proposal = None
        self._retry_at_ms = now_ms + self._retry.next_ms()
        self._renew_required()
        return self._settle(now_ms)

    def tick(self, now_ms: int) -> list[SyncEffect]:
        """Call at least every `tick_ms`."""
        late_ms = now_ms - self._ticked_ms - self.tick_ms
        self._ticked_ms = now_ms
        if late_ms > self.policy.stall_ms:
            self._postpone(late_ms)
        expired = [i for i, deadline in self.joining.items() if deadline <= now_ms]
        for broker_id in expired:
            del self.joining[broker_id]
            self._followers[broker_id].joined_in_vain(self.policy, now_ms)
        if expired:
            self._renew_required()
        effects = self._settle(now_ms)
        is_calm = (
            self.proposal is None
            and self.dead.isdisjoint(self._followers)
            and self._followers.keys() == self.recorded - {self.broker_id}
            and all(
                each.is_calm(self.policy, self.log.written_ms(each.held), now_ms)
                and each.holds_tables(self.master_epoch)
                for each in self._followers.values()
            )
        )
        self.tick_ms = self.policy.calm_tick_ms if is_calm else self.policy.tick_ms
        return effects

    # -- decisions

    def _settle(self, now_ms: int) -> list[SyncEffect]:
        """Confirms what can be confirmed, then proposes a change of the set if one is due."""
        effects = self._advance()
        if self.proposal is None and now_ms >= self._retry_at_ms:
            effects += self._propose(now_ms)
        return effects

    def _advance(self) -> list[SyncEffect]:
        """R15: raises confirmOffset to the lowest of the log's end and the required acks, at a
        message end."""
        # too few copies: confirmOffset stays
        if len(self.recorded) < self.policy.min_in_sync_replicas:
            return []
        log = self.log
        limit = min(log.written, log.flushed) if self.policy.sync_flush else log.written
        followers = self._followers
        for broker_id in self._required_others:
            ack = followers[broker_id].ack
            if ack < 0:
                return []  # a required member does not follow (RocketMQ issue 6662)
            if ack < limit:
                limit = ack
        return [ConfirmAdvanced(log.confirm_offset)] if log.confirm(limit) else []

    def _propose(self, now_ms: int) -> list[SyncEffect]:
        remove: dict[int, str] = {}
        for broker_id in sorted(self.recorded - {self.broker_id}):
            reason, slow = self._reason_to_remove(broker_id, now_ms)
            if reason:
                remove[broker_id] = reason
                self._followers[broker_id].slow = slow
        if remove:
            # Remove all of them in one request: the controllers refuse a set with a dead member
            # (RocketMQ issue 9897).
            why = ", ".join(f"{i} {reason}" for i, reason in remove.items())
            return [self._open_proposal(self.recorded - remove.keys(), why)]
        near = [f for f in self._followers.values() if self._may_join(f, now_ms)]
        add = frozenset(f.broker_id for f in near if f.ack >= self.log.confirm_offset)
        if add:
            why = f"{', '.join(map(str, sorted(add)))} caught up"
            return [self._open_proposal(self.recorded | add, why)]
        self._start_joining(near, now_ms)
        return []

    def _reason_to_remove(self, broker_id: int, now_ms: int) -> tuple[str, bool]:
        """Why a member should leave (R14, R42, R50), "" to stay; and whether it is slow."""
        policy = self.policy
        follower = self._followers[broker_id]
        # Controllers may call it dead only because it is cut off from them: acks here prove that it
        # lives.
        acks = follower.following and now_ms - follower.ack_ms < policy.slave_silent_ms
        if broker_id in self.dead and not acks:
            return "is dead to the controllers", False
        if not follower.following and now_ms - follower.absent_since_ms >= policy.slave_silent_ms:
            return "is not connected", False
        written_ms = self.log.written_ms(follower.held)  # when its oldest unacked byte was written
        if written_ms is not None:
            # Bytes from before it joined count from the join.
            behind_ms = now_ms - max(written_ms, follower.judged_from_ms)
            if behind_ms >= policy.slave_silent_ms:
                return f"is behind for {behind_ms} ms", True
        # When idle, a slave that does not answer heartbeats acks only every few seconds.
        patience_ms = policy.slave_silent_ms if follower.pongs >= 2 else policy.quiet_slave_ms
        silent_ms = now_ms - follower.ack_ms
        if follower.following and silent_ms >= patience_ms:
            return f"is silent for {silent_ms} ms", True
        lacking_ms = now_ms - follower.tables_since_ms
        if not follower.holds_tables(self.master_epoch) and lacking_ms >= policy.tables_ms:
            return f"has no tables of this epoch for {lacking_ms} ms", False
        return "", False

    def _may_join(self, follower: Follower, now_ms: int) -> bool:
        """R13 and R42 without confirmOffset: near, alive, in this epoch, with its tables, no
        learner."""
        broker_id = follower.broker_id
        return (
            follower.following
            and broker_id not in self.recorded
            and broker_id not in self.dead
            and not follower.learner
            and follower.whole
            and follower.holds_tables(self.master_epoch)
            and (self._candidates is None or broker_id in self._candidates)
            and follower.ack >= self.epoch_start_offset  # below, its log may differ from ours
            and now_ms >= follower.barred_until_ms
            and follower.acks_flow(self.policy, self.log.written, now_ms)
            and (
                follower.ack >= self.log.confirm_offset
                or follower.is_near(self.policy, self.log.written)
            )
        )

    def _start_joining(self, near: list[Follower], now_ms: int) -> None:
        """R13: in the set {master} confirmOffset is the log's end, which no slave reaches under
        load. So a near slave may hold it back for a short time, and join."""
        for follower in near:
            if follower.broker_id not in self.joining and now_ms >= follower.join_after_ms:
                self.joining[follower.broker_id] = now_ms + self.policy.join_ms
                self._renew_required()

    def _open_proposal(self, new_set: frozenset[int], reason: str) -> ProposeSet:
        self.proposal = SetProposal(
            new_set=new_set,
            add=new_set - self.recorded,
            remove=self.recorded - new_set,
            reason=reason,
            confirm_offset=self.log.confirm_offset,
            master_epoch=self.master_epoch,
            sync_state_set_epoch=self.sync_state_set_epoch,
        )
        for broker_id in self.proposal.add:
            self.joining.pop(broker_id, None)
        self._renew_required()
        return ProposeSet(self.proposal)

    def _renew_required(self) -> None:
        required = self.recorded | self.joining.keys()
        if self.proposal is not None:
            required |= self.proposal.new_set
        self._required_others = tuple(sorted(required - {self.broker_id}))

    def _postpone(self, stall_ms: int) -> None:
        """R8: time in which this process did not run is not held against replicas."""
        for follower in self._followers.values():
            follower.postpone(stall_ms)
        self.joining = {i: deadline + stall_ms for i, deadline in self.joining.items()}
        self.log.postpone(stall_ms)

    def check_invariants(self) -> None:
        """Called after each step of tests and simulation."""
        required = self.required_set
        assert self.recorded <= required, "R1: a recorded member is not waited for"
        if self.proposal is not None:
            assert self.proposal.new_set <= required, "R11: the union lost a member"
            assert self.proposal.sync_state_set_epoch == self.sync_state_set_epoch
        assert self.joining.keys() <= required
        assert not self.joining.keys() & self.recorded
        self.log.check_invariants()
