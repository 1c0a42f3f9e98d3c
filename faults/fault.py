"""What a fault is: how it is done and undone, what is measured of it, what may follow from it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from faults.records import Finding

if TYPE_CHECKING:
    from faults.lab import Lab

Measure = Literal["first ack", "gap"]


@dataclass(slots=True)
class Wound:
    """A fault that was done. `at_s` (CLOCK_MONOTONIC): writes sent from then on are measured.

    `not_from`: a broker whose acks do not count as recovery. `judged`: one that the controllers
    call dead although its process lives. `notes` go into the trial's record.
    """

    at_s: float
    not_from: int | None = None
    judged: int | None = None
    notes: dict[str, object] = field(default_factory=dict)


class Fault:
    """One row of the table. An object is used for one trial after the other.

    `measure` "first ack": from `at_s` to the first ack of a write sent after it. "gap": the longest
    time without an ack while the fault lasts, and `watch_s` at least is looked at. `hold_s`: how
    long it lasts after that, from and to. `elections`: how many may follow from it, from and to;
    None where that is open.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    measure: ClassVar[Measure] = "first ack"
    limit_s: ClassVar[float | None] = None
    median_limit_s: ClassVar[float | None] = None
    peer: ClassVar[str] = ""
    needs_cuts: ClassVar[bool] = False
    hold_s: ClassVar[tuple[float, float]] = (0.2, 0.6)
    watch_s: ClassVar[float] = 0.0
    elections: ClassVar[tuple[int, int] | None] = None
    in_soak: ClassVar[bool] = True
    trials_at_most: ClassVar[int | None] = None

    def prepare(self, lab: Lab, rng: random.Random) -> None:
        """What must be so before the trial; the cluster is whole then and is made whole after."""

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        """Does it, and returns as soon as it is done."""
        raise NotImplementedError

    def heal(self, lab: Lab, wound: Wound) -> None:
        """Undoes it. What is left dead, stopped or cut is mended by the laboratory anyway."""

    def judge(self, lab: Lab, wound: Wound) -> list[Finding]:
        """What else must hold, once the cluster is whole again and everything was read back."""
        return []
