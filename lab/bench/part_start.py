"""Cold start, memory and idle processor use: each round starts a fresh cluster of either side."""

import time

from lab.bench.cpu import CpuMeter, anon_mib
from lab.bench.report import Mark, ReportRow
from lab.bench.run import BenchPart, BenchRun, progress
from lab.bench.side import SideError
from lab.cluster.load import Load

PACE = ("--interval-ms", "20")
START_LIMIT_S = 120.0


def rows() -> list[ReportRow]:
    return [
        ReportRow(
            "cold_start", "cold start to the first acked write", "s", "less", Mark(limit=2.0)
        ),
        ReportRow("memory", "anonymous memory of the idle cluster", "MiB", "less", Mark(limit=350)),
        ReportRow("memory_supervisor", "  and of `batonmq up` with its fork server", "MiB", "less"),
        ReportRow("idle_cpu", "idle processor use", "% of a core", "less", Mark(limit=10)),
        ReportRow("idle_cpu_supervisor", "  and of `batonmq up` itself", "% of a core", "less"),
    ]


def measure(run: BenchRun, table: dict[str, ReportRow]) -> None:
    for number in range(run.rounds):
        for name in run.sides:
            progress(f"start: round {number + 1} of {run.rounds}, {name}")
            _round(run, name, table)


def _round(run: BenchRun, name: str, table: dict[str, ReportRow]) -> None:
    with run.side(name, spawned=False) as side:
        with Load(
            side.broker_addresses, prefix="start", log=side.folder / "probe.log", options=PACE
        ) as load:
            load.wait_started()
            began = time.monotonic()
            side.spawn()
            ack = load.first_ack(sent_after=began, limit_s=START_LIMIT_S)
        if ack is None:
            raise SideError(f"{name}: no write acknowledged within {START_LIMIT_S:.0f} s")
        cold = ack.acked_s - began
        side.wait_whole()
        level = time.monotonic() - began
        time.sleep(run.seconds(10, 2))
        groups = {
            "serving": side.serving_pids(),
            "name servers": side.name_server_pids(),
            "supervisor": side.supervisor_pids(),
        }
        meter = CpuMeter(groups)
        time.sleep(run.seconds(30, 5))
        use = meter.stop()
        memory = {what: anon_mib(pids) for what, pids in groups.items() if pids}
    percent = {what: 100 * used / use.wall_s for what, used in use.seconds.items()}
    table["cold_start"].samples(name).append(cold)
    table["memory"].samples(name).append(memory["serving"])
    table["idle_cpu"].samples(name).append(percent["serving"])
    if "supervisor" in memory:
        table["memory_supervisor"].samples(name).append(memory["supervisor"])
        table["idle_cpu_supervisor"].samples(name).append(percent["supervisor"])
    seen = {"coldStartS": cold, "fullSetS": level, "anonMiB": memory, "idlePercent": percent}
    run.note("start", name, seen, use.others_percent)
    progress(
        f"  first ack {cold:.2f} s, full set {level:.2f} s, {memory['serving']:.0f} MiB,"
        f" {percent['serving']:.1f} % of a core"
    )


PART = BenchPart("start", "cold start, memory, idle processor use", rows, measure)
