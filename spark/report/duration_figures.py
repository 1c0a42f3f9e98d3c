"""How long changes of master took: their distribution, and which part of them took the time.

Free of Spark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from batonmq.spark.report.axes import (
    ROW_PX,
    count_axis,
    duration_axis,
    layout,
    log_axis,
    named,
    pointed_out,
    row_axis,
)
from batonmq.spark.report.page import Figure
from batonmq.spark.report.palette import GREY, PARTS, kind_colour, kind_label
from batonmq.spark.report.quantities import counted, duration_text, plot_text


def distribution_figure(
    bins: Sequence[tuple[str, int, int]],
    per_decade: int,
    lines: Mapping[str, float | None],
    *,
    what: str = "changes of master",
    title: str = "no writes for",
) -> Figure:
    """Bars over a logarithmic axis. `bins`: (kind, bin, number); bin n begins at 10^(n/per_decade).

    `lines`: name -> ms of what is to be pointed out, as the median.
    """
    data: list[dict[str, Any]] = []
    for kind in dict.fromkeys(kind for kind, _, _ in bins):
        mine = [(at, number) for name, at, number in bins if name == kind]
        data.append(
            {
                "type": "bar", **named(kind_label(kind), kind_colour(kind)),
                "x": [(at + 0.5) / per_decade for at, _ in mine],
                "y": [number for _, number in mine],
                "width": [0.94 / per_decade for _ in mine],
                "hovertext": [
                    f"<b>{plot_text(kind_label(kind))}</b><br>{_bin(at, per_decade)}<br>"
                    f"{counted(number, '').strip()} {plot_text(what)}"
                    for at, number in mine
                ],
                "hoverinfo": "text",
                "marker": {"color": kind_colour(kind), "line": {"width": 0}},
            }
        )  # fmt: skip
    places = [at for _, at, _ in bins]
    most = max(sum(n for _, at, n in bins if at == place) for place in set(places))
    low = math.floor(min(places) / per_decade * 2) / 2
    high = math.ceil((max(places) + 1) / per_decade * 2) / 2
    return Figure(
        data,
        layout(
            320, barmode="stack", bargap=0.05, dragmode=False, **pointed_out(lines, low, high),
            xaxis=log_axis(title, low, max(high, low + 1), showline=True),
            yaxis=count_axis(what, most),
        ),
    )  # fmt: skip


def parts_figure(rows: Sequence[tuple[str, str, Mapping[str, int | None], int | None]]) -> Figure:
    """Stacked bars: (label, hover, part -> ms, whole ms); what is in no part is grey."""
    labels = [label for label, *_ in rows]
    data: list[dict[str, Any]] = []
    rests = [
        max(0, (whole or 0) - sum(value or 0 for value in parts.values()))
        for _, _, parts, whole in rows
    ]
    series = [
        (name, colour, [parts.get(key) or 0 for _, _, parts, _ in rows])
        for key, name, colour in PARTS
    ]
    series.append(("unknown part", GREY, rests))
    for name, colour, values in series:
        if not any(values):
            continue
        shown = [(row, value) for row, value in enumerate(values) if value]
        data.append(
            {
                "type": "bar", "orientation": "h", **named(name, colour), "width": 0.6,
                "x": [value for _, value in shown],
                "y": [row for row, _ in shown],
                "hovertext": [
                    f"<b>{plot_text(rows[row][0])}</b><br>{name}: {duration_text(value)}"
                    f"<br>{plot_text(rows[row][1])}"
                    for row, value in shown
                ],
                "hoverinfo": "text",
                "marker": {"color": colour, "line": {"width": 0}},
            }
        )  # fmt: skip
    longest = max(
        (sum(parts.get(key) or 0 for key, _, _ in PARTS) + rest)
        for (_, _, parts, _), rest in zip(rows, rests, strict=True)
    )
    return Figure(
        data,
        layout(
            62 + max(1, len(rows)) * ROW_PX, barmode="stack", dragmode=False,
            xaxis=duration_axis("", max(1, longest), showline=True),
            yaxis=row_axis(labels),
        ),
    )  # fmt: skip


def _bin(at: int, per_decade: int) -> str:
    low, high = 10 ** (at / per_decade), 10 ** ((at + 1) / per_decade)
    return f"{duration_text(low)} to {duration_text(high)}"
