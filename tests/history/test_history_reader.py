"""Reading the history in pages, while its files grow and are divided."""

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


def indexes(events):
    return [event.raft_index for event in events]


def behind(reader, mark, events_max, bytes_max=MUCH):
    return reader.page(mark, events_max, bytes_max).events


def drained(reader, mark, events_max=3):
    found = []
    while lines := behind(reader, mark, events_max, MUCH):
        assert len(lines) <= events_max
        found += lines
        mark = lines[-1].key
    return found


def test_events_come_as_they_stand_in_the_file(path, reader):
    file = HistoryFile(path)
    events = [event(1, broker_name="broker-a", reason="née"), event(1, 1), event(4)]
    file.append(events)
    file.close()
    assert behind(reader, None, 10, MUCH) == events


def test_it_goes_on_where_it_was_and_behind_any_event(path, reader):
    file = HistoryFile(path)
    file.append([event(index) for index in range(1, 6)])
    assert indexes(behind(reader, None, 2, MUCH)) == [1, 2]
    assert indexes(behind(reader, ("log-a", 2, 0), 2, MUCH)) == [3, 4]
    assert indexes(behind(reader, ("log-a", 1, 0), 9, MUCH)) == [2, 3, 4, 5]
    assert behind(reader, ("log-a", 5, 0), 9, MUCH) == []
    file.append([event(6)])
    file.close()
    assert indexes(behind(reader, ("log-a", 5, 0), 9, MUCH)) == [6]


def test_batches_are_bounded_in_bytes_but_never_empty(path, reader):
    file = HistoryFile(path)
    file.append([event(index, reason="r" * 100) for index in range(1, 5)])
    file.close()
    size = len(behind(reader, None, 1, MUCH)[0].to_json())
    assert indexes(behind(reader, None, 9, 2 * size)) == [1, 2]
    assert indexes(behind(reader, ("log-a", 2, 0), 9, 1)) == [3]


def test_a_page_tells_whether_it_follows_the_place_and_ends_with_its_log(path, reader):
    """A place may be that of an event which this node never had: it came in by a snapshot."""
    file = HistoryFile(path)
    file.append([event(5), event(9), event(1, log="log-b"), event(3, 1, log="log-b")])
    file.close()
    for place, indexes_found, follows in (
        (None, [5, 9], True),
        (("log-a", 7, 3), [9], True),
        (("log-a", 5, -1), [5, 9], True),
        (("log-a", 2, 0), [5, 9], False),
        (("log-a", 9, 0), [1, 3], True),
        (("log-c", 7, 0), [5, 9], False),
        (("log-b", 2, 0), [3], True),
        (("log-b", 4, 0), [], True),
    ):
        page = reader.page(place, 9, MUCH)
        assert (indexes(page.events), page.follows) == (indexes_found, follows), place


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
            lines = behind(reader, mark, 3, MUCH)
            seen += lines
            mark = lines[-1].key
    assert indexes([*seen, *drained(reader, mark)]) == list(range(1, 60))


