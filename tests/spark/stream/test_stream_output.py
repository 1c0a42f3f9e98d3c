"""The output folder after crashes at each step of a commit."""

import json
import os
import shutil
from pathlib import Path

import pytest

from batonmq.runtime import disk
from batonmq.spark.topic_table import parquet_table as module
from batonmq.spark.topic_table.parquet_table import ParquetTable, output_folder

READ = {"a": (7, 0), "b": (2, 1)}


def opened(folder):
    output = ParquetTable(folder)
    output.open()
    return output


def stage(output, *names):
    staging = output.begin()
    for name in names:
        path = staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (staging / "_SUCCESS").touch()


def table(folder):
    """What a reader finds."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not any(part[0] in "_." for part in path.relative_to(folder).parts)
    )


FILES = ("group=broker-a/day=2026-11-21/x.parquet", "group=broker-b/day=2026-11-22/y.parquet")
FIRST = [
    "group=broker-a/day=2026-11-21/part-00000001-0.parquet",
    "group=broker-b/day=2026-11-22/part-00000001-1.parquet",
]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


def test_a_commit_makes_the_staged_files_the_table(folder):
    output = opened(folder)
    stage(output, *FILES)
    assert table(folder) == []
    assert output.commit(0, 7, READ) == 2
    assert table(folder) == FIRST
    stage(output, FILES[0])
    output.commit(1, 2, READ)
    output.close()
    assert len(table(folder)) == 3
    output = opened(folder)
    assert (output.rows, output.state().batch, output.state().read) == (9, 1, READ)
    output.close()


def test_a_crash_before_the_commit_leaves_nothing(folder):
    output = opened(folder)
    stage(output, *FILES)
    output.close()
    output = opened(folder)
    assert (table(folder), output.state()) == ([], None)
    stage(output, FILES[0])
    output.commit(0, 1, READ)
    output.close()
    assert table(folder) == FIRST[:1]


@pytest.mark.parametrize("moved", [0, 1])
def test_a_crash_behind_the_commit_is_made_good_by_the_next_run(folder, monkeypatch, moved):
    output = opened(folder)
    stage(output, *FILES)
    replace, left = os.replace, [moved]

    def killed(source, place):
        if Path(place).name != "commit.json":
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
        replace(source, place)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            output.commit(0, 7, READ)
    output.close()
    assert len(table(folder)) == moved
    output = opened(folder)
    output.close()
    assert table(folder) == FIRST
    assert (output.state().batch, output.rows) == (0, 7)


def test_files_that_were_removed_later_are_not_missed(folder):
    """Old days may be deleted by whoever owns the table."""
    output = opened(folder)
    stage(output, *FILES)
    output.commit(0, 7, READ)
    output.close()
    (folder / FIRST[0]).unlink()
    opened(folder).close()
    assert table(folder) == FIRST[1:]


def test_a_folder_of_other_things_and_one_in_use_are_refused(folder):
    folder.mkdir()
    (folder / "notes.txt").touch()
    with pytest.raises(ValueError, match="not empty and not of stream_history"):
        ParquetTable(folder).open()
    (folder / "notes.txt").unlink()
    output = opened(folder)
    with pytest.raises(ValueError, match="another job writes there"):
        ParquetTable(folder).open()
    output.close()
    opened(folder).close()


@pytest.mark.parametrize("content", ["nonsense", '{"version": 2}'])
def test_a_note_that_cannot_be_read_stops_the_start(folder, content):
    opened(folder).close()
    (folder / "_stream" / "commit.json").write_text(content)
    with pytest.raises(ValueError, match=r"commit\.json"):
        ParquetTable(folder).open()


@pytest.mark.parametrize(
    "given", ["s3://lake/h", "S3A://lake/h", "hdfs:///h", "gs:/h", "file://host/h", ""]
)
def test_an_output_without_renames_is_refused(given):
    with pytest.raises(ValueError, match="object store cannot do: it must be a path"):
        output_folder(given)


def test_an_output_may_be_an_address_of_this_host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("file:///lake/h", "file:/lake/h", "FILE://localhost/lake/h", "/lake/h"):
        assert output_folder(given) == Path("/lake/h")
    assert output_folder("a:b/h") == tmp_path / "a:b" / "h"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="it must be a folder"):
        ParquetTable(tmp_path / "file").open()


def test_a_note_of_an_earlier_program_is_continued(folder):
    opened(folder).close()
    note = {
        "version": 3, "commit": 5, "rows": 9, "batch": 4,
        "files": [["group=a/day=d/part-0.parquet", "group=a/day=d/part-00000005-0.parquet"]],
        "read": {"a": [7, 0], "b": [2, 1]},
    }  # fmt: skip
    (folder / "_stream" / "commit.json").write_text(json.dumps(note, indent=1))
    output = opened(folder)
    assert (output.rows, output.state().batch, output.state().read) == (9, 4, READ)
    stage(output, FILES[0])
    output.commit(5, 1, READ)
    output.close()
    assert table(folder) == [FIRST[0].replace("00000001", "00000006")]
    written = json.loads((folder / "_stream" / "commit.json").read_bytes())
    assert written.keys() == note.keys() and (written["commit"], written["rows"]) == (6, 10)


def test_what_a_failed_batch_left_is_in_no_later_commit(folder, monkeypatch):
    output = opened(folder)
    stage(output, FILES[1])

    def fail(path, ignore_errors=False, **_):
        if not ignore_errors:
            raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", fail)
        with pytest.raises(PermissionError, match="staging"):
            output.begin()
    stage(output, FILES[0])
    output.commit(0, 1, READ)
    output.close()
    assert table(folder) == FIRST[:1]


def test_every_name_is_durable_before_and_behind_the_commit(folder, monkeypatch):
    """A power cut right behind it must not find the note without the files."""
    synced = []
    output = opened(folder)
    stage(output, *FILES)
    monkeypatch.setattr(module, "sync_directory", lambda path: synced.append(path))
    replaced = module.replace_file

    def noted(path, raw):
        staging = folder / "_stream" / "staging" / "00000001"
        assert {*(staging / FILES[0]).parents, *(staging / FILES[1]).parents} - {
            *folder.parents,
            folder,
        } == set(synced)
        synced.clear()
        replaced(path, raw)

    monkeypatch.setattr(module, "replace_file", noted)
    output.commit(0, 7, READ)
    output.close()
    assert {(folder / name).parent for name in FIRST} < set(synced) and folder in synced


class Killed(BaseException):
    """As kill -9: nothing is cleaned up."""


STEPS = (
    (os, "replace"),
    (disk, "replace"),
    (disk, "fsync"),
    (disk, "fdatasync"),
    (disk, "rmtree"),
    (module, "replace_file"),
    (module, "sync_directory"),
    (Path, "mkdir"),
)


def test_killed_before_any_step_each_batch_is_in_the_table_once(tmp_path, monkeypatch):
    """Two batches of two files; the job is started again until it comes through."""
    wanted = {f"group=g{n}/day=d/batch-{batch}" for batch in (0, 1) for n in (0, 1)}

    def job(folder):
        output = opened(folder)
        try:
            state = output.state()
            for batch in range(state.batch if state else 0, 2):  # the checkpoint may lag by one
                read = {"a": (batch + 1, 0)}
                staging = output.begin()
                if state is None or read["a"] > state.read["a"]:
                    for n in (0, 1):
                        path = staging / f"group=g{n}" / "day=d" / "x.parquet"
                        path.parent.mkdir(parents=True)
                        path.write_text(f"batch-{batch}")
                    output.commit(batch, 2, read)
        finally:
            output.close()

    def rows(folder):
        return sorted(
            f"{Path(name).parent}/{(folder / name).read_text()}" for name in table(folder)
        )

    monkeypatch.setattr(disk, "fsync", lambda descriptor: None)  # a kill is no power cut
    for at in range(1, 200):
        folder = tmp_path / str(at)
        left = [at]
        with monkeypatch.context() as patched:
            for place, name in STEPS:
                patched.setattr(place, name, _killing(getattr(place, name), left))
            try:
                job(folder)
            except Killed:
                pass
        found = rows(folder) if folder.exists() else []
        assert len(set(found)) == len(found) and set(found) <= wanted
        job(folder)
        assert rows(folder) == sorted(wanted), at
        if left[0] > 0:
            break
    assert 30 < at < 199


def _killing(step, left):
    """Killed before the step that `left` counts down to: so behind the one before it, too."""

    def stepped(*given, **more):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return step(*given, **more)

    return stepped
