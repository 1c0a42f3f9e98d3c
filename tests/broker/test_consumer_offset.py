"""Consumer offsets: Java's dialect is read, and a deposed master's late offsets are not taken."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from batonmq.broker.tables import consumer_offset, old_positions
from batonmq.broker.tables.config_file import ConfigManager
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.old_positions import OldPositions
from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.bodies import ConsumerOffsetSerializeWrapper, DataVersion
from batonmq.protocol.errors import RemoteProtocolError

GOLDEN = Path(__file__).parent.parent / "golden" / "java-5.3.3" / "store"


def persist(manager: ConfigManager[Any]) -> bool:
    """Write what is due; whether there was anything."""
    jobs = manager.writes_due()
    for job in jobs:
        job()
    return bool(jobs)


def offsets_at(folder: Path) -> ConsumerOffsetManager:
    manager = ConsumerOffsetManager(folder / "consumerOffset.json")
    manager.load()
    return manager


@pytest.fixture
def manager(tmp_path: Path) -> ConsumerOffsetManager:
    return offsets_at(tmp_path)


def test_a_snapshot_holds_what_was_committed_and_shares_what_did_not_change(manager):
    for topic in ("changes", "stays", "falls", "goes"):
        manager.commit("g", topic, 0, 5)
    first, second = manager.wrapper().offset_table, manager.wrapper().offset_table
    for offset in (6, 7):
        manager.commit("g", "changes", 0, offset)
    manager.commit("g", "changes", 1, 1)
    assert list(manager.clamped(lambda topic, _: 3 if topic == "falls" else 9))
    manager.delete_topic("goes", 1)
    manager.commit("g", "goes", 0, 1)
    third = manager.wrapper().offset_table
    manager.commit("g", "changes", 0, 8)
    assert first == second == {f"{t}@g": {0: 5} for t in ("changes", "stays", "falls", "goes")}
    now = {"changes@g": {0: 7, 1: 1}, "stays@g": {0: 5}, "falls@g": {0: 3}, "goes@g": {0: 1}}
    assert third == now
    assert manager.wrapper().offset_table == now | {"changes@g": {0: 8, 1: 1}}
    assert first["stays@g"] is third["stays@g"], "it costs no copy"


def test_golden_file_loads_and_ours_holds_the_same_in_standard_json(tmp_path):
    shutil.copy(GOLDEN / "b0/config/consumerOffset.json", tmp_path)
    manager = offsets_at(tmp_path)
    assert manager.query("gold_orderly", "GoldTopic", 2) == 4
    assert manager.offsets_of("gold_lite", "GoldTopic") == {0: 3, 1: 3, 2: 4}
    assert manager.groups_of("GoldTopic") == ["gold_consumer", "gold_lite", "gold_orderly"]
    assert "GoldTopic@gold_broadcast@broadcast" in manager.table
    before = {key: dict(value) for key, value in manager.table.items()}
    assert not persist(manager)
    manager._dirty = True
    assert persist(manager)
    written = json.loads((tmp_path / "consumerOffset.json").read_text())
    assert written["offsetTable"]["GoldTopic@gold_lite"] == {"0": 3, "1": 3, "2": 4}
    assert offsets_at(tmp_path).table == before


def test_commits_are_kept_and_going_back_is_said(manager, tmp_path, caplog):
    assert manager.query("g", "T", 0) == -1
    manager.commit("g", "T", 0, 10)
    manager.commit("g", "T", 0, 10)
    manager.commit("g", "T", 1, 0)
    assert manager.query("g", "T", 1) == 0
    assert caplog.text == ""
    manager.commit("g", "T", 0, 4)
    assert "consumer_offset_back group=g topic=T queue_id=0 offset=4 before=10" in caplog.text
    assert manager.query("g", "T", 0) == 4
    assert persist(manager)
    assert not persist(manager)
    assert offsets_at(tmp_path).query("g", "T", 0) == 4


def test_the_version_moves_once_per_five_hundred_commits(manager):
    for offset in range(1, 1001):
        manager.commit("g", "T", 0, offset)
    assert manager.data_version.counter == 2


def test_r31_offsets_of_a_deposed_master_are_ignored(tmp_path):
    """1. The master of epoch 2 sends 100. 2. Epoch 3 is elected and sends 40 (its truth).
    3. A late message of epoch 2 comes: ignored, also after a restart. 4. Epoch 3 continues."""
    old, new, slave = (offsets_at(tmp_path / name) for name in ("old", "new", "slave"))
    old.commit("g", "T", 0, 100)
    assert slave.apply_from_master(2, old.wrapper().offset_table)
    assert slave.query("g", "T", 0) == 100
    new.commit("g", "T", 0, 40)
    assert slave.apply_from_master(3, new.wrapper().offset_table)
    assert slave.query("g", "T", 0) == 40
    assert not slave.apply_from_master(2, old.wrapper().offset_table)
    assert slave.query("g", "T", 0) == 40
    assert persist(slave)
    slave = offsets_at(tmp_path / "slave")
    assert slave.master_epoch == 3
    assert not slave.apply_from_master(2, old.wrapper().offset_table)
    new.commit("g", "T", 0, 41)
    assert slave.apply_from_master(3, new.wrapper().offset_table)
    assert slave.query("g", "T", 0) == 41


def test_r31_an_own_reign_ends_what_earlier_masters_say(tmp_path):
    other, mine = offsets_at(tmp_path / "o"), offsets_at(tmp_path / "m")
    other.commit("g", "T", 0, 1)
    mine.set_state_version(5)
    mine.commit("g", "T", 0, 9)
    assert not mine.apply_from_master(4, other.wrapper().offset_table)
    assert mine.query("g", "T", 0) == 9


def test_what_the_master_does_not_mention_stays(tmp_path):
    master, slave = offsets_at(tmp_path / "m"), offsets_at(tmp_path / "s")
    slave.commit("g", "T", 1, 7)
    slave.commit("h", "T", 0, 8)
    master.commit("g", "T", 0, 3)
    assert slave.apply_from_master(1, master.wrapper().offset_table)
    assert slave.offsets_of("g", "T") == {0: 3, 1: 7}
    assert slave.query("h", "T", 0) == 8
    assert persist(slave)
    assert slave.apply_from_master(1, master.wrapper().offset_table)
    assert not persist(slave)  # nothing new: nothing to write


def test_a_javas_body_is_read_and_nonsense_is_refused(tmp_path):
    slave = offsets_at(tmp_path)
    decode = ConsumerOffsetSerializeWrapper.decode
    body = decode(b'{"offsetTable":{"T@g":{0:12,3:4}},"groupTopicMap":{}}')
    assert slave.apply_from_master(1, body.offset_table)
    assert slave.offsets_of("g", "T") == {0: 12, 3: 4}
    with pytest.raises(RemoteProtocolError):
        decode(b"nonsense")


def test_r39_a_deletion_takes_the_offsets_of_one_topic(manager):
    for topic, group in (("T", "g"), ("T", "h"), ("T2", "g"), ("%RETRY%g", "g")):
        manager.commit(group, topic, 0, 5)
    assert manager.groups_of("T") == ["g", "h"]
    changes = manager.change_count
    manager.delete_topic("T", 100)
    assert sorted(manager.table) == ["%RETRY%g@g", "T2@g"]
    assert manager.change_count > changes, "slaves fetch again"
    assert manager.deletions_due() and not manager.deletions_due()


def test_r39_what_a_java_master_sends_counts_without_a_place_in_the_log(tmp_path):
    slave = offsets_at(tmp_path)
    slave.delete_topic("T", 100)
    assert slave.apply_from_master(1, {"T@g": {0: 12}})
    slave.delete_topic("T", 200)
    assert slave.query("g", "T", 0) == -1


def test_r39_an_emptied_replica_keeps_no_offsets_of_its_own(manager, tmp_path):
    """The deletion of a topic may have expired with the log before."""
    manager.commit("g", "T", 0, 5)
    manager.delete_topic("another", 100)
    persist(manager)
    manager.clear_for_new_log()
    assert not offsets_at(tmp_path).table
    assert manager.apply_from_master(1, {"T@g": {0: 2}}, 10)
    assert manager.query("g", "T", 0) == 2


def test_r44_what_is_lowered_is_stored(tmp_path):
    offsets = offsets_at(tmp_path)
    offsets.commit("g", "T", 0, 9)
    offsets.write()
    assert list(offsets.clamped(lambda topic, queue: 4)) == [1]
    offsets.write()
    assert offsets_at(tmp_path).query("g", "T", 0) == 4


def test_r27_a_snapshot_that_waited_does_not_replace_a_later_one(tmp_path):
    """Its write is still a job of another thread when the owner empties the log."""
    offsets = offsets_at(tmp_path)
    offsets.commit("g", "T", 0, 7)
    (waiting,) = offsets.writes_due()
    offsets.clear_for_new_log()
    waiting()
    assert not offsets_at(tmp_path).table


def test_a_write_that_a_full_disk_refused_is_repeated(tmp_path, monkeypatch):
    offsets = offsets_at(tmp_path)
    offsets.commit("g", "T", 0, 7)
    (write,) = offsets.writes_due()
    with monkeypatch.context() as full:
        full.setattr(
            "batonmq.runtime.disk.replace", Mock(side_effect=OSError(28, "the disk is full"))
        )
        with pytest.raises(OSError, match="the disk is full"):
            write()
    write()
    assert offsets_at(tmp_path).query("g", "T", 0) == 7


def test_a_commit_behind_the_last_write_is_in_the_next(manager, tmp_path):
    for offset in (5, 7):
        manager.commit("g", "T", 0, offset)
        assert persist(manager)
    assert not persist(manager)
    assert offsets_at(tmp_path).query("g", "T", 0) == 7


def test_r39_positions_are_old_again_after_each_deletion():
    """A group that began in the topic made again holds positions of that one by then."""
    old = OldPositions(lambda: 0)
    old.deleted("T")
    old.begins("g", "T", 0)
    assert not old.is_old("g", "T", 0)
    old.deleted("T")
    assert old.is_old("g", "T", 0)


def test_r58_the_names_of_who_asks_for_a_topic_made_again_are_bounded(monkeypatch):
    """Any client may ask where to begin (14), for any group and queue."""
    monkeypatch.setattr(old_positions, "_BEGUN_MAX", 10)
    old = OldPositions(lambda: 0)
    for _ in range(2):
        for topic in ("T", "U"):
            old.deleted(topic)
        old.begins("g", "U", 0)
        old.begins("g" * 256, "T", 0)
        assert not old._topics["T"].begun
        for number in range(25):
            old.begins(f"g{number}", "T", 0)
            assert old._begun == sum(len(each.begun) for each in old._topics.values()) <= 10
        assert not old.is_old("g24", "T", 0)
        assert not old.is_old("g", "U", 0), "the topic with the most goes first"


def test_r58_offsets_have_a_limit_and_known_ones_stay(tmp_path, manager, monkeypatch):
    monkeypatch.setattr(consumer_offset, "OFFSETS_MAX", 3)

    def has_places(offsets: ConsumerOffsetManager) -> list[bool]:
        return [offsets.no_place("g", "T", queue_id) is None for queue_id in (0, 1, 2)]

    for topic, queue_id in (("T", 0), ("T", 1), ("U", 0)):
        assert manager.no_place("g", topic, queue_id) is None
        for offset in (1, 2):
            manager.commit("g", topic, queue_id, offset)
    full = [True, True, False]
    assert has_places(manager) == full
    assert persist(manager) and has_places(offsets_at(tmp_path)) == full
    slave = offsets_at(tmp_path / "slave")
    slave.apply_from_master(1, manager.table, 50)
    assert has_places(slave) == full
    slave.delete_topic("U", 40)
    assert has_places(slave) == full, "the master sent these offsets behind the deletion"
    for offsets, forget in (
        (manager, lambda: manager.delete_topic("U", 100)),
        (slave, slave.clear_for_new_log),
    ):
        forget()
        assert has_places(offsets) == [True] * 3


def test_r39_what_the_master_sent_behind_the_same_deletion_is_kept(tmp_path):
    for carried_out, kept in ((99, -1), (100, 12)):
        slave = offsets_at(tmp_path)
        slave.apply_from_master(1, {"T@g": {0: 12}}, carried_out)
        slave.delete_topic("T", 100)
        assert slave.query("g", "T", 0) == kept


@pytest.mark.parametrize("deletes", ["delete_topic", "delete_group"])
def test_r39_what_the_master_sent_behind_a_deletion_is_kept_through_a_restart(tmp_path, deletes):
    """It restarts before its log shows the deletion. Only what the master sent is of the new topic
    or group: not other queues or keys of the same name."""
    name = {"delete_topic": "T", "delete_group": "g"}[deletes]
    slave = offsets_at(tmp_path)
    slave.set_state_version(1)
    for group, topic, queue_id in (("g", "T", 0), ("g", "T", 1), ("h", "T", 0), ("g", "U", 0)):
        slave.commit(group, topic, queue_id, 12)
    persist(slave)
    # The master's offset of the new topic happens to equal that of the old one.
    slave.apply_from_master(1, {"T@g": {0: 12}}, 100)
    persist(slave)
    for _ in range(2):  # it may restart again
        slave = offsets_at(tmp_path)
        getattr(slave, deletes)(name, 100)
        assert slave.offsets_of("g", "T") == {0: 12}
        assert slave.query(*{"T": ("h", "T", 0), "g": ("g", "U", 0)}[name]) == -1
    getattr(slave, deletes)(name, 101)
    assert slave.offsets_of("g", "T") == {}


def test_r39_r44_what_an_earlier_master_sent_does_not_outlive_a_deletion_by_a_later_one(tmp_path):
    """After an unclean election at 60, another record is where the earlier master's was."""
    slave = offsets_at(tmp_path)
    slave.apply_from_master(3, {"T@g": {0: 12}}, 100)
    persist(slave)
    for each in (slave, offsets_at(tmp_path)):
        each.deletions.epochs = lambda: (EpochEntry(3, 0), EpochEntry(4, 60))
        each.delete_topic("T", 95)
        assert each.query("g", "T", 0) == -1


