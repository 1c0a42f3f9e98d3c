"""The result of a run in short: `summary.json`, and the printed lines. Bounded in its size.

Numbers are queries over the written tables; only what no table has comes from the fold. Free of
Spark.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from batonmq.spark.history.history_findings import moment
from batonmq.spark.history.overview import Bounds
from batonmq.spark.report.epoch_tables import EpochTables
from batonmq.spark.report.quantities import duration_text
from batonmq.spark.severity import CRITICAL, INFO, SEVERITIES, WARNING
from batonmq.spark.steps.result_folder import own_version

GROUPS_SHOWN: Final = 200
_FAILOVER_MS: Final = """
    SELECT kind, count(*) AS count, quantile_disc(took_ms, 0.5) AS p50,
        quantile_disc(took_ms, 0.9) AS p90, quantile_disc(took_ms, 0.99) AS p99,
        max(took_ms) AS max
    FROM changes WHERE took_ms IS NOT NULL GROUP BY kind ORDER BY kind
"""
_WORST: Final = """
    SELECT "group", master_epoch, kind, cause, how, master_before, master, unavailable_ms,
        without_writes_ms, detected_at
    FROM failovers WHERE kind <> 'first_election' AND without_writes_ms IS NOT NULL
    ORDER BY without_writes_ms DESC, "group", master_epoch LIMIT 5
"""
_FINDINGS: Final = (
    "SELECT severity, kind, count(*) AS many FROM findings GROUP BY ALL ORDER BY kind"
)
_FIRST_FINDINGS: Final = f"""
    SELECT severity, kind, "group", text FROM findings WHERE severity <> '{INFO}'
    ORDER BY severity <> '{CRITICAL}', "at" NULLS LAST, "group" NULLS FIRST, kind, subject, text
    LIMIT 20
"""


def summarise(
    tables: EpochTables,
    bounds: Mapping[str, Bounds],
    events: Mapping[str, int],
    known: Mapping[str, Any],
) -> dict[str, Any]:
    """The document; its lists are cut at fixed lengths, its counts are of all.

    `bounds`, `events`: of each group. `known`: what goes into the document as it is.
    """
    of_groups = {row["name"]: row for row in tables.groups()}
    groups = [
        _group(name, its, events[name], of_groups.get(name, {})) for name, its in bounds.items()
    ]
    groups.sort(key=lambda group: (-group["unavailable_ms"], group["group"]))
    worst = tables.rows(_WORST)
    for row in worst:
        at_ms = row["detected_at"]
        row["detected_at"] = at_ms and moment(at_ms).partition(".")[0]
    severities, kinds = Counter(dict.fromkeys(SEVERITIES, 0)), Counter[str]()
    for row in tables.rows(_FINDINGS):
        severities[row["severity"]] += row["many"]
        kinds[row["kind"]] += row["many"]
    return {
        "generated_at": datetime.now(UTC).isoformat(timespec="seconds"), "version": own_version(),
        **known, "groups_total": len(groups), "groups": groups[:GROUPS_SHOWN],
        "failover_ms": {row.pop("kind"): row for row in tables.rows(_FAILOVER_MS)},
        "worst_failovers": worst, "findings": dict(severities), "findings_by_kind": dict(kinds),
        "first_findings": tables.rows(_FIRST_FINDINGS),
    }  # fmt: skip


def _group(name: str, bounds: Bounds, events: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """`row`: of `EpochTables.groups`, empty for a group that is in no table."""
    return {
        "group": name, "events": events, "first_event": _iso(bounds.first_ms),
        "last_event": _iso(bounds.last_ms), "masters": row.get("masters", 0),
        "failovers": row.get("changes", 0), "outages": row.get("outages", 0),
        "unavailable_ms": row.get("unavailable_ms", 0), "open": row.get("is_open", False),
        "truncated_bytes": row.get("truncated_bytes", 0),
    }  # fmt: skip


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
        lost = duration_text(group["unavailable_ms"])
        printed.append(
            f"{group['group']}: {group['masters']} masters, {group['failovers']} changes, "
            f"{lost} without writes in {group['outages']} outages{still}"
        )
    if summary["groups_total"] > len(summary["groups"]):
        printed.append(f"... and {summary['groups_total'] - len(summary['groups'])} groups more")
    if summary["worst_failovers"]:
        printed.append("the longest:")
    printed += [
        f"  {worst['detected_at'] or '?'} {worst['group']} epoch {worst['master_epoch']}: "
        f"{duration_text(worst['without_writes_ms'])}, {worst['kind']}: {worst['how']}"
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
