"""Which process lives wrote in this data folder: what tells a folder that was put back (R17).

The controllers remember the life that registered last. If this folder never saw that life, then it
is an older copy, restored from a backup: identity, log id and checksums are all in order, but what
that life acknowledged is missing.

Once this life is registered, it is the only one they can ask for. Until then the oldest one in the
file is the last that registered, and those after it may have registered without having heard so.
"""

from __future__ import annotations

from pathlib import Path

from epoch.durable_file import replace_file

UNKNOWN = "?"
"""Instead of the oldest life, if none was written down: an older version wrote in this folder."""
LIVES_MAX = 64
"""A life that ended before it could register is in the file, too. More of them in a row, while no
controller answers, are forgotten from the second on."""


class LivesFile:
    """One incarnation a line, the newest last, at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, incarnation: str) -> tuple[str, ...]:
        """Adds this life, durably, before it can acknowledge anything. The earlier ones, oldest
        first; empty if it is not known which registered last. Raises OSError."""
        try:
            earlier = tuple(self.path.read_text("ascii", errors="replace").split())
        except FileNotFoundError:
            earlier = (UNKNOWN,)
        lives = (*earlier, incarnation)
        if len(lives) > LIVES_MAX:
            lives = (lives[0], *lives[1 - LIVES_MAX :])
        self._write(*lives)
        return () if earlier[:1] == (UNKNOWN,) else earlier

    def registered(self, incarnation: str) -> None:
        """The controllers know this life: no earlier one matters any more. Raises OSError."""
        self._write(incarnation)

    def _write(self, *lives: str) -> None:
        replace_file(self.path, "".join(f"{life}\n" for life in lives).encode())
