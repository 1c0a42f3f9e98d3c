"""All typed JSON bodies of the remoting protocol; `json_body` writes and reads them. Origin: Java
packages `remoting.protocol.route`, `.body`, `.heartbeat`, `.admin`, `common.TopicConfig`."""

from typing import Any, ClassVar, Final

import msgspec

from batonmq.protocol.json_body import Body, Json, QueueKeyedBody, encode_json
from batonmq.protocol.message import MessageQueue

# Routes, clusters, key-values.


class DataVersion(msgspec.Struct, Json, frozen=True, rename="camel", kw_only=True):
    """Versions are equal only if all three fields are. `state_version` is the masterEpoch."""

    counter: int = 0
    state_version: int = 0
    timestamp: int = 0

    def next(self, now_ms: int, state_version: int | None = None) -> "DataVersion":
        """The version after one change; `state_version` None: unchanged."""
        return DataVersion(
            counter=self.counter + 1,
            state_version=self.state_version if state_version is None else state_version,
            timestamp=now_ms,
        )


class BrokerData(Body):
    """One broker group: id 0 is the master's address, the others are slaves'."""

    broker_addrs: dict[int, str] = msgspec.field(default_factory=dict)
    broker_name: str = ""
    cluster: str = ""
    enable_acting_master: bool = False
    zone_name: str | None = None


class QueueData(Body):
    broker_name: str = ""
    perm: int = 6
    read_queue_nums: int = 0
    topic_sys_flag: int = 0
    write_queue_nums: int = 0


class TopicRouteData(Body):
    broker_datas: list[BrokerData] = msgspec.field(default_factory=list)
    filter_server_table: dict[str, list[str]] = msgspec.field(default_factory=dict)
    order_topic_conf: str | None = None
    queue_datas: list[QueueData] = msgspec.field(default_factory=list)


class ClusterInfo(Body):
    broker_addr_table: dict[str, BrokerData] = msgspec.field(default_factory=dict)
    cluster_addr_table: dict[str, list[str]] = msgspec.field(default_factory=dict)


class TopicList(Body):
    broker_addr: str | None = None
    topic_list: list[str] = msgspec.field(default_factory=list)


PROBLEMS_KEY = "batonProblems"
"""In a broker's status (GET_BROKER_RUNTIME_INFO, 28): a JSON list of its problems, as texts."""


class KVTable(Body):
    table: dict[str, str] = msgspec.field(default_factory=dict)


class BrokerMemberGroup(Body):
    broker_addrs: dict[int, str] = msgspec.field(default_factory=dict)
    broker_name: str = ""
    cluster: str = ""


class GetBrokerMemberGroupResponseBody(Body):
    broker_member_group: BrokerMemberGroup = msgspec.field(default_factory=BrokerMemberGroup)


# Topics and consumer groups: configuration, statistics, offsets.


PERM_READ: Final = 4
PERM_WRITE: Final = 2
PERM_INHERIT: Final = 1
TAG: Final = "TAG"
SQL92: Final = "SQL92"


def _custom_policy() -> dict[str, Any]:
    return {"type": "CUSTOMIZED"}


class TopicConfig(Body, kw_only=True):
    """`perm` bits: 8 priority, 4 read, 2 write, 1 inherit."""

    attributes: dict[str, str] = msgspec.field(default_factory=dict)
    order: bool = False
    perm: int = PERM_READ | PERM_WRITE
    read_queue_nums: int = 16
    topic_filter_type: str = "SINGLE_TAG"
    topic_name: str = ""
    topic_sys_flag: int = 0
    write_queue_nums: int = 16


class TopicConfigList(Body):
    """UPDATE_AND_CREATE_TOPIC_LIST (18)."""

    topic_config_list: list[TopicConfig] = msgspec.field(default_factory=list)


class TopicConfigSerializeWrapper(Body):
    data_version: DataVersion = DataVersion()
    topic_config_table: dict[str, TopicConfig] = msgspec.field(default_factory=dict)


class TopicConfigAndMappingSerializeWrapper(Body):
    """Topics, with the mappings of static topics, which are only passed on."""

    data_version: DataVersion = DataVersion()
    mapping_data_version: DataVersion = DataVersion()
    topic_config_table: dict[str, TopicConfig] = msgspec.field(default_factory=dict)
    topic_queue_mapping_detail_map: dict[str, Any] = msgspec.field(default_factory=dict)
    topic_queue_mapping_info_map: dict[str, Any] = msgspec.field(default_factory=dict)


class SimpleSubscriptionData(Body):
    expression: str = ""
    expression_type: str = TAG
    topic: str = ""
    version: int = 0


