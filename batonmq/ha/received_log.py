"""A slave's log: what happens to it before it follows a master (`judge_log`), and while it does
(`ReceivedLog`). Pure.

Before: keep, cut, begin again or refuse. A cut needs proof that the peer is the master that the
controllers named (R21), and epochs that cover the bytes; below confirmOffset also an unclean
election that dropped them (R23). Java's doTruncate checks none of these.

While: an ack never exceeds the log, nor, with haSyncFlush, what is flushed. An epoch is in the
epoch file before its first byte is in the log. Readers see only what is confirmed. Origin: Java
AutoSwitchHAClient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from batonmq.epoch.entry import NO_CONSISTENT_POINT, EpochEntry, consistent_point, within_log
from batonmq.ha import slave_effects as fx
from batonmq.ha.lineage import LogSamples, are_equal_at, common_point, first_difference, is_compared
from batonmq.ha.slave_policy import SlavePolicy
from batonmq.ha.wire import MasterHandshake, encode_ack, encode_epoch_mark


@dataclass(frozen=True, slots=True)
class LocalLog:
    """The state of this replica's log. Offsets are exclusive ends, except `min_offset`."""

    min_offset: int
    max_offset: int
    confirm_offset: int
    entries: tuple[EpochEntry, ...]
    samples: LogSamples | None = field(default=None, repr=False, compare=False)
    """Access to its bytes, if they can be compared."""

    @property
    def last_epoch(self) -> int:
        return self.entries[-1].epoch if self.entries else -1


@dataclass(frozen=True, slots=True)
class Keep:
    """The whole log is a prefix of the master's."""


@dataclass(frozen=True, slots=True)
class CutTo:
    """`unclean`: an unclean election dropped confirmed bytes, so they are cut, too (R23)."""

    offset: int
    unclean: bool = False


@dataclass(frozen=True, slots=True)
class BeginAgain:
    """The master no longer has the bytes after ours: begin an empty log (R27)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """This log cannot follow that master: an operator must act."""

    reason: str


MOVE_ASIDE: Final = (
    "stop this broker, move this store aside (all of storePathRootDir; keep it, it may hold "
    "acknowledged messages) and start it: it joins with an empty store, as a new replica; `mqctl "
    "cleanBrokerMetadata` removes the old one"
)
"""Advice for a log that no master of this group can continue (R47)."""

LogDecision = Keep | CutTo | BeginAgain | Refuse


def difference_of(own: LocalLog, master: MasterHandshake) -> int | None:
    """The lowest end at which the logs differ although their epochs are equal, or we have none
    (R47); None if no difference is known."""
    samples = master.identity.samples if master.identity is not None else ()
    if own.samples is None or not samples:
        return None
    return first_difference(own.samples, samples, _point_by_epochs(own, master))


def _point_by_epochs(own: LocalLog, master: MasterHandshake) -> int:
    if not own.entries:
        return min(own.max_offset, master.max_offset)
    return consistent_point(own.entries, own.max_offset, master.entries, master.max_offset)


def _is_known_prefix(own: LocalLog, master: MasterHandshake) -> bool:
    """Whether samples prove that our log, which has no epochs (R48), is a prefix of the
    master's."""
    if own.samples is None or not own.samples.lost_epochs or master.identity is None:
        return False
    return are_equal_at(own.samples, master.identity.samples, own.max_offset)


