"""The time line of masters: one row per group, one colour per broker, red where writes failed.

An outage of a second is far narrower than a pixel of a day, so every change of master has a mark of
constant size above its row as well. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from batonmq.spark.report.axes import ROW_PX, layout, named, row_axis, time_axis
from batonmq.spark.report.epoch_lines import Change, Mastership
from batonmq.spark.report.page import Figure
from batonmq.spark.report.palette import KINDS, RED, kind_label, series_colour
from batonmq.spark.report.quantities import (
    UNKNOWN,
    count_text,
    duration_text,
    moment_text,
    plot_text,
    plot_time,
)

_LABELLED_BARS: Final = 200
_BAR: Final = 0.52


def mastership_figure(
    groups: Sequence[str],
    masterships: Sequence[Mastership],
    changes: Sequence[Change],
    open_since: dict[str, int],
    first_ms: int,
    last_ms: int,
) -> Figure:
    """`open_since`: groups without a master at the end, and since when."""
    rows = {name: row for row, name in enumerate(groups)}
    slack = max(1, (last_ms - first_ms) // 50)
    # A master since the last minute of a long history is seen, too.
    masterships = [replace(m, end_ms=last_ms + slack) if m.is_open else m for m in masterships]
    data = []
    for at, broker in enumerate(sorted({m.broker_id for m in masterships})):
        its = [m for m in masterships if m.broker_id == broker]
        labelled = len(masterships) <= _LABELLED_BARS
        data.append(_bars(f"broker {broker}", series_colour(at), its, rows, labelled=labelled))
    gaps = _gaps(changes, open_since, rows, last_ms)
    if gaps is not None:
        data.append(gaps)
    for kind in sorted({c.kind for c in changes}, key=_order):
        data.append(_marks(kind, [c for c in changes if c.kind == kind], rows))
    span = [plot_time(first_ms - slack), plot_time(last_ms + slack)]
    height = 62 + max(2, len(groups)) * ROW_PX
    return Figure(
        data,
        layout(
            height, barmode="overlay", bargap=0, xaxis=time_axis(range=span),
            yaxis=row_axis(groups), uniformtext={"mode": "hide", "minsize": 10},
        ),
    )  # fmt: skip


def _bars(
    name: str, colour: str, them: list[Mastership], rows: dict[str, int], *, labelled: bool
) -> dict[str, Any]:
    them = [m for m in them if m.group in rows]
    bars: dict[str, Any] = {
        "type": "bar", "orientation": "h", **named(name, colour), "offsetgroup": "master",
        "width": _BAR,
        "base": [plot_time(m.start_ms) for m in them],
        "x": [m.end_ms - m.start_ms for m in them],
        "y": [rows[m.group] for m in them],
        "hovertext": [_told(m) for m in them],
        "hoverinfo": "text",
        "marker": {"color": colour, "line": {"width": 0}},
    }  # fmt: skip
    if labelled:
        bars |= {
            "text": [str(m.broker_id) for m in them], "textposition": "inside",
            "insidetextanchor": "middle", "textangle": 0, "constraintext": "inside",
            "insidetextfont": {"color": "#10151a", "size": 12},
        }  # fmt: skip
    return bars


def _told(m: Mastership) -> str:
    span = f"{moment_text(m.start_ms)} to {moment_text(m.end_ms)}"
    if m.is_bin:
        return (
            f"<b>{plot_text(m.group)}</b><br>{span}<br>mostly broker {m.broker_id}, "
            f"of {count_text(m.masterships)} masterships in this time"
        )
    address = f" at {plot_text(m.address)}" if m.address else ""
    head = (
        f"<b>{plot_text(m.group)}: broker {m.broker_id}</b>{address}<br>"
        f"epoch {UNKNOWN if m.epoch is None else m.epoch}<br>"
    )
    if m.is_open:
        return f"{head}since {moment_text(m.start_ms)}, still master at the end"
    ended = plot_text(f"ended by {kind_label(m.ended_by)}")
    return f"{head}{span}<br>{duration_text(m.end_ms - m.start_ms)}, {ended}"


def _gaps(
    changes: Sequence[Change], open_since: dict[str, int], rows: dict[str, int], last_ms: int
) -> dict[str, Any] | None:
    spans = [
        (
            rows[c.group],
            c.at_ms,
            c.end_ms,
            f"<b>{plot_text(c.group)}: no writes</b><br>{_change(c)}",
        )
        for c in changes
        if c.group in rows and c.unavailable_ms and c.end_ms is not None
    ] + [
        (
            rows[group],
            since,
            last_ms,
            f"<b>{plot_text(group)}: no master</b><br>since {moment_text(since)}, "
            f"for {duration_text(last_ms - since)} and not over",
        )
        for group, since in open_since.items()
        if group in rows
    ]
    if not spans:
        return None
    return {
        "type": "bar", "orientation": "h", **named("no writes", RED), "width": _BAR + 0.16,
        "base": [plot_time(at) for _, at, _, _ in spans],
        "x": [end - at for _, at, end, _ in spans],
        "y": [row for row, _, _, _ in spans],
        "hovertext": [text for *_, text in spans],
        "hoverinfo": "text",
        "marker": {"color": RED, "line": {"width": 0}},
    }  # fmt: skip


def _marks(kind: str, them: list[Change], rows: dict[str, int]) -> dict[str, Any]:
    label, colour, symbol = KINDS.get(kind, (kind_label(kind), "#777777", "circle"))
    them = [c for c in them if c.group in rows]
    return {
        "type": "scatter", "mode": "markers", **named(label, colour),
        "x": [plot_time(c.at_ms) for c in them],
        "y": [rows[c.group] - 0.42 for c in them],
        "hovertext": [
            f"<b>{plot_text(c.group)}: {plot_text(label)}</b><br>{_change(c)}" for c in them
        ],
        "hoverinfo": "text",
        "marker": {"color": colour, "symbol": symbol, "size": 9, "line": {"width": 0}},
        "cliponaxis": False,
    }  # fmt: skip


def _change(c: Change) -> str:
    cost = "how long is not known" if c.unavailable_ms is None else duration_text(c.unavailable_ms)
    cause = f"<br>{plot_text(c.cause)}" if c.cause else ""
    return (
        f"{moment_text(c.at_ms)}, {cost}<br>broker {c.before or UNKNOWN} → {c.master or UNKNOWN}, "
        f"epoch {UNKNOWN if c.epoch is None else c.epoch}{cause}"
    )


def _order(kind: str) -> int:
    names = list(KINDS)
    return names.index(kind) if kind in names else len(names)
