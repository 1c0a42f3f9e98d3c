"""The laboratory: a cluster under load, one fault after the other, and the checkers after each."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from faults import checks
from faults.cluster import HOSTS, PROBE_HOST, Cluster, GroupState
from faults.fault import Fault, Wound
from faults.load import Load, longest_gap
from faults.log_compare import LogsDiffer, check_logs_equal
from faults.net import Namespaces, Network, why_not
from faults.readback import ReadBack
from faults.records import Epoch, Finding

FIRST_ACK_S: Final = 60.0
BEFORE_S: Final = 0.2
"""How much of the time before a fault belongs to what is looked at for gaps."""
SETTLE_S: Final = (0.3, 0.8)


@dataclass(frozen=True, slots=True)
class Span:
    """From just before a fault to the first write acked by the whole cluster after it.

    Times of CLOCK_MONOTONIC: `began_s`, `at_s` (the fault was done), `healed_s`, `ended_s`. `hurt`:
    the processes that were dead or stopped just before it was undone. `first_ack_s`: when a write
    sent after the fault was first acked, by another broker than the fault struck; None if none was.
    `gap_s`: the longest time without an ack in all of it.
    """

    began_s: float
    at_s: float
    healed_s: float
    ended_s: float
    first_ack_s: float | None
    gap_s: float
    before: GroupState
    after: GroupState
    hurt: tuple[str, ...]


@dataclass(slots=True)
class Trial:
    """One trial of a fault. `seconds` is what its row measures, None if nothing ever was acked.

    `gap_s` and `heal_gap_s`: the longest times without an ack from the fault on, and from its end
    on. `whole_s`: from its end until the cluster was whole. `span`: what was seen of the cluster.
    """

    fault: str
    seconds: float | None
    gap_s: float
    heal_gap_s: float
    whole_s: float
    elections: int
    acked: int
    findings: list[Finding]
    span: Span
    notes: dict[str, object] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {
            "fault": self.fault,
            "seconds": self.seconds,
            "gapS": self.gap_s,
            "healGapS": self.heal_gap_s,
            "wholeS": self.whole_s,
            "elections": self.elections,
            "acked": self.acked,
            "findings": [[one.rule, one.text] for one in self.findings],
            "notes": self.notes,
        }


def make_network(*, with_cuts: bool | None = None) -> Network:
    """Namespaces where they can be had. `with_cuts` False: the loopback in any case."""
    can = with_cuts is not False and not why_not()
    return Namespaces(HOSTS) if can else Network(HOSTS)


class Lab:
    """A context manager: nothing of it runs after the `with` block; its folder stays.

    The thread that enters it is inside the probe's namespace until it leaves.
    """

    def __init__(
        self,
        folder: Path,
        network: Network,
        *,
        load: Sequence[str] = (),
        overrides: dict[str, dict[str, object]] | None = None,
        fresh: bool = False,
    ) -> None:
        """`fresh`: a broker that was judged dead while it lived is started anew after the trial.
        A second verdict on one process within 10 s is held back on purpose (R6)."""
        self.folder = folder
        self._fresh = fresh
        self.network = network
        self.cluster = Cluster(folder, network, overrides)
        self._load_options = list(load)
        self._reader = ReadBack()
        self._checked = 0
        self._exit = ExitStack()
        self.load: Load

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            self.network.open()
            undo.callback(self.network.close)
            undo.enter_context(self.network.inside(PROBE_HOST))
            undo.callback(self.cluster.stop)
            self.cluster.start()
            self.load = Load(
                self.cluster.addresses,
                prefix="fault",
                log=self.folder / "probe.log",
                options=self._load_options,
            )
            undo.callback(self.load.stop)
            self.must_ack()
            self._exit = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._exit.close()

    # --- what faults use ---

    @property
    def stored(self) -> dict[int, int]:
        """What was read back so far: number of the write -> physical offset."""
        return self.stored_by(self.load.prefix)

    def stored_by(self, prefix: str) -> dict[int, int]:
        """As `stored`, of another probe on the same topic."""
        return self._reader.of(prefix)

    def must_ack(self, limit_s: float = FIRST_ACK_S) -> float:
        """Returns when a write sent from now on is acked; after how many seconds."""
        now = time.monotonic()
        ack = self.load.first_ack(sent_after=now, limit_s=limit_s)
        if ack is None:
            raise RuntimeError(f"no write acked for {limit_s:.0f} s\n{self.cluster.complaint()}")
        return ack.acked_s - now

    def master(self) -> int:
        """The master of a whole cluster."""
        group = self.cluster.wait_whole()
        assert group.master is not None
        return group.master

    def slaves(self, rng: random.Random) -> list[int]:
        """The two slaves of a whole cluster, in random order."""
        master = self.master()
        slaves = [index for index in range(len(self.cluster.brokers)) if index != master]
        rng.shuffle(slaves)
        return slaves

    def mend(self) -> None:
        """Everything runs and hears everything again."""
        self.network.mend()
        self.cluster.wake_all()
        self.cluster.launch_dead()

    # --- a trial ---

    def trial(self, fault: Fault, rng: random.Random) -> Trial:
        """Raises RuntimeError or NotWhole if the cluster does not come back."""
        fault.prepare(self, rng)
        before = self.cluster.wait_whole()
        time.sleep(rng.uniform(*SETTLE_S))
        self.must_ack()
        began = time.monotonic()
        wound = fault.inject(self, rng)
        try:
            seconds = self._measure(fault, wound, rng)
            hurt = [one.name for one in self.cluster.processes if not one.runs or one.stopped]
            healed = time.monotonic()
            fault.heal(self, wound)
        finally:
            self.mend()
        after = self.cluster.wait_whole()
        whole = time.monotonic()
        self.must_ack()
        ended = time.monotonic()
        gap = longest_gap(self.load.since(wound.at_s - BEFORE_S), wound.at_s - BEFORE_S, healed)
        if fault.measure == "gap":
            seconds = gap
        checked = self._checked
        heal_gap = longest_gap(self.load.since(healed), healed, time.monotonic())
        findings = [*self.verify(after), *self._elections(fault, before, after)]
        findings += fault.judge(self, wound)
        if self._fresh and wound.judged is not None:
            self.cluster.brokers[wound.judged].kill()
            self.cluster.launch(self.cluster.brokers[wound.judged])
        return Trial(
            fault.name,
            seconds,
            gap,
            heal_gap,
            whole - healed,
            after.master_epoch - before.master_epoch,
            self._checked - checked,
            findings,
            Span(
                began,
                wound.at_s,
                healed,
                ended,
                self._first_ack(wound),
                longest_gap(self.load.since(began - BEFORE_S), began - BEFORE_S, ended),
                before,
                after,
                tuple(hurt),
            ),
            wound.notes,
        )

    def _first_ack(self, wound: Wound) -> float | None:
        for ack in self.load.since(wound.at_s):
            if ack.sent_s >= wound.at_s and ack.broker != wound.not_from:
                return ack.acked_s
        return None

    def _measure(self, fault: Fault, wound: Wound, rng: random.Random) -> float | None:
        seconds = None
        if fault.measure == "first ack":
            ack = self.load.first_ack(
                sent_after=wound.at_s, limit_s=FIRST_ACK_S, not_from=wound.not_from
            )
            if ack is None:
                raise RuntimeError(
                    f"{fault.name}: no write acked within {FIRST_ACK_S:.0f} s\n"
                    f"{self.cluster.complaint()}"
                )
            seconds = ack.acked_s - wound.at_s
        until = max(wound.at_s + fault.watch_s, time.monotonic() + rng.uniform(*fault.hold_s))
        time.sleep(max(0.0, until - time.monotonic()))
        return seconds

    def _elections(self, fault: Fault, before: GroupState, after: GroupState) -> list[Finding]:
        count = after.master_epoch - before.master_epoch
        if fault.elections is None or fault.elections[0] <= count <= fault.elections[1]:
            return []
        low, high = fault.elections
        return [
            Finding("elections", f"masterEpoch rose by {count}, expected were {low} to {high}"),
        ]

    # --- the checkers ---

    def verify(self, group: GroupState) -> list[Finding]:
        """Reads back what was written since the last time; what is wrong with it."""
        count = len(self.load.acks)
        acks = self.load.acks[self._checked : count]
        assert group.master is not None
        self._reader.read_on(self.cluster.addresses[group.master])
        self._checked = count
        winners = self.winners(group)
        contradictions, self.cluster.contradictions = self.cluster.contradictions, []
        return [
            *(Finding("histories differ", text) for text in contradictions),
            *checks.check_lost(acks, self.stored),
            *checks.check_order(acks, self.stored),
            *checks.check_masters(checks.ackers(acks, self.stored, self.epochs(group)), winners),
        ]

    def epochs(self, group: GroupState) -> list[Epoch]:
        assert group.master is not None
        return self.cluster.epochs(group.master)

    def winners(self, group: GroupState) -> dict[int, set[int]]:
        """epoch -> the brokers that the controllers' history calls elected for it."""
        by_id = {broker_id: index for index, broker_id in group.broker_ids.items()}
        winners: dict[int, set[int]] = {}
        for event in self.cluster.history().values():
            if event["kind"] == "elected":
                winner = by_id.get(int(event.get("broker_id", 0)), -1)
                winners.setdefault(int(event["master_epoch"]), set()).add(winner)
        return winners

    def close_and_compare(self) -> list[Finding]:
        """Ends load and cluster; all acks once more against the log, and the logs with each other
        (G3)."""
        group = self.cluster.wait_whole()
        self.load.stop()
        self.verify(group)
        findings = [
            *checks.check_lost(self.load.acks, self.stored),
            *checks.check_order(self.load.acks, self.stored),
        ]
        self.cluster.stop()
        folders = [self.cluster.data_dir(index) for index in range(len(self.cluster.brokers))]
        try:
            check_logs_equal(folders)
        except LogsDiffer as exc:
            findings.append(Finding("logs differ", str(exc)))
        return findings
