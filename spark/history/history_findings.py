"""What is wrong, or limits what can be said: one row each, for an operator. Free of Spark.

`docs/spark-jobs.md` explains each kind. Where many events show the same thing, one row counts them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from batonmq.history.event import EventDetail, HistoryEvent
from batonmq.history.story import CAUSAL, Story
from batonmq.spark.history.overview import GAP_DAYS, Bounds, Facts, Place
from batonmq.spark.report.quantities import DAY_MS
from batonmq.spark.severity import CRITICAL, INFO, WARNING

CLOCK_MS: Final = 1_000
"""Clocks of hosts that keep time differ by less."""
ALONE_MS: Final = 60_000
"""A set of one for so long is worth a look."""
EPOCHS_KEPT: Final = 10_000
"""Newest epochs of a group of which it is known who claimed to be master."""


class HistoryFinding(NamedTuple):
    """`evidence`: a JSON object; `at_ms` None: it has no time."""

    severity: str
    kind: str
    group: str
    at_ms: int | None
    text: str
    subject: str
    evidence: str

    @property
    def row(self) -> dict[str, Any]:
        return self._asdict() | {"at": self.at_ms}


def finding(
    severity: str,
    kind: str,
    group: str,
    at_ms: int | None,
    text: str,
    subject: str,
    **evidence: Any,
) -> HistoryFinding:
    """One whose evidence leaves out what is None."""
    known = {name: value for name, value in evidence.items() if value is not None}
    packed = json.dumps(known, ensure_ascii=False, separators=(",", ":"))
    return HistoryFinding(severity, kind, group, at_ms, text, subject, packed)


def moment(ms: int) -> str:
    """A time in UTC, as SQL prints it; one that no calendar has as a number."""
    try:
        text = f"{datetime.fromtimestamp(ms // 1000, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"
    return f"{text}.{ms % 1000:03}".rstrip("0") if ms % 1000 else text


# --- of the histories as they are --------------------------------------------------------------


class ControllerDifferences:
    """What controllers tell of one group differently, or not at all."""

    def __init__(self, group: str, facts: Facts) -> None:
        self._group = group
        self._names = facts.controllers
        self._facts = facts
        self._masks: dict[str, int] = {}
        self._differ: dict[tuple[str, str], list[Any]] = {}
        self._lacks: dict[tuple[str, int], list[Any]] = {}

    def event(self, event: HistoryEvent, seen_by: int) -> None:
        """An event; the bits of `seen_by` are the controllers that have it."""
        mask = self._masks.get(event.log)
        if mask is None:
            ranks = [rank for log, rank in self._facts.lows if log == event.log]
            mask = self._masks[event.log] = sum(1 << rank for rank in ranks)
        if seen_by == mask:
            return
        place = (event.raft_index, event.part)
        for rank in range(len(self._names)):
            who = (event.log, rank)
            if not (mask & ~seen_by) >> rank & 1:
                continue
            if self._facts.lows[who] < place < self._facts.highs[who]:
                lacks = self._lacks.setdefault(who, [0, event, place])
                lacks[0] += 1
                lacks[2] = place

    def differs(self, event: HistoryEvent, one: int, other: int) -> None:
        """Two lines, by those controllers, are not the same event."""
        names = sorted((self._names[one], self._names[other]))
        seen = self._differ.setdefault((names[0], names[1]), [0, event])
        seen[0] += 1

    def findings(self) -> Iterator[HistoryFinding]:
        for (one, other), (many, first) in self._differ.items():
            who = [one] if one == other else [one, other]
            text = (
                f"Controller {one} has {many} events more than once, each time different"
                if one == other
                else f"Controllers {one} and {other} have {many} events with different contents"
            )
            yield finding(
                CRITICAL, "events_disagree", self._group, first.time_ms or None,
                f"{text}, the first at index {first.raft_index} part {first.part} of log "
                f"{first.log}.", ", ".join(who), controllers=who, events=many, log=first.log,
                raftIndex=first.raft_index, part=first.part, eventKind=first.kind,
            )  # fmt: skip
        for (log, rank), (many, first, last) in self._lacks.items():
            name = self._names[rank]
            yield finding(
                WARNING, "missing_events", self._group, first.time_ms or None,
                f"The history of controller {name} lacks {many} events that others have, from "
                f"index {first.raft_index} on, though it begins before and ends after them.", name,
                controller=name, log=log, events=many, firstRaftIndex=first.raft_index,
                lastRaftIndex=last[0],
            )  # fmt: skip


def of_all(facts: Facts, damaged: Mapping[str, tuple[int, int, str]]) -> Iterator[HistoryFinding]:
    """What is of no group alone: where controllers' histories begin and end, damaged files."""
    least, most = dict[str, Place](), dict[str, Place]()
    for (log, rank), low in facts.lows.items():
        least[log] = min(low, least.get(log, low))
        most[log] = max(facts.highs[log, rank], most.get(log, low))
    for (log, rank), low in facts.lows.items():
        name = facts.controllers[rank]
        for kind, word, its, theirs in (
            ("history_begins_late", "begins", low, least[log]),
            ("history_ends_early", "ends", facts.highs[log, rank], most[log]),
        ):
            if its != theirs:
                yield finding(
                    INFO, kind, "", None, f"The history of controller {name} {word} at index "
                    f"{its[0]} of log {log}, that of others at {theirs[0]}.", name,
                    controller=name, log=log, raftIndex=its[0], others=theirs[0],
                )  # fmt: skip
    for group, logs in facts.shared.items():
        older = ", ".join(facts.group_in(group, log) for log in logs[:-1])
        yield finding(
            WARNING, "group_in_several_logs", group, None,
            f"Group {group} is in {len(logs)} logs: histories of several clusters, or of "
            f"controllers that were set up again. Each is listed by itself, the older ones as "
            f"{older}; epoch files are compared with none.", group, logs=logs,
        )  # fmt: skip
    for file, (lines, _, reason) in damaged.items():
        yield finding(
            WARNING, "damaged_lines", "", None, f"{lines} lines of {file} are no events.", file,
            file=file, lines=lines, reason=reason,
        )  # fmt: skip


