"""The master's side of a planned switch (R33): let the chosen replica catch up, hold the sends,
wait until it acked the last byte, request its election. Pure.

Invariants:
- Sends are held for at most `HOLD_MOST_MS`, whatever fails; then the old master continues in its
  epoch. This is safe although the election may still be committed: the chosen replica is in the
  set, so nothing is confirmed without its ack, and it ends its slave side before it becomes master
  (R1).
- Nothing is held before the chosen replica is near and has acked after the request, so a hung or
  lagging one delays no write.
- One switch at a time; each request ends once: by a role change, or by `SwitchFailed`.

`next_ms` says when to call `poll` at the latest. Times are ms of one clock, offsets exclusive ends.
"""

import enum
from dataclasses import dataclass

from batonmq.protocol.codes import ResponseCode
from batonmq.runtime.recent_events import RecentEvents, records_event

CATCH_UP_MOST_MS = 400
HOLD_MOST_MS = 500
NEAR_BYTES = 256 * 1024
OTHERS_MOST_MS = 60
"""Once the chosen replica has everything, how long the old master waits for acks of others: it
answers what they confirm; clients send the rest again."""
ACK_LOST_MOST_MS = 50
"""How long the chosen replica may be without a connection while sends are held."""
POLL_WHILE_CATCHING_UP_MS = 5
POLL_WHILE_HELD_MS = 2
REPEAT_MS = 40


@dataclass(frozen=True, slots=True)
class SwitchTask:
    """The request of the leading controller, and that controller's address."""

    controller: str
    switch_id: str
    broker_id: int
    master_epoch: int
    timeout_ms: int = HOLD_MOST_MS


@dataclass(frozen=True, slots=True)
class SwitchProgress:
    """The log of this master and the state of the chosen replica. `ack`: -1 if it does not follow;
    `ack_ms`: when its newest ack came; `member`: it is in the recorded SyncStateSet; `tables`: it
    has topics, groups and consumer offsets of this mastership, or is a Java broker (R42)."""

    log_end: int
    confirm_offset: int
    ack: int
    ack_ms: int
    member: bool
    tables: bool = True


@dataclass(frozen=True, slots=True)
class HoldSends:
    """Hold further sends; then call `held` with the end of the log."""


@dataclass(frozen=True, slots=True)
class ReleaseSends:
    """Stay master and handle the held sends."""


@dataclass(frozen=True, slots=True)
class ElectTarget:
    """Send ElectMaster(designate) to the leading controller. A repetition is the same request."""

    task: SwitchTask
    drained_offset: int


@dataclass(frozen=True, slots=True)
class Drained:
    """For the history: the chosen replica has all bytes below `drained_offset`."""

    task: SwitchTask
    drained_offset: int
    held_ms: int


@dataclass(frozen=True, slots=True)
class SwitchFailed:
    """Report to the controller why the switch failed."""

    task: SwitchTask
    reason: str


SwitchEffect = HoldSends | ReleaseSends | ElectTarget | Drained | SwitchFailed


class SwitchStage(enum.Enum):
    IDLE = "idle"
    CATCHING_UP = "catching up"
    DRAINING = "draining"
    ELECTING = "electing"


