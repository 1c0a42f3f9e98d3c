"""The logs of stopped replicas, compared byte by byte (G3).

Reads files only: segments, and the confirmOffset that the checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.record import CorruptRecord, scan_record
from store.checkpoint import StoreCheckpoint


@dataclass(frozen=True)
class ReplicaLog:
    """A stopped replica's log from its first byte; `confirm_offset` as it last wrote it."""

    folder: Path
    data: bytes
    confirm_offset: int


class LogsDiffer(AssertionError):
    """Two replicas' logs differ below what both call confirmed; the text says where."""


def read_log(folder: Path) -> ReplicaLog:
    files = sorted(path for path in (folder / "commitlog").iterdir() if path.is_file())
    if files and int(files[0].name) != 0:
        raise LogsDiffer(f"{folder}: the log does not begin with its first byte")
    checkpoint = StoreCheckpoint(folder / "checkpoint")
    confirm_offset = checkpoint.confirm_phy_offset
    return ReplicaLog(folder, b"".join(path.read_bytes() for path in files), confirm_offset)


def record_ends(data: bytes) -> Iterator[int]:
    """Where each whole record, or blank at a segment's end, ends; stops where none follows."""
    position, view = 0, memoryview(data)
    while True:
        try:
            head = scan_record(view, position, check_crc=True)
        except CorruptRecord:
            return
        if head is None or head.size > len(data) - position:
            return
        position += head.size
        yield position


def check_logs_equal(folders: Iterable[Path]) -> int:
    """G3 for every pair, and every record up to confirmOffset whole with a good CRC.

    The smallest confirmOffset, which ends a record in each log. Raises LogsDiffer.
    """
    logs = [read_log(folder) for folder in folders]
    for i, one in enumerate(logs):
        for other in logs[i + 1 :]:
            common = min(one.confirm_offset, other.confirm_offset)
            if one.data[:common] != other.data[:common]:
                at = next(k for k in range(common) if one.data[k] != other.data[k])
                raise LogsDiffer(f"{one.folder} and {other.folder} differ at {at} of {common}")
    longest = max(logs, key=lambda log: log.confirm_offset)
    ends = {0, *record_ends(longest.data)}
    if not {log.confirm_offset for log in logs} <= ends:
        raise LogsDiffer(f"a confirmOffset of {[log.folder.name for log in logs]} ends no record")
    return min(log.confirm_offset for log in logs)