# --- of the events of one group ----------------------------------------------------------------


class Events:
    """Findings of single events, and who claims to be master of which epoch."""

    def __init__(self, group: str, facts: Facts, emit: Callable[[HistoryFinding], None]) -> None:
        self._group = group
        self._emit = emit
        self._bounds = facts.bounds.get(group)
        # A group that never had more than one member is always alone.
        self._watches_sets = facts.largest_sets.get(group, 0) > 1
        self._alone: HistoryEvent | None = None
        self._masters: dict[int, _Masters] = {}
        self._events = self._timeless = self._outliers = 0

    def event(self, event: HistoryEvent, detail: EventDetail, *, on_broker_clock: bool) -> None:
        self._events += 1
        kind, time_ms = event.kind, event.time_ms
        if not time_ms:
            self._timeless += 1
        elif not on_broker_clock and self._bounds is not None:
            self._outliers += self._bounds.is_far_from(time_ms)
        if kind == "elected" or (kind == "set_altered" and time_ms):
            if kind == "elected" and event.broker_id > 0:
                self._master(event, won=True)
            if time_ms:
                self._set(event)
        elif kind == "diverged":
            why = detail.reason or event.reason or "no reason was given"
            self._emit(finding(
                WARNING, "diverged", self._group, time_ms or None,
                f"Broker {event.broker_id} cannot follow until an operator has looked: {why}.",
                f"broker {event.broker_id}", brokerId=event.broker_id,
                masterEpoch=event.master_epoch, log=event.log, raftIndex=event.raft_index,
            ))  # fmt: skip
        elif event.broker_id > 0 and (
            kind in ("opened", "first_ack")
            or (kind == "role_changed" and detail.role.upper() == "MASTER")
        ):
            self._master(event, won=False)

    def _master(self, event: HistoryEvent, *, won: bool) -> None:
        seen = self._masters.get(event.master_epoch)
        if seen is None:
            seen = self._masters[event.master_epoch] = _Masters(event.broker_id, event.broker_id)
            if len(self._masters) > EPOCHS_KEPT:
                oldest = next(iter(self._masters))
                self._several(oldest, self._masters.pop(oldest))
        seen.low, seen.high = min(seen.low, event.broker_id), max(seen.high, event.broker_id)
        if won:
            seen.elections += 1
        elif event.time_ms:
            seen.at_ms = min(seen.at_ms or event.time_ms, event.time_ms)

    def _several(self, epoch: int, seen: _Masters) -> None:
        brokers = sorted({seen.low, seen.high})
        if not (seen.elections > 1 or (seen.elections and len(brokers) > 1)):
            return
        more = f" ({seen.elections} elections)" if seen.elections > 1 else ""
        self._emit(finding(
            CRITICAL, "two_masters_in_epoch", self._group, seen.at_ms or None,
            f"Epoch {epoch} has more than one master: brokers "
            f"{', '.join(map(str, brokers))}{more}.", f"epoch {epoch}", masterEpoch=epoch,
            brokerIds=brokers, elections=seen.elections,
        ))  # fmt: skip

    def _set(self, event: HistoryEvent) -> None:
        alone, bounds = self._alone, self._bounds
        self._alone = event if len(event.sync_state_set) == 1 else None
        if alone is not None and bounds is not None and self._watches_sets:
            self._was_alone(alone, min(event.time_ms, bounds.last_ms) - alone.time_ms)

    def _was_alone(self, event: HistoryEvent, alone_ms: int) -> None:
        if alone_ms >= ALONE_MS:
            broker = event.sync_state_set[0]
            self._emit(finding(
                WARNING, "set_of_one", self._group, event.time_ms,
                f"Broker {broker} was alone in the set for {alone_ms // 1000} s: what it "
                "acknowledged was a single copy.", f"broker {broker}", brokerId=broker,
                masterEpoch=event.master_epoch, aloneMs=alone_ms,
            ))  # fmt: skip

    def finish(self) -> None:
        bounds = self._bounds
        if self._alone is not None and bounds is not None and self._watches_sets:
            self._was_alone(self._alone, bounds.last_ms - self._alone.time_ms)
        for epoch, seen in self._masters.items():
            self._several(epoch, seen)
        if self._outliers and bounds is not None:
            assert bounds.least_ms is not None and bounds.most_ms is not None
            self._emit(finding(
                WARNING, "clock_problem", self._group, None,
                f"Controllers recorded {self._outliers} events more than {GAP_DAYS} days from the "
                f"others: all lie between {moment(bounds.least_ms)} and {moment(bounds.most_ms)} "
                "UTC. The clock of a controller was wrong, or the group had no events for that "
                "long; these days are not in table unavailability.", self._group,
                events=self._outliers, firstMs=bounds.least_ms, lastMs=bounds.most_ms,
            ))  # fmt: skip
        if self._timeless:
            self._emit(finding(
                WARNING, "clock_problem", self._group, None,
                f"{self._timeless} of {self._events} events have no time of the years 1970 to "
                "9999 in ms: tables that are ordered by time lack them.", self._group,
                events=self._timeless, all=self._events,
            ))  # fmt: skip


