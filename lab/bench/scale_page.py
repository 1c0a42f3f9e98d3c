"""The figures of `lab.bench.scale` as one page. Plain values in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from batonmq.spark.report.page import Figure, render
from batonmq.spark.report.plots import log_axis, named, series_colour
from batonmq.spark.report.quantities import plot_text
from batonmq.spark.steps.sql import put
from lab.bench.report import number

_TEMPLATES: Final = Path(__file__).parent / "templates"
#: What is measured: the column's title, what it means, and whether the picture shows it.
MEASURES: Final[dict[str, tuple[str, str, bool]]] = {
    "per_second": ("sends/s", "acknowledged by both replicas", True),
    "mb_per_second": ("MB/s", "of bodies", False),
    "read_mb_per_second": ("MB/s read", "of bodies, from the first message on", True),
    "master_us": ("master, µs", "processor time of the masters for one send", True),
    "slave_us": ("slave, µs", "the same of the slaves", True),
    "member_us": ("master, µs a member", "its processor time for all that a member does", True),
    "memory_mib": ("memory, MiB", "anonymous memory of all servers", True),
    "connection_kib": ("KiB a connection", "what a connection adds to the master's", False),
    "wait_ms": ("longest wait, ms", "of a light request meanwhile: a long turn delays it", True),
    "gap_ms": ("longest gap, ms", "between two acknowledgements", False),
    "first_wait_ms": ("longest wait at first, ms", "while the queues were made", False),
    "first_gap_ms": ("longest gap at first, ms", "while the queues were made", False),
    "joins_per_second": ("joins/s", "connections with their first heartbeat", True),
    "notice_ms": ("notified after, ms", "one of each group left: until all others knew", True),
    "rebalance_ms": ("rebalanced after, ms", "until they had the new list, too", True),
    "failover_ms": ("failover, ms", "kill -9 of the master to the first acked write", True),
    "back_s": ("back after, s", "the killed broker, started again, is in the set", True),
}


def write_scale_page(path: str, found: dict[str, Any]) -> None:
    """`found`: what `lab.bench.scale.measured` returned."""
    noise = [
        v["others_percent"]
        for s in found["sweeps"]
        for _, v in s["points"]
        if "others_percent" in v
    ]
    sweeps, shown = [], set()
    for sweep in found["sweeps"]:
        keys = [key for key in MEASURES if any(key in values for _, values in sweep["points"])]
        shown.update(keys)
        rows = [
            {"size": f"{size:,}"}
            | {key: number(values[key]) if key in values else "" for key in keys}
            for size, values in sweep["points"]
        ]
        columns = [(sweep["title"], "id", "size"), *((MEASURES[key][0], "id", key) for key in keys)]
        figure = growth_figure(sweep["title"], sweep["points"])
        sweeps.append({**sweep, "rows": rows, "columns": columns, "figure": figure})
    facts = {
        "machine": found["machine"],
        "noise": max(noise, default=0.0),
        "sweeps": sweeps,
        "meanings": [MEASURES[key][:2] for key in MEASURES if key in shown],
    }
    put(path, render("scale.html", facts, _TEMPLATES))


def growth_figure(title: str, points: list[tuple[float, dict[str, float]]]) -> Figure | None:
    """Every measure against its first value; None for a single size."""
    if len(points) < 2:
        return None
    data: list[dict[str, Any]] = []
    low, high = -0.3, 0.3
    for key, (name, _, is_drawn) in MEASURES.items():
        line = [(size, values[key]) for size, values in points if values.get(key, 0) > 0]
        if not is_drawn or len(line) < 2:
            continue
        colour = series_colour(len(data))
        y = [math.log10(value / line[0][1]) for _, value in line]
        low, high = min(low, *y), max(high, *y)
        data.append({
            "type": "scatter", "mode": "lines+markers", **named(name, colour),
            "x": [math.log10(size) for size, _ in line], "y": y,
            "line": {"width": 2, "color": colour}, "marker": {"size": 7, "color": colour},
            "hovertext": [
                f"<b>{plot_text(name)}</b><br>{size:,}: {number(value)}" for size, value in line
            ],
            "hoverinfo": "text",
        })  # fmt: skip
    sizes = [size for size, _ in points]
    xaxis = log_axis(
        title, math.log10(sizes[0]) - 0.1, math.log10(sizes[-1]) + 0.1, sizes, lambda n: f"{n:,g}"
    )
    ticks = [0.01, 0.1, 0.25, 0.5, 1, 2, 4, 10, 100, 1000]
    yaxis = log_axis("times the smallest", low - 0.1, high + 0.1, ticks, lambda n: f"{n:g}×")
    return Figure(data, {"height": 380, "xaxis": xaxis, "yaxis": yaxis})
