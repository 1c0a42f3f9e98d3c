"""What is told after an election: reports of its master; members that leave, rejoin and cut.

`reports` joins by (group, master_epoch). `absences` has the one other window: per broker, over the
events that change its place in the set or need to know it; a truncation belongs to the story in
which its broker left.
"""

from __future__ import annotations

from pyspark.sql import DataFrame

_REPORTS = "'role_changed', 'opened', 'first_ack', 'pushed', 'drained', 'set_altered'"


def reigns(loss_rows: DataFrame) -> DataFrame:
    """(group, master_epoch, seg, seq, winner, next_seq): whose the events of an epoch are.

    `next_seq`: from there on the same epoch is that of another election, which must not be.
    """
    return loss_rows.sparkSession.sql(
        """
        SELECT group, master_epoch, seg, seq, winner, first_one, lead(seq) OVER (
            PARTITION BY group, master_epoch ORDER BY seg) AS next_seq
        FROM (
          SELECT group, e.master_epoch AS master_epoch, seg, e.seq AS seq, e.broker_id AS winner,
            coalesce(size(e.set_before), 0) = 0 AND e.master_before = 0 AND e.master_epoch <= 1
              AND NOT e.unclean AS first_one
          FROM {rows} WHERE e IS NOT NULL
        )
        """,
        rows=loss_rows,
    )


def reports(events: DataFrame, reign_rows: DataFrame) -> DataFrame:
    """Per (group, seg): the first of each report of its winner, and of the controllers' pushes.

    `serves`: it changed its set, or drained: only a master at work does, also one whose reports of
    opening got lost.
    """
    return events.sparkSession.sql(
        f"""
        SELECT r.group, r.seg,
          min(CASE WHEN v.kind = 'role_changed' AND upper(v.detail.role) = 'MASTER'
            AND v.broker_id = r.winner THEN struct(v.seq, v.time_ms) END) AS role,
          min(CASE WHEN v.kind = 'opened' AND v.broker_id IN (0, r.winner)
            THEN struct(v.seq, v.time_ms, v.detail.maxOffset AS max_offset,
              v.detail.confirmOffset AS confirm_offset) END) AS opened,
          min(CASE WHEN v.kind = 'first_ack' AND v.broker_id IN (0, r.winner)
            THEN struct(v.seq, v.time_ms, coalesce(v.detail.waitedMs, -1) AS waited_ms,
              v.detail.confirmOffset AS confirm_offset) END)
            AS first_ack,
          bool_or(v.kind = 'set_altered' OR (v.kind = 'drained' AND v.broker_id = r.winner))
            AS serves,
          least(
            min(CASE WHEN v.kind = 'pushed' AND v.detail.appliedMs > 0 THEN
              struct(v.seq, v.detail.appliedMs AS at) END).at,
            min(CASE WHEN v.kind = 'pushed' THEN struct(v.seq, v.time_ms AS at) END).at)
            AS pushed_ms
        FROM {{events}} v JOIN {{reigns}} r
          ON v.group = r.group AND v.master_epoch = r.master_epoch
          AND v.seq > r.seq AND (r.next_seq IS NULL OR v.seq < r.next_seq)
        WHERE v.kind IN ({_REPORTS}) AND v.time_ms IS NOT NULL
        GROUP BY r.group, r.seg
        """,
        events=events,
        reigns=reign_rows,
    )


def places(events: DataFrame, reign_rows: DataFrame, report_rows: DataFrame) -> DataFrame:
    """What changes a broker's place in the set, or needs to know it; `seg` is of its epoch.

    `is_open`: a member that leaves now leaves in that election's story.
    """
    return events.sparkSession.sql(
        """
        SELECT v.group, v.kind, v.seq, v.broker_id, v.time_ms, v.detail, v.reason, v.unclean,
          array_except(coalesce(v.set_before, array()), coalesce(v.sync_state_set, array()))
            AS leaving,
          array_except(coalesce(v.sync_state_set, array()), coalesce(v.set_before, array()))
            AS joining,
          r.seg, r.first_one,
          v.kind = 'elected' OR (r.seg IS NOT NULL AND
            NOT coalesce(p.first_ack.seq < v.seq, false)) AS is_open
        FROM {events} v
        LEFT JOIN {reigns} r ON v.group = r.group AND v.master_epoch = r.master_epoch
          AND v.seq >= r.seq AND (r.next_seq IS NULL OR v.seq < r.next_seq)
        LEFT JOIN {reports} p ON r.group = p.group AND r.seg = p.seg
        WHERE v.group <> '' AND (
          v.kind IN ('elected', 'set_altered', 'truncated', 'diverged', 'lease_lost')
          OR (v.kind = 'role_changed' AND NOT coalesce(upper(v.detail.role) = 'MASTER', false))
          OR (v.kind = 'role_changed' AND r.seg IS NULL))
        """,
        events=events,
        reigns=reign_rows,
        reports=report_rows,
    )


