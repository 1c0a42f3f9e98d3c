"""The pictures of the report on epochs. Rows of `epoch_tables` in, a `Figure` out.

An outage of a second is far narrower than a pixel of a day, so every change of master has a mark of
constant size above its row of the time line as well. Free of Spark.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from batonmq.spark.report.epoch_tables import BINS_PER_DECADE, Lane, Row
from batonmq.spark.report.plots import (
    GREY,
    HEAT,
    KINDS,
    NOTHING,
    PARTS,
    RED,
    ROW_PX,
    SERIES,
    Figure,
    bars,
    duration_axis,
    folded,
    kind_colour,
    kind_label,
    log_histogram,
    named,
    row_axis,
    series_colour,
)
from batonmq.spark.report.quantities import (
    DAY_MS,
    DURATION_TICKS_MS,
    UNKNOWN,
    counted,
    duration_text,
    moment_text,
    plot_text,
    plot_time,
)

_LABELLED_BARS: Final = 200
_FEW_DAYS: Final = 14
_GROUP_PX: Final = 62


def mastership_figure(
    lanes: Sequence[Lane], marks: Sequence[Row], groups: Sequence[Row], first_ms: int, last_ms: int
) -> Figure:
    """A row per group, a colour per broker, red where writes failed. `groups`: top to bottom."""
    row_of = {group["name"]: row for row, group in enumerate(groups)}
    slack = max(1, (last_ms - first_ms) // 50)
    reigns = [{"group": lane.group, **row} for lane in lanes for row in lane.rows]
    data = []
    for at, broker in enumerate(sorted({row["broker_id"] or 0 for row in reigns})):
        mine = [row for row in reigns if (row["broker_id"] or 0) == broker]
        # A master since the last minute of a long history is seen, too.
        ends = [row["end_ms"] + (slack if _is_open(row) else 0) for row in mine]
        spans = [
            (row_of[row["group"]], row["start_ms"], end, _reign(row))
            for row, end in zip(mine, ends, strict=True)
        ]
        label = {
            "text": [str(broker)] * len(mine), "textposition": "inside", "textangle": 0,
            "insidetextanchor": "middle", "constraintext": "inside",
            "insidetextfont": {"color": "#10151a", "size": 12},
        }  # fmt: skip
        shown = label if len(reigns) <= _LABELLED_BARS else {}
        data.append(_time_bars(f"broker {broker}", series_colour(at), 0.52, spans, **shown))
    gaps = [
        (row_of[row["group"]], row["at_ms"], row["end_ms"], f"no writes<br>{_change(row)}")
        for row in marks
        if row["took_ms"] and row["end_ms"] is not None
    ] + [
        (row, lost_ms, last_ms, f"no master since {moment_text(lost_ms)}, not over")
        for row, lost_ms in enumerate(group["lost_ms"] for group in groups)
        if lost_ms is not None
    ]
    if gaps:
        data.append(_time_bars("no writes", RED, 0.68, gaps))
    for kind in [*KINDS, *sorted({row["kind"] for row in marks} - set(KINDS))]:
        if mine := [row for row in marks if row["kind"] == kind]:
            data.append(_marks(kind, mine, row_of))
    layout = {
        "height": 62 + max(2, len(groups)) * ROW_PX, "barmode": "overlay", "bargap": 0,
        "xaxis": {
            "type": "date", "range": [plot_time(first_ms - slack), plot_time(last_ms + slack)]
        },
        "yaxis": row_axis([group["name"] for group in groups]),
        "uniformtext": {"mode": "hide", "minsize": 10},
    }  # fmt: skip
    return Figure(data, layout)


def _is_open(row: Row) -> bool:
    return "ended_at" in row and row["ended_at"] is None


def _time_bars(
    name: str, colour: str, width: float, spans: Sequence[tuple[int, int, int, str]], **more: Any
) -> Row:
    """`spans`: row, begin and end in ms, hover."""
    return bars(
        colour, [text for *_, text in spans], **named(name, colour), orientation="h", width=width,
        offsetgroup="master", base=[plot_time(begin) for _, begin, *_ in spans],
        x=[end - begin for _, begin, end, _ in spans], y=[row for row, *_ in spans], **more,
    )  # fmt: skip


def _marks(kind: str, rows: Sequence[Row], row_of: Mapping[str, int]) -> Row:
    label, colour, symbol = KINDS.get(kind, (kind_label(kind), "#777777", "circle"))
    return {
        "type": "scatter", "mode": "markers", **named(label, colour),
        "x": [plot_time(row["at_ms"]) for row in rows],
        "y": [row_of[row["group"]] - 0.42 for row in rows],
        "hovertext": [f"{plot_text(label)}<br>{_change(row)}" for row in rows],
        "hoverinfo": "text", "customdata": [story_id(row) for row in rows], "cliponaxis": False,
        "marker": {"color": colour, "symbol": symbol, "size": 9, "line": {"width": 0}},
    }  # fmt: skip


def story_id(row: Row) -> str:
    """The id of the story of a change of master on the page, if it is listed there."""
    return f"story-{row['group']}-{row['master_epoch']}-{row['kind']}"


def _reign(row: Row) -> str:
    group, span = plot_text(row["group"]), f"{moment_text(row['start_ms'])} to "
    span += moment_text(row["end_ms"])
    if "begun" in row:
        return (
            f"<b>{group}</b><br>{span}<br>mostly broker {row['broker_id']}, "
            f"{counted(row['begun'], 'mastership')} began in this time"
        )
    address = f" at {plot_text(row['address'])}" if row["address"] else ""
    epoch = UNKNOWN if row["master_epoch"] is None else row["master_epoch"]
    took = duration_text(row["end_ms"] - row["start_ms"])
    ended = f"<br>{took}, ended by {plot_text(kind_label(row['ended_by']))}"
    return (
        f"<b>{group}: broker {row['broker_id']}</b>{address}<br>epoch {epoch}<br>{span}"
        f"{', still master at the end' if _is_open(row) else ended}"
    )


def _change(row: Row) -> str:
    cost = "how long is not known" if row["took_ms"] is None else duration_text(row["took_ms"])
    before, after, epoch = (
        UNKNOWN if row[name] is None else row[name]
        for name in ("master_before", "master", "master_epoch")
    )
    cause = f"<br>{plot_text(row['cause'])}" if row["cause"] else ""
    return (
        f"<b>{plot_text(row['group'])}</b>, {moment_text(row['at_ms'])}, {cost}"
        f"<br>broker {before} → {after}, epoch {epoch}{cause}"
    )


def distribution_figure(
    bins: Mapping[str, Mapping[int, int]], lines: Mapping[str, float | None]
) -> Figure:
    """How long changes took. `bins`: kind -> bin -> number, `lines`: what is pointed out."""
    series = [(kind_label(kind), kind_colour(kind), mine) for kind, mine in bins.items()]
    return log_histogram(series, BINS_PER_DECADE, lines, "no writes for", "changes of master")


def parts_figure(
    rows: Sequence[tuple[str, str, Mapping[str, int | None], int | None, str]],
) -> Figure:
    """Stacked bars: (label, hover, part -> ms, whole ms, where its story is); what is in no part
    is grey."""
    rests = [
        max(0, (whole or 0) - sum(value or 0 for value in parts.values()))
        for _, _, parts, whole, _ in rows
    ]
    series = [(name, colour, [row[2].get(key) or 0 for row in rows]) for key, name, colour in PARTS]
    data = []
    for name, colour, values in [*series, ("unknown part", GREY, rests)]:
        shown = [at for at, value in enumerate(values) if value]
        if not shown:
            continue
        hover = [
            f"<b>{plot_text(rows[at][0])}</b><br>{name}: {duration_text(values[at])}"
            f"<br>{plot_text(rows[at][1])}"
            for at in shown
        ]
        data.append(bars(
            colour, hover, **named(name, colour), orientation="h", width=0.6,
            x=[values[at] for at in shown], y=shown, customdata=[rows[at][4] for at in shown],
        ))  # fmt: skip
    longest = max(
        sum(value or 0 for value in row[2].values()) + rest
        for row, rest in zip(rows, rests, strict=True)
    )
    layout = {
        "height": 62 + len(rows) * ROW_PX, "barmode": "stack", "dragmode": False,
        "xaxis": duration_axis(max(1, longest)), "yaxis": row_axis([row[0] for row in rows]),
    }  # fmt: skip
    return Figure(data, layout)


def calendar_figure(groups: Sequence[Row], step_days: int, cells: Sequence[Row]) -> Figure:
    """Groups as rows, below all together; days (or `step_days` as one) as columns. Three layers:
    nothing recorded, recorded without an outage, and outages by log10 of their ms."""
    names = [*(["all groups"] if len(groups) != 1 else []), *(group["name"] for group in groups)]
    row_of: dict[str | None, int] = {
        None: 0,
        **{group["name"]: len(names) - len(groups) + at for at, group in enumerate(groups)},
    }
    step, last = step_days * DAY_MS, max(cell["at"] for cell in cells)
    # A short history fills up with days before it: those after it may not have come yet.
    first = min(*(cell["at"] for cell in cells), last - 6 * step)
    starts = list(range(first, last + 1, step))
    few = len(starts) <= _FEW_DAYS
    days = [datetime.fromtimestamp(at / 1000, UTC) for at in starts]
    columns = [f"{day:%a}<br>{day:%b} {day.day}" if few else f"{day:%Y-%m-%d}" for day in days]
    calm: list[list[float | None]] = [[None] * len(starts) for _ in names]
    cost: list[list[float | None]] = [[None] * len(starts) for _ in names]
    text = [[""] * len(starts) for _ in names]
    for cell in cells:
        row, column = row_of[cell["group"]], (cell["at"] - first) // step
        ms, outages = cell["unavailable_ms"] or 0, cell["outages"] or 0
        bad = ms > 0 or outages > 0
        (cost if bad else calm)[row][column] = math.log10(max(1, ms)) if bad else 0
        text[row][column] = _day_text(names[row], days[column], step_days, cell, bad)
    unseen = [[None if cell else 0 for cell in line] for line in text]
    layers = (
        ("nothing recorded", GREY, unseen, {**_flat(GREY), "hoverinfo": "name", "opacity": 0.13}),
        ("no outage", NOTHING, calm, _flat(NOTHING)),
        ("outage, by its length", HEAT[2][1], cost, _heat(cost)),
    )
    common = {
        "type": "heatmap", "x": columns, "y": list(range(len(names))), "hoverinfo": "text",
        "text": text, "ygap": 2, "hoverongaps": False,
        "xgap": 2 if len(columns) <= 120 else 1 if len(columns) <= 400 else 0,
    }  # fmt: skip
    layout = {
        "height": 80 + max(1, len(names)) * ROW_PX, "dragmode": False,
        "yaxis": row_axis(names, range=[len(names) - 0.5, -0.5]),
        "xaxis": {"type": "category" if few else "date", "showgrid": False, "fixedrange": few},
    }  # fmt: skip
    return Figure(
        [
            {**common, **named(name, colour), "z": z, **look}
            for name, colour, z, look in layers
            if any(value is not None for line in z for value in line)
        ],
        layout,
    )


def _day_text(name: str, day: datetime, step_days: int, cell: Row, bad: bool) -> str:
    more = f" and {step_days - 1} days more" if step_days > 1 else ""
    cost = (
        f"{duration_text(cell['unavailable_ms'])} without writes<br>"
        f"{counted(cell['outages'] or 0, 'outage')}, the longest "
        f"{duration_text(cell['longest_ms'])}"
    )
    return f"<b>{plot_text(name)}, {day:%a %Y-%m-%d}{more}</b><br>{cost if bad else 'no outage'}"


def _flat(colour: str) -> Row:
    return {"showscale": False, "colorscale": [[0, colour], [1, colour]], "zmin": 0, "zmax": 1}


def _heat(cost: Sequence[Sequence[float | None]]) -> Row:
    """Colours for log10 of ms, from the whole decade below to the one above."""
    values = [value for line in cost for value in line if value is not None] or [0.0]
    low = math.floor(min(values))
    high = max(math.ceil(max(values) + 1e-9), low + 1)
    ticks = [tick for tick in DURATION_TICKS_MS if low <= math.log10(tick) <= high]
    return {
        "colorscale": [list(each) for each in HEAT], "zmin": low, "zmax": high,
        "colorbar": {
            "tickvals": [math.log10(tick) for tick in ticks],
            "ticktext": [duration_text(tick) for tick in ticks],
            "thickness": 12, "outlinewidth": 0, "x": 1.01, "len": 1.0, "ypad": 0,
        },
    }  # fmt: skip


def set_size_figure(lanes: Sequence[Lane], first_ms: int, last_ms: int) -> Figure:
    """The size of each group's SyncStateSet: one small picture per group, under one time.

    Steps from change to change, the last one held to the end; a red diamond where one broker is
    left of more.
    """
    top = max(row["size"] for lane in lanes for row in lane.rows)
    height = 1 / len(lanes)
    data, axes, notes = [], {}, []
    for at, lane in enumerate(lanes):
        axis, high = "y" if at == 0 else f"y{at + 1}", 1 - at * height
        axes[axis.replace("y", "yaxis")] = {
            "domain": [high - height * 0.72, high], "range": [0, top + 0.35], "fixedrange": True,
            "tickmode": "array", "tickvals": list(range(0, top + 1, max(1, top // 3))),
        }  # fmt: skip
        notes.append({
            "xref": "paper", "x": 0, "xanchor": "left", "yref": f"{axis} domain", "y": 1,
            "yanchor": "bottom", "showarrow": False, "font": {"size": 12},
            "text": f"<b>{folded(lane.group).replace('<br>', '')}</b>",
        })  # fmt: skip
        data.append({"name": plot_text(lane.group), "yaxis": axis, **_sizes(lane, top, last_ms)})
    span = [plot_time(first_ms), plot_time(last_ms)]
    xaxis = {"type": "date", "range": span, "anchor": data[-1]["yaxis"]}
    layout = {
        "height": 78 + _GROUP_PX * max(2, len(lanes)),
        "xaxis": xaxis,
        "annotations": notes,
        **axes,
    }
    return Figure(data, layout)


def _sizes(lane: Lane, top: int, last_ms: int) -> Row:
    rows = [*lane.rows]
    if rows[-1]["at"] < last_ms:
        rows.append({"at": last_ms, "size": rows[-1]["size"], "reason": "until the end"})
    alone = [row["size"] <= 1 < top for row in rows]
    return {
        "type": "scatter", "mode": "lines+markers" if len(rows) < 80 else "lines",
        "x": [plot_time(row["at"]) for row in rows], "y": [row["size"] for row in rows],
        "line": {"shape": "hv", "width": 2, "color": SERIES[0]},
        "marker": {
            "size": 6, "color": [RED if each else SERIES[0] for each in alone],
            "symbol": ["diamond" if each else "circle" for each in alone],
        },
        "fill": "tozeroy", "fillcolor": "rgba(11,127,194,0.14)", "hoverinfo": "text",
        "hovertext": [
            f"<b>{plot_text(lane.group)}: {counted(row['size'], 'broker')}</b><br>"
            f"{moment_text(row['at'])}{plot_text(_what_changed(row))}"
            for row in rows
        ],
    }  # fmt: skip


def _what_changed(row: Row) -> str:
    parts = [
        f"{', '.join(map(str, row[verb]))} {verb}" for verb in ("joined", "left") if row.get(verb)
    ]
    return "".join(f", {part}" for part in [*parts, row.get("reason")] if part)
