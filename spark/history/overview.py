"""What the histories hold before stories are made: logs, groups, times, what each controller has.

One pass over all lines, in any order and in parts that are merged; it keeps a few numbers for each
group, and no day. The fold needs them before it begins: whether a time is that of its group, and
what a controller should have. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from batonmq.history.event import ON_BROKER_CLOCK, HistoryEvent
from batonmq.spark.history.lines import Line
from batonmq.spark.read.damage import Damage
from batonmq.spark.report.quantities import DAY_MS

GAP_DAYS: Final = 366
"""A longer time without events is a wrong clock rather than a quiet cluster."""
_GAP_MS: Final = GAP_DAYS * DAY_MS
_LOGS_MAX: Final = 10_000

Place = tuple[int, int]
"""(raft index, part) of an event in its log."""


@dataclass(slots=True)
class _GroupSeen:
    """A group in one log. `first_ms` and `last_ms` are of all events with a time, 0 without any.

    `times`: [first ms, last ms, lines] on controllers' clocks, by GAP_DAYS: two events in one such
    time are never further apart.
    """

    times: dict[int, list[int]] = field(default_factory=dict)
    first_ms: int = 0
    last_ms: int = 0
    largest_set: int = 0

    def add_time(self, time_ms: int) -> None:
        if not self.first_ms or time_ms < self.first_ms:
            self.first_ms = time_ms
        if time_ms > self.last_ms:
            self.last_ms = time_ms

    def add_lines(self, first_ms: int, last_ms: int, lines: int) -> None:
        """Lines of one of the `times`."""
        held = self.times.setdefault(first_ms // _GAP_MS, [first_ms, last_ms, 0])
        held[0], held[1] = min(held[0], first_ms), max(held[1], last_ms)
        held[2] += lines

    def bounds(self) -> Bounds:
        if not self.times:
            return Bounds(self.first_ms, min(self.last_ms, self.first_ms + _GAP_MS))
        spans: list[list[int]] = []  # without a gap of more than GAP_DAYS between two days
        for _, (first_ms, last_ms, lines) in sorted(self.times.items()):
            if spans and first_ms // DAY_MS - spans[-1][1] // DAY_MS <= GAP_DAYS:
                spans[-1] = [spans[-1][0], last_ms, spans[-1][2] + lines]
            else:
                spans.append([first_ms, last_ms, lines])
        first_ms, last_ms, _ = max(spans, key=lambda span: (span[2], span[0]))
        return Bounds(first_ms, last_ms, spans[0][0], spans[-1][1])


@dataclass(frozen=True, slots=True)
class Bounds:
    """The time of a group, by controllers' clocks: its part with most lines.

    `least_ms` and `most_ms` are of all its parts; None: it has no event on such a clock.
    """

    first_ms: int
    last_ms: int
    least_ms: int | None = None
    most_ms: int | None = None

    def is_far_from(self, time_ms: int) -> bool:
        """Whether an event on a controller's clock lies in another part."""
        return self.least_ms is not None and not self.first_ms <= time_ms <= self.last_ms


