"""The data source on Spark itself: schemas, filters, modes, partitions."""

from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from batonmq.spark.parquet_files import write_parquet
from batonmq.spark.read.columns import TABLES, table_schema
from batonmq.spark.session import register
from batonmq.spark.steps.sql import locked
from tests.spark.log_files import START_MS, LogFiles
from tests.spark.table_rows import read

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
]
GOLDEN = Path(__file__).parent.parent / "golden" / "java-5.3.3" / "store"


def frame(session, path, **options):
    return session.read.format("batonmq").options(**options).load(str(path))


def test_schemas_are_exactly_what_spark_expects():
    for table in TABLES:
        ours = table_schema(table, (), with_corrupt=True)
        assert to_arrow_schema(from_arrow_schema(ours), timezone="UTC").equals(ours)


def test_a_java_store_as_data_frames(session):
    messages = frame(session, GOLDEN / "*")
    per_epoch = messages.groupBy("broker_id", "epoch").count().collect()
    assert {tuple(row) for row in per_epoch} == {
        (broker, epoch, count) for broker in (1, 2) for epoch, count in ((1, 20), (2, 1), (3, 1))
    }
    row = messages.filter("tags = 'TagA' and broker_id = 1 and reconsume_times = 0").first()
    assert row.properties["TAGS"] == "TagA" and row.born_at.year == 2026
    assert isinstance(row.body, bytes | bytearray)
    epochs = frame(session, GOLDEN / "*", table="epochs", columns="broker_id,epoch")
    found = sorted(map(tuple, epochs.collect()))
    assert found == [(broker, epoch) for broker in (1, 2) for epoch in (1, 2, 3)]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A store of one file in three ranges."""
    files = LogFiles(tmp_path_factory.mktemp("large") / "store", file_size=3 << 18)
    for number in range(MESSAGES):
        files.add(number=number, queue_id=number % 4, topic=b"T%d" % (number % 2), body=b"b" * 1000)
    files.save()
    return files


@pytest.fixture
def flip(large):
    """Changes a byte of its log, or changes it back; the log's path. All are back at the end."""
    path = large.root / "commitlog" / f"{0:020d}"
    whole = path.read_bytes()

    def change(at):
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)
        return path

    yield change
    path.write_bytes(whole)


MESSAGES = 600
SPLIT = {"splitBytes": str(1 << 18), "maxRecordBytes": str(1 << 17)}


def test_a_file_is_split_and_filters_keep_their_meaning(session, large):
    every = frame(session, large.root, **SPLIT)
    moment = datetime.fromtimestamp((START_MS + 301) / 1000, UTC)
    wanted = every.filter("topic = 'T1' and queue_id in (1, 3)").filter(every.store_at > moment)
    wanted = wanted.filter("queue_offset not between 310 and 320")
    assert wanted.rdd.getNumPartitions() == 3
    found = sorted(row.queue_offset for row in wanted.collect())
    assert found == [*range(301, 310, 2), *range(321, MESSAGES, 2)]


def test_each_query_gets_its_own_rows_whatever_the_one_before_filtered(session, large):
    """Spark keeps what a pushed filter planned for all queries of a view, so none is pushed."""
    session.sql(
        "CREATE OR REPLACE TEMPORARY VIEW m USING batonmq OPTIONS "
        f"(PATH '{large.root}', Columns 'topic,store_at,queue_offset', topicPattern 'T.*')"
    )
    filtered = "SELECT count(*) FROM m WHERE topic = 'T1' AND queue_offset < 10"
    counts = [session.sql(each).first()[0] for each in (filtered, "SELECT count(*) FROM m")]
    assert counts == [5, MESSAGES]
    first, second = (session.table("m").filter(f"topic = 'T{number}'") for number in (0, 1))
    assert first.union(second).count() == MESSAGES


def test_options_leave_out_what_need_not_be_read(large, flip):
    flip(large.end - 100_000)
    early = {"endingTimestamp": str(START_MS + 301), "timeSlackMs": "0", **SPLIT}
    wanted = read(large.root, topic="T1", queueId="1,3", **early)
    assert sorted(row["queue_offset"] for row in wanted) == list(range(1, 300, 2))


