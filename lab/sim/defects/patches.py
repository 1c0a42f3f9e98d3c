"""Reads defects, and applies them by git. A hunk is found by its lines, not by their numbers: the
code around it may move.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lab.sim.kinds import NEVER_PLAIN
from lab.sim.settings import NOT_PLAIN

_FOUND_BY = re.compile(r"Found by seed (\d+)$")
_LIVES = re.compile(r"In lives with (.+)$")
_FILE = re.compile(r"^\+\+\+ b/(.+)$", re.MULTILINE)


class PatchError(Exception):
    """It is no patch of a defect, or it does not apply."""


@dataclass(frozen=True)
class Defect:
    """`what` is wrong, and the rule that it breaks. `seed`: a life that found it once."""

    name: str
    what: str
    seed: int | None
    lives: tuple[str, ...]
    """What lives must have to be worth trying: `3 pause` (faults drawn), or a setting."""
    text: str
    """The whole patch."""

    @property
    def files(self) -> list[str]:
        """Which it changes: their paths in the checkout."""
        return _FILE.findall(self.text)

    @property
    def plain(self) -> bool:
        """Whether plain lives suffice: it needs neither features nor worn disks."""
        heads = (each.partition(" ") for each in self.lives)
        return not any(head in NOT_PLAIN or kind in NEVER_PLAIN for head, _, kind in heads)

    def apply(self, root: Path, *, back: bool = False) -> None:
        """Changes the files below `root`, or puts them `back`. Raises PatchError, and changes none,
        if it does not fit one of them."""
        done = subprocess.run(
            ["git", "apply", *(["-R"] if back else []), "-"],
            cwd=root,
            # A repository around it would make paths those of its own root.
            env=os.environ | {"GIT_CEILING_DIRECTORIES": str(root.resolve().parent)},
            input=self.text,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise PatchError(f"{self.name}: {done.stderr.strip()}")


def defects_in(folder: Path) -> list[Defect]:
    """All of a folder, by name. Raises PatchError."""
    return [parse(path.stem, path.read_text("utf-8")) for path in sorted(folder.glob("*.patch"))]


def parse(name: str, text: str) -> Defect:
    what, *lines = text.splitlines()
    found_by = next(filter(None, map(_FOUND_BY.match, lines[:2])), None)
    with_ = next(filter(None, map(_LIVES.match, lines[:2])), None)
    if not _FILE.search(text):
        raise PatchError(f"{name}: it changes no file")
    lives = tuple(with_[1].split(", ")) if with_ else ()
    return Defect(name, what, int(found_by[1]) if found_by else None, lives, text)


def noting(text: str, seed: int) -> str:
    """The patch with the seed that found it."""
    what, _, rest = text.partition("\n")
    if _FOUND_BY.match(rest.partition("\n")[0]):
        rest = rest.partition("\n")[2]
    return f"{what}\nFound by seed {seed}\n{rest}"
