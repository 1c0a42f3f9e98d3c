"""The output folder after crashes at each step of a commit."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batonmq.runtime import disk
from batonmq.runtime.lock_file import FolderLock
from batonmq.spark.topic_table import parquet_table as module
from batonmq.spark.topic_table.parquet_table import HistoryState, ParquetTable

READ = {"a": (7, 0), "b": (2, 1)}


def opened(folder):
    output = ParquetTable(str(folder))
    output.open()
    return output


def commit(output, batch, *numbers):
    rows = output.rows + len(numbers)
    read = READ | {"a": (batch + 7, 0)}
    output.commit(pa.table({"n": pa.array(numbers, pa.int64())}),
                  HistoryState(batch=batch, rows=rows, read=read))  # fmt: skip


def table(folder):
    """What a reader finds."""
    paths = [*folder.glob("*.parquet")]
    return sorted(pq.read_table(folder)["n"].to_pylist()) if paths else []


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_what_was_committed_is_the_table_and_says_what_it_has(folder, form):
    output = opened(form.format(folder))
    assert (output.state(), output.rows, table(folder)) == (None, 0, [])
    commit(output, 0, 1, 2, 3)
    commit(output, 1)  # nothing was new
    commit(output, 2, 4)
    output.close()
    assert table(folder) == [1, 2, 3, 4]
    output = opened(folder)
    assert (output.rows, output.state().batch, output.state().read) == (4, 2, READ | {"a": (9, 0)})
    (folder / "part-00000001.parquet").unlink()  # old ones are its owner's to remove
    commit(output, 3, 5)
    output.close()
    assert table(folder) == [4, 5]


def test_a_folder_of_other_things_and_one_in_use_are_refused(folder, tmp_path):
    folder.mkdir()
    for name in ("notes.txt", "group=broker-a"):  # a table of an earlier version had such folders
        (folder / name).mkdir()
        with pytest.raises(ValueError, match=f"it holds {name}, .* Name a new .* OLD,NEW"):
            opened(folder)
        (folder / name).rmdir()
    output = opened(folder)
    with pytest.raises(ValueError, match="another run writes there"):
        opened(folder)
    output.close()
    pq.write_table(pa.table({"n": [1]}), folder / "part-00000001.parquet")
    with pytest.raises(ValueError, match=r"part-00000001\.parquet: it is not of stream_history"):
        opened(folder)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="it must be a folder"):
        opened(tmp_path / "file")


def test_a_commit_of_the_job_that_has_the_lock_is_seen_once_it_is_free(folder, monkeypatch):
    first = opened(folder)
    commit(first, 0, 1)
    acquire = FolderLock.acquire

    def once_free(lock):
        commit(first, 1, 2)
        first.close()
        acquire(lock)

    monkeypatch.setattr(FolderLock, "acquire", once_free)
    second = opened(folder)
    assert (second.rows, second.state().batch) == (2, 1)
    commit(second, 2, 3)
    second.close()
    assert table(folder) == [1, 2, 3]


def test_a_batch_is_durable_before_and_behind_its_commit(folder, monkeypatch):
    """A power cut right behind it must not leave Spark's checkpoint without the file."""
    done = []
    output = opened(folder)
    replace = disk.replace
    monkeypatch.setattr(disk, "fsync", lambda fd: done.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(disk, "replace", lambda a, b: (done.append(str(b)), replace(a, b)))
    commit(output, 0, 1)
    output.close()
    own, part = folder / "_stream", str(folder / "part-00000001.parquet")
    assert done == [f"{own}/growing.tmp", f"{own}/growing", str(own), part, str(folder)]


class Killed(BaseException):
    """As kill -9: nothing is cleaned up."""


STEPS = (
    (disk, "open"), (disk, "pwrite"), (disk, "replace"), (disk, "fsync"), (module, "replace_file"),
    (module, "sync_directory"),
)  # fmt: skip


def test_killed_before_any_step_each_batch_is_in_the_table_once(tmp_path, monkeypatch):
    """Two batches; the job is started again until it comes through."""

    def job(folder):
        output = opened(folder)
        try:
            state = output.state()
            for batch in range(state.batch if state else 0, 2):  # the checkpoint may lag by one
                if state is None or batch > state.batch:
                    commit(output, batch, batch)
                    state = output.state()
        finally:
            output.close()

    for at in range(1, 200):
        folder, left = tmp_path / str(at), [at]
        with monkeypatch.context() as patched:
            for place, name in STEPS:
                patched.setattr(place, name, _killing(getattr(place, name), left))
            try:
                job(folder)
            except Killed:
                pass
        assert table(folder) in ([], [0], [0, 1])
        job(folder)
        assert table(folder) == [0, 1], at
        if left[0] > 0:
            break
    assert 15 < at < 199


def _killing(step, left):
    """Killed before the step that `left` counts down to: so behind the one before it, too."""

    def stepped(*given, **more):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return step(*given, **more)

    return stepped
