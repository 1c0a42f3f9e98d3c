"""Reads defects and applies them to texts. Pure but for `defects_in`.

A hunk is found by its lines, not by their numbers: the code around it may move.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lab.sim.kinds import NEVER_PLAIN
from lab.sim.settings import NOT_PLAIN

_FOUND_BY = re.compile(r"Found by seed (\d+)$")
_LIVES = re.compile(r"In lives with (.+)$")
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


class PatchError(Exception):
    """It is no patch of a defect, or it does not apply."""


@dataclass
class Hunk:
    """`line`: where `old` began, counted from 0, when the patch was made."""

    line: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Defect:
    """`what` is wrong, and the rule that it breaks. `seed`: a life that found it once."""

    name: str
    what: str
    seed: int | None
    lives: tuple[str, ...]
    """What lives must have to be worth trying: `3 pause` (faults drawn), or a setting."""
    hunks: dict[str, list[Hunk]]
    """By the path of the file in the checkout."""

    @property
    def plain(self) -> bool:
        """Whether plain lives suffice: it needs neither features nor worn disks."""
        heads = (each.partition(" ") for each in self.lives)
        return not any(head in NOT_PLAIN or kind in NEVER_PLAIN for head, _, kind in heads)

    def plant(self, text_of: Callable[[str], str]) -> dict[str, str]:
        """The new texts of the files that it changes. Raises PatchError where one does not fit."""
        return {path: _applied(text_of(path), path, hunks) for path, hunks in self.hunks.items()}


def defects_in(folder: Path) -> list[Defect]:
    """All of a folder, by name. Raises PatchError."""
    return [parse(path.stem, path.read_text("utf-8")) for path in sorted(folder.glob("*.patch"))]


def parse(name: str, text: str) -> Defect:
    what, *lines = text.splitlines()
    found_by = next(filter(None, map(_FOUND_BY.match, lines[:2])), None)
    with_ = next(filter(None, map(_LIVES.match, lines[:2])), None)
    hunks: dict[str, list[Hunk]] = {}
    of_file: list[Hunk] = []
    for number, line in enumerate(lines, 2):
        head = _HUNK.match(line)
        if line.startswith("+++ b/"):
            of_file = hunks.setdefault(line.removeprefix("+++ b/"), [])
        elif head is not None:
            of_file.append(Hunk(int(head[1]) - 1))
        elif of_file and line[:1] in (" ", "-", "+", "") and not line.startswith("--- a/"):
            if line[:1] != "+":
                of_file[-1].old.append(line[1:])
            if line[:1] != "-":
                of_file[-1].new.append(line[1:])
        elif of_file and not line.startswith("--- a/"):
            raise PatchError(f"{name}: line {number} is not of a unified diff: {line!r}")
    if not hunks or not all(hunks.values()):
        raise PatchError(f"{name}: there is no hunk, or one without a file")
    lives = tuple(with_[1].split(", ")) if with_ else ()
    return Defect(name, what, int(found_by[1]) if found_by else None, lives, hunks)


def noting(text: str, seed: int) -> str:
    """The patch with the seed that found it."""
    what, _, rest = text.partition("\n")
    if _FOUND_BY.match(rest.partition("\n")[0]):
        rest = rest.partition("\n")[2]
    return f"{what}\nFound by seed {seed}\n{rest}"


def _applied(text: str, path: str, hunks: list[Hunk]) -> str:
    lines = text.split("\n")
    moved = 0
    for hunk in hunks:
        size, wanted = len(hunk.old), hunk.line + moved
        places = [at for at in range(len(lines) - size + 1) if lines[at : at + size] == hunk.old]
        if not places:
            raise PatchError(f"{path} does not contain these lines:\n" + "\n".join(hunk.old))
        at = min(places, key=lambda place: abs(place - wanted))
        lines[at : at + size] = hunk.new
        moved = at - hunk.line + len(hunk.new) - size
    return "\n".join(lines)
