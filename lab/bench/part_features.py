"""What else stock Java clients do, and what it costs a master: delays, timers, transactions,
send-backs, orderly and filtered consumption, POP; and 20,000 pulls that a broker holds.

One warm JVM serves all windows of a side. The cost of a delayed message holds its delivery, too.
"""

import time
from contextlib import ExitStack

import psutil

from lab.bench.cpu import CpuMeter, anon_mib
from lab.bench.report import ReportRow
from lab.bench.run import BenchPart, BenchRun, progress
from lab.bench.side import ClusterSide, SideError
from lab.cluster import frames
from lab.cluster.connection import BlockingConnection, ask
from lab.cluster.java import JavaError, JavaProgram

TOPICS = {
    "transactions": "BenchTransactions",
    "backs": "BenchBacks",
    "orderly": "BenchBacks",
    "pop": "BenchBacks",
    "sql": "BenchSql",
}
DELAYED = ("delays", "timers")
BACKLOG = {"backs": 20_000, "orderly": 150_000, "pop": 20_000, "sql": 150_000}
"""How many messages a window consumes: at the rates of the last machines half a second or more."""
BACKLOG_QUICK = 3_000
HELD_TOPIC = "BenchHeld"
HELD = 20_000
HELD_CONNECTIONS = 100
HELD_S = 30.0
HELD_FLAGS = 6
"""A subscription in the request, and hold it."""
THREADS = 16
LIMIT_S = 240.0
CALM_PERCENT = 15.0
CALM_SAMPLE_S = 0.5
CALM_LIMIT_S = 20.0
WHAT = {
    "delays": "delayed sends (level 1, 1 s), 16 threads",
    "timers": "timers (1 to 2 s), 16 threads",
    "transactions": "transactions (half and commit), 16 threads",
    "backs": "send-backs of a push consumer",
    "orderly": "orderly consumption of a backlog",
    "pop": "POP and ack of a backlog",
    "sql": "consumption by SQL92, half of a backlog",
}


def rows() -> list[ReportRow]:
    found = []
    for kind, what in WHAT.items():
        found.append(ReportRow(kind, what, "per s", "more"))
        found.append(ReportRow(f"{kind}_master", "  master", "us each", "less"))
        if kind in DELAYED:
            found.append(ReportRow(f"{kind}_50", "  beyond the time, p50", "ms", "less"))
            found.append(ReportRow(f"{kind}_99", "  beyond the time, p99", "ms", "less"))
    found.append(
        ReportRow("held_memory", "20,000 held pulls: anonymous memory of the master", "MiB", "less")
    )
    found.append(ReportRow("held_wake", "  woken by a message, all answered", "ms", "less"))
    return found


def measure(run: BenchRun, table: dict[str, ReportRow]) -> None:
    backlog = {kind: run.count(count, BACKLOG_QUICK) for kind, count in BACKLOG.items()}
    fills = {TOPICS["backs"]: backlog["orderly"], TOPICS["sql"]: 2 * backlog["sql"]}
    for name in run.sides:
        with run.side(name) as side:
            side.wait_whole()
            for topic in {*TOPICS.values(), HELD_TOPIC}:
                side.create_topic(topic)
            servers = side.name_servers
            with run.program("FeatureLoad", [servers]) as client:
                for topic, count in fills.items():
                    client.ask(f"fill {topic} {THREADS} {count}", LIMIT_S)
                side.wait_level()
                progress(f"features: {name}, warming up")
                for kind in WHAT:
                    _window(run, side, client, kind, backlog)
                for _ in range(run.rounds):
                    for kind in WHAT:
                        _measure(run, side, client, kind, backlog, table)
                    _measure_held(run, side, table)


def _window(
    run: BenchRun, side: ClusterSide, client: JavaProgram, kind: str, backlog: dict[str, int]
) -> dict[str, float]:
    """What the program answers. Raises JavaError for a backlog that did not come in time."""
    if kind in DELAYED:
        # A new group reads from the first message on: it must not find older ones.
        topic = f"BenchDelays{time.monotonic_ns()}"
        side.create_topic(topic)
    else:
        topic = TOPICS[kind]
    command = f"{kind} {topic}"
    if kind in backlog:
        count = backlog[kind]
        group = f"bench_{kind}_{time.monotonic_ns()}"
        answer = client.ask(f"{command} {group} {count} {side.master_address()}", LIMIT_S)
        if not answer["finished"]:
            raise JavaError(f"{side.name}: only {answer['count']} of {count} messages came")
        return answer
    millis = run.seconds(10, 3) * 1000
    return client.ask(f"{command} {THREADS} {millis:.0f}", LIMIT_S)


