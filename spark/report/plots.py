"""Colours, axes and lines that pictures share. Plain values in, dicts as plotly.js takes them out.

Colour-blind people can distinguish the colours, on white and on black (after Okabe and Ito). What a
colour means, a symbol, a position or a word means, too. Free of Spark.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from batonmq.spark.report.quantities import (
    DURATION_TICKS_MS,
    ROUND_MS,
    count_text,
    duration_text,
    plot_text,
)

GREY: Final = "#8a94a0"
RED: Final = "#d4213d"
_BLUE, _ORANGE, _GREEN, _PINK, _SKY = "#0b7fc2", "#e69f00", "#0a9a72", "#cc79a7", "#63bdf0"
#: For brokers, topics, groups: what has no order and no meaning of its own. No red among them.
SERIES: Final = (_BLUE, _ORANGE, _GREEN, _PINK, _SKY, "#7a6fd0", "#a5a33a", "#9c6b4a")
#: Kinds of elections: label, colour, symbol on the time line.
KINDS: Final[dict[str, tuple[str, str, str]]] = {
    "failover": ("failover", RED, "triangle-down"),
    "unclean_election": ("unclean election", "#5b0f4d", "x"),
    "planned_switch": ("planned switch", _BLUE, "diamond"),
    "operator_election": ("election by an operator", _ORANGE, "square"),
    "first_election": ("first election", GREY, "circle"),
}
#: Parts of a failover, in their order: column, label, colour.
PARTS: Final = (
    ("detect_ms", "detect", _ORANGE),
    ("elect_ms", "elect", _SKY),
    ("role_ms", "change role", _GREEN),
    ("open_ms", "open for writes", _PINK),
    ("first_ack_ms", "first acknowledgement", _BLUE),
)
#: From little to much; the lightness falls all along.
HEAT: Final = ((0.0, "#fbe08a"), (0.35, "#f4a23a"), (0.7, "#d9472b"), (1.0, "#8c1226"))
#: A day, an hour with data and without anything to show.
NOTHING: Final = "#b7cfd9"
ROW_PX: Final = 34
_NOTE_PX: Final = 14
_LABEL_MOST: Final = 24
_STEPS_MOST: Final = 7


@dataclass(frozen=True, slots=True)
class Figure:
    """What plotly.js draws: its `data` and `layout`, as JSON can hold them.

    `page.js` adds what all pictures share. A trace whose `meta` has `legend` (plain text) and
    `colour` is named in the page's legend; a mark whose `customdata` is an id leads there.
    """

    data: list[dict[str, Any]]
    layout: dict[str, Any]


def series_colour(index: int) -> str:
    return SERIES[index % len(SERIES)]


def kind_label(kind: str | None) -> str:
    if kind is None:
        return "unknown"
    return KINDS[kind][0] if kind in KINDS else kind.replace("_", " ")


def kind_colour(kind: str) -> str:
    return KINDS[kind][1] if kind in KINDS else GREY


def named(text: str, colour: str) -> dict[str, Any]:
    """A trace in the page's legend."""
    return {"name": plot_text(text), "meta": {"legend": text, "colour": colour}}


def bars(colour: str, hover: Sequence[str], **more: Any) -> dict[str, Any]:
    """A trace of bars in one colour."""
    marker = {"color": colour, "line": {"width": 0}}
    return {"type": "bar", "hovertext": hover, "hoverinfo": "text", "marker": marker, **more}


def row_axis(labels: Sequence[str], **more: Any) -> dict[str, Any]:
    """A vertical axis with one row per label, the first at the top: row n is at y = n."""
    return {
        "tickmode": "array", "tickvals": list(range(len(labels))),
        "ticktext": [folded(label) for label in labels], "range": [len(labels) - 0.4, -0.7],
        "fixedrange": True, "showgrid": False, **more,
    }  # fmt: skip


def folded(label: str) -> str:
    """A label in two short lines, which leave room for the picture on a phone.

    Of a longer one the middle is left out: names differ at their ends.
    """
    most = 2 * _LABEL_MOST
    if len(label) > most:
        label = f"{label[:_LABEL_MOST]}…{label[len(label) - _LABEL_MOST + 1 :]}"
    lines = [label[:_LABEL_MOST], label[_LABEL_MOST:]]
    return "<br>".join(plot_text(line) for line in lines if line)


def number_axis(title: str = "", **more: Any) -> dict[str, Any]:
    return {
        "title": {"text": plot_text(title), "standoff": 8}, "rangemode": "tozero",
        "separatethousands": True, **more,
    }  # fmt: skip


def amount_ticks(values: Iterable[float], *, whole: bool) -> dict[str, Any]:
    """How the ticks of an axis of amounts are written: no thousandths, and whole ones of few."""
    most = max(values, default=0)
    if whole and most <= 7:
        return {"dtick": 1, "tickformat": "d"}
    return {"tickformat": "~s" if most >= 1000 else "~g"}