class SubscriptionGroupConfig(Body, kw_only=True):
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


class GroupForbidden(Body):
    """Whether a group may read a topic (UPDATE_AND_GET_GROUP_FORBIDDEN, 353)."""

    group: str = ""
    readable: bool = True
    topic: str = ""


class SubscriptionGroupList(Body):
    """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST (225)."""

    group_config_list: list[SubscriptionGroupConfig] = msgspec.field(default_factory=list)


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


class SetMessageRequestModeRequestBody(Body):
    """Sets how a group gets the messages of a topic: `mode` is PULL or POP."""

    consumer_group: str = ""
    mode: str = "PULL"
    pop_share_queue_num: int = 0
    topic: str = ""


class MessageRequestModeSerializeWrapper(Body):
    """topic -> group -> mode."""

    message_request_mode_map: dict[str, dict[str, SetMessageRequestModeRequestBody]] = (
        msgspec.field(default_factory=dict)
    )


class TimerMetricsSerializeWrapper(Body):
    data_version: DataVersion = DataVersion()
    timing_count: dict[str, Any] = msgspec.field(default_factory=dict)


class TopicOffset(Body):
    """`max_offset`: of the next message."""

    last_update_timestamp: int = 0
    max_offset: int = 0
    min_offset: int = 0


class QueueTimeSpan(Body):
    """Store times in ms; -1: none. `delay_time`: how long the next message has waited."""

    consume_time_stamp: int = 0
    delay_time: int = 0
    max_time_stamp: int = 0
    message_queue: MessageQueue = MessageQueue("", "", 0)
    min_time_stamp: int = 0


class QueryConsumeTimeSpanBody(Body):
    """Answer to QUERY_CONSUME_TIME_SPAN (303)."""

    consume_time_span_set: list[QueueTimeSpan] = msgspec.field(default_factory=list)


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


class ConsumeStatsList(Body):
    """Answer to GET_BROKER_CONSUME_STATS (317). `consume_stats_list`: for each group a map of its
    name to its stats, one per topic."""

    broker_addr: str = ""
    consume_stats_list: list[dict[str, list[msgspec.Raw]]] = msgspec.field(default_factory=list)
    total_diff: int = 0
    total_inflight_diff: int = 0


class BrokerStatsItem(Body):
    """`sum`: in the period; `tps`: a second; `avgpt`: a call."""

    avgpt: float = 0.0
    sum: int = 0
    tps: float = 0.0


class BrokerStatsData(Body):
    """Answer to VIEW_BROKER_STATS_DATA (315)."""

    stats_day: BrokerStatsItem = msgspec.field(default_factory=BrokerStatsItem)
    stats_hour: BrokerStatsItem = msgspec.field(default_factory=BrokerStatsItem)
    stats_minute: BrokerStatsItem = msgspec.field(default_factory=BrokerStatsItem)


class ResetOffsetBody(QueueKeyedBody):
    offset_table: dict[MessageQueue, int] = msgspec.field(default_factory=dict)


class GetConsumerStatusBody(QueueKeyedBody):
    """A consumer's answer to GET_CONSUMER_STATUS_FROM_CLIENT (221): its stored offsets."""

    QUEUE_MAP: ClassVar[str] = "messageQueueTable"

    message_queue_table: dict[MessageQueue, int] = msgspec.field(default_factory=dict)


class ConsumeMessageDirectlyResult(Body):
    """A consumer's answer to CONSUME_MESSAGE_DIRECTLY (309)."""

    auto_commit: bool = True
    consume_result: str = "CR_SUCCESS"
    order: bool = False
    remark: str | None = None
    spent_time_mills: int = 0


class GroupList(Body):
    group_list: list[str] = msgspec.field(default_factory=list)


# Between clients and brokers: heartbeats, connections, queue locks, assignments.


CONSUME_ACTIVELY: Final = "CONSUME_ACTIVELY"
CONSUME_PASSIVELY: Final = "CONSUME_PASSIVELY"
CONSUME_POP: Final = "CONSUME_POP"
BROADCASTING: Final = "BROADCASTING"
CLUSTERING: Final = "CLUSTERING"
FROM_LAST_OFFSET: Final = "CONSUME_FROM_LAST_OFFSET"


class SubscriptionData(Body):
    """A subscription of a topic. `sub_string` "*" with both lists empty: all messages. `code_set`:
    Java hashes of `tags_set`; `sub_version`: creation time in ms."""

    class_filter_mode: bool = False
    code_set: list[int] = msgspec.field(default_factory=list)
    expression_type: str = TAG
    sub_string: str = "*"
    sub_version: int = 0
    tags_set: list[str] = msgspec.field(default_factory=list)
    topic: str = ""


