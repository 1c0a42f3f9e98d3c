"""Queue locks as a table: one owner, leases, the change that others must know of, the file."""

from pathlib import Path

import pytest

from batonmq.broker.tables.queue_locks import LEASE_MS, LockChange, QueueLockManager
from tests.shared.turns import counted_turns

Q0, Q1 = ("T", 0), ("T", 1)


def manager(folder: Path, name: str = "queueLocks") -> QueueLockManager:
    return QueueLockManager(folder / f"{name}.json")


def test_a_queue_has_one_owner_until_its_lease_is_over(tmp_path):
    locks = manager(tmp_path)
    granted, change = locks.grant("g", "a", [Q0, Q1], 1000)
    assert granted == [Q0, Q1]
    assert change == LockChange(group="g", client_id="a", queues=[Q0, Q1])
    assert locks.grant("g", "b", [Q0], 1000) == ([], None)
    assert locks.grant("other", "b", [Q0], 1000)[0] == [Q0], "groups do not meet"
    assert locks.grant("g", "a", [Q0], 50_000) == ([Q0], None), "renewed, and nothing to tell"
    later = 1001 + LEASE_MS
    granted, change = locks.grant("g", "b", [Q0, Q1], later)
    assert granted == [Q1] and change is not None and change.queues == [Q1]
    assert locks.has_locks("g", later) and not locks.has_locks("g", later + LEASE_MS + 1)


def test_only_the_owner_gives_back(tmp_path):
    locks = manager(tmp_path)
    locks.grant("g", "a", [Q0, Q1], 0)
    assert locks.release("g", "b", [Q0]) is None
    change = locks.release("g", "a", [Q0, ("U", 9)])
    assert change == LockChange(group="g", client_id="a", queues=[Q0], released=True)
    assert locks.grant("g", "b", [Q0], 0)[0] == [Q0]
    locks.apply(change)  # shown again by the log: b's lock is not a's
    assert locks.grant("g", "a", [Q0], 0)[0] == []


def test_a_new_master_takes_every_lock_for_renewed(tmp_path):
    """R30: a slave that saw the record honours the lock for a whole lease after its election."""
    master, slave = manager(tmp_path, "a"), manager(tmp_path, "b")
    _, change = master.grant("g", "a", [Q0], 1000)
    assert change is not None
    slave.apply(change)
    slave.renew_all(900_000)
    assert slave.grant("g", "b", [Q0], 900_000 + LEASE_MS)[0] == []
    assert slave.grant("g", "a", [Q0], 900_000 + LEASE_MS)[0] == [Q0]
    assert slave.grant("g", "b", [Q0], 900_001 + 2 * LEASE_MS)[0] == [Q0]


def test_the_file_and_the_answer_for_slaves_bring_the_owners_back(tmp_path):
    locks = manager(tmp_path)
    locks.grant("g", "a", [Q0, ("T%", 3)], 0)
    locks.grant("h", "b", [Q1], 0)
    locks.write()
    assert not locks.writes_due()
    again, slave = manager(tmp_path), manager(tmp_path, "slave")
    again.load()
    slave.replace_all(type(locks.wrapper()).decode(locks.wrapper().encode()))
    for other in (again, slave):
        other.renew_all(0)
        assert other.grant("g", "b", [Q0, ("T%", 3)], 1)[0] == []
        assert other.grant("h", "b", [Q1], 1) == ([Q1], None)


def test_what_ran_out_is_found_a_part_at_a_time(tmp_path):
    locks = manager(tmp_path)
    queues = [("T", number) for number in range(2500)]
    locks.grant("g", "a", queues, 0)
    locks.grant("h", "b", [Q0], 30_000)
    found = []
    calls = 0
    while len(found) < 2500:
        found += locks.expired(LEASE_MS + 1)
        calls += 1
    assert {queue for _, _, queue in found} == set(queues) and calls > 2
    assert {group for group, _, _ in found} == {"g"}


@pytest.mark.counts_turns
def test_r58_what_expired_and_what_did_not_change_costs_no_walk(tmp_path):
    """A group may have half a million locks, and each retry of it asks whether it has any."""
    locks, many = manager(tmp_path), [("T", number) for number in range(10_000)]
    locks.grant("g", "a", many, 0)
    locks.grant("h", "b", [Q0], 0)
    before = locks.wrapper().locks
    locks.grant("h", "c", [Q0, Q1], 1 + LEASE_MS)
    answers = []
    with counted_turns() as turns:
        turns.run(lambda: answers.append(locks.has_locks("g", 1 + LEASE_MS)))
        turns.run(lambda: answers.append(locks.wrapper().locks))
    assert turns.lines < 50
    assert answers == [False, before | {"h": {"c": [Q0, Q1]}}] and before["h"] == {"b": [Q0]}
    assert locks.grant("g", "a", many[:1], 2 * LEASE_MS)[0] == many[:1]
    assert locks.has_locks("g", 3 * LEASE_MS)


def test_r58_places_are_free_again_after_each_way_a_lock_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("batonmq.broker.tables.queue_locks.INVENTED_MAX", 0)
    monkeypatch.setattr("batonmq.broker.tables.queue_locks.LOCKS_MAX", 2)
    locks = manager(tmp_path)
    assert locks.grant("g", "a", [Q0, Q1, ("T", 2)], 0)[0] == [Q0, Q1]
    late = LEASE_MS + 1
    assert locks.grant("g", "b", [Q0], late)[0] == [Q0], "another owner takes no place"
    assert locks.grant("h", "b", [Q0], late)[0] == []
    change = LockChange(group="g", client_id="b", queues=[Q0], released=True)
    for _ in range(2):  # the log may show it twice
        locks.apply(change)
    assert locks.grant("h", "b", [Q0, Q1], late)[0] == [Q0]
    locks.replace_all(type(locks.wrapper())())
    assert locks.grant("h", "b", [Q0, Q1], late)[0] == [Q0, Q1]
