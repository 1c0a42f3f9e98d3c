"""What a slave does with its log before it follows a master: keep, cut, begin anew, refuse. Pure.

Nothing is cut without proof that the peer is the master that the controllers named (R21), never
where no epoch vouches for the bytes, and below the own confirmOffset only where an unclean election
took the confirmed bytes out of the group's history (R23).
Origin: Java AutoSwitchHAClient.doTruncate, which checks none of the three.
"""

from __future__ import annotations

from dataclasses import dataclass

from batonmq.epoch.entry import NO_CONSISTENT_POINT, EpochEntry, consistent_point, within_log
from batonmq.ha.wire import MasterHandshake


@dataclass(frozen=True, slots=True)
class LocalLog:
    """This replica's log as it stands. Offsets are exclusive ends but for `min_offset`."""

    min_offset: int
    max_offset: int
    confirm_offset: int
    entries: tuple[EpochEntry, ...]

    @property
    def last_epoch(self) -> int:
        return self.entries[-1].epoch if self.entries else -1


@dataclass(frozen=True, slots=True)
class Keep:
    """The whole log is a prefix of the master's."""


@dataclass(frozen=True, slots=True)
class CutTo:
    """`unclean`: confirmed bytes go too, because an unclean election dropped them (R23)."""

    offset: int
    unclean: bool = False


@dataclass(frozen=True, slots=True)
class BeginAnew:
    """The master no longer has the bytes that follow ours (R27)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """This log cannot follow that master; an operator must act."""

    reason: str


LogDecision = Keep | CutTo | BeginAnew | Refuse


def judge_log(
    own: LocalLog, master: MasterHandshake, *, member: bool, unclean_epoch: int = 0
) -> LogDecision:
    """How `own` can become a prefix of the master's log.

    `member`: this replica is in the recorded SyncStateSet, so its bytes may be acknowledged ones.
    `unclean_epoch`: the last epoch that was won outside the set, 0 if none was (R7).
    """
    if own.max_offset == 0:
        return Keep()
    if not own.entries:
        return Refuse(
            f"the commit log holds {own.max_offset} bytes but no epoch file names their "
            "epochs; restore the epoch file, or (also after classic mode) move the store aside so "
            "that this replica fetches everything anew"
        )
    point = consistent_point(own.entries, own.max_offset, master.entries, master.max_offset)
    if point == NO_CONSISTENT_POINT:
        if not member and _is_before_history(own, master):
            return BeginAnew(
                f"our log ends at {own.max_offset}, confirmed up to {own.confirm_offset}, the "
                f"master's history begins at {master.entries[0].start_offset}"
            )
        if not member and _dropped_by(unclean_epoch, own, master):
            return BeginAnew(
                f"the unclean election of epoch {unclean_epoch} dropped all that we hold"
            )
        return Refuse(
            f"our epochs {_brief(own.entries)} and the master's {_brief(master.entries)} have no "
            "point in common; if the master is the right one, move this store aside and restart"
        )
    if point >= own.max_offset:
        return Keep()
    unclean = point < own.confirm_offset
    if unclean and not _dropped_by(unclean_epoch, own, master):
        return Refuse(
            f"the master's log leaves ours at {point}, below our confirmOffset "
            f"{own.confirm_offset}, and no unclean election explains it (last one: epoch "
            f"{unclean_epoch}): acknowledged bytes would be cut; compare both logs, then elect the "
            "right one by hand or move this store aside"
        )
    if point < own.min_offset:
        where = f"the master's log leaves ours at {point}, below our first byte {own.min_offset}"
        if unclean and not member:
            return BeginAnew(f"{where}: the unclean election of {unclean_epoch} dropped all of it")
        return Refuse(f"{where}; move this store aside and restart")
    return CutTo(point, unclean)


def shared_with_java(own: LocalLog, master: MasterHandshake) -> int:
    """How far equal epochs prove equal bytes, if the list of a Java master lacks the epoch in which
    it acts: exclusive end.

    That list refused its own epoch, which began where the one before began. So the bytes of its
    master are filed under that one, and there an epoch has two masters. It had none of that epoch's
    own bytes, else its list had taken the next one: ours behind the start of it are foreign.
    """
    start = master.entries[-1].start_offset if master.entries else 0
    return min(own.max_offset, max(start, own.confirm_offset))


def _is_before_history(own: LocalLog, master: MasterHandshake) -> bool:
    """Whether what the group confirmed of our log is expired at the master, with its epochs. Bytes
    behind that, of an older epoch than any that it has, were never confirmed."""
    if not master.entries:
        return False
    first = master.entries[0]
    if first.start_offset >= own.max_offset:
        return True
    return own.last_epoch < first.epoch and own.confirm_offset <= first.start_offset > 0


def _dropped_by(unclean_epoch: int, own: LocalLog, master: MasterHandshake) -> bool:
    """Whether that election may have dropped all of our confirmed bytes beyond the common part.

    It is in the master's history, or expired there, and came after the epoch in which the last of
    them was written.
    """
    confirmed_in = [e.epoch for e in own.entries if e.start_offset < own.confirm_offset]
    last_epoch = max(confirmed_in, default=own.last_epoch)
    return unclean_epoch > last_epoch and _has_had(unclean_epoch, master)


def _has_had(epoch: int, master: MasterHandshake) -> bool:
    """Whether it is in the master's history, or its segments are expired there."""
    first = master.entries[0] if master.entries else None
    is_expired = first is not None and first.start_offset > 0 and epoch < first.epoch
    return is_expired or any(entry.epoch == epoch for entry in master.entries)


def epochs_after(own: LocalLog, master: MasterHandshake) -> tuple[EpochEntry, ...]:
    """The epoch list of our log once it is a prefix of the master's: the master's own, as far as
    our bytes go, behind what it may have dropped with expired segments.

    So an empty epoch of ours that nobody else knows goes (issue 9942), and one of its that carries
    no bytes comes (R25).
    """
    theirs = within_log(master.entries, own.max_offset)
    if own.max_offset == 0:
        return theirs
    if not theirs:
        return own.entries
    return (*(e for e in own.entries if e.epoch < theirs[0].epoch), *theirs)


def _brief(entries: tuple[EpochEntry, ...]) -> str:
    shown = [f"{e.epoch}@{e.start_offset}" for e in entries[-4:]]
    return "[" + ("… " if len(entries) > 4 else "") + " ".join(shown) + "]"
