"""The elections of each group, each with what led to it: one row per story that ends in a master.

The same rules as `batonmq.timeline`, as aggregations. An election ends a segment of its group:
what came since the election before led to it. `spine` numbers the segments with one window over the
few kinds that matter here; all that follows is aggregated by (group, segment) first.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame

SPINE_KINDS: Final = (
    "elected", "election_failed", "election_blocked", "switch_requested", "drained",
    "switch_failed",
)  # fmt: skip


def spine(events: DataFrame) -> DataFrame:
    """Those events of groups, with `seg` (elections before) and `last_epoch` (of the last one)."""
    kinds = ", ".join(f"'{kind}'" for kind in SPINE_KINDS)
    return events.sparkSession.sql(
        f"""
        SELECT *,
          coalesce(count(CASE WHEN kind = 'elected' AND broker_id > 0 THEN 1 END) OVER before, 0)
            AS seg,
          last(CASE WHEN kind = 'elected' AND broker_id > 0 THEN master_epoch END, true)
            OVER before AS last_epoch
        FROM {{events}}
        WHERE group <> '' AND kind IN ({kinds})
        WINDOW before AS (
          PARTITION BY group ORDER BY log_no, raft_index, part
          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
        """,
        events=events,
    )


def segments(spine_rows: DataFrame) -> DataFrame:
    """One row per segment: its election `e` (null: not yet), and the loss before it `m`.

    `m` is the first event that left the group without a master (null: none), `failed` the first
    election that found nobody, `meanwhile_ms` the earliest time of what was told then. A late
    note that an election is blocked belongs to the election before: `late_blocked_ms`.
    """
    return spine_rows.sparkSession.sql(
        """
        WITH marked AS (
          SELECT *,
            kind = 'election_blocked' AND coalesce(last_epoch > master_epoch, false) AS is_late,
            coalesce(proposed_ms, time_ms) AS told_ms
          FROM {rows}
          WHERE kind IN ('elected', 'election_failed', 'election_blocked')
        )
        SELECT group, seg,
          max(CASE WHEN kind = 'elected' AND broker_id > 0 THEN struct(
            seq, broker_id, master_epoch, master_before, address, set_before, sync_state_set,
            unclean, reason, node, detected_ms, silent_ms, told_ms AS elected_ms, told,
            sync_state_set_epoch, max_offset, confirm_offset) END) AS e,
          min(CASE WHEN kind <> 'elected' AND NOT is_late THEN struct(
            seq, kind, detected_ms, reason, node, silent_ms, master_before, set_before,
            master_epoch, told_ms, told) END) AS m,
          min(CASE WHEN kind = 'election_failed' THEN struct(
            seq, told_ms, reason, master_before) END) AS failed,
          least(min(CASE WHEN kind = 'election_failed' THEN told_ms END),
            min(CASE WHEN kind = 'election_blocked' AND NOT is_late THEN time_ms END))
            AS meanwhile_ms,
          min(CASE WHEN is_late THEN time_ms END) AS late_blocked_ms
        FROM marked
        GROUP BY group, seg
        """,
        rows=spine_rows,
    )


def losses(segment_rows: DataFrame) -> DataFrame:
    """The segments with what their stories know of the loss, and of the election before.

    `detected_again`: the loss was seen before it could be mended. Adds `detected_ms`, `reason`,
    `node`, `silent_ms`, `lost_master` (named in `how`), `master_before`, `set_before`.
    """
    return segment_rows.sparkSession.sql(
        """
        WITH known AS (
          SELECT *,
            coalesce(m.kind = 'election_failed' AND m.detected_ms IS NOT NULL, false)
              AS detected_again,
            CASE WHEN m.kind = 'election_failed' THEN m.master_before END AS m_master,
            CASE WHEN m.kind = 'election_failed' AND size(m.set_before) > 0 THEN m.set_before END
              AS m_set
          FROM {rows}
        )
        SELECT *,
          CASE WHEN detected_again OR e IS NULL THEN m.detected_ms ELSE e.detected_ms END
            AS detected_ms,
          CASE WHEN detected_again OR e IS NULL THEN m.reason ELSE e.reason END AS reason,
          CASE WHEN detected_again OR e IS NULL THEN m.node ELSE e.node END AS node,
          CASE WHEN detected_again OR e IS NULL THEN m.silent_ms ELSE e.silent_ms END AS silent_ms,
          CASE WHEN detected_again OR e IS NULL THEN m.master_before ELSE e.master_before END
            AS lost_master,
          CASE WHEN detected_again OR e IS NULL THEN m.kind ELSE 'elected' END AS seen_as,
          coalesce(nullif(m_master, 0), e.master_before, 0) AS master_before,
          coalesce(m_set, e.set_before) AS set_before
        FROM known
        """,
        rows=segment_rows,
    ).drop("m_master", "m_set")


def asked(spine_rows: DataFrame, loss_rows: DataFrame) -> DataFrame:
    """What tells of planned switches, with the elections around each.

    `late_request`: the election after its epoch is told already, and has the wanted winner.
    `has_latest`, `latest_before`: the election before it, and the master that this replaced.
    """
    return spine_rows.sparkSession.sql(
        """
        WITH asked AS (
          SELECT group, seg, seq, kind, master_epoch, broker_id, time_ms,
            detail.master AS master, detail.heldMs AS held_ms
          FROM {rows} WHERE kind IN ('switch_requested', 'drained', 'switch_failed')
        ), elected AS (
          SELECT group, seg, e.seq AS seq, e.master_epoch AS master_epoch,
            e.broker_id AS winner, master_before
          FROM {losses} WHERE e IS NOT NULL
        ), both AS (
          SELECT group, seg, seq, kind, master_epoch, broker_id, time_ms, master, held_ms,
            CAST(NULL AS STRUCT<seg: BIGINT,
              seq: STRUCT<log_no: INT, raft_index: BIGINT, part: INT>,
              winner: BIGINT>) AS election
          FROM asked
          UNION ALL
          SELECT group, seg, seq, 'elected', master_epoch, winner, NULL, NULL, NULL,
            struct(seg, seq, winner)
          FROM elected
        ), after AS (
          SELECT *, last(election, true) OVER (
              PARTITION BY group ORDER BY master_epoch DESC, election IS NULL DESC
              ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS next
          FROM both
        )
        SELECT a.*, before.master_before AS latest_before, before.seg IS NOT NULL AS has_latest,
          coalesce(a.kind = 'switch_requested' AND a.next.seq < a.seq
            AND a.next.winner = a.broker_id, false) AS late_request
        FROM after a LEFT JOIN elected before ON before.group = a.group AND before.seg = a.seg - 1
        WHERE a.election IS NULL
        """,
        rows=spine_rows,
        losses=loss_rows,
    )


def switches(asked_rows: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Planned switches: those that stand when a segment ends, and what was told too late for that.

    First: (group, seg, requested_ms, drained_ms, held_ms, who). A request begins a switch anew, and
    a failed one ends it. Second: (group, seg, requested_ms, drained_ms, held_ms) of the elections
    that they turn out to belong to: a request of an older epoch to the election after it if that
    has the wanted winner, a drained master to the election that replaced it.
    """
    session = asked_rows.sparkSession
    placed = session.sql(
        """
        WITH parts AS (
          SELECT *, coalesce(kind = 'switch_requested' AND NOT late_request, false) AS begins,
            coalesce(has_latest AND latest_before = broker_id, false) AS of_latest,
            count(CASE WHEN kind = 'switch_failed' THEN 1 END) OVER run AS part_no
          FROM {rows}
          WINDOW run AS (PARTITION BY group, seg ORDER BY seq
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
        )
        SELECT *,
          coalesce(max(begins OR (kind = 'drained' AND NOT of_latest)) OVER before, false)
            AS stands,
          max(part_no) OVER (PARTITION BY group, seg) AS last_part,
          max(CASE WHEN begins THEN seq END) OVER (PARTITION BY group, seg, part_no) AS begun_seq
        FROM parts
        WINDOW before AS (PARTITION BY group, seg, part_no ORDER BY seq
          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
        """,
        rows=asked_rows,
    )
    standing = session.sql(
        """
        SELECT group, seg,
          min_by(CASE WHEN begins THEN time_ms END, seq) FILTER (WHERE begins) AS requested_ms,
          min_by(time_ms, seq) FILTER (WHERE kind = 'drained' AND time_ms IS NOT NULL)
            AS drained_ms,
          max_by(coalesce(held_ms, -1), seq) FILTER (WHERE kind = 'drained') AS held_ms,
          flatten(collect_set(CASE WHEN begins THEN array(broker_id, coalesce(master, 0))
            ELSE array(broker_id) END)) AS who
        FROM {rows}
        WHERE kind IN ('switch_requested', 'drained') AND part_no = last_part
          AND NOT late_request AND (begun_seq IS NULL OR seq >= begun_seq)
          AND (begins OR stands OR NOT of_latest)
        GROUP BY group, seg
        """,
        rows=placed,
    )
    late = session.sql(
        """
        SELECT group, to_seg AS seg,
          min_by(time_ms, seq) FILTER (WHERE late_request AND time_ms IS NOT NULL) AS requested_ms,
          min_by(time_ms, seq) FILTER (WHERE kind = 'drained' AND time_ms IS NOT NULL)
            AS drained_ms,
          max_by(coalesce(held_ms, -1), seq) FILTER (WHERE kind = 'drained') AS held_ms
        FROM (
          SELECT *, CASE WHEN late_request THEN next.seg ELSE seg - 1 END AS to_seg
          FROM {rows}
          WHERE late_request OR (kind = 'drained' AND of_latest AND NOT stands)
        ) GROUP BY group, to_seg
        """,
        rows=placed,
    )
    return standing, late


__all__ = ["SPINE_KINDS", "asked", "losses", "segments", "spine", "switches"]
