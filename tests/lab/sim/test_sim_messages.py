"""The checker of what clients were promised: in which order a group first gets what has a key."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.old_positions import Received
from lab.sim.deletions import KeptProgress, Unaware
from lab.sim.messages import Messages, SentMessage
from lab.sim.records import LogRecord

TOPIC = "TopicB"
SENT = [SentMessage(f"m{n}", TOPIC, "key", n) for n in range(1, 4)]


class _Life:
    """Three messages of a key, acknowledged at queue offsets 1 to 3, for one group."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.expired: set[str] = set()
        self.messages = Messages(self.violations.append)
        self.messages.is_expired = self.expired.__contains__
        self.messages.join("GroupA", frozenset({TOPIC}))
        for sent in SENT:
            self.messages.note_acked(sent, (TOPIC, 0, sent.n))

    def deliver(self, *numbers: int) -> None:
        for n in numbers:
            self.messages.note_delivered("GroupA", SENT[n - 1], (TOPIC, 0, n))


@pytest.mark.parametrize("numbers", [(1, 2, 3), (1, 2, 1, 2, 3)])
def test_in_turn_and_again(numbers: tuple[int, ...]) -> None:
    life = _Life()
    life.deliver(*numbers)
    assert not life.violations


def test_first_after_a_later_one() -> None:
    life = _Life()
    life.deliver(2, 1)
    assert life.violations == ["order: GroupA gets key 1 first after 2"]


def test_what_had_expired_comes_late_from_a_member_that_pulled_it_before() -> None:
    life = _Life()
    life.expired.add("m1")
    life.deliver(2, 1, 3)
    assert not life.violations


@pytest.mark.parametrize("until_it_comes", [(2,), (2, 3)])
def test_what_expired_only_after_a_later_one_came_was_skipped(
    until_it_comes: tuple[int, ...],
) -> None:
    life = _Life()
    life.deliver(until_it_comes[0])
    life.expired.add("m1")
    life.deliver(*until_it_comes[1:], 1)
    assert life.violations == [f"order: GroupA gets key 1 first after {until_it_comes[-1]}"]


def test_what_expired_excuses_no_other() -> None:
    life = _Life()
    life.expired.add("m1")
    life.deliver(3, 1, 2)
    assert life.violations == ["order: GroupA gets key 2 first after 3"]


def _record(n: int) -> LogRecord:
    body = SENT[n - 1].body(20)
    return LogRecord(n * 100, 100, TOPIC, 0, n, 0, body, 0, 0, b"")


def test_an_unclean_election_excuses_what_stands_at_the_places_it_cut_and_nothing_else() -> None:
    """A group had got up to offset 3; what was at 2 and 3 is given up. New messages come there and
    behind: the first two may be skipped, the others may not."""
    life = _Life()
    life.deliver(1, 2, 3)
    messages = life.messages
    messages.give_up([_record(2), _record(3)])
    for n in (4, 5, 6):
        messages.note_acked(SentMessage(f"m{n}", TOPIC), (TOPIC, 0, n - 2))
    assert messages.missing("GroupA") == ["m6"]
    messages.note_acked(SentMessage("m0", TOPIC), (TOPIC, 0, 0))
    assert messages.missing("GroupA") == ["m6", "m0"]
    assert not life.violations


def test_what_was_given_up_and_is_sent_again_is_promised_again() -> None:
    life = _Life()
    messages, confirmed = life.messages, {"m1"}
    messages.is_confirmed = confirmed.__contains__
    messages.give_up([_record(2), _record(3)])
    messages.note_acked(SENT[1], (TOPIC, 0, 2))  # late, by the old master
    assert messages.missing("GroupA") == ["m1"]
    confirmed.add("m2")
    messages.note_acked(SENT[1], (TOPIC, 0, 2))
    assert messages.missing("GroupA") == ["m1", "m2"]
    assert not life.violations


def test_what_the_old_master_shows_after_the_election_counts_as_got_there() -> None:
    """It still shows what is given up: the group gets ahead by that, too, and by no more."""
    life = _Life()
    life.deliver(1)
    messages, confirmed = life.messages, {"m0", "m1", "m4", "m5", "m6"}
    messages.is_confirmed = confirmed.__contains__
    messages.give_up([_record(2), _record(3)])
    life.deliver(2, 3)
    for n in (4, 5, 6):
        messages.note_acked(SentMessage(f"m{n}", TOPIC), (TOPIC, 0, n - 2))
    assert messages.missing("GroupA") == ["m6"]
    assert not life.violations


def test_what_is_sent_again_may_be_skipped_only_where_it_stands_now() -> None:
    """m2 and m3 stand at 2 and 7 of what was confirmed since; the group had got up to 3."""
    life = _Life()
    life.deliver(1)
    messages, places = life.messages, {"m2": (TOPIC, 0, 2), "m3": (TOPIC, 0, 7)}
    messages.note_delivered("GroupA", SentMessage("m9", TOPIC), (TOPIC, 0, 4))
    messages.confirmed_at = places.get
    messages.give_up([_record(2), _record(3)])
    for sent in SENT[1:]:
        messages.note_acked(sent, (TOPIC, 0, sent.n))
    assert messages.missing("GroupA") == ["m3"]
    assert not life.violations


def test_r39_who_has_the_deletion_of_a_topic_shows_nothing_of_it() -> None:
    life = _Life()
    life.messages.begin_deletion(TOPIC)
    life.messages.is_unaware = lambda topic: True
    life.deliver(1)
    assert not life.violations, "R36: by a broker that is cut off"
    life.messages.is_unaware = lambda topic: False
    life.deliver(2)
    assert life.violations == ["R39: GroupA gets m2 of a topic that was deleted"]


def test_r36_a_process_lacks_a_change_that_was_answered_without_it() -> None:
    world, brokers = SimpleNamespace(now_s=1.0), [_broker(500), _broker(300)]
    unaware = Unaware(cast(Any, world), cast(Any, brokers))
    unaware.check()
    assert unaware.of(400, 0.5)
    assert not unaware.of(400, 1.0), "as long as it was not answered"
    assert not unaware.of(300, 0.5), "it has all"
    brokers.pop()
    world.now_s = 12.0
    unaware.check()
    assert not unaware.of(400, 0.5), "too long ago"


@pytest.mark.parametrize("forgets", [False, True])
def test_r39_what_a_master_sent_behind_a_deletion_outlives_a_restart(
    tmp_path: Path, forgets: bool
) -> None:
    violations: list[str] = []
    kept, host = (
        KeptProgress(violations.append),
        cast(Any, SimpleNamespace(name="b", incarnation="b")),
    )

    def started() -> ConsumerOffsetManager:
        offsets = ConsumerOffsetManager(tmp_path / "offsets.json")
        kept.watch(host, offsets)
        offsets.load()
        return offsets

    slave = started()
    slave.apply_from_master(1, {"T@g": {0: 12}, "U@g": {0: 7}}, 100)
    slave.delete_topic("U", 101)
    for write in slave.writes_due():
        write()
    again = started()
    if forgets:
        again.deletions.loaded_end, again._received = 0, Received()
    again.delete_topic("T", 100)
    assert len(violations) == forgets
    again.delete_topic("T", 102)
    assert len(violations) == forgets, "that one the master had not carried out"


def _broker(end: int) -> SimpleNamespace:
    store = SimpleNamespace(max_phy_offset=end)
    return SimpleNamespace(service=SimpleNamespace(store=store))
