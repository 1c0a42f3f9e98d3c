"""One of the broker's `config/*.json` files: read with `.bak` fall-back, written durably.

Read: fastjson's dialect, as Java writes it (`{0:12}`). Written: standard JSON, indented for people,
which Java reads as well. What was there before becomes `.bak`, as in Java. A file that holds the
same bytes already is not written again. Origin: Java `ConfigManager`.
"""

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from epoch.durable_file import UnreadableFileError, load_with_backup, replace_file
from protocol.bodies import DataVersion
from protocol.body import Json
from protocol.errors import CorruptLogError, RemoteProtocolError

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Json)


def wall_clock_ms() -> int:
    """The time that data versions show to people."""
    return time.time_ns() // 1_000_000


class ConfigFile(Generic[B]):
    """A file whose content is one JSON body of type `kind`."""

    def __init__(self, path: Path, kind: type[B]) -> None:
        self.path = path
        self._kind = kind
        self._written: bytes | None = None

    def load(self) -> B | None:
        """The body, or None if neither the file nor its `.bak` exists.

        Raises CorruptLogError, with the reasons, if something is there but none of it is usable:
        starting without it would quietly forget topics, groups or offsets.
        """
        try:
            loaded = load_with_backup(self.path, self._parse)
        except UnreadableFileError as error:
            raise CorruptLogError(str(self.path), 0, "; ".join(error.reasons)) from error
        if loaded is None:
            return None
        if loaded.from_backup:
            log.warning("config_file_from_backup file=%s reason=%s", self.path, loaded.reason)
            if self.path.exists():
                self.path.unlink()  # as Java does: it must not become the `.bak` of the next write
        return loaded.value

    def _parse(self, data: bytes) -> B:
        try:
            return self._kind.decode(data)
        except RemoteProtocolError as error:
            raise ValueError(str(error)) from error

    def write(self, body: bytes) -> bool:
        """Make `body` (JSON) the durable content; False if it is that already.

        May run on another thread than the tables' owner, one call at a time.
        """
        if body == self._written:
            return False
        text = msgspec.json.format(body, indent=1)
        replace_file(self.path, text, keep_previous=True)
        self._written = body
        return True


class ConfigManager(Generic[B]):
    """A table with a data version in a file; the base of the broker's config managers.

    Invariant: each change of the table moves `data_version` and will be in the next snapshot. One
    thread owns the table. `persist` does all at once; to keep fsync off that thread, take a
    `snapshot` there and hand it to `write` elsewhere.
    """

    def __init__(self, path: Path, kind: type[B], clock_ms: Callable[[], int]) -> None:
        self._file = ConfigFile(path, kind)
        self._clock_ms = clock_ms
        self._dirty = True
        #: Counts changes; its state version is the masterEpoch, its timestamp wall time in ms.
        self.data_version = DataVersion(timestamp=clock_ms())

    def wrapper(self) -> B:
        """The whole table with its version, as slaves, tools and the file get it."""
        raise NotImplementedError

    def set_state_version(self, master_epoch: int) -> None:
        """Stamp the table with a new masterEpoch (a role change)."""
        self._new_version(master_epoch)

    def _new_version(self, state_version: int | None = None) -> None:
        self.data_version = self.data_version.next(self._clock_ms(), state_version)
        self._dirty = True

    def snapshot(self) -> bytes | None:
        """What `write` should bring to disk, None if nothing changed since the last snapshot."""
        if not self._dirty:
            return None
        self._dirty = False
        return self.encode_json()

    def encode_json(self) -> bytes:
        """The body that slaves fetch and the file holds."""
        return self.wrapper().encode()

    def write(self, snapshot: bytes) -> None:
        """Make a snapshot durable; on any thread, one at a time.

        After an OSError call `mark_dirty` on the owner's thread.
        """
        self._file.write(snapshot)

    def mark_dirty(self) -> None:
        """A snapshot did not reach the disk: the next one is due even if nothing changes."""
        self._dirty = True

    def writes_due(self) -> list[Callable[[], None]]:
        """A snapshot's write, for another thread; none if nothing changed. Taken here, so that no
        fsync keeps the owner's thread: on a busy disk that is tenths of a second."""
        snapshot = self.snapshot()
        return [] if snapshot is None else [functools.partial(self.write, snapshot)]

    def persist(self) -> bool:
        """Snapshot and write; False if nothing had changed. After an OSError it is still to do."""
        snapshot = self.snapshot()
        if snapshot is None:
            return False
        try:
            self.write(snapshot)
        except OSError:
            self.mark_dirty()
            raise
        return True
