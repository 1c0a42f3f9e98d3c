"""Plants defects in copies of the checkout, and lives there until a checker finds them.

The work tree is never changed. A copy is used for one defect after the other: what was planted is
restored before the next.
"""

import contextlib
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lab.sim.ambient import real_seconds
from lab.sim.defects.patches import Defect, PatchError
from lab.sim.life import plan_of

ROOT = Path(__file__).resolve().parents[3]

_SEED_MAX = 100_000

#: A life that ends so met the patch, and no checker.
_OF_THE_PATCH = ("NameError: ", "ImportError: ", "SyntaxError: ", "UnboundLocalError: ")


@dataclass(frozen=True)
class DefectResult:
    """What became of one defect. `seed` found it, after `lives` of them, by `violation`; None if
    none did. `error`: why it could not be planted, or did not run."""

    name: str
    what: str
    seed: int | None
    lives: int
    violation: str
    seconds: float
    error: str = ""

    @property
    def found(self) -> bool:
        return self.seed is not None


class CheckoutCopy:
    """A copy of what the simulation imports, in `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._hunt: subprocess.Popen[str] | None = None
        links = (path for path in (ROOT / "batonmq").iterdir() if path.is_symlink())
        for name in ("batonmq", *sorted(link.resolve().name for link in links)):
            shutil.copytree(ROOT / name, root / name, symlinks=True)
        (root / "lab").mkdir()
        shutil.copy(ROOT / "lab" / "__init__.py", root / "lab")
        shutil.copytree(ROOT / "lab" / "sim", root / "lab" / "sim")

    @contextlib.contextmanager
    def planted(self, defect: Defect) -> Iterator[None]:
        """Raises PatchError if it does not fit the checkout."""
        defect.apply(self.root)
        try:
            self._forget_compiled(defect)
            yield
        finally:
            defect.apply(self.root, back=True)
            self._forget_compiled(defect)

    def _forget_compiled(self, defect: Defect) -> None:
        """Compiled files are known by seconds and size, which may be the same for two texts."""
        for file in map(self.root.joinpath, defect.files):
            for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
                compiled.unlink()

    def lives(
        self, seeds: Sequence[int], *, plain: bool = True
    ) -> Iterator[tuple[int, str | None]]:
        """Seed and violation of each life, until the first that has one. Raises PatchError if the
        process that lives them ends without a word."""
        kind = "plain" if plain else "any"
        command = [sys.executable, "-P", "-m", "lab.sim.defects.hunt", kind, *map(str, seeds)]
        environment = {**os.environ, "PYTHONPATH": str(self.root)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled once for all defects
        ended = 0
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            ) as process,
        ):
            self._hunt = process
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    seed, violation = json.loads(line)
                    ended += 1
                    yield seed, violation
                    if violation is not None:
                        return
                if ended < len(seeds):
                    errors.seek(0)
                    raise PatchError(f"it does not run: {errors.read()[-2000:]}")
            finally:
                self.stop()

    def stop(self) -> None:
        """End the hunt that runs here, with the life that it lives. From any thread."""
        hunt, self._hunt = self._hunt, None
        if hunt is not None:
            # The hunt is a group of its own, and was not waited for yet.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(hunt.pid, signal.SIGKILL)


class Runner:
    """`seeds_max`: how many lives a defect has to be found in. `search`: from seed 1 on, and not
    first with the one that is known to find it."""

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        jobs: int = 1,
        seeds_max: int = 60,
        search: bool = False,
    ) -> None:
        self._say = say
        self._jobs = jobs
        self._seeds_max = seeds_max
        self._search = search
        self._whole: dict[tuple[int, bool], str | None] = {}  # what a life is like without a defect
        self._lock = threading.Lock()
        self._is_stopping = False

    def run(self, defects: Iterable[Defect]) -> list[DefectResult]:
        """In the order of `defects`. Whatever ends it, no hunt and no copy stays behind."""
        with tempfile.TemporaryDirectory(prefix="batonmq-defects-") as folder:
            all_copies = [CheckoutCopy(Path(folder) / str(number)) for number in range(self._jobs)]
            copies: queue.SimpleQueue[CheckoutCopy] = queue.SimpleQueue()
            for copy in all_copies:
                copies.put(copy)

            def seek(defect: Defect) -> DefectResult:
                copy = copies.get()
                try:
                    return self._seek(defect, copy)
                finally:
                    copies.put(copy)

            with ThreadPoolExecutor(self._jobs) as pool:
                try:
                    return list(pool.map(seek, defects))
                finally:
                    self._is_stopping = True
                    pool.shutdown(wait=False, cancel_futures=True)
                    for copy in all_copies:
                        copy.stop()

    def _seek(self, defect: Defect, copy: CheckoutCopy) -> DefectResult:
        began, lives, error = real_seconds(), 0, ""
        known = [defect.seed] if defect.seed is not None and not self._search else []
        others = (n for n in _seeds_for(defect) if n not in known)
        seeds = [*known, *itertools.islice(others, self._seeds_max - len(known))]
        seed, violation = None, ""
        try:
            while seed is None and seeds and not self._is_stopping:
                tried, violation = self._first(defect, copy, seeds)
                lives += len(tried)
                seeds = seeds[len(tried) :]
                if violation.startswith(_OF_THE_PATCH):
                    error = f"it breaks the code: {violation}"
                    break
                if violation and self._is_whole(copy, tried[-1], plain=defect.plain):
                    seed = tried[-1]
        except PatchError as failed:
            error = str(failed)
        by = violation if seed is not None else ""
        took_s = real_seconds() - began
        finding = DefectResult(defect.name, defect.what, seed, lives, by, took_s, error)
        self._say(line_of(finding))
        return finding

    def _first(
        self, defect: Defect, copy: CheckoutCopy, seeds: Sequence[int]
    ) -> tuple[list[int], str]:
        """The seeds lived with the defect, and the violation of the last one, empty if none."""
        tried = []
        with copy.planted(defect):
            for seed, violation in copy.lives(seeds, plain=defect.plain):
                tried.append(seed)
                if violation is not None:
                    return tried, violation.splitlines()[0]
        return tried, ""

    def _is_whole(self, copy: CheckoutCopy, seed: int, *, plain: bool) -> bool:
        """Whether that life has no violation in the checkout as it is: else it proves nothing."""
        key = seed, plain
        with self._lock:
            if key not in self._whole:
                ((_, self._whole[key]),) = copy.lives([seed], plain=plain)
                if self._whole[key] is not None:
                    self._say(f"seed {seed} fails without a defect: {self._whole[key]}")
            return self._whole[key] is None


def _seeds_for(defect: Defect) -> Iterator[int]:
    """The seeds from 1 on whose lives are drawn with all that it wants."""
    for seed in range(1, _SEED_MAX):
        plan = plan_of(seed, plain=defect.plain)
        counts = Counter(fault.kind for fault in plan.faults)
        for each in defect.lives:
            number, _, name = each.partition(" ")
            if number.isdigit():
                fits = counts[name] >= int(number)
            else:
                value = getattr(plan.settings, number)
                fits = str(value) == name if name else bool(value)
            if not fits:
                break
        else:
            yield seed


def line_of(finding: DefectResult) -> str:
    """One row of the table."""
    if finding.error:
        end = f"ERROR      {finding.error}"
    elif finding.found:
        end = f"seed {finding.seed:<5} {finding.violation[:100]}"
    else:
        end = f"NOT FOUND  in {finding.lives} lives"
    return f"{finding.name:34} {finding.seconds:5.0f} s  {end}"
