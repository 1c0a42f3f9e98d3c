"""The folders of stopped replicas: their logs compared byte by byte (G3), wiped, put back."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from batonmq.protocol.record import CorruptRecord, scan_record
from batonmq.store.checkpoint import StoreCheckpoint

_IDENTITY = "brokerIdentity"


@dataclass(frozen=True)
class ReplicaLog:
    """A stopped replica's log from its first byte, and the confirmOffset in its checkpoint."""

    folder: Path
    data: bytes
    confirm_offset: int


class LogsDiffer(AssertionError):
    """Two replicas' logs differ below the smaller confirmOffset; the text says where."""


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


def wipe(folder: Path) -> None:
    """Empties the folder of a stopped broker but for its identity and logs of processes."""
    for entry in _stored(folder):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def put_back(folder: Path, backup: Path) -> None:
    """Gives a stopped broker the files of a copy of its folder."""
    wipe(folder)
    for entry in _stored(backup):
        if entry.is_dir():
            shutil.copytree(entry, folder / entry.name)
        else:
            shutil.copy2(entry, folder / entry.name)


def _stored(folder: Path) -> list[Path]:
    return [
        entry
        for entry in folder.iterdir()
        if not entry.name.startswith(_IDENTITY) and entry.suffix != ".log"
    ]
