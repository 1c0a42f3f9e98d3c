"""Where a group continues to pop: nothing is committed before the pop is confirmed (R30)."""

from pathlib import Path
from unittest.mock import Mock

from batonmq.broker.config import BrokerConfig
from batonmq.broker.pop.pop_positions import PopPositions
from batonmq.broker.pop.pop_table import CheckPoint
from batonmq.broker.pop.reviver import Reviver
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager

KEY = ("g", "T", 0)


def positions(folder: Path) -> tuple[PopPositions, ConsumerOffsetManager]:
    offsets = ConsumerOffsetManager(folder / "consumerOffset.json")
    return PopPositions(offsets), offsets


def test_r30_each_write_commits_what_it_took_and_no_more(tmp_path):
    made, offsets = positions(tmp_path)
    first, second = made.take(KEY, 3), made.take(KEY, 5)
    assert made.next_of(KEY) == 5 and offsets.query(*KEY) == -1
    made.confirmed(KEY, first, 3, ok=True)
    assert made.next_of(KEY) == 5 and offsets.query(*KEY) == 3
    made.confirmed(KEY, second, 5, ok=True)
    assert made.next_of(KEY) == offsets.query(*KEY) == 5


def test_r30_a_write_that_is_not_confirmed_commits_nothing(tmp_path):
    made, offsets = positions(tmp_path)
    made.confirmed(KEY, made.take(KEY, 3), 3, ok=False)
    assert made.next_of(KEY) == 3 and offsets.query(*KEY) == -1


def test_r30_what_is_skipped_behind_a_write_waits_for_it(tmp_path):
    made, offsets = positions(tmp_path)
    taken = made.take(KEY, 3)
    made.skip(KEY, 9)
    assert made.next_of(KEY) == 9 and offsets.query(*KEY) == -1
    made.confirmed(KEY, taken, 3, ok=True)
    assert offsets.query(*KEY) == 9
    made.skip(KEY, 12)
    assert offsets.query(*KEY) == 12


def test_who_else_sets_the_offset_is_followed(tmp_path):
    made, offsets = positions(tmp_path)
    offsets.commit(*KEY, 0)
    taken = made.take(KEY, 3)
    offsets.commit(*KEY, 1)
    assert made.next_of(KEY) == 1
    made.confirmed(KEY, taken, 3, ok=True)
    assert offsets.query(*KEY) == 1
    offsets.commit(*KEY, 0)
    assert made.next_of(KEY) == 0, "also back to where that pop began"


def test_r39_another_message_in_the_place_of_the_popped_one_is_not_given_again():
    """The topic was deleted and made again: these very messages are gone."""
    path, topics = Mock(), Mock(topics={"T"})
    path.store.deleting_topics = ()
    path.store.queries.phy_offset_of.return_value = 900
    point = CheckPoint(KEY, 1000, 2000, [0, 1], 100, 0, {0, 1})
    done: list[int] = []
    Reviver(path, topics, BrokerConfig(), lambda what, put: put()).revive(point, done)
    assert done == [0, 1]
    path.store.appender.put_message.assert_not_called()
