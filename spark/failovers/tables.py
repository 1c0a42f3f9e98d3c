"""The tables for operators, made of stories and events; `docs/spark-jobs.md` lists the columns.

Every table has `group` and `day` (UTC date of the row's first time) as its last columns: they
become the folders. Times are timestamps, durations ms, null is unknown, not applicable or open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

_DAY_MS = 86_400_000


def _at(column: str, name: str) -> str:
    return f"timestamp_millis({column}) AS {name}"


def _after(later: str, earlier: str, name: str) -> str:
    """SQL: ms between two steps; null where clocks contradict each other."""
    return f"CASE WHEN {later} >= {earlier} THEN {later} - {earlier} END AS {name}"


def _day(column: str) -> str:
    return f"to_date(timestamp_millis({column})) AS day"


SILENCE: Final = (
    "CASE WHEN endswith(cause, '_silent') AND silent_ms > 0 AND lost_since_ms IS NULL "
    "THEN silent_ms ELSE 0 END"
)
"""SQL: how long the lost master was silent before the detection, if silence was the cause."""


def failovers(stories: DataFrame) -> DataFrame:
    """One row per change of master."""
    return stories.where("kind IS NOT NULL").selectExpr(
        "master_epoch",
        "kind",
        "cause",
        "how",
        "node AS detected_by",
        "nullif(master_before, 0) AS master_before",
        "broker_id AS master",
        "address",
        "coalesce(set_before, array()) AS set_before",
        "coalesce(sync_state_set, array()) AS sync_state_set",
        _at("detected_ms", "detected_at"),
        _at("elected_ms", "elected_at"),
        _at("role_ms", "role_at"),
        _at("opened_ms", "opened_at"),
        _at("first_ack_ms", "first_ack_at"),
        "silent_ms",
        "CASE WHEN kind = 'planned_switch' THEN CASE WHEN detected_ms >= start_ms "
        "THEN detected_ms - start_ms END ELSE silent_ms END AS detect_ms",
        _after("elected_ms", "detected_ms", "elect_ms"),
        _after("role_ms", "elected_ms", "role_ms"),
        _after("opened_ms", "role_ms", "open_ms"),
        _after("first_ack_ms", "opened_ms", "first_ack_ms"),
        "unavailable_ms",
        f"CASE WHEN implausible IS NULL THEN unavailable_ms + {SILENCE} END AS without_writes_ms",
        "held_ms",
        "idle",
        "unclean",
        "overtaken",
        "complete",
        "truncated_bytes",
        "clock_problem",
        "`group`",
        _day("coalesce(began_ms, elected_ms)"),
    )


def masterships(stories: DataFrame, controllers: Sequence[str]) -> DataFrame:
    """One row per mastership: it ends when the next master is elected, or when it is lost."""
    return stories.sparkSession.sql(
        """
        WITH ended AS (
          SELECT *, coalesce(next_failed_ms, next_elected_ms, next_lost_ms) AS ended_ms,
            CASE WHEN next_failed_ms IS NOT NULL OR next_lost_ms IS NOT NULL THEN 'master_lost'
              ELSE next_kind END AS ended_by
          FROM {rows} WHERE kind IS NOT NULL
        )
        SELECT master_epoch, broker_id, address,
          timestamp_millis(elected_ms) AS began_at, timestamp_millis(opened_ms) AS opened_at,
          timestamp_millis(first_ack_ms) AS first_ack_at, timestamp_millis(ended_ms) AS ended_at,
          ended_by, CASE WHEN ended_ms >= elected_ms THEN ended_ms - elected_ms END AS duration_ms,
          told, group, to_date(timestamp_millis(elected_ms)) AS day
        FROM ended
        """,
        rows=stories,
    ).transform(lambda rows: _seen_by(rows, controllers))


def _seen_by(rows: DataFrame, controllers: Sequence[str]) -> DataFrame:
    names = [
        F.when(F.col("told").bitwiseAND(F.lit(1 << number)) != 0, F.lit(name))
        for number, name in enumerate(controllers)
    ]
    seen = F.array_compact(F.array(*names)) if names else F.array().cast("array<string>")
    columns = [
        seen.alias("seen_by") if name == "told" else F.col(f"`{name}`") for name in rows.columns
    ]
    return rows.select(*columns)


NEVER_SERVED: Final = (
    "kind IS NOT NULL AND NOT overtaken AND is_newest "
    "AND first_ack_ms IS NULL AND opened_ms IS NULL AND NOT serves"
)
"""SQL: the newest master of a group, which did not get to work."""
_LOST_MS: Final = "coalesce(s.lost_since_ms, s.detected_ms, s.elected_ms, s.lost_ms)"
CLOCK_MS: Final = 1_000
"""Clocks of hosts that keep time differ by less."""


def with_implausible(stories: DataFrame, bounds: DataFrame) -> DataFrame:
    """Stories with `implausible`: why the outage that clocks show is not counted; null if it is.

    `outside`: it began or ended far from the time of its group. `after_next`: its master began to
    serve after the next one was elected, by their clocks, though before it in the log.
    """
    return stories.sparkSession.sql(
        f"""
        SELECT s.*, CASE
            WHEN s.unavailable_ms IS NULL THEN NULL
            WHEN s.start_ms < b.first_ms - {_DAY_MS}
              OR s.start_ms + s.unavailable_ms > b.last_ms + {_DAY_MS} THEN 'outside'
            WHEN s.next_elected_ms >= s.elected_ms
              AND s.start_ms + s.unavailable_ms > s.next_elected_ms + {CLOCK_MS} THEN 'after_next'
          END AS implausible
        FROM {{rows}} s LEFT JOIN {{bounds}} b ON b.group = s.group
        """,
        rows=stories,
        bounds=bounds,
    )


def outages(stories: DataFrame, bounds: DataFrame) -> DataFrame:
    """(group, start_ms, end_ms, open): when writes were impossible; they do not overlap.

    A first election is none. The silence by which a hung master was noticed is part of an outage:
    writers got no reply either. It is open if no master acknowledged or opened until the last event
    of the group; a master that was overtaken, or lost before it served, leaves its outage to what
    followed.
    """
    return stories.sparkSession.sql(
        f"""
        WITH told AS (
          SELECT group, start_ms - {SILENCE} AS start_ms, start_ms + unavailable_ms AS end_ms,
            false AS open
          FROM {{rows}}
          WHERE unavailable_ms IS NOT NULL AND implausible IS NULL AND kind <> 'first_election'
          UNION ALL
          SELECT s.group, {_LOST_MS}, b.last_ms, true
          FROM {{rows}} s JOIN {{bounds}} b ON b.group = s.group
          WHERE {_LOST_MS} BETWEEN b.first_ms - {_DAY_MS} AND b.last_ms
            AND ((s.kind IS NULL AND (s.seg > 0
                OR s.master_before > 0 OR size(s.set_before) > 0))
              OR (s.kind <> 'first_election' AND {NEVER_SERVED}))
        ), after AS (
          SELECT *, greatest(start_ms, max(end_ms) OVER (
              PARTITION BY group ORDER BY start_ms, end_ms, open
              ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) AS from_ms
          FROM told
        )
        SELECT group, from_ms AS start_ms, greatest(from_ms, end_ms) AS end_ms, open FROM after
        """,
        rows=stories,
        bounds=bounds,
    )


def unavailability(outage_rows: DataFrame, bounds: DataFrame) -> DataFrame:
    """One row per group and day; an outage over midnight is split, and counts where it begins.

    `longest_ms` is how long the longest outage of that day took, on other days too.
    """
    return outage_rows.sparkSession.sql(
        f"""
        WITH days AS (
          SELECT group, explode(sequence(
            to_date(timestamp_millis(first_ms)), to_date(timestamp_millis(last_ms)))) AS day
          FROM {{bounds}}
        ), parts AS (
          SELECT group, start_ms, end_ms, open, explode(sequence(
            to_date(timestamp_millis(start_ms)), to_date(timestamp_millis(end_ms)))) AS day
          FROM {{outages}}
        ), cut AS (
          SELECT group, day, open AND day = to_date(timestamp_millis(end_ms)) AS open,
            day = to_date(timestamp_millis(start_ms)) AS begins, end_ms - start_ms AS whole_ms,
            least(end_ms, unix_millis(CAST(day AS TIMESTAMP)) + {_DAY_MS})
              - greatest(start_ms, unix_millis(CAST(day AS TIMESTAMP))) AS part_ms
          FROM parts
        ), sums AS (
          SELECT group, day, count_if(begins) AS outages, sum(part_ms) AS unavailable_ms,
            max(whole_ms) AS longest_ms, bool_or(open) AS open
          FROM cut WHERE part_ms > 0 OR begins OR open GROUP BY group, day
        )
        SELECT coalesce(s.outages, 0L) AS outages, coalesce(s.unavailable_ms, 0L) AS unavailable_ms,
          coalesce(s.longest_ms, 0L) AS longest_ms, coalesce(s.open, false) AS open,
          coalesce(d.group, s.group) AS group, coalesce(d.day, s.day) AS day
        FROM days d FULL JOIN sums s ON s.group = d.group AND s.day = d.day
        """,
        bounds=bounds,
        outages=outage_rows,
    )


GAP_DAYS: Final = 366
"""A longer time without events is a wrong clock rather than a quiet cluster."""


def bounds(overview: DataFrame) -> DataFrame:
    """(group, first_ms, last_ms, events, outliers, least_ms, most_ms) of each group.

    Its time is that of controllers' clocks. Where more than GAP_DAYS lie between two days on which
    there are events, the part with most events counts; `outliers` are the events of other parts,
    which lie between `least_ms` and `most_ms`. So no clock can make a history of many years.
    """
    return overview.sparkSession.sql(
        f"""
        WITH days AS (
          SELECT group, day, sum(events) AS events, min(first_ms) AS first_ms,
            max(last_ms) AS last_ms
          FROM {{rows}} WHERE group <> '' AND day IS NOT NULL GROUP BY group, day
        ), breaks AS (
          SELECT *, int(coalesce(datediff(day, lag(day) OVER g) > {GAP_DAYS}, false)) AS breaks
          FROM days WINDOW g AS (PARTITION BY group ORDER BY day)
        ), parts AS (
          SELECT *, sum(breaks) OVER (PARTITION BY group ORDER BY day
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS part
          FROM breaks
        ), spans AS (
          SELECT group, part, sum(events) AS events, min(first_ms) AS first_ms,
            max(last_ms) AS last_ms
          FROM parts GROUP BY group, part
        ), times AS (
          SELECT group, max(struct(events, part, first_ms, last_ms)) AS main,
            sum(events) AS events, min(first_ms) AS least_ms, max(last_ms) AS most_ms
          FROM spans GROUP BY group
        ), every AS (
          SELECT group, sum(events) AS events, min(any_first_ms) AS first_ms,
            max(any_last_ms) AS last_ms
          FROM {{rows}} WHERE group <> '' GROUP BY group
        )
        SELECT v.group, coalesce(t.main.first_ms, v.first_ms) AS first_ms,
          coalesce(t.main.last_ms, least(v.last_ms, v.first_ms + {GAP_DAYS * _DAY_MS})) AS last_ms,
          v.events, coalesce(t.events - t.main.events, 0L) AS outliers, t.least_ms, t.most_ms
        FROM every v LEFT JOIN times t ON t.group = v.group
        WHERE v.first_ms IS NOT NULL
        """,
        rows=overview,
    )


def set_changes(events: DataFrame) -> DataFrame:
    """Every change of a SyncStateSet, by elections too."""
    before, after = (
        f"array_sort(coalesce({name}, array()))" for name in ("set_before", "sync_state_set")
    )
    return events.where(
        f"`group` <> '' AND kind IN ('elected', 'set_altered', 'broker_cleaned') "
        f"AND time_ms IS NOT NULL AND {before} <> {after}"
    ).selectExpr(
        _at("time_ms", "at"),
        "master_epoch",
        "sync_state_set_epoch",
        f"{before} AS set_before",
        f"{after} AS set_after",
        f"array_except({after}, {before}) AS joined",
        f"array_except({before}, {after}) AS left",
        f"CAST(size({after}) AS BIGINT) AS size_after",
        "reason",
        "kind",
        "`group`",
        _day("time_ms"),
    )


def truncations(events: DataFrame) -> DataFrame:
    """Every cut of a replica's log."""
    return events.where("`group` <> '' AND kind = 'truncated' AND time_ms IS NOT NULL").selectExpr(
        _at("time_ms", "at"),
        "broker_id",
        "master_epoch",
        "detail.fromOffset AS from_offset",
        "detail.toOffset AS to_offset",
        "coalesce(detail.fromOffset, 0L) - coalesce(detail.toOffset, 0L) AS bytes",
        "`group`",
        _day("time_ms"),
    )


def controllers(events: DataFrame) -> DataFrame:
    """Every change of the leading controller; `group` is empty."""
    return events.where(
        "kind = 'controller_leader_changed' AND coalesce(proposed_ms, time_ms) IS NOT NULL"
    ).selectExpr(
        _at("coalesce(proposed_ms, time_ms)", "at"),
        "node AS leader",
        "node_before AS leader_before",
        "controller_epoch",
        "'' AS `group`",
        _day("coalesce(proposed_ms, time_ms)"),
    )


__all__ = [
    "CLOCK_MS",
    "GAP_DAYS",
    "NEVER_SERVED",
    "bounds",
    "controllers",
    "failovers",
    "masterships",
    "outages",
    "set_changes",
    "truncations",
    "unavailability",
    "with_implausible",
]
