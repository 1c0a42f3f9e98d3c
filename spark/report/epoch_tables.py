"""What the report and the summary take out of the tables of `epoch_history`, by SQL of DuckDB.

Of a table only the columns that count are read, and rows of what is listed or drawn; how many those
are is bounded, however long the history is. Times are ms since 1970 in UTC, durations ms; None: not
known. Free of Spark.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds

from batonmq.spark.report.plots import PARTS
from batonmq.spark.report.quantities import DAY_MS
from batonmq.spark.severity import SEVERITIES
from batonmq.spark.steps.sql import ResultTable

#: More broker groups than this are counted but not drawn; those that cost most are.
GROUPS_SHOWN: Final = 30
FAILOVERS_LISTED: Final = 50
#: Which rows of other tables: the first ones in this order, and how many.
_LISTED: Final = {
    "truncations": ('bytes DESC NULLS LAST, "at"', 50),
    "controllers": ('"at" DESC NULLS LAST, controller_epoch', 30),
    "findings": (
        f'list_position({list(SEVERITIES)}, severity), kind, "group", "at", subject, text', 200
    ),
}  # fmt: skip
_TOTALS: Final = """
    SELECT (SELECT count(*) FROM truncations) AS cuts,
        (SELECT coalesce(sum(bytes), 0) FROM truncations) AS cut_bytes,
        (SELECT count(*) FROM controllers) AS leader_changes
"""
#: Bins of the distribution per decade of ms.
BINS_PER_DECADE: Final = 6
_MARKS_TOTAL: Final = 3_000
_MARKS_MOST: Final = 400
_CELLS_DRAWN: Final = 12_000
ROWS_HELD: Final = 50_000
_FOLDERS: Final = ds.partitioning(
    pa.schema([("group", pa.string()), ("day", pa.date32())]), flavor="hive"
)
_TABLES: Final = (
    "masterships", "failovers", "unavailability", "set_changes", "truncations", "findings",
    "controllers",
)  # fmt: skip
# `took_ms` is all the time without writes, noticed or not. Of it `detect_part_ms` is a part: the
# hold of a planned switch, the silence by which a master that hung was missed; what was silence
# before a session closed is none.
_CHANGES: Final = """
    SELECT * REPLACE (coalesce(kind, 'unknown') AS kind), without_writes_ms AS took_ms,
        CASE WHEN kind = 'planned_switch' THEN detect_ms
            ELSE without_writes_ms - unavailable_ms END AS detect_part_ms,
        coalesce(kind <> 'first_election', true) AS is_change
    FROM failovers
"""
_COSTLY: Final = """ORDER BY unclean DESC NULLS LAST, took_ms DESC NULLS LAST,
    elected_at DESC NULLS LAST, "group", master_epoch, kind"""
_GROUPS: Final = f"""
    WITH reigns AS (
        SELECT "group", count(*) AS masterships, min(began_at) AS low, max(ended_at) AS ended,
            greatest(max(began_at), max(opened_at), max(first_ack_at), ended) AS high
        FROM masterships GROUP BY ALL),
    elections AS (
        SELECT "group", count_if(is_change) AS changes,
            count(*) AS masters, sum(truncated_bytes) AS truncated_bytes,
            least(min(detected_at), min(elected_at)) AS low,
            greatest(max(elected_at), max(opened_at), max(first_ack_at)) AS high
        FROM changes GROUP BY ALL),
    sets AS (
        SELECT "group", count(*) AS set_changes, min("at") AS low, max("at") AS high
        FROM set_changes GROUP BY ALL),
    days AS (
        SELECT "group", sum(outages) AS outages, sum(unavailable_ms) AS unavailable_ms,
            max(longest_ms) AS longest_ms, bool_or(open) AS is_open,
            min(day) AS low, max(day) + {DAY_MS} AS high
        FROM unavailability GROUP BY ALL)
    SELECT "group" AS name, coalesce(masterships, 0) AS masterships,
        coalesce(masters, 0) AS masters, coalesce(changes, 0) AS changes,
        coalesce(truncated_bytes, 0) AS truncated_bytes, coalesce(set_changes, 0) AS set_changes,
        coalesce(outages, 0) AS outages, coalesce(unavailable_ms, 0) AS unavailable_ms,
        coalesce(longest_ms, 0) AS longest_ms, coalesce(is_open, false) AS is_open,
        if(is_open, 'no_master', 'has_a_master') AS now, if(is_open, ended, NULL) AS lost_ms,
        greatest(least(reigns.low, elections.low, sets.low), days.low) AS first_ms,
        least(greatest(reigns.high, elections.high, sets.high), days.high) AS last_ms
    FROM reigns FULL JOIN elections USING ("group") FULL JOIN sets USING ("group")
        FULL JOIN days USING ("group")
    WHERE "group" IS NOT NULL
    ORDER BY unavailable_ms DESC, masterships DESC, name