def judge_log(
    own: LocalLog, master: MasterHandshake, *, member: bool, unclean_epoch: int = 0
) -> LogDecision:
    """Decides how `own` becomes a prefix of the master's log. `member`: this replica is in the
    recorded SyncStateSet, so its bytes may be acknowledged. `unclean_epoch`: the last epoch won
    outside the set (R7), 0: none."""
    if own.max_offset == 0:
        return Keep()
    difference = difference_of(own, master)
    differs = (
        ""
        if difference is None
        else f" (the bytes before {difference} differ: another record, or no record ends there)"
    )
    if not own.entries:
        return _judge_without_epochs(own, master, differs)
    mine, theirs = _unproven_lineages(own, master, difference)
    if mine and mine != theirs:
        is_dropped = not member and _dropped_by(unclean_epoch, own, master)
        return _of_another_history(mine, theirs, unclean_epoch if is_dropped else 0)
    point = _common_end(own, master, difference)
    if point == NO_CONSISTENT_POINT:
        # A member may have acknowledged bytes: do not cut them; an operator must decide.
        may_go = difference is None and not member
        if may_go and (gone := _why_gone(own, master, unclean_epoch)):
            return BeginAgain(gone)
        return Refuse(
            f"our epochs {_brief(own.entries)} and the master's {_brief(master.entries)} have no "
            f"point in common{differs}; if the master is the right one, {MOVE_ASIDE}"
        )
    if point >= own.max_offset:  # the master has all of it
        return _keep_unnamed(own, member=member) if theirs and not mine else Keep()
    # R23: only an unclean election may take confirmed bytes away.
    unclean = point < own.confirm_offset
    if unclean and not _dropped_by(unclean_epoch, own, master):
        return Refuse(
            f"the master's log leaves ours at {point}{differs}, below our confirmOffset "
            f"{own.confirm_offset}, and no unclean election explains it (last one: epoch "
            f"{unclean_epoch}): acknowledged bytes would be cut; compare both logs, then elect the "
            "right one by hand or move this store aside"
        )
    # nothing of this log could be kept
    if point < own.min_offset:
        where = f"the master's log leaves ours at {point}, below our first byte {own.min_offset}"
        if unclean and not member:
            return BeginAgain(f"{where}: the unclean election of {unclean_epoch} dropped all of it")
        return Refuse(f"{where}; {MOVE_ASIDE}")
    return CutTo(point, unclean)


def _of_another_history(mine: str, theirs: str, dropped_by: int) -> LogDecision:
    """Decides for a log of another lineage that cannot be compared with the master's. `dropped_by`:
    the epoch of an unclean election that dropped all of it, or 0."""
    if dropped_by:
        return BeginAgain(_all_dropped(dropped_by))
    return Refuse(
        f"this log is of another history ({mine}, the master's is {theirs}), and the master has"
        f" no bytes to compare with; if the master is the right one, {MOVE_ASIDE}"
    )


def _common_end(own: LocalLog, master: MasterHandshake, difference: int | None) -> int:
    if difference is None:
        return _point_by_epochs(own, master)
    # R47: two histories share an epoch number, or this log is from another cluster.
    assert own.samples is not None and master.identity is not None
    return common_point(own.entries, own.samples, master.identity.samples, difference)


def _why_gone(own: LocalLog, master: MasterHandshake, unclean_epoch: int) -> str:
    """Why the master has nothing left of this log, though it is of the same history; "" if
    unknown."""
    if _is_before_history(own, master):
        return (
            f"our log ends at {own.max_offset}, confirmed up to {own.confirm_offset}, the "
            f"master's history begins at {master.entries[0].start_offset}"
        )
    if _dropped_by(unclean_epoch, own, master):
        return _all_dropped(unclean_epoch)
    return ""


def _all_dropped(unclean_epoch: int) -> str:
    return f"the unclean election of epoch {unclean_epoch} dropped all that we hold"


def _unproven_lineages(
    own: LocalLog, master: MasterHandshake, difference: int | None
) -> tuple[str, str]:
    """Both lineages if the logs cannot be compared (R47); ("", "") if they can, or the master does
    not name its own."""
    named = master.identity
    if difference is not None or own.samples is None or named is None or not named.lineage:
        return "", ""
    # equal bytes prove more than names
    if is_compared(own.samples, named.samples, _point_by_epochs(own, master)):
        return "", ""
    return own.samples.lineage, named.lineage


def _keep_unnamed(own: LocalLog, *, member: bool) -> LogDecision:
    """Decides for a log of an older version, of which the master has no byte left."""
    why = f"our log ends at {own.max_offset}, and the master has no byte before that to compare"
    if member:
        return Refuse(f"{why}, yet this replica is in the SyncStateSet; {MOVE_ASIDE}")
    return BeginAgain(why)


