"""What was read already, told from a few intervals: against a set of all names."""

import json
import random

import pyarrow as pa
import pytest

from batonmq.spark.history.stream_seen import INDEX_SCHEMA, PART_BITS, Seen


def index(*rows):
    """(queue offset, log, raft index, that of the event in front of it or None), of queue 0 of
    broker-a unless a broker stands in front."""
    full = [row if isinstance(row[0], str) else ("broker-a", *row) for row in rows]
    return pa.Table.from_pylist(
        [
            {
                "broker": broker,
                "queue_id": 0,
                "queue_offset": offset,
                "log": log,
                "position": None if log is None else raft_index << PART_BITS,
                "after": None if after is None else after << PART_BITS,
            }
            for broker, offset, log, raft_index, after in full
        ],
        INDEX_SCHEMA,
    )


def run(offset, log, *indexes, after=None, broker="broker-a"):
    """Messages of one file in a row."""
    return [
        (broker, offset + at, log, each, before)
        for at, (each, before) in enumerate(zip(indexes, (after, *indexes), strict=False))
    ]


def again(seen):
    """As after a restart."""
    return Seen.from_json(json.loads(json.dumps(seen.to_json())))


def taken(seen, *rows):
    """({broker: ranges of offsets that are new}, repeats)."""
    table = index(*rows)
    new = seen.take(table)
    ranges = {}
    for row in sorted(table.filter(pa.array(new)).to_pylist(), key=lambda row: row["queue_offset"]):
        mine, at = ranges.setdefault(row["broker"], []), row["queue_offset"]
        if mine and mine[-1][1] == at:
            mine[-1] = (mine[-1][0], at + 1)
        else:
            mine.append((at, at + 1))
    return ranges, len(table) - int(new.sum())


def test_events_in_order_are_new():
    seen = Seen()
    assert taken(seen, *run(0, "a", 3, 4, 9)) == ({"broker-a": [(0, 3)]}, 0)
    assert taken(seen, *run(3, "a", 10, after=9)) == ({"broker-a": [(3, 4)]}, 0)
    (kept,) = seen.to_json()
    assert kept == {"log": "a", "seen": [[3 << PART_BITS, 10 << PART_BITS]]}


def test_repeats_are_dropped_within_a_batch_and_behind_it():
    seen = Seen()
    rows = [*run(0, "a", 3, 4), *run(2, "a", 3, 4, 5)]
    assert taken(seen, *rows) == ({"broker-a": [(0, 2), (4, 5)]}, 2)
    seen = again(seen)
    rows = [*rows, *run(5, "a", 5, after=4), *run(6, "a", 5, 6, after=4)]
    assert taken(seen, *rows) == ({"broker-a": [(7, 8)]}, 7)


def test_parts_of_a_command_are_events_of_their_own():
    seen = Seen()
    rows = index(*run(0, "a", 3, 4)).to_pylist()
    rows[1] |= {"position": (3 << PART_BITS) + 1}
    both = pa.Table.from_pylist(rows, INDEX_SCHEMA)
    assert seen.take(both.slice(1)).tolist() == [True]
    assert seen.take(both).tolist() == [True, False]
    assert seen.take(both).tolist() == [False, False]


def test_logs_count_on_their_own():
    seen = Seen()
    rows = [*run(0, "a", 100), *run(1, "b", 1, 2)]
    assert taken(seen, *rows) == ({"broker-a": [(0, 3)]}, 0)
    rows = [*run(3, "a", 100), *run(4, "b", 2, 3)]
    assert taken(seen, *rows) == ({"broker-a": [(5, 6)]}, 2)


def test_what_a_hole_hid_is_new_when_it_comes_later():
    """A topic lost 101 to 499 before they were read; they are published to another one later."""
    seen = Seen()
    taken(seen, *run(0, "a", *range(1, 101)))
    taken(seen, *run(499, "a", *range(500, 601), after=499))
    seen = again(seen)
    later = run(0, "a", *range(1, 603), broker="broker-b")
    assert taken(seen, *later) == ({"broker-b": [(100, 499), (600, 602)]}, 201)
    (kept,) = seen.to_json()
    assert len(kept["seen"]) == 1


def test_an_event_that_does_not_say_what_is_in_front_of_it_stands_for_itself():
    seen = Seen()
    taken(seen, *run(0, "a", 1, 2, 3))
    taken(seen, (3, "a", 9, None), (4, "a", 5, 7))  # nor does one behind a later one
    assert taken(seen, *((5 + at, "a", 4 + at, None) for at in range(6))) == (
        {"broker-a": [(5, 6), (7, 10)]},
        2,
    )


def test_a_publication_that_began_too_late_and_again_from_the_oldest_event_loses_none():
    seen = Seen()
    taken(seen, *run(0, "a", *range(20, 51)))
    # From the start, in two batches, with a late batch of a deposed leader in between.
    rows = [*run(31, "a", 1, 2), *run(33, "a", 40, 41, after=39), *run(35, "a", 3, after=2)]
    assert taken(seen, *rows) == ({"broker-a": [(31, 33), (35, 36)]}, 2)
    seen = again(seen)
    rows = run(36, "a", *range(4, 64), after=3)
    assert taken(seen, *rows) == ({"broker-a": [(36, 52), (83, 96)]}, 31)


