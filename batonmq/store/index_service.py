"""The hash index of a store: filled by dispatch, queried by key.

`put` only notes a record; `drain` makes entries in one batch, when enough is noted, on an idle
tick, and before a query. A crash loses what was only noted: dispatch the log again from
`end_phy_offset` after `load`. Records enter in log order, each once; a record at or below
`end_phy_offset` is skipped. One thread owns the service; only `sync_file` on the paths of
`write_back` may run elsewhere. Origin: Java `IndexService`.

The log needs no index. If the disk fails here, nothing touches the index until the next start, and
queries are refused; because of the folder `unreadable` that start builds all of it again.
"""

import logging
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from batonmq.protocol.codes import LONG_MAX
from batonmq.protocol.numbers import natural_number
from batonmq.protocol.tags import java_string_hash
from batonmq.runtime import disk
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.durable_file import sync_directory, sync_file
from batonmq.store.disk_health import StoreHealth
from batonmq.store.errors import IndexFailedError
from batonmq.store.file_handles import UNREADABLE, FileHandles
from batonmq.store.index_file import IndexFile, key_hash

if TYPE_CHECKING:
    from batonmq.protocol.records.columns import Int64s

log = logging.getLogger(__name__)

_DRAIN_RECORDS = 512
# From this many entries on, numpy is faster than a loop.
_BATCH_MIN = 64
# Importing numpy costs as much as so many single puts. A broker imports it in a thread.
_LOADING_PAYS = 10_000
_TOPIC_HASHES_MAX = 4096
_NAME_FORMAT = "%Y%m%d%H%M%S"
_NAME_DIGITS = 17


class IndexAnswer(NamedTuple):
    """Offsets of records whose key may match (hashes collide), newest first."""

    phy_offsets: list[int]
    last_update_timestamp: int
    last_update_phy_offset: int


