"""The history on disk: appended once, whole lines only, readable after any crash."""

import json
import os
import shutil

import pytest
from failing_disk import failing

from batonmq.history.event import EventKind, HistoryEvent
from batonmq.history.file import HistoryFile, numbered


def event(index, part=0, log="log-a", **fields):
    return HistoryEvent(
        log=log, raft_index=index, part=part, time_ms=index, kind=EventKind.ELECTED, **fields
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history.jsonl"


def written(path, *batches):
    file = HistoryFile(path)
    try:
        return [file.append(batch) for batch in batches]
    finally:
        file.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_is_one_line_with_its_names(path):
    written(path, [event(7, broker_name="broker-a", sync_state_set=(1, 2), reason="shrink")])
    assert lines(path) == [
        {
            "log": "log-a",
            "raft_index": 7,
            "time_ms": 7,
            "kind": "elected",
            "broker_name": "broker-a",
            "sync_state_set": [1, 2],
            "reason": "shrink",
        }
    ]


def test_a_replay_of_the_log_writes_nothing_twice(path):
    events = [event(1), event(2), event(2, part=1)]
    assert written(path, events) == [3]
    assert written(path, events, [event(3)]) == [0, 1]
    assert [each["raft_index"] for each in lines(path)] == [1, 2, 2, 3]


def test_a_new_log_begins_again_at_index_1(path):
    """All controllers were killed at once while the log was in memory: index 1 comes again."""
    written(path, [event(500)])
    assert written(path, [event(1, log="log-b"), event(2, log="log-b")]) == [2]
    file = HistoryFile(path)
    assert [(each.log, each.raft_index) for each in file.newest(9, 1 << 20)] == [
        ("log-a", 500),
        ("log-b", 1),
        ("log-b", 2),
    ]
    file.close()


@pytest.mark.parametrize("torn_bytes", [1, 10, 30])
def test_a_torn_last_line_is_cut_off(path, torn_bytes):
    written(path, [event(1), event(2)])
    os.truncate(path, path.stat().st_size - torn_bytes)
    assert written(path, [event(2), event(3)]) == [2]
    assert [each["raft_index"] for each in lines(path)] == [1, 2, 3]


def test_a_garbled_line_is_skipped_and_counted(path):
    written(path, [event(1)])
    with open(path, "ab") as file:
        file.write(b"\x00\x00nonsense\n")
    history = HistoryFile(path)
    assert history.unreadable_lines == 1
    assert history.append([event(2)]) == 1
    assert [each.raft_index for each in history.newest(9, 1 << 20)] == [1, 2]
    history.close()


@pytest.mark.parametrize("error", ["EIO", "EUCLEAN"])
@pytest.mark.parametrize(("readable", "missing"), [(0, 20), (2, 0)])
def test_a_start_passes_over_what_the_disk_cannot_read(
    path, readable, missing, error, monkeypatch, caplog
):
    """At the end of the file, or before some lines of it. What is read is not written again."""
    monkeypatch.setattr("batonmq.history.file._BLOCK_SIZE", 400)
    events = [event(index) for index in range(1, 22)]
    written(path, events[:20])
    with failing(f"pread {path.parent} {error} after {readable}"):
        history = HistoryFile(path)
    assert "history_file_unreadable" in caplog.text and f"{path}: " in caplog.text
    assert history.append(events) == missing + 1
    history.close()
    history.close()
    assert len(lines(path)) == 21


def test_a_failed_write_leaves_no_half_line_and_loses_no_event(path, monkeypatch):
    """The disk fails after 20 bytes, for a while; then the event comes again, and is taken."""
    history = HistoryFile(path)
    history.append([event(1)])
    with monkeypatch.context() as patch:
        patch.setattr("batonmq.runtime.disk.write", disk_that_fills_after(20))
        with failing("ftruncate * EIO"):
            for error in ("No space", "Input/output"):
                with pytest.raises(OSError, match=error):
                    history.append([event(2)])
    assert history.append([event(2), event(3)]) == 2
    history.close()
    assert [each["raft_index"] for each in lines(path)] == [1, 2, 3]


def test_a_file_that_may_lack_events_says_where(path, caplog):
    """A snapshot holds the newest events only: what was in front of them is nowhere any more."""
    file = HistoryFile(path)
    file.append([event(1), event(2)], cut=True)  # the log begins here as far as this file knows
    assert file.append([event(2), event(3)], cut=True) == 1
    assert file.append([event(5), event(6)]) == 2
    assert "history_gap" not in caplog.text
    assert file.append([event(9), event(10)], cut=True) == 2
    assert file.append([event(1, log="log-b"), event(2, log="log-b")], cut=True) == 2
    file.close()
    gaps = [(each["log"], each["raft_index"]) for each in lines(path) if each.get("gap")]
    assert gaps == [("log-a", 9)]
    assert caplog.text.count("history_gap") == 1
    assert [each["raft_index"] for each in lines(path)] == [1, 2, 3, 5, 6, 9, 10, 1, 2]


def disk_that_fills_after(free_bytes):
    """An os.write that takes so many bytes in all, then fails."""
    real_write = os.write
    left = [free_bytes]

    def write(descriptor, raw):
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        written = real_write(descriptor, raw[: left[0]])
        left[0] -= written
        return written

    return write


# --- full files become numbered ones ----------------------------------------------------------


def divided(path, count, *, size_max=400, files=3, first=1):
    """Writes events one by one; gives the numbers of the events in each file, oldest first."""
    history = HistoryFile(path, size_max=size_max, files=files)
    for index in range(first, first + count):
        assert history.append([event(index)]) == 1
    history.close()
    return in_files(path)


def in_files(path):
    elders = sorted(path.parent.glob(f"{path.stem}.*.jsonl"))
    return [[each["raft_index"] for each in lines(file)] for file in (*elders, path)]


def test_a_full_file_becomes_a_numbered_one_and_the_oldest_goes(path):
    files = divided(path, 40)
    assert len(files) == 3
    seen = [index for file in files for index in file]
    assert seen == list(range(seen[0], 41))
    assert seen[0] > 1
    names = sorted(file.name for file in path.parent.iterdir())
    assert names[-1] == "history.jsonl"
    assert all(file.stat().st_size <= 400 for file in path.parent.iterdir())
    assert names[0] > "history.000001.jsonl"  # numbers continue


@pytest.mark.parametrize("is_renamed", [False, True])
def test_what_stands_in_a_numbered_file_is_not_written_again(path, is_renamed):
    """A restart applies the log again from its start; the newest file holds the last line only. Or
    kill -9 came between the rename and the new file: the name is free, the events are not gone."""
    seen = [index for file in divided(path, 12, files=9) for index in file]
    if is_renamed:
        os.rename(path, path.with_name("history.000099.jsonl"))
    history = HistoryFile(path, size_max=400, files=9)
    assert history.append([event(index) for index in range(1, 14)]) == 1
    history.close()
    assert [index for file in in_files(path) for index in file] == [*seen, 13]
    assert (path.parent / "history.000099.jsonl").exists() == is_renamed


@pytest.mark.parametrize("kept", [1, 99])
def test_where_no_file_can_be_begun_the_full_one_grows_on(path, kept, monkeypatch, caplog):
    """Also if it cannot get its name back."""
    history = HistoryFile(path, size_max=400, files=3)
    with monkeypatch.context() as patch, failing(f"rename history.0 EIO once after {kept}"):
        patch.setattr("batonmq.history.file._open", no_descriptor_left)
        for index in range(1, 13):
            assert history.append([event(index)]) == 1
    assert "history_not_divided" in caplog.text
    assert history.append([event(13)]) == 1
    history.close()
    assert in_files(path) == [list(range(1, 13)), [13]]


def test_a_file_that_could_not_get_its_name_back_counts_once_when_the_oldest_goes(path):
    files = len(divided(path, 30, files=9))
    history = HistoryFile(path, size_max=400, files=files + 1)
    os.rename(path, path.with_name("history.000099.jsonl"))
    assert history.append([event(index) for index in range(31, 35)]) == 4
    history.close()
    assert len(in_files(path)) == files + 1 and in_files(path)[0][0] == 1


def no_descriptor_left(path):
    raise OSError(24, "Too many open files")


def test_the_newest_events_are_read_over_all_files(path):
    seen = [index for file in divided(path, 30, files=20) for index in file]
    with open(path, "ab") as file:
        file.write(b"nonsense\n")
    history = HistoryFile(path, size_max=400, files=20)
    assert [each.raft_index for each in history.newest(1_000, 1 << 20)] == seen
    assert [each.raft_index for each in history.newest(7, 1 << 20)] == seen[-7:]
    assert 0 < len(history.newest(1_000, 500)) < 10
    history.close()


def test_an_event_that_stands_in_two_files_is_read_once(path):
    """The file that grows became a numbered one while it was read, or was copied by hand."""
    written(path, [event(1), event(2)])
    shutil.copy(path, path.with_name(numbered(path.name, 1)))
    history = HistoryFile(path)
    assert [each.raft_index for each in history.newest(10, 1 << 20)] == [1, 2]
    history.close()


def test_lines_longer_than_a_block_are_read_from_the_end(path, monkeypatch):
    monkeypatch.setattr("batonmq.history.file._BLOCK_SIZE", 16)
    history = HistoryFile(path)
    history.append([event(index, reason="r" * index) for index in range(1, 50)])
    assert [each.raft_index for each in history.newest(1_000, 1 << 20)] == list(range(1, 50))
    history.close()