def _judge_without_epochs(own: LocalLog, master: MasterHandshake, differs: str) -> LogDecision:
    if not differs and _is_known_prefix(own, master):
        return Keep()
    return Refuse(
        f"the commit log holds {own.max_offset} bytes but no epoch file names their epochs; restore"
        " the epoch file, or (also after classic mode) move the store aside so that this replica"
        f" fetches everything again{differs}"
    )


def _is_before_history(own: LocalLog, master: MasterHandshake) -> bool:
    """Whether the confirmed part of our log has expired at the master, with its epochs. Later bytes
    of ours were never confirmed if their epoch is older than the master's first."""
    if not master.entries:
        return False
    first = master.entries[0]
    if first.start_offset >= own.max_offset:
        return True
    return own.last_epoch < first.epoch and own.confirm_offset <= first.start_offset > 0


def _dropped_by(unclean_epoch: int, own: LocalLog, master: MasterHandshake) -> bool:
    """Whether the unclean election may have dropped all our confirmed bytes beyond the common part:
    its epoch is above that of the last of them, and the master's epoch is not lower. So the
    master's log continues the one that was elected."""
    confirmed_in = [e.epoch for e in own.entries if e.start_offset < own.confirm_offset]
    # Any election may drop unconfirmed bytes; only confirmed ones need this reason.
    last_epoch = max(confirmed_in, default=own.last_epoch)
    return last_epoch < unclean_epoch <= master.last_epoch


def epochs_after(own: LocalLog, master: MasterHandshake) -> tuple[EpochEntry, ...]:
    """The epoch list of our log once it is a prefix of the master's: entries that the master
    dropped with expired segments, then the master's entries as far as our bytes reach. An empty
    epoch that only we have is removed (RocketMQ issue 9942); the master's empty ones are added
    (R25)."""
    theirs = within_log(master.entries, own.max_offset)
    if own.max_offset == 0:
        return theirs
    if not theirs:
        return own.entries
    return (*(e for e in own.entries if e.epoch < theirs[0].epoch), *theirs)


def _brief(entries: tuple[EpochEntry, ...]) -> str:
    shown = [f"{e.epoch}@{e.start_offset}" for e in entries[-4:]]
    return "[" + ("… " if len(entries) > 4 else "") + " ".join(shown) + "]"


