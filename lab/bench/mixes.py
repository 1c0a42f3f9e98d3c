"""Who leads a mixed group, what happens to it, and what that costs: `python -m lab.bench.mixes`.

Two brokers of ours and one of Java's in one group, under one controller of either kind, and a probe
that writes all the time. Each kind of broker leads in turn and is killed, stopped by SIGSTOP, and
switched away from. Printed is a table: how long no write was acknowledged (for a switch the longest
pause after the command), until the set was whole and level again, counted from when the broker was
started, or continued, and how many acknowledged writes the last master does not serve.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lab.cluster.java import is_fetched, prepared_classpath
from lab.cluster.load import Load, longest_gap
from lab.cluster.mixed import MixedGroup
from lab.cluster.readback import lost_at

OURS, JAVA, OURS_TOO = PLACES = (0, 1, 2)
KIND: Final = {OURS: "ours", JAVA: "Java", OURS_TOO: "ours"}
FAULTS: Final = ("kill -9", "SIGSTOP", "switch")
LIMIT_S: Final = 240.0
"""Java 5.3.3 waits up to 90 s for a thread of its own before it cuts its log."""
SETTLE_S: Final = 2.0


@dataclass
class MixOutcome:
    """Seconds; `heirs`: the kinds that took over."""

    without_ack: list[float] = field(default_factory=list)
    level_again: list[float] = field(default_factory=list)
    heirs: list[str] = field(default_factory=list)


class Mixes:
    """One group and the probe that writes to it."""

    def __init__(self, group: MixedGroup, load: Load) -> None:
        self._group = group
        self._load = load

    def lead(self, place: int) -> None:
        """Makes that broker master of a whole group."""
        self._group.wait_in_sync(*PLACES, limit_s=LIMIT_S)
        if self._group.master() != place:
            self._group.elect(self._group.address(place))
            self._group.wait_for("the switch", lambda: self._group.master() == place)
        self._group.wait_in_sync(*PLACES, limit_s=LIMIT_S)
        time.sleep(SETTLE_S)

    def suffer(self, fault: str, place: int, outcome: MixOutcome) -> None:
        """That fault of the master, and what it takes to be whole again."""
        began = time.monotonic()
        if fault == "switch":
            to = JAVA if place != JAVA else OURS
            self._group.elect(self._group.address(to))
        elif fault == "SIGSTOP":
            self._group.signal(place, signal.SIGSTOP)
        else:
            self._group.kill(place)
        ack = self._load.first_ack(sent_after=began, not_from=place, limit_s=LIMIT_S)
        if ack is None:
            raise RuntimeError(f"no ack within {LIMIT_S} s after {fault} of a master at {place}")
        time.sleep(SETTLE_S)
        end = time.monotonic()
        outcome.without_ack.append(longest_gap(self._load.since(began), began, end))
        heir = self._group.master()
        outcome.heirs.append(KIND[heir] if heir is not None else "none")
        self._recover(fault, place, outcome)

    def _recover(self, fault: str, place: int, outcome: MixOutcome) -> None:
        began = time.monotonic()
        if fault == "SIGSTOP":
            self._group.signal(place, signal.SIGCONT)
        elif fault == "kill -9":
            start(self._group, place)
        self._group.wait_in_sync(*PLACES, limit_s=LIMIT_S)
        if fault != "switch":
            outcome.level_again.append(time.monotonic() - began)


def start(group: MixedGroup, place: int) -> None:
    if place == JAVA:
        group.start_java(JAVA, haSendHeartbeatInterval=1000)
    else:
        group.start_ours(place)


def play(controllers: str, rounds: int, folder: Path) -> list[str]:
    """The rows of the table for that kind of controllers."""
    outcomes = {(place, fault): MixOutcome() for place in (OURS, JAVA) for fault in FAULTS}
    with MixedGroup(folder, len(PLACES), java_controllers=int(controllers == "java")) as group:
        start(group, OURS)
        group.wait_for("a master", lambda: group.master() == OURS)
        for place in (JAVA, OURS_TOO):
            start(group, place)
        addresses = [group.address(place) for place in PLACES]
        with Load(addresses, prefix="mixes", log=folder / "probe.log") as load:
            mixes = Mixes(group, load)
            for _ in range(rounds):
                for (place, fault), outcome in outcomes.items():
                    mixes.lead(place)
                    mixes.suffer(fault, place, outcome)
                    print(_row(controllers, place, fault, outcome), file=sys.stderr, flush=True)
        master = group.master()
        assert master is not None
        acked, missing = len(load.acks), len(lost_at(group.address(master), load))
    rows = [_row(controllers, *key, outcome) for key, outcome in outcomes.items()]
    return [*rows, f"{controllers}: {acked:,} acknowledged, {missing:,} lost"]


def _row(controllers: str, place: int, fault: str, outcome: MixOutcome) -> str:
    seconds = (_seconds(outcome.without_ack), _seconds(outcome.level_again))
    heirs = ", ".join(sorted(set(outcome.heirs)))
    return f"| {' | '.join((controllers, KIND[place], fault, heirs, *seconds))} |"


def _seconds(found: list[float]) -> str:
    return ", ".join(f"{one:.2g}" for one in sorted(found)) or "-"


def main() -> None:
    parser = argparse.ArgumentParser(prog="lab.bench.mixes")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--controllers", choices=("ours", "java"), action="append")
    asked = parser.parse_args()
    if not is_fetched():
        prepared_classpath()
    rows: list[str] = []
    for controllers in asked.controllers or ("ours", "java"):
        with tempfile.TemporaryDirectory(prefix="baton-mixes-") as folder:
            rows += play(controllers, asked.rounds, Path(folder))
    print("| controllers | led | fault | then | s without an ack | s until level again |")
    print("| --- | --- | --- | --- | --- | --- |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
