"""A Spark of several processes: its executors get the package as the wheel, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest

from spark.options import ReadOptions
from spark.reading import Read
from spark.selection import Selection

ROOT = Path(__file__).parents[2]
JOB = """
import json, os, sys
from spark.session import open_session

def place(_):
    import spark.reading
    return os.getppid(), spark.reading.__file__

session = open_session("job")
session.read.format("batonmq").load(sys.argv[1]).write.parquet(sys.argv[2])
places = set(session.sparkContext.range(16, numSlices=16).map(place).collect())
print("RESULT " + json.dumps([session.sparkContext.master, sorted(places)]))
"""


@pytest.fixture
def package(tmp_path):
    """The wheel under the name that Spark takes."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    return wheel.rename(wheel.with_name("batonmq.zip"))


def test_two_workers_with_the_wheel_read_what_this_process_reads(tmp_path, package, log_files):
    for number in range(60):
        log_files.add(number=number, body=b"b" * 1000, properties=b"TAGS\x01t\x02KEYS\x01k\x02")
    store, out = log_files.save(), tmp_path / "out"
    (tmp_path / "job.py").write_text(JOB)
    argv = [
        str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
        *("--master", "local-cluster[2,1,512]", "--py-files", str(package)),
        *("--driver-memory", "512m", "--conf", "spark.executor.memory=512m"),
        *("--conf", "spark.ui.enabled=false", str(tmp_path / "job.py"), store, str(out)),
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PY")}
    env |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    result = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert result, done.stderr[-5000:]
    master, places = json.loads(result[0].removeprefix("RESULT "))
    assert master.startswith("local-cluster")
    assert len({daemon for daemon, _ in places}) == 2
    assert all(f"{package.name}/spark/reading.py" in file for _, file in places)
    work = Read(ReadOptions.from_mapping({"path": store}), Selection())
    rows = [row for each in work.plan() for batch in work.run(each) for row in batch.to_pylist()]
    written = pq.read_table(out).to_pylist()
    assert sorted(written, key=lambda row: row["physical_offset"]) == rows and len(rows) == 60
