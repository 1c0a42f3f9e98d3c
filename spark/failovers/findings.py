"""Findings for an operator: disagreements, broken rules, losses; and, as info, limits of the input.

Each finding is a row (group, at_ms, severity, kind, text, subject, evidence). Where many events
show the same thing, one row counts them. `docs/spark-jobs.md` explains each kind. Here are those
that histories show by themselves; `spark.failovers.epoch_findings` compares them with epoch files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from batonmq.spark.failovers import clock_findings
from batonmq.spark.failovers.events import PART_BITS, PLACE, Logs
from batonmq.spark.failovers.tables import NEVER_SERVED

CRITICAL: Final = "critical"
WARNING: Final = "warning"
INFO: Final = "info"
SEVERITIES: Final = (CRITICAL, WARNING, INFO)
COLUMNS: Final = ("group", "at_ms", "severity", "kind", "text", "subject", "evidence")
ALONE_MS: Final = 60_000
"""A set of one for so long is worth a look."""


def of_histories(
    events: DataFrame,
    stories: DataFrame,
    bounds: DataFrame,
    overview: DataFrame,
    logs: Logs,
) -> list[DataFrame]:
    """Findings of the histories alone; `events` with the rows of damaged files."""
    valid = events.where("kind IS NOT NULL")
    return [
        _disagree(valid),
        *_ranges(valid, logs),
        _shared(valid.sparkSession, logs),
        _damaged(events),
        _diverged(valid),
        _second_masters(valid, stories),
        _elections(stories),
        _open_outages(stories),
        *clock_findings.of_clocks(stories, bounds, overview),
        _alone(valid, bounds),
        _begins(stories),
    ]


def _disagree(valid: DataFrame) -> DataFrame:
    return valid.sparkSession.sql(
        """
        SELECT group, first.at_ms AS at_ms, 'critical' AS severity, 'events_disagree' AS kind,
          concat(CASE WHEN one = other THEN concat('Controller ', one, ' has ', many, ' events ',
              'more than once, each time different')
            ELSE concat('Controllers ', one, ' and ', other, ' have ', many,
              ' events with different contents')
            END, ', the first at index ', first.raft_index, ' part ', first.part, ' of log ',
            first.log, '.') AS text,
          array_join(array_distinct(array(one, other)), ', ') AS subject,
          to_json(named_struct('controllers', array_distinct(array(one, other)),
            'events', many, 'log', first.log,
            'raftIndex', first.raft_index, 'part', first.part, 'eventKind', first.kind)) AS evidence
        FROM (
          SELECT group, one, other, count(*) AS many,
            min(struct(seq, log, raft_index, part, kind, time_ms AS at_ms)) AS first
          FROM {rows} WHERE disagree GROUP BY group, one, other)
        """,
        rows=valid,
    )


def _ranges(valid: DataFrame, logs: Logs) -> list[DataFrame]:
    ranges = valid.sparkSession.createDataFrame(
        list(logs.ranges), "log STRING, number INT, name STRING, low BIGINT, high BIGINT"
    )
    return [_lacking(valid, ranges), _ends(ranges)]


def _lacking(valid: DataFrame, ranges: DataFrame) -> DataFrame:
    """Events that a controller should have, since it has older and newer ones."""
    return valid.sparkSession.sql(
        f"""
        SELECT group, first.at_ms AS at_ms, 'warning' AS severity, 'missing_events' AS kind,
          concat('The history of controller ', name, ' lacks ', many, ' events that others have, ',
            'from index ', first.raft_index, ' on, though it begins before and ends after them.')
            AS text,
          name AS subject,
          to_json(named_struct('controller', name, 'log', log, 'events', many, 'firstRaftIndex',
            first.raft_index, 'lastRaftIndex', last.raft_index)) AS evidence
        FROM (
          SELECT v.group, v.log, r.name, count(*) AS many,
            min(struct(v.raft_index, v.part, v.time_ms AS at_ms)) AS first,
            max(struct(v.raft_index, v.part)) AS last
          FROM (SELECT *, {PLACE} AS place FROM {{valid}}) v JOIN {{ranges}} r ON r.log = v.log
          WHERE v.told & shiftleft(1L, r.number) = 0 AND v.place > r.low AND v.place < r.high
          GROUP BY v.group, v.log, r.name)
        """,
        valid=valid,
        ranges=F.broadcast(ranges),
    )


def _ends(ranges: DataFrame) -> DataFrame:
    """Controllers whose history begins later or ends earlier than those of others."""
    return ranges.sparkSession.sql(
        f"""
        WITH whole AS (
          SELECT *, min(low) OVER (PARTITION BY log) AS least,
            max(high) OVER (PARTITION BY log) AS most
          FROM {{ranges}}
        ), ends AS (
          SELECT *, explode(array_compact(array(
            CASE WHEN low > least THEN 'history_begins_late' END,
            CASE WHEN high < most THEN 'history_ends_early' END))) AS kind
          FROM whole
        ), numbered AS (
          SELECT *,
            CASE kind WHEN 'history_begins_late' THEN low ELSE high END >> {PART_BITS} AS its,
            CASE kind WHEN 'history_begins_late' THEN least ELSE most END >> {PART_BITS} AS theirs
          FROM ends
        )
        SELECT '' AS group, CAST(NULL AS BIGINT) AS at_ms, 'info' AS severity, kind, concat(
          'The history of controller ', name, CASE WHEN kind = 'history_begins_late'
            THEN ' begins' ELSE ' ends' END, ' at index ', its, ' of log ', log,
            ', that of others at ', theirs, '.') AS text, name AS subject,
          to_json(named_struct('controller', name, 'log', log, 'raftIndex', its, 'others', theirs))
            AS evidence
        FROM numbered
        """,
        ranges=ranges,
    )


def _shared(session: SparkSession, logs: Logs) -> DataFrame:
    """Groups of one name in several logs: at most as many rows as there are such groups."""
    rows = [
        (
            group,
            f"Group {group} is in {len(logs_of_it)} logs: histories of several clusters, or of "
            "controllers that were set up again. Each is listed by itself, the older ones as "
            + ", ".join(logs.group_in(group, log) for log in logs_of_it[:-1])
            + "; epoch files are compared with none.",
            json.dumps({"logs": logs_of_it}),
        )
        for group, logs_of_it in logs.shared.items()
    ]
    made = session.createDataFrame(rows, "`group` STRING, text STRING, evidence STRING")
    return made.selectExpr(
        "`group`", "CAST(NULL AS BIGINT) AS at_ms", "'warning' AS severity",
        "'group_in_several_logs' AS kind", "text", "`group` AS subject", "evidence",
    )  # fmt: skip


def _damaged(events: DataFrame) -> DataFrame:
    return events.sparkSession.sql(
        """
        SELECT '' AS group, CAST(NULL AS BIGINT) AS at_ms, 'warning' AS severity,
          'damaged_lines' AS kind,
          concat(copies, ' lines of ', damaged_file, ' are no events.') AS text,
          damaged_file AS subject,
          to_json(named_struct('file', damaged_file, 'lines', copies, 'reason', reason)) AS evidence
        FROM {rows} WHERE damaged_file IS NOT NULL
        """,
        rows=events,
    )


def _diverged(valid: DataFrame) -> DataFrame:
    return valid.sparkSession.sql(
        """
        SELECT group, time_ms AS at_ms, 'warning' AS severity, 'diverged' AS kind,
          concat('Broker ', broker_id, ' cannot follow until an operator has looked: ',
            coalesce(detail.reason, reason, 'no reason was given'), '.') AS text,
          concat('broker ', broker_id) AS subject,
          to_json(named_struct('brokerId', broker_id, 'masterEpoch', master_epoch, 'log', log,
            'raftIndex', raft_index)) AS evidence
        FROM {rows} WHERE kind = 'diverged'
        """,
        rows=valid,
    )


def _second_masters(valid: DataFrame, stories: DataFrame) -> DataFrame:
    """Another winner of the same epoch, or a master's report of one that did not win it."""
    return valid.sparkSession.sql(
        """
        WITH seen AS (
          SELECT group, master_epoch, broker_id, CAST(NULL AS BIGINT) AS at_ms, true AS won
          FROM {stories} WHERE kind IS NOT NULL
          UNION ALL
          SELECT group, master_epoch, broker_id, time_ms, false FROM {valid}
          WHERE broker_id > 0 AND (kind IN ('opened', 'first_ack')
            OR (kind = 'role_changed' AND upper(detail.role) = 'MASTER'))
        )
        SELECT group, at_ms, 'critical' AS severity, 'two_masters_in_epoch' AS kind,
          concat('Epoch ', master_epoch, ' has more than one master: brokers ',
            array_join(brokers, ', '), CASE WHEN elections > 1 THEN
              concat(' (', elections, ' elections)') ELSE '' END, '.') AS text,
          concat('epoch ', master_epoch) AS subject,
          to_json(named_struct('masterEpoch', master_epoch, 'brokerIds', brokers, 'elections',
            elections)) AS evidence
        FROM (
          SELECT group, master_epoch, min(at_ms) AS at_ms, count_if(won) AS elections,
            array_sort(array_distinct(array(min(broker_id), max(broker_id)))) AS brokers
          FROM seen GROUP BY group, master_epoch
        ) WHERE elections > 1 OR (elections > 0 AND size(brokers) > 1)
        """,
        valid=valid,
        stories=stories,
    )


