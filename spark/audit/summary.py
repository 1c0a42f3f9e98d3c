"""An audit's result for people and for scripts."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from batonmq.spark.audit.audit import AuditResult
from batonmq.spark.differences.replica_groups import ReplicaGroup
from batonmq.spark.severity import INFO, SEVERITIES

_WIDTH_MAX: Final = 100
_KINDS_MAX: Final = 1000
_COLUMNS: Final = ("severity", "kind", "group", "replicas", "place", "physical", "epoch", "what")
_SHORT: Final = {
    "lost": "acknowledged, and in no replica",
    "acked_missing": "acknowledged, and missing",
    "missing": "missing",
    "extra": "extra",
    "divergent": "divergent",
    "reordered": "at another place or out of order",
    "damaged": "damaged in all that have it",
    "gap": "gaps in queues",
    "queue_wrong": "wrong units of consume queues",
    "queue_missing": "messages without a unit",
    "epochs_differ": "differences of epoch lists",
    "unchecked": "that cannot be checked",
    "duplicated": "sent twice under one key",
    "not_acked": "not in the acknowledged list",
    "queue_behind": "queues behind the log",
    "lagging": "replicas behind",
    "expired": "replicas that kept less",
    "table_missing": "missing in the table",
    "table_doubled": "more than once in the table",
    "table_changed": "otherwise in the table than in the log",
    "table_extra": "in the table, and not in the log",
    "table_ahead": "note on rows from behind the end of the log",
    "table_behind": "note on messages that the table is to get",
    "table_unseen": "note on rows that cannot be compared",
}


def summary_of(result: AuditResult, inputs: Sequence[str]) -> dict[str, Any]:
    """The whole result as a document for JSON, with the first findings."""
    kinds = result.kinds[:_KINDS_MAX]
    notes = [*result.warnings]
    if sum(row["count"] for row in kinds) < result.count():
        notes.append(f"the gravest {len(kinds)} sorts of findings are summed up below")
    return {
        "verdict": "clean" if result.is_clean else "found",
        "generated_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "inputs": list(inputs),
        "groups": [_group(result, group) for group in result.groups],
        "findings": {severity: result.count(severity) for severity in SEVERITIES},
        "kinds": kinds,
        "acked": result.acked,
        "warnings": notes,
        "first": result.first,
    }


def _group(result: AuditResult, group: ReplicaGroup) -> dict[str, Any]:
    return {
        "group": group.name, "low": group.low, "high": group.high, **result.counts[group.name],
        "findings": {s: result.count(s, group=group.name) for s in SEVERITIES},
        "replicas": [
            {
                "name": each.name, "store": each.facts.path, "first": each.first,
                "confirm": each.confirm if each.knows_confirm else None, "read_to": each.end,
                "epoch": each.facts.epochs[-1].epoch if each.facts.epochs else None,
            }
            for each in group.replicas
        ],
    }  # fmt: skip


def lines_of(summary: dict[str, Any]) -> list[str]:
    """The verdict, then what was found where, then the first findings."""
    lines: list[str] = []
    for group in summary["groups"]:
        lines += _verdict(group, summary)
    if summary["acked"] is not None:
        lines.append(_acked(summary["acked"]))
    lines += [f"note: {text}" for text in summary["warnings"]]
    lines += _kinds(summary["kinds"])
    if summary["first"]:
        lines += ["", *_table(summary["first"])]
        left = sum(summary["findings"].values()) - len(summary["first"])
        if left > 0:
            lines.append(f"and {left:,} more")
    return lines


def _verdict(group: dict[str, Any], summary: dict[str, Any]) -> Iterator[str]:
    count = len(group["replicas"])
    rows = [row for row in summary["kinds"] if row["group"] == group["group"]]
    grave = sum(many for severity, many in group["findings"].items() if severity != INFO)
    said = f"{group['messages']:,} messages"
    if count > 1:
        differing = group["messages"] - group["agreed"]
        said = f"{count} replicas agree on {group['agreed']:,} of {said}"
        alone = sum(row["kind"] in ("lagging", "expired") for row in rows)
        if differing and alone and not grave:
            said += f" (only one keeps or confirms the other {differing:,})"
    what = "nothing wrong" if not grave else f"{grave:,} finding{'s' * (grave != 1)}"
    span = f"log offsets {group['low']:,} to {group['high']:,}"
    yield f"{group['group']}: {said}, all have {span}; {what}"


def _acked(acked: dict[str, int]) -> str:
    checked = acked["entries"] - acked["other_brokers"]
    parts = [f"{acked['lost']:,} lost", f"{acked['found']:,} found"]
    words = {
        "elsewhere": "not where they were acknowledged",
        "not_everywhere": "not whole in every replica",
        "unconfirmed": "above what any replica confirms",
        "expired": "expired, so they cannot be checked",
        "unchecked": "not found and perhaps expired",
    }
    parts += [f"{acked[name]:,} {text}" for name, text in words.items() if acked[name]]
    line = f"acknowledged: {checked:,} messages, {', '.join(parts)}"
    if acked["other_brokers"]:
        line += f"; {acked['other_brokers']:,} of brokers that are not audited"
    return line


def _kinds(kinds: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in kinds:
        who = f" in {', '.join(row['replicas'])}" if row["replicas"] else ""
        where = ""
        if row["first_offset"] is not None:
            where = f", log offsets {row['first_offset']} to {row['last_offset']}"
        if row["first_epoch"] is not None:
            since, until = row["first_epoch"], row["last_epoch"]
            where += f", epoch {since}" if since == until else f", epochs {since} to {until}"
        what = f"{row['count']:,} {_SHORT[row['kind']]}"
        lines.append(f"  {row['severity']}: {row['group'] or 'of no group'}: {what}{who}{where}")
    return lines


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    cells = [list(_COLUMNS)]
    for row in rows:
        place = "" if row["topic"] is None else f"{row['topic']}/{row['queue_id']}"
        if row["queue_offset"] is not None:
            place += f"@{row['queue_offset']}"
        key = f"{row['unique_key']}: " if row["unique_key"] else ""
        numbers = ("" if row[n] is None else str(row[n]) for n in ("physical_offset", "epoch"))
        who = row["group"] or "", ",".join(row["replicas"])
        cells.append([row["severity"], row["kind"], *who, place, *numbers, key + row["detail"]])
    widths = [min(_WIDTH_MAX, max(len(row[at]) for row in cells)) for at in range(len(_COLUMNS))]
    widths[-1] = 0
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
