"""Batches become commits of Delta and Iceberg tables: once, whatever comes again or changes."""

import json
import os
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock, Mock

import deltalake
import msgspec
import pyarrow as pa
import pytest

from batonmq.protocol.message import MessageQueue
from batonmq.spark.jobs import topic_table
from batonmq.spark.read.columns import TOPIC
from batonmq.spark.read.storage import locate, spark_uri
from batonmq.spark.topic_table import files
from batonmq.spark.topic_table import stream as stream_module
from batonmq.spark.topic_table.bodies import Bodies
from batonmq.spark.topic_table.rows import MESSAGE, RowPlan
from batonmq.spark.topic_table.stream import TablePlan, TopicStream
from batonmq.spark.topic_table.table_formats import TableState
from tests.spark.topic_table.table_runs import Batch, Runs, begin, checkpoint_of, messages

JSON_ROWS = [b'{"id": %d, "name": "n%d"}' % (n, n) for n in range(10)]


@pytest.fixture(params=["delta", "iceberg"])
def runs(request, tmp_path):
    return Runs(tmp_path, request.param)


def test_rows_have_the_fields_and_where_they_are_in_the_log(runs):
    stream = runs.begun()
    stream._take(Batch(messages(JSON_ROWS[:6]), messages(JSON_ROWS[6:], queue=1)), 0)
    rows = runs.rows()
    assert [(r["_queue_id"], r["_queue_offset"], r["id"], r["name"]) for r in rows] == [
        *((0, n, n, f"n{n}") for n in range(6)),
        *((1, n, n + 6, f"n{n + 6}") for n in range(4)),
    ]
    first = rows[0]
    assert (first["_broker"], first["_physical_offset"], first["_epoch"]) == ("broker-a", 0, 1)
    assert (first["_keys"], first["_tags"], first["_message_id"]) == ("k0", None, "u0-0")
    assert first["_rest"] is first["_error"] is first["_body"] is None
    state = runs.table().state()
    assert (state.batch, state.rows) == (0, 10)
    assert state.queues == {"broker-a": {"0": (0, 6), "1": (0, 4)}}
    assert runs.said[-1].startswith("batch 0: 10 rows in 3 files, 10 in all; the newest is ")


def test_a_batch_that_comes_again_is_passed_over(runs):
    """The driver died behind the table's commit and before the checkpoint's."""
    runs.begun()._take(Batch(messages(JSON_ROWS)), 0)
    again = runs.begun()
    begin(again, 0)
    again._take(Batch(messages(JSON_ROWS)), 0)
    again._take(Batch(messages(JSON_ROWS, first=10)), 1)
    assert (again.counts.repeats, again.counts.batches) == (1, 1)
    assert [row["_queue_offset"] for row in runs.rows()] == list(range(20))


class Death(BaseException):
    """Of the driver: nothing of it runs any more."""


class DyingTable:
    """A table whose driver dies at call number `at`: before it (odd numbers), or behind it."""

    def __init__(self, table, at):
        self._table, self._left = table, at

    def __getattr__(self, name):
        found = getattr(self._table, name)
        return partial(self._call, found) if callable(found) else found

    def _call(self, found, *given):
        self._live()
        made = found(*given)
        self._live()
        return made

    def _live(self):
        self._left -= 1
        if self._left == 0:
            raise Death


