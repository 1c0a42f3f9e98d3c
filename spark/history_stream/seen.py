"""Which events of the history were read already, though some come again: without a key per event.

The publisher keeps the order of the log, leaves nothing out, and goes back only to repeat what it
has sent. So what a queue has brought of one log is, but for a few restarts, one interval of
positions, and whatever lies in it is a repeat. An event that no interval of its queue holds goes on
with the nearest one below it. The state grows with the number of logs and restarts, not of events.

What several queues brought (the history was published to another broker group for a time) is kept
apart, since each has its own gaps; an event is new if no queue has brought it.
"""

from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

PART_BITS: Final = 16
"""A position is the Raft index and, in its lowest bits, the part: commands have few events."""
INDEX_SCHEMA: Final = pa.schema(
    [
        ("broker", pa.string()),
        ("queue_id", pa.int64()),
        ("queue_offset", pa.int64()),
        ("log", pa.string()),
        ("position", pa.int64()),
    ]
)
"""What `take` needs of each event. Rows without a log are no events."""

Queue = tuple[str, int]
Longs = npt.NDArray[np.int64]


@dataclass(slots=True)
class Intervals:
    """Closed intervals of positions, ascending and apart from each other."""

    lows: list[int] = field(default_factory=list)
    highs: list[int] = field(default_factory=list)

    def holds(self, positions: Longs) -> npt.NDArray[np.bool_]:
        if not self.lows:
            return np.zeros(len(positions), np.bool_)
        at = np.searchsorted(np.array(self.highs), positions)
        lows = np.array([*self.lows, np.iinfo(np.int64).max])
        return np.asarray(lows[at] <= positions)

    def add(self, run: Longs) -> None:
        """`run` ascends, as the queue brought it."""
        fresh = run[~self.holds(run)]
        if not len(fresh):
            return
        below = np.searchsorted(np.array(self.highs or [np.iinfo(np.int64).max]), fresh)
        for gap in np.unique(below)[::-1].tolist():
            there = fresh[below == gap]
            if gap == 0:
                self.lows.insert(0, int(there[0]))
                self.highs.insert(0, int(there[-1]))
            else:
                self.highs[gap - 1] = int(there[-1])


@dataclass(frozen=True, slots=True)
class Taken:
    """What of a batch is new: ranges [begin, end) of offsets by queue. The others are repeats."""

    ranges: dict[Queue, list[tuple[int, int]]]
    fresh: int
    repeats: int


class Seen:
    """Per queue and log, what was read."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Queue, str], Intervals] = {}

    def take(self, index: pa.Table) -> Taken:
        """Enters the events of a batch (INDEX_SCHEMA, any order) and tells which are new.

        A queue's batches must come in the order of its offsets; repeats of batches do no harm.
        """
        index = index.filter(pc.is_valid(index["log"])).sort_by(
            [("broker", "ascending"), ("queue_id", "ascending"), ("queue_offset", "ascending")]
        )
        ranges: dict[Queue, list[tuple[int, int]]] = {}
        fresh = 0
        for row in index.group_by(["broker", "queue_id"]).aggregate([]).to_pylist():
            queue = (row["broker"], row["queue_id"])
            mine = index.filter(
                (pc.field("broker") == queue[0]) & (pc.field("queue_id") == queue[1])
            )
            offsets = self._take(queue, mine)
            if len(offsets):
                ranges[queue] = _ranges(offsets)
                fresh += len(offsets)
        return Taken(ranges, fresh, len(index) - fresh)

    def _take(self, queue: Queue, events: pa.Table) -> Longs:
        """The offsets of those that are new, ascending."""
        found: list[Longs] = []
        for log in pc.unique(events["log"]).to_pylist():
            mine = events.filter(pc.field("log") == log)
            offsets = mine["queue_offset"].to_numpy()
            positions = mine["position"].to_numpy()
            # A run ends where the queue goes back.
            breaks = np.flatnonzero(positions[1:] <= positions[:-1]) + 1
            for run, places in zip(
                np.split(positions, breaks), np.split(offsets, breaks), strict=True
            ):
                old = np.zeros(len(run), np.bool_)
                for (_, name), intervals in self._seen.items():
                    if name == log:
                        old |= intervals.holds(run)
                found.append(places[~old])
                self._seen.setdefault((queue, log), Intervals()).add(run)
        return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def to_json(self) -> list[dict[str, Any]]:
        """The form that is kept beside the output."""
        return [
            {
                "broker": queue[0],
                "queue_id": queue[1],
                "log": log,
                "seen": [[*each] for each in zip(held.lows, held.highs, strict=True)],
            }
            for (queue, log), held in sorted(self._seen.items())
        ]

    @classmethod
    def from_json(cls, kept: list[dict[str, Any]]) -> Self:
        """What `to_json` gave. Raises ValueError for what it did not."""
        made = cls()
        try:
            for each in kept:
                intervals = Intervals(
                    [int(low) for low, _ in each["seen"]], [int(high) for _, high in each["seen"]]
                )
                made._seen[((str(each["broker"]), int(each["queue_id"])), each["log"])] = intervals
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"what was read already cannot be told: {error!r}") from error
        return made


def _ranges(offsets: Longs) -> list[tuple[int, int]]:
    """[begin, end) of ascending offsets without a hole between them."""
    cuts = np.flatnonzero(np.diff(offsets) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(offsets, cuts)]


__all__ = ["INDEX_SCHEMA", "PART_BITS", "Intervals", "Queue", "Seen", "Taken"]