def test_r39_what_was_deleted_once_is_not_looked_for_again(manager):
    """A slave that failed over a key that is gone would carry out nothing more of its log."""
    for again in range(2):
        manager.commit("g", "T", 0, 5)
        manager.commit("g", "U", 0, 7)
        manager.delete_topic("T", 100 + again)
        manager.delete_group("g", 110 + again)
        manager.delete_topic("U", 120 + again)
        manager.delete_group("g", 130 + again)
        assert manager.table == {}
    manager.commit("g", "T", 0, 5)
    manager.clear_for_new_log()
    manager.delete_topic("T", 200)
    assert manager.table == {} and manager.deletions.end == 200


@pytest.mark.parametrize("deletes", ["delete_topic", "delete_group"])
def test_r39_a_deletion_that_a_start_reads_again_takes_nothing_of_what_was_made_since(
    tmp_path, deletes
):
    """The file is newer than the checkpoint from which the start reads the log."""
    name = {"delete_topic": "T", "delete_group": "g"}[deletes]
    made = offsets_at(tmp_path)
    made.commit("g", "T", 0, 5)
    getattr(made, deletes)(name, 100)
    made.commit("g", "T", 0, 2)
    persist(made)
    again = offsets_at(tmp_path)
    getattr(again, deletes)(name, 100)
    assert again.query("g", "T", 0) == 2
    getattr(again, deletes)(name, 101)
    assert again.query("g", "T", 0) == -1, "that one was not carried out before"