def test_a_driver_that_dies_anywhere_loses_and_doubles_nothing(runs):
    """Each batch is tried until it passes: the driver dies one call later each time. Between the
    table's commit and the checkpoint's, too: a batch counts as done for Spark only if it returns.
    """
    batches = [JSON_ROWS, [b'{"id": 10, "price": 2.5}'] * 5]  # new columns in the second
    deaths, first = 0, 0
    for number, bodies in enumerate(batches):
        batch, at = messages(bodies, first=first), 1
        while True:
            try:
                table = DyingTable(runs.table(), at)
                plan = TablePlan("h:1", "Orders", compact_s=1e-9, keep_hours=1000)
                stream = TopicStream(table, plan, runs.said.append)
                begin(stream, number)
                stream._take(Batch(batch), number)
                break
            except Death:
                deaths, at = deaths + 1, at + 1
                rows = [row["_queue_offset"] for row in runs.rows()]
                assert rows in (list(range(first)), list(range(first + len(bodies))))
        first += len(bodies)
    assert deaths > 20
    assert [row["_queue_offset"] for row in runs.rows()] == list(range(first))
    assert runs.table().state().rows == first
    runs.table().expire(0)  # with what the dead ones wrote and no commit names
    assert len(runs.rows()) == first


def test_two_drivers_cannot_commit_one_batch(runs):
    """A driver that was taken for dead continues: its batch was committed by its successor."""
    runs.begun()._take(Batch(messages(JSON_ROWS)), 0)
    first, second = runs.begun(), runs.begun()
    first._table.state()
    again = Batch(messages(JSON_ROWS, first=10))
    second._take(again, 1)
    report, state = first._write(again), second._table.state()
    with pytest.raises(Exception, match=r"Concurrent transaction|has changed|updated by"):
        first._table.commit(report.files, state)
    assert len(runs.rows()) == 20


def test_new_fields_become_columns_and_their_old_rows_are_null(runs):
    stream = runs.begun()
    stream._take(Batch(messages(JSON_ROWS)), 0)
    stream._take(Batch(messages([b'{"id": 10, "price": 1}', b'{"id": 11, "price": 2.5}'],
                                first=10)), 1)  # fmt: skip
    rows = runs.rows()
    assert [row["price"] for row in rows] == [None] * 10 + [1.0, 2.5]
    assert "new columns: price double" in runs.said
    stream = runs.begun()
    stream._take(Batch(messages([b'{"price": 3.5, "tags": ["a"]}'], first=12)), 2)
    assert runs.rows()[-1]["tags"] == '["a"]'
    assert len(runs.rows()) == 13


def test_r54_what_does_not_fit_is_kept_beside_and_stops_nothing(runs):
    bodies = [
        b'{"id": 1}', b'{"id": "one"}', b"no json", b"[1]", b"\xff", b"", b'{"ID": 2, "we ird": 3}',
        b'{"_x": 1}', b'{"big": 123456789012345678901234567890}', b'{"s": "\\ud800"}',
        b"[" * 10_000,
    ]  # fmt: skip
    stream = runs.begun()
    stream._take(Batch(messages(bodies[:1])), 0)
    stream._take(Batch(messages(bodies[1:], first=1)), 1)
    rows = runs.rows()
    assert len(rows) == len(bodies)
    assert (rows[0]["id"], rows[1]["id"]) == (1, None)
    assert json.loads(rows[1]["_rest"]) == {"id": "one"}
    assert json.loads(rows[6]["_rest"]) == {"ID": 2, "we ird": 3}
    assert json.loads(rows[7]["_rest"]) == {"_x": 1}
    assert json.loads(rows[8]["_rest"]) == {"big": 123456789012345678901234567890}
    broken = {n: row for n, row in enumerate(rows) if row["_error"]}
    assert sorted(broken) == [2, 3, 4, 5, 9, 10]
    assert all(row["_body"] == bodies[n] for n, row in broken.items())
    assert (broken[3]["_error"], stream.counts.broken) == ("it is JSON, but no object", 6)


def test_strangers_cannot_make_columns_without_an_end(runs):
    stream = runs.begun(columns_max=5)
    stream._take(Batch(messages([b'{"f%d": 1}' % n for n in range(40)])), 0)
    assert len(runs.table().fields()) == 5
    assert sum(row["_rest"] is not None for row in runs.rows()) == 35