@dataclass(slots=True)
class _Masters:
    low: int
    high: int
    elections: int = 0
    at_ms: int = 0


# --- of the stories of one group ---------------------------------------------------------------


@dataclass(slots=True)
class Election:
    """A change of master beside its story: what its event has, and what its clocks show.

    `number`: how many came before; `seen_by`: the bits of the controllers that have it; `top`: the
    highest epoch of those before; `before`: the story of the one before. `implausible`: why its
    outage is not counted, else empty.
    """

    number: int
    seen_by: int
    confirmed: int | None
    top: int | None
    before: Story | None
    clock_problem: str | None = None
    unavailable_ms: int | None = None
    implausible: str = ""

    def clocks(self, story: Story, bounds: Bounds | None) -> None:
        """When its story is over."""
        wrong = story.out_of_order()
        self.clock_problem = _clock_problem(story, wrong)
        self.unavailable_ms = story.outage_ms(wrong)
        if self.unavailable_ms is None:
            return
        start_ms, end_ms = story.start_ms, story.start_ms + self.unavailable_ms
        if bounds is not None and (
            start_ms < bounds.first_ms - DAY_MS or end_ms > bounds.last_ms + DAY_MS
        ):
            self.implausible = "outside"  # far from the time of its group
            return
        next_ms = _next_ms(story) or 0
        later = next_ms and story.elected_ms and next_ms >= story.elected_ms
        if later and end_ms > next_ms + CLOCK_MS:
            # By their clocks its master began to serve after the next one was elected, though
            # before it in the log.
            self.implausible = "after_next"


def _next_ms(story: Story) -> int | None:
    """When the next master was elected."""
    then = story.next
    return (then.elected_ms or None) if then is not None and then.is_election else None


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


def _proposer(story: Story | None) -> str:
    """The controller that proposed the election."""
    steps = story.steps if story is not None else ()
    clock = next((step.clock for step in steps if step.name == "proposed"), "")
    return clock.removeprefix("controller").strip() or "?"


def cause_of(story: Story) -> str:
    """The reason of an election as a short word."""
    reason = story.reason
    if reason.startswith("named "):
        return "named"
    head = reason.partition(": ")[0].lower()
    return re.sub("[^a-z0-9]+", "_", head).strip("_")[:40] if reason else "unknown"


