"""Sends per second of a stock Java producer, and what they cost each process.

The producer program warms up for a minute on each side. Sides alternate in sessions; one session
holds several rounds, so that the minute is not spent for each of them.
"""

from lab.bench.cpu import CpuMeter
from lab.bench.report import Mark, ReportRow
from lab.bench.run import BenchPart, BenchRun, progress
from lab.bench.side import ClusterSide
from lab.cluster.java import JavaProgram

TOPIC = "BenchSends"
THREADS = (1, 16, 64)
SESSIONS = 2
ANSWER_EXTRA_S = 30.0


def rows() -> list[ReportRow]:
    found = []
    for threads in THREADS:
        what = "1 thread" if threads == 1 else f"{threads} threads"
        key = f"sends_{threads}"
        found.append(ReportRow(key, f"sends of 1 KiB, {what}", "per s", "more", Mark(times=1.2)))
        mark = Mark(limit=50) if threads == 64 else None
        found.append(ReportRow(f"{key}_brokers", "  both brokers", "us per send", "less", mark))
        found.append(ReportRow(f"{key}_master", "    master", "us per send", "less"))
        found.append(ReportRow(f"{key}_slave", "    slave", "us per send", "less"))
        found.append(ReportRow(f"{key}_name_servers", "  name servers", "us per send", "less"))
        found.append(ReportRow(f"{key}_client", "  the Java client", "us per send", "less"))
        found.append(ReportRow(f"{key}_mean", "  mean time of a send", "ms", "less"))
    return found


def measure(run: BenchRun, table: dict[str, ReportRow]) -> None:
    sessions = min(SESSIONS, run.rounds)
    for session in range(sessions):
        rounds = len(range(session, run.rounds, sessions))
        for name in run.sides:
            progress(f"sends: session {session + 1} of {sessions}, {name}, {rounds} rounds")
            with run.side(name) as side:
                side.wait_whole()
                side.create_topic(TOPIC)
                with run.program("SendLoad", [side.name_servers]) as client:
                    _warm_up(run, client)
                    for _ in range(rounds):
                        for threads in THREADS:
                            _window(run, side, client, threads, table)


def _warm_up(run: BenchRun, client: JavaProgram) -> None:
    progress("  warming up")
    for threads, full, quick in ((64, 30, 4), (16, 20, 2), (1, 10, 2)):
        seconds = run.seconds(full, quick)
        client.ask(f"run {TOPIC} {threads} {seconds * 1000:.0f}", seconds + ANSWER_EXTRA_S)


def _window(
    run: BenchRun, side: ClusterSide, client: JavaProgram, threads: int, table: dict[str, ReportRow]
) -> None:
    seconds = run.seconds(10, 3)
    master = side.master_address()
    slaves = [side.broker_pid(address) for address in side.broker_addresses if address != master]
    meter = CpuMeter(
        {
            "master": [side.broker_pid(master)],
            "slave": slaves,
            "name_servers": side.name_server_pids(),
            "client": [client.pid],
        }
    )
    answer = client.ask(f"run {TOPIC} {threads} {seconds * 1000:.0f}", seconds + ANSWER_EXTRA_S)
    used = meter.stop()
    use = used.micros_per(answer["acked"])
    use["brokers"] = use["master"] + use["slave"]
    key = f"sends_{threads}"
    table[key].samples(side.name).append(answer["perSecond"])
    table[f"{key}_mean"].samples(side.name).append(answer["meanMs"])
    for who, micros in use.items():
        table[f"{key}_{who}"].samples(side.name).append(micros)
    seen = {"window": answer, "microsPerSend": use}
    run.note("sends", side.name, seen, used.others_percent)
    failed = f", {answer['failed']} FAILED" if answer["failed"] else ""
    progress(
        f"  {threads:2d} threads: {answer['perSecond']:,.0f}/s, {answer['meanMs']:.2f} ms, master"
        f" {use['master']:.0f} + slave {use['slave']:.0f} us, client {use['client']:.0f} us,"
        f" noise {used.others_percent:.0f} %{failed}"
    )


PART = BenchPart("sends", "sends per second and their cost", rows, measure, needs_programs=True)
