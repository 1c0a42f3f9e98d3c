"""What the report on topics takes out of the tables of `topic_stats`, each time bounded.

Times are ms since 1970 in UTC. "User" topics are those that are not of the broker itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

TOPICS_NAMED: Final = 7
TOPICS_LISTED: Final = 100
HOT_LISTED: Final = 50
LAGS_LISTED: Final = 100
LAGS_DRAWN: Final = 20
HEAT_TOPICS: Final = 20
HEAT_QUEUES: Final = 2_000
_BARS: Final = 240
_SNAPSHOTS: Final = 500
_POINTS: Final = "array(0.5D, 0.95D, 0.99D)"


class StatsTables:
    """The tables below one folder."""

    def __init__(self, session: SparkSession, folder: str) -> None:
        self._session = session
        self._folder = folder
        self._read: dict[str, DataFrame] = {}

    def table(self, name: str) -> DataFrame:
        if name not in self._read:  # to find out its columns takes a task
            self._read[name] = self._session.read.parquet(str(Path(self._folder) / name))
        return self._read[name]

    def topics(self) -> list[Any]:
        """Per topic: messages, bytes, peak rate, worst delays of a bucket; the largest ones."""
        return (
            self.table("traffic")
            .groupBy("topic", "is_system")
            .agg(
                F.sum("messages").alias("messages"),
                F.sum("bytes").alias("bytes"),
                F.max("messages_per_s").alias("peak"),
                F.max("delay_p99_ms").alias("delay_p99_ms"),
                F.max("size_max").alias("size_max"),
                F.unix_millis(F.min("at")).alias("first_ms"),
                F.unix_millis(F.max("at")).alias("last_ms"),
            )
            .orderBy("is_system", F.desc("messages"), "topic")
            .limit(TOPICS_LISTED)
            .collect()
        )

    def totals(self) -> Any:
        """Of user topics and of all: messages, bytes, first and last bucket."""
        mine = ~F.col("is_system")
        return (
            self.table("traffic")
            .agg(
                F.sum(F.when(mine, F.col("messages"))).alias("messages"),
                F.sum(F.when(mine, F.col("bytes"))).alias("bytes"),
                F.sum(F.when(~mine, F.col("messages"))).alias("of_system"),
                F.count_distinct(F.when(mine, F.col("topic"))).alias("topics"),
                F.unix_millis(F.min(F.when(mine, F.col("at")))).alias("first_ms"),
                F.unix_millis(F.max(F.when(mine, F.col("at")))).alias("last_ms"),
                F.sum("late").alias("late"),
            )
            .first()
        )

    def series(
        self, first_ms: int, last_ms: int, bucket_ms: int
    ) -> tuple[int, list[tuple[str, int, int, int]]]:
        """(ms of a bar, [(topic, bar ms, messages, bytes)]): the largest topics and the others."""
        buckets = (last_ms - first_ms) // bucket_ms + 1
        width = bucket_ms * -(-buckets // _BARS)
        traffic = self.table("traffic").where("not is_system")
        largest = [
            row.topic
            for row in traffic.groupBy("topic")
            .agg(F.sum("messages").alias("n"))
            .orderBy(F.desc("n"), "topic")
            .limit(TOPICS_NAMED)
            .collect()
        ]
        name = F.when(F.col("topic").isin(largest), F.col("topic"))
        at = F.unix_millis("at")
        place = first_ms + F.floor((at - first_ms) / width) * width
        rows = (
            traffic.groupBy(name.alias("topic"), place.cast("long").alias("bar"))
            .agg(F.sum("messages").alias("messages"), F.sum("bytes").alias("bytes"))
            .orderBy("bar")
            .collect()
        )
        rank = {topic: at for at, topic in enumerate(largest)}
        named = [(row.topic or "other topics", row.bar, row.messages, row.bytes) for row in rows]
        return width, sorted(named, key=lambda row: (rank.get(row[0], len(rank)), row[1]))

    def values(self, name: str) -> tuple[list[tuple[int, int]], list[float] | None]:
        """Of `size` or `delay_ms` over user topics: ([(value, messages)], p50 p95 p99)."""
        system = self.table("traffic").where("is_system").select("topic").distinct()
        table = "sizes" if name == "size" else "delays"
        frame = self.table(table).join(F.broadcast(system), "topic", "left_anti")
        counts = frame.groupBy(name).agg(F.sum("messages").alias("n")).orderBy(name).collect()
        row = frame.agg(F.expr(f"percentile({name}, {_POINTS}, messages)").alias("p")).first()
        return [(r[name], r.n) for r in counts], None if row is None else row.p

    def percentiles(self, prefix: str, suffix: str, width: int, first_ms: int) -> list[Any]:
        """Per bar, of its buckets and user topics: the mean p50 by messages, the worst p95, p99."""
        place = first_ms + F.floor((F.unix_millis("at") - first_ms) / width) * width
        names = [f"{prefix}_{each}{suffix}" for each in ("p50", "p95", "p99")]
        mean = [
            (F.sum(F.col(n) * F.col("messages")) / F.sum("messages")).alias(n) for n in names[:1]
        ]
        most = [F.max(n).alias(n) for n in names[1:]]
        return (
            self.table("traffic")
            .where(f"not is_system and {names[0]} is not null")
            .groupBy(place.cast("long").alias("bar"))
            .agg(*mean, *most)
            .orderBy("bar")
            .collect()
        )

    def hot(self) -> tuple[list[Any], list[Any]]:
        """(queues by how much above an even share, queues of the largest topics for a grid)."""
        hot = self.table("hot_queues")
        system = self.table("traffic").where("is_system").select("topic").distinct()
        whole = (
            hot.join(F.broadcast(system), "topic", "left_anti")
            .groupBy("topic", "broker", "queue_id")
            .agg(
                F.sum("messages").alias("messages"),
                F.sum("bytes").alias("bytes"),
                F.max("even_share").alias("even"),
            )
        )
        of = whole.groupBy("topic").agg(F.sum("messages").alias("of"))
        ranked = whole.join(of, "topic").withColumn(
            "times_even", F.col("messages") / F.col("of") / F.col("even")
        )
        hottest = ranked.orderBy(F.desc("times_even"), F.desc("messages")).limit(HOT_LISTED)
        topics = of.orderBy(F.desc("of")).limit(HEAT_TOPICS).select("topic")
        grid = (
            ranked.join(F.broadcast(topics), "topic")
            .orderBy(F.desc("of"), "topic", "broker", "queue_id")
            .limit(HEAT_QUEUES)
        )
        return hottest.collect(), grid.collect()

    def lags(self) -> tuple[list[Any], list[Any]]:
        """(groups and topics of the last snapshot by lag, lag of the worst over all snapshots)."""
        lag = self.table("consumer_lag").withColumn("at", F.unix_millis("snapshot_at"))
        whole = lag.groupBy("at", "group", "topic").agg(
            F.sum("lag").alias("lag"),
            F.max("oldest_age_ms").alias("oldest_age_ms"),
            F.count_if(F.col("lag") > 0).alias("queues_behind"),
            F.count("*").alias("queues"),
        )
        row = lag.agg(F.max("at").alias("at")).first()
        if row is None or row.at is None:
            return [], []
        last = (
            whole.where(F.col("at") == row.at)
            .orderBy(F.desc_nulls_last("lag"), "group", "topic")
            .limit(LAGS_LISTED)
            .collect()
        )
        worst = [(r.group, r.topic) for r in last if r.lag][:TOPICS_NAMED]
        if not worst:
            return last, []
        groups = [F.struct(F.lit(g).alias("group"), F.lit(t).alias("topic")) for g, t in worst]
        lines = (
            whole.where(F.struct("group", "topic").isin(groups))
            .orderBy(F.desc("at"))
            .limit(_SNAPSHOTS * len(worst))
            .collect()
        )
        return last, sorted(lines, key=lambda r: (r.group, r.topic, r["at"]))


__all__ = ["HOT_LISTED", "LAGS_DRAWN", "StatsTables"]
