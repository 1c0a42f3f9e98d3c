"""kill -9 of the master, again and again: how long until a write is acknowledged, and what is lost.

A trial begins with a full, level set under steady writes. The clock runs from the signal to the
first acknowledgement, by another broker, of a write sent after it. At the end of all trials every
acknowledged key is read back.
"""

import time

from lab.bench.report import Mark, ReportRow
from lab.bench.run import BenchPart, BenchRun, progress
from lab.bench.side import ClusterSide, SideError
from lab.cluster.load import Load
from lab.cluster.processes import wait_for
from lab.cluster.readback import lost_at


def rows() -> list[ReportRow]:
    return [
        ReportRow(
            "failover", "kill -9 of the master to the first acked write", "s", "less",
            Mark(limit=0.06, limit_of_max=0.15),
        ),
        ReportRow("lost", "  acked messages lost in all trials", "messages", "less", Mark(limit=0)),
        ReportRow("set_full", "  killed broker started again to a full set", "s", "less"),
    ]  # fmt: skip


def measure(run: BenchRun, table: dict[str, ReportRow]) -> None:
    for name in run.sides:
        trials = run.count(20, 3) if name == "ours" else run.count(max(5, run.rounds), 2)
        with run.side(name) as side:
            progress(f"failover: {name}, {trials} trials")
            side.wait_whole()
            _trials(run, side, trials, table)


def _trials(run: BenchRun, side: ClusterSide, trials: int, table: dict[str, ReportRow]) -> None:
    with Load(side.broker_addresses, prefix="fail", log=side.folder / "probe.log") as load:
        load.wait_ack(sent_after=time.monotonic())
        for number in range(trials):
            took, full = _trial(run, side, load)
            table["failover"].samples(side.name).append(took)
            table["set_full"].samples(side.name).append(full)
            progress(f"  {number + 1}: {took * 1000:.0f} ms, full set again after {full:.1f} s")
    lost = lost_at(side.master_address(), load)
    table["lost"].samples(side.name).append(len(lost))
    run.note(
        "failover",
        side.name,
        {
            "seconds": table["failover"].samples(side.name),
            "acked": len(load.acks),
            "lost": lost,
            "codes": load.codes,
        },
    )
    progress(f"  {len(load.acks)} acked, {len(lost)} lost")


def _trial(run: BenchRun, side: ClusterSide, load: Load) -> tuple[float, float]:
    master = side.master_address()
    began = time.monotonic()
    time.sleep(run.seconds(1.0, 0.3))
    if not load.since(began):
        raise SideError(f"{side.name}: no write was acknowledged before the kill")
    took_s = load.failover_s(
        lambda: side.kill_broker(master), broker=side.broker_addresses.index(master)
    )
    time.sleep(run.seconds(1.0, 0.3))
    started = time.monotonic()
    side.start_broker(master)
    wait_for("a full and level set", side.level, 120.0)
    full = time.monotonic() - started
    time.sleep(run.seconds(2.0, 0.5))  # the next trial begins with a set that was full for a while
    return took_s, full


PART = BenchPart("failover", "kill -9 of the master", rows, measure)
