"""One of the broker's `config/*.json` files. If its content is damaged its `.bak` is used.

It reads fastjson's dialect, as Java writes it (`{0:12}`), and writes standard JSON, indented, which
Java reads as well. The content before becomes `.bak`, as in Java. Origin: Java `ConfigManager`.
"""

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import msgspec

from batonmq.protocol.bodies import DataVersion
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.json_body import Body, encoded_parts
from batonmq.protocol.topic_name import is_file_name
from batonmq.runtime import disk
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.durable_file import SnapshotOrder, load_with_backup, replace_file

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)
C = TypeVar("C")


class ConfigFile(Generic[B]):
    """A file whose content is one JSON body of type `kind`."""

    def __init__(self, path: Path, kind: type[B], mode: int = 0o644) -> None:
        self.path = path
        self._mode = mode
        self._kind = kind
        self._written: bytes | None = None
        self._order = SnapshotOrder()

    def load(self) -> B | None:
        """The body, or None if neither the file nor its `.bak` exists. Raises CorruptLogError, with
        the reasons, if neither of those that exist can be used; OSError if the disk cannot read
        one."""
        loaded = load_with_backup(self.path, self._parse)
        if loaded is None:
            return None
        body, why = loaded
        if why:
            log.warning("config_file_from_backup file=%s reason=%s", self.path, why)
            if self.path.exists():
                # As Java does: the bad file must not become the `.bak` of the next write.
                disk.unlink(self.path)
        return body

    def _parse(self, data: bytes) -> B:
        try:
            return self._kind.decode(data)
        except RemoteProtocolError as error:
            raise ValueError(str(error)) from error

    def write_of(self, make: Callable[[], B]) -> Callable[[], None]:
        """A function that writes what `make` returns durably, for any thread. It writes nothing if
        a later body was written, or the file has this content."""
        return self._order.ordered(functools.partial(self._write, make))

    def _write(self, make: Callable[[], B]) -> None:
        text = b"".join(_yielding(_formatted(make())))
        if text == self._written:
            return
        replace_file(self.path, text, keep_previous=True, mode=self._mode)
        # Only now: after a failed write the file has another content.
        self._written = text


def _formatted(body: Body) -> Iterator[bytes]:
    """The JSON of `body` with an indent of one space, in pieces."""
    before, is_continued = b"{", False
    for member, text, more in encoded_parts(body):
        head, tail = b'\n "%b": %b' % (member.encode(), text[:1]), b"\n " + text[-1:]
        whole = msgspec.json.format(b'{"%b":%b}' % (member.encode(), text), indent=1)
        piece = whole.removeprefix(b"{").removesuffix(b"\n}")
        if is_continued:
            piece = piece.removeprefix(head)
        yield before + (piece.removesuffix(tail) if more else piece)
        before, is_continued = b",", more
    yield b"\n}" if before == b"," else b"{}"


