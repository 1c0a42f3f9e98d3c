"""Inputs out of good ones: by blind change, the same for a seed, or by coverage (atheris)."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.fuzz.targets import TARGETS, Target, quiet

FOUND = Path(__file__).parent / "found"
HANG_S = 20
INPUT_BYTES_MAX = 16_384
MEMORY_MB = 1024
INTERESTING = (
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\x80\0\0\0",
)


class Hang(Exception):
    """One input took longer than HANG_S."""


@contextmanager
def limit() -> Iterator[None]:
    """Starts anew with each input that is done (`signal.alarm`)."""

    def hangs(number: int, frame: FrameType | None) -> None:
        raise Hang(f"longer than {HANG_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def changed(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """One to four changes of `data`, as a disk or a stranger makes them."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        at = rng.randrange(len(made) + 1)
        end = min(len(made), at + rng.choice((1, 1, 2, 4, 8, 32, 200)))
        match rng.randrange(9):
            case 0:
                del made[at:end]
            case 1:
                made[at:at] = rng.randbytes(rng.choice((1, 2, 4, 16)))
            case 2 if made:
                made[at % len(made)] ^= 1 << rng.randrange(8)
            case 3:
                made[at:end] = bytes(end - at)
            case 4:
                value = rng.choice(INTERESTING)
                made[at : at + len(value)] = value
            case 5:
                begin = rng.randrange(len(other) + 1)
                made[at:end] = other[begin : begin + rng.choice((4, 16, 64, 256))]
            case 6:
                del made[at:]
            case 7:
                made[at:end] = made[at:end] * rng.choice((2, 3, 20))
            case _ if len(made) >= at + 4:
                number = int.from_bytes(made[at : at + 4]) + rng.choice((-1, 1, 4, -8, 256))
                made[at : at + 4] = (number & 0xFFFFFFFF).to_bytes(4)
    return bytes(made[:INPUT_BYTES_MAX])


def run_blind(
    target: Target, runs: int, seed: int
) -> tuple[int, bytes | None, BaseException | None]:
    """(how many inputs were read, the one that escaped, how). The same for the same seed."""
    rng = random.Random(seed)
    seeds = [each for each in target.seeds() if each] or [b"\0"]
    for done, data in enumerate(seeds):
        try:
            target.read(data)
        except Exception as error:
            return done, data, error
    with limit():
        for done in range(runs):
            data = changed(rng, rng.choice(seeds), rng.choice(seeds))
            if not done % 64:
                signal.alarm(HANG_S)
            try:
                target.read(data)
            except Exception as error:
                return done, data, error
    return runs, None, None


def keep(name: str, data: bytes) -> Path:
    folder = FOUND / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{len(list(folder.iterdir())):03d}"
    path.write_bytes(data)
    return path


def run_covered(name: str, runs: int, seed: int, work: Path) -> subprocess.CompletedProcess[str]:
    """atheris in a process of its own, which it ends: with its corpus in `work`, and what it found
    in `found/NAME`."""
    corpus, found = work / "corpus", FOUND / name
    corpus.mkdir(parents=True)
    for number, data in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed-{number}").write_bytes(data[:INPUT_BYTES_MAX])
    found.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "tests.fuzz.covered", name, str(corpus), f"-runs={runs}"]
    argv += [f"-seed={seed}", f"-max_len={INPUT_BYTES_MAX}", f"-timeout={HANG_S}"]
    argv += [f"-rss_limit_mb={MEMORY_MB}", f"-artifact_prefix={found}/", "-print_final_stats=1"]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def search(name: str, runs: int, seed: int, work: Path | None) -> tuple[bool, str]:
    """(whether nothing was found, one line about it). `work`: by coverage, with files there."""
    began = time.monotonic()
    if work is not None:
        ended = run_covered(name, runs, seed, work)
        folder = FOUND / name
        if not list(folder.iterdir()):
            folder.rmdir()
        told = [line for line in ended.stderr.splitlines() if "number_of_executed_units" in line]
        count = told[0].split()[-1] if told else "?"
        good = ended.returncode == 0
        said = f"{count} executions by coverage"
        if not good:
            said += "\n" + "\n".join(ended.stderr.splitlines()[-40:])
    else:
        quiet()
        done, data, error = run_blind(TARGETS[name], runs, seed)
        good = error is None
        said = f"{done} executions, blind"
        if data is not None:
            said += f": {error!r}, kept as {keep(name, data)}"
    return good, f"{name}: {said}, {time.monotonic() - began:.0f} s"
