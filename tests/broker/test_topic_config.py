"""Topics and groups: Java's files load, ours are standard JSON, changes move the version."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from failing_disk import failing
from test_consumer_offset import persist

from batonmq.broker.config import BrokerConfig
from batonmq.broker.tables.subscription_group import SYSTEM_GROUPS, SubscriptionGroupManager
from batonmq.broker.tables.topic_config import TopicConfigManager, system_topics, topic_config
from batonmq.protocol.bodies import (
    DataVersion,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
    TopicConfig,
    TopicConfigSerializeWrapper,
)
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.topic_name import POP_TOPIC
from batonmq.runtime.durable_file import backup_path

GOLDEN = Path(__file__).parent.parent / "golden" / "java-5.3.3" / "store"


def topics_at(folder: Path, **settings: bool) -> TopicConfigManager:
    config = BrokerConfig(default_topic_queue_nums=4, **settings)
    manager = TopicConfigManager(folder / "topics.json", config)
    manager.load()
    return manager


def groups_at(folder: Path) -> SubscriptionGroupManager:
    manager = SubscriptionGroupManager(folder / "subscriptionGroup.json")
    manager.load()
    return manager


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "b1" / "config", tmp_path / "config"))


def test_golden_topics_load_and_are_written_with_the_same_content(golden):
    java = json.loads((golden / "topics.json").read_text())
    manager = topics_at(golden)
    assert persist(manager)  # with the topics that only our brokers own
    manager = topics_at(golden)
    assert not persist(manager)
    topic = manager.get("GoldTopic")
    assert topic == topic_config("GoldTopic", 4)
    assert manager.data_version == DataVersion(
        counter=116, state_version=3, timestamp=1795221259856
    )
    manager._dirty = True
    assert persist(manager)
    ours = json.loads((golden / "topics.json").read_text())
    assert ours["topicConfigTable"].pop(POP_TOPIC)["writeQueueNums"] == 1
    assert ours == java


def test_golden_groups_load_and_are_written_with_the_same_content(golden):
    java = json.loads((golden / "subscriptionGroup.json").read_text())
    manager = groups_at(golden)
    assert not persist(manager)
    group = manager.get("gold_consumer")
    assert group is not None
    assert not group.consume_broadcast_enable
    manager._dirty = True
    assert persist(manager)
    assert json.loads((golden / "subscriptionGroup.json").read_text()) == java


def test_an_empty_folder_gets_the_topics_of_a_fresh_java_broker_and_ours(tmp_path):
    java = TopicConfigSerializeWrapper.decode((GOLDEN / "b0/config/topics.json").read_bytes())
    manager = topics_at(tmp_path)
    users = {"GoldTopic"} | {name for name in java.topic_config_table if name.startswith("%")}
    expected = {n: c for n, c in java.topic_config_table.items() if n not in users}
    expected[POP_TOPIC] = topic_config(POP_TOPIC, 1)
    assert manager.table == expected
    assert "TBW102" not in topics_at(tmp_path, auto_create_topic_enable=False)
    assert persist(manager)
    again = topics_at(tmp_path)
    assert again.table == expected
    assert again.data_version == manager.data_version


def test_an_empty_folder_gets_the_groups_of_a_fresh_java_broker(tmp_path):
    manager = groups_at(tmp_path)
    java = SubscriptionGroupWrapper.decode(
        (GOLDEN / "b0/config/subscriptionGroup.json").read_bytes()
    ).subscription_group_table
    assert set(manager.table) == set(SYSTEM_GROUPS)
    assert all(manager.get(group) == java[group] for group in SYSTEM_GROUPS)


def test_changes_move_the_version_once(tmp_path):
    manager = topics_at(tmp_path)
    assert manager.put(topic_config("A", 8))
    assert not manager.put(topic_config("A", 8))
    assert manager.put_all([topic_config("A", 8), topic_config("B", 2), topic_config("C", 2)])
    assert manager.delete("B")
    assert not manager.delete("B")
    assert not manager.delete("TBW102")
    assert manager.data_version.counter == 3
    manager.set_state_version(7)
    assert (manager.data_version.counter, manager.data_version.state_version) == (4, 7)
    assert persist(manager)
    assert not persist(manager)
    again = topics_at(tmp_path)
    assert "A" in again
    assert "B" not in again
    assert again.data_version == manager.data_version


def test_r31_a_slave_creates_what_its_log_shows(tmp_path):
    """An unknown topic appears; a known one becomes readable further, not writable: it may have
    been made smaller on purpose, and this is one of its old messages."""
    manager = topics_at(tmp_path)
    assert manager.create_by_message("New", 3)
    assert manager.get("New") == topic_config("New", 3)
    manager.put(topic_config("Small", 2))
    assert not manager.create_by_message("Small", 2)
    assert manager.create_by_message("Small", 5)
    small = manager.get("Small")
    assert small is not None
    assert (small.read_queue_nums, small.write_queue_nums) == (5, 2)


def test_an_unknown_topic_is_derived_from_the_default_one(tmp_path):
    manager = topics_at(tmp_path)
    derived = manager.derived("New", "TBW102", 16)
    assert derived == TopicConfig(
        topic_name="New", read_queue_nums=4, write_queue_nums=4, perm=6, topic_sys_flag=0
    )
    assert "New" not in manager
    few = manager.derived("New", "TBW102", 1)
    assert few is not None
    assert few.write_queue_nums == 1
    manager.put(topic_config("Plain", 4))
    assert manager.derived("New", "Plain", 4) is None
    assert manager.derived("New", "unknown", 4) is None


def test_a_slave_becomes_what_its_master_has(tmp_path):
    master, slave = topics_at(tmp_path / "m"), topics_at(tmp_path / "s")
    master.put(topic_config("A", 8))
    slave.put(topic_config("Old", 1))
    wrapper = TopicConfigSerializeWrapper.decode(master.wrapper().encode())
    assert slave.replace_all(wrapper.topic_config_table, wrapper.data_version)
    assert not slave.replace_all(wrapper.topic_config_table, wrapper.data_version)
    assert slave.table == master.table
    assert slave.data_version == master.data_version
    assert persist(slave)


def test_groups_change_and_follow_the_master(tmp_path):
    master, slave = groups_at(tmp_path / "m"), groups_at(tmp_path / "s")
    config = SubscriptionGroupConfig(group_name="g", retry_max_times=3)
    assert master.put(config)
    assert not master.put(msgspec.structs.replace(config))
    wrapper = SubscriptionGroupWrapper.decode(master.wrapper().encode())
    wrapper.forbidden_table = {"g": {"T": 1}}
    assert slave.replace_all(wrapper)
    assert not slave.replace_all(wrapper)
    assert slave.get("g") == config
    assert slave.wrapper().forbidden_table == {"g": {"T": 1}}
    assert persist(slave)
    again = groups_at(tmp_path / "s")
    assert again.wrapper().forbidden_table == {"g": {"T": 1}}
    assert again.delete("g")
    assert not again.delete("g")
    assert not again.delete("TOOLS_CONSUMER")
    assert again.wrapper().forbidden_table == {}
    again.set_state_version(5)
    assert again.data_version.state_version == 5
    assert "g" not in again
    assert len(again) == len(SYSTEM_GROUPS)


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"topicConfigTable":5}', b"\x00" * 300])
def test_a_bad_file_falls_back_to_bak_and_both_bad_stop_the_start(tmp_path, content, caplog):
    path = tmp_path / "topics.json"
    manager = topics_at(tmp_path)
    manager.put(topic_config("A", 8))
    persist(manager)
    manager.put(topic_config("B", 8))
    persist(manager)
    spoil(path, content)
    again = topics_at(tmp_path)
    assert "A" in again
    assert "B" not in again
    assert "config_file_from_backup" in caplog.text

    again.put(topic_config("C", 1))
    persist(again)
    assert "C" in topics_at(tmp_path)
    assert "A" in json.loads(backup_path(path).read_text())["topicConfigTable"]

    spoil(path, content)
    spoil(backup_path(path), b"garbage")
    with pytest.raises(CorruptLogError) as caught:
        topics_at(tmp_path)
    assert str(path) in str(caught.value)
    assert "topics.json.bak: " in str(caught.value)


@pytest.mark.parametrize("error", ["EIO", "EUCLEAN", "EBADMSG"])
def test_r31_a_file_that_the_disk_cannot_read_stops_the_start(tmp_path, error):
    """Its `.bak` is older: the log's records of what changed since are not dispatched again."""
    manager = topics_at(tmp_path)
    for name in ("A", "B"):
        manager.put(topic_config(name, 8))
        persist(manager)
    with (
        failing(f"read_bytes topics.json {error} once"),
        pytest.raises(OSError, match=str(tmp_path / "topics.json")),
    ):
        topics_at(tmp_path)
    assert "B" in topics_at(tmp_path)


def spoil(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def test_a_write_that_failed_can_be_done_again(tmp_path, monkeypatch):
    (job,) = topics_at(tmp_path).writes_due()
    full = Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patched:
        patched.setattr("batonmq.broker.tables.config_file.replace_file", full)
        with pytest.raises(OSError, match="No space"):
            job()
    job()
    assert "TBW102" in topics_at(tmp_path)


def test_system_topics_are_named_after_cluster_and_broker():
    topics = system_topics(BrokerConfig(broker_cluster_name="C", broker_name="b"))
    assert {"C", "b", "C_REPLY_TOPIC", "rmq_sys_REVIVE_LOG_C", "rmq_sys_SYNC_BROKER_MEMBER_b"} <= {
        topic.topic_name for topic in topics
    }
