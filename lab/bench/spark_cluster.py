"""One read on several Sparks, each started by `spark-submit`, for `lab.bench.spark_read`.

Each run prints the number of rows, a digest of all columns in any order, and its seconds (the
median of several), on the clock and of processors: of all processes of that Spark.
"""

from dataclasses import dataclass
from pathlib import Path

from lab.cluster.spark_submit import build_package, submit

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


def compare(folder: Path, store: Path, size_bytes: int, repeats: int) -> bool:
    """Runs all, prints a line for each; whether all found the same."""
    package = build_package(folder)
    executors = {"local[1]": 0, "local[2]": 0, "local-cluster[1,1,1024]": 1,
                 "local-cluster[2,1,1024]": 2}  # fmt: skip
    runs = [
        _printed(run_job(folder / f"job-{n}", package, store, master, count, repeats), size_bytes)
        for n, (master, count) in enumerate(executors.items())
    ]
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


def _printed(run: SparkRun, size_bytes: int) -> SparkRun:
    print(
        f"{run.master:24} {run.rows} rows, digest {run.digest[2] & (1 << 64) - 1:016x}, "
        f"in {run.digest_s[0]:.1f} s ({run.digest_s[1]:.1f} s of processors); into Parquet "
        f"{run.parquet_s[0]:.1f} s ({run.parquet_s[1]:.1f} s), "
        f"{size_bytes / 1e6 / run.parquet_s[0]:.0f} MB/s",
        flush=True,
    )
    return run
