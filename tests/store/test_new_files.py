"""Files that a thread makes for queues: nothing is taken that is not there, and none shows a unit
that no one wrote."""

import shutil
import threading
from pathlib import Path

import pytest

from batonmq.runtime import disk
from batonmq.store.consume_queue import ConsumeQueue
from batonmq.store.file_handles import FileHandles, Making
from tests.shared.failing_disk import failing

FILE_SIZE = 200


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "T" / "0"
        self.handles = FileHandles(8)

    def queue(self) -> ConsumeQueue:
        """With one unit, in memory."""
        queue = ConsumeQueue(self.folder, "T", 0, file_size=FILE_SIZE, handles=self.handles)
        queue.append_unit(700, 50, 9)
        return queue

    def making(self, queue: ConsumeQueue) -> Making:
        assert queue.missing_file is not None
        return self.handles.new_files.make([queue.missing_file], FILE_SIZE)

    def written(self) -> ConsumeQueue:
        """As the next start finds it."""
        queue = ConsumeQueue(self.folder, "T", 0, file_size=FILE_SIZE)
        queue.load()
        return queue


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_made_file_is_taken_with_its_folders_to_sync(rig, monkeypatch):
    queue = rig.queue()
    making = rig.making(queue)
    making.run()
    rig.handles.new_files.note(making)
    for name in ("mkdir", "makedirs", "ftruncate"):
        monkeypatch.setattr(disk, name, lambda *_: pytest.fail("the loop makes no files"))
    paths = queue.write_back()
    file = rig.folder / f"{0:020d}"
    assert {file, rig.folder, rig.folder.parent, rig.folder.parent.parent} == set(paths)
    assert queue.missing_file is None
    assert rig.written().unit_at(0) == (700, 50, 9)


def test_r38_a_queue_whose_first_units_take_more_than_one_file_begins_at_the_first(rig):
    """1. A thread makes a file for 25 units, ten a file. 2. The process is killed before the loop
    writes one: a file of the last of them alone would be a queue that begins at 20."""
    queue = rig.queue()
    for n in range(1, 25):
        queue.append_unit(700 + 50 * n, 50, 9)
    rig.making(queue).run()
    assert rig.written().max_offset == 0


def test_r39_a_queue_that_was_deleted_meanwhile_leaves_its_files_to_nobody(rig):
    """1. A thread makes the file of a queue. 2. Its topic is deleted, and made again."""
    queue = rig.queue()
    making = rig.making(queue)
    making.run()
    queue.forget_files()
    shutil.rmtree(rig.folder)
    rig.handles.new_files.note(making)
    again = rig.queue()
    again.write_back()
    assert rig.written().unit_at(0) == (700, 50, 9)


def test_a_kill_before_a_made_file_is_taken_leaves_a_queue_without_units(rig):
    rig.making(rig.queue()).run()
    found = rig.written()
    assert found.max_offset == 0 and found.last_physical_end == 0


def test_r45_what_finds_no_room_is_left_to_the_loop(rig):
    queue = rig.queue()
    making = rig.making(queue)
    with failing("ftruncate * ENOSPC"):
        making.run()
        assert making.is_done and not making.made
        rig.handles.new_files.note(making)
        with pytest.raises(OSError):
            queue.write_back()
    queue.write_back()
    assert rig.written().unit_at(0) == (700, 50, 9)


def test_a_made_file_is_taken_once(rig):
    """Whoever needs one of that name again makes it."""
    making = rig.making(rig.queue())
    making.run()
    rig.handles.new_files.note(making)
    (path,) = making.paths
    assert rig.handles.new_files.take(path) and not rig.handles.new_files.take(path)


def test_r39_nothing_is_made_in_the_folder_of_a_deleted_queue(rig):
    queue = rig.queue()
    making = rig.making(queue)
    queue.forget_files()
    making.run()
    rig.handles.new_files.note(making)
    assert not rig.folder.exists() and not making.made


def test_what_was_made_behind_a_cut_goes_with_it(rig):
    """A hole between two files would be damage at the next start."""
    queue = rig.queue()
    for number in range(1, 21):
        queue.write_back()
        queue.append_unit(700 + 50 * number, 50, 9)
    making = rig.making(queue)
    making.run()
    rig.handles.new_files.note(making)
    queue.truncate_dirty(950)
    assert rig.written().max_offset == 5


def test_an_empty_file_of_a_queue_is_completed(rig):
    rig.folder.mkdir(parents=True)
    (rig.folder / f"{0:020d}").touch()
    assert rig.written().max_offset == 0
    assert (rig.folder / f"{0:020d}").stat().st_size == FILE_SIZE


def test_a_file_that_is_there_is_left_alone_and_not_taken(rig):
    """Whoever made it may have written to it."""
    queue = rig.queue()
    making = rig.making(queue)
    path = Path(making.paths[0])
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * FILE_SIZE)
    making.run()
    rig.handles.new_files.note(making)
    assert making.is_done and not making.made and not rig.handles.new_files.take(str(path))
    assert path.read_bytes() == b"x" * FILE_SIZE


def test_r39_a_folder_is_taken_away_when_nothing_is_being_made_in_it(rig, monkeypatch):
    """Else the second file of a queue would stand alone there: the next start would take it for a
    queue that begins behind it, and show no message of the topic made again."""
    making = rig.making(rig.queue())
    begun, asked, goes_on = threading.Event(), threading.Event(), threading.Event()
    makedirs, lock, taken = disk.makedirs, making._making, []

    class Asked:
        """The lock; says when somebody wants it while a file is being made."""

        def __enter__(self) -> None:
            if begun.is_set():
                asked.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def slow(path: str) -> None:
        begun.set()
        goes_on.wait()
        makedirs(path)

    def take() -> None:
        rig.handles.new_files.forget(str(rig.folder))
        taken.append((rig.folder / f"{0:020d}").exists())

    making._making = Asked()
    monkeypatch.setattr(disk, "makedirs", slow)
    threads = [threading.Thread(target=making.run), threading.Thread(target=take)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    asked.wait()
    assert taken == [], "it waits for the file that is being made"
    goes_on.set()
    for thread in threads:
        thread.join()
    assert taken == [True]