class QuerySubscriptionResponseBody(Body):
    group: str = ""
    subscription_data: SubscriptionData | None = None
    topic: str = ""


class ConsumeQueueData(Body):
    """One unit in the answer to QUERY_CONSUME_QUEUE (321); `eval` and `msg` are for filters' bit
    maps."""

    bit_map: str | None = None
    eval: bool = False
    extend_data_json: str | None = None
    msg: str | None = None
    physic_offset: int = 0
    physic_size: int = 0
    tags_code: int = 0


class QueryConsumeQueueResponseBody(Body):
    filter_data: str | None = None
    max_queue_index: int = 0
    min_queue_index: int = 0
    queue_data: list[ConsumeQueueData] = msgspec.field(default_factory=list)
    subscription_data: SubscriptionData | None = None


class ConsumerData(Body):
    consume_from_where: str = FROM_LAST_OFFSET
    consume_type: str = CONSUME_PASSIVELY
    group_name: str = ""
    message_model: str = CLUSTERING
    subscription_data_set: list[SubscriptionData] = msgspec.field(default_factory=list)
    unit_mode: bool = False


class ProducerData(Body):
    group_name: str = ""


class HeartbeatData(Body):
    """`without_sub`: the subscriptions are left out, because they did not change (heartbeat V2)."""

    client_id: str = msgspec.field(name="clientID", default="")
    consumer_data_set: list[ConsumerData] = msgspec.field(default_factory=list)
    heartbeat_fingerprint: int = 0
    producer_data_set: list[ProducerData] = msgspec.field(default_factory=list)
    without_sub: bool = False


class ClientConnection(Body):
    """One client in a connection list (Java `body.Connection`)."""

    client_addr: str = ""
    client_id: str = ""
    language: str = "JAVA"
    version: int = 0


class ConsumerConnection(Body):
    connection_set: list[ClientConnection] = msgspec.field(default_factory=list)
    consume_from_where: str = FROM_LAST_OFFSET
    consume_type: str = CONSUME_PASSIVELY
    message_model: str = CLUSTERING
    subscription_table: dict[str, SubscriptionData] = msgspec.field(default_factory=dict)


class ProducerConnection(Body):
    connection_set: list[ClientConnection] = msgspec.field(default_factory=list)


class ProducerInfo(Body):
    """One producer in the answer to GET_ALL_PRODUCER_INFO (328). Wall clock in ms."""

    client_id: str = ""
    language: str = "JAVA"
    last_update_timestamp: int = 0
    remote_ip: str = msgspec.field(name="remoteIP", default="")
    version: int = 0


class ProducerTableInfo(Body):
    data: dict[str, list[ProducerInfo]] = msgspec.field(default_factory=dict)


class GetConsumerListByGroupResponseBody(Body):
    consumer_id_list: list[str] = msgspec.field(default_factory=list)


class ConsumerSightingsBody(Body):
    """Ours: the consumers of `group` that one member of a broker group knows: client id -> ms since
    its last heartbeat, and client id -> ms since it left."""

    group: str
    seen: dict[str, int] = msgspec.field(default_factory=dict)
    left: dict[str, int] = msgspec.field(default_factory=dict)


class LockBatchRequestBody(Body):
    """LOCK_BATCH_MQ (41) and UNLOCK_BATCH_MQ (42)."""

    client_id: str = ""
    consumer_group: str = ""
    mq_set: list[MessageQueue] = msgspec.field(default_factory=list)
    only_this_broker: bool = False


class LockBatchResponseBody(Body):
    lock_ok_mq_set: list[MessageQueue] = msgspec.field(name="lockOKMQSet", default_factory=list)


class CheckClientRequestBody(Body):
    client_id: str = ""
    group: str = ""
    namespace: str | None = None
    subscription_data: SubscriptionData = msgspec.field(default_factory=SubscriptionData)


class QueryAssignmentRequestBody(Body):
    client_id: str = ""
    consumer_group: str = ""
    message_model: str = CLUSTERING
    strategy_name: str = ""
    topic: str = ""


class MessageQueueAssignment(Body):
    attachments: dict[str, str] | None = None
    message_queue: MessageQueue = MessageQueue("", "", 0)
    mode: str = "PULL"


class QueryAssignmentResponseBody(Body):
    message_queue_assignments: list[MessageQueueAssignment] = msgspec.field(default_factory=list)


