"""Snapshots of the controllers' state: checked bytes instead of pickles.

Layout: `BATONSS1`, CRC32 of the rest as u32 big-endian, then canonical JSON `{"entries": [[base64
command, index, term], ...2], "state": {...}, "v": 1}`. The entries are the last applied one and the
one before it, with which pysyncobj begins a shortened log.

`FileSnapshots` replaces pysyncobj's `Serializer`, which syncs nothing, and reports success for a
load that failed. Invariant: a snapshot is durable under its name before the log is compacted by it,
and before a follower answers that it has the snapshot. If a received one fails its checksum it is
refused, and the leader sends it again.
"""

import base64
import binascii
import json
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from pysyncobj.config import SERIALIZER_STATE

from batonmq.protocol.layout import SNAPSHOT_CRC, SNAPSHOT_MAGIC
from batonmq.runtime import disk
from batonmq.runtime.clock import boot_s
from batonmq.runtime.durable_file import replace_file

LogEntry = tuple[bytes, int, int]
"""(command, index, term), as pysyncobj keeps it."""

log = logging.getLogger(__name__)

_MAGIC: Final = SNAPSHOT_MAGIC
_CRC: Final = SNAPSHOT_CRC
_HEAD_SIZE: Final = len(_MAGIC) + _CRC.size
_VERSION: Final = 1
_FULL_RETRY_S: Final = 1.0


class BadSnapshot(ValueError):
    """The bytes are not a whole snapshot."""


def encode_snapshot(state: dict[str, Any], entries: tuple[LogEntry, LogEntry]) -> bytes:
    document = {
        "v": _VERSION,
        "state": state,
        "entries": [
            [base64.b64encode(command).decode("ascii"), index, term]
            for command, index, term in entries
        ],
    }
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return _MAGIC + _CRC.pack(zlib.crc32(body)) + body


def decode_snapshot(data: bytes) -> tuple[dict[str, Any], tuple[LogEntry, LogEntry]]:
    """Raises BadSnapshot when a byte is missing, changed or of another version."""
    if len(data) < _HEAD_SIZE or not data.startswith(_MAGIC):
        raise BadSnapshot("no snapshot header")
    body = data[_HEAD_SIZE:]
    if zlib.crc32(body) != _CRC.unpack_from(data, len(_MAGIC))[0]:
        raise BadSnapshot("checksum differs")
    try:
        document = json.loads(body)
        if document["v"] != _VERSION:
            raise BadSnapshot(f"version {document['v']} is not {_VERSION}")
        first, second = (
            (base64.b64decode(command, validate=True), int(index), int(term))
            for command, index, term in document["entries"]
        )
        state = document["state"]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise BadSnapshot(f"unreadable: {error}") from error
    return state, (first, second)


@dataclass(slots=True)
class _Transmission:
    data: bytes
    sent: int = 0


