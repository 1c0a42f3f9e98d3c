"""The size of each group's SyncStateSet over time: one small picture per group, under one time.

Free of Spark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batonmq.spark.report.axes import layout, short_labels, time_axis
from batonmq.spark.report.epoch_lines import SetSize
from batonmq.spark.report.page import Figure
from batonmq.spark.report.palette import RED, SERIES
from batonmq.spark.report.quantities import moment_text, plot_text, plot_time

_GROUP_PX = 62


def set_size_figure(
    groups: Sequence[str], sizes: Sequence[SetSize], first_ms: int, last_ms: int
) -> Figure:
    """Steps from change to change, the last one held to the end; a dot where one broker is left."""
    by_group = {name: [s for s in sizes if s.group == name] for name in groups}
    shown = [name for name in groups if by_group[name]]
    top = max(s.size for s in sizes)
    data: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    notes = []
    lane = 1 / len(shown)
    titles = short_labels(shown, 40)
    for at, name in enumerate(shown):
        steps = by_group[name]
        if steps[-1].at_ms < last_ms:
            steps = [*steps, SetSize(name, last_ms, steps[-1].size, "until the end")]
        axis = "" if at == 0 else str(at + 1)
        high = 1 - at * lane
        axes[f"yaxis{axis}"] = {
            "domain": [high - lane * 0.72, high], "range": [0, top + 0.35], "fixedrange": True,
            "tickmode": "array", "tickvals": list(range(0, top + 1, max(1, top // 3))),
            "showgrid": True, "zeroline": True, "rangemode": "tozero", "automargin": True,
        }  # fmt: skip
        notes.append(
            {
                "xref": "paper", "x": 0, "xanchor": "left", "yref": f"y{axis} domain", "y": 1,
                "yanchor": "bottom", "showarrow": False, "font": {"size": 12},
                "text": f"<b>{plot_text(titles[at])}</b>",
            }
        )  # fmt: skip
        data.append({"name": plot_text(name), "yaxis": f"y{axis}", **_line(steps, top)})
    last = "" if len(shown) == 1 else str(len(shown))
    span = [plot_time(first_ms), plot_time(last_ms)]
    return Figure(
        data,
        layout(
            78 + _GROUP_PX * max(2, len(shown)), xaxis=time_axis(range=span, anchor=f"y{last}"),
            annotations=notes, **axes,
        ),
    )  # fmt: skip


def _line(steps: Sequence[SetSize], top: int) -> dict[str, Any]:
    least = min(s.size for s in steps)
    return {
        "type": "scatter", "mode": "lines+markers" if len(steps) < 80 else "lines",
        "showlegend": False,
        "x": [plot_time(s.at_ms) for s in steps],
        "y": [s.size for s in steps],
        "line": {"shape": "hv", "width": 2, "color": SERIES[0]},
        "marker": {
            "size": 6,
            "color": [RED if s.size <= 1 < top else SERIES[0] for s in steps],
            "symbol": ["diamond" if s.size <= 1 < top else "circle" for s in steps],
        },
        "fill": "tozeroy" if least >= 0 else "none",
        "fillcolor": "rgba(11,127,194,0.14)",
        "hovertext": [_hover(s) for s in steps],
        "hoverinfo": "text",
    }  # fmt: skip


def _hover(s: SetSize) -> str:
    members = "1 broker" if s.size == 1 else f"{s.size} brokers"
    text = f"<br>{plot_text(s.text)}" if s.text else ""
    return f"<b>{plot_text(s.group)}: {members}</b><br>{moment_text(s.at_ms)}{text}"
