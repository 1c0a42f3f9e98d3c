"""The result of a run in short: `summary.json`, and the printed lines. Bounded in its size.

Each group's fold counts what it writes; sums of groups are added up where the run was started. Of
every change of master 8 bytes are kept for the percentiles. Free of Spark.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from batonmq.spark.history.history_findings import HistoryFinding, moment
from batonmq.spark.history.output_tables import Row
from batonmq.spark.history.overview import Bounds
from batonmq.spark.severity import CRITICAL, INFO, SEVERITIES, WARNING
from batonmq.spark.steps.parquet_tables import percentiles
from batonmq.spark.steps.result_folder import own_version

GROUPS_SHOWN: Final = 200
_WORST: Final = 5
_TOLD: Final = (
    "master_epoch", "kind", "cause", "how", "master_before", "master", "unavailable_ms",
    "without_writes_ms",
)  # fmt: skip
_FINDINGS: Final = 20
_PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(slots=True)
class FindingSums:
    """How many findings, by (severity, kind), and the first of the critical ones and warnings."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    first: list[HistoryFinding] = field(default_factory=list)

    def add(self, found: HistoryFinding) -> None:
        self.counts[found.severity, found.kind] += 1
        if found.severity != INFO:
            self._keep([found])

    def merge(self, other: FindingSums) -> None:
        self.counts.update(other.counts)
        self._keep(other.first)

    def _keep(self, more: list[HistoryFinding]) -> None:
        self.first += more
        if len(self.first) > 2 * _FINDINGS:
            self.first = heapq.nsmallest(_FINDINGS, self.first, key=_gravity)


@dataclass(slots=True)
class GroupSums:
    """What the fold of one group counted. `elections`: all, `masters`: those that were written.

    `without_ms`: of each kind of election how long writes were impossible, where that is known.
    """

    name: str
    bounds: Bounds | None = None
    lines: int = 0
    events: int = 0
    elections: int = 0
    masters: int = 0
    changes: int = 0
    outages: int = 0
    unavailable_ms: int = 0
    is_open: bool = False
    truncated_bytes: int = 0
    without_ms: dict[str, array[int]] = field(default_factory=dict)
    worst: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    found: FindingSums = field(default_factory=FindingSums)

    def day(self, row: Row) -> None:
        self.outages += row["outages"]
        self.unavailable_ms += row["unavailable_ms"]
        self.is_open = self.is_open or row["open"]

    def failover(self, row: Row) -> None:
        self.masters += 1
        self.changes += row["kind"] != "first_election"
        self.truncated_bytes += row["truncated_bytes"]
        without_ms = row["without_writes_ms"]
        if without_ms is None:
            return
        self.without_ms.setdefault(row["kind"], array("q")).append(without_ms)
        if row["kind"] == "first_election":
            return
        if len(self.worst) == _WORST and without_ms < -self.worst[-1][0][0]:
            return
        detected = row["detected_at"] and moment(row["detected_at"]).partition(".")[0]
        told = {name: row[name] for name in _TOLD}
        worst = {"group": self.name, **told, "detected_at": detected}
        self.worst.append(((-without_ms, self.name, row["master_epoch"]), worst))
        self.worst = sorted(self.worst, key=lambda each: each[0])[:_WORST]


