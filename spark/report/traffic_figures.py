"""Volumes, sizes, delays and lags as pictures. Plain values in, a `Figure` out.

Free of Spark.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from batonmq.spark.report.plots import (
    GREY,
    SERIES,
    Figure,
    amount_ticks,
    bars,
    log_axis,
    log_histogram,
    named,
    number_axis,
    series_colour,
)
from batonmq.spark.report.quantities import (
    count_text,
    duration_text,
    moment_text,
    plot_text,
    plot_time,
)

_BINS_PER_DECADE: Final = 8
_DATE: Final = {"type": "date"}
#: Lines that may hide each other: of those at one place the wide one is seen on both sides.
_NESTED: Final[Sequence[dict[str, Any]]] = (
    {"width": 9, "color": "#e8a5a0"},
    {"width": 4.5},
    {"width": 1.75},
)


def rates_figure(
    series: Mapping[str, Sequence[tuple[int, float]]],
    width_ms: int,
    title: str,
    text: Callable[[float], str],
) -> Figure:
    """Stacked bars of a rate per series; `series`: name -> (bucket ms, value).

    A series named "other topics" is what the named ones leave; it is grey.
    """
    data = []
    for at, (name, points) in enumerate(series.items()):
        colour = GREY if name == "other topics" else series_colour(at)
        hover = [
            f"<b>{plot_text(name)}</b><br>{moment_text(when)}, {duration_text(width_ms)}"
            f"<br>{text(value)}"
            for when, value in points
        ]
        data.append(bars(
            colour, hover, **named(name, colour), offset=0, width=width_ms,
            x=[plot_time(when) for when, _ in points], y=[value for _, value in points],
        ))  # fmt: skip
    ticks = amount_ticks((value for points in series.values() for _, value in points), whole=False)
    yaxis = number_axis(title, fixedrange=True, **ticks)
    layout = {"height": 320, "barmode": "stack", "bargap": 0, "xaxis": _DATE, "yaxis": yaxis}
    return Figure(data, layout)


def histogram_figure(
    bins: Sequence[tuple[float, int]],
    lines: Mapping[str, float | None],
    title: str,
    ticks: Sequence[float],
    text: Callable[[float], str],
) -> Figure:
    """Messages over a logarithmic axis. `bins`: (value, messages); values below 1 count as 1."""
    merged: dict[int, int] = {}
    for value, messages in bins:
        place = math.floor(math.log10(max(1.0, value)) * _BINS_PER_DECADE + 1e-9)
        merged[place] = merged.get(place, 0) + messages
    series = [(title, SERIES[0], merged)]
    return log_histogram(series, _BINS_PER_DECADE, lines, title, "messages", ticks, text)


def percentiles_figure(
    rows: Sequence[tuple[int, float, float, float]],
    title: str,
    ticks: Sequence[float],
    text: Callable[[float], str],
) -> Figure:
    """Percentiles over time on a logarithmic axis; `rows`: (bucket ms, p50, p95, p99).

    p99 is wide and pale, p95 narrow above it, p50 thin, so one line does not hide another.
    """
    every = [max(1.0, value) for row in rows for value in row[1:]]
    low, high = math.floor(math.log10(min(every)) * 4) / 4, math.log10(max(every)) + 0.1
    times = [plot_time(row[0]) for row in rows]
    data = []
    for name, at, look in zip(("p99", "p95", "p50"), (3, 2, 1), _NESTED, strict=True):
        line = {"color": series_colour(at - 1), **look}
        data.append({
            "type": "scatter", "mode": "lines+markers" if len(rows) < 60 else "lines",
            **named(name, line["color"]), "x": times, "line": line,
            "y": [math.log10(max(1.0, row[at])) for row in rows],
            "marker": {"size": 4 + look["width"], "color": line["color"]},
            "hovertext": [f"{name} {text(row[at])}" for row in rows], "hoverinfo": "text+x",
        })  # fmt: skip
    axis = log_axis(title, low, max(high, low + 1), ticks, text) | {"fixedrange": True}
    layout = {"height": 280, "hovermode": "x unified", "xaxis": _DATE, "yaxis": axis}
    return Figure(data, layout)


def lag_lines_figure(lines: Mapping[str, Sequence[tuple[int, int]]]) -> Figure:
    """Lag of groups from snapshot to snapshot; `lines`: name -> (snapshot ms, lag)."""
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines+markers", **named(name, series_colour(at)),
            "x": [plot_time(when) for when, _ in points], "y": [lag for _, lag in points],
            "line": {"width": 2, "color": series_colour(at)},
            "marker": {"size": 7, "color": series_colour(at)},
            "hovertext": [
                f"<b>{plot_text(name)}</b><br>{moment_text(when)}<br>{count_text(lag)} behind"
                for when, lag in points
            ],
            "hoverinfo": "text",
        }
        for at, (name, points) in enumerate(lines.items())
    ]  # fmt: skip
    ticks = amount_ticks((lag for points in lines.values() for _, lag in points), whole=True)
    axis = number_axis("messages behind", fixedrange=True, **ticks)
    return Figure(data, {"height": 300, "xaxis": _DATE, "yaxis": axis})
