"""Reads the controllers' history files where none of them answers: `history-<id>.jsonl`, elders.

A file is JSON, one event a line. A last line without its end was torn by a crash, and a line that
is no JSON object is damage: both are named and left out, never fatal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from protocol.history_names import older_first

__all__ = ["read_history_files"]


def read_history_files(
    paths: Iterable[Path],
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """What each history tells, oldest first, by its path; and what was wrong, as sentences.

    A file is read with the numbered ones that were full before it; a folder stands for every
    history in it. Raises OSError for what cannot be read.
    """
    sources: dict[str, list[dict[str, Any]]] = {}
    problems: list[str] = []
    for path in paths:
        for history in _histories_in(path) if path.is_dir() else [path]:
            events = sources.setdefault(str(history), [])
            elders = older_first(history.name, os.listdir(history.parent))
            for file in (*(history.parent / name for _, name in elders), history):
                events += _events_in(file, problems)
        if path.is_dir() and not _histories_in(path):
            problems.append(f"{path}: no history-*.jsonl in this folder")
    return sources, problems


def _histories_in(folder: Path) -> list[Path]:
    """Those that grow; a numbered one belongs to them."""
    files = sorted(folder.glob("history-*.jsonl"))
    names = [file.name for file in files]
    numbered = {name for each in names for _, name in older_first(each, names)}
    return [file for file in files if file.name not in numbered]


def _events_in(file: Path, problems: list[str]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    unreadable = 0
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                problems.append(f"{file}: the last line is torn ({len(line)} bytes left out)")
                break
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            if isinstance(event, dict):
                events.append(event)
            else:
                unreadable += 1
    if unreadable:
        problems.append(f"{file}: {unreadable} lines are no events")
    return events
