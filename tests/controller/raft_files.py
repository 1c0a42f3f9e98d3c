"""The files of one Raft node, for tests: an error of the disk that would end it is an assertion."""

from pathlib import Path
from typing import NoReturn

from batonmq.controller.raft.journal import DurableJournal
from batonmq.controller.raft.snapshot import FileSnapshots, LogEntry


def fatal(what: str) -> NoReturn:
    raise AssertionError(what)


def opened(folder: Path, head: tuple[LogEntry, LogEntry] | None = None) -> DurableJournal:
    return DurableJournal(folder, head, fatal)


def snapshots(folder: Path, state: str = "") -> FileSnapshots:
    """Those of a node whose log has none of the entries that come with one."""
    return FileSnapshots(
        folder / "snapshot",
        capture=lambda: {"state": state},
        restore=lambda state, index: None,
        holds=lambda index, term: False,
        on_fatal=fatal,
    )