def test_what_was_read_before_an_error_comes_again(path, reader, monkeypatch):
    """Else those events would be left out for good: they were given to no one."""
    file = HistoryFile(path)
    file.append([event(1), event(2), event(3)])
    assert indexes(behind(reader, None, 9, MUCH)) == [1, 2, 3]
    file.append([event(4), event(5)])
    file.close()
    path.rename(path.with_name("history-n0.000001.jsonl"))

    def failing(_):
        raise OSError("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("batonmq.runtime.disk.listdir", failing)
        with pytest.raises(OSError, match="too many"):
            behind(reader, ("log-a", 3, 0), 9, MUCH)
    file = HistoryFile(path)
    file.append([event(6)])
    file.close()
    assert indexes(behind(reader, ("log-a", 3, 0), 9, MUCH)) == [4, 5, 6]


def test_half_a_division_is_waited_for(path, reader):
    """The full file has its number, the empty one is not there yet; or never: it goes back."""
    file = HistoryFile(path)
    file.append([event(1)])
    assert indexes(behind(reader, None, 9, MUCH)) == [1]
    file.append([event(2)])
    full = path.with_name("history-n0.000001.jsonl")
    path.rename(full)
    assert indexes(behind(reader, ("log-a", 1, 0), 9, MUCH)) == [2]
    assert behind(reader, ("log-a", 2, 0), 9, MUCH) == []
    full.rename(path)
    file.append([event(3)])
    file.close()
    assert indexes(behind(reader, ("log-a", 2, 0), 9, MUCH)) == [3]


def test_a_division_that_is_taken_back_while_it_is_looked_at(path, reader, monkeypatch):
    file = HistoryFile(path)
    file.append([event(1)])
    assert indexes(behind(reader, None, 9, MUCH)) == [1]
    full = path.with_name("history-n0.000001.jsonl")
    path.rename(full)

    def taken_back(path_of_reader):
        if full.exists():
            full.rename(path)
        return files_of(path_of_reader)

    monkeypatch.setattr("batonmq.history.reader.files_of", taken_back)
    assert behind(reader, ("log-a", 1, 0), 9, MUCH) == []
    file.append([event(2)])
    file.close()
    assert indexes(behind(reader, ("log-a", 1, 0), 9, MUCH)) == [2]


def test_what_comes_between_the_last_look_and_a_division_is_read(path, reader, monkeypatch):
    """1. The reader finds nothing more in the file. 2. It gets a line more and is divided. 3. The
    reader sees that it has become a numbered one."""
    file = HistoryFile(path)
    file.append([event(1)])
    assert indexes(behind(reader, None, 9, MUCH)) == [1]
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
    assert indexes(behind(reader, None, 9, MUCH)) == [1]
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
    assert indexes(behind(reader, None, 9, MUCH)) == [1, 2, 3, 4, 5]
    with path.open("r+b") as torn:
        torn.truncate(size)
    file.append([event(index) for index in again])
    file.close()
    assert indexes(behind(reader, ("log-a", 5, 0), 9, MUCH)) == [i for i in again if i > 5]


def pages(reader, mark):
    """(indexes, follows) of the pages behind a mark, read on one by one."""
    found = []
    while (page := reader.page(mark, 99, MUCH)).events:
        found.append((indexes(page.events), page.follows))
        mark = page.events[-1].key
    return found


def test_a_page_ends_before_a_hole_of_the_file_and_the_next_one_tells(path, reader):
    """This node was away for long and came back by a snapshot; a line was garbled on the disk."""
    file = HistoryFile(path)
    file.append([event(1), event(2)])
    file.append([event(index) for index in range(2000, 2005)], cut=True)
    file.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-3], b"\x00 nonsense\n", *lines[-2:]]))
    rest = [([2000, 2001], False), ([2003, 2004], False)]
    assert pages(reader, None) == [([1, 2], True), *rest]
    assert pages(reader, ("log-a", 2, 0)) == rest


def test_a_file_that_was_dropped_unread_is_a_hole(path, reader, file, caplog):
    file.append([event(1)])
    assert indexes(behind(reader, None, 9)) == [1]
    for index in range(2, 60):
        file.append([event(index)])
    before, behind_it = pages(reader, ("log-a", 1, 0))
    assert before[1] and not behind_it[1]
    assert before[0][-1] + 1 < behind_it[0][0] and behind_it[0][-15:] == list(range(45, 60))
    assert "history_read_gap" in caplog.text


def test_a_line_that_is_being_written_is_not_there_yet(path, reader):
    whole = event(1).to_json() + "\n"
    path.write_text(whole + whole[:20])
    assert indexes(behind(reader, None, 9, MUCH)) == [1]
    assert behind(reader, ("log-a", 1, 0), 9, MUCH) == []
    path.write_text(whole + event(2).to_json() + "\n")
    assert indexes(behind(reader, ("log-a", 1, 0), 9, MUCH)) == [2]


def test_a_line_that_is_no_event_is_passed_over_as_a_hole(path, reader):
    path.write_text(f'nonsense\n{event(1).to_json()}\n{{"log":"log-a"}}\n{event(2).to_json()}\n')
    assert pages(reader, None) == [([1], True), ([2], False)]
    assert pages(reader, ("log-a", 1, 0)) == [([2], False)]


def test_the_place_is_found_in_large_files(path, reader):
    file = HistoryFile(path)
    file.append([event(index, reason="r" * 150) for index in range(1, 8_000)])
    file.close()
    assert path.stat().st_size > 3 * (256 << 10)
    for index in (1, 1_000, 4_321, 7_000, 7_998):
        assert indexes(behind(reader, ("log-a", index, 0), 2, MUCH)) == [
            each for each in (index + 1, index + 2) if each < 8_000
        ]
