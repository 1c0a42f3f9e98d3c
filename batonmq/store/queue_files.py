"""The bytes of one consume queue, in contiguous files of fixed size, named by the position of their
first byte. Units are not parsed here. One thread; only `sync_file` on the paths of `take_unsynced`
may run elsewhere."""

import os
from pathlib import Path

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.numbers import natural_number
from batonmq.runtime import disk
from batonmq.runtime.durable_file import BLOCK_SIZE, is_zero, next_data, write_all, zero_range
from batonmq.store.errors import CorruptQueueError
from batonmq.store.file_handles import UNREADABLE, FileHandles

_NAME_DIGITS = 20


class QueueFiles:
    """`starts`: positions of the files' first bytes, ascending, without gaps."""

    __slots__ = ("_handles", "_unsynced", "directory", "file_size", "starts")

    def __init__(self, directory: str | Path, file_size: int, handles: FileHandles) -> None:
        """Nothing is created on disk before the first `write`."""
        self.directory = str(directory)
        self._handles = handles
        self.file_size = file_size
        # Tuples of plain values: the garbage collector skips them, in every queue.
        self.starts: tuple[int, ...] = ()
        # Files and folders to sync; for a new file also its parent folders.
        self._unsynced: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """The position behind the last file; 0 if there is none."""
        return self.starts[-1] + self.file_size if self.starts else 0

    def place_of(self, position: int) -> tuple[str, int]:
        """The file of a position, and where in it."""
        within = position % self.file_size
        return self._path(position - within), within

    def _path(self, start: int) -> str:
        return f"{self.directory}/{start:0{_NAME_DIGITS}d}"

    def load(self) -> bool:
        """Finds the files; an empty last one is removed, and True returned. Raises CorruptLogError
        for a file that is missing, of another length or was unreadable, and for a folder without
        files."""
        self.starts = ()
        try:
            listed = disk.listdir(self.directory)
        except FileNotFoundError:
            return False
        names = sorted(name for name in listed if natural_number(name) is not None)
        if not names or UNREADABLE in listed:
            what = "could not be read" if names else "are missing"
            raise CorruptLogError(self.directory, 0, f"the files of this queue {what}")
        for name in names:
            path = f"{self.directory}/{name}"
            size = os.stat(path).st_size
            if size == 0 and name == names[-1]:
                if self.starts:
                    disk.unlink(path)
                else:  # without a file the folder would be damage
                    self._make(int(name))
                    self.starts = (int(name),)
                return True
            if size != self.file_size:
                raise CorruptLogError(
                    path, 0, f"file of {size} bytes where {self.file_size} belong"
                )
            if self.starts and int(name) != self.end:
                raise CorruptLogError(self._path(self.end), 0, "consume queue file is missing")
            self.starts += (int(name),)
        return False

    def read(self, position: int, end: int) -> bytes:
        """The bytes [position, end) of one file. Raises CorruptQueueError if it is shorter or the
        disk cannot read them: then the next start rebuilds the queue."""
        path, within = self.place_of(position)
        try:
            data = disk.pread(self._handles.fd(path), end - position, within)
        except OSError as error:
            disk.check_unreadable(error)
            failure = CorruptQueueError(path, within, self._noted(error))
            self._handles.health.queue_failure = str(failure)
            raise failure from error
        if len(data) != end - position:
            what = f"{len(data)} bytes where {end - position} belong"
            raise CorruptQueueError(path, within, what)
        return data

    def _noted(self, error: OSError) -> str:
        """Marks the queue, since a start reads its last files only; what a restart will do."""
        try:
            disk.mkdir(f"{self.directory}/{UNREADABLE}")
        except FileExistsError:
            pass
        except OSError as refused:
            why = disk.described(refused)
            return f"{disk.reason(error)}; it cannot be marked for a rebuild: {why}"
        return f"{disk.reason(error)}; a restart rebuilds it"

    def next_data(self, position: int) -> int | None:
        """The first position from `position` on that was ever written, or up to a block before it;
        None if there is none."""
        while position < self.end:
            path, within = self.place_of(position)
            found = next_data(self._handles.fd(path), within)
            if found is not None:
                return position - within + found
            position += self.file_size - within
        return None

    def is_clear_behind(self, position: int) -> bool:
        """Whether behind `position` there are only zeros and no further file."""
        if position >= self.end:
            return True
        path, within = self.place_of(position)
        if position - within != self.starts[-1]:
            return False
        fd = self._handles.fd(path)
        block = disk.pread(fd, BLOCK_SIZE - within % BLOCK_SIZE, within)
        return is_zero(block) and next_data(fd, within + len(block)) is None

    def missing_at(self, first: int, last: int) -> str | None:
        """The next file that `write` must make for positions `first` to `last`, or None. An empty
        queue needs the first one: its name says where the queue begins."""
        if last < self.end:
            return None
        return self._path(self.end if self.starts else first - first % self.file_size)

    def write(self, position: int, data: memoryview) -> None:
        """Writes over as many files as needed. Raises OSError; then it can be repeated."""
        done = 0
        while done < len(data):
            path, within = self.place_of(position + done)
            self._ensure(position + done - within)
            count = min(len(data) - done, self.file_size - within)
            write_all(self._handles.fd(path), data[done : done + count], within)
            self._note_unsynced(path)
            done += count

    def _ensure(self, start: int) -> None:
        if self.starts and self.starts[-1] >= start:
            return
        assert not self.starts or self.end == start
        if not self._handles.new_files.take(self._path(start)):
            self._remove_untaken()
            self._make(start)
        if not self.starts:
            topic, _, _ = self.directory.rpartition("/")
            self._note_unsynced(topic)
            self._note_unsynced(topic.rpartition("/")[0])
        self._note_unsynced(self.directory)
        self.starts += (start,)

    def _make(self, start: int) -> None:
        if not self.starts:
            self._make_folder()
        fd = disk.open(self._path(start), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            disk.ftruncate(fd, self.file_size)
        finally:
            disk.close(fd)

    def _make_folder(self) -> None:
        try:
            disk.mkdir(self.directory)  # the topic's folder usually exists
        except FileExistsError:
            pass
        except FileNotFoundError:
            disk.makedirs(self.directory)

    def _remove_untaken(self) -> None:
        """Removes a file made ahead for another place: a hole between files is damage."""
        for path in self._handles.new_files.forget(self.directory):
            disk.unlink(path)

    def _note_unsynced(self, path: str) -> None:
        if path not in self._unsynced:
            self._unsynced += (path,)

    def take_unsynced(self) -> list[Path]:
        """Files and folders to sync since the last call; `sync_file` takes both."""
        # Files come before their folders, so that a folder never names a file that is not whole.
        paths = [Path(path) for path in sorted(self._unsynced, reverse=True)]
        self._unsynced = ()
        return paths

    def cut(self, position: int, written_end: int) -> None:
        """Removes or zeroes [position, written_end); `take_unsynced` has what to sync. The first
        file stays, even empty: its name keeps the queue's place."""
        self._remove_untaken()
        while len(self.starts) > 1 and self.starts[-1] >= position:
            self._unlink(self.starts[-1])
            self.starts = self.starts[:-1]
            self._note_unsynced(self.directory)
        start = self.starts[-1]
        end = min(written_end, self.end)
        path = self._path(start)
        if position < end and zero_range(self._handles.fd(path), position - start, end - start):
            self._note_unsynced(path)

    def drop_first(self) -> None:
        """Removes the oldest file; the caller syncs the folder."""
        self._unlink(self.starts[0])
        self.starts = self.starts[1:]

    def _unlink(self, start: int) -> None:
        path = self._path(start)
        self._handles.forget(path)
        disk.unlink(path)
        self._unsynced = tuple(other for other in self._unsynced if other != path)

    def close(self) -> None:
        """Closes the descriptors; nothing is synced."""
        for start in self.starts:
            self._handles.forget(self._path(start))

    def forget(self) -> None:
        """Continues as if there were no files."""
        self.close()
        self._handles.new_files.forget(self.directory)
        self.starts = ()
        self._unsynced = ()