def test_small_files_are_put_together_and_old_versions_go(runs, monkeypatch):
    stream = runs.begun(compact_s=1e-9, keep_hours=1000)
    for n in range(12):
        stream._take(Batch(messages(JSON_ROWS[:5], first=5 * n)), n)
    assert stream.counts.compacted >= 8 and len(runs.table().files()) < 12
    assert [row["_queue_offset"] for row in runs.rows()] == list(range(60))
    assert runs.table().state().batch == 11, "a compaction keeps what the table says of itself"
    runs.table().expire(0)
    assert len(runs.rows()) == 60 and (checkpoint_of(stream) / "metadata").exists()
    monkeypatch.setattr(type(stream._table), "compact", lambda _: 1 / 0)
    stream._take(Batch(messages(JSON_ROWS[:1], first=60)), 12)
    assert runs.said[-1] == "the table could not be compacted: division by zero"


def test_files_that_no_version_has_are_removed(runs):
    """Of versions that are gone, and of a driver that died before its commit."""
    stream = runs.begun(compact_s=1e-9, keep_hours=1000)
    for n in range(12):
        stream._take(Batch(messages(JSON_ROWS[:5], first=5 * n)), n)
    assert stream._write(Batch(messages(JSON_ROWS, first=60))).files
    others = Path(locate(runs.table().location + runs.table().below)[1]) / "others.parquet"
    others.touch()
    for file in others.parent.rglob("*.parquet"):
        os.utime(file, (1_800_000_000 - 10**8,) * 2)
    kept = {str(others)} if runs.form == "iceberg" else set()  # Delta's own rule takes it, too
    held = {str(file) for file in others.parent.rglob("*.parquet")}
    gone = runs.table().expire(0)
    left = {str(file) for file in others.parent.rglob("*.parquet")}
    assert left == {locate(file)[1] for file in runs.table().files()} | kept
    assert gone == len(held - left) >= 9 and len(runs.rows()) == 60
    if runs.form == "iceberg":
        assert len(runs.table()._open().metadata.snapshots) == 1


def test_files_stay_while_a_tag_holds_an_old_version(tmp_path):
    """The tag's is the oldest version then, and not where those that are kept begin: of their files
    those that were put together since are neither in it nor in the newest."""
    runs = Runs(tmp_path, "iceberg")
    stream = runs.begun()
    stream._take(Batch(messages(JSON_ROWS[:5])), 0)
    lake = runs.table()._open()
    lake.manage_snapshots().create_tag(lake.current_snapshot().snapshot_id, "old").commit()
    for n in range(1, 9):
        stream._take(Batch(messages(JSON_ROWS[:5], first=5 * n)), n)
    runs.table().expire(0)
    kept = runs.table()._open().current_snapshot().snapshot_id
    stream._take(Batch(messages(JSON_ROWS[:5], first=45)), 9)
    table = runs.table()
    assert table.compact() and table._remove_unnamed(datetime.now(UTC) + timedelta(hours=1)) == 0
    assert len(runs.table()._open().scan(snapshot_id=kept).to_arrow()) == 45


@pytest.mark.parametrize(("partition", "parts"), [("day", 2), ("hour", 2), ("none", 1)])
def test_partitions_are_times_of_the_store(runs, partition, parts):
    stream = runs.begun(partition=partition)
    stream._take(Batch(messages(JSON_ROWS)), 0)
    table = runs.table()
    assert len(table.files()) == parts and len(runs.rows()) == 10
    with pytest.raises(ValueError, match=f"has partitions by {partition}"):
        runs.begun(partition="none" if parts == 2 else "day")