def _elections(stories: DataFrame) -> DataFrame:
    """Unclean ones, epochs that do not grow, and masters that began below what was confirmed."""
    return stories.sparkSession.sql(
        """
        WITH before AS (
          SELECT *, max(master_epoch) OVER g AS top,
            lag(confirmed_offset) OVER (PARTITION BY group ORDER BY seg) AS confirmed_before
          FROM {rows} WHERE kind IS NOT NULL
          WINDOW g AS (PARTITION BY group ORDER BY seg
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
        ), judged AS (
          SELECT *, greatest(confirm_offset, confirmed_before) AS floor FROM before
        ), found AS (
          SELECT *, explode(array_compact(array(
            CASE WHEN unclean THEN 'unclean_election' END,
            CASE WHEN master_epoch < top THEN 'epoch_went_back' END,
            CASE WHEN NOT unclean AND opened_offset < floor
              THEN 'start_below_confirmed' END))) AS finding
          FROM judged
        )
        SELECT group, elected_ms AS at_ms, 'critical' AS severity, finding AS kind,
          concat('Broker ', broker_id, ' became master of epoch ', master_epoch, CASE finding
            WHEN 'unclean_election' THEN
              ' uncleanly: acknowledged messages that it lacks are lost.'
            WHEN 'epoch_went_back' THEN concat(' after epoch ', top, '.')
            ELSE concat(' with a log up to ', opened_offset, ', where ', floor,
              ' was confirmed before.') END) AS text,
          concat('epoch ', master_epoch) AS subject,
          to_json(named_struct('masterEpoch', master_epoch, 'brokerId', broker_id,
            'setBefore', set_before, 'epochBefore', top, 'logEnd', opened_offset,
            'confirmed', floor, 'raftIndex', raft_index)) AS evidence
        FROM found
        """,
        rows=stories,
    )


