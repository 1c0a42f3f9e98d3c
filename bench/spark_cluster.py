"""One read on several Sparks, each started by `spark-submit` with the wheel as `--py-files`.

For `bench.spark_read`: the processes share nothing with this checkout but the log's files. Each
run says how many rows there were, a digest of all columns in whatever order, and its seconds (the
median of several).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark

ROOT = Path(__file__).parents[1]
SPARK_HOME = Path(pyspark.__file__).parent
JOB = """
import json, os, shutil, statistics, sys, time
from pyspark.sql import functions as F
from spark.parquet_files import write_parquet
from spark.session import open_session

session = open_session("bench")
path, out, executors, runs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def digest():
    frame = session.read.format("batonmq").load(path)
    columns = [F.map_entries("properties") if n == "properties" else n for n in frame.columns]
    return tuple(frame.agg(F.count("*"), F.sum("size"), F.bit_xor(F.xxhash64(*columns))).first())

def parquet():
    return sum(file.rows for file in write_parquet(session, {"path": path}, out))

def seconds(work):
    told = []
    for _ in range(runs):
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        began = time.perf_counter()
        found = work()
        told.append(time.perf_counter() - began)
    return found, statistics.median(told)

deadline = time.monotonic() + 120
while session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < executors + 1:
    if time.monotonic() > deadline:
        sys.exit(f"no {executors} executors in two minutes")
    time.sleep(0.2)
digest()  # wakes the executors
result = {}
result["digest"], result["digest_s"] = seconds(digest)
result["rows"], result["parquet_s"] = seconds(parquet)
shutil.rmtree(out)
print("RESULT " + json.dumps(result), flush=True)
session.stop()
"""


@dataclass(frozen=True)
class Run:
    """What one Spark made of the log; seconds of wall time, executors awake."""

    master: str
    digest: tuple[int, int, int]
    rows: int
    digest_s: float
    parquet_s: float


def build_package(folder: Path) -> Path:
    """The wheel, built by pip's backend, under the name that `--py-files` takes."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel.rename(wheel.with_name("batonmq.zip"))


def submit(folder: Path, package: Path, store: Path, master: str, executors: int, runs: int) -> Run:
    """Run the job from a folder of its own, as soon as there are so many executors; 0 if the driver
    is the only one. Raises RuntimeError with what Spark said."""
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    argv = [
        str(SPARK_HOME / "bin" / "spark-submit"),
        *("--master", master, "--py-files", str(package), "--driver-memory", "1g"),
        *("--conf", "spark.executor.memory=1g", "--conf", "spark.executor.cores=1"),
        *("--conf", "spark.ui.enabled=false", "--conf", "spark.sql.shuffle.partitions=2"),
        *(str(folder / "job.py"), str(store), str(folder / "out"), str(executors), str(runs)),
    ]
    done = subprocess.run(
        argv, cwd=folder, env=_environment(), capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{master}: {done.stderr[-3000:]}")
    result = json.loads(lines[0].removeprefix("RESULT "))
    return Run(
        master,
        tuple(result["digest"]),
        result["rows"],
        result["digest_s"],
        result["parquet_s"],
    )


@contextmanager
def standalone(folder: Path, workers: int) -> Iterator[str]:
    """A master and workers of one core each on loopback; the master's address."""
    folder.mkdir()
    port = _free_port()
    address = f"spark://127.0.0.1:{port}"
    deploy, common = "org.apache.spark.deploy", ("--host", "127.0.0.1", "--webui-port", "0")
    commands: list[tuple[str, ...]] = [(f"{deploy}.master.Master", *common, "--port", str(port))]
    for number in range(workers):
        room = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / f"work-{number}"))
        commands.append((f"{deploy}.worker.Worker", *common, *room, address))
    log = folder / "log"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("ab") as sink:
            for command in commands:
                argv = [str(SPARK_HOME / "bin" / "spark-class"), *command]
                processes.append(
                    subprocess.Popen(argv, cwd=folder, env=_environment(), stdout=sink, stderr=sink)
                )
        deadline = time.monotonic() + 120
        while log.read_text().count("Successfully registered with master") < workers:
            if time.monotonic() > deadline or any(p.poll() is not None for p in processes):
                raise RuntimeError(f"no standalone Spark: {log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield address
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def compare(
    folder: Path, store: Path, size_bytes: int, repeats: int, *, with_standalone: bool
) -> bool:
    """Run all, print a line for each, and tell whether all found the same."""
    package = build_package(folder)
    masters = ["local[1]", "local-cluster[1,1,1024]", "local-cluster[2,1,1024]"]
    runs = [_told(submit(folder / f"job-{n}", package, store, m, n, repeats), size_bytes)
            for n, m in enumerate(masters)]  # fmt: skip
    if with_standalone:
        for workers in (1, 2):
            with standalone(folder / f"standalone-{workers}", workers) as address:
                job = folder / f"job-standalone-{workers}"
                run = submit(job, package, store, address, workers, repeats)
                runs.append(_told(run, size_bytes, f"standalone, {workers} workers"))
    one, two = runs[1], runs[2]
    print(
        f"two workers instead of one: {one.parquet_s / two.parquet_s:.2f}x into Parquet, "
        f"{one.digest_s / two.digest_s:.2f}x for the digest"
    )
    same = len({(run.digest, run.rows) for run in runs}) == 1
    print("all found the same" if same else "THEY DIFFER")
    return same


def _told(run: Run, size_bytes: int, name: str = "") -> Run:
    print(
        f"{name or run.master:28} {run.rows} rows, digest {run.digest[2] & (1 << 64) - 1:016x}, "
        f"in {run.digest_s:.1f} s; into Parquet {run.parquet_s:.1f} s, "
        f"{size_bytes / 1e6 / run.parquet_s:.0f} MB/s",
        flush=True,
    )
    return run


def _environment() -> dict[str, str]:
    """This one without what would lead Python to the checkout."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PY")}
    return {**kept, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