def test_r39_a_deletion_behind_the_log_that_a_power_failure_left_is_carried_out(manager, tmp_path):
    manager.delete_topic("T", 100)
    manager.commit("g", "T", 0, 2)
    persist(manager)
    again = offsets_at(tmp_path)
    again.deletions.opened(80, 90)
    again.delete_topic("T", 95)
    assert again.query("g", "T", 0) == -1 and again.deletions.end == 95


def test_r39_a_deletion_by_a_newer_master_than_the_file_knows_is_carried_out(manager, tmp_path):
    """The log was cut at 60, another deletion came to the same place, and this process was killed
    before it stored its offsets again."""
    manager.set_state_version(3)
    manager.delete_topic("T", 100)
    for topic in ("T", "U"):
        manager.commit("g", topic, 0, 2)
    persist(manager)
    again = offsets_at(tmp_path)
    again.deletions.epochs = lambda: (EpochEntry(3, 0), EpochEntry(4, 60))
    again.delete_topic("U", 60)
    again.delete_topic("T", 95)
    assert again.query("g", "U", 0) == 2 and again.query("g", "T", 0) == -1


def test_r39_r44_behind_a_cut_every_deletion_is_a_new_one(manager, tmp_path):
    manager.delete_topic("T", 100)
    persist(manager)
    again = offsets_at(tmp_path)
    again.log_ends(90)
    again.commit("g", "T", 0, 2)
    again.delete_topic("T", 95)
    assert again.query("g", "T", 0) == -1
    again.log_ends(90)
    assert again.apply_from_master(1, {"T@g": {0: 12}}, 90), "the master deletes nothing any more"
    again.delete_topic("T", 95)
    assert again.query("g", "T", 0) == -1


