"""The result of a run in short: `summary.json`, and the printed lines. Bounded in its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from batonmq.spark.failovers.findings import CRITICAL, INFO, SEVERITIES, WARNING

GROUPS_SHOWN: Final = 200
_WORST: Final = 5
_FINDINGS: Final = 20
_KINDS_MAX: Final = 1_000
_OF_WORST: Final = (
    "group", "master_epoch", "kind", "cause", "how", "master_before", "master", "detected_at",
    "unavailable_ms",
    "without_writes_ms",
)  # fmt: skip


def summarise(
    written: Mapping[str, DataFrame],
    bounds: DataFrame,
    overview: DataFrame,
    inputs: Mapping[str, Any],
    controllers: Sequence[str],
) -> dict[str, Any]:
    """The document; its lists are cut at fixed lengths, its counts are of all."""
    counts = _counts(written)
    totals = overview.agg(F.sum("events").alias("events"), F.sum("lines").alias("lines")).first()
    severities = dict.fromkeys(SEVERITIES, 0)
    kinds: dict[str, int] = {}
    for row in written["findings"].groupBy("severity", "kind").count().limit(_KINDS_MAX).collect():
        severities[row.severity] += row["count"]
        kinds[row.kind] = kinds.get(row.kind, 0) + row["count"]
    return {
        "generated_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": _version(),
        "inputs": dict(inputs),
        "controllers": list(controllers),
        "events": (totals and totals["events"]) or 0,
        "lines": (totals and totals["lines"]) or 0,
        "rows": counts,
        "groups_total": bounds.count(),
        "groups": _groups(written, bounds),
        "failover_ms": _percentiles(written["failovers"]),
        "worst_failovers": _worst(written["failovers"]),
        "findings": severities,
        "findings_by_kind": dict(sorted(kinds.items())),
        "first_findings": _first(written["findings"]),
    }


def _counts(written: Mapping[str, DataFrame]) -> dict[str, int]:
    """The rows of all tables, by one query."""
    names = [frame.select(F.lit(name).alias("name")) for name, frame in written.items()]
    rows = reduce(DataFrame.unionAll, names).groupBy("name").count().collect()
    return dict.fromkeys(written, 0) | {row["name"]: row["count"] for row in rows}


def _groups(written: Mapping[str, DataFrame], bounds: DataFrame) -> list[dict[str, Any]]:
    """The groups with most time without writes."""
    changes = (
        written["failovers"]
        .groupBy("group")
        .agg(
            F.count("*").alias("masters"),
            F.count_if(F.col("kind") != "first_election").alias("failovers"),
            F.sum("truncated_bytes").alias("truncated_bytes"),
        )
    )
    outages = (
        written["unavailability"]
        .groupBy("group")
        .agg(
            F.sum("unavailable_ms").alias("unavailable_ms"),
            F.sum("outages").alias("outages"),
            F.bool_or("open").alias("open"),
        )
    )
    rows = (
        bounds.join(changes, "group", "left")
        .join(outages, "group", "left")
        .orderBy(F.desc_nulls_last("unavailable_ms"), "group")
        .limit(GROUPS_SHOWN)
        .collect()
    )
    return [
        {
            "group": row.group,
            "events": row.events,
            "first_event": _iso(row.first_ms),
            "last_event": _iso(row.last_ms),
            "masters": row.masters or 0,
            "failovers": row.failovers or 0,
            "outages": row.outages or 0,
            "unavailable_ms": row.unavailable_ms or 0,
            "open": bool(row.open),
            "truncated_bytes": row.truncated_bytes or 0,
        }
        for row in rows
    ]


def _percentiles(failovers: DataFrame) -> dict[str, dict[str, int]]:
    """Per kind: how many with a known duration, percentiles of these in ms."""
    rows = (
        failovers.where("without_writes_ms IS NOT NULL")
        .groupBy("kind")
        .agg(
            F.count("*").alias("count"),
            F.percentile_approx("without_writes_ms", [0.5, 0.9, 0.99, 1.0], 10_000).alias("ms"),
        )
        .limit(_KINDS_MAX)
        .collect()
    )
    return {
        row.kind: {
            "count": row["count"],
            **dict(zip(("p50", "p90", "p99", "max"), row.ms, strict=True)),
        }
        for row in sorted(rows, key=lambda row: str(row.kind))
    }


def _worst(failovers: DataFrame) -> list[dict[str, Any]]:
    rows = (
        failovers.where("without_writes_ms IS NOT NULL AND kind <> 'first_election'")
        .orderBy(F.desc("without_writes_ms"), "group", "master_epoch")
        .limit(_WORST)
        # As text: Python would give a time of its own zone.
        .select(*_OF_WORST, F.date_format("detected_at", "yyyy-MM-dd HH:mm:ss").alias("at"))
        .collect()
    )
    worst = []
    for row in rows:
        fields = row.asDict()
        fields["detected_at"] = fields.pop("at")
        worst.append(fields)
    return worst


def _first(findings: DataFrame) -> list[dict[str, Any]]:
    """The first of the critical findings and warnings."""
    order = F.when(F.col("severity") == CRITICAL, 0).otherwise(1)
    rows = (
        findings.where(F.col("severity") != INFO)
        .orderBy(order, F.asc_nulls_last("at"), "group", "kind", "subject")
        .limit(_FINDINGS)
        .select("severity", "kind", "group", "text")
        .collect()
    )
    return [row.asDict() for row in rows]


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


def _version() -> str:
    try:
        return version("batonmq")
    except PackageNotFoundError:
        return ""


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


__all__ = ["GROUPS_SHOWN", "lines", "summarise"]