def _open_outages(stories: DataFrame) -> DataFrame:
    """A group without a master at the end of the history; after a planned stop that is no news."""
    return stories.sparkSession.sql(
        f"""
        SELECT group, coalesce(lost_since_ms, detected_ms, elected_ms, lost_ms) AS at_ms,
          CASE WHEN cause = 'goodbye' THEN 'info' ELSE 'warning' END AS severity,
          'outage_open' AS kind,
          CASE WHEN kind IS NULL THEN concat('There is no master since ', coalesce(how, 'then'),
              '; the history ends so.')
            ELSE concat('Broker ', broker_id, ', elected in epoch ', master_epoch,
              ', has not opened; the history ends so.') END AS text,
          concat('broker ', coalesce(broker_id, master_before, 0)) AS subject,
          to_json(named_struct('masterEpoch', master_epoch,
            'reason', reason)) AS evidence
        FROM {{rows}}
        WHERE kind IS NULL OR ({NEVER_SERVED})
        """,
        rows=stories,
    )


def _alone(valid: DataFrame, bounds: DataFrame) -> DataFrame:
    return valid.sparkSession.sql(
        f"""
        WITH sizes AS (
          SELECT group, seq, time_ms, master_epoch, sync_state_set,
            lead(time_ms) OVER (PARTITION BY group ORDER BY log_no, raft_index, part) AS until_ms
          FROM {{rows}}
          WHERE group <> '' AND kind IN ('elected', 'set_altered') AND time_ms IS NOT NULL
        ), largest AS (
          SELECT group AS name, max(greatest(size(sync_state_set), size(set_before))) AS largest
          FROM {{rows}} WHERE group <> '' AND kind IN ('elected', 'set_altered') GROUP BY group
        ), alone AS (
          SELECT s.*, least(coalesce(until_ms, b.last_ms), b.last_ms) - time_ms AS alone_ms
          FROM sizes s JOIN {{bounds}} b ON b.group = s.group JOIN largest l ON l.name = s.group
          WHERE size(s.sync_state_set) = 1 AND l.largest > 1
        )
        SELECT group, time_ms AS at_ms, 'warning' AS severity, 'set_of_one' AS kind,
          concat('Broker ', sync_state_set[0], ' was alone in the set for ',
            CAST(alone_ms / 1000 AS BIGINT), ' s: what it acknowledged was a single copy.') AS text,
          concat('broker ', sync_state_set[0]) AS subject,
          to_json(named_struct('brokerId', sync_state_set[0], 'masterEpoch', master_epoch,
            'aloneMs', alone_ms)) AS evidence
        FROM alone WHERE alone_ms >= {ALONE_MS}
        """,
        rows=valid,
        bounds=bounds,
    )


def _begins(stories: DataFrame) -> DataFrame:
    return stories.sparkSession.sql(
        """
        SELECT group, first.elected_ms AS at_ms, 'info' AS severity,
          'epochs_before_history' AS kind,
          concat('The histories begin with epoch ', first.epoch, '; what was before is not there.')
            AS text,
          concat('epoch ', first.epoch) AS subject,
          to_json(named_struct('firstEpoch', first.epoch)) AS evidence
        FROM (
          SELECT group, min(struct(seg, master_epoch AS epoch, elected_ms)) AS first
          FROM {rows} WHERE kind IS NOT NULL GROUP BY group)
        WHERE first.epoch > 1
        """,
        rows=stories,
    )


def together(parts: Sequence[DataFrame]) -> DataFrame:
    """All findings as the table has them; one without a time is of the day of none: null."""
    found = parts[0].select(*COLUMNS)
    for part in parts[1:]:
        found = found.unionByName(part.select(*COLUMNS))
    return found.selectExpr(
        "severity",
        "kind",
        "text",
        "subject",
        "evidence",
        "timestamp_millis(at_ms) AS at",
        "`group`",
        "to_date(timestamp_millis(at_ms)) AS day",
    )


__all__ = ["CRITICAL", "INFO", "SEVERITIES", "WARNING", "of_histories", "together"]
