"""What the histories hold before stories are made: logs, groups, times, what each controller has.

Sums over all lines, which the engine has as rows; a few numbers for each group, and no day. The
fold needs them before it begins: whether a time is that of its group, and what a controller should
have. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from batonmq.spark.report.quantities import DAY_MS
from batonmq.spark.steps.sql import Engine, dicts

GAP_DAYS: Final = 366
"""A longer time without events is a wrong clock rather than a quiet cluster."""
_GAP_MS: Final = GAP_DAYS * DAY_MS
_LOGS_MAX: Final = 10_000
#: By a time of GAP_DAYS, too: two events in one such `span` are never further apart. A time of 0 is
#: none.
_SEEN: Final = f"""
    SELECT log, grp, rank, by_broker, span, count(*) AS lines, count(known_ms) AS timed,
        min(known_ms) AS first_ms, max(known_ms) AS last_ms, min(time_ms) AS begins,
        max(set_size) AS set_size, min(place) AS low, max(place) AS high
    FROM (
        SELECT log, grp, rank, by_broker, time_ms, set_size, time_ms - time_ms % {_GAP_MS} AS span,
            nullif(time_ms, 0) AS known_ms, struct(raft_index, part) AS place
        FROM lines WHERE fault IS NULL
    ) l GROUP BY log, grp, rank, by_broker, span ORDER BY log, grp, rank, by_broker, span
"""
#: Of each file, lines that are no events.
DAMAGED: Final = """
    SELECT file, count(*) AS lines, min_by(fault, place) AS fault
    FROM lines WHERE fault IS NOT NULL GROUP BY file ORDER BY file
"""

Place = tuple[int, int]
"""(raft index, part) of an event in its log."""


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


@dataclass(frozen=True, slots=True)
class Facts:
    """What the fold knows from the start; it travels with each task.

    `controllers`: their names, by rank. `shared`: groups that are in several logs, with these logs
    in the order of their earliest time. `bounds` and `largest_sets` are by the name of the group in
    tables; a group none of whose events has a time has no bounds. `lows` and `highs`: the
    first and last place of a controller (by rank) in a log.
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


def facts_of(engine: Engine, controllers: tuple[str, ...]) -> tuple[Facts, int]:
    """What the view `lines` says; and how many of them are events. Raises ValueError for too many
    logs: not one cluster's history."""
    seen = dicts(engine, _SEEN)
    begins: dict[str, int] = {}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    lows: dict[tuple[str, int], Place] = {}
    highs: dict[tuple[str, int], Place] = {}
    for row in seen:
        log, who = row["log"], (row["log"], row["rank"])
        low, high = tuple(row["low"].values()), tuple(row["high"].values())
        lows[who], highs[who] = min(low, lows.get(who, low)), max(high, highs.get(who, high))
        begins[log] = min(row["begins"], begins.get(log, row["begins"]))
        groups.setdefault((log, row["grp"]), []).append(row)
    if len(begins) > _LOGS_MAX:
        raise ValueError(f"more than {_LOGS_MAX} logs: these are histories of many clusters")
    of_group: dict[str, list[str]] = {}
    # In the order of logs: the newest one of a group keeps the plain name in tables.
    for log, group in sorted(groups, key=lambda key: (begins[key[0]], *key)):
        of_group.setdefault(group, []).append(log)
    shared = {group: tuple(of) for group, of in of_group.items() if group and len(of) > 1}
    facts = Facts(controllers, shared, {}, {}, lows, highs)
    for (log, group), rows in groups.items():
        name = facts.group_in(group, log)
        facts.largest_sets[name] = max(row["set_size"] for row in rows)
        if group and any(row["timed"] for row in rows):
            facts.bounds[name] = _bounds(rows)
    return facts, sum(row["lines"] for row in seen)


def _bounds(rows: Iterable[Mapping[str, Any]]) -> Bounds:
    """Of the rows of one group, of which one has a time."""
    timed = sorted((row for row in rows if row["timed"]), key=lambda row: row["first_ms"])
    spans: list[list[int]] = []  # without a gap of more than GAP_DAYS between two days
    for row in timed:
        first_ms, last_ms, lines = row["first_ms"], row["last_ms"], row["timed"]
        if row["by_broker"]:
            continue
        if spans and first_ms // DAY_MS - spans[-1][1] // DAY_MS <= GAP_DAYS:
            spans[-1] = [spans[-1][0], max(spans[-1][1], last_ms), spans[-1][2] + lines]
        else:
            spans.append([first_ms, last_ms, lines])
    if not spans:
        first_ms = timed[0]["first_ms"]
        last_ms = max(row["last_ms"] for row in timed)
        return Bounds(first_ms, min(last_ms, first_ms + _GAP_MS))
    first_ms, last_ms, _ = max(spans, key=lambda span: (span[2], span[0]))
    return Bounds(first_ms, last_ms, spans[0][0], spans[-1][1])