def test_r39_a_deletion_of_offsets_is_due_until_it_is_written(manager, tmp_path):
    manager.commit("g", "T", 0, 5)
    assert manager.deletions_due() == []
    manager.delete_topic("T", 100)
    for job in manager.deletions_due():
        job()
    assert offsets_at(tmp_path).table == {}
    manager.commit("g", "U", 0, 5)
    assert manager.deletions_due() == []


def test_a_master_that_comes_back_takes_progress_as_far_as_its_queues_reach(manager):
    """What groups committed at the slave meanwhile; behind the end are messages that it lacks."""
    manager.commit("g", "T", 0, 5)
    manager.commit("g", "T", 1, 5)
    elsewhere = {"T@g": {0: 9, 1: 3, 2: 100, 3: 10}, "U@h": {0: 1}}
    taken = list(manager.taken_back(elsewhere, lambda topic, queue_id: 10))
    assert taken == [2, 1]
    assert manager.offsets_of("g", "T") == {0: 9, 1: 5, 3: 10} and manager.query("h", "U", 0) == 1


def test_a_table_that_was_moved_on_in_place_of_the_master_is_newer_than_its(manager):
    """Also than what the master wrote since it was fetched: Java's slaves compare versions."""
    version = DataVersion(counter=40)
    assert manager.apply_from_master(0, {"T@g": {0: 5}}, None, version)
    assert manager.data_version.counter == 40
    assert manager.apply_from_master(0, {"T@g": {0: 6}}, None, DataVersion(counter=30))
    assert manager.data_version.counter >= 40
    persist(manager)
    before = manager.data_version.counter
    manager.act_for_master()
    assert manager.data_version.counter >= before + 1_000 and persist(manager)
