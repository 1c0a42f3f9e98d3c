"""A Spark of several processes: its executors get the package as the wheel, and nothing else."""

import pyarrow.parquet as pq

from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.reading import Read
from lab.cluster.spark_submit import build_package, submit

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


def test_two_workers_with_the_wheel_read_what_this_process_reads(tmp_path, log_files):
    for number in range(60):
        log_files.add(number=number, body=b"b" * 1000, properties=b"TAGS\x01t\x02KEYS\x01k\x02")
    store, out = log_files.save(), tmp_path / "out"
    package = build_package(tmp_path)
    master, places = submit(
        tmp_path, JOB, (store, out), package=package, master="local-cluster[2,1,512]",
        memory="512m",
    )  # fmt: skip
    assert master.startswith("local-cluster")
    assert len({daemon for daemon, _ in places}) == 2
    assert all(f"{package.name}/batonmq/spark/read/reading.py" in file for _, file in places)
    work = Read(ReadOptions.from_mapping({"path": store}))
    rows = [row for each in work.plan() for batch in work.run(each) for row in batch.to_pylist()]
    written = pq.read_table(out).to_pylist()
    assert sorted(written, key=lambda row: row["physical_offset"]) == rows and len(rows) == 60
