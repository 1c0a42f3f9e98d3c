"""The consistent point against Java's samples and against logs compared byte by byte."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.epoch.entry import NO_CONSISTENT_POINT, EpochEntry, consistent_point, within_log

OWN = (EpochEntry(1, 100), EpochEntry(2, 300), EpochEntry(3, 500))


def entries(*pairs: tuple[int, int]) -> tuple[EpochEntry, ...]:
    return tuple(EpochEntry(epoch, start) for epoch, start in pairs)


@pytest.mark.parametrize(
    ("name", "own_max", "other", "other_max", "expected"),
    [
        ("sample 1", 700, entries((1, 100), (2, 300), (3, 450)), 600, 450),
        ("sample 2", 700, entries((1, 100), (2, 300), (3, 500)), 600, 600),
        ("sample 3", 700, entries((1, 200), (2, 500)), 600, NO_CONSISTENT_POINT),
        ("sample 4", 700, entries((1, 100), (2, 300), (3, 500), (4, 800)), 1000, 700),
        ("an expired prefix at the other", 700, entries((3, 500), (4, 600)), 900, 600),
        ("nothing known at the other", 700, (), 900, NO_CONSISTENT_POINT),
        ("a single epoch that has no bytes here yet", 500, entries((3, 500)), 900, 500),
        ("epochs without bytes", 500, entries((1, 100), (2, 300), (3, 500), (5, 500)), 700, 500),
    ],
)
def test_find_consistent_point(
    name: str, own_max: int, other: tuple[EpochEntry, ...], other_max: int, expected: int
) -> None:
    assert consistent_point(OWN, own_max, other, other_max) == expected
    assert consistent_point(other, other_max, OWN, own_max) == expected


def test_an_empty_log_whose_first_epoch_the_master_knows_begins_at_zero() -> None:
    """Elected on an empty log, deposed before a write: nothing to cut, and nothing refused."""
    assert consistent_point(entries((1, 0)), 0, entries((1, 0), (2, 50)), 80) == 0


def test_only_the_epoch_at_the_very_end_is_shared() -> None:
    """Everything older expired here; the last epoch starts at the log's end."""
    assert consistent_point(entries((3, 500)), 500, entries((3, 500)), 900) == 500


def test_r25_an_entry_above_the_own_log_end_counts_for_nothing() -> None:
    """Crash after an early-labelled chunk: (3, 500) is noted, the log ends at 450. Java answers
    700, above the own log."""
    other = entries((1, 100), (2, 300), (3, 500))
    assert consistent_point(OWN, 450, other, 700) == 450


def test_r21_bytes_without_epochs_have_no_consistent_point() -> None:
    assert consistent_point((), 5000, OWN, 700) == NO_CONSISTENT_POINT


@dataclass
class Replica:
    """A log as the list of its bytes; a byte is known by who wrote it (epoch) and where."""

    labels: list[int] = field(default_factory=list)
    epochs: list[tuple[int, int]] = field(default_factory=list)

    def become_master(self, epoch: int) -> None:
        self.epochs = [(e, start) for e, start in self.epochs if start <= len(self.labels)]
        self.epochs.append((epoch, len(self.labels)))

    def write(self, count: int) -> None:
        self.labels += [self.epochs[-1][0]] * count

    def follow(self, master: "Replica", count: int, *, label_early: bool) -> None:
        """Cut to the common bytes, found by comparing them, then copy up to `count` bytes on."""
        point = common_bytes(self, master)
        del self.labels[point:]
        self.epochs = [(e, start) for e, start in self.epochs if start < point]
        self.labels += master.labels[point : point + count]
        known = {epoch for epoch, _ in self.epochs}
        end = len(self.labels) + (1000 if label_early else 0)
        last = self.epochs[-1][0] if self.epochs else -1
        self.epochs += [
            (e, start) for e, start in master.epochs if e not in known and e > last and start <= end
        ]

    def entries(self) -> tuple[EpochEntry, ...]:
        return entries(*self.epochs)


def common_bytes(one: Replica, two: Replica) -> int:
    for position, (mine, theirs) in enumerate(zip(one.labels, two.labels, strict=False)):
        if mine != theirs:
            return position
    return min(len(one.labels), len(two.labels))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("elect"), st.integers(0, 2), st.just(0), st.just(False)),
        st.tuples(st.just("write"), st.integers(0, 2), st.integers(1, 5), st.just(False)),
        st.tuples(st.just("follow"), st.integers(0, 2), st.integers(0, 8), st.booleans()),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(actions)
def test_consistent_point_is_the_length_of_the_common_bytes(
    history: list[tuple[str, int, int, bool]],
) -> None:
    """Three replicas are elected, write and follow in any order, also uncleanly; for each pair the
    answer from the epoch lists equals the answer of comparing all bytes."""
    replicas = [Replica(), Replica(), Replica()]
    master, epoch = 0, 1
    replicas[0].become_master(1)
    for action, who, count, early in history:
        if action == "elect":
            epoch += 1
            master = who
            replicas[who].become_master(epoch)
        elif action == "write":
            replicas[master].write(count)
        elif who != master:
            replicas[who].follow(replicas[master], count, label_early=early)
    for one in replicas:
        for two in replicas:
            expected = common_bytes(one, two)
            ours = within_log(one.entries(), len(one.labels))
            theirs = within_log(two.entries(), len(two.labels))
            shared = {(e.epoch, e.start_offset) for e in ours} & {
                (e.epoch, e.start_offset) for e in theirs
            }
            if not shared:
                expected = NO_CONSISTENT_POINT
            assert (
                consistent_point(one.entries(), len(one.labels), two.entries(), len(two.labels))
                == expected
            )
