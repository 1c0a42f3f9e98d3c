"""What all hosts share: time, network, disks, chance, and the trace of what happens."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.sim.ambient import Clocks
from lab.sim.disk import SimDisks
from lab.sim.loop import START_S, SimLoop, at_world
from lab.sim.network import SimNetwork
from lab.sim.settings import Settings

Tell = Callable[[float, str, str], None]


class Violation(AssertionError):
    """A promise does not hold."""


class World:
    """`tell` gets (seconds, who, what) of all that happens; nothing by default."""

    def __init__(self, seed: int, settings: Settings, root: Path, tell: Tell | None = None) -> None:
        self.rng = random.Random(seed)
        self.settings = settings
        self.loop = SimLoop(self.rng)
        self.network = SimNetwork(self.loop, self.rng)
        self.clocks = Clocks(self.loop)
        self.disks = SimDisks(root, self.rng, self.clocks.wall_s)
        self.violations: list[Violation] = []
        self._tell = tell
        self.loop.note = self.tell

    @property
    def now_s(self) -> float:
        """Seconds since the life began."""
        return self.loop.now_s - START_S

    def tell(self, who: str, what: str) -> None:
        if self._tell is not None:
            self._tell(self.now_s, who, what)

    def later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        at_world(self.loop, self.loop.time() + delay_s, callback, *args)

    def violate(self, what: str) -> None:
        """Ends the run."""
        self.tell("checker", what)
        self.violations.append(Violation(f"{what} at {self.now_s:.4f} s"))
        self.loop.stop()
