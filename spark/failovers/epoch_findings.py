"""Findings of epoch files: of replicas against each other, and of all against the histories.

An epoch's start is one offset for all replicas that have the epoch. A replica that was down lacks
the newest epochs, and one whose old bytes expired the oldest: neither is wrong. A Java broker drops
an epoch without bytes, so only one with bytes may not be missing in between.

Groups of one name in several clusters are compared with themselves only: (cluster, broker).
Histories do not name their cluster, so such a group is not compared with any.
"""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from batonmq.spark.failovers.sources import EpochFiles


def of_files(files: DataFrame) -> list[DataFrame]:
    """Findings of the files alone; `files` is table `epochs` with damaged files."""
    good = files.where("corrupt IS NULL AND broker IS NOT NULL")
    return [
        _unreadable(files),
        _from_backup(good),
        _starts_differ(good),
        _gaps(good),
        _behind(good),
        _clusters(good),
    ]


def against_histories(
    files: DataFrame, stories: DataFrame, shared: Collection[str]
) -> list[DataFrame]:
    """Findings of files and histories together; groups of several logs, `shared`, are left out."""
    good = files.where("corrupt IS NULL AND broker IS NOT NULL")
    if shared:
        good = good.where(~F.col("broker").isin(list(shared)))
    alone = good.groupBy("broker").agg(
        F.expr("count(DISTINCT coalesce(cluster, ''))").alias("clusters")
    )
    good = good.join(alone.where("clusters = 1").select("broker"), "broker", "left_semi")
    return [_untold(good, stories), _not_in_files(good, stories), _starts(good, stories)]


def of_bare_stores(given: EpochFiles, files: DataFrame, stories: DataFrame) -> list[DataFrame]:
    """Stores of which nothing, or nothing that could be compared, is in the table."""
    found = []
    if given.without_list:
        found.append(_without_list(given, files, stories))
    if given.unnamed:
        found.append(_unnamed(given, files))
    return found


_NO_TIME = "CAST(NULL AS BIGINT) AS at_ms"


def _without_list(given: EpochFiles, files: DataFrame, stories: DataFrame) -> DataFrame:
    """No news where no replica has a list, as outside of the controllers' care."""
    session = files.sparkSession
    return session.sql(
        f"""
        SELECT coalesce(s.broker, '') AS group, {_NO_TIME},
          CASE WHEN k.broker IS NULL THEN 'info' ELSE 'warning' END AS severity,
          'epoch_file_missing' AS kind, concat(s.store, ' has no epoch list.') AS text,
          s.store AS subject, to_json(named_struct('store', s.store)) AS evidence
        FROM {{bare}} s LEFT JOIN (
          SELECT broker FROM {{files}} WHERE broker IS NOT NULL
          UNION SELECT group FROM {{stories}} WHERE kind IS NOT NULL) k ON k.broker = s.broker
        """,
        bare=session.createDataFrame(list(given.without_list), "store STRING, broker STRING"),
        files=files,
        stories=stories,
    )


def _unnamed(given: EpochFiles, files: DataFrame) -> DataFrame:
    session = files.sparkSession
    return session.sql(
        f"""
        SELECT '' AS group, {_NO_TIME}, 'warning' AS severity, 'store_without_identity' AS kind,
          concat('The epoch list of ', store, ' is compared with none: without brokerIdentity ',
            'its broker is unknown.') AS text,
          store AS subject, to_json(named_struct('store', store)) AS evidence
        FROM {{unnamed}}
        """,
        unnamed=session.createDataFrame([(path,) for path in given.unnamed], "store STRING"),
    )


def _unreadable(files: DataFrame) -> DataFrame:
    return files.sparkSession.sql(
        f"""
        SELECT coalesce(broker, '') AS group, {_NO_TIME}, 'warning' AS severity,
          'epoch_file_unreadable' AS kind,
          concat('The epoch list of ', store, ' cannot be read: ', corrupt.reason, '.') AS text,
          store AS subject,
          to_json(named_struct('file', corrupt.file, 'reason', corrupt.reason)) AS evidence
        FROM {{files}} WHERE corrupt IS NOT NULL
        """,
        files=files,
    )


def _from_backup(good: DataFrame) -> DataFrame:
    return good.sparkSession.sql(
        f"""
        SELECT broker AS group, {_NO_TIME}, 'info' AS severity, 'epoch_file_from_backup' AS kind,
          concat('The epoch list of ', store, ' could only be read from its backup.') AS text,
          store AS subject, to_json(named_struct('store', store)) AS evidence
        FROM (SELECT DISTINCT broker, store FROM {{files}} WHERE from_backup)
        """,
        files=good,
    )


