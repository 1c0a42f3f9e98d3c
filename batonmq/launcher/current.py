"""`~/.batonmq/current`: which local cluster runs now, so that `mqctl` finds it from any folder.

The file holds the path of that cluster's `cluster.json`. It is a hint: it names the last cluster
that became whole, and is left out if the home cannot be written.
"""

from __future__ import annotations

import logging
from pathlib import Path

from batonmq.runtime.durable_file import show_file

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
    try:
        hint.parent.mkdir(parents=True, exist_ok=True)
        show_file(hint, f"{cluster_file}\n")
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