def test_what_another_broker_group_brought_is_not_new():
    seen = Seen()
    taken(seen, *run(0, "a", *range(1, 11)))
    moved = run(0, "a", *range(5, 15), broker="broker-b", after=4)
    assert taken(seen, *moved) == ({"broker-b": [(6, 10)]}, 6)
    assert taken(seen, *run(10, "a", 11, after=10), *run(11, "a", 15, after=14)) == (
        {"broker-a": [(11, 12)]},
        1,
    )


def test_holes_are_told_until_what_was_there_comes():
    seen = Seen()
    taken(seen, *run(0, "a", 1, 2, 3), *run(3, "b", 7, 8))
    assert seen.holes() == []
    taken(seen, *run(5, "a", 9, 10), *run(7, "a", 20, after=10), *run(8, "a", 30))
    assert again(seen).holes() == [("a", 3, 9), ("a", 20, 30)]
    taken(seen, *run(9, "a", 9, after=3))
    assert seen.holes() == [("a", 20, 30)]
    taken(seen, *run(10, "a", 25, 30, after=20))
    assert seen.holes() == []


def test_nonsense_is_told():
    with pytest.raises(ValueError, match="cannot be parsed"):
        Seen.from_json([{"broker": "a"}])


class Publisher:
    """Queues as leaders fill them: batches in order, each from a mark of the queue's newest event,
    batches repeated, late ones of deposed leaders, files that begin late, parts of a topic lost."""

    def __init__(self, chance):
        self.chance = chance
        self.events = []
        self.queues = {"broker-a": [], "broker-b": []}  # broker -> [(event, event in front)]

    def lead(self):
        chance = self.chance
        late = []
        for _ in range(chance.randrange(1, 5)):
            queue = self.queues[chance.choice(("broker-a", "broker-a", "broker-b"))]
            self.events += self._some_more()
            file = self.events[chance.choice((0, 0, 0, len(self.events) // 2)) :]
            mark = queue[-1][0] if queue else None
            at = file.index(mark) + 1 if mark in file else 0
            if chance.random() < 0.1:
                at = chance.randrange(len(file) + 1)  # the mark was not known: from a time on
            for _ in range(chance.randrange(1, 6)):
                batch = [(file[i], self._before(file, i)) for i in range(at, len(file))]
                batch = batch[: chance.randrange(1, 6)]
                for _ in range(chance.choice((1, 1, 2))):
                    queue += batch
                if late and chance.random() < 0.3:
                    queue += late
                late = batch if chance.random() < 0.3 else late
                at += len(batch)
            if chance.random() < 0.1:
                del queue[chance.randrange(len(queue) + 1) :]  # an unclean election

    @staticmethod
    def _before(file, at):
        same = at > 0 and file[at - 1][0] == file[at][0]
        return file[at - 1][1] if same else None

    def _some_more(self):
        log, last = self.events[-1] if self.events else ("log-0", 0)
        if self.chance.random() < 0.1:
            log, last = f"log-{int(log[4:]) + 1}", 0
        more = []
        for _ in range(self.chance.randrange(12)):
            last += self.chance.randrange(1, 4)
            more.append((log, last))
        return more


def test_by_chance_it_tells_the_same_as_a_set_of_all_names():
    chance = random.Random(7)
    came_late = 0
    for _ in range(60):
        publisher = Publisher(chance)
        seen, names, done = Seen(), set(), dict.fromkeys(publisher.queues, 0)
        for _ in range(chance.randrange(1, 8)):
            publisher.lead()
            for broker, queue in publisher.queues.items():
                if chance.random() < 0.3:  # retention took what was not read yet
                    done[broker] += chance.randrange(10)
                elif chance.random() < 0.1:  # under a new checkpoint
                    done[broker] = 0
                while done[broker] < len(queue):
                    end = min(len(queue), done[broker] + chance.randrange(1, 40))
                    rows = [
                        (broker, at, *queue[at][0], queue[at][1]) for at in range(done[broker], end)
                    ]
                    new = []
                    for _, offset, *name, _ in rows:
                        if tuple(name) not in names:
                            newest = max((n for n in names if n[0] == name[0]), default=None)
                            came_late += newest is not None and tuple(name) < newest
                            names.add(tuple(name))
                            new.append(offset)
                    ranges, repeats = taken(seen, *rows)
                    spans = ranges.get(broker, ())
                    assert [at for begin, stop in spans for at in range(begin, stop)] == new
                    assert repeats == len(rows) - len(new)
                    seen = again(seen)
                    if chance.random() < 0.8:  # else the batch comes again
                        done[broker] = end
    assert came_late > 30


def test_the_state_grows_with_the_holes_and_not_with_the_events():
    seen = Seen()
    for first in range(1, 3_000, 100):
        taken(seen, *run(first, "a", *range(first, first + 100), after=first - 1))
    (kept,) = seen.to_json()
    assert len(kept["seen"]) == 1