"""
_REIGNS: Final = """
    SELECT broker_id, master_epoch, ended_at, ended_by, address,
        coalesce(opened_at, first_ack_at, began_at, getvariable('first_ms')) AS start_ms,
        greatest(start_ms, coalesce(ended_at, getvariable('last_ms'))) AS end_ms
    FROM masterships WHERE "group" = $1 ORDER BY start_ms, master_epoch
"""
#: Equal bins of the time, each of the broker that was master for most of it.
_BINNED_REIGNS: Final = f"""
    WITH reigns AS (
        SELECT coalesce(broker_id, 0) AS broker_id, start_ms - getvariable('first_ms') AS low,
            end_ms - getvariable('first_ms') AS high, getvariable('width') AS width
        FROM ({_REIGNS})),
    parts AS (
        SELECT *, unnest(range(greatest(low // width, 0), least(high // width + 1, $2))) AS bin
        FROM reigns),
    held AS (
        SELECT bin, width, broker_id, count_if(low >= bin * width) AS begun,
            sum(least(high, (bin + 1) * width) - greatest(low, bin * width)) AS ms
        FROM parts GROUP BY ALL)
    SELECT arg_max(broker_id, (ms, -broker_id)) AS broker_id,
        bin * width + getvariable('first_ms') AS start_ms,
        least(start_ms + width, getvariable('last_ms')) AS end_ms, sum(begun) AS begun
    FROM held GROUP BY bin, width HAVING sum(ms) > 0 ORDER BY bin
"""

Row = dict[str, Any]


class Lane(NamedTuple):
    """What is drawn of one group: rows, or equal bins of the time where they are many."""

    group: str
    rows: list[Row]
    binned: bool = False


class EpochTables:
    """The tables by their names. Raises OSError."""

    def __init__(self, table: Callable[[str], ResultTable], held: Mapping[str, pa.Table]) -> None:
        """`held`: the rows of small tables; of another one each query reads what it needs."""
        import duckdb  # tasks on a cluster import this module, and need it not

        # More threads would only wait for one another: few files, and few rows of each.
        self._db = duckdb.connect(config={"threads": 1})
        self._db.execute("SET TimeZone = 'UTC'")
        for name in _TABLES:
            dataset = held[name] if name in held else table(name).dataset(_FOLDERS)
            times = [f for f in dataset.schema if pa.types.is_temporal(f.type)]
            in_ms = ", ".join(f'epoch_ms("{each.name}") AS "{each.name}"' for each in times)
            self._db.register(f"{name}_rows", dataset)
            shown = f"* {f'REPLACE ({in_ms})' if in_ms else ''}"
            self._db.execute(f"CREATE VIEW {name} AS SELECT {shown} FROM {name}_rows")
        # Nearly all queries need it; kept, a million of them would take some 300 MiB.
        kind = "TABLE" if "failovers" in held else "VIEW"
        self._db.execute(f"CREATE {kind} changes AS {_CHANGES}")

    def rows(self, query: str, *values: Any) -> list[Row]:
        found = self._db.execute(query, values)
        names = [each[0] for each in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def groups(self) -> list[Row]:
        """Every broker group, those that cost most first.

        `lost_ms`: it is without a master at the end, and since when. `first_ms` and `last_ms` bound
        the time that the tables cover. They have days without outages, too, so a wrong clock does
        not stretch it.
        """
        return self.rows(_GROUPS)

    def kinds(self) -> list[Row]:
        """Per kind of election, first elections too; the most frequent first. `parts_ms`: medians
        of what is known."""
        names = {name: name for name, *_ in PARTS} | {"detect_ms": "detect_part_ms"}
        # No client waited for the first write of an idle one.
        only = {"first_ack_ms": "FILTER (NOT coalesce(idle, false))"}
        parts = [f"{n}: quantile_disc({c}, 0.5) {only.get(n, '')}" for n, c in names.items()]
        return self.rows(f"""
            SELECT kind, count(*) AS number, count(took_ms) AS known, max(took_ms) AS longest_ms,
                quantile_disc(took_ms, 0.5) AS median_ms, count_if(unclean) AS unclean,
                {{{", ".join(parts)}}} AS parts_ms
            FROM changes GROUP BY kind ORDER BY number DESC, kind
        """)

    def durations(self) -> tuple[dict[str, dict[int, int]], int | None, int | None]:
        """({kind: {bin: number}}, median, p99) of all known times without writes, without first
        elections; bin n begins at 10^(n / BINS_PER_DECADE) ms."""
        bins: dict[str, dict[int, int]] = {}
        known = "FROM changes WHERE is_change AND took_ms IS NOT NULL"
        for row in self.rows(f"""
            SELECT kind, count(*) AS number,
                floor(log10(greatest(took_ms, 1)) * {BINS_PER_DECADE} + 1e-9) AS bin
            {known} GROUP BY ALL ORDER BY kind, bin
        """):
            bins.setdefault(row["kind"], {})[int(row["bin"])] = row["number"]
        (parts,) = self.rows(f"SELECT quantile_disc(took_ms, [0.5, 0.99]) AS ms {known}")
        return bins, *(parts["ms"] or (None, None))

    def dearest(self) -> list[Row]:
        """The changes that cost most."""
        listed = f"WHERE is_change OR unclean {_COSTLY} LIMIT {FAILOVERS_LISTED}"
        return self.rows(f"SELECT * FROM changes {listed}")

    def totals(self) -> Row:
        """How many truncations and bytes of them, changes of the leading controller, and findings
        by severity there are."""
        (row,) = self.rows(_TOTALS)
        severities = self.rows("SELECT severity, count(*) AS many FROM findings GROUP BY severity")
        return row | {"numbers": {each["severity"]: each["many"] for each in severities}}

    def listed(self, table: str) -> list[Row]:
        """The rows of a table that the page lists."""
        order, most = _LISTED[table]
        return self.rows(f"SELECT * FROM {table} ORDER BY {order} LIMIT {most}")

    def masterships(self, groups: Sequence[Row], first_ms: int, last_ms: int) -> list[Lane]:
        """Who was master of these groups, and when (`start_ms`, `end_ms`)."""
        bound, lanes = rows_each(len(groups)), []
        self._db.execute("SET VARIABLE first_ms = $1", (first_ms,))
        self._db.execute("SET VARIABLE last_ms = $1", (last_ms,))
        self._db.execute("SET VARIABLE width = $1", (_bin_width(first_ms, last_ms, bound),))
        for group in groups:
            binned = group["masterships"] > bound
            query, values = (_BINNED_REIGNS, (bound,)) if binned else (_REIGNS, ())
            lanes.append(Lane(group["name"], self.rows(query, group["name"], *values), binned))
        return lanes if any(lane.rows for lane in lanes) else []

    def marks(self, groups: Sequence[Row]) -> list[Row]:
        """Of each group the changes that cost most; `at_ms` and `end_ms` bound the time without
        writes, one of them may be unknown."""
        return self.rows(
            f"""SELECT *, coalesce(if(idle, opened_at, NULL), first_ack_at, opened_at) AS end_ms,
                coalesce(end_ms - took_ms, detected_at, elected_at, end_ms) AS at_ms
            FROM changes WHERE list_contains($1, "group") AND at_ms IS NOT NULL
            QUALIFY row_number() OVER (PARTITION BY "group" {_COSTLY}) <= $2
            ORDER BY "group", unclean DESC NULLS LAST, took_ms DESC NULLS LAST,
                elected_at DESC NULLS LAST, master_epoch""",
            [group["name"] for group in groups], rows_each(len(groups)),
        )  # fmt: skip

    def set_sizes(self, groups: Sequence[Row], first_ms: int, last_ms: int) -> list[Lane]:
        """Sizes of SyncStateSets (`at`, `size`) in the order of time; the least of each bin, and
        the last of it where that is another."""
        bound, lanes = rows_each(len(groups)), []
        width = _bin_width(first_ms, last_ms, bound)
        for group in groups:
            mine = """FROM (SELECT *, coalesce(size_after, len(set_after)) AS size FROM set_changes)
                WHERE "group" = $1 AND "at" IS NOT NULL AND size IS NOT NULL"""
            ((many,),) = self._db.execute(f"SELECT count(*) {mine}", (group["name"],)).fetchall()
            if many > bound:
                rows = []
                for row in self.rows(
                    f"""SELECT greatest("at" - $2, 0) // $3 AS bin, count(*) AS many,
                        min(size) AS least, arg_max(size, ("at", sync_state_set_epoch)) AS newest
                    {mine} GROUP BY bin ORDER BY bin""",
                    group["name"], first_ms, width,
                ):  # fmt: skip
                    begin, least = first_ms + row["bin"] * width, row["least"]
                    why = f"the least of {row['many']}"
                    rows.append({"at": begin, "size": least, "reason": why})
                    if row["newest"] != least:
                        rows.append({"at": begin + width - 1, "size": row["newest"]})
                lanes.append(Lane(group["name"], rows, binned=True))
            elif many:
                ordered = 'ORDER BY "at", sync_state_set_epoch'
                rows = self.rows(f"SELECT * {mine} {ordered}", group["name"])
                before = rows[0]["set_before"]
                first = [{"at": first_ms, "size": len(before)}] if before else []
                lanes.append(Lane(group["name"], [*first, *rows]))
        return lanes

    def days(self, groups: Sequence[Row]) -> tuple[int, list[Row]]:
        """(days of one cell, cells): of all groups together (`group` is null) and of each."""
        ((low, high),) = self._db.sql("SELECT min(day), max(day) FROM unavailability").fetchall()
        if low is None:
            return 1, []
        number = (high - low) // DAY_MS + 1
        step = max(1, -(-number * (len(groups) + 1) // _CELLS_DRAWN))
        wide = step * DAY_MS
        cell = f"""{low} + (day - {low}) // {wide} * {wide} AS "at", sum(outages) AS outages,
            sum(unavailable_ms) AS unavailable_ms, max(longest_ms) AS longest_ms
            FROM unavailability WHERE day IS NOT NULL"""
        return step, self.rows(
            f"""SELECT NULL AS "group", {cell} GROUP BY "at"
            UNION ALL
            SELECT "group", {cell} AND list_contains(?, "group") GROUP BY "group", "at" """,
            [group["name"] for group in groups],
        )


def rows_each(groups: int) -> int:
    """How many rows of one group are drawn one by one, and how many bins replace more."""
    return max(100, min(_MARKS_MOST, _MARKS_TOTAL // max(1, groups)))


def _bin_width(first_ms: int, last_ms: int, bins: int) -> int:
    return max(1, -(-(last_ms - first_ms) // bins))
