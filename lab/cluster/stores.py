"""The folders of stopped replicas: their logs compared byte by byte (G3), wiped, put back."""

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from batonmq.protocol.records.codec import scan_record
from batonmq.protocol.records.faults import CorruptRecord
from batonmq.store.checkpoint import StoreCheckpoint

_IDENTITY = "brokerIdentity"
_PIECE = 16 << 20


@dataclass(frozen=True)
class ReplicaLog:
    """A stopped replica's log from its first byte, and the confirmOffset in its checkpoint."""

    folder: Path
    segments: list[Path]
    confirm_offset: int

    @property
    def data(self) -> bytes:
        return b"".join(path.read_bytes() for path in self.segments)

    def pieces(self) -> Iterator[bytes]:
        """`data`, some MiB at a time."""
        for path in self.segments:
            with path.open("rb") as file:
                while piece := file.read(_PIECE):
                    yield piece


class LogsDiffer(AssertionError):
    """Two replicas' logs differ below the smaller confirmOffset; the text says where."""


def read_log(folder: Path) -> ReplicaLog:
    segments = _segments(folder)
    if segments and int(segments[0].name) != 0:
        raise LogsDiffer(f"{folder}: the log does not begin with its first byte")
    return ReplicaLog(folder, segments, StoreCheckpoint(folder / "checkpoint").confirm_phy_offset)


def _segments(store: Path) -> list[Path]:
    return sorted(path for path in (store / "commitlog").iterdir() if path.is_file())


def log_bytes(store: Path, end: int) -> bytes:
    """A log up to `end`, from its first byte that has not expired on."""
    segments = _segments(store)
    return b"".join(path.read_bytes() for path in segments)[: end - int(segments[0].name)]


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

    The smallest confirmOffset, which ends a record in each log. Raises LogsDiffer. Holds one
    segment in memory.
    """
    logs = sorted(map(read_log, folders), key=lambda log: log.confirm_offset)
    for log in logs[:-1]:
        at = _first_difference(log, logs[-1])
        if at < log.confirm_offset:
            common = log.confirm_offset
            raise LogsDiffer(f"{log.folder} and {logs[-1].folder} differ at {at} of {common}")
    wanted = {log.confirm_offset for log in logs}
    if not wanted <= _record_ends_among(wanted, logs[-1]):
        raise LogsDiffer(f"a confirmOffset of {[log.folder.name for log in logs]} ends no record")
    return logs[0].confirm_offset


def _first_difference(one: ReplicaLog, other: ReplicaLog) -> int:
    """The first offset at which they differ, or where the shorter one ends."""
    offset = 0
    for piece, opposite in zip(one.pieces(), other.pieces(), strict=False):
        size = min(len(piece), len(opposite))
        if piece[:size] != opposite[:size]:
            return offset + next(at for at in range(size) if piece[at] != opposite[at])
        offset += size
        if len(piece) != len(opposite):
            return offset
    return offset


def _record_ends_among(wanted: Set[int], log: ReplicaLog) -> set[int]:
    """Which of the offsets end a record, from the first on without a gap."""
    found = set(wanted & {0})
    begin = 0
    for path in log.segments:
        data, end = path.read_bytes(), 0
        for end in record_ends(data):
            if begin + end in wanted:
                found.add(begin + end)
        if end < len(data):
            break
        begin += end
    return found


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
        copy_sparsely(entry, folder / entry.name)


def copy_sparsely(source: Path, target: Path) -> None:
    """Copies a file or a folder to a path that is not there yet. Zeros take no room in the copy:
    the files of 10,000 queues are 60 GB long and hold a few MB.

    Raises OSError."""
    run = subprocess.run(
        ["cp", "--archive", "--sparse=always", "--no-target-directory", source, target],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if run.returncode:
        raise OSError(f"{source} was not copied to {target}: {run.stderr[:500].strip()}")


def _stored(folder: Path) -> list[Path]:
    return [
        entry
        for entry in folder.iterdir()
        if not entry.name.startswith(_IDENTITY) and entry.suffix != ".log"
    ]