def test_each_table_has_its_own_checkpoint_and_topic(runs, tmp_path):
    shared = str(tmp_path / "shared")
    stream = runs.begun(checkpoint=shared)
    stream._take(Batch(messages(JSON_ROWS)), 0)
    begin(stream, 0)
    with pytest.raises(ValueError, match="is a table of topic Orders, not of Payments"):
        runs.begun(topic="Payments", checkpoint=shared)
    with pytest.raises(ValueError, match="checkpoint of a table that is gone"):
        runs.begun("other", checkpoint=shared)
    runs.begun("other")
    begin(stream, 1)
    other = runs.run("other", checkpoint=shared)
    with pytest.raises(ValueError, match=r"continues with batch 1, and .* none of its batches"):
        other._take(Batch(messages(JSON_ROWS, first=10)), 1)
    assert runs.rows("other") == []
    with pytest.raises(ValueError, match=r"10 rows, and .*new is new: name the checkpoint"):
        runs.begun(checkpoint=str(tmp_path / "new"))
    begin(runs.begun("third", checkpoint=str(tmp_path / "sparks")), 0, done=True)
    with pytest.raises(ValueError, match="sparks: it is of another table, or"):
        runs.run(checkpoint=str(tmp_path / "sparks"))


def test_a_new_checkpoint_continues_behind_the_table_and_ends_the_old_one(runs, tmp_path):
    old = runs.begun()
    old._take(Batch(messages(JSON_ROWS)), 0)
    begin(old, 0, done=True)
    new = runs.begun(checkpoint=str(tmp_path / "new"), from_table=True)
    new._take(Batch(messages(JSON_ROWS, first=10)), 0)
    assert [row["_queue_offset"] for row in runs.rows()] == list(range(20))
    with pytest.raises(ValueError, match="was continued from another checkpoint since"):
        runs.begun()
    # A driver that runs all the while finds it out with its next batch.
    with pytest.raises(ValueError, match=r"continues with batch 1, and .* none of its batches"):
        old._take(Batch(messages(JSON_ROWS, first=10)), 1)
    with pytest.raises(ValueError, match=r"goes on at offset 5 of .* ends at 20"):
        new._take(Batch(messages(JSON_ROWS, first=5)), 1)


def test_a_new_checkpoint_whose_driver_died_in_its_first_batch_continues(runs, tmp_path):
    runs.begun()._take(Batch(messages(JSON_ROWS)), 0)
    begin(runs.begun(checkpoint=str(tmp_path / "new"), from_table=True), 0)
    again = runs.run(checkpoint=str(tmp_path / "new"), from_table=True)
    again._take(Batch(messages(JSON_ROWS, first=10)), 0)
    assert [row["_queue_offset"] for row in runs.rows()] == list(range(20))


def test_a_checkpoint_that_died_without_a_commit_is_another_one_without_from_table(runs, tmp_path):
    runs.begun()._take(Batch(messages(JSON_ROWS)), 0)
    begin(runs.begun("other", checkpoint=str(tmp_path / "others")), 0)
    with pytest.raises(ValueError, match="others: it is of another table, or"):
        runs.run(checkpoint=str(tmp_path / "others"))


@pytest.mark.parametrize("first", [5, 50])
def test_the_first_batch_of_another_checkpoint_leaves_no_hole(runs, tmp_path, first):
    runs.begun()._take(Batch(messages(JSON_ROWS)), 0)
    begin(runs.begun("other", checkpoint=str(tmp_path / "others")), 0)
    stream = runs.run(checkpoint=str(tmp_path / "others"), from_table=True)
    with pytest.raises(ValueError, match=rf"others goes on at offset {first} of .* ends at 10: "):
        stream._take(Batch(messages(JSON_ROWS, first=first)), 0)
    assert [row["_queue_offset"] for row in runs.rows()] == list(range(10))


def test_a_queue_that_comes_back_leaves_no_hole(runs, tmp_path):
    """Its messages expired while its broker group was away, and the source begins where it can."""
    runs.begun()._take(Batch(messages(JSON_ROWS), messages(JSON_ROWS, queue=1)), 0)
    new = runs.begun(checkpoint=str(tmp_path / "new"), from_table=True)
    new._take(Batch(messages(JSON_ROWS, first=10)), 0)
    with pytest.raises(ValueError, match=r"offset 50 of broker broker-a, queue 1, .* ends at 10: "):
        new._take(Batch(messages(JSON_ROWS, first=50, queue=1)), 1)


