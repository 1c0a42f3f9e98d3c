"""The history that a node tells: its replicated state, and from the files what that has lost."""

import asyncio
import json

import pytest

from batonmq.controller.history_log import HistoryLog
from batonmq.controller.raft.log import Commit
from batonmq.controller.rules.state import ControllerState
from batonmq.history.event import HISTORY_EVENTS_MAX, EventKind, HistoryEvent
from batonmq.history.file import HistoryFile


def event(index, log="now", name="broker-a"):
    return HistoryEvent(
        log=log, raft_index=index, time_ms=index, kind=EventKind.ELECTED, broker_name=name
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history-n0.jsonl"


@pytest.fixture
def file(path):
    made = HistoryFile(path, size_max=4_000, files=1_000)
    yield made
    made.close()


def answered(path, ask):
    history = HistoryLog(path)
    history.open(size_max=4_000, files=1_000)
    answer = asyncio.run(ask(history))
    history.close()
    return answer


def told(path, state, name="", after=0, limit=0):
    events = answered(path, lambda history: history.events(state, name, after, limit))
    return [(each.log, each.raft_index) for each in events]


def test_the_state_is_told_while_it_holds_everything(path, file):
    events = tuple(event(index) for index in (1, 2, 3))
    file.append(events)
    state = ControllerState(log_name="now", history=events)
    file.close()
    assert told(path, state) == [("now", 1), ("now", 2), ("now", 3)]
    assert told(path, state, after=2) == [("now", 3)]
    assert told(path, state, name="broker-b") == []


def test_earlier_logs_are_told_from_the_files(path, file):
    file.append([event(7, log="old"), event(8, log="old", name="broker-b")])
    file.append([event(1)])
    state = ControllerState(log_name="now", history=(event(1),))
    assert told(path, state) == [("old", 7), ("old", 8), ("now", 1)]
    assert told(path, state, name="broker-b") == [("old", 8)]
    assert told(path, state, limit=2) == [("old", 8), ("now", 1)]
    assert told(path, state, after=5) == []


def test_what_the_state_had_to_forget_is_told_from_the_files(path, file):
    everything = [event(index) for index in range(1, HISTORY_EVENTS_MAX + 51)]
    for one in everything:
        file.append([one])
    kept = tuple(everything[-HISTORY_EVENTS_MAX:])
    state = ControllerState(log_name="now", history=kept)
    assert told(path, state) == [("now", each.raft_index) for each in everything]


def paged(path, state, after, limit=0):
    """(events, whether they follow) as a stream of the history asks for them."""
    page = answered(path, lambda history: history.page(state, after, limit))
    return [(each.log, each.raft_index) for each in page.events], page.follows


def test_a_page_comes_from_the_state_if_that_goes_back_far_enough(path, file):
    everything = [event(index) for index in range(1, HISTORY_EVENTS_MAX + 51)]
    file.append(everything[:-20])  # the disk is full
    state = ControllerState(log_name="now", history=tuple(everything[-HISTORY_EVENTS_MAX:]))
    newest = HISTORY_EVENTS_MAX + 50
    rest = [("now", index) for index in range(newest - 29, newest + 1)]
    assert paged(path, state, ("now", newest - 30, 0)) == (rest, True)
    assert paged(path, state, ("now", newest - 30, 0), 2) == (rest[:2], True)
    assert paged(path, state, ("now", newest, 0)) == ([], True)
    assert paged(path, state, ("now", 49, 0), 3) == ([("now", 50), ("now", 51), ("now", 52)], True)


def test_a_page_of_what_the_state_had_to_forget_comes_from_the_files(path, file):
    file.append([event(7, log="old"), event(8, log="old")])
    everything = [event(index) for index in range(1, HISTORY_EVENTS_MAX + 51)]
    file.append(everything)
    state = ControllerState(log_name="now", history=tuple(everything[-HISTORY_EVENTS_MAX:]))
    assert paged(path, state, None) == ([("old", 7), ("old", 8)], True)
    assert paged(path, state, ("old", 8, 0), 2) == ([("now", 1), ("now", 2)], True)
    assert paged(path, state, ("now", 3, 0), 2) == ([("now", 4), ("now", 5)], True)
    assert paged(path, state, ("of another cluster", 3, 0), 1) == ([("old", 7)], False)


def test_a_state_that_never_forgot_needs_no_file(path):
    """This node came in by a snapshot, and its file was lost."""
    state = ControllerState(log_name="now", history=(event(5), event(9)))
    assert paged(path, state, ("now", 5, -1)) == ([("now", 5), ("now", 9)], True)
    assert paged(path, state, ("now", 7, 0)) == ([("now", 9)], True)


def snapshot(*indexes):
    events = tuple(event(index) for index in indexes)
    state = ControllerState(log_name="now", history=events)
    return Commit(indexes[-1], None, (), (), state)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_snapshot_that_holds_no_more_than_the_newest_leaves_a_gap_that_is_marked(path, lost):
    """Only where it is full, and begins behind what this node has."""
    history = HistoryLog(path)
    history.open(size_max=1 << 20, files=4)
    history.write(snapshot(1, 2, 3))
    history.write(snapshot(7, 8))  # the whole history: there was nothing in between
    first = 8 + lost
    history.write(snapshot(*range(first, first + HISTORY_EVENTS_MAX)))
    history.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["raft_index"] for each in lines if each.get("gap")] == [9] * lost
