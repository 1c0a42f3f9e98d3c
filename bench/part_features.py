"""Delayed messages, transactions and send-backs of stock Java clients, and what they cost a master.

One warm JVM serves all windows of a side. The cost of a delayed message holds its delivery, too.
"""

from __future__ import annotations

import time

from bench.cpu import CpuMeter
from bench.report import Row
from bench.run import Part, Run, progress
from bench.side import Side
from lab.java import JavaError, JavaProgram

TOPICS = {"delays": "BenchDelays", "transactions": "BenchTransactions", "backs": "BenchBacks"}
QUEUES = 8
THREADS = 16
LIMIT_S = 240.0
WHAT = {
    "delays": "delayed sends (level 1, 1 s), 16 threads",
    "transactions": "transactions (half and commit), 16 threads",
    "backs": "send-backs of a push consumer",
}


def rows() -> list[Row]:
    found = []
    for kind, what in WHAT.items():
        found.append(Row(kind, what, "per s", "more"))
        found.append(Row(f"{kind}_master", "  master", "us each", "less"))
        if kind == "delays":
            found.append(Row("late_50", "  beyond the delay, p50", "ms", "less"))
            found.append(Row("late_99", "  beyond the delay, p99", "ms", "less"))
    return found


def measure(run: Run, table: dict[str, Row]) -> None:
    backlog = run.count(20_000, 3_000)
    for name in run.sides:
        with run.side(name) as side:
            side.wait_whole()
            for topic in TOPICS.values():
                side.create_topic(topic, QUEUES)
            servers = ";".join(side.name_servers)
            with run.program("SendLoad", [servers]) as producer:
                producer.ask(f"fill {TOPICS['backs']} {THREADS} {backlog}", LIMIT_S)
            side.wait_level()
            with run.program("FeatureLoad", [servers]) as client:
                progress(f"features: {name}, warming up")
                for kind in TOPICS:
                    _window(run, side, client, kind, backlog)
                for _ in range(run.rounds):
                    for kind in TOPICS:
                        _measure(run, side, client, kind, backlog, table)


def _window(run: Run, side: Side, client: JavaProgram, kind: str, backlog: int) -> dict[str, float]:
    """What the program answers. Raises JavaError for a backlog that did not come in time."""
    command = f"{kind} {TOPICS[kind]}"
    if kind == "backs":
        answer = client.ask(f"{command} bench_{time.monotonic_ns()} {backlog}", LIMIT_S)
        if not answer["finished"]:
            raise JavaError(f"{side.name}: only {answer['count']} of {backlog} messages came")
        return answer
    millis = run.seconds(10, 3) * 1000
    return client.ask(f"{command} {THREADS} {millis:.0f}", LIMIT_S)


def _measure(
    run: Run, side: Side, client: JavaProgram, kind: str, backlog: int, table: dict[str, Row]
) -> None:
    meter = CpuMeter({"master": [side.broker_pid(side.master())]})
    answer = _window(run, side, client, kind, backlog)
    used = meter.stop()
    each = used.micros_per(int(answer.get("acked", backlog)))["master"]
    table[kind].samples(side.name).append(answer["perSecond"])
    table[f"{kind}_master"].samples(side.name).append(each)
    if kind == "delays":
        table["late_50"].samples(side.name).append(answer["lateMs50"])
        table["late_99"].samples(side.name).append(answer["lateMs99"])
    run.note("features", side.name, {kind: answer, "microsEach": each}, used.others_percent)
    progress(f"  {kind}: {answer}, master {each:.0f} us, noise {used.others_percent:.0f} %")


PART = Part("features", "delays, transactions, send-backs", rows, measure, needs_programs=True)