def test_what_was_lost_is_left_out_by_another_checkpoint_on_wish(runs, tmp_path):
    runs.begun()._take(Batch(messages(JSON_ROWS)), 0)
    stream = runs.begun(checkpoint=str(tmp_path / "new"), from_table=True, accept_loss=True)
    stream._take(Batch(messages(JSON_ROWS, first=50)), 0)
    assert runs.table().state().queues == {"broker-a": {"0": (0, 60)}}


def test_a_first_batch_begins_behind_the_table_again_after_its_driver_died(
    runs, tmp_path, monkeypatch
):
    runs.begun()._take(Batch(messages(JSON_ROWS)), 0)
    begin(runs.begun(checkpoint=str(tmp_path / "new"), from_table=True), 0)
    again = runs.run(checkpoint=str(tmp_path / "new"), from_table=True)
    ends = {"broker-a": {"0": (0, 10)}}
    monkeypatch.setattr(stream_module, "_behind", lambda _, state: state.queues == ends)
    session = Mock()
    again._start(session)
    assert session.readStream.format().options.call_args.kwargs["startingOffsets"] is True
    again._take(Batch(messages(JSON_ROWS, first=10)), 0)
    again._start(session)
    assert session.readStream.format().options.call_args.kwargs["startingOffsets"] == "earliest"


def test_a_queue_that_is_gone_does_not_keep_a_new_checkpoint_from_the_others(monkeypatch):
    """Its broker group was taken away for good; the source refuses offsets of what is not there."""
    queues = [MessageQueue("Orders", "broker-a", number) for number in (0, 1)]
    routes = MagicMock()
    routes.__enter__().routes.return_value = [Mock(subscribe_queues=queues)]
    monkeypatch.setattr(stream_module.TopicRead, "connect", lambda read: routes)
    had = {"broker-a": {"0": (0, 10)}, "broker-gone": {"0": (0, 5)}}
    behind = stream_module._behind(TablePlan("h:1", "Orders"), TableState("s", 0, had, 15))
    assert json.loads(behind) == {"Orders": {"broker-a": {"0": 10, "1": "earliest"}}}


def test_a_table_that_is_an_old_copy_is_refused(runs):
    stream = runs.begun()
    stream._take(Batch(messages(JSON_ROWS)), 0)
    begin(stream, 0)
    with pytest.raises(ValueError, match=r"continues with batch 4, and .* nothing behind batch 0"):
        stream._take(Batch(messages(JSON_ROWS, first=10)), 4)


def test_a_given_schema_makes_the_columns_and_may_grow(runs):
    columns = pa.schema([("id", pa.int32()), ("at", pa.timestamp("us", "UTC")),
                         ("where", pa.struct([("city", pa.string())]))])  # fmt: skip
    stream = runs.begun(columns=columns)
    stream._take(Batch(messages([
        b'{"id": 1, "at": "2026-11-28T10:00:00+01:00", "where": {"city": "X", "zip": 7}}',
        b'{"id": 5000000000, "at": 17, "where": "Y", "more": true}',
    ])), 0)  # fmt: skip
    first, second = runs.rows()
    assert first["at"].isoformat() == "2026-11-28T09:00:00+00:00"
    assert (first["id"], first["where"]) == (1, {"city": "X"})
    assert json.loads(first["_rest"]) == {"where": {"city": "X", "zip": 7}}
    assert second["id"] is second["at"] is second["where"] is None
    assert json.loads(second["_rest"]) == {
        "id": 5000000000, "at": 17, "where": "Y", "more": True,
    }  # fmt: skip
    stream = runs.begun(columns=columns.append(pa.field("more", pa.bool_())))
    stream._take(Batch(messages([b'{"more": true}'], first=2)), 1)
    assert [row["more"] for row in runs.rows()] == [None, None, True]
    with pytest.raises(ValueError, match=r"column id is int32 in .* and string in the schema"):
        runs.begun(columns=pa.schema([("id", pa.string())]))
    with pytest.raises(ValueError, match=r"has rows of json bodies, not of raw"):
        runs.begun(bodies=Bodies("raw"))


