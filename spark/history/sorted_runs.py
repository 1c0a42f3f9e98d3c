"""Lines of histories in runs: many lines of one group and log, sorted, as one packed value.

An engine sorts and moves runs, each one row, and never sees a line: a row costs the JVM as much as
decoding a line costs here. The fold merges the runs of a group again. Free of Spark.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import Any, Final

import pyarrow as pa

from batonmq.spark.history.lines import Line
from batonmq.spark.steps.parquet_tables import table_of

RUNS: Final = pa.schema(
    [
        ("grp", pa.string()), ("log", pa.string()), ("raft_index", pa.int64()),
        ("part", pa.int64()), ("size", pa.int64()), ("run", pa.binary()), ("seen", pa.binary()),
    ]
)  # fmt: skip
"""`raft_index` and `part` are of a run's first line, `size` its bytes before they were packed; a
row with `seen` is no run, but what a task has seen."""
ORDER: Final = ("log", "raft_index", "part")
_LINES: Final = 20_000
"""How many lines a task holds: a fold holds one run of each task whose lines it merges."""
_CODEC: Final = "zstd"

Entry = tuple[int, int, int, int, bytes]
"""Raft index, part, controller, its place there, the line: sorted by that."""


class RunBuilder:
    """Takes lines in any order."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], list[Entry]] = {}
        self._lines = 0

    @property
    def is_full(self) -> bool:
        return self._lines >= _LINES

    def add(self, line: Line) -> None:
        event = line.event
        run = self._held.setdefault((event.broker_name, event.log), [])
        run.append((event.raft_index, event.part, line.rank, line.offset, line.text))
        self._lines += 1

    def take(self, seen: object = None) -> pa.Table:
        """What is held, as rows of RUNS; then nothing is. `seen` is a row of its own."""
        rows: list[tuple[Any, ...]] = []
        for (group, log), run in self._held.items():
            run.sort()
            raw = pickle.dumps(run)
            packed = pa.compress(raw, _CODEC, asbytes=True)
            rows.append((group, log, *run[0][:2], len(raw), packed, None))
        if seen is not None:
            rows.append((*[None] * 6, pickle.dumps(seen)))
        self._held, self._lines = {}, 0
        return table_of(rows, RUNS)


def merged(runs: Iterable[tuple[int, int, int, bytes]]) -> Iterator[Entry]:
    """The lines of runs (Raft index and part of the first line, size, packed) which ascend by their
    first line, in order. Only runs that overlap are held together."""
    heap: list[tuple[Entry, int, Iterator[Entry]]] = []
    for number, (index, part, size, packed) in enumerate(runs):
        while heap and heap[0][0] < (index, part):
            yield _next(heap)
        entries = iter(pickle.loads(pa.decompress(packed, size, _CODEC, asbytes=True)))
        heappush(heap, (next(entries), number, entries))
    while heap:
        yield _next(heap)


def _next(heap: list[tuple[Entry, int, Iterator[Entry]]]) -> Entry:
    entry, number, entries = heap[0]
    following = next(entries, None)
    if following is None:
        heappop(heap)
    else:
        heapreplace(heap, (following, number, entries))
    return entry
