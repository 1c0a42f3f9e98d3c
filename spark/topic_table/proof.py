"""A table compared with the log: which rows it lacks, has twice, or has with other values.

The code that made the table's rows makes rows of the log's messages, too, so equal rows have equal
texts. `TableState`, which the table keeps, says which messages it must have. Free of Spark.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import pyarrow as pa

from batonmq.spark.differences.log_findings import LogFinding
from batonmq.spark.differences.replica_groups import ReplicaGroup, ReplicaStore, log_end
from batonmq.spark.read.columns import columns_of
from batonmq.spark.read.message_columns import with_plain_bodies
from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.reading import Read
from batonmq.spark.severity import CRITICAL, INFO, WARNING
from batonmq.spark.steps.sql import Engine, dicts
from batonmq.spark.topic_table.bodies import Bodies
from batonmq.spark.topic_table.fields import plain
from batonmq.spark.topic_table.rows import MESSAGE, RowMaker, RowPlan
from batonmq.spark.topic_table.table_formats import About, TableState, TopicTable, read_rows

FOUND_MAX: Final = 10_000
"""Findings that are listed one by one; more are one finding with their number."""
_TEXTS: Final = columns_of("""
    string: broker
    int: queue_id
    long: queue_offset physical_offset
    string: text
""")
_SAME: Final = "a.broker = b.broker AND a.queue_id = b.queue_id AND a.queue_offset = b.queue_offset"
_PLACE: Final = "broker, queue_id, queue_offset"
_VIEWS: Final = {
    # A topic that was deleted and created again has its places twice in the log: the last counts.
    "proof_log": f"""
        SELECT {_PLACE}, max(physical_offset) AS physical_offset,
            max_by(text, physical_offset) AS text
        FROM proof_logged GROUP BY {_PLACE}
    """,
    "proof_rows": f"""
        SELECT {_PLACE}, count(*) AS many, min(physical_offset) AS physical_offset,
            min(text) AS text, max(text) AS other
        FROM proof_tabled GROUP BY {_PLACE}
    """,
    "proof_lone": f"""
        SELECT a.broker, a.queue_id, a.queue_offset, a.physical_offset, a.text, a.many
        FROM proof_rows a LEFT JOIN proof_log b ON {_SAME} WHERE b.broker IS NULL
    """,
    "proof_found": f"""
        SELECT 'table_missing' AS kind, a.broker, a.queue_id, a.queue_offset, a.physical_offset,
            a.text, CAST(NULL AS STRING) AS other, CAST(0 AS BIGINT) AS many
        FROM proof_log a JOIN proof_state s ON a.broker = s.broker AND a.queue_id = s.queue_id
            LEFT JOIN proof_rows b ON {_SAME}
        WHERE b.broker IS NULL AND a.queue_offset >= s.first_offset
            AND a.queue_offset < s.end_offset
        UNION ALL
        SELECT 'table_doubled', broker, queue_id, queue_offset, physical_offset, text, other, many
        FROM proof_rows WHERE many > 1
        UNION ALL
        SELECT 'table_changed', a.broker, a.queue_id, a.queue_offset, a.physical_offset, a.text,
            CASE WHEN a.text <> b.text THEN b.text ELSE b.other END, b.many
        FROM proof_log a JOIN proof_rows b ON {_SAME} WHERE a.text <> b.text OR a.text <> b.other
        UNION ALL
        SELECT 'table_extra', a.broker, a.queue_id, a.queue_offset, a.physical_offset, a.text,
            CAST(NULL AS STRING), a.many
        FROM proof_lone a LEFT JOIN proof_kept k ON a.broker = k.broker
        WHERE a.broker IS NULL OR a.queue_id IS NULL OR a.queue_offset IS NULL
            OR a.physical_offset IS NULL
            OR a.physical_offset >= k.low AND a.physical_offset < k.high
    """,
}
_KEPT: Final = columns_of("string: broker; long: low high")
_QUEUES: Final = columns_of("string: broker; int: queue_id; long: first_offset end_offset")
_ORDER: Final = "ORDER BY kind, broker, queue_id, queue_offset"


class TableProof(msgspec.Struct):
    """`compared`: rows whose messages the log has. `unseen`: rows that cannot be compared, since
    the log has expired there, or the stores of their broker are not given. `ahead`: rows from
    behind the end of the log. `behind`: messages that the table is to get.
    """

    table: str
    topic: str
    rows: int = 0
    compared: int = 0
    unseen: int = 0
    ahead: int = 0
    behind: int = 0


def prove(
    engine: Engine, table: TopicTable, groups: Sequence[ReplicaGroup]
) -> tuple[TableProof, list[LogFinding]]:
    """Compare a table with the stores of broker groups: of each, the replica that confirms most.

    Its log is read to its end, since the confirmOffset on disk is a little older than what the
    table has. Raises ValueError for a table that topicTable did not make, OSError.
    """
    about, state = table.about(), table.state()
    if about is None:
        raise ValueError(f"{table.location}: there is no table")
    plan = _row_plan(table, about)
    names = {_broker(group): group.name for group in groups}
    # The table first: while a stream runs the log has at least what the table has.
    engine.mapped("proof_tabled", table.files(), partial(_tabled, plan), _TEXTS)
    read = _read_of(about.topic, groups)
    engine.mapped("proof_logged", read.plan(), partial(_logged, read, plan), _TEXTS)
    engine.table("proof_state", _state_table(state))
    for name, text in _VIEWS.items():
        if name == "proof_found":
            engine.table("proof_kept", _kept(engine, groups))
        engine.define(name, text, keep=True)
    proof = TableProof(table.location, about.topic, **_counts(engine))
    return proof, [*_findings(engine, about, names), *_notes(proof, about)]


def _row_plan(table: TopicTable, about: About) -> RowPlan:
    fields = [pa.field(each.name, plain(each.type)) for each in table.fields()]
    return RowPlan(msgspec.convert(about.bodies, Bodies), pa.schema(fields))


def _read_of(topic: str, groups: Sequence[ReplicaGroup]) -> Read:
    best = [_best(group) for group in groups]
    paths = [replica.facts.uri for replica in best]
    columns = ",".join([*MESSAGE.values(), "body", "sys_flag"])
    return Read(ReadOptions.from_mapping({
        "table": "messages", "paths": json.dumps(paths), "topic": topic, "columns": columns,
        "unconfirmed": "true", "mode": "DROPMALFORMED",
    }))  # fmt: skip


def _best(group: ReplicaGroup) -> ReplicaStore:
    return max(group.replicas, key=lambda replica: replica.confirm)


def _kept(engine: Engine, groups: Sequence[ReplicaGroup]) -> pa.Table:
    """The part [low, high) of the log that each broker's store has, where it is asked for: the end
    is found by reading the last file.
    """
    asked = {row["broker"] for row in dicts(engine, "SELECT DISTINCT broker FROM proof_lone")}
    rows = []
    for group in groups:
        if (broker := _broker(group)) in asked:
            best = _best(group)
            end = log_end(best.facts, best.facts.log_files(), best.confirm)
            rows.append({"broker": broker, "low": best.first, "high": end})
    return pa.Table.from_pylist(rows, _KEPT)


def _broker(group: ReplicaGroup) -> str:
    names = [replica.facts.broker for replica in group.replicas if replica.facts.broker]
    return names[0] if names else group.name


def _logged(read: Read, plan: RowPlan, work: Any) -> Iterator[pa.RecordBatch]:
    """The log's messages as texts of rows. Damage is another part of the audit's."""
    maker = RowMaker(plan)
    for batch in read.run(work):
        if batch.num_rows:
            plain = with_plain_bodies(batch, batch.column("sys_flag").to_numpy())
            yield _text_rows(maker, maker.rows(plain))


def _tabled(plan: RowPlan, uri: str) -> Iterator[pa.RecordBatch]:
    maker = RowMaker(plan)
    for rows in read_rows(uri, plan.schema):
        yield _text_rows(maker, rows)


def _text_rows(maker: RowMaker, rows: pa.RecordBatch) -> pa.RecordBatch:
    columns = [rows.column(f"_{name}") for name in _TEXTS.names[:-1]]
    texts = pa.array(list(maker.texts(rows)), pa.string())
    return pa.RecordBatch.from_arrays([*columns, texts], schema=_TEXTS)


def _state_table(state: TableState | None) -> pa.Table:
    queues = state.queues if state is not None else {}
    rows = [
        {"broker": broker, "queue_id": int(queue), "first_offset": begin, "end_offset": end}
        for broker, each in queues.items()
        for queue, (begin, end) in each.items()
    ]
    return pa.Table.from_pylist(rows, _QUEUES)


def _counts(engine: Engine) -> dict[str, int]:
    (row,) = dicts(engine, f"""
        SELECT (SELECT CAST(coalesce(sum(many), 0) AS BIGINT) FROM proof_rows) AS rows,
            (SELECT count(*) FROM proof_rows a JOIN proof_log b ON {_SAME}) AS compared,
            (SELECT count(*) FROM proof_lone a LEFT JOIN proof_kept k ON a.broker = k.broker
                WHERE k.broker IS NULL AND a.broker IS NOT NULL OR a.physical_offset < k.low
            ) AS unseen,
            (SELECT count(*) FROM proof_lone a JOIN proof_kept k ON a.broker = k.broker
                WHERE a.physical_offset >= k.high) AS ahead,
            (SELECT count(*) FROM proof_log a LEFT JOIN proof_state s
                ON a.broker = s.broker AND a.queue_id = s.queue_id
                WHERE s.broker IS NULL OR a.queue_offset >= s.end_offset) AS behind
    """)  # fmt: skip
    return row


def _findings(engine: Engine, about: About, groups: dict[str, str]) -> Iterator[LogFinding]:
    shown = dicts(engine, f"SELECT * FROM proof_found {_ORDER} LIMIT {FOUND_MAX}")
    for row in shown:
        yield LogFinding(
            groups.get(row["broker"], row["broker"]), CRITICAL, row["kind"], _detail(row),
            topic=about.topic, queue_id=row["queue_id"], queue_offset=row["queue_offset"],
            physical_offset=row["physical_offset"],
            unique_key=json.loads(row["text"]).get("_message_id"),
        )  # fmt: skip
    if len(shown) == FOUND_MAX:
        for row in dicts(engine, "SELECT kind, count(*) AS many FROM proof_found GROUP BY kind"):
            text = f"{row['many']:,} such rows in all; the first {FOUND_MAX:,} are listed"
            yield LogFinding(None, CRITICAL, row["kind"], text, topic=about.topic)


def _detail(row: dict[str, Any]) -> str:
    if row["kind"] == "table_missing":
        return "the log has it, and the table says that it has all up to there"
    if row["kind"] == "table_doubled":
        same = "alike" if row["text"] == row["other"] else "not alike"
        return f"{row['many']} rows are of this message, {same}"
    if row["kind"] == "table_extra":
        return "the log has no such message, though it has what is around this place"
    log, table = json.loads(row["text"]), json.loads(row["other"])
    names = sorted(n for n in log.keys() | table.keys() if log.get(n) != table.get(n))
    texts = [
        f"{name} is {_short(table.get(name))}, in the log {_short(log.get(name))}"
        for name in names[:3]
    ]
    return "; ".join(texts) + (f"; and {len(names) - 3} more columns" if len(names) > 3 else "")


def _short(value: object) -> str:
    text = "null" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _notes(proof: TableProof, about: About) -> Iterator[LogFinding]:
    if proof.behind:
        text = f"{proof.behind:,} messages of the log are not in the table yet"
        yield LogFinding(None, INFO, "table_behind", text, topic=about.topic)
    if proof.ahead:
        text = (
            f"{proof.ahead:,} rows of the table are from behind the end of the log: the stores are "
            "older than the table, or the log has lost these messages"
        )
        yield LogFinding(None, WARNING, "table_ahead", text, topic=about.topic)
    if proof.unseen:
        text = (
            f"{proof.unseen:,} rows of the table cannot be compared: the log has expired there, or "
            "their brokers' stores are not given"
        )
        kind = INFO if proof.compared else WARNING
        yield LogFinding(None, kind, "table_unseen", text, topic=about.topic)


def lines_of_proof(proof: TableProof | None) -> list[str]:
    """What was compared, for people."""
    if proof is None:
        return []
    return [
        f"table {proof.table}: {proof.rows:,} rows of topic {proof.topic}, "
        f"{proof.compared:,} messages compared with the log"
    ]
