"""Old messages of a deleted topic never come back, whatever the disk does meanwhile (R39)."""

import asyncio

import pytest

from batonmq.runtime import disk
from batonmq.store import queue_table
from tests.shared.failing_disk import failing, walk_errors
from tests.shared.turns import counted_turns
from tests.shared.waiting import until

DELETIONS = "rmq_sys_deletions"


def open_master(rig):
    """A store whose system records name topics to be deleted, as the broker's do."""

    def set_hooks(store):
        store.on_system_record[DELETIONS] = lambda head, body: (
            store.shows_unconfirmed or store.delete_topic(body.decode())
        )

    rig.before_open = set_hooks
    return rig.open_master()


def with_messages(rig):
    store = open_master(rig)
    for queue_id in range(2):
        rig.put_confirmed(store, *[b"old"] * 30, topic="T", queue_id=queue_id)
    rig.put_confirmed(store, b"other", topic="Other")
    store.checkpoints.flush_derived()
    rig.put(store, b"T", topic=DELETIONS)
    store.end_turn()
    return store


def check_made_again(rig, store):
    put = rig.put(store, b"new", topic="T")
    assert put.queue_offset == 0
    store.end_turn()
    store.advance_confirm_offset(store.max_phy_offset)
    assert rig.read_bodies(store, "T") == [b"new"]
    assert store.queries.max_offset_in_queue("T", 1) == 0
    assert rig.read_bodies(store, "Other") == [b"other"]


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("how_long", ["once", ""], ids=["once", "for good"])
def test_r39_every_disk_call_of_a_deletion_may_fail(rig, error, how_long, caplog):
    """The deletion is carried out, or the process is killed and the next one carries it out."""

    def attempt(rule, number):
        rig.root = rig.folder / f"failing-{number}"
        store = with_messages(rig)
        caplog.clear()
        is_done = True
        with failing(rule.replace("once", how_long)):
            try:
                store.advance_confirm_offset(store.max_phy_offset)
            except OSError:
                is_done = False
        if is_done:
            store.prepare_master()
            check_made_again(rig, store)
            store.checkpoints.flush_derived()
        rig.kill(store)
        store = open_master(rig)
        store.advance_confirm_offset(store.max_phy_offset)
        if is_done:
            assert rig.read_bodies(store, "T") == [b"new"]
        else:
            check_made_again(rig, store)
        assert not list((rig.root / "consumequeue.deleted").glob("*/T"))
        store.abandon()
        return "disk_fault" in caplog.text

    assert walk_errors(f"* * {error}", attempt) > 4


def test_r39_what_cannot_be_unlinked_stays_aside_until_the_next_start(rig, caplog):
    store = with_messages(rig)
    with failing("rmtree * EPERM"):
        store.advance_confirm_offset(store.max_phy_offset)
        assert "deleted_queues_stay" in caplog.text
        check_made_again(rig, store)
        store.close()
    assert list((rig.root / "consumequeue.deleted").glob("*/T"))
    store = open_master(rig)
    assert rig.read_bodies(store, "T") == [b"new"]
    assert not list((rig.root / "consumequeue.deleted").glob("*/T"))


def test_r39_each_folder_has_its_place_aside_also_beside_what_earlier_starts_left(rig):
    """Nothing can be unlinked for two starts: each deletion is a rename, even so."""
    for start in range(2):
        with failing("rmtree * EPERM"):
            store = open_master(rig)
            for topic in (f"A{start}", f"B{start}"):
                rig.put_confirmed(store, b"old", topic=topic)
                store.checkpoints.flush_derived()
                rig.put_confirmed(store, topic.encode(), topic=DELETIONS)
                assert store.queries.max_offset_in_queue(topic, 0) == 0
            store.close()
    aside = sorted(path.name for path in (rig.root / "consumequeue.deleted").glob("*/*"))
    assert aside == ["A0", "A1", "B0", "B1"]


def test_r39_the_folder_is_gone_durably_before_the_deletion_counts(rig, monkeypatch):
    """Else a power cut behind the next checkpoint would bring it back."""
    store = with_messages(rig)
    steps = []
    for name in ("rename", "sync_directory"):
        owner = disk if name == "rename" else queue_table
        call = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda path, *to, name=name, call=call: (steps.append((name, path)), call(path, *to)),
        )
    store.advance_confirm_offset(store.max_phy_offset)
    queues = rig.root / "consumequeue"
    assert steps == [("rename", queues / "T"), ("sync_directory", queues)]


def test_r39_a_slave_carries_out_one_deletion_in_a_turn(rig):
    """Each goes to the disk. What stands between them is shown once, and nothing else is left."""
    topics = 60
    rig.root = rig.folder / "master"
    master = open_master(rig)
    for number in range(topics):
        rig.put(master, b"old", topic=f"T{number}")
    for number in range(topics):
        rig.put_confirmed(master, b"T%d" % number, topic=DELETIONS)
        rig.put_confirmed(master, b"%d" % number, topic="Other")
    log = rig.log_of(master)
    slave = rig.beside("slave").open()
    deletions = []

    def delete(head, body):
        deletions.append(turns.count)
        slave.delete_topic(body.decode())

    slave.on_system_record[DELETIONS] = delete
    slave.slave_log.append_replicated(0, log)

    async def play():
        slave.start(asyncio.get_running_loop(), pytest.fail)
        slave.advance_confirm_offset(len(log))
        await until(lambda: slave.confirm_offset == len(log))

    with counted_turns() as turns:
        asyncio.run(play())
    assert len(set(deletions)) == len(deletions) == topics
    assert rig.read_bodies(slave, "Other") == [b"%d" % number for number in range(topics)]
    kept = [store._files.consume_queues.ids_of for store in (slave, master)]
    for number in range(topics):
        assert kept[0](f"T{number}") == kept[1](f"T{number}")


def test_what_a_deletion_costs_does_not_grow_with_other_topics(rig):
    store = open_master(rig)
    lines, calls = [], []
    for topics in (20, 400):
        for number in range(topics):
            rig.put_confirmed(store, b"old", topic=f"{topics}-{number}")
        rig.put(store, b"%d-7" % topics, topic=DELETIONS)
        end = store.end_turn()
        with counted_turns() as turns:
            turns.run(store.advance_confirm_offset, end)
        assert store._files.consume_queues.ids_of(f"{topics}-7") == []
        lines.append(turns.lines)
        calls.append(turns.disk_calls)
    assert lines[0] == lines[1] and calls[0] == calls[1]
