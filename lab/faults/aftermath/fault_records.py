"""Which faults are injected in which order, and the record: when, into which processes, and what
was seen. Pure.

The record has one JSON object a line. Times are wall clock in ms, `gap_ms` is the longest time
without an acknowledged write in all of it, ids of brokers are those of the controllers.
"""

import json
from dataclasses import asdict, dataclass
from typing import Final

from lab.cluster.cluster import GROUP
from lab.faults import harmless, kills, slaves
from lab.faults.trial import Fault, Trial

DOZEN: Final[tuple[type[Fault], ...]] = (
    kills.KillMaster,
    harmless.SwitchFault,
    kills.HangMaster,
    kills.HangLeader,
    kills.KillMasterAndLeader,
    slaves.KillSlave,
    kills.HangLeaderThenKillMaster,
    harmless.SwitchFault,
    kills.TwoKills,
    kills.HangLeaderAndKillMaster,
    kills.KillMaster,
    kills.HangMaster,
    kills.HangLeader,
    harmless.SwitchFault,
    kills.KillMaster,
)
"""At least a dozen changes of master, and what must not be one between them."""

FEW: Final[tuple[type[Fault], ...]] = (
    kills.KillMaster,
    harmless.SwitchFault,
    slaves.KillSlave,
    kills.HangMaster,
)

PLANNED: Final = "planned_switch"
FAILOVER: Final = "failover"


def kind_of(fault: Fault) -> str:
    """What the history must call the elections that follow; empty if none may follow."""
    if fault.elections == (0, 0):
        return ""
    return PLANNED if isinstance(fault, harmless.SwitchFault) else FAILOVER


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """One fault. `[began_ms, ended_ms]` holds all that followed from it.

    `kind`: how the history must call the elections that follow, empty if none may. `processes`: the
    affected ones. Epochs and ids of masters are those recorded just before, and after.
    """

    number: int
    what: str
    title: str
    kind: str
    processes: tuple[str, ...]
    brokers: tuple[int, ...]
    group: str
    began_ms: int
    at_ms: int
    first_ack_ms: int | None
    ended_ms: int
    gap_ms: float
    epoch_before: int
    epoch_after: int
    master_before: int
    master_after: int
    set_epoch_before: int
    set_epoch_after: int

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @property
    def affected(self) -> str:
        """`processes` as a text, with the broker ids that controllers and tables use."""
        ids = iter(self.brokers)
        words = [
            f"{name} (broker {next(ids)})" if name.startswith(f"{self.group}-") else name
            for name in self.processes
        ]
        return ("away from " if self.kind == PLANNED else "") + ", ".join(words)

    @property
    def elections(self) -> int:
        """By how much masterEpoch rose."""
        return self.epoch_after - self.epoch_before


def fault_record(
    number: int, fault: Fault, trial: Trial, *, names: tuple[str, ...], wall_s: float
) -> FaultRecord:
    """`names`: of the brokers' processes, by index. `wall_s`: wall clock minus CLOCK_MONOTONIC."""
    span = trial.span
    before, after = span.before, span.after
    assert before.master is not None and after.master is not None

    def ms(moment_s: float) -> int:
        return round((moment_s + wall_s) * 1000)

    affected = span.affected or (names[before.master],)  # a planned switch stops no process
    return FaultRecord(
        number,
        fault.name,
        fault.title.partition(":")[0],
        kind_of(fault),
        affected,
        tuple(before.broker_ids[names.index(name)] for name in affected if name in names),
        GROUP,
        ms(span.began_s),
        ms(span.at_s),
        None if span.first_ack_s is None else ms(span.first_ack_s),
        ms(span.ended_s),
        round(span.gap_s * 1000, 1),
        before.master_epoch,
        after.master_epoch,
        before.broker_ids[before.master],
        after.broker_ids[after.master],
        before.set_epoch,
        after.set_epoch,
    )
