"""The base class of faults, and a cluster under load that gets one after the other, with checks."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from lab.cluster import checks
from lab.cluster.checks import BrokenPromise, Epoch
from lab.cluster.frames import SECURE_VARIABLE
from lab.cluster.held import HOSTS, PROBE_HOST, GroupState, HeldCluster
from lab.cluster.load import Load, longest_gap
from lab.cluster.many_queues import ManyQueuesWriter
from lab.cluster.network import Namespaces, Network, why_not
from lab.cluster.readback import MasterMoved, ReadBack
from lab.cluster.stores import LogsDiffer, check_logs_equal
from lab.faults.consumers import Consumers

FIRST_ACK_S: Final = 60.0
BEFORE_S: Final = 0.2
"""A gap may begin this long before its fault."""
SETTLE_S: Final = (0.3, 0.8)
"""A random pause, so that a fault meets heartbeats and leases in any phase."""
MANY_PAUSE_S: Final = 0.002
MANY_MADE_S: Final = 120.0
Measure = Literal["first ack", "gap"]


@dataclass(slots=True)
class InjectedFault:
    """A fault that was injected. Moments are of CLOCK_MONOTONIC."""

    at_s: float
    """Writes sent from then on are measured."""
    not_from: int | None = None
    """A broker whose acks do not count as recovery."""
    declared_dead: int | None = None
    """A broker that the controllers call dead although its process runs."""
    old_epoch: int = 0
    """The masterEpoch that is over for `not_from`."""
    took_s: float = 0.0
    """How long it took to inject."""
    healed_s: float = 0.0
    """When it was undone, noted by the lab."""
    notes: dict[str, Any] = field(default_factory=dict)
    """For the trial's document."""