def _starts_differ(good: DataFrame) -> DataFrame:
    return good.sparkSession.sql(
        f"""
        SELECT broker AS group, {_NO_TIME}, 'critical' AS severity, 'epoch_starts_differ' AS kind,
          concat('Epoch ', epoch, ' begins at ', low.start_offset, ' in ', low.store, ' and at ',
            high.start_offset, ' in ', high.store, '.') AS text,
          concat('epoch ', epoch) AS subject,
          to_json(named_struct('masterEpoch', epoch, 'stores', array(low, high), 'replicas', many))
            AS evidence
        FROM (
          SELECT broker, epoch, min(struct(start_offset, store)) AS low,
            max(struct(start_offset, store)) AS high, count(*) AS many
          FROM {{files}} GROUP BY cluster, broker, epoch)
        WHERE low.start_offset <> high.start_offset
        """,
        files=good,
    )


def _gaps(good: DataFrame) -> DataFrame:
    return good.sparkSession.sql(
        f"""
        WITH held AS (
          SELECT DISTINCT cluster, broker, epoch FROM {{files}} WHERE end_offset > start_offset
        ), spans AS (
          SELECT cluster, broker, store, min(epoch) AS low, max(epoch) AS high
          FROM {{files}} GROUP BY cluster, broker, store
        ), listed AS (SELECT DISTINCT broker, store, epoch FROM {{files}})
        SELECT s.broker AS group, {_NO_TIME}, 'warning' AS severity, 'epoch_gap' AS kind,
          concat(s.store, ' lacks ', count(*), ' epochs with bytes that other replicas have, the ',
            'first is ', min(h.epoch), '.') AS text,
          s.store AS subject,
          to_json(named_struct('store', s.store, 'epochs', count(*), 'first', min(h.epoch), 'last',
            max(h.epoch))) AS evidence
        FROM held h JOIN spans s ON s.broker = h.broker AND s.cluster <=> h.cluster
          AND h.epoch > s.low AND h.epoch < s.high
        LEFT ANTI JOIN listed l ON l.broker = s.broker AND l.store = s.store AND l.epoch = h.epoch
        GROUP BY s.broker, s.store
        """,
        files=good,
    )


def _behind(good: DataFrame) -> DataFrame:
    return good.sparkSession.sql(
        f"""
        WITH tops AS (
          SELECT cluster, broker, store, max(epoch) AS top FROM {{files}}
          GROUP BY cluster, broker, store
        ), newest AS (
          SELECT cluster, broker, max(top) AS newest FROM tops GROUP BY cluster, broker
        )
        SELECT t.broker AS group, {_NO_TIME}, 'info' AS severity, 'replica_behind' AS kind,
          concat(t.store, ' has epochs up to ', t.top, ', the newest is ', n.newest, '.') AS text,
          t.store AS subject,
          to_json(named_struct('store', t.store, 'epoch', t.top, 'newest', n.newest)) AS evidence
        FROM tops t JOIN newest n ON n.broker = t.broker AND n.cluster <=> t.cluster
        WHERE t.top < n.newest
        """,
        files=good,
    )


def _clusters(good: DataFrame) -> DataFrame:
    return good.sparkSession.sql(
        f"""
        SELECT broker AS group, {_NO_TIME}, 'warning' AS severity,
          'group_in_several_clusters' AS kind,
          concat('The stores of group ', broker, ' are of ', size(clusters), ' clusters: ',
            array_join(slice(clusters, 1, 5), ', '),
            '. Their epoch files are not compared with the histories.') AS text,
          broker AS subject, to_json(named_struct('clusters', slice(clusters, 1, 20))) AS evidence
        FROM (
          SELECT broker, array_sort(collect_set(coalesce(cluster, ''))) AS clusters
          FROM {{files}} GROUP BY broker)
        WHERE size(clusters) > 1
        """,
        files=good,
    )


