"""Acknowledged sends, compared with what the replicas hold.

A list has one entry per acknowledged send. An entry is looked for at its place, then by its key, or
by its message id; what is not found, and cannot have expired, is lost. So is what only replicas
hold that the others have gone on without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from batonmq.spark.audit.acked_list import AckedList, is_numbered, is_placed
from batonmq.spark.audit.acked_match import (
    BROADCAST_MAX,
    FOUND,
    PLACE,
    UNLISTED,
    UNSEEN,
    at_places,
    is_unconfirmed,
    judged,
    looked_up,
    messages_of,
    other_body,
)
from batonmq.spark.audit.findings import CRITICAL, INFO, QUEUE, WARNING
from batonmq.spark.audit.kept import Kept
from batonmq.spark.audit.relations import finding_frame
from batonmq.spark.audit.replicas import ReplicaGroup


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
    """The entries of a list against the rows of a scan, with a row for every message.

    Its constructor counts both, so that no query searches where there is nothing.
    Raises ValueError if the list names a broker of which there are several groups.
    """

    def __init__(
        self,
        session: SparkSession,
        acked: AckedList,
        rows: DataFrame,
        groups: Sequence[ReplicaGroup],
        kept: Kept,
    ) -> None:
        self._kept = kept
        self._list = acked
        self._rows = rows
        self._groups = groups
        self._messages = messages_of(rows)
        facts = [
            (group.name, group.first, group.confirm, [each.name for each in group.replicas])
            for group in groups
        ]
        self._facts = session.createDataFrame(
            facts, "m_group string, first bigint, confirm bigint, names array<string>"
        )
        entries = _with_groups(session, acked.entries, groups)
        known = F.col("broker").isNull() | F.col("group").isNotNull()
        self._others = entries.where(~known)
        self._mine = entries.where(known)
        marks = self._facts.select("m_group", "confirm")
        placed = at_places(self._mine, self._messages, marks)
        self._placed = kept.keep(placed)
        self._rest: DataFrame | None = None
        self._unlisted = self._other_bodies = 0
        self.counts = AckedCounts(entries=acked.count)
        self._count(entries, known)

    def findings(self) -> list[DataFrame]:
        """What the list and the replicas contradict each other in, as tables of findings."""
        counts, found = self.counts, []
        told = self._placed.where(F.col("case") == FOUND)
        if self._rest is not None:
            if counts.lost:
                found.append(self._lost(self._rest.where(F.col("outcome") == "lost")))
            if counts.unchecked:
                found.append(_unchecked(self._rest.where(F.col("outcome") == "unchecked")))
            if counts.elsewhere:
                found.append(_elsewhere(self._rest.where("elsewhere")))
            columns = [name for name in told.columns if name in self._rest.columns]
            held = self._rest.where(F.col("outcome") == FOUND)
            told = told.select(*columns).union(held.select(*columns))
        if counts.not_everywhere:
            found.append(self._not_everywhere(told.where(F.col("m_lack") != 0)))
        if self._other_bodies:
            found.append(_bodies(told.where(other_body())))
        if self._list.numbered:
            found.append(self._out_of_order())
        if self._unlisted:
            found.append(self._not_acked())
        if counts.other_brokers:
            found.append(self._not_audited())
        if not counts.entries:
            found.append(self._empty())
        return found

    def _count(self, entries: DataFrame, known: Column) -> None:
        has_place = is_placed() & F.col("group").isNotNull()
        summed = _one_row(
            entries,
            others=F.count_if(~known),
            unplaced=F.count_if(known & ~has_place),
        )
        counts = self.counts
        counts.other_brokers = summed["others"]
        case = F.col("case")
        placed = _one_row(
            self._placed,
            unseen=F.count_if(case == UNSEEN),
            unlisted=F.count_if(case == UNLISTED),
            **_counts_of(case == FOUND),
        )
        self._unlisted = placed["unlisted"]
        counts.found = counts.entries - counts.other_brokers
        looked_for = placed["unseen"] + summed["unplaced"]
        parts = [placed]
        if looked_for:
            unseen = self._placed.where(case == UNSEEN).select(*self._mine.columns)
            self._rest = self._look_up(unseen.union(self._mine.where(~has_place)), looked_for)
            outcome = F.col("outcome")
            rest = _one_row(
                self._rest,
                lost=F.count_if(outcome == "lost"),
                expired=F.count_if(outcome == "expired"),
                unchecked=F.count_if(outcome == "unchecked"),
                elsewhere=F.count_if("elsewhere"),
                **_counts_of(outcome == FOUND),
            )
            parts.append(rest)
            counts.lost, counts.expired = rest["lost"], rest["expired"]
            counts.unchecked, counts.elsewhere = rest["unchecked"], rest["elsewhere"]
            counts.found -= counts.lost + counts.expired + counts.unchecked
        counts.not_everywhere = sum(part["not_everywhere"] for part in parts)
        counts.unconfirmed = sum(part["unconfirmed"] for part in parts)
        self._other_bodies = sum(part["other_bodies"] for part in parts)

    def _look_up(self, entries: DataFrame, count: int) -> DataFrame:
        begins = (
            self._rows.where(F.col("part") == QUEUE)
            .groupBy("group", "topic", "queue_id")
            .agg(F.min("queue_offset").alias("kept_from"))
        )
        found = looked_up(entries, self._messages, count)
        found = found.withColumn("group", F.coalesce("group", "m_group"))
        facts = self._facts.select(F.col("m_group").alias("group"), "first", "confirm")
        found = found.join(F.broadcast(facts), "group", "left")
        first = max(group.first for group in self._groups)
        return self._kept.keep(judged(found, begins, first))

    def _named(self, source: DataFrame, bits: str) -> DataFrame:
        """With the names of the replicas of a column of bits."""
        names = F.expr(f"filter(names, (name, i) -> ({bits} & shiftleft(1L, i)) <> 0)")
        facts = self._facts.select("m_group", "names")
        named = source.join(F.broadcast(facts), "m_group", "left")
        return named.withColumn("replicas", names)

    def _lost(self, lost: DataFrame) -> DataFrame:
        before = self._messages.select(
            F.col("m_group").alias("group"),
            F.col("m_topic").alias("topic"),
            F.col("m_queue_id").alias("queue_id"),
            (F.col("m_queue_offset") + 1).alias("queue_offset"),
            F.col("m_physical_offset").alias("behind"),
            F.col("m_epoch").alias("epoch_before"),
            F.col("m_amount").alias("is_true"),
        ).where("is_true = 1")
        places = lost.where(is_placed()).select(*PLACE).distinct()
        if self.counts.lost <= BROADCAST_MAX:
            places = F.broadcast(places)
        before = before.join(places, list(PLACE), "left_semi")
        if self.counts.lost <= BROADCAST_MAX:
            before = F.broadcast(before)
        lost = self._named(lost, "m_have").join(before, list(PLACE), "left")
        only = F.concat(
            F.lit("acknowledged, and only in "), F.concat_ws(", ", "replicas"),
            F.lit(": the others, or a later epoch, went on without it"),
        )  # fmt: skip
        detail = F.when(F.col("doubt") == 1, only).otherwise(
            F.concat(
                F.lit("acknowledged, and in no replica"),
                F.when(
                    F.col("behind").isNotNull(),
                    F.concat(F.lit("; the one before it in its queue lies at "), "behind"),
                ).otherwise(F.lit("")),
            )
        )
        return finding_frame(
            lost, severity=CRITICAL, kind="lost", detail=detail,
            epoch=F.coalesce("m_epoch", "epoch_before"),
            physical_offset=F.coalesce("m_physical_offset", "id_offset"),
        )  # fmt: skip

    def _not_everywhere(self, told: DataFrame) -> DataFrame:
        detail = "acknowledged, and whole in other replicas only"
        told = told.dropDuplicates(["m_group", "m_physical_offset"])
        return _at_message(self._named(told, "m_lack"), "acked_missing", F.lit(detail))

    def _out_of_order(self) -> DataFrame:
        window = Window.partitionBy("group", "producer", "topic", "queue_id").orderBy("number")
        told = self._mine.where(is_numbered())
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
        unlisted = self._placed.where(F.col("case") == UNLISTED)
        unlisted = unlisted.select(*(name for name in unlisted.columns if name.startswith("m_")))
        both = F.explode(F.array_compact(F.array("m_unique_key", "m_batch_key")))
        theirs = unlisted.select("m_group", both.alias("key")).distinct()
        in_group = F.col("group").isNull() | (F.col("group") == F.col("m_group"))
        keys = self._mine.select("group", "unique_key")
        keys = theirs.join(keys, [F.col("unique_key") == F.col("key"), in_group], "left_semi")
        for name in ("m_unique_key", "m_batch_key"):
            listed = keys.select("m_group", F.col("key").alias(name))
            unlisted = unlisted.join(listed, ["m_group", name], "left_anti")
        if self._rest is not None:
            named = self._rest.where(F.col("doubt") == 0)
            named = named.select("m_group", "m_physical_offset").distinct()
            unlisted = unlisted.join(named, ["m_group", "m_physical_offset"], "left_anti")
        plain = unlisted.select(*(F.col(name).alias(name[2:]) for name in unlisted.columns))
        return finding_frame(
            plain, severity=INFO, kind="not_acked", detail="in the log, and not in the list"
        )

    def _not_audited(self) -> DataFrame:
        strange = self._others.groupBy("broker").agg(F.count("*").alias("entries"))
        detail = F.concat(
            "entries", F.lit(" entries of the acknowledged list are of broker "), "broker",
            F.lit(", of which no store is given"),
        )  # fmt: skip
        return finding_frame(strange, severity=WARNING, kind="unchecked", detail=detail)

    def _empty(self) -> DataFrame:
        detail = "the acknowledged list has no entry, so nothing is held against it"
        one = self._facts.limit(1)
        return finding_frame(one, severity=WARNING, kind="unchecked", detail=detail)


def _with_groups(
    session: SparkSession, entries: DataFrame, groups: Sequence[ReplicaGroup]
) -> DataFrame:
    """Entries with their `group`, null if their broker is none of the groups'."""
    named: dict[str, list[str]] = {}
    for group in groups:
        for broker in group.brokers:
            named.setdefault(broker, []).append(group.name)
    for group in groups:
        named[group.name] = [group.name]
    several = {broker: names for broker, names in named.items() if len(names) > 1}
    if several:
        used = entries.where(F.col("broker").isin(sorted(several))).select("broker").limit(1)
        for row in used.collect():
            raise ValueError(
                f"the acknowledged list names broker {row.broker}, which may be any of "
                f"{', '.join(several[row.broker])}: give the stores of one cluster, or write one "
                "of these names into the list"
            )
    pairs = [(broker, names[0]) for broker, names in named.items() if len(names) == 1]
    brokers = session.createDataFrame(pairs, "broker string, by_broker string")
    only = groups[0].name if len(groups) == 1 else None
    return entries.join(F.broadcast(brokers), "broker", "left").withColumn(
        "group", F.coalesce("by_broker", F.when(F.col("broker").isNull(), F.lit(only)))
    )


