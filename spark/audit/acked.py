"""What producers were told, against what the replicas hold.

A list has one entry per acknowledged send. An entry is looked for at its place, then by its key, or
by its message id; what is not found, and cannot have expired, is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from spark.audit.acked_list import is_placed
from spark.audit.findings import CRITICAL, INFO, MESSAGE, QUEUE, WARNING
from spark.audit.relations import REPEATING_TOPICS, finding_frame
from spark.audit.replicas import Group

_PLACE: Final = ["group", "topic", "queue_id", "queue_offset"]


@dataclass(slots=True)
class AckedCounts:
    """How many entries of the list turned out how.

    `elsewhere`: not where they were acknowledged. `not_everywhere`: whole in some replicas, but not
    in all that confirm their place. `unconfirmed`: found, above what any replica confirms.
    `expired`: older than the log. `unchecked`: they name no place, and part of the log has
    expired. `other_brokers`: their broker is not audited.
    """

    entries: int = 0
    found: int = 0
    lost: int = 0
    elsewhere: int = 0
    not_everywhere: int = 0
    unconfirmed: int = 0
    expired: int = 0
    unchecked: int = 0
    other_brokers: int = 0

    def as_dict(self) -> dict[str, int]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


class AckedCheck:
    """The entries of a list against the rows of a scan, which tell of every message."""

    def __init__(
        self, session: SparkSession, entries: DataFrame, rows: DataFrame, groups: Sequence[Group]
    ) -> None:
        self._rows = rows
        self._groups = groups
        facts = [
            (
                group.name,
                group.name.rpartition("#")[2],
                group.first,
                max(replica.confirm for replica in group.replicas),
            )
            for group in groups
        ]
        self._facts = session.createDataFrame(
            facts, "group string, group_broker string, first bigint, confirm bigint"
        )
        only = groups[0].name if len(groups) == 1 else None
        brokers = self._facts.select(
            F.col("group").alias("by_broker"), F.col("group_broker").alias("broker")
        )
        self._entries = entries.join(F.broadcast(brokers), "broker", "left").withColumn(
            "group",
            F.coalesce("by_broker", F.when(F.col("broker").isNull(), F.lit(only))),
        )
        known = F.col("broker").isNull() | F.col("group").isNotNull()
        self._others = self._entries.where(~known)
        self._mine = self._entries.where(known)
        self._messages = rows.where(F.col("part") == MESSAGE).select(
            *_PLACE,
            "unique_key",
            "batch_key",
            "physical_offset",
            "size",
            "epoch",
            "lack",
            "body_crc",
        )
        self._result = self._match().persist(StorageLevel.DISK_ONLY)

    def counts(self) -> AckedCounts:
        """How the entries turned out."""
        row = self._result.agg(
            F.count("*").alias("entries"),
            F.count("found_at").alias("found"),
            F.count_if(F.col("outcome") == "lost").alias("lost"),
            F.count_if("elsewhere").alias("elsewhere"),
            F.count_if(F.col("lack") != 0).alias("not_everywhere"),
            F.count_if(F.col("found_end") > F.col("confirm")).alias("unconfirmed"),
            F.count_if(F.col("outcome") == "expired").alias("expired"),
            F.count_if(F.col("outcome") == "unchecked").alias("unchecked"),
        ).first()
        assert row is not None, "an aggregate without groups has one row"
        counts = AckedCounts(**row.asDict())
        counts.other_brokers = self._others.count()
        counts.entries += counts.other_brokers
        return counts

    def findings(self) -> DataFrame:
        """What the list and the replicas contradict each other in."""
        return (
            self._lost()
            .union(self._unchecked())
            .union(self._elsewhere())
            .union(self._other_bodies())
            .union(self._out_of_order())
            .union(self._not_acked())
        )

    def _match(self) -> DataFrame:
        """Each entry with the message that it is, if there is one, and what came of it."""
        placed = is_placed() & F.col("topic").isNotNull() & F.col("group").isNotNull()
        theirs = self._messages.select(
            *(F.col(name).alias(f"m_{name}") for name in self._messages.columns)
        )
        entries, here = self._mine.where(placed), theirs
        same_key = (
            F.col("unique_key").isNull()
            | (F.col("unique_key") == F.col("m_unique_key"))
            | (F.col("unique_key") == F.col("m_batch_key"))
        )
        same_place = [F.col(name) == F.col(f"m_{name}") for name in _PLACE]
        at_place = entries.join(here, [*same_place, same_key], "left")
        found = at_place.where(F.col("m_physical_offset").isNotNull())
        unseen = at_place.where(F.col("m_physical_offset").isNull()).select(*self._mine.columns)
        rest = unseen.union(self._mine.where(~placed))
        by_key = self._by_key(rest.where(F.col("unique_key").isNotNull()), theirs)
        no_key = F.col("unique_key").isNull()
        by_id = rest.where(no_key & F.col("msg_id").isNotNull() & ~placed)
        by_id = by_id.withColumn(
            "id_offset", F.conv(F.substring("msg_id", -16, 16), 16, 10).try_cast("bigint")
        )
        by_id = by_id.join(
            theirs,
            [
                F.col("id_offset") == F.col("m_physical_offset"),
                F.col("group") == F.col("m_group"),
            ],
            "left",
        )
        gone = rest.where(no_key & placed)
        return self._judged(
            _outcome(found, self._mine)
            .union(_outcome(by_key, self._mine))
            .union(_outcome(by_id, self._mine))
            .union(_outcome(gone, self._mine))
        )

    def _by_key(self, entries: DataFrame, theirs: DataFrame) -> DataFrame:
        """Entries with the first message of their key; copies count together."""
        keys = entries.select(F.col("unique_key").alias("m_unique_key")).distinct()
        both = F.array_compact(F.array("m_unique_key", "m_batch_key"))
        copies = (
            theirs.withColumn("m_unique_key", F.explode(both))
            .join(keys, "m_unique_key", "left_semi")
            .groupBy("m_group", "m_unique_key")
            .agg(
                F.min(
                    F.struct(
                        "m_physical_offset", "m_topic", "m_queue_id", "m_queue_offset", "m_size",
                        "m_epoch", "m_body_crc",
                    )
                ).alias("first"),
                F.bit_and("m_lack").alias("m_lack"),
            )
            .select("m_group", "m_unique_key", "m_lack", "first.*")
        )  # fmt: skip
        same = F.col("unique_key") == F.col("m_unique_key")
        in_group = F.col("group").isNull() | (F.col("group") == F.col("m_group"))
        return entries.join(copies, [same, in_group], "left")

    def _judged(self, matched: DataFrame) -> DataFrame:
        kept = (
            self._rows.where(F.col("part") == QUEUE)
            .groupBy("group", "topic", "queue_id")
            .agg(F.min("queue_offset").alias("kept_from"))
        )
        several = len(self._groups) > 1
        first = max(group.first for group in self._groups) if several else self._groups[0].first
        facts = self._facts.select("group", "first", "confirm")
        judged = (
            matched.withColumn("group", F.coalesce("group", "m_group"))
            .join(F.broadcast(kept), ["group", "topic", "queue_id"], "left")
            .join(F.broadcast(facts), "group", "left")
        )
        log_first = F.coalesce("first", F.lit(first))
        too_old = F.col("queue_offset") < F.col("kept_from")
        id_old = F.coalesce(F.col("id_offset") < log_first, F.lit(False))
        outcome = (
            F.when(F.col("found_at").isNotNull(), "found")
            .when(log_first == 0, "lost")
            .when(id_old, "expired")
            .when(F.col("id_offset").isNotNull(), "lost")
            .when(F.col("queue_offset").isNull() | F.col("kept_from").isNull(), "unchecked")
            .when(too_old, "expired")
            .otherwise("lost")
        )
        housekeeping = reduce(
            Column.__or__, [F.col("m_topic").startswith(prefix) for prefix in REPEATING_TOPICS]
        )
        moved = (
            F.col("found_at").isNotNull()
            & F.col("queue_offset").isNotNull()
            & ~housekeeping
            & (
                (F.col("queue_offset") != F.col("m_queue_offset"))
                | (F.col("queue_id") != F.col("m_queue_id"))
                | (F.col("topic") != F.col("m_topic"))
            )
        )
        return judged.withColumn("outcome", outcome).withColumn(
            "elsewhere", F.coalesce(moved, F.lit(False))
        )

    def _lost(self) -> DataFrame:
        lost = self._result.where(F.col("outcome") == "lost")
        before = self._messages.select(
            "group", "topic", "queue_id",
            (F.col("queue_offset") + 1).alias("queue_offset"),
            F.col("physical_offset").alias("behind"),
            F.col("epoch").alias("epoch_before"),
        )  # fmt: skip
        lost = lost.join(before, _PLACE, "left")
        detail = F.concat(
            F.lit("acknowledged, and in no replica"),
            F.when(
                F.col("behind").isNotNull(),
                F.concat(F.lit("; the one before it in its queue lies at "), "behind"),
            ).otherwise(F.lit("")),
        )
        return finding_frame(
            lost, severity=CRITICAL, kind="lost", detail=detail, epoch=F.col("epoch_before"),
            physical_offset=F.col("id_offset"),
        )  # fmt: skip

    def _unchecked(self) -> DataFrame:
        return finding_frame(
            self._result.where(F.col("outcome") == "unchecked"),
            severity=WARNING,
            kind="unchecked",
            detail="not found, and it may have expired: the log no longer begins at 0",
        )

    def _elsewhere(self) -> DataFrame:
        detail = F.concat(
            F.lit("acknowledged here, lies at queue "), "m_queue_id", F.lit(" offset "),
            "m_queue_offset", F.lit(" of "), "m_topic",
        )  # fmt: skip
        return _at_message(self._result.where("elsewhere"), "reordered", detail)

    def _other_bodies(self) -> DataFrame:
        sent = F.col("body_crc").bitwiseAND(0x7FFFFFFF)
        other = self._result.where(
            F.col("found_at").isNotNull()
            & F.col("body_crc").isNotNull()
            & (sent != F.col("m_body_crc"))
        )
        detail = F.concat(
            F.lit("its body has CRC "), "m_body_crc", F.lit(", the acknowledged one "), sent
        )
        return _at_message(other, "divergent", detail, field="body")

    def _out_of_order(self) -> DataFrame:
        window = Window.partitionBy("group", "producer", "topic", "queue_id").orderBy("number")
        told = self._mine.where(
            F.col("producer").isNotNull() & F.col("number").isNotNull() & is_placed()
        )
        told = told.withColumn("before", F.lag("queue_offset").over(window)).withColumn(
            "number_before", F.lag("number").over(window)
        )
        back = told.where(F.col("queue_offset") <= F.col("before"))
        detail = F.concat(
            F.lit("number "), "number", F.lit(" of producer "), "producer",
            F.lit(" was acknowledged here, number "), "number_before",
            F.lit(" before it at queue offset "), "before",
        )  # fmt: skip
        return finding_frame(back, severity=WARNING, kind="reordered", detail=detail)

    def _not_acked(self) -> DataFrame:
        """Messages of the topics of the list that it does not name: unanswered sends are stored."""
        topics = self._mine.select("topic").where(F.col("topic").isNotNull()).distinct()
        messages = self._messages.join(F.broadcast(topics), "topic", "left_semi")
        keys = self._mine.where(F.col("unique_key").isNotNull()).select("unique_key")
        bare = self._mine.where(F.col("unique_key").isNull())
        places = bare.where(is_placed()).select(*_PLACE)
        offsets = self._result.where(F.col("id_offset").isNotNull()).select(
            "group", F.col("id_offset").alias("physical_offset")
        )
        extra = (
            messages.join(keys, "unique_key", "left_anti")
            .join(places, _PLACE, "left_anti")
            .join(offsets, ["group", "physical_offset"], "left_anti")
        )
        return finding_frame(
            extra, severity=INFO, kind="not_acked", detail="in the log, and not in the list"
        )


def _outcome(matched: DataFrame, entries: DataFrame) -> DataFrame:
    """Entries with the columns of their message; null where they have none."""
    kinds = {
        "m_group": "string", "m_topic": "string", "m_queue_id": "int", "m_queue_offset": "bigint",
        "m_physical_offset": "bigint", "m_size": "bigint", "m_epoch": "bigint",
        "m_body_crc": "bigint", "m_lack": "bigint", "id_offset": "bigint",
    }  # fmt: skip
    have = set(matched.columns)
    columns = [
        (F.col(name) if name in have else F.lit(None)).cast(kind).alias(name)
        for name, kind in kinds.items()
    ]
    return (
        matched.select(*entries.columns, *columns)
        .withColumn("found_at", F.col("m_physical_offset"))
        .withColumn("found_end", F.col("m_physical_offset") + F.col("m_size"))
        .withColumn("lack", F.coalesce("m_lack", F.lit(0)))
    )


def _at_message(
    source: DataFrame, kind: str, detail: Column, field: str | None = None
) -> DataFrame:
    return finding_frame(
        source, severity=CRITICAL, kind=kind, detail=detail, field=field,
        physical_offset=F.col("found_at"), size=F.col("m_size"), epoch=F.col("m_epoch"),
    )  # fmt: skip


__all__ = ["AckedCheck", "AckedCounts"]