def _untold(good: DataFrame, stories: DataFrame) -> DataFrame:
    return good.sparkSession.sql(
        f"""
        WITH told AS (
          SELECT DISTINCT group, master_epoch AS epoch FROM {{stories}} WHERE kind IS NOT NULL
        ), first AS (SELECT group, min(epoch) AS low FROM told GROUP BY group),
        untold AS (
          SELECT f.broker, f.epoch, t.low,
            CASE WHEN t.low IS NULL THEN 'group_untold' WHEN f.epoch < t.low
              THEN 'epochs_older_than_history' ELSE 'epoch_untold' END AS kind
          FROM (SELECT DISTINCT broker, epoch FROM {{files}}) f
          LEFT ANTI JOIN told ON told.group = f.broker AND told.epoch = f.epoch
          LEFT JOIN first t ON t.group = f.broker
        )
        SELECT broker AS group, {_NO_TIME},
          CASE WHEN kind = 'epoch_untold' THEN 'warning' ELSE 'info' END AS severity, kind,
          concat('Epoch files have ', count(*), ' epochs from ', min(epoch), ' to ', max(epoch),
            CASE kind WHEN 'group_untold' THEN ' of a group that is in no history.'
              WHEN 'epochs_older_than_history' THEN ' from before the histories begin.'
              ELSE ' that are in no history.' END) AS text,
          broker AS subject,
          to_json(named_struct('epochs', count(*), 'first', min(epoch), 'last', max(epoch)))
            AS evidence
        FROM untold GROUP BY broker, kind
        """,
        files=good,
        stories=stories,
    )


def _not_in_files(good: DataFrame, stories: DataFrame) -> DataFrame:
    """A master served in an epoch that no replica has, though some have older ones."""
    return good.sparkSession.sql(
        """
        WITH spans AS (
          SELECT broker, min(epoch) AS low, max(epoch) AS high FROM {files} GROUP BY broker
        ), served AS (
          SELECT s.group, s.master_epoch AS epoch, s.elected_ms, p.high
          FROM {stories} s JOIN spans p ON p.broker = s.group
          WHERE s.first_ack_ms IS NOT NULL AND s.master_epoch > p.low
        )
        SELECT group, min(elected_ms) AS at_ms,
          CASE WHEN newer THEN 'info' ELSE 'warning' END AS severity,
          CASE WHEN newer THEN 'files_older_than_history' ELSE 'epoch_not_in_files' END AS kind,
          concat(count(*), ' epochs from ', min(epoch), ' to ', max(epoch),
            ' had a master that acknowledged, and no epoch file has them',
            CASE WHEN newer THEN ': the files are older.' ELSE '.' END) AS text,
          group AS subject,
          to_json(named_struct('epochs', count(*), 'first', min(epoch), 'last', max(epoch)))
            AS evidence
        FROM (
          SELECT *, epoch > high AS newer FROM served
          LEFT ANTI JOIN (SELECT DISTINCT broker, epoch FROM {files}) f
            ON f.broker = served.group AND f.epoch = served.epoch
        ) GROUP BY group, newer
        """,
        files=good,
        stories=stories,
    )


def _starts(good: DataFrame, stories: DataFrame) -> DataFrame:
    """Where a file begins an epoch, against what was confirmed and where its master opened."""
    return good.sparkSession.sql(
        """
        WITH starts AS (
          SELECT broker, epoch, min(struct(start_offset, store)) AS low FROM {files}
          GROUP BY broker, epoch
        ), both AS (
          SELECT s.group, s.elected_ms AS at_ms, s.master_epoch AS epoch, f.low,
            s.confirm_offset AS confirmed, s.opened_offset AS opened_at,
            NOT s.unclean AND f.low.start_offset < s.confirm_offset AS below
          FROM {stories} s JOIN starts f ON f.broker = s.group AND f.epoch = s.master_epoch
        )
        SELECT group, at_ms, CASE WHEN below THEN 'critical' ELSE 'warning' END AS severity,
          CASE WHEN below THEN 'start_below_confirmed' ELSE 'start_not_as_told' END AS kind,
          concat('Epoch ', epoch, ' begins at ', low.start_offset, ' in ', low.store,
            CASE WHEN below THEN concat(', where ', confirmed, ' was confirmed before.')
            ELSE concat('; its master reported that it opened at ', opened_at, '.') END) AS text,
          concat('epoch ', epoch) AS subject,
          to_json(named_struct('masterEpoch', epoch, 'store', low.store, 'start', low.start_offset,
            'confirmed', confirmed, 'openedAt', opened_at)) AS evidence
        FROM both WHERE below OR low.start_offset <> opened_at
        """,
        files=good,
        stories=stories,
    )


__all__ = ["against_histories", "of_files"]
