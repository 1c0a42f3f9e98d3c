"""Volumes, sizes, delays, queues and lags as pictures. Plain values in, a `Figure` out.

Free of Spark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from batonmq.spark.report.axes import (
    ROW_PX,
    layout,
    log_axis,
    named,
    number_axis,
    pointed_out,
    row_axis,
    time_axis,
)
from batonmq.spark.report.page import Figure
from batonmq.spark.report.palette import GREY, HEAT, NOTHING, SERIES, series_colour
from batonmq.spark.report.quantities import (
    count_text,
    duration_text,
    moment_text,
    plot_text,
    plot_time,
)

_THOUSAND: Final = 1000
_FEW: Final = 6
_COLUMNS_NAMED: Final = 20


def amount_ticks(values: Iterable[float], *, whole: bool) -> dict[str, Any]:
    """How the ticks of an axis of amounts are written: no thousandths, and whole ones of few."""
    most = max(values, default=0)
    if whole and most <= _FEW:
        return {"dtick": 1, "tickformat": "d"}
    return {"tickformat": "~s" if most >= _THOUSAND else "~g"}


def rates_figure(
    series: Mapping[str, Sequence[tuple[int, float]]],
    width_ms: int,
    title: str,
    text: Callable[[float], str],
) -> Figure:
    """Stacked bars of a rate per series; `series`: name -> (bucket ms, value). Last one is grey.

    A series named "other topics" is what the named ones leave.
    """
    data: list[dict[str, Any]] = []
    for at, (name, points) in enumerate(series.items()):
        colour = GREY if name == "other topics" else series_colour(at)
        data.append(
            {
                "type": "bar", **named(name, colour), "offset": 0,
                "x": [plot_time(when) for when, _ in points],
                "y": [value for _, value in points],
                "width": [width_ms for _ in points],
                "hovertext": [
                    f"<b>{plot_text(name)}</b><br>{moment_text(when)}, {duration_text(width_ms)}"
                    f"<br>{text(value)}"
                    for when, value in points
                ],
                "hoverinfo": "text", "marker": {"color": colour, "line": {"width": 0}},
            }
        )  # fmt: skip
    rates = amount_ticks((value for points in series.values() for _, value in points), whole=False)
    return Figure(
        data,
        layout(
            320, barmode="stack", bargap=0, xaxis=time_axis(),
            yaxis=number_axis(title, fixedrange=True, **rates),
        ),
    )  # fmt: skip


def histogram_figure(
    bins: Sequence[tuple[float, int]],
    lines: Mapping[str, float | None],
    title: str,
    *,
    ticks: Sequence[float],
    text: Callable[[float], str],
    per_decade: int = 8,
) -> Figure:
    """Messages over a logarithmic axis. `bins`: (value, messages); values below 1 count as 1."""
    merged: dict[int, int] = {}
    for value, messages in bins:
        place = math.floor(math.log10(max(1.0, value)) * per_decade + 1e-9)
        merged[place] = merged.get(place, 0) + messages
    places = sorted(merged)
    low, high = places[0] / per_decade, (places[-1] + 1) / per_decade
    if high - low < 1:
        low, high = max(0.0, low - 0.5), high + 0.5
    bars = {
        "type": "bar", "name": "messages",
        "x": [(place + 0.5) / per_decade for place in places],
        "y": [merged[place] for place in places],
        "width": [0.94 / per_decade for _ in places],
        "hovertext": [
            f"{text(10 ** (place / per_decade))} to {text(10 ** ((place + 1) / per_decade))}<br>"
            f"{count_text(merged[place])} messages"
            for place in places
        ],
        "hoverinfo": "text", "marker": {"color": SERIES[0], "line": {"width": 0}},
    }  # fmt: skip
    return Figure(
        [bars],
        layout(
            300, dragmode=False, bargap=0.05, **pointed_out(lines, low, high, text),
            xaxis=log_axis(title, low, high, ticks=ticks, text=text, showline=True),
            yaxis=number_axis(
                "messages", fixedrange=True, **amount_ticks(merged.values(), whole=True)
            ),
        ),
    )  # fmt: skip


def percentiles_figure(
    lines: Mapping[str, Sequence[tuple[int, float]]],
    title: str,
    *,
    ticks: Sequence[float],
    text: Callable[[float], str],
) -> Figure:
    """Percentiles over time on a logarithmic axis; `lines`: name -> (bucket ms, value)."""
    every = [max(1.0, value) for points in lines.values() for _, value in points]
    low, high = math.floor(math.log10(min(every)) * 4) / 4, math.log10(max(every)) + 0.1
    dashes = ("solid", "dash", "dot")
    data = [
        {
            "type": "scatter", "mode": "lines+markers" if len(points) < 60 else "lines",
            **named(name, series_colour(at)),
            "x": [plot_time(when) for when, _ in points],
            "y": [math.log10(max(1.0, value)) for _, value in points],
            "line": {"width": 2, "color": series_colour(at), "dash": dashes[at % 3]},
            "marker": {"size": 5, "color": series_colour(at), "symbol": "circle"},
            "hovertext": [
                f"{plot_text(name)} {text(value)}<br>{moment_text(when)}" for when, value in points
            ],
            "hoverinfo": "text",
        }
        for at, (name, points) in enumerate(lines.items())
    ]  # fmt: skip
    axis = log_axis(title, low, max(high, low + 1), ticks=ticks, text=text, fixedrange=True)
    return Figure(data, layout(280, xaxis=time_axis(), yaxis=axis))


def queue_heat_figure(
    topics: Sequence[tuple[str, Sequence[tuple[str, int, float]]]],
) -> Figure:
    """Topics as rows, their queues as columns, coloured by times an even share.

    `topics`: (name, [(queue, messages, times even)]). The scale ends at 3 times: hotter is as red.
    """
    columns = max(len(queues) for _, queues in topics)
    z: list[list[float | None]] = []
    texts: list[list[str]] = []
    for name, queues in topics:
        rest = columns - len(queues)
        z.append([*(times for _, _, times in queues), *([None] * rest)])
        texts.append(
            [
                f"<b>{plot_text(name)}</b><br>{plot_text(queue)}<br>{count_text(messages)} messages"
                f"<br>{times:.2f} times an even share"
                for queue, messages, times in queues
            ]
            + [""] * rest
        )
    hot = [[0.45, HEAT[0][1]], [0.7, HEAT[1][1]], [1, HEAT[3][1]]]
    scale = [[0, "#5b6e7a"], [1 / 3, NOTHING], *hot]
    heat = {
        "type": "heatmap", "name": "queues", "z": z, "text": texts, "hoverinfo": "text",
        "x": list(range(columns)), "y": list(range(len(topics))), "hoverongaps": False,
        "zmin": 0, "zmax": 3, "colorscale": scale, "xgap": 2 if columns < 100 else 0, "ygap": 2,
        "colorbar": {
            "tickvals": [0, 1, 2, 3], "ticktext": ["none", "even", "2×", "3× or more"],
            "thickness": 12, "outlinewidth": 0, "ypad": 0, "x": 1.01,
        },
    }  # fmt: skip
    return Figure(
        [heat],
        layout(
            110 + max(2, len(topics)) * ROW_PX, dragmode=False,
            xaxis=number_axis(
                "queues of the topic, over all brokers", fixedrange=True, showgrid=False,
                tickformat=",d", showticklabels=columns > 1, range=[-0.5, columns - 0.5],
                **({"dtick": 1} if columns <= _COLUMNS_NAMED else {}),
            ),
            yaxis=row_axis(
                [name for name, _ in topics], range=[len(topics) - 0.5, -0.5], showline=False
            ),
        ),
    )  # fmt: skip


def lag_figure(rows: Sequence[tuple[str, str, int, int | None]]) -> Figure:
    """Bars of messages behind; `rows`: (group, topic, lag, age of the oldest ms)."""
    bars = {
        "type": "bar", "orientation": "h", "name": "messages behind", "width": 0.6,
        "x": [lag for _, _, lag, _ in rows],
        "y": list(range(len(rows))),
        "text": [
            f" {count_text(lag)}" + (f", oldest {duration_text(age)}" if age is not None else "")
            for _, _, lag, age in rows
        ],
        "textposition": "auto", "cliponaxis": False,
        "hovertext": [
            f"<b>{plot_text(group)}</b> on {plot_text(topic)}<br>{count_text(lag)} messages behind"
            f"<br>the oldest waits for {duration_text(age)}"
            for group, topic, lag, age in rows
        ],
        "hoverinfo": "text", "marker": {"color": SERIES[1], "line": {"width": 0}},
        "insidetextfont": {"color": "#10151a"},
    }  # fmt: skip
    return Figure(
        [bars],
        layout(
            80 + max(1, len(rows)) * ROW_PX,
            dragmode=False,
            xaxis=number_axis(
                "messages behind", showline=True,
                **amount_ticks((lag for _, _, lag, _ in rows), whole=True),
            ),
            yaxis=row_axis([f"{group} · {topic}" for group, topic, _, _ in rows]),
        ),
    )  # fmt: skip


def lag_lines_figure(lines: Mapping[str, Sequence[tuple[int, int]]]) -> Figure:
    """Lag of groups from snapshot to snapshot; `lines`: name -> (snapshot ms, lag)."""
    data = [
        {
            "type": "scatter", "mode": "lines+markers", **named(name, series_colour(at)),
            "x": [plot_time(when) for when, _ in points],
            "y": [lag for _, lag in points],
            "line": {"width": 2, "color": series_colour(at)},
            "marker": {"size": 7, "color": series_colour(at), "symbol": "circle"},
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
    return Figure(data, layout(300, xaxis=time_axis(), yaxis=axis))