@dataclass(slots=True)
class Overview:
    """`lines` are all that are events, of every controller. `lows` and `highs`: the first and last
    place of a controller (by rank) in a log.

    `damaged`: of each file (lines that are no events, offset and reason of the first).
    """

    groups: dict[tuple[str, str], _GroupSeen] = field(default_factory=dict)
    begins: dict[str, int] = field(default_factory=dict)
    lows: dict[tuple[str, int], Place] = field(default_factory=dict)
    highs: dict[tuple[str, int], Place] = field(default_factory=dict)
    damaged: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    lines: int = 0

    def add(self, line: Line | Damage) -> None:
        if isinstance(line, Damage):
            self._damage(line.file, (1, line.offset, line.reason))
            return
        self.lines += 1
        event = line.event
        seen = self.groups.get((event.log, event.broker_name))
        if seen is None:
            seen = self.groups[event.log, event.broker_name] = _GroupSeen()
            self.begins.setdefault(event.log, event.time_ms)
        place, who = (event.raft_index, event.part), (event.log, line.rank)
        high = self.highs.get(who)
        if high is None:
            self.lows[who] = self.highs[who] = place
        elif place > high:  # mostly: a file ascends
            self.highs[who] = place
        elif place < self.lows[who]:
            self.lows[who] = place
        self._add(seen, event)

    def _add(self, seen: _GroupSeen, event: HistoryEvent) -> None:
        time_ms = event.time_ms
        if time_ms < self.begins[event.log]:
            self.begins[event.log] = time_ms
        if event.kind in ("elected", "set_altered"):
            size = max(len(event.sync_state_set), len(event.set_before))
            seen.largest_set = max(seen.largest_set, size)
        if not time_ms:
            return
        seen.add_time(time_ms)
        if event.kind in ON_BROKER_CLOCK:
            return
        seen.add_lines(time_ms, time_ms, 1)

    def _damage(self, file: str, other: tuple[int, int, str]) -> None:
        lines, offset, reason = self.damaged.get(file, (0, *other[1:]))
        self.damaged[file] = (lines + other[0], *min((offset, reason), other[1:]))

    def merge(self, other: Overview) -> None:
        """Take what another part has seen."""
        self.lines += other.lines
        for key, theirs in other.groups.items():
            seen = self.groups.setdefault(key, _GroupSeen())
            for first_ms, last_ms, lines in theirs.times.values():
                seen.add_lines(first_ms, last_ms, lines)
            for time_ms in (theirs.first_ms, theirs.last_ms):
                if time_ms:
                    seen.add_time(time_ms)
            seen.largest_set = max(seen.largest_set, theirs.largest_set)
        for log, begins in other.begins.items():
            self.begins[log] = min(begins, self.begins.get(log, begins))
        for who, low in other.lows.items():
            self.lows[who] = min(low, self.lows.get(who, low))
            self.highs[who] = max(other.highs[who], self.highs.get(who, other.highs[who]))
        for file, damage in other.damaged.items():
            self._damage(file, damage)

    def facts(self, controllers: tuple[str, ...]) -> Facts:
        """Raises ValueError for too many logs: not one cluster's history."""
        if len(self.begins) > _LOGS_MAX:
            raise ValueError(f"more than {_LOGS_MAX} logs: these are histories of many clusters")
        logs = sorted(self.begins, key=lambda log: (self.begins[log], log))
        of_group: dict[str, list[str]] = {}
        for log in logs:
            of_group.setdefault("", []).append(log)
        # In the order of logs: the newest one of a group keeps the plain name in tables.
        for log, group in sorted(self.groups, key=lambda key: logs.index(key[0])):
            if group:
                of_group.setdefault(group, []).append(log)
        shared = {group: tuple(of) for group, of in of_group.items() if group and len(of) > 1}
        facts = Facts(controllers, shared, {}, {}, dict(self.lows), dict(self.highs))
        for (log, group), seen in self.groups.items():
            name = facts.group_in(group, log)
            if group and seen.first_ms:
                facts.bounds[name] = seen.bounds()
            facts.largest_sets[name] = seen.largest_set
        return facts


@dataclass(frozen=True, slots=True)
class Facts:
    """What the fold knows from the start; it travels with each task.

    `controllers`: their names, by rank. `shared`: groups that are in several logs, with these logs
    in the order of their earliest time. `bounds` and `largest_sets` are by the name of the group in
    tables; a group none of whose events has a time has no bounds. `lows` and `highs` as in
    `Overview`.
    """

    controllers: tuple[str, ...]
    shared: Mapping[str, tuple[str, ...]]
    bounds: dict[str, Bounds]
    largest_sets: dict[str, int]
    lows: dict[tuple[str, int], Place]
    highs: dict[tuple[str, int], Place]

    def group_in(self, group: str, log: str) -> str:
        """The name in tables of a group in that log: several clusters may have one of a name."""
        logs: Sequence[str] = self.shared.get(group, ())
        return group if log not in logs[:-1] else f"{group} ({log})"

    @property
    def groups(self) -> set[str]:
        """Their names in tables, without the one of controllers."""
        return set(self.largest_sets) - {""}

    @property
    def last_ms(self) -> int | None:
        """The last time of all groups; None without any."""
        return max((bounds.last_ms for bounds in self.bounds.values()), default=None)