class Fault:
    """One row of the table. An object is used for one trial after the other."""

    name: ClassVar[str]
    title: ClassVar[str]
    measure: ClassVar[Measure] = "first ack"
    """From `InjectedFault.at_s` to the "first ack" of a write sent after it, or the longest "gap"
    without an ack while the fault lasts, at least `watch_s`."""
    limit_s: ClassVar[float | None] = None
    median_limit_s: ClassVar[float | None] = None
    peer: ClassVar[str] = ""
    needs_cuts: ClassVar[bool] = False
    hold_s: ClassVar[tuple[float, float]] = (0.2, 0.6)
    """How long the fault lasts after what is measured, from and to."""
    watch_s: ClassVar[float] = 0.0
    elections: ClassVar[tuple[int, int] | None] = None
    """How many may follow, from and to; None: any number."""
    in_soak: ClassVar[bool] = True
    secure: ClassVar[bool] = False
    """TLS and users are on."""
    trials_at_most: ClassVar[int | None] = None

    def prepare(self, lab: Lab, rng: random.Random) -> None:
        """Prepares the trial. The cluster is whole before, and is made whole after it."""

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        """Injects it, and returns as soon as that is done."""
        raise NotImplementedError

    def heal(self, lab: Lab, injected: InjectedFault) -> None:
        """Undoes it. The lab restores what is left dead, stopped or cut."""

    def check(self, lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
        """What else must hold, once the cluster is whole again and everything was read back."""
        return []


def secured(fault: type[Fault]) -> type[Fault]:
    """The same in a cluster with TLS and users."""
    changed = {
        "name": f"{fault.name}-secured",
        "title": f"{fault.title}; TLS and users on",
        "peer": "",
        "in_soak": False,
        "secure": True,
    }
    return type(f"{fault.__name__}Secured", (fault,), changed)


@dataclass(frozen=True, slots=True)
class TrialSpan:
    """From just before a fault to the first write acked by the whole cluster after it.

    Times of CLOCK_MONOTONIC; `at_s`: the fault was injected. `affected`: the processes that were
    dead or stopped just before it was healed. `first_ack_s`: when a write sent after the fault was
    first acked by another broker than the affected one; None if none was.
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
    affected: tuple[str, ...]


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
    findings: list[BrokenPromise]
    span: TrialSpan
    notes: dict[str, Any] = field(default_factory=dict)


def make_network() -> Network:
    """Namespaces if they are possible, else the loopback."""
    return Network(HOSTS) if why_not() else Namespaces(HOSTS)


class Lab:
    """A context manager: all processes end with the `with` block, the folder stays.

    The thread that enters it is in the probe's network namespace until then.
    """

    def __init__(
        self,
        folder: Path,
        network: Network,
        *,
        load: Sequence[str] = (),
        fresh: bool = False,
        consumed: bool = False,
        queues: int = 0,
        secure: bool = False,
    ) -> None:
        """`consumed`: consumer groups read along, and each must get every acknowledged write.
        `queues`: how many more queues are written, and read back at the end.
        `fresh`: a broker that was declared dead while it ran is restarted after the trial, since
        a process is not declared dead a second time within 10 s (R6). `secure`: TLS and users in
        the cluster, and for the connections of this process and its children."""
        self.folder = folder
        self._fresh = fresh
        self.network = network
        self.cluster = HeldCluster(folder, network, secure=secure)
        self._secure = secure
        self._load_options = list(load)
        self._reader = ReadBack()
        self._checked = 0
        self._consumed = consumed
        self._consumers: Consumers | None = None
        self._queues = queues
        self.many: ManyQueuesWriter | None = None
        self._exit = ExitStack()
        self.load: Load

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            self.network.open()
            undo.callback(self.network.close)
            undo.enter_context(self.network.inside(PROBE_HOST))
            if self._secure:
                os.environ[SECURE_VARIABLE] = str(self.cluster.layout.tls_folder)
                undo.callback(os.environ.pop, SECURE_VARIABLE)
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
            if self._consumed:
                self._consumers = undo.enter_context(
                    Consumers(
                        self.cluster.name_servers, self.load.prefix, self.folder / "consumers"
                    )
                )
            if self._queues:
                self.many = undo.enter_context(
                    ManyQueuesWriter(self.cluster.addresses, self._queues, pause_s=MANY_PAUSE_S)
                )
            self._exit = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._exit.close()

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
            raise RuntimeError(f"no write acked for {limit_s:.0f} s\n{self.cluster.diagnostics()}")
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

    def restore(self) -> None:
        """Everything runs and is connected again."""
        self.network.heal()
        for process in self.cluster.processes:  # before it is started again, if it has ended
            process.make_sound()
        self.cluster.resume_stopped()
        self.cluster.launch_dead()

    def trial(self, fault: Fault, rng: random.Random) -> Trial:
        """Raises RuntimeError or NotInTime if the cluster does not come back."""
        fault.prepare(self, rng)
        before = self.cluster.wait_whole()
        time.sleep(rng.uniform(*SETTLE_S))
        self.must_ack()
        began = time.monotonic()
        injected = fault.inject(self, rng)
        try:
            seconds = self._measure(fault, injected, rng)
            affected = [one.name for one in self.cluster.processes if not one.runs or one.stopped]
            healed = injected.healed_s = time.monotonic()
            fault.heal(self, injected)
        finally:
            self.restore()
        after = self.cluster.wait_whole()
        whole = time.monotonic()
        self.must_ack()
        ended = time.monotonic()
        span = TrialSpan(
            began,
            injected.at_s,
            healed,
            ended,
            self._first_ack(injected),
            self._gap(began, ended),
            before,
            after,
            tuple(affected),
        )
        gap = self._gap(injected.at_s, healed)
        heal_gap = longest_gap(self.load.since(healed), healed, time.monotonic())
        checked = self._checked
        findings = [*self.verify(after), *self._elections(fault, before, after)]
        findings += fault.check(self, injected)
        if self._fresh and injected.declared_dead is not None:
            self.cluster.brokers[injected.declared_dead].kill()
            self.cluster.launch_dead()
        return Trial(
            fault.name,
            gap if fault.measure == "gap" else seconds,
            gap,
            heal_gap,
            whole - healed,
            after.master_epoch - before.master_epoch,
            self._checked - checked,
            findings,
            span,
            injected.notes,
        )

    def _gap(self, began: float, ended: float) -> float:
        """The longest time without an ack from just before `began` on."""
        return longest_gap(self.load.since(began - BEFORE_S), began - BEFORE_S, ended)

    def _first_ack(self, injected: InjectedFault) -> float | None:
        for ack in self.load.since(injected.at_s):
            if ack.sent_s >= injected.at_s and ack.broker != injected.not_from:
                return ack.acked_s
        return None

    def _measure(self, fault: Fault, injected: InjectedFault, rng: random.Random) -> float | None:
        seconds = None
        if fault.measure == "first ack":
            ack = self.load.first_ack(
                sent_after=injected.at_s, limit_s=FIRST_ACK_S, not_from=injected.not_from
            )
            if ack is None:
                raise RuntimeError(
                    f"{fault.name}: no write acked within {FIRST_ACK_S:.0f} s\n"
                    f"{self.cluster.diagnostics()}"
                )
            seconds = ack.acked_s - injected.at_s
        until = max(injected.at_s + fault.watch_s, time.monotonic() + rng.uniform(*fault.hold_s))
        time.sleep(max(0.0, until - time.monotonic()))
        return seconds

    def _elections(
        self, fault: Fault, before: GroupState, after: GroupState
    ) -> list[BrokenPromise]:
        count = after.master_epoch - before.master_epoch
        if fault.elections is None or fault.elections[0] <= count <= fault.elections[1]:
            return []
        low, high = fault.elections
        text = f"masterEpoch rose by {count}, expected were {low} to {high}"
        return [BrokenPromise("elections", text)]

    def verify(self, group: GroupState) -> list[BrokenPromise]:
        """Reads back what was written since the last time; what is wrong with it."""
        count = len(self.load.acks)
        acks = self.load.acks[self._checked : count]
        assert group.master is not None
        try:
            self._reader.read_on(self.cluster.addresses[group.master])
        except MasterMoved:  # a master hands over some time after its disk is full
            group = self.cluster.wait_whole()
            assert group.master is not None
            self._reader.read_on(self.cluster.addresses[group.master])
        self._checked = count
        winners = self.winners(group)
        contradictions, self.cluster.contradictions = self.cluster.contradictions, []
        return [
            *(BrokenPromise("histories differ", text) for text in contradictions),
            *checks.check_lost(acks, self.stored),
            *checks.check_order(acks, self.stored),
            *checks.check_masters(checks.ackers(acks, self.stored, self.epochs(group)), winners),
            *(self._consumers.check(acks) if self._consumers is not None else ()),
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

    def close_and_compare(self) -> list[BrokenPromise]:
        """Ends load and cluster; all acks once more against the log, and the logs with each other
        (G3)."""
        group = self.cluster.wait_whole()
        self.load.stop()
        findings = self._find_lost_in_many()
        findings += [
            *self.verify(group),
            *checks.check_lost(self.load.acks, self.stored),
            *checks.check_order(self.load.acks, self.stored),
        ]
        self.cluster.stop()
        try:
            check_logs_equal(self.cluster.data_folders)
        except LogsDiffer as exc:
            findings.append(BrokenPromise("logs differ", str(exc)))
        return findings

    def wait_many(self) -> None:
        """Returns when each of the many queues has a message."""
        if self.many is not None and not self.many.are_all_made.wait(MANY_MADE_S):
            raise RuntimeError(f"after {MANY_MADE_S:.0f} s {self.many_acked} messages")

    @property
    def many_acked(self) -> int:
        return len(self.many.acks) if self.many is not None else 0

    def _find_lost_in_many(self) -> list[BrokenPromise]:
        if self.many is None:
            return []
        self.many.stop()
        return self.many.find_lost(self.cluster.addresses[self.master()])
