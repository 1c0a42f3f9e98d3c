"""One group: its sorted lines through `batonmq.history.fold`, into rows of all tables.

Lines of several controllers at the same place are one event: the first one counts. A story is
written when it ends. Memory of a group: its open stories, 24 bytes for each outage, and the masters
of the newest epochs. Free of Spark.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa

from batonmq.history.event import ON_BROKER_CLOCK, EventDetail, EventKey, HistoryEvent
from batonmq.history.fold import Fold
from batonmq.history.members import ELECTIONS_KEPT
from batonmq.history.story import CAUSAL, Story
from batonmq.spark.history import history_findings
from batonmq.spark.history.epoch_files import GroupFiles
from batonmq.spark.history.history_findings import CLOCK_MS, Election, HistoryFinding
from batonmq.spark.history.lines import event_of
from batonmq.spark.history.outages import days_without_writes
from batonmq.spark.history.output_tables import (
    Controller,
    Failover,
    FoldedRows,
    Mastership,
    SetChange,
    Truncation,
    sums_row,
)
from batonmq.spark.history.overview import Facts
from batonmq.spark.history.summary import GroupSums
from batonmq.spark.steps.parquet_tables import DAY_MS, Time

_CHANGES_SETS: Final = ("elected", "set_altered", "broker_cleaned")


@dataclass(frozen=True, slots=True)
class Known:
    """What every task knows: the names of the controllers, the overview, the epoch files."""

    controllers: tuple[str, ...]
    facts: Facts
    files: dict[str, GroupFiles] = field(default_factory=dict)


def fold_lines(
    lines: Iterable[tuple[str, int, bytes]], known: Known, tables: FoldedRows
) -> Iterator[pa.RecordBatch]:
    """The rows of all groups of `lines` (group in tables, controller, line), sorted by group and
    place, and a row of sums for each group."""
    group: GroupFold | None = None
    for name, rank, text in lines:
        if group is None or group.name != name:
            if group is not None:
                yield sums_row(group.finish())
            group = GroupFold(name, known, tables)
        group.line(rank, text)
        if tables.is_full:
            yield from tables.take()
    if group is not None:
        yield sums_row(group.finish())
    yield from tables.take()


class _Elected(NamedTuple):
    """What the event of an election has, and its story has not."""

    number: int
    told: int
    confirm_offset: int
    top: int | None
    before: Story | None


class GroupFold:
    """The lines of one group. The empty name: events of controllers alone, which make no story."""

    def __init__(self, name: str, known: Known, tables: FoldedRows) -> None:
        self.name = name
        self._names = known.controllers
        self._bounds = known.facts.bounds.get(name)
        self._tables = tables
        self._sums = GroupSums(name, self._bounds)
        self._told = history_findings.ControllerDifferences(name, known.controllers, known.facts)
        self._events = history_findings.Events(name, known.facts, self._found)
        self._files = known.files.get(name)
        self._fold = Fold(patience=ELECTIONS_KEPT)
        self._elected: dict[EventKey, _Elected] = {}
        self._elections = 0
        self._top: int | None = None
        self._latest: Story | None = None
        self._outages = array("q")
        self._text = b""
        self._event: HistoryEvent | None = None
        self._mask = self._rank = 0
        self._differs = False

    def line(self, rank: int, text: bytes) -> None:
        """The next line; those with one place follow one another, the one that counts first."""
        self._sums.lines += 1
        first = self._event
        if first is not None:
            if text == self._text:
                self._mask |= 1 << rank
                return
            event = event_of(text)
            if event.key == first.key:
                self._mask |= 1 << rank
                if not self._differs and _plain(event) != _plain(first):
                    self._differs = True
                    self._told.differs(first, self._rank, rank)
                return
            self._take(first)
            self._event = event
        else:
            self._event = event_of(text)
        self._text, self._rank, self._mask, self._differs = text, rank, 1 << rank, False

    def _take(self, event: HistoryEvent) -> None:
        """An event of which all lines are known."""
        self._sums.events += 1
        self._told.event(event, self._mask)
        kind, detail = event.kind, event.detail
        if kind == "controller_leader_changed":
            self._controller(event)
        if not self.name:
            return
        self._events.event(event, detail, on_broker_clock=kind in ON_BROKER_CLOCK)
        if kind in _CHANGES_SETS:
            self._set_change(event)
            if kind == "elected" and event.broker_id > 0:
                self._elected[event.key] = _Elected(
                    self._elections, self._mask, event.confirm_offset, self._top, self._latest
                )
                self._elections += 1
                self._top = max(self._top or event.master_epoch, event.master_epoch)
        elif kind == "truncated":
            self._truncation(event, detail)
        for story in self._fold.apply(event, detail):
            self._story(story)
        if kind == "elected":
            self._latest = self._fold.latest(event.broker_name)

    def finish(self) -> GroupSums:
        """What is left goes to the tables; the sums of the group."""
        if self._event is not None:
            self._take(self._event)
        for story in self._fold.finish():
            self._story(story)
        if self._files is not None:
            for each in self._files.findings():
                self._found(each)
        self._events.finish()
        for each in self._told.findings():
            self._found(each)
        if self._bounds is not None:
            for day, row in days_without_writes(self._outages, self._bounds):
                if self._tables.add_day(row, self.name, day):
                    self._sums.day(row)
        return self._sums

    # --- events ---

    def _controller(self, event: HistoryEvent) -> None:
        at_ms = Time(event.proposed_ms or event.time_ms)
        if at_ms:
            leaders = event.node or None, event.node_before or None
            row = Controller(at_ms, *leaders, event.controller_epoch)
            self._tables.add(row, "", at_ms, at_ms)

    def _set_change(self, event: HistoryEvent) -> None:
        before, after = (tuple(sorted(ids)) for ids in (event.set_before, event.sync_state_set))
        at_ms = event.time_ms
        if before == after or not at_ms:
            return
        row = SetChange(
            at=Time(at_ms),
            master_epoch=event.master_epoch,
            sync_state_set_epoch=event.sync_state_set_epoch,
            set_before=before,
            set_after=after,
            joined=tuple(each for each in after if each not in before),
            left=tuple(each for each in before if each not in after),
            size_after=len(after),
            reason=event.reason or None,
            kind=event.kind,
        )
        self._tables.add(row, self.name, at_ms, at_ms)

    def _truncation(self, event: HistoryEvent, detail: EventDetail) -> None:
        at_ms = event.time_ms
        if at_ms:
            begin, end = detail.from_offset, detail.to_offset
            which = event.broker_id, event.master_epoch
            row = Truncation(Time(at_ms), *which, begin, end, begin - end)
            self._tables.add(row, self.name, at_ms, at_ms)

    def _found(self, found: HistoryFinding) -> None:
        if self._tables.add(found.row, self.name, found.at_ms, found.at_ms):
            self._sums.finding(found._replace(group=self.name))

    # --- stories ---

    def _story(self, story: Story) -> None:
        elected = self._elected.pop(story.elected_by, None) if story.elected_by else None
        if elected is not None:
            self._election(story, elected)
        elif story.kind in ("master_lost", "election_blocked"):
            self._loss(story)

    def _loss(self, story: Story) -> None:
        """The newest loss of the group's master, not mended yet."""
        at_ms = story.lost_since_ms or story.detected_ms or _lost_ms(story)
        self._found(history_findings.open_outage(story, _cause(story.reason), at_ms, elected=False))
        if self._elections or story.master_before > 0 or story.set_before:
            self._open(at_ms)

    def _open(self, at_ms: int | None) -> None:
        bounds = self._bounds
        if bounds and at_ms is not None and bounds.first_ms - DAY_MS <= at_ms <= bounds.last_ms:
            self._outages.extend((at_ms, bounds.last_ms, 1))

    def _election(self, story: Story, elected: _Elected) -> None:
        then = story.next
        cause = _cause(story.reason)
        wrong = story.out_of_order()
        unavailable_ms = story.outage_ms(wrong)
        election = Election(
            story, cause, elected.number, elected.top, elected.before,
            _known(elected.confirm_offset), _proposer(then) if then else None, _proposer(story),
            _clock_problem(story, wrong), unavailable_ms, self._implausible(story, unavailable_ms),
        )  # fmt: skip
        self._failover(election)
        self._mastership(story, elected.told)
        if self._files is not None:
            self._files.told(story, election.confirm_offset)
        for each in history_findings.of_election(election, self._bounds):
            self._found(each)
        served = story.at_work or story.first_ack_ms or story.opened_ms
        if then is None and not story.overtaken and not served:
            # The newest master, which did not get to work.
            at_ms = story.lost_since_ms or story.detected_ms or story.elected_ms or None
            self._found(history_findings.open_outage(story, cause, at_ms, elected=True))
            if story.kind != "first_election":
                self._open(at_ms)
        # An older story that is still open must not keep all that came after it.
        story.next = None

    def _implausible(self, story: Story, unavailable_ms: int | None) -> str:
        """`outside`: it began or ended far from the time of its group. `after_next`: its master
        began to serve after the next one was elected, by their clocks, though before it in the log.
        """
        if unavailable_ms is None:
            return ""
        bounds, start_ms = self._bounds, story.start_ms
        end_ms = start_ms + unavailable_ms
        if bounds is not None and (
            start_ms < bounds.first_ms - DAY_MS or end_ms > bounds.last_ms + DAY_MS
        ):
            return "outside"
        then = story.next
        next_ms = then.elected_ms if then is not None and then.is_election else 0
        later = next_ms and story.elected_ms and next_ms >= story.elected_ms
        return "after_next" if later and end_ms > next_ms + CLOCK_MS else ""

    def _without_writes(self, election: Election, silent_ms: int | None) -> int | None:
        """The outage of a change of master with the silence of a master that hung before it; noted
        for the days. None if it cannot be right."""
        story, unavailable_ms = election.story, election.unavailable_ms
        if unavailable_ms is None or election.implausible:
            return None
        missed_ms = 0
        if election.cause.endswith("_silent") and silent_ms and not story.lost_since_ms:
            missed_ms = silent_ms
        if story.kind != "first_election":
            start_ms = story.start_ms
            self._outages.extend((start_ms - missed_ms, start_ms + unavailable_ms, 0))
        return unavailable_ms + missed_ms

    def _failover(self, election: Election) -> None:
        story, unavailable_ms = election.story, election.unavailable_ms
        detected, elected = _time(story.detected_ms), _time(story.elected_ms)
        role, opened = _time(story.time_of("role changed")), _time(story.opened_ms)
        acked = _time(story.first_ack_ms)
        silent_ms = _known(story.silent_ms)
        without_ms = self._without_writes(election, silent_ms)
        planned = story.kind == "planned_switch"
        row = Failover(
            master_epoch=story.master_epoch,
            kind=story.kind,
            cause=election.cause,
            how=story.how or story.reason or "an election was requested",
            detected_by=story.detected_by or None,
            master_before=story.master_before or None,
            master=story.winner,
            address=story.address or None,
            set_before=story.set_before,
            sync_state_set=story.sync_state_set,
            detected_at=detected,
            elected_at=elected,
            role_at=role,
            opened_at=opened,
            first_ack_at=acked,
            silent_ms=silent_ms,
            detect_ms=_after(detected, _time(story.start_ms)) if planned else silent_ms,
            elect_ms=_after(elected, detected),
            role_ms=_after(role, elected),
            open_ms=_after(opened, role),
            first_ack_ms=_after(acked, opened),
            unavailable_ms=unavailable_ms,
            without_writes_ms=without_ms,
            held_ms=_known(story.held_ms),
            idle=story.is_idle,
            unclean=story.unclean,
            overtaken=story.overtaken,
            complete=story.complete,
            truncated_bytes=story.truncated_bytes,
            clock_problem=election.clock_problem,
        )
        if self._tables.add(row, self.name, story.began_ms or elected, detected or elected):
            self._sums.failover(row)
        self._sums.elections += 1

    def _mastership(self, story: Story, told: int) -> None:
        """It ends when the next master is elected, or when it is lost."""
        elected, ended, ended_by = _time(story.elected_ms), None, None
        then = story.next
        if then is not None:
            failed, lost = then.time_of("failed") or None, None
            next_ms = (then.elected_ms or None) if then.is_election else None
            if not then.is_election:
                lost = _lost_ms(then)
            ended = failed or next_ms or lost
            ended_by = "master_lost" if failed or lost else then.kind
            if not then.is_election and not (failed or lost):
                ended_by = None
        seen = tuple(name for rank, name in enumerate(self._names) if told >> rank & 1)
        row = Mastership(
            master_epoch=story.master_epoch,
            broker_id=story.winner,
            address=story.address or None,
            began_at=elected,
            opened_at=_time(story.opened_ms),
            first_ack_at=_time(story.first_ack_ms),
            ended_at=_time(ended),
            ended_by=ended_by,
            duration_ms=_after(ended, elected),
            seen_by=seen,
        )
        self._tables.add(row, self.name, elected, elected)


