"""What was read already, told from a few intervals: against a set of all names."""

import json
import random

import pyarrow as pa
import pytest

from spark.history_stream.seen import INDEX_SCHEMA, PART_BITS, Seen


def index(*rows):
    """(queue offset, log, raft index), of queue 0 of broker-a unless a broker stands in front."""
    full = [row if len(row) == 4 else ("broker-a", *row) for row in rows]
    return pa.Table.from_pylist(
        [
            {
                "broker": broker,
                "queue_id": 0,
                "queue_offset": offset,
                "log": log,
                "position": None if log is None else raft_index << PART_BITS,
            }
            for broker, offset, log, raft_index in full
        ],
        INDEX_SCHEMA,
    )


def again(seen):
    """As after a restart."""
    return Seen.from_json(json.loads(json.dumps(seen.to_json())))


def taken(seen, *rows):
    got = seen.take(index(*rows))
    return {queue[0]: ranges for queue, ranges in got.ranges.items()}, got.repeats


def test_events_in_order_are_new():
    seen = Seen()
    assert taken(seen, (0, "a", 3), (1, "a", 4), (2, "a", 9)) == ({"broker-a": [(0, 3)]}, 0)
    assert taken(seen, (3, "a", 10)) == ({"broker-a": [(3, 4)]}, 0)


def test_repeats_are_dropped_within_a_batch_and_behind_it():
    seen = Seen()
    rows = [(0, "a", 3), (1, "a", 4), (2, "a", 3), (3, "a", 4), (4, "a", 5)]
    assert taken(seen, *rows) == ({"broker-a": [(0, 2), (4, 5)]}, 2)
    seen = again(seen)
    assert taken(seen, (5, "a", 5), (6, "a", 5), (7, "a", 6)) == ({"broker-a": [(7, 8)]}, 2)
    assert taken(seen, *rows) == ({}, 5)


def test_logs_count_on_their_own():
    seen = Seen()
    assert taken(seen, (0, "a", 100), (1, "b", 1), (2, "b", 2)) == ({"broker-a": [(0, 3)]}, 0)
    assert taken(seen, (3, "a", 100), (4, "b", 2), (5, "b", 3)) == ({"broker-a": [(5, 6)]}, 2)


def test_messages_that_are_no_events_are_passed_over():
    assert taken(Seen(), (0, "a", 1), (1, None, 0), (2, "a", 2)) == (
        {"broker-a": [(0, 1), (2, 3)]},
        0,
    )


def test_a_publication_that_began_too_late_and_again_from_the_oldest_event_loses_none():
    seen = Seen()
    taken(seen, *((at, "a", 20 + at) for at in range(31)))  # 20 to 50
    # From the start, in two batches, with a late batch of a deposed leader in between.
    rows = [(31, "a", 1), (32, "a", 2), (33, "a", 40), (34, "a", 41), (35, "a", 3)]
    assert taken(seen, *rows) == ({"broker-a": [(31, 33), (35, 36)]}, 2)
    seen = again(seen)
    rows = [(36 + at, "a", 4 + at) for at in range(60)]  # 4 to 63
    assert taken(seen, *rows) == ({"broker-a": [(36, 52), (83, 96)]}, 31)


def test_what_another_broker_group_brought_is_not_new():
    seen = Seen()
    taken(seen, *((at, "a", 1 + at) for at in range(10)))
    moved = [("broker-b", at, "a", 5 + at) for at in range(10)]  # 5 to 14
    assert taken(seen, *moved) == ({"broker-b": [(6, 10)]}, 6)
    assert taken(seen, (10, "a", 11), (11, "a", 15)) == ({"broker-a": [(11, 12)]}, 1)


def test_nonsense_is_told():
    with pytest.raises(ValueError, match="cannot be told"):
        Seen.from_json([{"broker": "a"}])


class Publisher:
    """A queue as leaders fill it: batches in order, each from a mark of the queue's newest event,
    batches repeated, and late ones of deposed leaders."""

    def __init__(self, chance, broker):
        self.chance, self.broker = chance, broker
        self.events = []
        self.queue = []

    def lead(self):
        chance = self.chance
        late = []
        for _ in range(chance.randrange(1, 5)):
            self.events += self._some_more()
            at = self.events.index(self.queue[-1]) + 1 if self.queue else 0
            if chance.random() < 0.05:
                at = 0  # the mark was not known
            for _ in range(chance.randrange(1, 6)):
                batch = self.events[at : at + chance.randrange(1, 6)]
                for _ in range(chance.choice((1, 1, 2))):
                    self.queue += batch
                if late and chance.random() < 0.3:
                    self.queue += late
                late = batch if chance.random() < 0.3 else late
                at += len(batch)

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
    for _ in range(150):
        publisher = Publisher(chance, "broker-a")
        seen, names, done = Seen(), set(), 0
        for _ in range(chance.randrange(1, 6)):
            publisher.lead()
            while done < len(publisher.queue):
                end = min(len(publisher.queue), done + chance.randrange(1, 40))
                rows = [(at, *publisher.queue[at]) for at in range(done, end)]
                new = []
                for offset, *name in rows:
                    if tuple(name) not in names:
                        names.add(tuple(name))
                        new.append(offset)
                ranges, repeats = taken(seen, *rows)
                got = [
                    at for begin, stop in ranges.get("broker-a", ()) for at in range(begin, stop)
                ]
                assert got == new
                assert repeats == len(rows) - len(new)
                seen = again(seen)
                done = end if chance.random() < 0.8 else done  # the batch comes again
        assert sum(len(each["seen"]) for each in seen.to_json()) < 12
