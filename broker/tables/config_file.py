"""One of the broker's `config/*.json` files: read with `.bak` fall-back, written durably.

Read: fastjson's dialect, as Java writes it (`{0:12}`). Written: standard JSON, indented for people,
which Java reads as well. What was there before becomes `.bak`, as in Java. A file that holds the
same bytes already is not written again. Origin: Java `ConfigManager`.
"""

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import msgspec

from batonmq.protocol.bodies import DataVersion
from batonmq.protocol.errors import CorruptLogError, RemoteProtocolError
from batonmq.protocol.json_body import Body, encoded_parts
from batonmq.protocol.topic_name import is_file_name
from batonmq.runtime import disk
from batonmq.runtime.durable_file import (
    SnapshotOrder,
    UnreadableFileError,
    load_with_backup,
    replace_file,
)

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
                # As Java does: it must not become the `.bak` of the next write.
                disk.unlink(self.path)
        return loaded.value

    def _parse(self, data: bytes) -> B:
        try:
            return self._kind.decode(data)
        except RemoteProtocolError as error:
            raise ValueError(str(error)) from error

    def write_of(self, body: B) -> Callable[[], None]:
        """The write that makes `body`, which must not change any more, the durable content; for any
        thread. It writes nothing over a later body, or if the file has this content.

        It holds the interpreter for at most a millisecond at a time, so the loop continues
        meanwhile.
        """
        return self.write_of_made(lambda: body)

    def write_of_made(self, make: Callable[[], B]) -> Callable[[], None]:
        """The same for a body that the writing thread makes."""
        return self._order.ordered(functools.partial(self._write, make))

    def _write(self, make: Callable[[], B]) -> None:
        text = b"".join(_each_by_itself(_formatted(make())))
        if text == self._written:
            return
        replace_file(self.path, text, keep_previous=True, mode=self._mode)
        # Only now: what could not be written must not count as the file's content.
        self._written = text


def _formatted(body: Body) -> Iterator[bytes]:
    """Its JSON with an indent of one space, in pieces."""
    before, goes_on = b"{", False
    for member, text, more in encoded_parts(body):
        head, tail = b'\n "%b": {' % member.encode(), b"\n }"
        whole = msgspec.json.format(b'{"%b":%b}' % (member.encode(), text), indent=1)
        piece = whole.removeprefix(b"{").removesuffix(b"\n}")
        if goes_on:
            piece = piece.removeprefix(head)
        yield before + (piece.removesuffix(tail) if more else piece)
        before, goes_on = b",", more
    yield b"\n}" if before == b"," else b"{}"


def _each_by_itself(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Lets other threads run between two pieces."""
    for number, piece in enumerate(pieces):
        if number:
            time.sleep(0)
        yield piece


class ConfigManager(Generic[B]):
    """A table with a data version in a file; the base of the broker's config managers.

    Invariant: each change of the table moves `data_version` and will be in the next snapshot. One
    thread owns the table; `writes_due` gives what another one writes.
    """

    MODE: ClassVar[int] = 0o644
    """Of the file."""

    def __init__(self, path: Path, kind: type[B], clock_ms: Callable[[], int]) -> None:
        self._file = ConfigFile(path, kind, self.MODE)
        self._clock_ms = clock_ms
        self._dirty = True
        #: Counts changes; its state version is the masterEpoch, its timestamp wall time in ms.
        self.data_version = DataVersion(timestamp=clock_ms())

    def wrapper(self) -> B:
        """The whole table with its version, for slaves, tools and the file; a copy."""
        raise NotImplementedError

    def set_state_version(self, master_epoch: int) -> None:
        """Stamp the table with a new masterEpoch (a role change)."""
        self._new_version(master_epoch)

    def _new_version(self, state_version: int | None = None) -> None:
        self.data_version = self.data_version.next(self._clock_ms(), state_version)
        self._dirty = True

    def writes_due(self) -> list[Callable[[], None]]:
        """The write of a snapshot, for any thread; none if nothing changed.

        Only the snapshot is taken here: no fsync, which on a busy disk takes tenths of a second,
        and no encoder stops the owner's thread. The write raises OSError; the process must end
        then, for it is not repeated.
        """
        if not self._dirty:
            return []
        self._dirty = False
        return [self._file.write_of(self.wrapper())]


class NamedTable(ConfigManager[B], Generic[B, C]):
    """Name -> config. Entries are values: they are replaced, never changed in place.

    System entries are always there.
    """

    def __init__(
        self, path: Path, kind: type[B], clock_ms: Callable[[], int], system: Mapping[str, C]
    ) -> None:
        super().__init__(path, kind, clock_ms)
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
        """Add or replace an entry; False, and no new version, if it is as it was."""
        return self.put_all((config,))

    def put_all(self, configs: Iterable[C]) -> bool:
        """Add or replace several entries as one change."""
        changed = {
            name: config
            for config in configs
            if self._table.get(name := self.name_of(config)) != config
        }
        if changed:
            self._table.update(changed)
            self._new_version()
        return bool(changed)

    def delete(self, name: str) -> bool:
        """Remove an entry; a system entry stays."""
        if name in self._system or self._table.pop(name, None) is None:
            return False
        self._new_version()
        return True

    def _adopt(self, table: Mapping[str, C], data_version: DataVersion) -> bool:
        """Take over another table; system entries that it lacks stay. False if it was the same.
        Names that no topic and no group can have are left out (R46): earlier versions let them in.

        Versions and contents are compared: replicas count their own changes, so equal versions
        prove nothing.
        """
        after = self._system | {name: table[name] for name in table if is_file_name(name)}
        if after != self._table and len(after) < len(self._system | dict(table)):
            bad = [name for name in table if not is_file_name(name)]
            log.error("names_skipped file=%s names=%r", self._file.path, bad[:10])
        if after == self._table and data_version == self.data_version:
            return False
        self._table, self.data_version, self._dirty = after, data_version, True
        return True

    def _adopt_loaded(self, table: Mapping[str, C], data_version: DataVersion) -> None:
        """The same for what was on disk: it is written again only if it lacked system entries."""
        self._adopt(table, data_version)
        self._dirty = self._table.keys() != table.keys()
