"""A log that holds records with names that no queue can have opens and serves (R46)."""

import hashlib
from unittest.mock import patch

import pytest

from batonmq.runtime import disk
from batonmq.store.appender import Appender
from batonmq.store.errors import PutIllegal
from batonmq.store.queue_table import DeletedFolders
from tests.store.test_bulk_dispatch import bulk

BAD = ["a/b", "../commitlog", "..", "a\0b", "%RETRY%" + "g" * 249, "/absolute"]


def with_bad_records(rig):
    """A closed store: each bad record has acknowledged ones of T before and behind it."""
    store = rig.open_master()
    with patch.object(Appender, "_refuse_bad_place", lambda self, message: None):
        for name in BAD:
            rig.put_confirmed(store, b"before " + name.encode(), topic="T")
            rig.put_confirmed(store, b"bad", topic=name)
        rig.put_confirmed(store, b"bad", topic="T", queue_id=-5)
        rig.put_confirmed(store, b"last", topic="T")
    check(rig, store)
    return store


def check(rig, store):
    store.checkpoints.flush_derived()
    bodies = [b"before " + name.encode() for name in BAD]
    assert rig.read_bodies(store, "T") == [*bodies, b"last"]
    shown = {(topic.decode(), queue) for topic, queue in store.health.bad_names}
    assert shown == {(name, 0) for name in BAD} | {("T", -5)}
    assert set(disk.listdir(rig.root / "consumequeue")) <= {"T"}


def log_hash(rig):
    files = sorted((rig.root / "commitlog").glob("0*"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@pytest.mark.parametrize("always", [True, False], ids=["bulk", "each"])
def test_r46_bad_records_are_skipped_and_reported_at_every_start(rig, always):
    store = with_bad_records(rig)
    store.close()
    before = log_hash(rig)
    for derived_too in (False, True):
        if derived_too:
            disk.rmtree(rig.root / "consumequeue")
            disk.remove(rig.root / "checkpoint")
        with bulk(always=always):
            store = rig.open_master()
            store.advance_confirm_offset(store.max_phy_offset)
        if derived_too:
            check(rig, store)
        store.close()
    assert log_hash(rig) == before


def test_r46_a_new_master_takes_over_bad_records(rig, store):
    with patch.object(Appender, "_refuse_bad_place", lambda self, message: None):
        rig.put(store, b"bad", topic="a/b")
        rig.put(store, b"good", topic="T")
        store.end_turn()
    store.prepare_master()
    store.advance_confirm_offset(store.max_phy_offset)
    assert rig.read_bodies(store, "T") == [b"good"]


@pytest.mark.parametrize("name", [*BAD, "", "."])
def test_r46_nothing_is_put_where_no_queue_can_be(rig, store, name):
    for _ in range(2):
        with pytest.raises(PutIllegal):
            rig.put(store, b"x", topic=name)


def test_r46_only_a_direct_child_is_taken_away(rig, store, tmp_path):
    rig.put_confirmed(store, b"kept", topic="T")
    store.checkpoints.flush_derived()
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    (rig.root / "consumequeue" / "link").symlink_to(victim)
    for name in ("../commitlog", "..", ".", "", "T/", "T/0", str(victim), "link", "a\0b"):
        store.delete_topic(name)
    deleted = DeletedFolders(rig.root / "consumequeue.deleted")
    deleted.take_away(rig.root / "consumequeue", "../commitlog")
    assert (victim / "precious").exists() and (rig.root / "commitlog").is_dir()
    assert rig.read_bodies(store, "T") == [b"kept"]


@pytest.mark.parametrize(
    "place", ["consumequeue/T", "consumequeue/T/0", "index", "commitlog/.baton", "truncated"]
)
def test_a_name_of_other_digits_is_foreign(rig, place):
    """Python's isdigit() takes "²" for a digit, int() does not."""
    store = rig.open_master()
    rig.put_confirmed(store, b"x", topic="T")
    store.checkpoints.flush_derived()
    store.close()
    foreign = rig.root / place / "²"
    disk.makedirs(foreign)
    store = rig.open_master()
    store.advance_confirm_offset(store.max_phy_offset)
    end = store.max_phy_offset
    rig.put(store, b"y", topic="T")
    store.end_turn()
    store.slave_log.truncate_to(end)  # numbers the folder that keeps what is cut
    assert rig.read_bodies(store, "T") == [b"x"] and foreign.exists()