def duration_axis(longest_ms: float) -> dict[str, Any]:
    """A linear axis of ms whose ticks are written as durations."""
    ticks = round_steps(longest_ms)
    return number_axis(
        tickmode="array", tickvals=ticks, ticktext=[duration_text(t) for t in ticks], showline=True
    )


def round_steps(longest_ms: float) -> list[int]:
    """A few round durations from 0 to at least `longest_ms`."""
    step = next((each for each in ROUND_MS if longest_ms / each <= _STEPS_MOST), 0)
    if not step:
        step = ROUND_MS[-1] * math.ceil(longest_ms / _STEPS_MOST / ROUND_MS[-1])
    return [n * step for n in range(math.ceil(longest_ms / step) + 1)]


def log_axis(
    title: str,
    low: float,
    high: float,
    ticks: Sequence[float] = DURATION_TICKS_MS,
    text: Callable[[float], str] = duration_text,
) -> dict[str, Any]:
    """An axis whose values are log10 of a quantity: bars have a width there, and 0 has no place."""
    chosen = [tick for tick in ticks if low <= math.log10(tick) <= high]
    if len(chosen) < 4 and ticks is DURATION_TICKS_MS:
        chosen = [tick for tick in ROUND_MS if low <= math.log10(tick) <= high]
    return number_axis(
        title, tickmode="array", tickvals=[math.log10(tick) for tick in chosen],
        ticktext=[text(tick) for tick in chosen], range=[low, high], rangemode="normal",
        showline=True,
    )  # fmt: skip


def pointed_out(
    lines: Mapping[str, float | None],
    low: float,
    high: float,
    text: Callable[[float], str] = duration_text,
) -> dict[str, Any]:
    """Shapes and annotations of a layout: named lines across a `log_axis` from `low` to `high`.

    Those at one place are one line with all their names.
    """
    at: dict[float, list[str]] = {}
    for name, value in lines.items():
        if value is not None:
            at.setdefault(value, []).append(name)
    shapes, notes = [], []
    for nth, (value, names) in enumerate(sorted(at.items()), 1):
        x = math.log10(max(1.0, value))
        shapes.append(
            {
                "type": "line", "name": "ink", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1,
                "line": {"width": 1.5, "dash": "dot"},
            }
        )  # fmt: skip
        # Neighbours point away from each other, so that close lines do not hide their names.
        left = nth < len(at) or x > low + 0.8 * (high - low)
        notes.append(
            {
                "x": x, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False,
                "text": f"{plot_text(', '.join(names))} {text(value)}", "font": {"size": 12},
                "xanchor": "right" if left else "left", "xshift": 2 if left else -2,
                "yshift": _NOTE_PX * (len(at) - nth),
            }
        )  # fmt: skip
    # Each name has a line of its own: those of neighbours would hide each other.
    return {"shapes": shapes, "annotations": notes, "margin": {"t": 16 + _NOTE_PX * len(at)}}


def log_histogram(
    series: Sequence[tuple[str, str, Mapping[int, int]]],
    per_decade: int,
    lines: Mapping[str, float | None],
    title: str,
    counted: str,
    ticks: Sequence[float] = DURATION_TICKS_MS,
    text: Callable[[float], str] = duration_text,
) -> Figure:
    """Stacked bars over a logarithmic axis. `series`: label, colour, bin -> number; bin n begins at
    10^(n / per_decade). `counted`: what the numbers are of; `lines`: what is pointed out."""
    data = []
    for label, colour, bins in series:
        hover = [
            f"<b>{plot_text(label)}</b><br>{text(10 ** (at / per_decade))} to "
            f"{text(10 ** ((at + 1) / per_decade))}<br>{count_text(number)} {counted}"
            for at, number in bins.items()
        ]
        data.append(bars(
            colour, hover, **named(label, colour), x=[(at + 0.5) / per_decade for at in bins],
            y=list(bins.values()), width=0.94 / per_decade,
        ))  # fmt: skip
    places = {at for *_, bins in series for at in bins}
    low = math.floor(min(places) / per_decade * 2) / 2
    high = max(low + 1, math.ceil((max(places) + 1) / per_decade * 2) / 2)
    heights = [sum(bins.get(at, 0) for *_, bins in series) for at in places]
    layout = {
        "height": 320, "barmode": "stack", "bargap": 0.05, "dragmode": False,
        **pointed_out(lines, low, high, text), "xaxis": log_axis(title, low, high, ticks, text),
        "yaxis": number_axis(counted, fixedrange=True, **amount_ticks(heights, whole=True)),
    }  # fmt: skip
    return Figure(data, layout)
