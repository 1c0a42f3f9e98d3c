"""Which process lives wrote in this data folder: what tells a folder that was put back (R17).

The controllers remember the life that registered last. If this folder never saw that life, then it
is an older copy, restored from a backup: identity, log id and checksums are all in order, but what
that life acknowledged is missing.
"""

from __future__ import annotations

from pathlib import Path

from epoch.durable_file import replace_file

LIVES_MAX = 16
"""A life that ended before it could register is in the file, too: so many in a row do no harm."""


class LivesFile:
    """One incarnation a line, the newest last, at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, incarnation: str) -> tuple[str, ...]:
        """Adds this life, durably, before it can acknowledge anything. The earlier ones, oldest
        first; empty in a new folder. Raises OSError."""
        try:
            earlier = tuple(self.path.read_text("ascii", errors="replace").split())
        except FileNotFoundError:
            earlier = ()
        lives = (*earlier, incarnation)[-LIVES_MAX:]
        replace_file(self.path, "".join(f"{life}\n" for life in lives).encode())
        return earlier
