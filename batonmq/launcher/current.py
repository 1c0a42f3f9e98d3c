"""`~/.batonmq/current`: which local cluster runs now, so that `mqctl` finds it from any folder.

The file holds the path of that cluster's `cluster.json`. It is a hint: the last cluster that
became whole wins, and a home that cannot be written costs nothing but the hint.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


def hint_file() -> Path | None:
    """None for a user without a home."""
    try:
        return Path.home() / ".batonmq" / "current"
    except RuntimeError:
        return None


def announce(cluster_file: Path) -> None:
    """Points the hint at this cluster, in one step."""
    hint = hint_file()
    if hint is None:
        return
    temporary = hint.with_name(f"{hint.name}.{os.getpid()}.tmp")
    try:
        hint.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(f"{cluster_file}\n")
        os.replace(temporary, hint)
    except OSError as error:
        log.debug("cluster_hint_not_written file=%s why=%s", hint, error)


def withdraw(cluster_file: Path) -> None:
    """Takes the hint away if it still points at this cluster."""
    hint = hint_file()
    if hint is None or current_cluster_file() != cluster_file:
        return
    try:
        hint.unlink(missing_ok=True)
    except OSError as error:
        log.debug("cluster_hint_not_removed file=%s why=%s", hint, error)


def current_cluster_file() -> Path | None:
    """The `cluster.json` that the hint names, whether it exists or not."""
    hint = hint_file()
    if hint is None:
        return None
    try:
        text = hint.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return Path(text) if text else None