class PlannedSwitch:
    """At most one switch of one master."""

    def __init__(self) -> None:
        self.recent_events = RecentEvents()
        self.stage = SwitchStage.IDLE
        self.task: SwitchTask | None = None
        self.next_ms: int | None = None
        self._requested_ms = 0
        self._held_since_ms = 0
        self._drained_offset = -1
        self._target_done_ms: int | None = None
        self._ack_lost_ms: int | None = None
        self._repeat_ms = 0

    @property
    def holding(self) -> bool:
        return self.stage in (SwitchStage.DRAINING, SwitchStage.ELECTING)

    @records_event
    def requested(
        self, task: SwitchTask, *, master_epoch: int | None, lease: bool, now_ms: int
    ) -> list[SwitchEffect]:
        """The leading controller requests a switch. `master_epoch`: of this mastership; None if not
        master."""
        if self.task is not None:
            if self.task.switch_id == task.switch_id:
                return []
            return [SwitchFailed(task, f"a switch to broker {self.task.broker_id} is under way")]
        if master_epoch is None:
            return [SwitchFailed(task, "this broker is not master")]
        if master_epoch != task.master_epoch:
            return [
                SwitchFailed(task, f"masterEpoch is {master_epoch} here, not {task.master_epoch}")
            ]
        # Without a lease another replica may be master already.
        if not lease:
            return [SwitchFailed(task, "this master holds no lease")]
        self.task = task
        self.stage = SwitchStage.CATCHING_UP
        self._requested_ms = now_ms
        self.next_ms = now_ms
        return []

    @records_event
    def poll(self, progress: SwitchProgress, now_ms: int) -> list[SwitchEffect]:
        """Acks came, or time has passed."""
        task = self.task
        if task is None:
            return []
        match self.stage:
            case SwitchStage.CATCHING_UP:
                return self._catching_up(task, progress, now_ms)
            case SwitchStage.DRAINING:
                return self._draining(task, progress, now_ms)
            case SwitchStage.ELECTING:
                return self._electing(task, now_ms)
        raise AssertionError("a task without a stage")

    @records_event
    def held(self, log_end: int, now_ms: int) -> None:
        """Sends are held, and the log ends at `log_end`."""
        assert self.stage is SwitchStage.CATCHING_UP
        self.stage = SwitchStage.DRAINING
        self._held_since_ms = now_ms
        self._drained_offset = log_end
        self._target_done_ms = None
        self._ack_lost_ms = None
        self.next_ms = now_ms

    @records_event
    def elect_answered(
        self, switch_id: str, code: int, remark: str, now_ms: int
    ) -> list[SwitchEffect]:
        """The controller answered the election. After success the view that came with it ends the
        switch."""
        task = self.task
        if task is None or task.switch_id != switch_id or self.stage is not SwitchStage.ELECTING:
            return []
        if code == ResponseCode.SUCCESS:
            # No more repetitions. The hold still ends in time if that view does not come.
            self._repeat_ms = self._hold_ends_ms(task)
            return []
        # The election may have been proposed: wait for a view or the end of the hold.
        if code == ResponseCode.CONTROLLER_NOT_LEADER:
            self._repeat_ms = now_ms + REPEAT_MS
            self.next_ms = self._repeat_ms
            return []
        return self._fail(task, f"the controllers refuse: {remark}")

    @records_event
    def elect_unanswered(self, switch_id: str, now_ms: int) -> None:
        """The outcome of the election is unknown: the same request is repeated."""
        task = self.task
        if task is not None and task.switch_id == switch_id and self.holding:
            self._repeat_ms = now_ms + REPEAT_MS
            self.next_ms = self._repeat_ms

    @records_event
    def role_changes(self) -> None:
        """A newer masterEpoch was taken: the switch is over, whoever was elected."""
        self._end()

    # --- the stages ---

    def _catching_up(
        self, task: SwitchTask, progress: SwitchProgress, now_ms: int
    ) -> list[SwitchEffect]:
        if not progress.member:
            return self._fail(task, f"broker {task.broker_id} is not in the SyncStateSet")
        lag = progress.log_end - progress.ack
        # R42: without the tables the new master would bring old consumer offsets back. Only acks
        # after the request: earlier ones do not prove that the replica is not hung.
        awake = progress.ack >= 0 and progress.ack_ms > self._requested_ms
        if awake and lag <= NEAR_BYTES and progress.tables:
            return [HoldSends()]
        if now_ms - self._requested_ms >= CATCH_UP_MOST_MS:
            if progress.ack < 0:
                why = "does not follow this master"
            elif not awake:
                why = f"acked nothing for {now_ms - progress.ack_ms} ms"
            elif not progress.tables:
                why = "has not got the tables of this epoch, or does not follow them now"
            else:
                why = f"is {lag:,} bytes behind and did not come near in {CATCH_UP_MOST_MS} ms"
            return self._fail(task, f"broker {task.broker_id} {why}")
        self.next_ms = now_ms + POLL_WHILE_CATCHING_UP_MS
        return []

    def _draining(
        self, task: SwitchTask, progress: SwitchProgress, now_ms: int
    ) -> list[SwitchEffect]:
        if not progress.member:
            return self._fail(task, f"broker {task.broker_id} is not in the SyncStateSet any more")
        if progress.ack >= 0:
            self._ack_lost_ms = None
        elif self._ack_lost_ms is None:
            self._ack_lost_ms = now_ms
        elif now_ms - self._ack_lost_ms >= ACK_LOST_MOST_MS:
            return self._fail(task, f"broker {task.broker_id} does not follow any more")
        if progress.ack >= self._drained_offset:
            if self._target_done_ms is None:
                self._target_done_ms = now_ms
            # These slaves are not elected, but waiting a moment for them spares clients a second
            # send.
            others_had = now_ms - self._target_done_ms
            if progress.confirm_offset >= self._drained_offset or others_had >= OTHERS_MOST_MS:
                self.stage = SwitchStage.ELECTING
                self._repeat_ms = self._hold_ends_ms(task)
                self.next_ms = self._repeat_ms
                # The election first: the report for the history must not delay it.
                return [
                    ElectTarget(task, self._drained_offset),
                    Drained(task, self._drained_offset, now_ms - self._held_since_ms),
                ]
        if now_ms >= self._hold_ends_ms(task):
            lag = self._drained_offset - progress.ack
            return self._fail(
                task,
                f"broker {task.broker_id} is {lag:,} bytes behind and did not reach the end of the "
                f"log in {now_ms - self._held_since_ms} ms",
            )
        self.next_ms = min(now_ms + POLL_WHILE_HELD_MS, self._hold_ends_ms(task))
        return []

    def _electing(self, task: SwitchTask, now_ms: int) -> list[SwitchEffect]:
        ends_ms = self._hold_ends_ms(task)
        if now_ms >= ends_ms:
            held_ms = now_ms - self._held_since_ms
            return self._fail(task, f"no controller answered the election in {held_ms} ms")
        # The first request may have reached a controller that lost the lead. The same request id
        # makes a second one harmless (R11).
        if now_ms >= self._repeat_ms:
            self._repeat_ms = ends_ms
            self.next_ms = ends_ms
            return [ElectTarget(task, self._drained_offset)]
        self.next_ms = min(self._repeat_ms, ends_ms)
        return []

    def _hold_ends_ms(self, task: SwitchTask) -> int:
        return self._held_since_ms + min(task.timeout_ms, HOLD_MOST_MS)

    def _fail(self, task: SwitchTask, reason: str) -> list[SwitchEffect]:
        # Before the end, which forgets it.
        held = self.holding
        self._end()
        # Sends before the report: they have waited long enough.
        failed = SwitchFailed(task, f"{reason}; the old master stays")
        return [ReleaseSends(), failed] if held else [failed]

    def _end(self) -> None:
        self.stage = SwitchStage.IDLE
        self.task = None
        self.next_ms = None
        self._drained_offset = -1
