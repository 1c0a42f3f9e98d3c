"""A classic pair beside Java's, SYNC_MASTER and one slave: `python -m lab.bench.classic`.

Both wait for their slave (`inSyncReplicas=2`) and have the same files, but for Java's own defaults.
Measured in turn: sends of 1 KiB by the stock producer, and the catch-up of a slave whose store was
emptied, from its first byte to level. The name server is ours on both sides.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lab.bench.part_catchup import TOPIC as FILLED
from lab.bench.part_catchup import fill, watch
from lab.bench.run import progress
from lab.bench.side import create_topic
from lab.cluster.classic import ClassicGroup, in_sync
from lab.cluster.java import BENCH_HEAP, JavaProgram, prepared_classpath
from lab.cluster.processes import free_base_port, wait_for

KINDS: Final = ("java", "ours")
JVM: Final = ("-Xms512m", "-Xmx512m")
TOPIC: Final = "ClassicSends"
QUEUES: Final = 8
THREADS: Final = (1, 16, 64)
SEGMENT: Final = 1 << 30
START_S: Final = 120.0
ANSWER_EXTRA_S: Final = 30.0
Samples = dict[str, dict[str, list[float]]]


class Pair:
    """The master and the slave of one kind."""

    def __init__(self, kind: str, group: ClassicGroup) -> None:
        self._start = group.start_java if kind == "java" else group.start_ours
        self._group = group
        self.master = group.address(0)

    def begin(self) -> None:
        self._start("master", self._settings(0, "SYNC_MASTER"))
        self.start_slave()

    def start_slave(self) -> None:
        self._start("slave", self._settings(1, "SLAVE"))

    def wait_level(self) -> None:
        wait_for("a slave", lambda: in_sync(self.master) == 1, START_S)

    def empty_slave(self) -> None:
        self._group.kill("slave")
        shutil.rmtree(self._store(1))

    def _settings(self, broker_id: int, role: str) -> Mapping[str, object]:
        return self._group.settings(broker_id, role, self._store(broker_id))

    def _store(self, broker_id: int) -> Path:
        return self._group.folder / f"store-{broker_id}"


def measure(kind: str, options: argparse.Namespace, classpath: str, found: Samples) -> None:
    with tempfile.TemporaryDirectory(prefix="baton-classic-") as name:
        folder = Path(name)
        with ClassicGroup(folder, free_base_port(2), segment=SEGMENT, heap=BENCH_HEAP) as group:
            pair = Pair(kind, group)
            pair.begin()
            pair.wait_level()
            for topic in (TOPIC, FILLED):
                create_topic(pair.master, [group.name_server], topic, QUEUES)
            _sends(kind, options, group, classpath, found)
            progress(f"{kind}: filling {options.megabytes} MB")
            fill(pair.master, options.megabytes * 1_000_000)
            pair.empty_slave()
            pair.start_slave()
            first, level, size = watch(pair.master)
            rate = size / 1e6 / (level - first)
            found["catch-up, MB/s"][kind].append(rate)
            progress(f"{kind}: catch-up {rate:,.0f} MB/s of {size / 1e6:,.0f} MB")


def _sends(
    kind: str,
    options: argparse.Namespace,
    group: ClassicGroup,
    classpath: str,
    found: Samples,
) -> None:
    folder = group.folder / "program"
    with JavaProgram(classpath, folder, "SendLoad", group.name_server, jvm=JVM) as client:
        client.wait_for("its start", lambda: client.lines)
        for warming in (True, False):
            for threads in reversed(THREADS):
                seconds = options.seconds * (2 if warming else 1)
                question = f"run {TOPIC} {threads} {seconds * 1000:.0f}"
                answer = client.ask(question, seconds + ANSWER_EXTRA_S)
                if not warming:
                    what = f"sends/s, {threads} thread{'s' if threads > 1 else ''}"
                    found[what][kind].append(answer["perSecond"])
                    progress(f"{kind}: {threads} threads {answer['perSecond']:,.0f}/s")


def rows(found: Samples) -> list[str]:
    """Medians, and ours by Java's."""
    lines = ["| | Java 5.3.3 | BatonMQ | ratio |", "| --- | --- | --- | --- |"]
    for what, samples in found.items():
        medians = {kind: statistics.median(samples[kind]) for kind in KINDS if samples[kind]}
        cells = [f"{medians[kind]:,.0f}" if kind in medians else "-" for kind in KINDS]
        ratio = f"{medians['ours'] / medians['java']:.2f}x" if len(medians) == 2 else "-"
        lines.append(f"| {what} | {' | '.join(cells)} | {ratio} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="lab.bench.classic")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window of sends")
    parser.add_argument("--megabytes", type=int, default=700)
    options = parser.parse_args()
    classpath = prepared_classpath(Path(__file__).parent / "java")
    found: Samples = defaultdict(lambda: defaultdict(list))
    for _ in range(options.rounds):
        for kind in KINDS:
            measure(kind, options, classpath, found)
    print("\n".join(rows(found)))


if __name__ == "__main__":
    main()
