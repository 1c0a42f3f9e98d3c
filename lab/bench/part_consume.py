"""How quickly a stock push consumer reads a backlog: a fresh group each round, from the start."""

import time

from lab.bench.cpu import CpuMeter
from lab.bench.report import Mark, ReportRow
from lab.bench.run import BenchPart, BenchRun, progress
from lab.bench.side import ClusterSide
from lab.cluster.java import JavaError, JavaProgram

TOPIC = "BenchBacklog"
FILL_THREADS = 64
WARM_UP_ROUNDS = 6
LIMIT_S = 120


def rows() -> list[ReportRow]:
    return [
        ReportRow(
            "consume", "push consume of a backlog, 1 KiB", "messages/s", "more", Mark(times=1.0)
        ),
        ReportRow("consume_master", "  master", "us per message", "less"),
        ReportRow("consume_client", "  the Java client", "us per message", "less"),
    ]


def measure(run: BenchRun, table: dict[str, ReportRow]) -> None:
    backlog = run.count(200_000, 20_000)
    for name in run.sides:
        with run.side(name) as side:
            side.wait_whole()
            side.create_topic(TOPIC)
            progress(f"consume: {name}, filling {backlog:,} messages")
            name_servers = side.name_servers
            with run.program("SendLoad", [name_servers]) as producer:
                producer.ask(f"fill {TOPIC} {FILL_THREADS} {backlog}", 600)
            side.wait_level()
            with run.program("ConsumeLoad", [name_servers]) as consumer:
                for number in range(run.count(WARM_UP_ROUNDS, 1)):
                    _consume(side, consumer, f"warm_{number}", backlog)
                for number in range(run.rounds):
                    _round(run, side, consumer, f"round_{number}", backlog, table)


def _round(
    run: BenchRun,
    side: ClusterSide,
    consumer: JavaProgram,
    group: str,
    backlog: int,
    table: dict[str, ReportRow],
) -> None:
    meter = CpuMeter({"master": [side.broker_pid(side.master_address())], "client": [consumer.pid]})
    answer = _consume(side, consumer, group, backlog)
    used = meter.stop()
    use = used.micros_per(backlog)
    table["consume"].samples(side.name).append(answer["perSecond"])
    for who, micros in use.items():
        table[f"consume_{who}"].samples(side.name).append(micros)
    seen = {"round": answer, "microsPerMessage": use}
    run.note("consume", side.name, seen, used.others_percent)
    progress(
        f"  {answer['perSecond']:,.0f} messages/s,"
        f" master {use['master']:.1f} us, client {use['client']:.1f} us a message,"
        f" noise {used.others_percent:.0f} %"
    )


def _consume(
    side: ClusterSide, consumer: JavaProgram, group: str, backlog: int
) -> dict[str, float]:
    group = f"bench_{group}_{time.monotonic_ns()}"
    answer = consumer.ask(f"run {TOPIC} {group} {backlog} {LIMIT_S}", LIMIT_S + 30)
    if not answer["finished"]:
        raise JavaError(
            f"{side.name}: {answer['count']} of {backlog} messages consumed in {LIMIT_S} s"
        )
    return answer


PART = BenchPart("consume", "push consume of a backlog", rows, measure, needs_programs=True)
