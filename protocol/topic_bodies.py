"""Bodies about topics and consumer groups: their configuration, statistics, offsets.

Origin: Java `common.TopicConfig`, `SubscriptionGroupConfig`, `remoting.protocol.body`, `.admin`.
"""

from typing import Any, Final

import msgspec

from protocol.body import Body, QueueKeyedBody
from protocol.message import MessageQueue
from protocol.route_bodies import DataVersion

PERM_PRIORITY: Final = 8
PERM_READ: Final = 4
PERM_WRITE: Final = 2
PERM_INHERIT: Final = 1


def _custom_policy() -> dict[str, Any]:
    return {"type": "CUSTOMIZED"}


class TopicConfig(Body):
    """`perm` bits: 8 priority, 4 read, 2 write, 1 inherit."""

    attributes: dict[str, str] = msgspec.field(default_factory=dict)
    order: bool = False
    perm: int = PERM_READ | PERM_WRITE
    read_queue_nums: int = 16
    topic_filter_type: str = "SINGLE_TAG"
    topic_name: str = ""
    topic_sys_flag: int = 0
    write_queue_nums: int = 16


class TopicConfigSerializeWrapper(Body):
    data_version: DataVersion = DataVersion()
    topic_config_table: dict[str, TopicConfig] = msgspec.field(default_factory=dict)


class TopicConfigAndMappingSerializeWrapper(Body):
    """Topics with the mappings of static topics; we have none of the latter, but pass them on."""

    data_version: DataVersion = DataVersion()
    mapping_data_version: DataVersion = DataVersion()
    topic_config_table: dict[str, TopicConfig] = msgspec.field(default_factory=dict)
    topic_queue_mapping_detail_map: dict[str, Any] = msgspec.field(default_factory=dict)
    topic_queue_mapping_info_map: dict[str, Any] = msgspec.field(default_factory=dict)


class SimpleSubscriptionData(Body):
    expression: str = ""
    expression_type: str = "TAG"
    topic: str = ""
    version: int = 0


class SubscriptionGroupConfig(Body):
    attributes: dict[str, str] = msgspec.field(default_factory=dict)
    broker_id: int = 0
    consume_broadcast_enable: bool = True
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_message_orderly: bool = False
    consume_timeout_minute: int = 15
    group_name: str = ""
    group_retry_policy: dict[str, Any] = msgspec.field(default_factory=_custom_policy)
    group_sys_flag: int = 0
    notify_consumer_ids_changed_enable: bool = True
    retry_max_times: int = 16
    retry_queue_nums: int = 1
    subscription_data_set: list[SimpleSubscriptionData] | None = None
    which_broker_when_consume_slowly: int = 1


class SubscriptionGroupWrapper(Body):
    data_version: DataVersion = DataVersion()
    forbidden_table: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    subscription_group_table: dict[str, SubscriptionGroupConfig] = msgspec.field(
        default_factory=dict
    )


class ConsumerOffsetSerializeWrapper(Body):
    """`offset_table`: "topic@group" -> queue id -> offset of the next message."""

    data_version: DataVersion = DataVersion()
    offset_table: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)


class DelayOffsetSerializeWrapper(Body):
    """`offset_table`: delay level -> offset in its queue."""

    data_version: DataVersion = DataVersion()
    offset_table: dict[int, int] = msgspec.field(default_factory=dict)


class MessageRequestModeSerializeWrapper(Body):
    message_request_mode_map: dict[str, Any] = msgspec.field(default_factory=dict)


class TimerMetricsSerializeWrapper(Body):
    data_version: DataVersion = DataVersion()
    timing_count: dict[str, Any] = msgspec.field(default_factory=dict)


class TopicOffset(Body):
    """`max_offset` is that of the next message to come."""

    last_update_timestamp: int = 0
    max_offset: int = 0
    min_offset: int = 0


class TopicStatsTable(QueueKeyedBody):
    offset_table: dict[MessageQueue, TopicOffset] = msgspec.field(default_factory=dict)
    topic_put_tps: float = 0.0


class OffsetWrapper(Body):
    broker_offset: int = 0
    consumer_offset: int = 0
    last_timestamp: int = 0
    pull_offset: int = 0


class ConsumeStats(QueueKeyedBody):
    consume_tps: float = 0.0
    offset_table: dict[MessageQueue, OffsetWrapper] = msgspec.field(default_factory=dict)


class ResetOffsetBody(QueueKeyedBody):
    offset_table: dict[MessageQueue, int] = msgspec.field(default_factory=dict)


class GroupList(Body):
    group_list: list[str] = msgspec.field(default_factory=list)


__all__ = [
    "PERM_INHERIT",
    "PERM_PRIORITY",
    "PERM_READ",
    "PERM_WRITE",
    "ConsumeStats",
    "ConsumerOffsetSerializeWrapper",
    "DelayOffsetSerializeWrapper",
    "GroupList",
    "MessageRequestModeSerializeWrapper",
    "OffsetWrapper",
    "ResetOffsetBody",
    "SimpleSubscriptionData",
    "SubscriptionGroupConfig",
    "SubscriptionGroupWrapper",
    "TimerMetricsSerializeWrapper",
    "TopicConfig",
    "TopicConfigAndMappingSerializeWrapper",
    "TopicConfigSerializeWrapper",
    "TopicOffset",
    "TopicStatsTable",
]
