"""Which events of the history were read already, though some come again: without a key per event.

Each message names the event in front of it in its log: between the two there is none. So to have
read it means to have read all positions behind that one up to its own, and what was read of a log
is a few intervals of positions; mostly it is one. This holds in any order, for each queue that
brings events of the log, with repeats, and when a part of the topic was lost before it was read:
the place of an event in a queue has no meaning. The state grows with the holes, not with the
events. Free of Spark.
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
        ("after", pa.int64()),
    ]
)
"""What `take` needs of each event: `after` is the position of the event in front of it, null where
that is not known."""

Hole = tuple[str, int, int]
"""(log, Raft index in front, Raft index behind): between the two there may be events."""
Longs = npt.NDArray[np.int64]


@dataclass(slots=True)
class Intervals:
    """Closed intervals of positions, ascending, with a hole between any two."""

    lows: Longs = field(default_factory=lambda: np.zeros(0, np.int64))
    highs: Longs = field(default_factory=lambda: np.zeros(0, np.int64))

    def holds(self, positions: Longs) -> npt.NDArray[np.bool_]:
        lows = np.append(self.lows, np.iinfo(np.int64).max)
        return np.asarray(lows[np.searchsorted(self.highs, positions)] <= positions)

    def add(self, lows: Longs, highs: Longs) -> None:
        """Intervals in any order, which may overlap."""
        lows, highs = np.append(self.lows, lows), np.append(self.highs, highs)
        order = np.argsort(lows, kind="stable")
        lows, reach = lows[order], np.maximum.accumulate(highs[order])
        begins = np.append(True, lows[1:] > reach[:-1] + 1)
        self.lows, self.highs = lows[begins], reach[np.append(begins[1:], True)]


class Seen:
    """Per log, what was read."""

    def __init__(self) -> None:
        self._seen: dict[str, Intervals] = {}

    def take(self, index: pa.Table) -> npt.NDArray[np.bool_]:
        """Enters the events of a batch (INDEX_SCHEMA, any order) and returns which are new.

        Of several of one name the first one is, by broker, queue and offset.
        """
        order = pc.sort_indices(index, [(n, "ascending") for n in INDEX_SCHEMA.names[:3]])
        ordered = index.take(order)
        new = np.zeros(len(index), np.bool_)
        for log in pc.unique(ordered["log"]).to_pylist():
            rows = np.flatnonzero(pc.equal(ordered["log"], log).to_numpy())
            new[order.to_numpy()[rows]] = self._take(log, ordered.take(rows))
        return new

    def _take(self, log: str, events: pa.Table) -> npt.NDArray[np.bool_]:
        """Which of one log's events are new."""
        intervals = self._seen.setdefault(log, Intervals())
        positions = events["position"].to_numpy()
        after = pc.coalesce(events["after"], pc.subtract(events["position"], 1)).to_numpy()
        new = np.zeros(len(positions), np.bool_)
        new[np.unique(positions, return_index=True)[1]] = True
        new &= ~intervals.holds(positions)
        # An event that names itself or a later one as its predecessor has no valid predecessor.
        intervals.add(np.where(after < positions, after + 1, positions), positions)
        return new

    def holes(self) -> list[Hole]:
        """Where events may be missing, by log and place."""
        return [
            (log, high >> PART_BITS, low >> PART_BITS)
            for log, held in sorted(self._seen.items())
            for high, low in zip(held.highs[:-1].tolist(), held.lows[1:].tolist(), strict=True)
        ]

    def to_json(self) -> list[dict[str, Any]]:
        """The form that is kept beside the output."""
        return [
            {
                "log": log,
                "seen": [
                    [*each] for each in zip(held.lows.tolist(), held.highs.tolist(), strict=True)
                ],
            }
            for log, held in sorted(self._seen.items())
        ]

    @classmethod
    def from_json(cls, kept: list[dict[str, Any]]) -> Self:
        """What `to_json` gave. Raises ValueError for what it did not."""
        made = cls()
        try:
            for each in kept:
                lows = np.array([int(low) for low, _ in each["seen"]], np.int64)
                highs = np.array([int(high) for _, high in each["seen"]], np.int64)
                made._seen[str(each["log"])] = Intervals(lows, highs)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the list of read events cannot be parsed: {error!r}") from error
        return made
