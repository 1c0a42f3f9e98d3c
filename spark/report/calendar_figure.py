"""Days as a grid: empty where nothing was recorded, pale where all was well, else by the cost.

Free of Spark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from batonmq.spark.report.axes import ROW_PX, layout, named, row_axis, time_axis
from batonmq.spark.report.epoch_lines import Day
from batonmq.spark.report.page import Figure
from batonmq.spark.report.palette import GREY, HEAT, NOTHING
from batonmq.spark.report.quantities import DURATION_TICKS_MS, counted, duration_text, plot_text

_DAY_MS: Final = 86_400_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_WEEKDAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_FEW_DAYS: Final = 14
_WIDE_WEEKS: Final = 70

_Cells = list[list[float | None]]


def calendar_figure(days: Sequence[Day]) -> Figure:
    """Weeks as columns, weekdays as rows; a few days only: one row."""
    dates = [_date(day.at_ms) for day in days]
    if (dates[-1] - dates[0]).days < _FEW_DAYS:
        first = min(dates[0], dates[-1] - timedelta(days=6))
        whole = [first + timedelta(days=n) for n in range((dates[-1] - first).days + 1)]
        columns = [f"{each:%a}<br>{each:%b} {each.day}" for each in whole]
        places = [(0, (date - first).days) for date in dates]
        return _grid(
            days, places, [""], columns, 140,
            xaxis={"type": "category", "fixedrange": True, "showgrid": False},
        )  # fmt: skip
    monday = dates[0] - timedelta(days=dates[0].weekday())
    weeks = ((dates[-1] - monday).days // 7) + 1
    mondays = [monday + timedelta(weeks=n) for n in range(weeks)]
    places = [(date.weekday(), (date - monday).days // 7) for date in dates]
    return _grid(
        days, places, _WEEKDAYS, [f"{each:%Y-%m-%d}" for each in mondays],
        300 if weeks <= _WIDE_WEEKS else 240,
        xaxis=time_axis(showgrid=False, showline=False, ticks=""),
    )  # fmt: skip


def group_calendar_figure(groups: Sequence[str], step_days: int, days: Sequence[Day]) -> Figure:
    """Groups as rows, days (or `step_days` together) as columns."""
    rows = {name: row for row, name in enumerate(groups)}
    first = min(day.at_ms for day in days)
    last = max(day.at_ms for day in days)
    step = step_days * _DAY_MS
    starts = list(range(first, last + 1, step))
    places = [(rows[day.group], (day.at_ms - first) // step) for day in days]
    few = len(starts) <= _FEW_DAYS
    columns = [
        f"{_date(at):%b} {_date(at).day}" if few else f"{_date(at):%Y-%m-%d}" for at in starts
    ]
    axis = (
        {"type": "category", "fixedrange": True, "showgrid": False}
        if few
        else time_axis(showgrid=False, showline=False, ticks="")
    )
    height = 90 + max(2, len(groups)) * (ROW_PX if len(groups) < 12 else 24)
    return _grid(days, places, groups, columns, height, step_days=step_days, xaxis=axis)


def _grid(
    days: Sequence[Day],
    places: Sequence[tuple[int, int]],
    rows: Sequence[str],
    columns: Sequence[str],
    height: int,
    *,
    xaxis: dict[str, Any],
    step_days: int = 1,
) -> Figure:
    """Three layers: not recorded, recorded without an outage, and outages by log10 of their ms."""
    calm: _Cells = [[None] * len(columns) for _ in rows]
    cost: _Cells = [[None] * len(columns) for _ in rows]
    calm_text = [[""] * len(columns) for _ in rows]
    cost_text = [[""] * len(columns) for _ in rows]
    for day, (row, column) in zip(days, places, strict=True):
        bad = day.unavailable_ms > 0 or day.outages > 0
        (cost if bad else calm)[row][column] = math.log10(max(1, day.unavailable_ms)) if bad else 0
        (cost_text if bad else calm_text)[row][column] = _hover(day, step_days)
    held = set(places)
    unseen: _Cells = [
        [None if (row, column) in held else 0 for column in range(len(columns))]
        for row in range(len(rows))
    ]
    layers = (
        (unseen, {**named("nothing recorded", GREY), **_flat(GREY), "hoverinfo": "name",
                  "opacity": 0.13}),
        (calm, {**named("no outage", NOTHING), **_flat(NOTHING), "text": calm_text}),
        (cost, {**named("outage, by its length", HEAT[2][1]), **_heat(cost), "text": cost_text}),
    )  # fmt: skip
    gap = 2 if len(columns) <= 120 else 1 if len(columns) <= 400 else 0
    common = {
        "type": "heatmap", "x": list(columns), "y": list(range(len(rows))), "hoverinfo": "text",
        "xgap": gap, "ygap": 2, "hoverongaps": False,
    }  # fmt: skip
    labels = list(rows)
    return Figure(
        [{**common, "z": cells, **look} for cells, look in layers if _filled(cells)],
        layout(
            height, xaxis=xaxis, dragmode=False,
            yaxis=row_axis(labels, range=[len(labels) - 0.5, -0.5], showline=False),
            margin={"l": 10, "r": 10, "t": 10, "b": 40},
        ),
    )  # fmt: skip


def _filled(cells: _Cells) -> list[float]:
    return [value for line in cells for value in line if value is not None]


def _flat(color: str) -> dict[str, Any]:
    return {"showscale": False, "colorscale": [[0, color], [1, color]], "zmin": 0, "zmax": 1}


def _heat(cost: _Cells) -> dict[str, Any]:
    """Colors for log10 of milliseconds, from the whole decade below to the one above."""
    values = _filled(cost) or [0.0]
    low = math.floor(min(values))
    high = max(math.ceil(max(values) + 1e-9), low + 1)
    ticks = [t for t in DURATION_TICKS_MS if low <= math.log10(t) <= high]
    return {
        "colorscale": [list(each) for each in HEAT], "zmin": low, "zmax": high,
        "colorbar": {
            "tickvals": [math.log10(t) for t in ticks],
            "ticktext": [duration_text(t) for t in ticks],
            "thickness": 12, "outlinewidth": 0, "x": 1.01, "len": 1.0, "ypad": 0,
        },
    }  # fmt: skip


def _hover(day: Day, step_days: int) -> str:
    until = f" and {step_days - 1} days more" if step_days > 1 else ""
    whose = f"{plot_text(day.group)} " if day.group else ""
    head = f"<b>{whose}{_date(day.at_ms):%a %Y-%m-%d}{until}</b>"
    if not day.outages and not day.unavailable_ms:
        return f"{head}<br>no outage"
    return (
        f"{head}<br>{duration_text(day.unavailable_ms)} without writes<br>"
        f"{counted(day.outages, 'outage')}, the longest {duration_text(day.longest_ms)}"
    )


def _date(at_ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=at_ms)