class ReceivedLog:
    """Offsets are exclusive ends. `end_connection` resets the state of one connection."""

    def __init__(self, log: LocalLog, policy: SlavePolicy, now_ms: int) -> None:
        self.max_offset = log.max_offset
        self.last_epoch = log.last_epoch
        self.confirm_offset = log.confirm_offset
        """Readers may see everything below. The store may be behind it, never ahead."""
        self.bytes_received = 0
        self.sent_ms = now_ms  # when the handshake or the newest ack was sent
        self._first_ack_sent = False
        self.ack_due = False
        self._policy = policy
        self._flush_requested = 0
        self._master_confirm = -1  # confirmOffset of the newest frame; -1 before the first
        self._marks_epochs = False  # the master expects a mark of the epoch before acks
        self._pending_epoch: tuple[int, int] | None = None
        """(epoch, start) of a frame that begins before that start."""
        self._backlog_end = 0  # the end of the master's log when we connected
        self._filled_ms = -1 << 40

    @property
    def known_confirm(self) -> int:
        """The confirmed end by all frames, even if readers do not see it yet."""
        return max(self.confirm_offset, min(self._master_confirm, self.max_offset))

    def is_caught_up(self, master_epoch: int) -> bool:
        """Whether this log reaches the newest confirmOffset and the start of the master's epoch."""
        return (
            0 <= self._master_confirm <= self.max_offset
            and self.last_epoch == master_epoch
            and self._pending_epoch is None
        )

    def reload(self, log: LocalLog) -> None:
        """Takes the store's state after a connect or a cut."""
        self.max_offset = log.max_offset
        # The store may lag behind what this object knows to be confirmed.
        self.confirm_offset = max(self.confirm_offset, log.confirm_offset)

    def begin_transfer(
        self, last_epoch: int, backlog_end: int, *, marks_epochs: bool = False
    ) -> None:
        self.last_epoch = last_epoch
        self._marks_epochs = marks_epochs
        self._backlog_end = backlog_end
        self._first_ack_sent = False
        self.ack_due = True

    def end_connection(self) -> None:
        self.ack_due = False
        self._pending_epoch = None
        self._flush_requested = 0
        self._master_confirm = -1

    def begin_at(self, offset: int, peer: MasterHandshake) -> list[fx.SlaveEffect]:
        """An empty log begins where the master's begins, or at the master's last segment."""
        self.max_offset = offset
        self.confirm_offset = 0
        entries = within_log(peer.entries, offset)
        self.last_epoch = entries[-1].epoch if entries else -1
        return [fx.BeginAt(offset, "the master's log begins there"), fx.AdoptEpochs(entries)]

    def frame_begins(self, epoch: int, epoch_start: int, confirm: int) -> list[fx.SlaveEffect]:
        """A frame at `max_offset` begins. A new epoch must be durable before its first byte."""
        self.ack_due = True
        self._master_confirm = confirm
        if epoch == self.last_epoch:  # most frames
            return []
        if epoch_start > self.max_offset:
            # Java labels the last chunk of an epoch with the next one.
            self._pending_epoch = (epoch, epoch_start)
            return []
        self._pending_epoch = None
        return self._enter(epoch, epoch_start)

    def append(self, data: memoryview) -> list[fx.SlaveEffect]:
        """The next piece of the current frame's body."""
        offset = self.max_offset
        size = len(data)
        pending = self._pending_epoch
        self.ack_due = True
        self.bytes_received += size
        self.max_offset = offset + size
        if pending is None:
            return [fx.AppendLog(offset, data)]
        epoch, start = pending
        if self.max_offset < start:
            return [fx.AppendLog(offset, data)]
        self._pending_epoch = None
        # R25: the epoch must be durable before its first byte, so split the piece there.
        effects: list[fx.SlaveEffect] = [fx.AppendLog(offset, data[: start - offset])]
        effects += self._enter(epoch, start)
        if self.max_offset > start:
            effects.append(fx.AppendLog(start, data[start - offset :]))
        return effects

    def _enter(self, epoch: int, start: int) -> list[fx.SlaveEffect]:
        self.last_epoch = epoch
        effects: list[fx.SlaveEffect] = [fx.AppendEpoch(epoch, start)]
        if self._marks_epochs:
            effects.append(fx.SendToMaster(encode_epoch_mark(epoch)))
        return effects

    def acknowledge(self, flushed_offset: int, now_ms: int, effects: list[fx.SlaveEffect]) -> None:
        """Adds an ack of everything here or, with haSyncFlush, everything flushed."""
        ack = self.max_offset
        if self._policy.sync_flush and flushed_offset < ack:
            if self._flush_requested < ack:  # request each end once
                self._flush_requested = ack
                effects.append(fx.FlushTo(ack))
            if not self._first_ack_sent:
                return  # the first ack chooses where the master starts, so it must cover everything
            ack = flushed_offset
        else:
            self.ack_due = False
        self._first_ack_sent = True
        self.sent_ms = now_ms
        effects.append(fx.SendToMaster(encode_ack(ack)))

    def confirm(self, now_ms: int, effects: list[fx.SlaveEffect]) -> None:
        """Adds the new confirmed end, if readers may see more now."""
        visible = min(self._master_confirm, self.max_offset)
        if visible > self.confirm_offset and not self._drains_backlog(now_ms):
            self.confirm_offset = visible
            effects.append(fx.Confirm(visible))

    def read_filled(self, now_ms: int) -> None:
        """The read filled the whole buffer, so there is more to read."""
        self._filled_ms = now_ms

    def _drains_backlog(self, now_ms: int) -> bool:
        """Whether old bytes arrive faster than they are handled. Then copying comes first, and
        readers see messages a little later; not much, because an elected replica must show
        everything before it opens."""
        if self.max_offset - self.confirm_offset > self._policy.backlog_lag_bytes:
            return False
        filled = now_ms - self._filled_ms < self._policy.backlog_window_ms
        return filled and self.max_offset < self._backlog_end

    def check_invariants(self) -> None:
        assert self.confirm_offset <= self.max_offset or self.max_offset == 0
        assert self._pending_epoch is None or self._pending_epoch[1] > self.max_offset
