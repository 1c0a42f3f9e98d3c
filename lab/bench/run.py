"""What every part gets: the options of this run, and how to make either side."""

import argparse
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lab.bench.report import ReportRow
from lab.bench.side import ClusterSide, JavaPeer, OurCluster
from lab.cluster.java import JavaProgram

SIDES: Final = ("java", "ours")
JVM: Final = ("-Xms512m", "-Xmx512m")
_BEGAN: Final = time.monotonic()


def progress(text: str) -> None:
    """One line of progress, on standard error."""
    minutes, seconds = divmod(int(time.monotonic() - _BEGAN), 60)
    print(f"[{minutes:3d}:{seconds:02d}] {text}", file=sys.stderr, flush=True)


def names_among(allowed: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that takes some of these names, with commas between."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        for name in chosen:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return chosen

    return parse


def folder_there(text: str) -> Path:
    """The type of an option that names a folder."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a folder that is there")
    return Path(text)


@dataclass(slots=True)
class BenchRun:
    """One run of the bench. `quick` shortens everything: it shows that the bench works, no more."""

    rounds: int
    quick: bool
    sides: tuple[str, ...]
    folder: Path
    classpath: str
    """Of the Java programs; empty if no part needs Java."""
    raw: dict[str, object] = field(default_factory=dict)
    noise: list[float] = field(default_factory=list)

    def seconds(self, full: float, quick: float) -> float:
        return quick if self.quick else full

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    @contextmanager
    def side(
        self, name: str, *, spawned: bool = True, supervised: bool = False
    ) -> Iterator[ClusterSide]:
        """A side just spawned, or one to spawn. `supervised`: what starts it starts its dead again,
        if it can (Java's does not). An exception inside gets the end of its logs."""
        folder = self.folder / name
        side: ClusterSide = (
            JavaPeer(folder) if name == "java" else OurCluster(folder, supervised=supervised)
        )
        try:
            if spawned:
                side.spawn()
            yield side
        except Exception as exc:
            exc.add_note(f"{name}:\n{side.diagnostics()[-6000:]}")
            raise
        finally:
            side.stop()
            shutil.rmtree(folder, ignore_errors=True)

    def program(self, main: str, args: list[str]) -> JavaProgram:
        """One of our Java programs, ready."""
        program = JavaProgram(self.classpath, self.folder / "programs", main, *args, jvm=JVM)
        program.wait_for("its start", lambda: program.lines)
        return program

    def note(self, part: str, side: str, value: object, noise_percent: float | None = None) -> None:
        """Keeps a raw observation for `--json`, with the noise of the machine (% of a core)."""
        notes = self.raw.setdefault(part, [])
        assert isinstance(notes, list)
        notes.append(
            {
                "side": side,
                "load1": os.getloadavg()[0],
                "noisePercent": noise_percent,
                "value": value,
            }
        )
        if noise_percent is not None:
            self.noise.append(noise_percent)


def machine_facts() -> dict[str, object]:
    """What figures depend on, by what it is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(names, platform.machine()),
        "cores": os.cpu_count(),
        "memory GiB": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30,
        "Linux": platform.release(),
        "Python": platform.python_version(),
        "load at start": round(os.getloadavg()[0], 2),
    }


@dataclass(frozen=True, slots=True)
class BenchPart:
    """A measurement: its rows, empty, and the function that fills them."""

    name: str
    what: str
    rows: Callable[[], list[ReportRow]]
    measure: Callable[[BenchRun, dict[str, ReportRow]], None]
    needs_programs: bool = False