class BatchAck(Body):
    """Messages of one pop: `bit_set` has bit i for `start_offset` + i; `retry` is a handle's flag
    (`protocol.pop`)."""

    bit_set: str = msgspec.field(default="", name="b")
    consumer_group: str = msgspec.field(default="", name="c")
    invisible_time: int = msgspec.field(default=0, name="it")
    pop_time: int = msgspec.field(default=0, name="pt")
    queue_id: int = msgspec.field(default=0, name="q")
    retry: str = msgspec.field(default="0", name="r")
    revive_qid: int = msgspec.field(default=0, name="rq")
    start_offset: int = msgspec.field(default=0, name="so")
    topic: str = msgspec.field(default="", name="t")


class BatchAckMessageRequestBody(Body):
    acks: list[BatchAck] = msgspec.field(default_factory=list)
    broker_name: str = ""


# Controllers, and a broker's replication state.


OPEN_END: Final = 9_223_372_036_854_775_807  # of an epoch that is still being written


class SyncStateSet(Body):
    """`sync_state_set` ascends."""

    sync_state_set: list[int] = msgspec.field(default_factory=list)
    sync_state_set_epoch: int = 0


class EpochCacheEntry(Body):
    """One epoch; `end_offset` is exclusive, `OPEN_END` for the last."""

    end_offset: int = OPEN_END
    epoch: int = 0
    start_offset: int = 0


class EpochEntryCache(Body):
    broker_id: int = 0
    broker_name: str = ""
    cluster_name: str = ""
    epoch_list: list[EpochCacheEntry] = msgspec.field(default_factory=list)
    max_offset: int = 0


class ReplicaIdentity(Body):
    alive: bool = False
    broker_address: str = ""
    broker_id: int = 0
    broker_name: str = ""


class ReplicasInfo(Body):
    cluster_name: str | None = None  # only our controllers say it
    in_sync_replicas: list[ReplicaIdentity] = msgspec.field(default_factory=list)
    master_address: str | None = None
    master_broker_id: int | None = None
    master_epoch: int = 0
    not_in_sync_replicas: list[ReplicaIdentity] = msgspec.field(default_factory=list)
    sync_state_set_epoch: int = 0

    @property
    def replicas(self) -> list[ReplicaIdentity]:
        """All of the group, those in its SyncStateSet first."""
        return self.in_sync_replicas + self.not_in_sync_replicas


class BrokerReplicasInfo(Body):
    replicas_info_table: dict[str, ReplicasInfo] = msgspec.field(default_factory=dict)


class ElectMasterResponseBody(Body):
    """Body of CONTROLLER_ELECT_MASTER (1002). The group's members are also at the top level,
    because `mqadmin` reads the body as a bare BrokerMemberGroup."""

    broker_addrs: dict[int, str] | None = None
    broker_member_group: BrokerMemberGroup | None = None
    broker_name: str | None = None
    cluster: str | None = None
    sync_state_set: list[int] = msgspec.field(default_factory=list)

    @classmethod
    def of(
        cls, group: BrokerMemberGroup | None, sync_state_set: list[int]
    ) -> "ElectMasterResponseBody":
        if group is None:
            return cls(sync_state_set=sync_state_set)
        return cls(
            broker_addrs=group.broker_addrs,
            broker_member_group=group,
            broker_name=group.broker_name,
            cluster=group.cluster,
            sync_state_set=sync_state_set,
        )


class HAClientRuntimeInfo(Body):
    last_read_timestamp: int = 0
    last_write_timestamp: int = 0
    master_addr: str | None = None
    master_flush_offset: int = 0
    max_offset: int = 0
    transferred_byte_in_second: int = 0


class HAConnectionRuntimeInfo(Body):
    """`diff`: bytes that the slave lacks. `slave_name`: only of slaves that named themselves."""

    addr: str = ""
    diff: int = 0
    in_sync: bool = False
    slave_ack_offset: int = 0
    slave_name: str | None = None
    transfer_from_where: int = 0
    transferred_byte_in_second: int = 0


class HARuntimeInfo(Body):
    ha_client_runtime_info: HAClientRuntimeInfo = msgspec.field(default_factory=HAClientRuntimeInfo)
    ha_connection_info: list[HAConnectionRuntimeInfo] = msgspec.field(default_factory=list)
    in_sync_slave_nums: int = 0
    master: bool = False
    master_commit_log_max_offset: int = 0


def encode_names(names: list[str]) -> bytes:
    """CONTROLLER_GET_SYNC_STATE_DATA (1006): broker names as a JSON array."""
    return encode_json(names)
