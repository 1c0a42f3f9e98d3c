"""Stores elsewhere: by Hadoop's file systems with the session's settings, and in S3."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
from pyarrow import fs

from batonmq.spark import session as sessions
from batonmq.spark.arrow import open_arrow
from batonmq.spark.read import hadoop, storage
from batonmq.spark.steps.sql import DELTA, PARQUET, DuckEngine, ResultTable, names_in, put

GOLDEN = Path(__file__).parents[1] / "golden" / "java-5.3.3" / "store"
MAVEN = Path.home() / ".m2" / "repository" / "org" / "apache" / "hadoop"
COLUMNS = "topic,queue_id,queue_offset,body,epoch"
HERE = open_arrow(str(GOLDEN / "b*"), columns=COLUMNS).read_all()


@pytest.fixture
def shared(monkeypatch):
    """Settings of a session, as `register` shares them."""
    monkeypatch.delenv(hadoop.SHARED, raising=False)
    storage._opened.cache_clear()

    def given(**settings):
        spark = {f"spark.hadoop.{key}": value for key, value in settings.items()}
        monkeypatch.setenv(hadoop.SHARED, hadoop.share_settings(spark))
        return spark

    yield given
    storage._opened.cache_clear()


@pytest.fixture
def lake(shared, tmp_path):
    """A file system that only Hadoop has, and only by a setting: `viewfs`."""
    shutil.copytree(GOLDEN, tmp_path / "stores")
    name = tmp_path.name.replace("_", "")
    settings = shared(**{f"fs.viewfs.mounttable.{name}.link./data": f"file://{tmp_path}"})
    return f"viewfs://{name}/data", settings


def test_hadoops_file_system_gives_the_rows_of_the_disk(lake):
    place, _ = lake
    assert open_arrow(f"{place}/stores/b*", columns=COLUMNS).read_all().equals(HERE)
    with pytest.raises(FileNotFoundError, match="nothing matches"):
        open_arrow(f"{place}/nowhere/*")
    files, inner = storage.locate(f"{place}/stores")
    assert files.uri(inner) == f"{place}/stores"
    assert files.read_small(f"{inner}/nothing") is None
    with pytest.raises(NotADirectoryError):
        files.children(f"{inner}/b0/checkpoint")


def test_spark_reads_by_the_settings_of_its_session(lake, session, monkeypatch):
    place, settings = lake
    conf = session.sparkContext.getConf().setAll(list(settings.items()))  # a copy
    monkeypatch.setattr(session.sparkContext, "getConf", lambda: conf)
    sessions.register(session)
    try:
        frame = session.read.format("batonmq").option("columns", COLUMNS).load(f"{place}/stores/b0")
        found = frame.toArrow()
    finally:
        monkeypatch.undo()
        sessions.register(session)
    # One task: each process starts a JVM of its own.
    here = open_arrow(str(GOLDEN / "b0"), columns=COLUMNS).read_all()
    assert sorted(map(str, found.to_pylist())) == sorted(map(str, here.to_pylist()))
    assert len(found) == 22


def test_results_go_where_hadoop_has_a_file_system(lake, tmp_path):
    place, _ = lake
    with DuckEngine() as engine:
        engine.table("made", pa.table({"n": [1, 2, 2]}))
        for _ in range(2):  # the second one replaces the first
            engine.write("SELECT n, n AS part FROM made", ResultTable(f"{place}/out", by=["part"]))
            put(f"{place}/out.json", "{}")
        engine.read("back", ResultTable(f"{place}/out"))
        assert sorted(engine.rows("SELECT n FROM back")["n"].to_pylist()) == [1, 2, 2]
        assert names_in(place) == ["out", "out.json", "stores"]
        put(f"{place}/out.json", None)
    assert sorted(os.listdir(tmp_path / "out")) == ["part=1", "part=2"]
    assert not (tmp_path / "out.json").exists()


MINI_DFS = """
import os, sys, jpype
jpype.startJVM("-Xmx512m", "-Djava.net.preferIPv4Stack=true", classpath=sys.argv[1].split(":"))
conf = jpype.JClass("org.apache.hadoop.conf.Configuration")()
conf.set("hdfs.minidfs.basedir", sys.argv[2])
cluster = jpype.JClass("org.apache.hadoop.hdfs.MiniDFSCluster$Builder")(conf).build()
cluster.waitActive()
files = cluster.getFileSystem()
path = jpype.JClass("org.apache.hadoop.fs.Path")
files.copyFromLocalFile(path(sys.argv[3]), path("/stores"))
print(f"at {files.getUri()}", flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture
def hdfs(shared, tmp_path):
    """One name node and one data node, with the stores."""
    jars = sorted(MAVEN.glob("hadoop-client-minicluster/*/*.jar"))
    if not jars:
        pytest.skip("no org.apache.hadoop:hadoop-client-minicluster in Maven's local repository")
    shared()
    classes = ":".join(map(str, [*jars[-1:], *hadoop._class_path()]))
    command = [sys.executable, "-c", MINI_DFS, classes, str(tmp_path / "dfs"), str(GOLDEN)]
    with (
        open(tmp_path / "dfs.log", "w") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as cluster,
    ):
        yield next(line[3:].strip() for line in cluster.stdout if line.startswith("at "))
        cluster.stdin.close()
        cluster.wait()


def test_hdfs_is_read_and_written(hdfs):
    assert open_arrow(f"{hdfs}/stores/b*", columns=COLUMNS).read_all().equals(HERE)
    with DuckEngine() as engine:
        engine.table("made", pa.table({"n": [1, 2, 2]}))
        for text in ("{}", "[]"):  # the second one replaces the first
            engine.write("SELECT n, n AS part FROM made", ResultTable(f"{hdfs}/out", by=["part"]))
            put(f"{hdfs}/out.json", text)
        engine.read("back", ResultTable(f"{hdfs}/out"))
        assert engine.rows("SELECT n FROM back").num_rows == 3
    assert names_in(hdfs) == ["out", "out.json", "stores"]
    files, inner = storage.locate(f"{hdfs}/out.json")
    assert files.read_small(inner) == b"[]"


def test_a_scheme_without_its_jar_is_refused_in_a_line_that_begins_with_it(shared):
    with pytest.raises(storage.UnknownPlace, match=r"^no jar for tape://a: Spark needs .*$"):
        storage.locate("tape://a/b")


@pytest.fixture(scope="module")
def s3():
    """A server that speaks S3's protocol, with a bucket of the stores."""
    from moto.server import ThreadedMotoServer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{port}"
    there = fs.S3FileSystem(
        access_key="k", secret_key="s", endpoint_override=endpoint, region="us-east-1",
        allow_bucket_creation=True,
    )  # fmt: skip
    there.create_dir("logs")
    fs.copy_files(str(GOLDEN), "logs/stores", destination_filesystem=there)
    yield endpoint
    server.stop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("scheme", ["s3a", "s3"])
def test_s3_is_read_and_written_by_the_settings_of_s3a(scheme, s3, shared):
    shared(**{
        "fs.s3a.access.key": "wrong",
        "fs.s3a.bucket.logs.access.key": "k",
        "fs.s3a.secret.key": "s",
        "fs.s3a.endpoint": s3,
        "fs.s3a.endpoint.region": "us-east-1",
        "fs.s3a.path.style.access": "true",
    })  # fmt: skip
    assert hadoop.s3_options("logs")["access_key"] == "k"
    found = open_arrow(f"{scheme}://logs/stores/b*", columns=COLUMNS).read_all()
    assert found.equals(HERE)
    with DuckEngine() as engine:
        engine.table("made", pa.table({"n": [1, 2, 2]}))
        for form in (PARQUET, DELTA):
            table = ResultTable(f"{scheme}://logs/{scheme}-{form}", form, by=["part"])
            for query in ("SELECT n, n AS part FROM made LIMIT 1", "SELECT n, n AS part FROM made"):
                engine.write(query, table)
            engine.read("back", table)
            assert engine.rows("SELECT n FROM back").num_rows == 3, form
    given = hadoop.delta_options(table.place)
    assert deltalake.DeltaTable(table.place, version=0, storage_options=given).count() == 1