def _one_row(source: DataFrame, **columns: Column) -> dict[str, int]:
    row = source.agg(*(column.alias(name) for name, column in columns.items())).first()
    assert row is not None, "an aggregate without groups has one row"
    return dict(row.asDict())


def _counts_of(found: Column) -> dict[str, Column]:
    return {
        "not_everywhere": F.count_if(found & (F.col("m_lack") != 0)),
        "unconfirmed": F.count_if(found & is_unconfirmed()),
        "other_bodies": F.count_if(found & other_body()),
    }


def _unchecked(entries: DataFrame) -> DataFrame:
    expired = "not found, and it may have expired: the log no longer begins at 0"
    nameless = "it names no broker, and several groups are audited"
    told = F.when(F.col("group").isNull() & F.col("unique_key").isNull(), nameless)
    return finding_frame(
        entries, severity=WARNING, kind="unchecked", detail=told.otherwise(expired)
    )


def _elsewhere(entries: DataFrame) -> DataFrame:
    detail = F.concat(
        F.lit("acknowledged here, lies at queue "), "m_queue_id", F.lit(" offset "),
        "m_queue_offset", F.lit(" of "), "m_topic",
    )  # fmt: skip
    return _at_message(entries, "reordered", detail)


def _bodies(entries: DataFrame) -> DataFrame:
    sent = F.col("body_crc").bitwiseAND(0x7FFFFFFF)
    detail = F.concat(
        F.lit("its body has CRC "), "m_body_crc", F.lit(", the acknowledged one "), sent
    )
    return _at_message(entries, "divergent", detail, field="body")


def _at_message(
    source: DataFrame, kind: str, detail: Column, field: str | None = None
) -> DataFrame:
    return finding_frame(
        source, severity=CRITICAL, kind=kind, detail=detail, field=field,
        physical_offset=F.col("m_physical_offset"), size=F.col("m_size"),
        epoch=F.col("m_epoch"),
    )  # fmt: skip


__all__ = ["AckedCheck", "AckedCounts"]