def _time(ms: int | None) -> Time | None:
    """None where it is not known."""
    return Time(ms) if ms else None


def _plain(event: HistoryEvent) -> HistoryEvent:
    """`gap` is of one controller's file and not of the event."""
    return msgspec.structs.replace(event, gap=False) if event.gap else event


def _after(later: int | None, earlier: int | None) -> int | None:
    """ms between two steps; None where clocks contradict each other."""
    return later - earlier if later and earlier and later >= earlier else None


def _proposer(story: Story) -> str | None:
    """The controller that proposed the election."""
    clock = next((step.clock for step in story.steps if step.name == "proposed"), "")
    return clock.removeprefix("controller").strip() or None


def _lost_ms(story: Story) -> int | None:
    """When a loss became known by an event of its own."""
    return story.time_of("failed") or story.time_of("blocked") or None


def _cause(reason: str) -> str:
    if reason.startswith("named "):
        return "named"
    head = reason.partition(": ")[0].lower()
    return re.sub("[^a-z0-9]+", "_", head).strip("_")[:40] if reason else "unknown"


def _clock_problem(story: Story, wrong: Mapping[int, str]) -> str | None:
    """The first step whose clock cannot be right, as a sentence; None if there is none."""
    if not wrong:
        return None
    steps = [step for step in story.in_order() if id(step) in wrong]
    for step in steps:
        if step.name in CAUSAL:
            return wrong[id(step)]
    older_ms = story.began_ms - min(step.time_ms for step in steps)
    return f"a report beside the steps is {older_ms} ms older than the first of them"


def _known(value: int) -> int | None:
    return value if value >= 0 else None