def test_the_state_of_a_table_costs_no_reading_of_all_its_commits(tmp_path, monkeypatch):
    runs = Runs(tmp_path)
    runs.begun()._take(Batch(messages(JSON_ROWS)), 0)
    history, asked = deltalake.DeltaTable.history, []

    def noted(table, limit=None):
        asked.append(limit)
        return history(table, limit)

    monkeypatch.setattr(deltalake.DeltaTable, "history", noted)
    assert runs.table().state().batch == 0 and asked == [20]


def test_a_start_that_changes_nothing_commits_nothing(tmp_path):
    runs = Runs(tmp_path)
    runs.begun()._take(Batch(messages(JSON_ROWS)), 0)
    version = deltalake.DeltaTable(str(tmp_path / "t")).version()
    runs.begun()
    assert deltalake.DeltaTable(str(tmp_path / "t")).version() == version


def test_rows_of_which_no_commit_tells_are_not_written_again(tmp_path):
    """Others put the table's files together, and removed commits of a month without messages."""
    runs = Runs(tmp_path)
    runs.begun()._take(Batch(messages(JSON_ROWS)), 0)
    deltalake.DeltaTable(str(tmp_path / "t")).create_checkpoint()
    for commit in (tmp_path / "t" / "_delta_log").glob("*.json"):
        commit.unlink()
    assert runs.table().state() is None
    with pytest.raises(ValueError, match="has rows, and no commit is left"):
        runs.run(checkpoint=str(tmp_path / "new"))


def test_columns_may_be_a_longer_text_than_the_name_of_a_file():
    properties = {f"field_{n}": {"type": "integer"} for n in range(100)}
    columns = topic_table._columns(None, (json.dumps({"properties": properties}),))
    assert columns.names == [*properties]


def test_a_folder_of_other_things_is_refused(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "letters.txt").touch()
    with pytest.raises(ValueError, match="holds other things than a table"):
        Runs(tmp_path).run()


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("s3://lake/t/_batonmq/checkpoint", "s3a://lake/t/_batonmq/checkpoint"),
        ("s3a://x", "s3a://x"),
        ("file:/x", "file:/x"),
        ("/lake/t", "file:///lake/t"),  # not of a Hadoop that is the cluster's default
    ],
)
def test_a_checkpoint_is_named_for_hadoop(place, named):
    assert spark_uri(place) == named


def test_rows_of_one_hour_share_a_file_and_so_do_those_without_a_time(tmp_path):
    times = ["2026-11-28T09:10:00", "2026-11-28T09:50:00", None, "2026-11-28T10:00:00"]
    rows = [
        {"broker": "a", "queue_id": 0, "queue_offset": at, "body": b"x",
         "store_at": time and datetime.fromisoformat(time).replace(tzinfo=UTC)}
        for at, time in enumerate(times)
    ]  # fmt: skip
    schema = pa.schema([TOPIC.field(name) for name in (*MESSAGE.values(), "body")])
    plan = RowPlan(Bodies("raw"), pa.schema([("body", pa.binary())]))
    messages = iter([pa.RecordBatch.from_pylist(rows, schema)])
    (row,) = files.write(files.FilePlan(plan, str(tmp_path), "", "hour"), messages)
    report = msgspec.json.decode(row["report"][0].as_py(), type=files.TaskReport)
    found = {(each.part["_day"], each.part["_hour"]): each for each in report.files}
    assert found.keys() == {("2026-11-28", "9"), ("2026-11-28", "10"), (None, None)}
    stats = json.loads(found["2026-11-28", "9"].stats)
    assert stats["numRecords"] == 2 and stats["maxValues"]["_queue_offset"] == 1
    assert stats["minValues"]["_store_at"] == "2026-11-28T09:10:00.000000Z"
    assert all((tmp_path / each.path).stat().st_size == each.size for each in report.files)