def cleaned(events: DataFrame) -> DataFrame:
    """(group, broker_id, seq): whom an operator made the controllers forget, and when."""
    return events.sparkSession.sql(
        """
        SELECT c.group, b.broker_id, c.seq
        FROM {events} c JOIN (
          SELECT DISTINCT group, explode(array_union(
            coalesce(set_before, array()), coalesce(sync_state_set, array()))) AS broker_id
          FROM {events} WHERE kind IN ('elected', 'set_altered')
        ) b ON b.group = c.group
        WHERE c.kind = 'broker_cleaned' AND (c.reason = 'the whole group'
          OR array_contains(split(c.reason, '[, ]+'), CAST(b.broker_id AS STRING)))
        """,
        events=events,
    )


def absences(place_rows: DataFrame, cleaned_rows: DataFrame) -> DataFrame:
    """Changes of each broker's place in the set, with what it did meanwhile, in order.

    Rows (group, broker_id, seq, action, kind, time_ms, bytes, story, state): `action` is `left`,
    `joined`, `cleaned`, `truncated`, or `seen` (another report of it); `story` the segment whose
    story a `left` opens, or whose epoch the row names (null: none of an election); `state` the
    newest `left`, `joined` or `cleaned` before the row as (action, story).
    """
    return place_rows.sparkSession.sql(
        """
        WITH steps AS (
          SELECT group, explode(leaving) AS broker_id, seq, 'left' AS action, time_ms, kind,
            0L AS bytes, CASE WHEN is_open THEN seg END AS story
          FROM {placed} WHERE kind IN ('elected', 'set_altered') AND size(leaving) > 0
          UNION ALL
          SELECT group, explode(joining), seq, 'joined', time_ms, kind, 0L,
            CASE WHEN first_one AND kind = 'set_altered' THEN seg END
          FROM {placed} WHERE kind IN ('elected', 'set_altered') AND size(joining) > 0
          UNION ALL
          SELECT group, broker_id, seq, CASE WHEN kind = 'truncated' THEN kind ELSE 'seen' END,
            time_ms, kind,
            coalesce(detail.fromOffset, 0L) - coalesce(detail.toOffset, 0L), seg
          FROM {placed} WHERE kind NOT IN ('elected', 'set_altered')
          UNION ALL
          SELECT group, broker_id, seq, 'cleaned', NULL, 'broker_cleaned', 0L, NULL FROM {cleaned}
        )
        SELECT *, last(CASE WHEN action IN ('left', 'joined', 'cleaned')
            THEN struct(action, story) END, true) OVER (
            PARTITION BY group, broker_id ORDER BY seq
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS state
        FROM steps
        """,
        placed=place_rows,
        cleaned=cleaned_rows,
    )


def rejoins(absence_rows: DataFrame) -> DataFrame:
    """Per (group, seg): what its absent members cut, whether one is missing, the earliest time."""
    return absence_rows.sparkSession.sql(
        """
        WITH belongs AS (
          SELECT group, broker_id, action, kind, time_ms, bytes, CASE
              WHEN action = 'left' THEN story
              WHEN state.action = 'left' THEN state.story
              WHEN action IN ('truncated', 'joined') THEN story
            END AS seg
          FROM {rows} WHERE action <> 'cleaned'
          UNION ALL
          SELECT group, broker_id, 'missing', NULL, NULL, 0L, place.story
          FROM (
            SELECT group, broker_id, max(struct(seq, action, story)) AS place
            FROM {rows} WHERE action IN ('left', 'joined', 'cleaned')
            GROUP BY group, broker_id
          ) WHERE place.action = 'left'
        )
        SELECT group, seg,
          sum(CASE WHEN action = 'truncated' THEN bytes ELSE 0 END) AS truncated_bytes,
          bool_or(action = 'missing') AS missing,
          min(CASE WHEN action IN ('joined', 'truncated', 'seen')
            OR (action = 'left' AND kind = 'set_altered') THEN time_ms END) AS beside_ms
        FROM belongs WHERE seg IS NOT NULL
        GROUP BY group, seg
        """,
        rows=absence_rows,
    )


__all__ = ["absences", "cleaned", "places", "reigns", "rejoins", "reports"]
