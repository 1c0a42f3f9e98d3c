"""`python -m lab.bench.spark_read`: how fast the commit log becomes Arrow batches and Parquet
files.

Writes a log of 1 KiB messages (`--gib`), then measures, each several times, in MB of log per s:

- a plain loop that decodes one record after another (over the first `--plain-mib`), one core
- decoding to Arrow batches, one core, CRCs checked, all columns
- Spark on `--master`: `binaryFile` over the same bytes (cut into files of 128 MiB: Spark holds a
  file in one piece), with their contents and as the bare count, which opens no file
- Spark: the table into Parquet, all columns; and only counted

Beside wall time stands processor time of all processes, since the machine may be shared.
`--cluster` compares the same read, with a digest of all columns, on `local[1]`, `local[2]` and
local-cluster with one and two workers, which get this package as the wheel. Files go to `--folder`,
and are removed.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batonmq.protocol.layout import CHECKPOINT, CHECKPOINT_SIZE
from batonmq.protocol.message_id import host_bytes
from batonmq.protocol.records.codec import NewMessage, decode_record, encode_blank, encode_record
from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.reading import Read
from lab.bench.cpu import cpu_of_tree
from lab.bench.run import folder_there

FILE_BYTES = 1 << 30
PART_BYTES = 128 << 20
BODY_BYTES = 1024
MB = 1_000_000


@dataclass
class ReadCost:
    """Wall and processor seconds of one run over so many bytes."""

    wall_s: float
    cpu_s: float


def make_log(root: Path, size_bytes: int) -> int:
    """Write a store of `size_bytes` of log; the number of messages."""
    (root / "commitlog").mkdir(parents=True)
    pool = np.random.default_rng(1).bytes(1 << 20)
    host = host_bytes("127.0.0.1", 10911)
    count = end = 0
    for start in range(0, size_bytes, FILE_BYTES):
        size = min(FILE_BYTES, size_bytes - start)
        with open(root / "commitlog" / f"{start:020d}", "wb") as file:
            end = start
            while True:
                at = (count * 37) % (len(pool) - BODY_BYTES)
                properties = b"TAGS\x01TagA\x02KEYS\x01k%d\x02UNIQ_KEY\x01%032X\x02WAIT\x01true\x02"
                message = NewMessage(
                    topic="BenchTopic",
                    queue_id=count % 8,
                    body=pool[at : at + BODY_BYTES],
                    properties=properties % (count, count),
                    tags_code=0,
                    keys=None,
                    uniq_key=None,
                    born_timestamp=1_700_000_000_000 + count,
                    born_host=host,
                )
                stored_at = 1_700_000_000_001 + count
                record = encode_record(
                    message, b"BenchTopic", count // 8, end, stored_at, host, append_prop_crc=True
                )
                if end + len(record) + 8 > start + size:
                    file.write(encode_blank(start + size - end))
                    file.truncate(size)
                    break
                file.write(record)
                end += len(record)
                count += 1
    checkpoint = CHECKPOINT.struct.pack(0, 0, 0, end, end).ljust(CHECKPOINT_SIZE, b"\0")
    (root / "checkpoint").write_bytes(checkpoint)
    (root / "brokerIdentity").write_text("Bench#broker-a#1")
    return count


def plain_loop(root: Path, size_bytes: int) -> int:
    """Bytes decoded by a loop of the broker's decoder, one record after another."""
    with (root / "commitlog" / f"{0:020d}").open("rb") as file:
        data = file.read(size_bytes)
    at = 0
    while at + 2048 < len(data):
        at += decode_record(data, at, check_crc=True).store_size
    return at


def to_arrow(root: Path) -> int:
    """Rows of all batches, decoded in this process."""
    read = Read(ReadOptions.from_mapping({"path": str(root)}))
    return sum(batch.num_rows for work in read.plan() for batch in read.run(work))


def measure(
    name: str,
    size_bytes: int,
    runs: int,
    work: Callable[[], object],
    prepare: Callable[[], object] = lambda: None,
) -> ReadCost:
    """Median costs of some runs, printed. `prepare` comes before each and does not count; nor does
    the disk's writing of what was left by then."""
    costs = []
    for _ in range(runs):
        prepare()
        os.sync()
        cpu, wall = cpu_of_tree(), time.perf_counter()
        work()
        costs.append(ReadCost(time.perf_counter() - wall, cpu_of_tree() - cpu))
    median = ReadCost(
        statistics.median(cost.wall_s for cost in costs),
        statistics.median(cost.cpu_s for cost in costs),
    )
    spread = f"{min(c.wall_s for c in costs):.1f} to {max(c.wall_s for c in costs):.1f} s"
    print(
        f"{name:42} {size_bytes / MB / median.wall_s:7.0f} MB/s   "
        f"{size_bytes / MB / median.cpu_s:7.0f} MB per cpu s   ({runs} runs, {spread})",
        flush=True,
    )
    return median


