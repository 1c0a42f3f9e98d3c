"""One group: its sorted lines through `batonmq.history.fold`, into rows of all tables.

Lines of several controllers at the same place are one event: the first one counts. A story is
written when it ends. Memory of a group: its open stories, 24 bytes for each outage, and the masters
of the newest epochs. Free of Spark.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import numpy as np
import pyarrow as pa

from batonmq.history.event import ON_BROKER_CLOCK, EventDetail, EventKey, HistoryEvent
from batonmq.history.fold import Fold
from batonmq.history.members import ELECTIONS_KEPT
from batonmq.history.merge import without_gap
from batonmq.history.story import Story
from batonmq.spark.history import history_findings
from batonmq.spark.history.epoch_files import GroupFiles
from batonmq.spark.history.history_findings import Election, HistoryFinding, cause_of, known
from batonmq.spark.history.lines import event_of
from batonmq.spark.history.output_tables import ELECTIONS, EVENTS, FoldedRows, Row, folded_row
from batonmq.spark.history.overview import Bounds, Facts
from batonmq.spark.report.quantities import DAY_MS

_CHANGES_SETS: Final = ("elected", "set_altered", "broker_cleaned")
_AS_IN_THE_STORY: Final = (
    "master_epoch", "kind", "set_before", "sync_state_set", "unclean", "overtaken", "complete",
    "truncated_bytes",
)  # fmt: skip


Files = Mapping[str, GroupFiles]
"""The epoch files of each group that has some."""


def fold_lines(
    lines: Iterable[tuple[str, int, bytes]], facts: Facts, files: Files, tables: FoldedRows
) -> Iterator[pa.RecordBatch]:
    """The rows of all groups of `lines` (group in tables, controller, line), sorted by group and
    place, and for each group how many events and elections it has."""
    for name, its in groupby(lines, itemgetter(0)):
        group = GroupFold(name, facts, files, tables)
        for _, rank, text in its:
            group.line(rank, text)
            if tables.is_full:
                yield from tables.take()
        group.finish()
        yield folded_row(EVENTS, group.events, group=name)
        yield folded_row(ELECTIONS, group.elections, group=name)
    yield from tables.take()


class GroupFold:
    """The lines of one group. The empty name: events of controllers alone, which make no story."""

    def __init__(self, name: str, facts: Facts, files: Files, tables: FoldedRows) -> None:
        self.name = name
        self._names = facts.controllers
        self._bounds = facts.bounds.get(name)
        self._tables = tables
        self.events = self.elections = 0
        self._differences = history_findings.ControllerDifferences(name, facts)
        self._events = history_findings.Events(name, facts, self._found)
        self._files = files.get(name)
        self._fold = Fold(patience=ELECTIONS_KEPT)
        self._elected: dict[EventKey, Election] = {}
        self._top: int | None = None
        self._latest: Story | None = None
        self._outages = array("q")
        self._text = b""
        self._event: HistoryEvent | None = None
        self._mask = self._rank = 0
        self._differs = False

    def line(self, rank: int, text: bytes) -> None:
        """The next line; those with one place follow one another, the one that counts first."""
        first = self._event
        if first is not None:
            # Mostly: controllers write the same bytes. Only other ones are decoded and compared.
            if text == self._text:
                self._mask |= 1 << rank
                return
            event = event_of(text)
            if event.key == first.key:
                self._mask |= 1 << rank
                if not self._differs and without_gap(event) != without_gap(first):
                    self._differs = True
                    self._differences.differs(first, self._rank, rank)
                return
            self._take(first)
            self._event = event
        else:
            self._event = event_of(text)
        self._text, self._rank, self._mask, self._differs = text, rank, 1 << rank, False

    def _take(self, event: HistoryEvent) -> None:
        """An event of which all lines are known."""
        self.events += 1
        self._differences.event(event, self._mask)
        kind, detail = event.kind, event.detail
        if kind == "controller_leader_changed":
            self._controller(event)
        if not self.name:
            return  # it has only what controllers tell differently, which is noted above
        self._events.event(event, detail, on_broker_clock=kind in ON_BROKER_CLOCK)
        if kind in _CHANGES_SETS:
            self._set_change(event)
            if kind == "elected" and event.broker_id > 0:
                confirmed = known(event.confirm_offset)
                self._elected[event.key] = Election(
                    self.elections, self._mask, confirmed, self._top, self._latest
                )
                self.elections += 1
                self._top = max(self._top or event.master_epoch, event.master_epoch)
        elif kind == "truncated":
            self._truncation(event, detail)
        for story in self._fold.apply(event, detail):
            self._story(story)
        if kind == "elected":
            self._latest = self._fold.latest(event.broker_name)

    def finish(self) -> None:
        """What is left goes to the tables."""
        if self._event is not None:
            self._take(self._event)
        for story in self._fold.finish():
            self._story(story)
        if self._files is not None:
            for each in self._files.findings():
                self._found(each)
        self._events.finish()
        for each in self._differences.findings():
            self._found(each)
        if self._bounds is not None:
            for day, row in days_without_writes(self._outages, self._bounds):
                self._tables.add_day(row, self.name, day)

    # --- events ---

    def _controller(self, event: HistoryEvent) -> None:
        if at_ms := event.proposed_ms or event.time_ms:
            row = {
                "at": at_ms, "leader": event.node or None,
                "leader_before": event.node_before or None,
                "controller_epoch": event.controller_epoch,
            }  # fmt: skip
            self._tables.add("controllers", row, "", at_ms, at_ms)

    def _set_change(self, event: HistoryEvent) -> None:
        before, after = sorted(event.set_before), sorted(event.sync_state_set)
        at_ms = event.time_ms
        if before == after or not at_ms:
            return
        row = {
            "at": at_ms, "master_epoch": event.master_epoch, "kind": event.kind,
            "sync_state_set_epoch": event.sync_state_set_epoch, "reason": event.reason or None,
            "set_before": before, "set_after": after, "size_after": len(after),
            "joined": [each for each in after if each not in before],
            "left": [each for each in before if each not in after],
        }  # fmt: skip
        self._tables.add("set_changes", row, self.name, at_ms, at_ms)

    def _truncation(self, event: HistoryEvent, detail: EventDetail) -> None:
        if at_ms := event.time_ms:
            begin, end = detail.from_offset, detail.to_offset
            row = {
                "at": at_ms, "broker_id": event.broker_id, "master_epoch": event.master_epoch,
                "from_offset": begin, "to_offset": end, "bytes": begin - end,
            }  # fmt: skip
            self._tables.add("truncations", row, self.name, at_ms, at_ms)

    def _found(self, found: HistoryFinding) -> None:
        self._tables.add("findings", found.row, self.name, found.at_ms, found.at_ms)

    # --- stories ---

    def _story(self, story: Story) -> None:
        elected = self._elected.pop(story.elected_by, None) if story.elected_by else None
        if elected is not None:
            self._election(story, elected)
        elif story.kind in ("master_lost", "election_blocked"):
            # The newest loss of the group's master, not mended yet.
            at_ms = story.lost_since_ms or story.detected_ms or _lost_ms(story)
            self._found(history_findings.open_outage(story, at_ms, elected=False))
            if self.elections or story.master_before > 0 or story.set_before:
                self._open(at_ms)

    def _open(self, at_ms: int | None) -> None:
        bounds = self._bounds
        if bounds and at_ms is not None and bounds.first_ms - DAY_MS <= at_ms <= bounds.last_ms:
            self._outages.extend((at_ms, bounds.last_ms, 1))

    def _election(self, story: Story, elected: Election) -> None:
        then = story.next
        elected.clocks(story, self._bounds)
        self._failover(story, elected)
        self._mastership(story, elected.seen_by)
        if self._files is not None:
            self._files.changed_master(story, elected.confirmed)
        for each in history_findings.of_election(story, elected):
            self._found(each)
        served = story.at_work or story.first_ack_ms or story.opened_ms
        if then is None and not story.overtaken and not served:
            # The newest master, which did not get to work.
            at_ms = story.lost_since_ms or story.detected_ms or story.elected_ms or None
            self._found(history_findings.open_outage(story, at_ms, elected=True))
            if story.kind != "first_election":
                self._open(at_ms)
        # An older story that is still open must not keep all that came after it.
        story.next = None

    def _without_writes(self, story: Story, elected: Election) -> int | None:
        """The outage of a change of master with the silence of a master that hung before it; noted
        for the days. None if it cannot be right."""
        unavailable_ms = elected.unavailable_ms
        if unavailable_ms is None or elected.implausible:
            return None
        hung = cause_of(story).endswith("_silent") and not story.lost_since_ms
        missed_ms = max(0, story.silent_ms) if hung else 0
        if story.kind != "first_election":
            start_ms = story.start_ms
            self._outages.extend((start_ms - missed_ms, start_ms + unavailable_ms, 0))
        return unavailable_ms + missed_ms

    def _failover(self, story: Story, election: Election) -> None:
        detected, elected = story.detected_ms or None, story.elected_ms or None
        role, opened = story.time_of("role changed") or None, story.opened_ms or None
        acked, silent_ms = story.first_ack_ms or None, known(story.silent_ms)
        planned = story.kind == "planned_switch"
        row: dict[str, Any] = {
            "cause": cause_of(story), "idle": story.is_idle,
            "how": story.how or story.reason or "an election was requested",
            "detected_by": story.detected_by or None, "address": story.address or None,
            "master_before": story.master_before or None, "master": story.winner,
            "detected_at": detected, "elected_at": elected, "role_at": role, "opened_at": opened,
            "first_ack_at": acked, "silent_ms": silent_ms, "held_ms": known(story.held_ms),
            "detect_ms": _after(detected, story.start_ms) if planned else silent_ms,
            "elect_ms": _after(elected, detected), "role_ms": _after(role, elected),
            "open_ms": _after(opened, role), "first_ack_ms": _after(acked, opened),
            "unavailable_ms": election.unavailable_ms, "clock_problem": election.clock_problem,
            "without_writes_ms": self._without_writes(story, election),
            **{name: getattr(story, name) for name in _AS_IN_THE_STORY},
        }  # fmt: skip
        began = story.began_ms or elected
        self._tables.add("failovers", row, self.name, began, detected or elected)

    def _mastership(self, story: Story, seen_by: int) -> None:
        """It ends when the next master is elected, or when it is lost."""
        elected, ended, ended_by = story.elected_ms or None, None, None
        if (then := story.next) is not None:
            lost = then.time_of("failed") or (not then.is_election and _lost_ms(then))
            ended = lost or (then.is_election and then.elected_ms) or None
            ended_by = "master_lost" if lost else then.kind if then.is_election else None
        row = {
            "master_epoch": story.master_epoch, "broker_id": story.winner,
            "address": story.address or None, "began_at": elected,
            "opened_at": story.opened_ms or None, "first_ack_at": story.first_ack_ms or None,
            "ended_at": ended, "ended_by": ended_by, "duration_ms": _after(ended, elected),
            "seen_by": [name for rank, name in enumerate(self._names) if seen_by >> rank & 1],
        }  # fmt: skip
        self._tables.add("masterships", row, self.name, elected, elected)


def _after(later: int | None, earlier: int | None) -> int | None:
    """ms between two steps; None where clocks contradict each other."""
    return later - earlier if later and earlier and later >= earlier else None


def _lost_ms(story: Story) -> int | None:
    """When a loss became known by an event of its own."""
    return story.time_of("failed") or story.time_of("blocked") or None


def days_without_writes(outages: array[int], bounds: Bounds) -> Iterator[tuple[int, Row]]:
    """(day since 1970, its row) of all days of a group, and of those that an outage touches.

    `outages`: start, end, and 1 if it is open, one after the other. They may overlap: one that
    begins within another continues where that ends, and counts as an outage of its own. An outage
    over midnight is split, and counts where it begins.
    """
    days: dict[int, list[Any]] = {
        day: [0, 0, 0, False]
        for day in range(bounds.first_ms // DAY_MS, bounds.last_ms // DAY_MS + 1)
    }
    rows = np.frombuffer(outages, np.int64).reshape(-1, 3) if outages else np.empty((0, 3), int)
    until_ms: int | None = None
    for at in np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0])).tolist():
        start_ms, end_ms, is_open = rows[at].tolist()
        from_ms = start_ms if until_ms is None else max(start_ms, until_ms)
        until_ms = end_ms if until_ms is None else max(until_ms, end_ms)
        end_ms = max(from_ms, end_ms)
        first, last = from_ms // DAY_MS, end_ms // DAY_MS
        for day in range(first, last + 1):
            part_ms = min(end_ms, (day + 1) * DAY_MS) - max(from_ms, day * DAY_MS)
            open_here = bool(is_open) and day == last
            if part_ms > 0 or day == first or open_here:
                sums = days.setdefault(day, [0, 0, 0, False])
                sums[0] += day == first
                sums[1] += part_ms
                sums[2] = max(sums[2], end_ms - from_ms)
                sums[3] = sums[3] or open_here
    names = ("outages", "unavailable_ms", "longest_ms", "open")
    for day, sums in sorted(days.items()):
        yield day, dict(zip(names, sums, strict=True))