def _wait_calm(side: ClusterSide) -> None:
    """Waits until the master is idle: what one window left to do (acks of POP, code to compile)
    must not count for the next one."""
    master = psutil.Process(side.broker_pid(side.master_address()))
    end = time.monotonic() + CALM_LIMIT_S
    while master.cpu_percent(CALM_SAMPLE_S) > CALM_PERCENT and time.monotonic() < end:
        pass


def _measure(
    run: BenchRun,
    side: ClusterSide,
    client: JavaProgram,
    kind: str,
    backlog: dict[str, int],
    table: dict[str, ReportRow],
) -> None:
    _wait_calm(side)
    meter = CpuMeter({"master": [side.broker_pid(side.master_address())]})
    answer = _window(run, side, client, kind, backlog)
    used = meter.stop()
    each = used.micros_per(int(answer.get("acked", answer.get("count", 0))))["master"]
    table[kind].samples(side.name).append(answer["perSecond"])
    table[f"{kind}_master"].samples(side.name).append(each)
    if kind in DELAYED:
        table[f"{kind}_50"].samples(side.name).append(answer["lateMs50"])
        table[f"{kind}_99"].samples(side.name).append(answer["lateMs99"])
    run.note("features", side.name, {kind: answer, "microsEach": each}, used.others_percent)
    progress(f"  {kind}: {answer}, master {each:.0f} us, noise {used.others_percent:.0f} %")


def _measure_held(run: BenchRun, side: ClusterSide, table: dict[str, ReportRow]) -> None:
    """Pulls at the end of one queue, over many connections; one message answers them all."""
    held, master = run.count(HELD, 2_000), side.master_address()
    pid = side.broker_pid(master)
    end = int(ask(master, frames.MAX_OFFSET, {"topic": HELD_TOPIC, "queueId": 0}).ext["offset"])
    hold = {"sysFlag": HELD_FLAGS, "suspendTimeoutMillis": int(HELD_S * 1000)}
    fields = {**frames.pull_ext(HELD_TOPIC, 0, end, 1), **hold}
    before = anon_mib([pid])
    queue = {"topic": HELD_TOPIC, "queueId": 0}
    early = 0
    with ExitStack() as stack:
        connections = [
            stack.enter_context(BlockingConnection(master, timeout_s=HELD_S))
            for _ in range(HELD_CONNECTIONS)
        ]
        for number in range(held):
            connections[number % HELD_CONNECTIONS].post(frames.PULL, fields)
        for connection in connections:
            # Its answer says that the pulls in front of it were read.
            behind = connection.post(frames.MAX_OFFSET, queue)
            while connection.take().opaque != behind:
                early += 1
        if early:
            raise SideError(f"{side.name}: {early} of {held} pulls were not held")
        memory = anon_mib([pid])
        with BlockingConnection(master) as sender:
            began = time.monotonic()
            sender.send(HELD_TOPIC, b"x" * 100)
        for number in range(held):
            reply = connections[number % HELD_CONNECTIONS].take()
            if reply.code != frames.OK:
                raise SideError(f"{side.name}: a held pull was answered {reply.code}")
        wake_ms = (time.monotonic() - began) * 1000
    table["held_memory"].samples(side.name).append(memory)
    table["held_wake"].samples(side.name).append(wake_ms)
    run.note("held", side.name, {"pulls": held, "mib": memory, "wakeMs": wake_ms}, 0.0)
    grown = memory - before
    progress(f"  held: {held}, {memory:.0f} MiB, {grown:.1f} more, woken in {wake_ms:.0f} ms")


PART = BenchPart(
    "features",
    "delays, timers, transactions, send-backs, order, filters, POP, held pulls",
    rows,
    measure,
    needs_programs=True,
)