class IndexService:
    """Index files, oldest first; only the last one grows."""

    _is_preloaded: ClassVar[bool] = False

    def __init__(
        self,
        root: Path,
        *,
        slot_num: int = 5_000_000,
        index_num: int = 20_000_000,
        clock_ms: Callable[[], int] = wall_ms,
        health: StoreHealth | None = None,
    ) -> None:
        """`root`: the `index` folder; `slot_num`, `index_num`: maxHashSlotNum, maxIndexNum. Wall
        time only names files."""
        self.root = root
        self._health = health or StoreHealth()
        self._slot_num = slot_num
        self._index_num = index_num
        self._clock_ms = clock_ms
        self._handles = FileHandles(32)
        self._files: list[IndexFile] = []
        self._dirty: set[Path] = set()
        self._topic_hashes: dict[str, int] = {}
        # (topic, UNIQ_KEY or None, KEYS or None, commit-log offset, store timestamp)
        self._noted: list[tuple[str, bytes | None, bytes | None, int, int]] = []
        #: Offset of the newest indexed record; -1 if none.
        self.end_phy_offset = -1
        #: Its store timestamp in ms; 0 if none.
        self.end_timestamp = 0
        self._put_before_numpy = 0
        #: Whether `load` dropped entries of damaged files.
        self.was_cut = False
        self._is_failure_noted = False

    # Failing.

    def fail(self, error: Exception) -> None:
        """The disk failed here; from any thread."""
        if not self._health.index_failure:
            reason = disk.described(error)
            self._health.index_failure = f"{reason}; a restart builds the index again"
            log.error("index_failed is_noted=%s reason=%r", self.may_be_passed(), reason)

    def may_be_passed(self) -> bool:
        """Whether a checkpoint or a clean stop may cover records that the index lacks: it lacks
        none, or the next start will build it again. From any thread."""
        if self._health.index_failure and not self._is_failure_noted:
            try:
                disk.makedirs(self.root / UNREADABLE)
                sync_directory(self.root)
            except OSError:
                return False
            self._is_failure_noted = True
        return True

    def forget_failure(self) -> None:
        """The start will read the log from where the index ends, whatever crash follows: ends what
        was noted before it. Raises OSError."""
        if self.was_cut and not self._health.index_failure:
            disk.rmtree(self.root / UNREADABLE)

    @contextmanager
    def _lives_without(self) -> Iterator[None]:
        """Lets a full disk pass (R45); whatever else the disk does costs only the index."""
        try:
            yield
        except (OSError, struct.error) as error:  # struct: the file became shorter
            if disk.is_short(error):
                raise
            self.fail(error)

    # Writing.

    def put(
        self,
        topic: str,
        uniq_key: bytes | None,
        keys: bytes | None,
        phy_offset: int,
        store_timestamp: int,
    ) -> None:
        """Notes a record; `keys` is the raw KEYS value. On a full disk it stays noted (R45)."""
        noted = self._noted
        noted.append((topic, uniq_key, keys, phy_offset, store_timestamp))
        if len(noted) >= _DRAIN_RECORDS and not self._health.pauses:
            self._drain_unless_full()

    def put_entries(self, hashes: "Int64s", phy_offsets: "Int64s", timestamps: "Int64s") -> bool:
        """All entries of many records at once, in order; `hashes` as of `key_hash`. False if the
        records must be `put` one by one (a file ends between them, some are indexed already, the
        disk is full or fails now); then nothing changed."""
        if self._health.pauses:
            return False
        self._drain_unless_full()
        if self._health.index_failure:
            return True  # the next start indexes them
        try:
            with self._lives_without():
                if self._noted or int(phy_offsets[0]) <= self.end_phy_offset:
                    return False
                file = self._file_with_space()
                if file.space < len(hashes):
                    return False
                file.put_batch(hashes, phy_offsets, timestamps)
                self._dirty.add(file.path)
                self.end_phy_offset, self.end_timestamp = file.end_phy_offset, file.end_timestamp
                return True
        except OSError as error:
            self._health.pause_or_raise(error)
        return False

    def _drain_unless_full(self) -> None:
        try:
            self.drain()
        except OSError as error:
            self._health.pause_or_raise(error)

    def drain(self) -> None:
        """Makes entries of what was noted. After an OSError (disk full) the rest stays noted."""
        with self._lives_without():
            while self._noted and not self._health.index_failure:
                taken = self._drain_into(self._file_with_space())
                del self._noted[:taken]
        if self._health.index_failure:
            self._noted.clear()

    def _drain_into(self, file: IndexFile) -> int:
        """Indexes records from the front as long as they fit into `file`; how many."""
        topics: list[str] = []
        counts: list[int] = []
        phy_offsets: list[int] = []
        timestamps: list[int] = []
        keys: list[bytes] = []
        # Dispatch may repeat records after a start: those up to `newest` are indexed.
        space, taken, newest = file.space, 0, self.end_phy_offset
        for topic, uniq_key, raw_keys, phy_offset, timestamp in self._noted:
            if phy_offset > newest:
                before = len(keys)
                if uniq_key:
                    keys.append(uniq_key)
                if raw_keys:
                    if b" " in raw_keys:
                        keys += [piece for piece in raw_keys.split(b" ") if piece]
                    else:
                        keys.append(raw_keys)
                # Only a file that is too small for one record's keys loses some of them.
                del keys[before + self._index_num - 1 :]
                if len(keys) > space:
                    del keys[before:]
                    break
                newest = phy_offset
                topics.append(topic)
                counts.append(len(keys) - before)
                phy_offsets.append(phy_offset)
                timestamps.append(timestamp)
            taken += 1
        if keys:
            self._put(file, topics, counts, phy_offsets, timestamps, keys)
            self._dirty.add(file.path)
            self.end_phy_offset, self.end_timestamp = file.end_phy_offset, file.end_timestamp
        elif taken == 0:  # the keys of one record must be in one file
            self._roll()
        return taken

    def _put(
        self,
        file: IndexFile,
        topics: list[str],
        counts: list[int],
        phy_offsets: list[int],
        timestamps: list[int],
        keys: list[bytes],
    ) -> None:
        if not self._uses_numpy(len(keys)):
            records = list(zip(topics, counts, phy_offsets, timestamps, strict=True))
            each = [record for record in records for _ in range(record[1])]
            file.put(
                [
                    key_hash(record[0], key.decode("utf-8", "replace"))
                    for record, key in zip(each, keys, strict=True)
                ],
                [record[2] for record in each],
                [record[3] for record in each],
            )
            return
        from batonmq.store.index_batch import entry_columns

        prefixes = [self._topic_hash(topic) for topic in topics]
        file.put_batch(*entry_columns(prefixes, counts, phy_offsets, timestamps, keys))

    def _uses_numpy(self, count: int) -> bool:
        if count < _BATCH_MIN:
            return False
        if not IndexService._is_preloaded:
            self._put_before_numpy += count
        return IndexService._is_preloaded or self._put_before_numpy > _LOADING_PAYS

    def _topic_hash(self, topic: str) -> int:
        cache = self._topic_hashes
        value = cache.get(topic)
        if value is None:
            if len(cache) >= _TOPIC_HASHES_MAX:
                cache.clear()
            value = cache[topic] = java_string_hash(topic + "#") & 0xFFFFFFFF
        return value

    def _file_with_space(self) -> IndexFile:
        if not self._files or self._files[-1].space <= 0:
            self._roll()
        return self._files[-1]

    def _roll(self) -> None:
        last = self._files[-1] if self._files else None
        if last is not None:
            last.write_slots(release=True)
            self._dirty.add(last.path)
        self._files.append(
            IndexFile.create(
                self.root / self._next_name(),
                self._slot_num,
                self._index_num,
                self._handles,
                inherits=last,
            )
        )

    def _next_name(self) -> str:
        """Local time with milliseconds, as in Java, and above the former name."""
        now_ms = self._clock_ms()
        name = f"{time.strftime(_NAME_FORMAT, time.localtime(now_ms // 1000))}{now_ms % 1000:03d}"
        if self._files:
            following = int(self._files[-1].path.name) + 1
            name = max(name, f"{following:0{_NAME_DIGITS}d}")
        return name

    @staticmethod
    def preload() -> None:
        """Loads what a large batch needs, on any thread, so that the first one does not wait."""
        import batonmq.protocol.records.columns  # noqa: F401
        from batonmq.store.index_batch import SlotTable, entry_columns

        # The first call of each function costs far more: Python looks for the codec of Java's
        # strings on the disk, numpy makes its tables and takes memory.
        each = [java_string_hash("#") & 0xFFFFFFFF] * _DRAIN_RECORDS
        hashes, *_ = entry_columns(each, [1] * len(each), each, each, [bytes(40)] * len(each))
        table = SlotTable(1)
        table.apply(*table.chain(hashes, 1)[1:])
        IndexService._is_preloaded = True

    # Queries.

    def query(
        self, topic: str, key: str, max_num: int, begin_ms: int = 0, end_ms: int = LONG_MAX
    ) -> IndexAnswer:
        """Records with `key` stored in [begin_ms, end_ms], at most `max_num`, newest first. The
        caller compares the real keys. Raises IndexFailedError."""
        self._drain_unless_full()
        found = self._still_noted(topic, key.encode(), max_num, begin_ms, end_ms)
        hash_ = key_hash(topic, key)
        with self._lives_without():
            for file in reversed(self._files):
                if len(found) >= max_num or self._health.index_failure:
                    break
                if not file.is_empty and file.is_time_matched(begin_ms, end_ms):
                    file.select_phy_offsets(hash_, max_num, begin_ms, end_ms, found)
        if self._health.index_failure:
            raise IndexFailedError(self._health.index_failure)
        return IndexAnswer(found, self.end_timestamp, max(0, self.end_phy_offset))

    def _still_noted(
        self, topic: str, key: bytes, max_num: int, begin_ms: int, end_ms: int
    ) -> list[int]:
        """Offsets of what a full disk keeps out of the files, newest first."""
        found: list[int] = []
        for noted_topic, uniq_key, keys, phy_offset, stored_ms in reversed(self._noted):
            if len(found) >= max_num or phy_offset <= self.end_phy_offset:
                break
            has_key = key == uniq_key or key in (keys or b"").split(b" ")
            if has_key and noted_topic == topic and begin_ms <= stored_ms <= end_ms:
                found.append(phy_offset)
        return found

    # Against the log.

    def truncate_to(self, phy_offset: int) -> bool:
        """Drops what points at or above `phy_offset`, durably; True if anything did. If it fails
        and cannot be marked, no checkpoint follows, so the next start cuts the index (R22)."""
        # Also what no file has yet: other bytes may come there.
        self._noted = [record for record in self._noted if record[3] < phy_offset]
        changed = False
        with self._lives_without():
            while self._files and not self._health.index_failure:
                last = self._files[-1]
                if not last.is_empty and last.begin_phy_offset < phy_offset:
                    changed = last.truncate_to(phy_offset) or changed
                    break
                changed = changed or not last.is_empty
                self._remove(last)
        self._find_end()
        return changed

    def delete_expired(self, log_min_offset: int) -> int:
        """Removes files whose records are all gone from the log, never the last; how many."""
        removed = 0
        if self._health.index_failure:
            return removed
        with self._lives_without():
            while len(self._files) > 1 and self._files[0].end_phy_offset < log_min_offset:
                self._remove(self._files[0])
                removed += 1
        return removed

    def _remove(self, file: IndexFile) -> None:
        self._files.remove(file)
        self._dirty.discard(file.path)
        file.destroy()
        sync_directory(self.root)

    def _find_end(self) -> None:
        newest = next((file for file in reversed(self._files) if not file.is_empty), None)
        self.end_phy_offset = newest.end_phy_offset if newest else -1
        self.end_timestamp = newest.end_timestamp if newest else 0

    # Opening, flushing, closing.

    def load(self, *, clean: bool, safe_timestamp: int = 0, safe_offset: int = 0) -> None:
        """Finds the files. `was_cut`: records below `safe_offset` must be dispatched again; what is
        above it, or behind `end_phy_offset` after a cut, must be anyway. Entries below
        `safe_offset` were durable before the exit.

        After an unclean exit, files newer than `safe_timestamp` (indexMsgTimestamp) and the last
        one are verified and get new slots; Java deletes the former. A damaged file is cut or
        removed, and later ones are removed, to be rebuilt from the log.
        """
        assert not self._files and not self._noted
        if not self.root.is_dir():
            return
        listed = disk.listdir(self.root)
        names = sorted(name for name in listed if natural_number(name) is not None)
        self.was_cut = UNREADABLE in listed
        for name in () if self.was_cut else names:
            try:
                file = IndexFile(self.root / name, self._slot_num, self._index_num, self._handles)
                is_last = name == names[-1]
                trusted = clean or (not is_last and file.end_timestamp <= safe_timestamp)
                is_whole = trusted or file.verify()
            except (ValueError, OSError) as error:
                disk.check_unreadable(error)
                log.error("index_file_damaged file=%s reason=%s", self.root / name, error)
                self._handles.forget(str(self.root / name))
                self.was_cut = True
                break
            self._files.append(file)
            if not is_whole:
                log.warning("index_file_cut file=%s end_phy_offset=%d", name, file.end_phy_offset)
                self.was_cut = True
                break
        dropped = names[len(self._files) :]
        for name in dropped:
            log.warning("index_file_dropped file=%s", name)
            disk.unlink(self.root / name)
        if dropped:
            sync_directory(self.root)
        newest = self._files[-1] if self._files else None
        if (
            not clean
            and newest is not None
            and not newest.is_empty
            and (self.was_cut or newest.end_phy_offset >= safe_offset)
        ):
            # The newest record may lack entries; it is dispatched again.
            newest.truncate_to(newest.end_phy_offset)
        self._find_end()

    def write_back(self) -> list[Path]:
        """Drains; the paths to sync since the last call (slots stay in memory). Raises OSError
        (disk full); then nothing was taken, and the next call tries again."""
        self.drain()
        if self._health.index_failure:
            return []
        with self._lives_without():
            for file in self._files[-1:]:
                file.write_late()
        paths = sorted(self._dirty)
        self._dirty.clear()
        return paths

    def flush(self) -> None:
        """All that was noted is durable on return, slots too."""
        self.drain()
        with self._lives_without():
            if self._files and not self._health.index_failure:
                self._files[-1].write_slots()
            for path in self.write_back():
                sync_file(path)

    def close(self, *, write_back: bool = True) -> None:
        """Drains and writes the slots, or drops both, and closes; not synced."""
        with self._lives_without():
            if write_back and not self._health.index_failure:
                self.drain()
                for file in self._files:
                    file.write_slots(release=True)
            self._handles.close()