class FileSnapshots:
    """The newest snapshot of this node, in `path`, and those that are being sent or received.

    `capture()` returns the state as a JSON value, `restore(state, index)` replaces the state,
    `holds(index, term)` is true for entries of the own log; all run on the thread that applies
    commands. `on_fatal` is called if the disk fails. Raises BadSnapshot, or OSError for a file that
    cannot be read.
    """

    def __init__(
        self,
        path: Path,
        *,
        capture: Callable[[], dict[str, Any]],
        restore: Callable[[dict[str, Any], int], None],
        holds: Callable[[int, int], bool],
        on_fatal: Callable[[str], NoReturn],
        piece_bytes: int = 1 << 16,
    ) -> None:
        self._path = path
        self._piece_bytes = piece_bytes
        self._capture = capture
        self._restore = restore
        self._holds = holds
        self._on_fatal = on_fatal
        self.head: tuple[LogEntry, LogEntry] | None = None
        """The last two entries of the snapshot found here, older first."""
        try:
            self._data: bytes | None = disk.read_bytes(path)
        except FileNotFoundError:
            self._data = None
        if self._data is not None:
            _, (last, before_last) = decode_snapshot(self._data)
            self.head = (before_last, last)
        self.last_index = self.head[1][1] if self.head is not None else 0
        """The last entry in the newest snapshot, 0 if there is none."""
        self.failure = ""
        """Why the newest snapshot was not stored."""
        self._compact_to: int | None = None
        """The newest snapshot is stored, and pysyncobj is to shorten the log up to this entry."""
        self._again_s = 0.0
        self._outgoing: dict[object, _Transmission] = {}
        self._incoming: bytearray | None = None

    @property
    def size_bytes(self) -> int:
        """Length of the newest snapshot, 0 if there is none."""
        return len(self._data) if self._data is not None else 0

    def has_name(self, name: str) -> bool:
        """Whether the snapshot found here, if any, is of the log with that random name."""
        return self._data is None or name.encode() in self._data

    def _store(self, data: bytes) -> bool:
        """False if the disk is full; then the older snapshot stays in use."""
        try:
            replace_file(self._path, data)
        except OSError as error:
            reason = disk.described(error)
            if not disk.is_short(error):
                self._on_fatal(f"cannot store the snapshot: {reason}")
            log.warning("raft_snapshot_not_stored reason=%r", reason)
            self.failure = reason
            self._again_s = boot_s() + _FULL_RETRY_S
            return False
        self._data, self.failure = data, ""
        return True

    # pysyncobj's Serializer interface, in its spelling.

    def checkSerializing(self) -> tuple[int, int | None]:
        if self._compact_to is None:
            # "Serializing" makes pysyncobj wait: after a full disk it would try again at every
            # tick.
            waits = boot_s() < self._again_s
            state = SERIALIZER_STATE.SERIALIZING if waits else SERIALIZER_STATE.NOT_SERIALIZING
            return state, None
        compact_to, self._compact_to = self._compact_to, None
        # Followers start over with the new snapshot: the log begins where it ends.
        self._outgoing.clear()
        return SERIALIZER_STATE.SUCCESS, compact_to

    def serialize(self, data: tuple[object, LogEntry, LogEntry, object], index: int) -> None:
        """`data` is (None, last applied entry, the entry before it, nodes); `index` is that of the
        entry before it."""
        _, last, before_last, _ = data
        # In this turn: no entry may be applied between the state and its index.
        if not self._store(encode_snapshot(self._capture(), (last, before_last))):
            return
        self.last_index = last[1]
        self._compact_to = index

    def deserialize(self) -> tuple[None, LogEntry, LogEntry, tuple[()]]:
        assert self._data is not None
        state, (last, before_last) = decode_snapshot(self._data)
        self._restore(state, last[1])
        return None, last, before_last, ()

    def getTransmissionData(self, node: object) -> tuple[bytes, bool, bool] | None:
        """The next piece for a follower: (bytes, first, last). The last piece is empty."""
        # Between the new snapshot and the shortening of the log the two do not belong together.
        if self._data is None or self._compact_to is not None:
            return None
        # With its own reference to the bytes: a newer snapshot must not mix with pieces of this
        # one.
        transmission = self._outgoing.setdefault(node, _Transmission(self._data))
        first = transmission.sent == 0
        piece = transmission.data[transmission.sent : transmission.sent + self._piece_bytes]
        transmission.sent += len(piece)
        if not piece:
            del self._outgoing[node]
        return piece, first, not piece

    def setTransmissionData(self, data: tuple[bytes, bool, bool] | None) -> bool:
        """Takes a piece. True when a whole snapshot was checked and stored, and is to be loaded."""
        if data is None:
            return False
        piece, first, last = data
        if first:
            self._incoming = bytearray()
        # The first pieces went to an earlier process of this node: the leader begins again.
        if self._incoming is None:
            return False
        self._incoming += piece
        if not last:
            return False
        whole, self._incoming = bytes(self._incoming), None
        try:
            _, ((_, index, term), _) = decode_snapshot(whole)
        except BadSnapshot:
            return False
        if self._holds(index, term):
            return False  # to load it would cut entries that this node acknowledged
        if not self._store(whole):
            return False
        self.last_index = index
        return True

    def cancelTransmisstion(self, node: object) -> None:
        self._outgoing.pop(node, None)
