"""Layouts and axes that all pictures share. Plain values in, dicts as plotly.js takes them out.

Free of Spark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from batonmq.spark.report.quantities import DURATION_TICKS_MS, duration_text, plot_text

FONT: Final = 'system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif'
ROW_PX: Final = 34


def layout(height: int, **more: Any) -> dict[str, Any]:
    """A layout without title and legend (the page has them), hover at the nearest mark."""
    return {
        "height": height,
        "font": {"family": FONT, "size": 13},
        "margin": {"l": 10, "r": 16, "t": 28, "b": 42, "autoexpand": True},
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "namelength": -1},
        "dragmode": "zoom",
        "bargap": 0.2,
        **more,
    }  # fmt: skip


def time_axis(**more: Any) -> dict[str, Any]:
    """A horizontal axis of times in UTC. Only it zooms: rows stay where they are."""
    return {
        "type": "date", "showgrid": True, "zeroline": False, "showline": True, "ticks": "outside",
        "automargin": True, "hoverformat": "%Y-%m-%d %H:%M:%S",
        "tickformatstops": [
            {"dtickrange": [None, 1_000], "value": "%H:%M:%S.%L"},
            {"dtickrange": [1_000, 60_000], "value": "%H:%M:%S\n%b %-d, %Y"},
            {"dtickrange": [60_000, 86_400_000], "value": "%H:%M\n%b %-d, %Y"},
            {"dtickrange": [86_400_000, "M1"], "value": "%b %-d\n%Y"},
            {"dtickrange": ["M1", "M12"], "value": "%b\n%Y"},
            {"dtickrange": ["M12", None], "value": "%Y"},
        ],
        **more,
    }  # fmt: skip


def count_axis(title: str, most: int, **more: Any) -> dict[str, Any]:
    """An axis of whole numbers, without halves where they are few."""
    step = {"dtick": 1} if most < 8 else {}
    return number_axis(title, tickformat=",d", fixedrange=True, **step, **more)


def named(text: str, colour: str) -> dict[str, Any]:
    """A trace in the page's legend."""
    return {"name": plot_text(text), "meta": {"legend": text, "colour": colour}}


def row_axis(labels: Sequence[str], **more: Any) -> dict[str, Any]:
    """A vertical axis with one row per label, the first at the top: row n is at y = n."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(labels))),
        "ticktext": [plot_text(label) for label in short_labels(labels)],
        "range": [len(labels) - 0.4, -0.7],
        "fixedrange": True, "showgrid": False, "zeroline": False, "automargin": True,
        **more,
    }  # fmt: skip


def number_axis(title: str = "", **more: Any) -> dict[str, Any]:
    return {
        "title": {"text": plot_text(title), "standoff": 8}, "showgrid": True, "zeroline": False,
        "automargin": True, "rangemode": "tozero", "separatethousands": True, **more,
    }  # fmt: skip


def duration_axis(title: str, longest_ms: float, **more: Any) -> dict[str, Any]:
    """A linear axis of ms whose ticks are written as durations."""
    ticks = round_steps(longest_ms)
    return number_axis(
        title, tickmode="array", tickvals=ticks, ticktext=[duration_text(t) for t in ticks], **more
    )


def log_axis(
    title: str,
    low: float,
    high: float,
    *,
    ticks: Sequence[float] = DURATION_TICKS_MS,
    text: Callable[[float], str] = duration_text,
    **more: Any,
) -> dict[str, Any]:
    """An axis whose values are log10 of a quantity: bars have a width there, and 0 has no place."""
    chosen = [tick for tick in ticks if low <= math.log10(tick) <= high]
    if len(chosen) < 4 and ticks is DURATION_TICKS_MS:
        chosen = [tick for tick in _ROUND_MS if low <= math.log10(tick) <= high]
    return number_axis(
        title, tickmode="array", tickvals=[math.log10(tick) for tick in chosen],
        ticktext=[text(tick) for tick in chosen], range=[low, high], rangemode="normal", **more,
    )  # fmt: skip


def pointed_out(
    lines: Mapping[str, float | None],
    low: float,
    high: float,
    text: Callable[[float], str] = duration_text,
) -> dict[str, Any]:
    """Shapes and annotations of a layout: named lines across a `log_axis` from `low` to `high`."""
    shapes, notes = [], []
    every = sorted((value, name) for name, value in lines.items() if value is not None)
    known = [
        (value, ", ".join(name for _, name in same))
        for value, same in groupby(every, key=lambda each: each[0])
    ]
    for at, (value, name) in enumerate(known):
        x = math.log10(max(1.0, value))
        shapes.append(
            {
                "type": "line", "name": "ink", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1,
                "line": {"width": 1.5, "dash": "dot"},
            }
        )  # fmt: skip
        # Neighbours point away from each other, so that close lines do not hide their names.
        left = at < len(known) - 1 or x > low + 0.8 * (high - low)
        notes.append(
            {
                "x": x, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False,
                "text": f"{plot_text(name)} {text(value)}", "font": {"size": 12},
                "xanchor": "right" if left else "left", "xshift": 2 if left else -2,
            }
        )  # fmt: skip
    return {"shapes": shapes, "annotations": notes}


_ROUND_MS: Final = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 60_000,
    120_000, 300_000, 600_000, 1_200_000, 1_800_000, 3_600_000, 7_200_000, 18_000_000, 36_000_000,
    86_400_000,
)  # fmt: skip


def round_steps(longest_ms: float, most: int = 7) -> list[int]:
    """Round durations from 0 to at least `longest_ms`."""
    step = next((each for each in _ROUND_MS if longest_ms / each <= most), 0)
    if not step:
        step = _ROUND_MS[-1] * math.ceil(longest_ms / most / _ROUND_MS[-1])
    return [n * step for n in range(math.ceil(longest_ms / step) + 1)]


_LABEL_MOST: Final = 24


def short(label: str, most: int = _LABEL_MOST) -> str:
    """A label that leaves room for the picture on a phone."""
    return label if len(label) <= most else f"{label[: most - 1]}…"


def short_labels(labels: Sequence[str], most: int = _LABEL_MOST) -> list[str]:
    """The same for several labels, so that those that differ still do where that can be.

    What is cut off is the end, or else what all long ones have in common.
    """
    cut = [short(label, most) for label in labels]
    long = [label for label in dict.fromkeys(labels) if len(label) > most]
    if len(set(cut)) == len(set(labels)) or not long:
        return cut
    head, tail = _common(long), _common([label[::-1] for label in long])
    tail = min(tail, min(map(len, long)) - head)
    words = head  # whole words and numbers are easier to read
    while words and long[0][words - 1].isalnum():
        words -= 1
    for begin in (words, head):
        cut = [
            label if len(label) <= most else _around(label, begin, len(label) - tail, most)
            for label in labels
        ]
        if len(set(cut)) == len(set(labels)):
            break
    return cut


def _common(labels: Sequence[str]) -> int:
    """How many characters all begin with."""
    least, greatest = min(labels), max(labels)
    same = (at for at, (a, b) in enumerate(zip(least, greatest, strict=False)) if a != b)
    return next(same, min(len(least), len(greatest)))


def _around(label: str, begin: int, end: int, most: int) -> str:
    """`label[begin:end]` and as much of the label's beginning as there is room for."""
    core = f"…{label[begin:end]}" + ("…" if end < len(label) else "")
    if len(core) > most:
        return f"…{core[1 - most :]}"
    return label[: min(begin, most - len(core))] + core
