"""Which local cluster runs now: `~/.batonmq/current`, and the files in `run` of its data folder.

`~/.batonmq/current` holds the path of the `cluster.json` of the last cluster that became whole, so
that `mqctl` finds it from any folder. It is a hint, and left out if the home cannot be written.
"""

import logging
import os
import shlex
from pathlib import Path
from typing import Final

UNFINISHED: Final = "up.unfinished"
"""In `run` while `batonmq up` runs: if it stays, that was killed."""

log = logging.getLogger(__name__)


def serves(pid_file: Path) -> int | None:
    """The pid in a server's pid file, if that process runs: another one may have got the same
    pid, and a server's command line names its pid file, maybe from its folder on."""
    try:
        pid = int(pid_file.read_text())
        words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).rstrip("\0").split("\0")
        if len(words) == 1:  # forked with its modules loaded: its title is its command line
            words = shlex.split(words[0])
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        names_it = any(_is_named(pid_file, word, pid) for word in words[1:])
    except (OSError, ValueError):
        return None
    return pid if names_it and state != "Z" else None


def _is_named(pid_file: Path, word: str, pid: int) -> bool:
    """Whether a word of a process's command line is the path of this file."""
    try:
        return Path(f"/proc/{pid}/cwd").readlink() / word == pid_file
    except PermissionError:
        # Only its own user may read where another user's process works: the end of the path
        # decides. That server would otherwise count as ended.
        return f"/{pid_file}".endswith(f"/{word}")


def hint_file() -> Path | None:
    """None for a user without a home."""
    try:
        return Path.home() / ".batonmq" / "current"
    except RuntimeError:
        return None


def announce(cluster_file: Path) -> None:
    """Points the hint at this cluster, in one step."""
    # Here, because every mqctl command loads this module, and only reads the hint.
    from batonmq.runtime.durable_file import show_file

    hint = hint_file()
    if hint is None:
        return
    try:
        show_file(hint, f"{cluster_file}\n")
    except OSError as error:
        log.debug("cluster_hint_not_written file=%s reason=%s", hint, error)


def withdraw(cluster_file: Path) -> None:
    """Takes the hint away if it still points at this cluster."""
    hint = hint_file()
    if hint is None or current_cluster_file() != cluster_file:
        return
    try:
        hint.unlink(missing_ok=True)
    except OSError as error:
        log.debug("cluster_hint_not_removed file=%s reason=%s", hint, error)


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
