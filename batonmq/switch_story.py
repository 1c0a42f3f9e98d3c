"""What the history tells of one planned switch: who, and how long sends waited. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from batonmq.admin_types import HistoryEvent
from batonmq.retry import LAST_PAUSE_MS


@dataclass(frozen=True, slots=True)
class SwitchStory:
    """One change of master. `held_ms`: how long the old master held its sends until the new one
    had its whole log; `gap_ms`: from the beginning of that to the first ack of the new master, on
    the clocks of the two brokers; where `idle`, nobody waited for it, to its opening instead. None
    where it is not (yet) told, or nothing was drained."""

    master_before: int
    master_broker_id: int
    master_epoch: int
    held_ms: int | None = None
    drained_offset: int | None = None
    gap_ms: int | None = None
    idle: bool = False


def switch_story(events: Sequence[HistoryEvent], master_epoch: int) -> SwitchStory | None:
    """The story of the election of `master_epoch`; None if `events` do not hold it."""
    elected = next(
        (e for e in events if e.kind == "elected" and e.master_epoch == master_epoch), None
    )
    if elected is None:
        return None
    before = int(str(elected.fields.get("master_before", 0)))
    held_ms = drained_offset = gap_ms = None
    idle = False
    drained = _drained(events, before, master_epoch)
    if drained is not None:
        told = json.loads(str(drained.fields.get("json") or "{}"))
        held_ms, drained_offset = int(told["heldMs"]), int(told["drainedOffset"])
        end_ms, idle = _end(events, master_epoch)
        if end_ms is not None:
            gap_ms = max(0, end_ms - (drained.time_ms - held_ms))
    return SwitchStory(
        before, elected.broker_id, master_epoch, held_ms, drained_offset, gap_ms, idle
    )


def _end(events: Sequence[HistoryEvent], master_epoch: int) -> tuple[int | None, bool]:
    """When the new master served, and whether nobody had waited for it; None while unknown."""
    told = {e.kind: e for e in events if e.master_epoch == master_epoch}
    first, opened = told.get("first_ack"), told.get("opened")
    if first is None:
        return None, False
    waited_ms = json.loads(str(first.fields.get("json") or "{}")).get("waitedMs")
    if opened is not None and isinstance(waited_ms, int):
        came_ms = first.time_ms - waited_ms
        if came_ms - opened.time_ms > LAST_PAUSE_MS:
            return opened.time_ms, True
    return first.time_ms, False


def _drained(
    events: Sequence[HistoryEvent], master_before: int, master_epoch: int
) -> HistoryEvent | None:
    """The draining that led to it: the old master's, in the epoch that was replaced."""
    replaced = max(
        (e.master_epoch for e in events if e.kind == "elected" and e.master_epoch < master_epoch),
        default=master_epoch - 1,
    )
    found = [
        e
        for e in events
        if e.kind == "drained" and e.broker_id == master_before and e.master_epoch == replaced
    ]
    return found[-1] if found else None
