"""Findings of kind `clock_problem`: where clocks contradict each other.

A story has times of several hosts. A contradiction is a finding, and is left out of the outages
where it would count time without writes that never was.
"""

from __future__ import annotations

from pyspark.sql import DataFrame

from batonmq.spark.failovers.tables import CLOCK_MS, GAP_DAYS


def of_clocks(stories: DataFrame, bounds: DataFrame, overview: DataFrame) -> list[DataFrame]:
    """Of stories with `implausible`, and of groups whose events are far apart or without time."""
    return [
        _clocks(stories), _implausible(stories), _backwards(stories), _outliers(bounds),
        _timeless(overview),
    ]  # fmt: skip


def _clocks(stories: DataFrame) -> DataFrame:
    return stories.sparkSession.sql(
        f"""
        SELECT group, elected_ms AS at_ms,
          CASE WHEN CAST(regexp_extract(clock_problem, '([0-9]+) ms', 1) AS BIGINT) >= {CLOCK_MS}
            THEN 'warning' ELSE 'info' END AS severity,
          'clock_problem' AS kind,
          concat('How long the election of epoch ', master_epoch, ' took is unknown: ',
            clock_problem, '.') AS text,
          concat('epoch ', master_epoch) AS subject,
          to_json(named_struct('masterEpoch', master_epoch, 'problem', clock_problem)) AS evidence
        FROM {{rows}} WHERE kind IS NOT NULL AND clock_problem IS NOT NULL
        """,
        rows=stories,
    )


def _implausible(stories: DataFrame) -> DataFrame:
    """Outages that are not counted: by the clocks they end at an impossible time."""
    return stories.sparkSession.sql(
        """
        SELECT group, elected_ms AS at_ms, 'warning' AS severity, 'clock_problem' AS kind,
          concat('How long the election of epoch ', master_epoch, ' took is unknown: from ',
            timestamp_millis(start_ms), ' to ', timestamp_millis(start_ms + unavailable_ms),
            ' UTC it would reach beyond ', CASE implausible WHEN 'outside'
              THEN 'all events of the group; the clock of a broker was wrong'
              ELSE concat('the next election, at ', timestamp_millis(next_elected_ms),
                '; the clock of broker ', broker_id, ' was wrong') END,
            '. It is not counted as an outage.') AS text,
          concat('epoch ', master_epoch) AS subject,
          to_json(named_struct('masterEpoch', master_epoch, 'beginMs', start_ms,
            'unavailableMs', unavailable_ms, 'nextElectedMs', next_elected_ms)) AS evidence
        FROM {rows} WHERE implausible IS NOT NULL
        """,
        rows=stories,
    )


def _backwards(stories: DataFrame) -> DataFrame:
    """Elections that are older, by their controller's clock, than the one before them."""
    return stories.sparkSession.sql(
        f"""
        SELECT group, elected_ms AS at_ms,
          CASE WHEN elected_ms - next_elected_ms >= {CLOCK_MS} THEN 'warning' ELSE 'info' END
            AS severity,
          'clock_problem' AS kind,
          concat('How long broker ', broker_id, ' was master of epoch ', master_epoch,
            ' is unknown: the next election, by controller ', coalesce(next_elected_by, '?'),
            ', is ', elected_ms - next_elected_ms, ' ms older than its own, by controller ',
            coalesce(elected_by, '?'), '.') AS text,
          concat('epoch ', master_epoch) AS subject,
          to_json(named_struct('masterEpoch', master_epoch, 'electedMs', elected_ms,
            'nextElectedMs', next_elected_ms)) AS evidence
        FROM {{rows}} WHERE kind IS NOT NULL AND next_elected_ms < elected_ms
        """,
        rows=stories,
    )


def _outliers(bounds: DataFrame) -> DataFrame:
    return bounds.sparkSession.sql(
        f"""
        SELECT group, CAST(NULL AS BIGINT) AS at_ms, 'warning' AS severity,
          'clock_problem' AS kind,
          concat('Controllers recorded ', outliers, ' events more than {GAP_DAYS} days from ',
            'the others: all lie between ', timestamp_millis(least_ms), ' and ',
            timestamp_millis(most_ms), ' UTC. The clock of a controller was wrong, or the group ',
            'had no events for that long; these days are not in table unavailability.') AS text,
          group AS subject,
          to_json(named_struct('events', outliers, 'firstMs', least_ms, 'lastMs', most_ms))
            AS evidence
        FROM {{rows}} WHERE outliers > 0
        """,
        rows=bounds,
    )


def _timeless(overview: DataFrame) -> DataFrame:
    return overview.sparkSession.sql(
        """
        SELECT group, CAST(NULL AS BIGINT) AS at_ms, 'warning' AS severity,
          'clock_problem' AS kind,
          concat(sum(timeless), ' of ', sum(events), ' events have no time of the years 1970 to ',
            '9999 in ms: tables that are ordered by time lack them.') AS text,
          group AS subject,
          to_json(named_struct('events', sum(timeless), 'all', sum(events))) AS evidence
        FROM {rows} GROUP BY group HAVING sum(timeless) > 0
        """,
        rows=overview,
    )


__all__ = ["of_clocks"]