def known(value: int) -> int | None:
    return value if value >= 0 else None


def of_election(story: Story, election: Election) -> Iterator[HistoryFinding]:
    """Unclean ones, epochs that do not grow, masters that lack what was confirmed, clocks."""
    group, epoch, at_ms = story.broker_name, story.master_epoch, story.elected_ms or None
    subject, before = f"epoch {epoch}", election.before
    floors = (election.confirmed, known(before.confirmed_offset) if before is not None else None)
    floor = max((each for each in floors if each is not None), default=None)
    opened = known(story.opened_offset)
    wrong = []
    if story.unclean:
        wrong.append(
            ("unclean_election", " uncleanly: acknowledged messages that it lacks are lost.")
        )
    if election.top is not None and epoch < election.top:
        wrong.append(("epoch_went_back", f" after epoch {election.top}."))
    if not story.unclean and opened is not None and floor is not None and opened < floor:
        text = f" with a log up to {opened}, where {floor} was confirmed before."
        wrong.append(("start_below_confirmed", text))
    for kind, text in wrong:
        yield finding(
            CRITICAL, kind, group, at_ms,
            f"Broker {story.winner} became master of epoch {epoch}{text}", subject,
            masterEpoch=epoch, brokerId=story.winner, setBefore=story.set_before,
            epochBefore=election.top, logEnd=opened, confirmed=floor,
            raftIndex=story.elected_by[1] if story.elected_by else None,
        )  # fmt: skip
    if election.number == 0 and epoch > 1:
        yield finding(
            INFO, "epochs_before_history", group, at_ms,
            f"The histories begin with epoch {epoch}; what was before is not there.", subject,
            firstEpoch=epoch,
        )  # fmt: skip
    yield from _clocks(story, election)


def _clocks(story: Story, election: Election) -> Iterator[HistoryFinding]:
    group, epoch, at_ms = story.broker_name, story.master_epoch, story.elected_ms or None
    subject, problem, next_ms = f"epoch {epoch}", election.clock_problem, _next_ms(story)
    unknown = f"How long the election of epoch {epoch} took is unknown: "
    if problem is not None:
        by = re.search("([0-9]+) ms", problem)
        severity = WARNING if by and int(by[1]) >= CLOCK_MS else INFO
        yield finding(
            severity, "clock_problem", group, at_ms, f"{unknown}{problem}.", subject,
            masterEpoch=epoch, problem=problem,
        )  # fmt: skip
    if election.implausible:
        assert election.unavailable_ms is not None
        begin_ms, end_ms = story.start_ms, story.start_ms + election.unavailable_ms
        beyond = (
            "all events of the group; the clock of a broker was wrong"
            if election.implausible == "outside"
            else f"the next election, at {moment(next_ms or 0)}; the clock of broker "
            f"{story.winner} was wrong"
        )
        yield finding(
            WARNING, "clock_problem", group, at_ms,
            f"{unknown}from {moment(begin_ms)} to {moment(end_ms)} UTC it would reach beyond "
            f"{beyond}. It is not counted as an outage.", subject, masterEpoch=epoch,
            beginMs=begin_ms, unavailableMs=election.unavailable_ms, nextElectedMs=next_ms,
        )  # fmt: skip
    if at_ms is not None and next_ms is not None and next_ms < at_ms:
        severity = WARNING if at_ms - next_ms >= CLOCK_MS else INFO
        yield finding(
            severity, "clock_problem", group, at_ms,
            f"How long broker {story.winner} was master of epoch {epoch} is unknown: the next "
            f"election, by controller {_proposer(story.next)}, is {at_ms - next_ms} ms older than "
            f"its own, by controller {_proposer(story)}.", subject,
            masterEpoch=epoch, electedMs=at_ms, nextElectedMs=next_ms,
        )  # fmt: skip


def open_outage(story: Story, at_ms: int | None, *, elected: bool) -> HistoryFinding:
    """A group without a master at the end of the history; after a planned stop that is no news."""
    how = story.how or story.reason or "an election was requested"
    text = (
        f"Broker {story.winner}, elected in epoch {story.master_epoch}, has not opened; the "
        "history ends so."
        if elected
        else f"There is no master since {how}; the history ends so."
    )
    broker = story.winner if elected else story.master_before
    severity = INFO if cause_of(story) == "goodbye" else WARNING
    return finding(
        severity, "outage_open", story.broker_name, at_ms, text,
        f"broker {broker}", masterEpoch=story.master_epoch, reason=story.reason or None,
    )  # fmt: skip
