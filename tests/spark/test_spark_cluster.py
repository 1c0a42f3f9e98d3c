"""Executors get the package as the wheel, and nothing else: they read what this process reads.

`make soak` starts a Spark of several processes; else one Python process does what its tasks do.
"""

import json
import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from lab.cluster.spark_submit import build_package, environment, submit
from tests.spark.table_rows import read

JOB = """
import json, os, sys
from batonmq.spark.session import open_session

def place(_):
    import batonmq.spark.read.reading
    return os.getppid(), batonmq.spark.read.reading.__file__

session = open_session("job", settings={
    "spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
})
session.read.format("batonmq").load(sys.argv[1]).write.parquet(sys.argv[2])
places = set(session.sparkContext.range(16, numSlices=16).map(place).collect())
print("RESULT " + json.dumps([session.sparkContext.master, sorted(places)]))
"""


# What Spark does with a reader: plans on the driver, and hands a copy and its parts to tasks.
TASKS = """
import json, pickle, sys
import batonmq.spark.source as source

made = source.BatonmqSource({"path": sys.argv[1]})
reader = made.reader(made.schema())
task = pickle.loads(pickle.dumps(reader))
batches = [batch for part in reader.partitions() for batch in task.read(part)]
offsets = [row["queue_offset"] for batch in batches for row in batch.to_pylist()]
print(json.dumps([source.__file__, offsets]))
"""


@pytest.fixture
def store(log_files):
    for number in range(60):
        log_files.add(number=number, body=b"b" * 1000, properties=b"TAGS\x01t\x02KEYS\x01k\x02")
    return log_files.save()


@pytest.fixture
def package(tmp_path):
    return build_package(tmp_path)


def test_a_process_with_the_wheel_reads_a_store(tmp_path, store, package):
    done = subprocess.run(
        [sys.executable, "-c", TASKS, store],
        cwd=tmp_path, env=environment() | {"PYTHONPATH": str(package)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [f"{package}/batonmq/spark/source.py", [*range(60)]]


@pytest.mark.skipif(os.environ.get("BATONMQ_SOAK") != "1", reason="a minute long: `make soak`")
def test_two_workers_with_the_wheel_read_what_this_process_reads(tmp_path, store, package):
    out = tmp_path / "out"
    master, places = submit(
        tmp_path, JOB, (store, out), package=package, master="local-cluster[2,1,512]",
        memory="512m",
    )  # fmt: skip
    assert master.startswith("local-cluster")
    assert len({daemon for daemon, _ in places}) == 2
    assert all(f"{package.name}/batonmq/spark/read/reading.py" in file for _, file in places)
    rows = read(store)
    written = pq.read_table(out).to_pylist()
    assert sorted(written, key=lambda row: row["physical_offset"]) == rows and len(rows) == 60