def summarise(
    sums: Iterable[GroupSums],
    others: FindingSums,
    rows: Mapping[str, int],
    inputs: Mapping[str, Any],
    controllers: Sequence[str],
) -> dict[str, Any]:
    """The document; its lists are cut at fixed lengths, its counts are of all.

    `others`: findings that are of no fold; `rows`: of all tables.
    """
    events = lines = groups = 0
    shown: list[dict[str, Any]] = []
    durations: dict[str, array[int]] = {}
    worst: list[tuple[Any, dict[str, Any]]] = []
    for each in sums:
        events, lines = events + each.events, lines + each.lines
        if each.bounds is not None:
            groups += 1
            shown.append(_group(each, each.bounds))
            if len(shown) > 2 * GROUPS_SHOWN:
                shown = sorted(shown, key=_cost)[:GROUPS_SHOWN]
        for kind, ms in each.without_ms.items():
            durations.setdefault(kind, array("q")).extend(ms)
        worst = sorted(worst + each.worst, key=lambda one: one[0])[:_WORST]
        others.merge(each.found)
    severities = dict.fromkeys(SEVERITIES, 0)
    kinds: Counter[str] = Counter()
    for (severity, kind), count in others.counts.items():
        severities[severity] += count
        kinds[kind] += count
    return {
        "generated_at": datetime.now(UTC).isoformat(timespec="seconds"), "version": own_version(),
        "inputs": dict(inputs), "controllers": list(controllers), "events": events, "lines": lines,
        "rows": dict(rows), "groups_total": groups,
        "groups": sorted(shown, key=_cost)[:GROUPS_SHOWN],
        "failover_ms": {kind: _percentiles(durations[kind]) for kind in sorted(durations)},
        "worst_failovers": [row for _, row in worst], "findings": severities,
        "findings_by_kind": dict(sorted(kinds.items())),
        "first_findings": [
            {"severity": f.severity, "kind": f.kind, "group": f.group or None, "text": f.text}
            for f in sorted(others.first, key=_gravity)[:_FINDINGS]
        ],
    }  # fmt: skip


def _gravity(found: HistoryFinding) -> tuple[bool, bool, int, str, str, str]:
    at_ms = found.at_ms
    return (
        found.severity != CRITICAL, at_ms is None, at_ms or 0, found.group, found.kind,
        found.subject,
    )  # fmt: skip


def _group(sums: GroupSums, bounds: Bounds) -> dict[str, Any]:
    return {
        "group": sums.name, "events": sums.events, "first_event": _iso(bounds.first_ms),
        "last_event": _iso(bounds.last_ms), "masters": sums.masters, "failovers": sums.changes,
        "outages": sums.outages, "unavailable_ms": sums.unavailable_ms, "open": sums.is_open,
        "truncated_bytes": sums.truncated_bytes,
    }  # fmt: skip


def _cost(group: Mapping[str, Any]) -> tuple[int, str]:
    return -group["unavailable_ms"], group["group"]


def _percentiles(values: array[int]) -> dict[str, int]:
    ordered = np.sort(np.asarray(values, np.int64))
    found = percentiles(ordered, np.ones_like(ordered), list(_PERCENTILES.values()))
    return {"count": len(values)} | dict(zip(_PERCENTILES, found, strict=True))


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


def lines(summary: Mapping[str, Any]) -> list[str]:
    """The summary for people."""
    printed = [
        f"{summary['events']} events of {summary['groups_total']} groups, recorded by "
        f"{len(summary['controllers'])} controllers in {summary['lines']} lines"
    ]
    for group in summary["groups"]:
        still = ", and still without a master" if group["open"] else ""
        printed.append(
            f"{group['group']}: {group['masters']} masters, {group['failovers']} changes, "
            f"{_span(group['unavailable_ms'])} without writes in {group['outages']} outages{still}"
        )
    if summary["groups_total"] > len(summary["groups"]):
        printed.append(f"... and {summary['groups_total'] - len(summary['groups'])} groups more")
    if summary["worst_failovers"]:
        printed.append("the longest:")
    printed += [
        f"  {worst['detected_at'] or '?'} {worst['group']} epoch {worst['master_epoch']}: "
        f"{_span(worst['without_writes_ms'])}, {worst['kind']}: {worst['how']}"
        for worst in summary["worst_failovers"]
    ]
    found = summary["findings"]
    printed.append(
        f"findings: {found[CRITICAL]} critical, {found[WARNING]} warnings, {found[INFO]} for info"
    )
    printed += [
        f"  {each['severity']} {each['kind']}{' ' + each['group'] if each['group'] else ''}: "
        f"{each['text']}"
        for each in summary["first_findings"]
    ]
    return printed


def _span(ms: int) -> str:
    return f"{ms} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"
