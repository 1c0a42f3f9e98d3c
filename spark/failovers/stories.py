"""One row per change of master, with the values of `batonmq.timeline_story.Story`.

Times are ms here; `spark.failovers.tables` makes timestamps of them. The two windows over a group
see one short row per election.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame

from batonmq.retry import LAST_PAUSE_MS
from batonmq.timeline import HOW
from spark.failovers import elections, members
from spark.work import Work

SERVED_MS: Final = 1_000
"""Open for so long, a master that acknowledged nothing was asked for nothing."""
_CAUSAL: Final = (
    "requested_ms", "drained_ms", "detected_ms", "elected_ms", "role_ms", "opened_ms",
    "first_ack_ms",
)  # fmt: skip
"""Steps that follow from one another, each on some clock."""
_CLOCKS: Final = {
    "requested_ms": "concat('controller ', coalesce(node, ''))",
    "drained_ms": "concat('broker ', master_before)",
    "detected_ms": "concat('controller ', coalesce(node, ''))",
    "elected_ms": "concat('controller ', coalesce(e.node, ''))",
    "role_ms": "concat('broker ', e.broker_id)",
    "opened_ms": "concat('broker ', e.broker_id)",
    "first_ack_ms": "concat('broker ', e.broker_id)",
}


def told(events: DataFrame, work: Work) -> DataFrame:
    """All segments of all groups with everything that is known of their elections.

    A segment without an election (`e` null) is the newest loss of its group, not mended yet.
    """
    spine = work.keep(elections.spine(events), "spine")
    losses = work.keep(elections.losses(elections.segments(spine)), "losses")
    standing, late = elections.switches(work.keep(elections.asked(spine, losses), "asked"))
    reigns = work.keep(members.reigns(losses), "reigns")
    reports = work.keep(members.reports(events, reigns), "reports")
    places = work.keep(members.places(events, reigns, reports), "places")
    absences = members.absences(places, members.cleaned(events))
    rejoins = members.rejoins(work.keep(absences, "absences"))
    session = events.sparkSession
    return session.sql(
        """
        SELECT l.*,
          s.group IS NOT NULL AS by_switch, t.group IS NOT NULL AS late_switch,
          CASE WHEN s.group IS NOT NULL THEN coalesce(s.requested_ms, t.requested_ms)
            ELSE t.requested_ms END AS requested_ms,
          CASE WHEN s.group IS NOT NULL THEN coalesce(s.drained_ms, t.drained_ms)
            ELSE t.drained_ms END AS drained_ms,
          coalesce(t.held_ms, s.held_ms, -1) AS held_ms,
          e.elected_ms AS elected_ms,
          coalesce(p.serves, false) AS serves,
          p.role.time_ms AS role_ms, p.opened, p.opened.time_ms AS opened_ms,
          p.first_ack, p.first_ack.time_ms AS first_ack_ms,
          coalesce(p.first_ack.waited_ms, -1) AS waited_ms,
          coalesce(r.truncated_bytes, 0L) AS truncated_bytes,
          coalesce(r.missing, false) AS missing,
          least(p.pushed_ms, r.beside_ms, l.meanwhile_ms,
            CASE WHEN l.detected_again THEN l.e.detected_ms END) AS beside_ms
        FROM {losses} l
        LEFT JOIN {standing} s ON s.group = l.group AND s.seg = l.seg
          AND l.m IS NULL AND array_contains(s.who, l.e.broker_id)
        LEFT JOIN {late} t ON t.group = l.group AND t.seg = l.seg
        LEFT JOIN {reports} p ON p.group = l.group AND p.seg = l.seg
        LEFT JOIN {rejoins} r ON r.group = l.group AND r.seg = l.seg
        """,
        losses=losses,
        standing=standing,
        late=late,
        reports=reports,
        rejoins=rejoins,
    )


def elected(told_rows: DataFrame) -> DataFrame:
    """What the elections before and after make of each: overtaken, lost since, ended.

    Adds `served` (this master had acknowledged, or was open for long, when the next was needed),
    `overtaken`, `lost_since_ms`, `next_*` of the segment after.
    An outage goes on (`lost_since_ms`) where the master before had served nobody.
    """
    return told_rows.sparkSession.sql(
        f"""
        WITH seen AS (
          SELECT *,
            lag(e IS NOT NULL) OVER g AS has_before,
            lag(first_ack) OVER g AS ack_before,
            lag(opened) OVER g AS opened_before,
            lead(late_blocked_ms) OVER g AS next_late_blocked_ms,
            lead(elected_ms) OVER g AS next_elected_ms,
            lead(e.node) OVER g AS next_node,
            lead(failed) OVER g AS next_failed,
            lead(m) OVER g AS next_loss,
            lead(e.seq) OVER g AS next_seq
          FROM {{rows}}
          WINDOW g AS (PARTITION BY group ORDER BY seg)
        ), judged AS (
          SELECT *, coalesce(has_before, false)
            AND NOT coalesce(ack_before.seq < coalesce(e.seq, m.seq), false)
            AND NOT coalesce(opened_before.seq < coalesce(e.seq, m.seq)
              AND coalesce(detected_ms, CASE WHEN e IS NULL THEN m.told_ms END)
                - opened_before.time_ms > {SERVED_MS}, false) AS goes_on
          FROM seen
        ), runs AS (
          SELECT *, lead(goes_on AND e IS NOT NULL) OVER g AS overtaken_,
            sum(CASE WHEN goes_on THEN 0 ELSE 1 END) OVER (PARTITION BY group ORDER BY seg
              ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS run
          FROM judged WINDOW g AS (PARTITION BY group ORDER BY seg)
        )
        SELECT *, coalesce(overtaken_, false) AS overtaken,
          first(detected_ms, true) OVER (PARTITION BY group, run ORDER BY seg
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS lost_since_ms,
          least(beside_ms, next_late_blocked_ms) AS all_beside_ms
        FROM runs
        """,
        rows=told_rows,
    ).drop(
        "overtaken_", "goes_on", "has_before", "ack_before", "opened_before",
        "next_late_blocked_ms",
    )  # fmt: skip


def stories(elected_rows: DataFrame) -> DataFrame:
    """Kind, cause, cost and clock problems of each; segments without an election have no kind."""
    began = f"coalesce({', '.join(_CAUSAL)})"
    return elected_rows.sparkSession.sql(
        f"""
        WITH named AS (
          SELECT *, {began} AS began_ms, {_clock_problem()} AS causal_problem,
            CASE
              WHEN e IS NULL THEN NULL
              WHEN late_switch THEN 'planned_switch'
              WHEN e.unclean THEN 'unclean_election'
              WHEN by_switch THEN 'planned_switch'
              WHEN coalesce(size(e.set_before), 0) = 0 AND e.master_before = 0
                AND e.master_epoch <= 1 THEN 'first_election'
              WHEN e.master_before > 0 AND (startswith(e.reason, 'named ')
                OR startswith(e.reason, 'asked by remoting')) THEN 'operator_election'
              ELSE 'failover'
            END AS kind,
            CASE
              WHEN opened_ms IS NULL OR first_ack_ms IS NULL OR waited_ms < 0 THEN NULL
              ELSE greatest(0, first_ack_ms - waited_ms - opened_ms)
            END AS first_write_after_ms
          FROM {{rows}}
        ), idle AS (
          SELECT *,
            CASE WHEN first_ack_ms IS NULL THEN opened_ms IS NOT NULL
              ELSE coalesce(first_write_after_ms, 0) > {LAST_PAUSE_MS} END AS idle,
            coalesce(causal_problem, CASE WHEN all_beside_ms < began_ms THEN concat(
              'a report beside the steps is ', began_ms - all_beside_ms,
              ' ms older than the first of them') END) AS clock_problem
          FROM named
        ), ended AS (
          SELECT *, CASE WHEN idle THEN opened_ms ELSE first_ack_ms END AS end_ms,
            CASE WHEN held_ms >= 0 AND drained_ms IS NOT NULL THEN drained_ms - held_ms
              ELSE coalesce(lost_since_ms, detected_ms, began_ms) END AS start_ms
          FROM idle
        )
        SELECT *, {_CAUSE} AS cause, {_HOW} AS how,
          CASE WHEN e IS NOT NULL AND NOT overtaken AND clock_problem IS NULL
            AND end_ms >= start_ms THEN end_ms - start_ms END AS unavailable_ms,
          e IS NOT NULL AND NOT missing
            AND (overtaken OR first_ack_ms IS NOT NULL OR opened_ms IS NOT NULL) AS complete
        FROM ended
        """,
        rows=elected_rows,
    )


def _clock_problem() -> str:
    """SQL: the first step that is older than the latest before it, as a sentence; null if none."""
    cases = []
    for at in range(1, len(_CAUSAL)):
        step, before = _CAUSAL[at], _CAUSAL[:at]
        latest = f"greatest({', '.join(before)})" if len(before) > 1 else before[0]
        whose = " ".join(
            f"WHEN {name} = {latest} THEN {_CLOCKS[name]}" for name in reversed(before)
        )
        cases.append(
            f"WHEN {step} < {latest} THEN CASE WHEN {_CLOCKS[step]} = (CASE {whose} END) "
            f"THEN concat('the clock of ', {_CLOCKS[step]}, ' went back by ', {latest} - {step}, "
            f"' ms') ELSE concat('the clock of ', {_CLOCKS[step]}, ' is at least ', "
            f"{latest} - {step}, ' ms behind that of ', CASE {whose} END) END"
        )
    return f"CASE {' '.join(cases)} END"


_HEAD: Final = "get(split(reason, ': ', 2), 0)"
_REST: Final = "get(split(reason, ': ', 2), 1)"
_WHO: Final = "CASE WHEN lost_master > 0 THEN concat('broker ', lost_master) ELSE 'the master' END"
_SILENT: Final = (
    "CASE WHEN silent_ms > 0 THEN concat(', its last word ', silent_ms, ' ms before') ELSE '' END"
)


def _how() -> str:
    goodbye = (
        f"WHEN seen_as = 'elected' AND {_HEAD} = 'goodbye' AND length({_REST}) > 0 "
        f"THEN concat({_WHO}, ' said goodbye, as ', {_REST}, {_SILENT})"
    )
    cases = [goodbye]
    for name, text in HOW.items():
        before, who, after = text.partition("{who}")
        told = f"concat('{before}', {_WHO}, '{after}', {_SILENT})" if who else f"'{text}'"
        cases.append(f"WHEN {_HEAD} = '{name}' THEN {told}")
    other = f"CASE WHEN seen_as = 'election_failed' THEN {_HEAD} ELSE reason END"
    return (
        f"CASE WHEN reason IS NULL THEN 'an election was asked for' {' '.join(cases)} "
        f"ELSE {other} END"
    )


_HOW: Final = _how()
_CAUSE: Final = (
    "CASE WHEN reason IS NULL THEN 'unknown' "
    "WHEN startswith(reason, 'named ') THEN 'named' "
    "ELSE substring(trim(BOTH '_' FROM regexp_replace(lower(get(split(reason, ': ', 2), 0)), "
    "'[^a-z0-9]+', '_')), 1, 40) END"
)

__all__ = ["elected", "stories", "told"]
