"""The topics of a broker: table, data version and `config/topics.json`.

Invariant: every change of the table moves `data_version`, whose state version is the masterEpoch:
name servers and slaves compare it. System topics are always there. `topics` replicates the changes
(R31). Origin: Java `TopicConfigManager`.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from batonmq.broker.config import BrokerConfig
from batonmq.broker.tables.config_file import NamedTable
from batonmq.protocol import topic_name as names
from batonmq.protocol.bodies import (
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    DataVersion,
    TopicConfig,
    TopicConfigSerializeWrapper,
)

_READ_WRITE = PERM_READ | PERM_WRITE
_SCHEDULE_QUEUES = 18
_BENCHMARK_QUEUES = 1024
_CLUSTER_QUEUES = 16
_REVIVE_QUEUES = 8


def topic_config(name: str, queue_nums: int, perm: int = _READ_WRITE) -> TopicConfig:
    """A topic with as many queues to read as to write."""
    return TopicConfig(
        topic_name=name, read_queue_nums=queue_nums, write_queue_nums=queue_nums, perm=perm
    )


def system_topics(config: BrokerConfig) -> list[TopicConfig]:
    """The topics that a broker always has: those of a new Java broker, and ours."""
    cluster_name, broker_name = config.broker_cluster_name, config.broker_name
    topics = [
        topic_config(names.SELF_TEST_TOPIC, 1),
        topic_config(names.BENCHMARK_TOPIC, _BENCHMARK_QUEUES),
        topic_config(cluster_name, _CLUSTER_QUEUES, PERM_INHERIT | _READ_WRITE),
        topic_config(broker_name, 1, PERM_INHERIT | _READ_WRITE),
        topic_config(names.OFFSET_MOVED_TOPIC, 1),
        # As in Java: one for each of the 18 delay levels of its default.
        topic_config(names.SCHEDULE_TOPIC, _SCHEDULE_QUEUES),
        topic_config(names.reply_topic(cluster_name), 1),
        topic_config(names.REVIVE_TOPIC_PREFIX + cluster_name, _REVIVE_QUEUES),
        topic_config(names.SYNC_BROKER_MEMBER_PREFIX + broker_name, 1, PERM_INHERIT),
        topic_config(names.TRANS_HALF_TOPIC, 1),
        topic_config(names.TRANS_OP_HALF_TOPIC, 1),
        topic_config(names.TIMER_TOPIC, 1),
        topic_config(names.POP_TOPIC, 1),
    ]
    if config.trace_topic_enable:
        topics.append(topic_config(config.msg_trace_topic_name, 1))
    if config.auto_create_topic_enable:
        queue_nums = config.default_topic_queue_nums
        topics.append(topic_config(names.AUTO_CREATE_TOPIC, queue_nums, PERM_INHERIT | _READ_WRITE))
    return topics


class TopicConfigManager(NamedTable[TopicConfigSerializeWrapper, TopicConfig]):
    """Topic name to TopicConfig. One thread only."""

    def __init__(self, path: Path, config: BrokerConfig) -> None:
        system = {topic.topic_name: topic for topic in system_topics(config)}
        super().__init__(path, TopicConfigSerializeWrapper, system)

    @staticmethod
    def name_of(config: TopicConfig) -> str:
        return config.topic_name

    def _take_loaded(self, body: TopicConfigSerializeWrapper) -> None:
        """System topics may have other sizes there."""
        self._adopt_loaded(body.topic_config_table, body.data_version)

    def wrapper(self) -> TopicConfigSerializeWrapper:
        """The whole table with its version, for slaves, name servers and the file."""
        return TopicConfigSerializeWrapper(
            data_version=self.data_version, topic_config_table=dict(self._table)
        )

    def derived(self, topic: str, default_topic: str, client_queue_nums: int) -> TopicConfig | None:
        """The config that an unknown topic gets when a message for it arrives; it is not stored. It
        has the default topic's perm without the inherit bit, and the smaller number of queues. None
        if the default topic does not exist or may not be inherited."""
        default = self._table.get(default_topic)
        if default is None or not default.perm & PERM_INHERIT:
            return None
        queue_nums = max(0, min(client_queue_nums, default.write_queue_nums))
        perm = default.perm & ~PERM_INHERIT
        config = topic_config(topic, queue_nums, perm)
        return msgspec.structs.replace(config, topic_filter_type=default.topic_filter_type)

    def create_by_message(self, topic: str, queue_ids: int) -> bool:
        """Makes queues 0 to `queue_ids` - 1 of a topic in the log readable. An unknown topic is
        created, for reading and writing."""
        known = self._table.get(topic)
        if known is None:
            return self.put(topic_config(topic, queue_ids))
        # Only readable: an operator may have reduced the queues, and the old messages stay.
        if known.read_queue_nums >= queue_ids:
            return False
        return self.put(msgspec.structs.replace(known, read_queue_nums=queue_ids))

    def replace_all(self, table: Mapping[str, TopicConfig], data_version: DataVersion) -> bool:
        """Replaces the table by the master's; False if it was the same. System topics that the
        master does not list stay."""
        return self._adopt(table, data_version)
