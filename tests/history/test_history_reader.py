"""Reading the history on behind an event, while its files grow and are divided."""

import os

import pytest

from batonmq.history.event import EventKind, HistoryEvent
from batonmq.history.file import HistoryFile, files_of
from batonmq.history.reader import HistoryReader

MUCH = 1 << 20


def event(index, part=0, log="log-a", **fields):
    return HistoryEvent(
        log=log, raft_index=index, part=part, time_ms=index, kind=EventKind.ELECTED, **fields
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history-n0.jsonl"


@pytest.fixture
def reader(path):
    path.touch()
    made = HistoryReader(path)
    yield made
    made.close()


@pytest.fixture
def file(path):
    """Small files: ten events or so each."""
    made = HistoryFile(path, size_max=700, files=3)
    yield made
    made.close()


def indexes(lines):
    return [line.mark[1] for line in lines]


def drained(reader, mark, events_max=3):
    found = []
    while lines := reader.behind(mark, events_max, MUCH):
        assert len(lines) <= events_max
        found += lines
        mark = lines[-1].mark
    return found


def test_lines_come_as_they_stand_in_the_file(path, reader):
    file = HistoryFile(path)
    file.append([event(1, broker_name="broker-a", reason="née"), event(1, 1), event(4)])
    file.close()
    lines = reader.behind(None, 10, MUCH)
    assert b"\n".join(line.text for line in lines) + b"\n" == path.read_bytes()
    assert [line.mark for line in lines] == [("log-a", 1, 0), ("log-a", 1, 1), ("log-a", 4, 0)]
    assert (lines[0].kind, lines[0].broker_name) == ("elected", "broker-a")


def test_it_goes_on_where_it_was_and_behind_any_event(path, reader):
    file = HistoryFile(path)
    file.append([event(index) for index in range(1, 6)])
    assert indexes(reader.behind(None, 2, MUCH)) == [1, 2]
    assert indexes(reader.behind(("log-a", 2, 0), 2, MUCH)) == [3, 4]
    assert indexes(reader.behind(("log-a", 1, 0), 9, MUCH)) == [2, 3, 4, 5]
    assert reader.behind(("log-a", 5, 0), 9, MUCH) == []
    file.append([event(6)])
    file.close()
    assert indexes(reader.behind(("log-a", 5, 0), 9, MUCH)) == [6]


def test_batches_are_bounded_in_bytes_but_never_empty(path, reader):
    file = HistoryFile(path)
    file.append([event(index, reason="r" * 100) for index in range(1, 5)])
    file.close()
    size = len(reader.behind(None, 1, MUCH)[0].text)
    assert indexes(reader.behind(None, 9, 2 * size)) == [1, 2]
    assert indexes(reader.behind(("log-a", 2, 0), 9, 1)) == [3]


def test_events_that_are_missing_here_are_passed_over(path, reader):
    """This node came in by a snapshot; the topic ends at an event that it never had."""
    file = HistoryFile(path)
    file.append([event(5), event(9), event(1, log="log-b")])
    file.close()
    assert indexes(reader.behind(("log-a", 7, 3), 9, MUCH)) == [9, 1]
    assert indexes(reader.behind(("log-a", 2, 0), 9, MUCH)) == [5, 9, 1]
    assert indexes(reader.behind(("log-c", 7, 0), 9, MUCH)) == [5, 9, 1]
    assert indexes(reader.behind(("log-b", 1, 0), 9, MUCH)) == []


def test_all_files_are_read_through_divisions(path, reader, file):
    for index in range(1, 26):
        file.append([event(index)])
    kept = indexes(drained(reader, None))
    assert kept[-1] == 25 and kept == list(range(kept[0], 26)) and len(kept) > 15
    assert len(list(path.parent.iterdir())) == 3
    assert indexes(drained(reader, ("log-a", kept[2], 0))) == kept[3:]


def test_a_file_that_is_divided_while_it_is_read_costs_nothing(path, reader, file):
    seen, mark = [], None
    for index in range(1, 60):
        file.append([event(index)])
        if index % 4 == 0:
            lines = reader.behind(mark, 3, MUCH)
            seen += lines
            mark = lines[-1].mark
    assert indexes([*seen, *drained(reader, mark)]) == list(range(1, 60))


def test_a_file_dropped_unread_is_a_gap_that_is_told(path, reader, file, caplog):
    file.append([event(1)])
    assert indexes(reader.behind(None, 9, MUCH)) == [1]
    for index in range(2, 60):
        file.append([event(index)])
    found = indexes(drained(reader, ("log-a", 1, 0)))
    assert found[-1] == 59 and found[-15:] == list(range(45, 60))
    assert "history_read_gap" in caplog.text


def test_what_was_read_before_an_error_comes_again(path, reader, monkeypatch):
    """Else those events would be left out for good: they were given to nobody."""
    file = HistoryFile(path)
    file.append([event(1), event(2), event(3)])
    assert indexes(reader.behind(None, 9, MUCH)) == [1, 2, 3]
    file.append([event(4), event(5)])
    file.close()
    path.rename(path.with_name("history-n0.000001.jsonl"))

    def failing(_):
        raise OSError("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("batonmq.runtime.disk.listdir", failing)
        with pytest.raises(OSError, match="too many"):
            reader.behind(("log-a", 3, 0), 9, MUCH)
    file = HistoryFile(path)
    file.append([event(6)])
    file.close()
    assert indexes(reader.behind(("log-a", 3, 0), 9, MUCH)) == [4, 5, 6]


def test_half_a_division_is_waited_for(path, reader):
    """The full file has its number, the empty one is not there yet; or never: it goes back."""
    file = HistoryFile(path)
    file.append([event(1)])
    assert indexes(reader.behind(None, 9, MUCH)) == [1]
    file.append([event(2)])
    full = path.with_name("history-n0.000001.jsonl")
    path.rename(full)
    assert indexes(reader.behind(("log-a", 1, 0), 9, MUCH)) == [2]
    assert reader.behind(("log-a", 2, 0), 9, MUCH) == []
    full.rename(path)
    file.append([event(3)])
    file.close()
    assert indexes(reader.behind(("log-a", 2, 0), 9, MUCH)) == [3]


def test_a_division_that_is_taken_back_while_it_is_looked_at(path, reader, monkeypatch):
    file = HistoryFile(path)
    file.append([event(1)])
    assert indexes(reader.behind(None, 9, MUCH)) == [1]
    full = path.with_name("history-n0.000001.jsonl")
    path.rename(full)

    def taken_back(path_of_reader):
        if full.exists():
            full.rename(path)
        return files_of(path_of_reader)

    monkeypatch.setattr("batonmq.history.reader.files_of", taken_back)
    assert reader.behind(("log-a", 1, 0), 9, MUCH) == []
    file.append([event(2)])
    file.close()
    assert indexes(reader.behind(("log-a", 1, 0), 9, MUCH)) == [2]


def test_what_comes_between_the_last_look_and_a_division_is_read(path, reader, monkeypatch):
    """1. The reader finds nothing more in the file. 2. It gets a line more and is divided. 3. The
    reader sees that it has become a numbered one."""
    file = HistoryFile(path)
    file.append([event(1)])
    assert indexes(reader.behind(None, 9, MUCH)) == [1]
    fstat = os.fstat

    def divided_just_before(descriptor):
        monkeypatch.undo()
        file.append([event(2)])
        file.close()
        path.rename(path.with_name("history-n0.000001.jsonl"))
        written = HistoryFile(path)
        written.append([event(3)])
        written.close()
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", divided_just_before)
    assert indexes(drained(reader, ("log-a", 1, 0))) == [2, 3]


def test_divisions_while_the_next_file_is_opened_skip_none(path, reader, file, monkeypatch):
    file.append([event(1)])
    assert indexes(reader.behind(None, 9, MUCH)) == [1]
    for index in range(2, 13):
        file.append([event(index)])
    more = iter((range(13, 22), range(22, 25)))

    def grown(of_path):
        found = files_of(of_path)
        for index in next(more, ()):
            file.append([event(index)])
        return found

    monkeypatch.setattr("batonmq.history.reader.files_of", grown)
    assert indexes(drained(reader, ("log-a", 1, 0))) == list(range(2, 25))


@pytest.mark.parametrize("again", [[4, 5, 6], [5, 6], [7, 8, 9]])
def test_a_torn_batch_that_is_cut_off_again_hides_nothing_behind_it(path, reader, again):
    """The disk was full after some whole lines; what comes next begins below the place."""
    file = HistoryFile(path)
    file.append([event(index) for index in range(1, 4)])
    size = path.stat().st_size
    with path.open("ab") as torn:
        torn.write(f"{event(4).to_json()}\n{event(5).to_json()}\n{{".encode())
    assert indexes(reader.behind(None, 9, MUCH)) == [1, 2, 3, 4, 5]
    with path.open("r+b") as torn:
        torn.truncate(size)
    file.append([event(index) for index in again])
    file.close()
    assert indexes(reader.behind(("log-a", 5, 0), 9, MUCH)) == [i for i in again if i > 5]


def test_the_event_in_front_is_told_where_the_file_knows_it(path, reader, file):
    for index in range(1, 12):
        file.append([event(index)])
    file.append([event(1, log="log-b"), event(3, 1, log="log-b")])
    afters = [line.after for line in drained(reader, None)]
    assert afters == [None, *((index, 0) for index in range(1, 11)), None, (1, 0)]
    assert reader.behind(("log-a", 4, 0), 1, MUCH)[0].after == (4, 0)
    # What the file lacks may have others beside it.
    assert reader.behind(("log-b", 2, 0), 1, MUCH)[0].after is None


def test_behind_a_hole_of_the_file_the_event_in_front_is_not_known(path, reader):
    """This node was away for long and came back by a snapshot; a line was garbled on the disk."""
    file = HistoryFile(path)
    file.append([event(1), event(2)])
    file.append([event(index) for index in (2000, 2001)], cut=True)
    with path.open("ab") as torn:
        torn.write(b"\x00 nonsense\n")
    file.append([event(2003), event(2004)])
    file.close()
    for mark, afters in (
        (None, [None, (1, 0), None, (2000, 0), None, (2003, 0)]),
        (("log-a", 2, 0), [None, (2000, 0), None, (2003, 0)]),
    ):
        assert [line.after for line in drained(reader, mark)] == afters
    assert reader.behind(None, 1, MUCH, since_ms=2001)[0].after == (2000, 0)
    assert reader.behind(None, 1, MUCH, since_ms=2002)[0].after is None


def test_a_dropped_file_is_not_in_front_of_anything(path, reader, file):
    file.append([event(1)])
    assert indexes(reader.behind(None, 9, MUCH)) == [1]
    for index in range(2, 60):
        file.append([event(index)])
    found = drained(reader, ("log-a", 1, 0))
    assert [line.mark for line in found if line.after != (line.mark[1] - 1, 0)] == [
        line.mark for line in found if line.after is None
    ]
    assert [line.after for line in found].count(None) == 1


def test_old_events_are_passed_over_where_the_mark_is_not_known(path, reader, file):
    for index in range(1, 40):
        file.append([event(index)])
    kept = indexes(drained(reader, None))
    assert indexes(reader.behind(None, 2, MUCH, since_ms=30)) == [30, 31]
    assert reader.behind(None, 2, MUCH, since_ms=30)[0].after == (29, 0)
    assert indexes(reader.behind(("log-c", 1, 0), 2, MUCH, since_ms=30)) == [30, 31]
    assert indexes(reader.behind(("log-a", 20, 0), 1, MUCH, since_ms=30)) == [21]
    assert indexes(reader.behind(None, 1, MUCH, since_ms=1)) == kept[:1]
    assert reader.behind(None, 9, MUCH, since_ms=99) == []
    file.append([event(100)])
    assert indexes(reader.behind(None, 9, MUCH, since_ms=99)) == [100]


def test_files_that_are_older_as_a_whole_are_not_read(path, reader, file):
    """A wrong clock in them does no harm then."""
    for index in range(1_000_000, 1_000_012):
        file.append([event(index)])
    first = min(path.parent.glob("history-n0.0*"))
    os.utime(first, (900, 900))
    young = indexes(reader.behind(None, 1, MUCH, since_ms=900_001))
    assert young[0] > 1_000_000
    assert indexes(reader.behind(None, 1, MUCH, since_ms=900_000)) == [1_000_000]


def test_a_line_that_is_being_written_is_not_there_yet(path, reader):
    whole = event(1).to_json() + "\n"
    path.write_text(whole + whole[:20])
    assert indexes(reader.behind(None, 9, MUCH)) == [1]
    assert reader.behind(("log-a", 1, 0), 9, MUCH) == []
    path.write_text(whole + event(2).to_json() + "\n")
    assert indexes(reader.behind(("log-a", 1, 0), 9, MUCH)) == [2]


def test_lines_that_are_no_events_are_passed_over(path, reader):
    path.write_text(f'nonsense\n{event(1).to_json()}\n{{"log":"log-a"}}\n{event(2).to_json()}\n')
    assert indexes(reader.behind(None, 9, MUCH)) == [1, 2]
    assert indexes(reader.behind(("log-a", 1, 0), 9, MUCH)) == [2]


def test_the_place_is_found_in_large_files(path, reader):
    file = HistoryFile(path)
    file.append([event(index, reason="r" * 150) for index in range(1, 8_000)])
    file.close()
    assert path.stat().st_size > 3 * (256 << 10)
    for index in (1, 1_000, 4_321, 7_000, 7_998):
        assert indexes(reader.behind(("log-a", index, 0), 2, MUCH)) == [
            each for each in (index + 1, index + 2) if each < 8_000
        ]
