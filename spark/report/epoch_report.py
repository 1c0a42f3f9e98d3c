"""The page on the epochs of broker groups: who was master when, what it cost, what is wrong.

Reads the tables of `epoch_history`. The words are in
`templates/epoch.html`. Free of Spark.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from batonmq.spark.report import epoch_figures as figures
from batonmq.spark.report import epoch_tables
from batonmq.spark.report.epoch_tables import EpochTables, Row
from batonmq.spark.report.page import render
from batonmq.spark.report.plots import PARTS, Figure, kind_label
from batonmq.spark.report.quantities import counted, duration_text, moment_text

_WORST_DRAWN: Final = 12
_INPUTS: Final = ("history", "history_parquet", "stores", "since", "until")


def epoch_page(tables: EpochTables, summary: Mapping[str, Any]) -> str:
    """The page as HTML.

    `summary`: what `epoch_history` writes as summary.json; of it `inputs`, `generated_at` and
    `version` are shown, the numbers come from the tables. Raises OSError.
    """
    groups, kinds, dearest = tables.groups(), tables.kinds(), tables.dearest()
    for row in dearest:
        row["story"] = figures.story_id(row)
    first_ms = min((group["first_ms"] for group in groups if group["first_ms"]), default=None)
    last_ms = max((group["last_ms"] for group in groups if group["last_ms"]), default=None)
    last_ms = _last_ms(last_ms, summary)
    changes = [kind for kind in kinds if kind["kind"] != "first_election"]
    shown = sorted(groups[: epoch_tables.GROUPS_SHOWN], key=lambda group: group["name"])
    return render("epoch.html", {
        "generated_at": "", "version": "", **summary,
        "inputs": dict.fromkeys(_INPUTS) | summary.get("inputs", {}), "groups": groups,
        "shown": shown, "kinds": changes, "dearest": dearest,
        "unclean": sum(kind["unclean"] for kind in kinds),
        "worst": next((row for row in dearest if _costs_most(row, dearest)), None),
        "first_ms": first_ms, "last_ms": last_ms,
        **tables.totals(), "cuts_listed": tables.listed("truncations"),
        "findings_listed": tables.listed("findings"),
        "leaders_listed": tables.listed("controllers"),
        **_pictures(tables, shown, changes, dearest, first_ms, last_ms),
    })  # fmt: skip


def _costs_most(row: Row, rows: Sequence[Row]) -> bool:
    return bool(row["took_ms"]) and row["took_ms"] == max(each["took_ms"] or 0 for each in rows)


def _last_ms(last_ms: int | None, summary: Mapping[str, Any]) -> int | None:
    """The time of the last event: the newest mastership ends later than any row of a table."""
    if last_ms is None or summary.get("inputs", {}).get("until"):
        return last_ms
    ends = [group["last_event"] for group in summary.get("groups", ()) if group.get("last_event")]
    return max([last_ms, *(int(datetime.fromisoformat(at).timestamp() * 1000) for at in ends)])


def _pictures(
    tables: EpochTables,
    shown: Sequence[Row],
    kinds: Sequence[Row],
    dearest: Sequence[Row],
    first_ms: int | None,
    last_ms: int | None,
) -> dict[str, Any]:
    """Each picture by its name, None where there is nothing to draw; and what was thinned."""
    drawn: dict[str, Any] = dict.fromkeys(
        ("masters_figure", "distribution", "typical", "worst_figure", "calendar", "sets_figure")
    ) | {"binned": [], "thinned_sets": [], "step_days": 1, "rows_each": 0}
    if first_ms is None or last_ms is None:
        return drawn
    last_ms = max(last_ms, first_ms + 60_000)
    lanes, marks = tables.masterships(shown, first_ms, last_ms), tables.marks(shown)
    if lanes or marks:
        drawn["masters_figure"] = figures.mastership_figure(lanes, marks, shown, first_ms, last_ms)
    bins, median_ms, p99_ms = tables.durations()
    if bins:
        points = {"median": median_ms, "p99": p99_ms}
        drawn["distribution"] = figures.distribution_figure(bins, points)
    sets = tables.set_sizes(shown, first_ms, last_ms)
    if sets:
        drawn["sets_figure"] = figures.set_size_figure(sets, first_ms, last_ms)
    drawn["step_days"], cells = tables.days(shown)
    if cells:
        drawn["calendar"] = figures.calendar_figure(shown, drawn["step_days"], cells)
    return drawn | {
        "typical": _typical(kinds),
        "worst_figure": _worst(dearest),
        "binned": [lane.group for lane in lanes if lane.binned],
        "thinned_sets": [lane.group for lane in sets if lane.binned],
        "rows_each": epoch_tables.rows_each(len(shown)),
    }


def _typical(kinds: Sequence[Row]) -> Figure | None:
    """The medians of the parts of each kind."""
    rows = []
    for kind in kinds:
        if any(kind["parts_ms"].values()):
            text = f"medians over {counted(kind['number'], 'change')}"
            rows.append((kind_label(kind["kind"]), text, kind["parts_ms"], None, ""))
    return figures.parts_figure(rows) if rows else None


def _worst(dearest: Sequence[Row]) -> Figure | None:
    """The parts of the longest changes."""
    longest = sorted((row for row in dearest if row["took_ms"]), key=lambda row: -row["took_ms"])
    rows = []
    for row in longest[:_WORST_DRAWN]:
        parts = {name: row[name] for name, *_ in PARTS} | {"detect_ms": row["detect_part_ms"]}
        if row["idle"]:
            parts["first_ack_ms"] = None
        text = ", ".join((
            row["group"], moment_text(row["elected_at"]), kind_label(row["kind"]),
            duration_text(row["took_ms"]),
        ))  # fmt: skip
        label = f"{row['group']} #{row['master_epoch']}"
        rows.append((label, text, parts, row["took_ms"], row["story"]))
    return figures.parts_figure(rows) if rows else None
