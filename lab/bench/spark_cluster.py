"""One read on several Sparks, each started by `spark-submit`, for `lab.bench.spark_read`.

Each run prints the number of rows, a digest of all columns in any order, and its seconds (the
median of several), on the clock and of processors: of all processes of that Spark.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.cluster.processes import free_base_port, spawn, stop_all, tail, wait_for
from lab.cluster.spark_submit import build_package, environment, spark_home, submit

WORKERS_S = 120.0
JOB = """
import json, os, psutil, shutil, statistics, sys, time
from pyspark.sql import functions as F
from batonmq.spark.parquet_files import write_parquet
from batonmq.spark.session import open_session

session = open_session("bench")
path, out, executors, runs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def digest():
    frame = session.read.format("batonmq").load(path)
    columns = [F.map_entries("properties") if n == "properties" else n for n in frame.columns]
    return tuple(frame.agg(F.count("*"), F.sum("size"), F.bit_xor(F.xxhash64(*columns))).first())

def parquet():
    return write_parquet(session, {"path": path}, out)

def cpu_s():
    jvm = psutil.Process(os.getppid())  # the driver's
    used = 0
    for process in (jvm, *jvm.children(recursive=True)):
        try:
            used += sum(process.cpu_times()[:4])  # with those of children that have ended
        except psutil.NoSuchProcess:
            pass
    return used

def seconds(work):
    costs = []
    for _ in range(runs):
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        began, used = time.perf_counter(), cpu_s()
        found = work()
        costs.append((time.perf_counter() - began, cpu_s() - used))
    return found, [statistics.median(each) for each in zip(*costs)]

deadline = time.monotonic() + 120
while session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < executors + 1:
    if time.monotonic() > deadline:
        sys.exit(f"no {executors} executors in two minutes")
    time.sleep(0.2)
digest()  # starts the executors' Python
result = {}
result["digest"], result["digest_s"] = seconds(digest)
result["rows"], result["parquet_s"] = seconds(parquet)
shutil.rmtree(out)
print("RESULT " + json.dumps(result), flush=True)
session.stop()
"""


@dataclass(frozen=True)
class SparkRun:
    """What one Spark made of the log; seconds (on the clock, of processors), executors started."""

    master: str
    digest: tuple[int, int, int]
    rows: int
    digest_s: tuple[float, float]
    parquet_s: tuple[float, float]


def run_job(
    folder: Path, package: Path, store: Path, master: str, executors: int, repeats: int
) -> SparkRun:
    """Runs the job in a folder of its own, as soon as there are so many executors; 0 if the driver
    is the only one."""
    arguments = (store, folder / "out", executors, repeats)
    found = submit(folder, JOB, arguments, package=package, master=master, memory="1g")
    digest = tuple(found["digest"])
    costs = tuple(found["digest_s"]), tuple(found["parquet_s"])
    return SparkRun(master, digest, found["rows"], *costs)


@contextmanager
def standalone(folder: Path, workers: int) -> Iterator[str]:
    """A master and workers of one core each on loopback; the master's address."""
    folder.mkdir()
    port = free_base_port(1)
    address = f"spark://127.0.0.1:{port}"
    deploy, common = "org.apache.spark.deploy", ("--host", "127.0.0.1", "--webui-port", "0")
    commands: list[tuple[str, ...]] = [(f"{deploy}.master.Master", *common, "--port", str(port))]
    for number in range(workers):
        room = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / f"work-{number}"))
        commands.append((f"{deploy}.worker.Worker", *common, *room, address))
    log = folder / "log"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            argv = [str(spark_home() / "bin" / "spark-class"), *command]
            processes.append(spawn(argv, log, cwd=folder, env=environment()))
        registered = "Successfully registered with master"
        wait_for(
            "a standalone Spark",
            lambda: (
                all(each.poll() is None for each in processes)
                and log.read_text().count(registered) >= workers
            ),
            WORKERS_S,
            lambda: tail(log, 3000),
        )
        yield address
    finally:
        stop_all(processes)


def compare(
    folder: Path, store: Path, size_bytes: int, repeats: int, *, with_standalone: bool
) -> bool:
    """Runs all, prints a line for each; whether all found the same."""
    package = build_package(folder)
    executors = {"local[1]": 0, "local[2]": 0, "local-cluster[1,1,1024]": 1,
                 "local-cluster[2,1,1024]": 2}  # fmt: skip
    runs = [
        _printed(run_job(folder / f"job-{n}", package, store, master, count, repeats), size_bytes)
        for n, (master, count) in enumerate(executors.items())
    ]
    if with_standalone:
        for workers in (1, 2):
            with standalone(folder / f"standalone-{workers}", workers) as address:
                job = folder / f"job-standalone-{workers}"
                run = run_job(job, package, store, address, workers, repeats)
                runs.append(_printed(run, size_bytes, f"standalone, {workers} workers"))
    for what, fast, slow in (
        ("local[2] against local[1]", runs[1], runs[0]),
        ("two workers against one", runs[3], runs[2]),
        ("local[2] against two workers", runs[1], runs[3]),
    ):
        print(
            f"{what}: {slow.parquet_s[0] / fast.parquet_s[0]:.2f}x into Parquet, "
            f"{slow.digest_s[0] / fast.digest_s[0]:.2f}x for the digest"
        )
    same = len({(run.digest, run.rows) for run in runs}) == 1
    print("all found the same" if same else "THEY DIFFER")
    return same


def _printed(run: SparkRun, size_bytes: int, name: str = "") -> SparkRun:
    print(
        f"{name or run.master:28} {run.rows} rows, digest {run.digest[2] & (1 << 64) - 1:016x}, "
        f"in {run.digest_s[0]:.1f} s ({run.digest_s[1]:.1f} s of processors); into Parquet "
        f"{run.parquet_s[0]:.1f} s ({run.parquet_s[1]:.1f} s), "
        f"{size_bytes / 1e6 / run.parquet_s[0]:.0f} MB/s",
        flush=True,
    )
    return run