def _yielding(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """`pieces`; between two of them other threads may run."""
    # A piece takes at most a millisecond. Without a break the encoder of a large table would keep
    # the interpreter lock, and heartbeats of the loop would wait.
    for number, piece in enumerate(pieces):
        if number:
            time.sleep(0)
        yield piece


class ConfigManager(Generic[B]):
    """A table with a data version in a file, which `load` reads; the base of the broker's config
    managers.

    Invariant: each change of the table moves `data_version` and will be in the next snapshot. One
    thread owns the table; another one may write its snapshots (`writes_due`).
    """

    MODE: ClassVar[int] = 0o644
    """The file's mode."""

    def __init__(self, path: Path, kind: type[B]) -> None:
        self._file = ConfigFile(path, kind, self.MODE)
        self._dirty = True
        #: Counts changes. Its state version is the masterEpoch, its timestamp wall time in ms.
        self.data_version = DataVersion(timestamp=wall_ms())

    def load(self) -> None:
        """Reads the file. Raises CorruptLogError if it cannot be used, nor its `.bak`."""
        body = self._file.load()
        if body is not None:
            self._take_loaded(body)

    def _take_loaded(self, body: B) -> None:
        raise NotImplementedError

    def wrapper(self) -> B:
        """A copy of the whole table with its version, for slaves, tools and the file."""
        raise NotImplementedError

    def set_state_version(self, master_epoch: int) -> None:
        """A role change: the table gets the new masterEpoch as its state version."""
        self._new_version(master_epoch)

    def _new_version(self, state_version: int | None = None) -> None:
        self.data_version = self.data_version.next(wall_ms(), state_version)
        self._dirty = True

    def writes_due(self) -> list[Callable[[], None]]:
        """The write of a snapshot, for any thread; none if nothing changed. After an OSError of the
        write the process must end, since it is not repeated."""
        # Only the snapshot is taken here. Encoding and fsync, which on a busy disk takes tenths of
        # a second, must not stop the loop.
        if not self._dirty:
            return []
        self._dirty = False
        body = self.wrapper()
        return [self._file.write_of(lambda: body)]

    def write(self) -> None:
        """Does the due writes now. Raises OSError."""
        for write in self.writes_due():
            write()


class Unwritten:
    """The changes of one mastership whose records may not be in the log yet, in the order of the
    log (R55). A master changes a table when it puts the record of the change. If a full disk keeps
    the record from the log, and the broker leaves its role, the change must be undone."""

    def __init__(self) -> None:
        self._undo: deque[tuple[int, Callable[[], object]]] = deque()

    def note(self, end: int, undo: Callable[[], object]) -> None:
        """A change was made here; its record ends at `end`. `undo` takes it back."""
        self._undo.append((end, undo))

    def written(self, end: int) -> None:
        """The log has all below `end`."""
        while self._undo and self._undo[0][0] <= end:
            self._undo.popleft()

    def dropped(self, end: int) -> bool:
        """What was put after `end` never reached the log: undoes the changes, the last one first.
        Returns whether there were any."""
        self.written(end)
        found = bool(self._undo)
        while self._undo:
            # A later change of the same name has the earlier one as what was before.
            self._undo.pop()[1]()
        return found


class NamedTable(ConfigManager[B], Generic[B, C]):
    """Name to config. Entries are values: they are replaced, never changed in place. System entries
    are always there."""

    def __init__(self, path: Path, kind: type[B], system: Mapping[str, C]) -> None:
        super().__init__(path, kind)
        self._system = dict(system)
        self._table: dict[str, C] = dict(system)

    @staticmethod
    def name_of(config: C) -> str:
        raise NotImplementedError

    def get(self, name: str) -> C | None:
        return self._table.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def __len__(self) -> int:
        return len(self._table)

    @property
    def system(self) -> Collection[str]:
        """The names of the entries that are always there."""
        return self._system.keys()

    @property
    def table(self) -> Mapping[str, C]:
        """All entries by name; read only."""
        return self._table

    def put(self, config: C) -> bool:
        """Adds or replaces an entry; False, and no new version, if it has not changed."""
        return self.put_all((config,))

    def put_all(self, configs: Iterable[C]) -> bool:
        """Adds or replaces several entries as one change."""
        changed = {
            name: config
            for config in configs
            if self._table.get(name := self.name_of(config)) != config
        }
        if changed:
            self._table.update(changed)
            self._new_version()
        return bool(changed)

    def undo_of(self, names: Iterable[str]) -> Callable[[], None]:
        """A function that gives these entries back what they are now."""
        before = {name: self._table.get(name) for name in names}

        def undo() -> None:
            for name, config in before.items():
                if config is None:
                    self.delete(name)
                else:
                    self.put(config)

        return undo

    def delete(self, name: str) -> bool:
        """Removes an entry; a system entry stays."""
        if name in self._system or self._table.pop(name, None) is None:
            return False
        self._new_version()
        return True

    def _adopt(self, table: Mapping[str, C], data_version: DataVersion) -> bool:
        """Replaces the table by `table`; system entries that it lacks stay. False if it was the
        same."""
        # R46: earlier versions accepted names that no topic and no group can have.
        after = self._system | {name: table[name] for name in table if is_file_name(name)}
        if after != self._table and len(after) < len(self._system | dict(table)):
            bad = [name for name in table if not is_file_name(name)]
            log.error("names_skipped file=%s names=%r", self._file.path, bad[:10])
        # The contents too: each replica counts its own changes, so equal versions prove nothing.
        if after == self._table and data_version == self.data_version:
            return False
        self._table, self.data_version, self._dirty = after, data_version, True
        return True

    def _adopt_loaded(self, table: Mapping[str, C], data_version: DataVersion) -> None:
        """The same for the table on disk; it is written again only if it lacked system entries."""
        self._adopt(table, data_version)
        self._dirty = self._table.keys() != table.keys()
