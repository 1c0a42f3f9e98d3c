"""What the history tells of a planned switch, whole and in pieces."""

from __future__ import annotations

from batonmq.admin_types import HistoryEvent
from batonmq.switch_story import SwitchStory, switch_story


def event(kind: str, broker_id: int, epoch: int, time_ms: int, **fields: object) -> HistoryEvent:
    return HistoryEvent(1, time_ms, kind, "broker-a", broker_id, epoch, 1, fields)


DRAINED = event("drained", 1, 7, 1_000, json='{"heldMs": 5, "drainedOffset": 900}')
ELECTED = event("elected", 2, 8, 1_008, master_before=1)
FIRST_ACK = event("first_ack", 2, 8, 1_020)
BEFORE = event("elected", 1, 7, 10, master_before=2)


def test_the_whole_story() -> None:
    told = switch_story([BEFORE, ELECTED, FIRST_ACK, DRAINED], 8)
    assert told == SwitchStory(1, 2, 8, held_ms=5, drained_offset=900, gap_ms=25)


def test_a_switch_that_no_send_waited_for_ends_with_the_opening() -> None:
    opened = event("opened", 2, 8, 1_012)
    for waited_ms, time_ms, gap_ms, idle in ((2, 1_990, 17, True), (970, 1_990, 995, False)):
        first = event("first_ack", 2, 8, time_ms, json=f'{{"waitedMs": {waited_ms}}}')
        told = switch_story([BEFORE, ELECTED, opened, first, DRAINED], 8)
        assert told == SwitchStory(1, 2, 8, 5, 900, gap_ms, idle)


def test_what_is_not_told_is_none() -> None:
    assert switch_story([BEFORE, DRAINED], 8) is None
    assert switch_story([BEFORE, ELECTED, FIRST_ACK], 8) == SwitchStory(1, 2, 8)
    assert switch_story([BEFORE, ELECTED, DRAINED], 8) == SwitchStory(1, 2, 8, 5, 900)


def test_a_draining_that_came_to_nothing_is_not_of_a_later_election() -> None:
    later = event("elected", 3, 9, 5_000, master_before=2)
    assert switch_story([BEFORE, DRAINED, ELECTED, later], 9) == SwitchStory(2, 3, 9)
    # Drained twice in one epoch, since the first time was refused: the last one counts.
    again = event("drained", 1, 7, 2_000, json='{"heldMs": 9, "drainedOffset": 950}')
    told = switch_story([DRAINED, again, ELECTED, FIRST_ACK], 8)
    assert told is not None and told.held_ms == 9