def cut(root: Path, folder: Path) -> Path:
    """The log's bytes in files of PART_BYTES, for `binaryFile`."""
    folder.mkdir()
    for file in sorted((root / "commitlog").iterdir()):
        with file.open("rb") as source:
            for number in range(-(-file.stat().st_size // PART_BYTES)):
                (folder / f"{file.name}-{number}").write_bytes(source.read(PART_BYTES))
    return folder


class SparkRuns:
    """The reads of one log on one Spark, each measured and printed."""

    def __init__(
        self, root: Path, size_bytes: int, folder: Path, asked: argparse.Namespace
    ) -> None:
        self._root = str(root)
        self._size_bytes = size_bytes
        self._runs = asked.runs
        self._out = str(folder / "parquet")
        self._parts = str(cut(root, folder / "parts"))
        self._session = _session(asked.master)
        self._written: list[int] = []

    def run(self) -> None:
        scan = self._scan()
        frame = self._session.read.format("batonmq").load(self._root)
        one_column = self._session.read.format("batonmq").option("columns", "queue_id")
        small = one_column.load(self._root)
        small.count()  # starts Spark's Python processes
        self._measure("batonmq, count() of one column", small.count)
        self._measure("batonmq, count() of all columns", frame.count)
        self._into_parquet(scan, "by Spark", lambda: frame.write.parquet(self._out))
        self._into_parquet(scan, "by tasks", self._write_by_tasks)
        print(f"messages in the files: {self._written}")
        self._session.stop()
        shutil.rmtree(self._out)
        shutil.rmtree(self._parts)

    def _scan(self) -> ReadCost:
        """Spark's own scan of the bytes. A new frame each time: one that was collected keeps its
        result."""
        from pyspark.sql import functions as F

        binary = self._session.read.format("binaryFile").load(self._parts)
        length = F.sum(F.length("content"))
        binary.agg(length).collect()  # starts Spark
        scan = self._measure("binaryFile, contents", lambda: binary.agg(length).collect())
        self._measure("binaryFile, count() alone", binary.count)
        return scan

    def _write_by_tasks(self) -> None:
        from batonmq.spark.parquet_files import write_parquet

        write_parquet(self._session, {"path": self._root}, self._out)

    def _into_parquet(self, scan: ReadCost, how: str, work: Callable[[], object]) -> None:
        cost = self._measure(f"batonmq into Parquet, {how}", work)
        self._written.append(self._session.read.parquet(self._out).count())
        print(
            f"into Parquet {how}: {scan.wall_s / cost.wall_s:.2f}x the speed of the scan, "
            f"{scan.cpu_s / cost.cpu_s:.2f}x by processor time"
        )

    def _measure(self, name: str, work: Callable[[], object]) -> ReadCost:
        def remove_out() -> None:
            shutil.rmtree(self._out, ignore_errors=True)

        return measure(name, self._size_bytes, self._runs, work, remove_out)


def _session(master: str) -> Any:
    from batonmq.spark.session import open_session

    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "2g",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.showConsoleProgress": "false",
    }
    return open_session("bench", master=master, settings=settings)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="lab.bench.spark_read", description="Reading stores on Spark."
    )
    parser.add_argument("--gib", type=float, default=1, help="size of the log")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--plain-mib", type=int, default=64)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--cluster", action="store_true", help="also several processes, the wheel")
    parser.add_argument("--folder", type=folder_there, help="for the files; default: temporary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="batonmq-spark-") as name:
        folder, size_bytes = Path(name), int(args.gib * (1 << 30))
        root = folder / "store"
        print(f"{make_log(root, size_bytes)} messages of {BODY_BYTES} bytes, {size_bytes} in all")
        plain_bytes = min(args.plain_mib << 20, size_bytes)
        measure(
            "plain loop, one core", plain_bytes, args.runs, lambda: plain_loop(root, plain_bytes)
        )
        measure("to Arrow, one core", size_bytes, args.runs, lambda: to_arrow(root))
        SparkRuns(root, size_bytes, folder, args).run()
        if args.cluster:
            from lab.bench.spark_cluster import compare

            if not compare(folder, root, size_bytes, args.runs):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
