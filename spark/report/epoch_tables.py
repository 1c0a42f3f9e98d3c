"""What the report on epochs takes out of the Parquet tables of `epoch_history`.

Of a table only the columns that count are read, as Arrow, and rows of what is listed or drawn; how
many those are is bounded, however long the history is. Times are ms since 1970 in UTC, durations
ms; None: not known. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from batonmq.spark.report.plots import PARTS
from batonmq.spark.severity import SEVERITIES
from batonmq.spark.steps.parquet_tables import DAY_MS, percentile
from batonmq.spark.steps.sql import ResultTable

#: More broker groups than this are counted but not drawn; those that cost most are.
GROUPS_SHOWN: Final = 30
FAILOVERS_LISTED: Final = 50
TRUNCATIONS_LISTED: Final = 50
FINDINGS_LISTED: Final = 200
LEADERS_LISTED: Final = 30
#: Bins of the distribution per decade of ms.
BINS_PER_DECADE: Final = 6
_MARKS_TOTAL: Final = 3_000
_MARKS_MOST: Final = 400
_CELLS_DRAWN: Final = 12_000
_FOLDERS: Final = ds.partitioning(
    pa.schema([("group", pa.string()), ("day", pa.date32())]), flavor="hive"
)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Group:
    """One broker group. `lost_ms`: it is without a master at the end, and since when.

    `first_ms` and `last_ms` bound the time that the tables cover. They have days without outages,
    too, so a wrong clock does not stretch it.
    """

    name: str
    masterships: int
    changes: int
    set_changes: int
    outages: int
    unavailable_ms: int
    longest_ms: int
    lost_ms: int | None
    is_open: bool
    first_ms: int | None
    last_ms: int | None

    @property
    def now(self) -> str:
        return "no_master" if self.is_open else "has_a_master"


@dataclass(frozen=True, slots=True)
class Kind:
    """Changes of master of one kind; `parts_ms` are medians of what is known."""

    kind: str
    number: int
    known: int
    median_ms: int | None
    longest_ms: int | None
    unclean: int
    parts_ms: dict[str, int | None]


@dataclass(frozen=True, slots=True)
class Lane:
    """What is drawn of one group: rows, or equal bins of the time where they are many."""

    group: str
    rows: list[Row] = field(default_factory=list)
    binned: bool = False


class EpochTables:
    """The tables by their names. Raises OSError."""

    def __init__(self, table: Callable[[str], ResultTable]) -> None:
        self._table = table
        self.failovers = self._failovers()

    def read(self, name: str, columns: str, where: pc.Expression | None = None) -> pa.Table:
        """`group` and those columns (parted by blanks), times and days as ms."""
        wanted = ["group", *columns.split()]
        found = self._table(name).dataset(_FOLDERS).to_table(columns=wanted, filter=where)
        return pa.table([_in_ms(found[each]) for each in wanted], wanted)

    def _failovers(self) -> pa.Table:
        """All changes of master: unclean ones first, then by cost, then the latest.

        `took_ms` is all the time without writes, noticed or not. Of it `detect_part_ms` is a part:
        the hold of a planned switch, the silence by which a master that hung was missed; what was
        silence before a session closed is none.
        """
        columns = (
            "kind cause master_epoch master_before master detected_at elected_at opened_at "
            "first_ack_at detect_ms elect_ms role_ms open_ms first_ack_ms unavailable_ms "
            "without_writes_ms idle unclean"
        )
        found = self.read("failovers", columns)
        kind = found["kind"].fill_null("unknown")
        found = found.set_column(found.schema.get_field_index("kind"), "kind", kind)
        took = found["without_writes_ms"]
        missed = pc.subtract(took, found["unavailable_ms"])
        planned = pc.equal(kind, "planned_switch")
        for name, column in (
            ("detect_part_ms", pc.if_else(planned, found["detect_ms"], missed)),
            ("took_ms", took),
            ("is_change", pc.not_equal(kind, "first_election")),
        ):
            found = found.append_column(name, column)
        order = [("unclean", "descending"), ("took_ms", "descending"), ("elected_at", "descending")]
        return found.take(pc.sort_indices(found, sort_keys=order))

    def groups(self) -> list[Group]:
        """Every broker group, those that cost most first."""
        reigns = _by_group(
            self.read("masterships", "began_at opened_at first_ack_at ended_at"),
            "min began_at", "max began_at", "max opened_at", "max first_ack_at", "max ended_at",
        )  # fmt: skip
        changes = _by_group(
            self.failovers, "min detected_at", "min elected_at", "max elected_at", "max opened_at",
            "max first_ack_at", "sum is_change",
        )  # fmt: skip
        sets = _by_group(self.read("set_changes", "at"), "min at", "max at")
        outages = _by_group(
            self.read("unavailability", "day outages unavailable_ms longest_ms open"),
            "sum outages", "sum unavailable_ms", "max longest_ms", "max open", "min day", "max day",
        )  # fmt: skip
        found = []
        for name in {*reigns, *changes, *sets, *outages}:
            reign, change, set_, outage = (
                rows.get(name, {}) for rows in (reigns, changes, sets, outages)
            )
            told = [(key, ms) for row in (reign, change, set_) for key, ms in row.items() if ms]
            first_day, last_day = outage.get("min day"), outage.get("max day")
            days_end = None if last_day is None else last_day + DAY_MS
            begin = min((ms for key, ms in told if key.startswith("min ")), default=None)
            end = max((ms for key, ms in told if key.startswith("max ")), default=None)
            found.append(
                Group(
                    name, reign.get("number", 0), change.get("sum is_change") or 0,
                    set_.get("number", 0), outage.get("sum outages") or 0,
                    outage.get("sum unavailable_ms") or 0, outage.get("max longest_ms") or 0,
                    # Still without a master only if no mastership has begun since.
                    reign.get("max ended_at") if outage.get("max open") else None,
                    bool(outage.get("max open")),
                    max((ms for ms in (begin, first_day) if ms is not None), default=None),
                    min((ms for ms in (end, days_end) if ms is not None), default=None),
                )
            )  # fmt: skip
        return sorted(found, key=lambda g: (-g.unavailable_ms, -g.masterships, g.name))

    def kinds(self) -> list[Kind]:
        """Per kind of election, first elections too; the most frequent first."""
        numbers = [name for name, *_ in PARTS] + ["detect_part_ms", "took_ms", "unclean", "idle"]
        some, kind = self.failovers.select(numbers), self.failovers["kind"]
        kinds = [_kind(name, some.filter(pc.equal(kind, name))) for name in _names(kind)]
        return sorted(kinds, key=lambda kind: (-kind.number, kind.kind))

    def durations(self) -> tuple[dict[str, dict[int, int]], int | None, int | None]:
        """({kind: {bin: number}}, median, p99) of all known times without writes, without first
        elections; bin n begins at 10^(n / BINS_PER_DECADE) ms."""
        known = pc.and_(self.failovers["is_change"], self.failovers["took_ms"].is_valid())
        changes = self.failovers.select(["kind", "took_ms"]).filter(known)
        bins: dict[str, dict[int, int]] = {}
        for kind in _names(changes["kind"]):
            took = changes["took_ms"].filter(pc.equal(changes["kind"], kind)).to_numpy()
            place = np.floor(np.log10(np.maximum(took, 1)) * BINS_PER_DECADE + 1e-9).astype(int)
            numbers = zip(*np.unique(place, return_counts=True), strict=True)
            bins[kind] = {int(at): int(number) for at, number in numbers}
        every = changes["took_ms"].to_numpy()
        return bins, percentile(every, 0.5), percentile(every, 0.99)

    def dearest(self) -> list[Row]:
        """The changes that cost most, with all columns of their stories."""
        some = self.failovers
        listed = pc.or_(some["is_change"], some["unclean"].fill_null(False))
        rows = _top(some, listed, FAILOVERS_LISTED)
        if not rows:
            return rows
        columns = (
            "kind master_epoch elected_at how detected_by address role_at silent_ms set_before "
            "sync_state_set complete overtaken truncated_bytes clock_problem"
        )
        where = pc.field("group").isin([row["group"] for row in rows]) & pc.field(
            "master_epoch"
        ).isin([row["master_epoch"] for row in rows])
        more = {
            (row["group"], row["master_epoch"], row["kind"], row["elected_at"]): row
            for row in self.read("failovers", columns, where).to_pylist()
        }
        for row in rows:
            row |= more.get((row["group"], row["master_epoch"], row["kind"], row["elected_at"]), {})
        return rows

    def truncations(self) -> tuple[int, int, list[Row]]:
        """(number, bytes, the largest of them)."""
        found = self.read("truncations", "at broker_id master_epoch from_offset to_offset bytes")
        order = [("bytes", "descending"), ("at", "ascending")]
        size = pc.sum(found["bytes"]).as_py() or 0
        return found.num_rows, size, _first(found, order, TRUNCATIONS_LISTED)

    def findings(self) -> tuple[dict[str, int], list[Row]]:
        """(severity -> number, the gravest of them)."""
        found = self.read("findings", "severity kind text subject evidence at")
        counts = {
            row["values"]: row["counts"] for row in found["severity"].value_counts().to_pylist()
        }
        rank = pc.index_in(found["severity"].cast(pa.string()), pa.array(SEVERITIES))
        order = [(name, "ascending") for name in ("rank", "kind", "group", "at")]
        return counts, _first(found.append_column("rank", rank), order, FINDINGS_LISTED)

    def leaders(self) -> tuple[int, list[Row]]:
        """(changes of the leading controller, the latest of them)."""
        found = self.read("controllers", "at leader leader_before controller_epoch")
        return found.num_rows, _first(found, [("at", "descending")], LEADERS_LISTED)

    def masterships(self, groups: Sequence[Group], first_ms: int, last_ms: int) -> list[Lane]:
        """Who was master of these groups, and when (`start_ms`, `end_ms`)."""
        columns = "broker_id opened_at first_ack_at began_at ended_at master_epoch ended_by address"
        found = self.read("masterships", columns, _of(groups))
        if not found.num_rows:
            return []
        start = pc.coalesce(found["opened_at"], found["first_ack_at"], found["began_at"], first_ms)
        end = pc.max_element_wise(start, pc.coalesce(found["ended_at"], last_ms))
        found = found.select(
            ["group", "broker_id", "master_epoch", "ended_at", "ended_by", "address"]
        )
        found = found.append_column("start_ms", start).append_column("end_ms", end)
        bound = rows_each(len(groups))
        lanes = []
        for group in groups:
            mine = found.filter(pc.equal(found["group"], group.name)).sort_by("start_ms")
            if mine.num_rows <= bound:
                lanes.append(Lane(group.name, mine.to_pylist()))
            else:
                lanes.append(Lane(group.name, _filled(mine, first_ms, last_ms, bound), binned=True))
        return lanes

    def marks(self, groups: Sequence[Group]) -> list[Row]:
        """Of each group the changes that cost most; `at_ms` and `end_ms` bound the time without
        writes, one of them may be unknown."""
        rows: list[Row] = []
        for group in groups:
            mine = pc.equal(self.failovers["group"], group.name)
            rows += _top(self.failovers, mine, rows_each(len(groups)))
        for row in rows:
            end = row["first_ack_at"] or row["opened_at"]
            row["end_ms"] = (row["opened_at"] or end) if row["idle"] else end
            known = row["took_ms"] is not None and row["end_ms"] is not None
            begin = row["end_ms"] - row["took_ms"] if known else None
            row["at_ms"] = begin or row["detected_at"] or row["elected_at"] or row["end_ms"]
        return [row for row in rows if row["at_ms"] is not None]

    def set_sizes(self, groups: Sequence[Group], first_ms: int, last_ms: int) -> list[Lane]:
        """Sizes of SyncStateSets (`at`, `size`) in the order of time; the least of each bin."""
        columns = "at set_before set_after size_after joined left reason"
        found = self.read("set_changes", columns, _of(groups))
        if not found.num_rows:
            return []
        size = pc.coalesce(found["size_after"], pc.list_value_length(found["set_after"]))
        found = found.append_column("size", size)
        found = found.filter(pc.and_(found["at"].is_valid(), found["size"].is_valid()))
        bound, lanes = rows_each(len(groups)), []
        for group in groups:
            mine = found.filter(pc.equal(found["group"], group.name)).sort_by("at")
            if mine.num_rows > bound:
                lanes.append(Lane(group.name, _least(mine, first_ms, last_ms, bound), binned=True))
            elif mine.num_rows:
                rows = mine.to_pylist()
                before = rows[0]["set_before"]
                first = [{"at": first_ms, "size": len(before)}] if before else []
                lanes.append(Lane(group.name, [*first, *rows]))
        return lanes

    def days(self, groups: Sequence[Group]) -> tuple[int, list[Row]]:
        """(days of one cell, cells): of all groups together (`group` is null) and of each."""
        found = self.read("unavailability", "day outages unavailable_ms longest_ms")
        found = found.filter(found["day"].is_valid())
        if not found.num_rows:
            return 1, []
        span = pc.min_max(found["day"]).as_py()
        number = (span["max"] - span["min"]) // DAY_MS + 1
        step = max(1, -(-number * (len(groups) + 1) // _CELLS_DRAWN))
        wide = step * DAY_MS
        begin = pc.multiply(pc.divide(pc.subtract(found["day"], span["min"]), wide), wide)
        found = found.append_column("at", pc.add(begin, span["min"]))
        sums = [("outages", "sum"), ("unavailable_ms", "sum"), ("longest_ms", "max")]
        mine = found.filter(pc.is_in(found["group"], pa.array([g.name for g in groups])))
        cells = [
            *found.group_by("at").aggregate(sums).to_pylist(),
            *(mine.group_by(["group", "at"]).aggregate(sums).to_pylist() if groups else ()),
        ]
        return step, [{"group": None, **cell} for cell in cells]


def rows_each(groups: int) -> int:
    """How many rows of one group are drawn one by one, and how many bins replace more."""
    return max(100, min(_MARKS_MOST, _MARKS_TOTAL // max(1, groups)))


def _of(groups: Sequence[Group]) -> pc.Expression:
    return pc.field("group").isin([group.name for group in groups])


def _in_ms(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
    if pa.types.is_date(column.type):
        return pc.multiply(column.cast(pa.int32()).cast(pa.int64()), DAY_MS)
    return column


def _by_group(table: pa.Table, *sums: str) -> dict[str, Row]:
    """Group -> {"number": rows, SUM: value}; each of `sums` is a function and a column."""
    if not table.num_rows:
        return {}
    named = table.filter(table["group"].is_valid())
    wanted = [tuple(reversed(each.split())) for each in sums]
    found = named.group_by("group").aggregate([*wanted, ([], "count_all")])
    names = {f"{column}_{function}": f"{function} {column}" for column, function in wanted}
    return {
        row["group"]: {names.get(key, "number"): value for key, value in row.items()}
        for row in found.to_pylist()
    }


def _names(column: pa.ChunkedArray) -> list[str]:
    return sorted(column.unique().to_pylist())


def _top(table: pa.Table, wanted: pa.ChunkedArray, number: int) -> list[Row]:
    """The first rows that are wanted."""
    rows: list[Row] = table.take(pc.indices_nonzero(wanted).slice(0, number)).to_pylist()
    return rows


def _first(table: pa.Table, order: list[tuple[str, str]], number: int) -> list[Row]:
    if not table.num_rows:
        return []
    rows: list[Row] = table.sort_by(order).slice(0, number).to_pylist()
    return rows


def _kind(name: str, some: pa.Table) -> Kind:
    known = some["took_ms"].drop_null().to_numpy()
    parts = {}
    for part, *_ in PARTS:
        column = some["detect_part_ms" if part == "detect_ms" else part]
        if part == "first_ack_ms":  # no client waited for the first write of an idle one
            column = column.filter(pc.invert(some["idle"].fill_null(False)))
        parts[part] = percentile(column.drop_null().to_numpy(), 0.5)
    return Kind(
        name, some.num_rows, len(known), percentile(known, 0.5), max(known, default=None),
        pc.sum(some["unclean"]).as_py() or 0, parts,
    )  # fmt: skip


def _filled(mine: pa.Table, first_ms: int, last_ms: int, bound: int) -> list[Row]:
    """Equal bins of the time, each of the broker that was master for most of it."""
    edges = np.arange(bound + 1) * _bin_width(first_ms, last_ms, bound)
    begins = mine["start_ms"].to_numpy() - first_ms
    ends = mine["end_ms"].to_numpy() - first_ms
    number = np.diff(np.searchsorted(np.sort(begins), edges))
    brokers = mine["broker_id"].fill_null(0).to_numpy()
    ids = np.unique(brokers)
    time = np.array(
        [np.diff(_covered(begins[brokers == b], ends[brokers == b], edges)) for b in ids]
    )
    most = ids[np.argmax(time, axis=0)]
    return [
        {
            "broker_id": int(most[at]),
            "start_ms": int(edges[at]) + first_ms,
            "end_ms": min(last_ms, int(edges[at + 1]) + first_ms),
            "begun": int(number[at]),
        }
        for at in np.flatnonzero(time.sum(axis=0) > 0)
    ]


def _covered(begins: Any, ends: Any, edges: Any) -> Any:
    """How much of the time before each edge the intervals take."""

    def since(times: Any) -> Any:
        sums = np.concatenate([[0], np.cumsum(np.sort(times))])
        passed = np.searchsorted(np.sort(times), edges)
        return passed * edges - sums[passed]

    return since(begins) - since(ends)


def _least(mine: pa.Table, first_ms: int, last_ms: int, bound: int) -> list[Row]:
    """The least size of each bin of the time, and the last of it where that is another."""
    width = _bin_width(first_ms, last_ms, bound)
    place = np.maximum(mine["at"].to_numpy() - first_ms, 0) // width
    sizes = mine["size"].to_numpy()
    rows: list[Row] = []
    for at in np.unique(place):
        some = sizes[place == at]
        begin = first_ms + int(at) * width
        rows.append({"at": begin, "size": int(some.min()), "reason": f"the least of {len(some)}"})
        if some[-1] != some.min():
            rows.append({"at": begin + width - 1, "size": int(some[-1])})
    return rows


def _bin_width(first_ms: int, last_ms: int, bins: int) -> int:
    return max(1, -(-(last_ms - first_ms) // bins))