def test_modes_on_spark(session, large, flip):
    path = flip(300_000)
    with pytest.raises(Exception, match=rf"{path}: .*CRC is wrong at log offset \d+") as failed:
        frame(session, large.root, **SPLIT).filter("queue_offset < 0").count()
    assert len(texts_of(failed)) == 2, "the first one says that it was in a Python process"
    rows = frame(session, large.root, mode="PERMISSIVE", **SPLIT).select("corrupt").collect()
    (bad,) = [row.corrupt for row in rows if row.corrupt is not None]
    assert bad.file == str(path) and bad.offset <= 300_000 < bad.offset + bad.bytes
    assert len(rows) == MESSAGES


def test_parquet_files_written_by_tasks_hold_the_same_rows(session, large, tmp_path, monkeypatch):
    """Tasks run in folders of their own, so a relative path is made absolute before."""
    monkeypatch.chdir(tmp_path)
    options = {"path": str(large.root), **SPLIT}
    assert write_parquet(session, options, "./out//") == MESSAGES
    written = session.read.parquet(str(tmp_path / "out"))
    plain = frame(session, large.root)
    assert dict(written.dtypes) == dict(plain.dtypes)
    order = "physical_offset"
    assert written.orderBy(order).collect() == plain.orderBy(order).collect()
    names = [path.name[:5] for path in (tmp_path / "out").iterdir()]
    assert set(names) == {"part-", "_SUCC", "_lock"} and len(names) > 4
    with pytest.raises(FileExistsError, match="not empty"):
        write_parquet(session, options, str(tmp_path / "out"))


def test_parquet_files_of_an_empty_store_tell_the_columns_in_the_folder_that_is_there(
    session, tmp_path
):
    """It may be a mount, which cannot be renamed, and has its owner and mode; it takes one run at
    a time."""
    path, out = LogFiles(tmp_path / "empty").save(confirm=0), tmp_path / "out"
    out.mkdir(mode=0o2750)
    before, lock = out.stat(), locked(str(out))
    with pytest.raises(ValueError, match="another run writes there"):
        write_parquet(session, {"path": path}, str(out))
    lock.release()
    assert write_parquet(session, {"path": path}, str(out)) == 0
    after = out.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert sorted(path.name for path in out.iterdir()) == ["_SUCCESS", "_lock", "part-0.parquet"]
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "out"}
    written = session.read.parquet(str(out))
    schema = from_arrow_schema(table_schema("messages", (), with_corrupt=False))
    assert written.count() == 0 and written.schema.simpleString() == schema.simpleString()


def test_a_damaged_log_leaves_no_file_that_looks_whole(session, large, flip, tmp_path):
    flip(100)
    out = tmp_path / "out"
    with pytest.raises(Exception, match="CRC is wrong at log offset 0 "):
        write_parquet(session, {"path": str(large.root), **SPLIT}, str(out))
    assert {path.name for path in out.iterdir()} == {"_growing", "_lock"}
    flip(100)
    assert write_parquet(session, {"path": str(large.root), **SPLIT}, str(out)) == MESSAGES


def test_plain_parquet_of_messages_has_dictionaries_where_values_repeat(session, large, tmp_path):
    """What makes df.write.parquet dear in the JVM; a session's own setting stays."""
    frame(session, large.root).write.parquet(str(tmp_path / "out"))
    (path,) = (tmp_path / "out").glob("part-*.parquet")
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = {c.path_in_schema: c for c in map(group.column, range(group.num_columns))}
    assert {name for name, c in columns.items() if c.has_dictionary_page} >= {"store", "topic"}
    assert not any(columns[name].has_dictionary_page for name in ("body", "queue_offset"))
    assert columns["store_at"].physical_type == "INT64"
    assert not columns["body"].is_stats_set and columns["store_at"].is_stats_set
    key = "parquet.enable.dictionary#body"
    session.conf.set(key, "true")
    assert register(session).conf.get(key) == "true"
    session.conf.set(key, "false")


def texts_of(error):
    """The message of an error without the state of SQL, in which Spark ends some."""
    return [line for line in str(error.value).splitlines() if "SQLSTATE" not in line]


def test_bad_options_are_named_in_one_line(session):
    with pytest.raises(Exception, match="it must be one of messages") as refused:
        frame(session, GOLDEN / "b0", table="nothing")
    assert len(texts_of(refused)) == 1


def test_processes_on_this_machine_import_the_installed_pyspark(session):
    """From Spark's archive each would compile it again, and a stream gives its processes 10 s."""
    place = session.sparkContext.parallelize([0], 1).map(lambda _: pyspark.__file__)
    assert place.collect() == [pyspark.__file__]
