"""When writes were impossible, and how much of each day that was. Free of Spark."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np

from batonmq.spark.history.output_tables import Unavailability
from batonmq.spark.history.overview import Bounds
from batonmq.spark.steps.parquet_tables import DAY_MS, day_of


def days_without_writes(
    outages: array[int], bounds: Bounds
) -> Iterator[tuple[int, Unavailability]]:
    """(day since 1970, its row) of all days of a group, and of those that an outage touches.

    `outages`: start, end, and 1 if it is open, one after the other. They may overlap: one that
    begins within another goes on where that ends, and counts as an outage of its own. An outage
    over midnight is split, and counts where it begins.
    """
    days: dict[int, list[Any]] = {
        day: [0, 0, 0, False]
        for day in range(bounds.first_ms // DAY_MS, bounds.last_ms // DAY_MS + 1)
    }
    rows = np.frombuffer(outages, np.int64).reshape(-1, 3) if outages else np.empty((0, 3), int)
    until_ms: int | None = None
    for at in np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0])).tolist():
        start_ms, end_ms, is_open = rows[at].tolist()
        from_ms = start_ms if until_ms is None else max(start_ms, until_ms)
        until_ms = end_ms if until_ms is None else max(until_ms, end_ms)
        end_ms = max(from_ms, end_ms)
        first, last = from_ms // DAY_MS, end_ms // DAY_MS
        for day in range(first, last + 1):
            part_ms = min(end_ms, (day + 1) * DAY_MS) - max(from_ms, day * DAY_MS)
            open_here = bool(is_open) and day == last
            if part_ms > 0 or day == first or open_here:
                sums = days.setdefault(day, [0, 0, 0, False])
                sums[0] += day == first
                sums[1] += part_ms
                sums[2] = max(sums[2], end_ms - from_ms)
                sums[3] = sums[3] or open_here
    for day, (count, without_ms, longest_ms, is_open) in sorted(days.items()):
        yield day, Unavailability(count, without_ms, longest_ms, is_open, day_of(day))
