"""What each request code needs: the one table of brokers, name servers and controllers. Pure.

A request must satisfy each need of its row; of the actions of a need one is enough. A code without
a row is denied to all but super users. A retry topic belongs to its group, also in both spellings
of POP; the right on a group is enough to read its dead-letter topic. Internal topics are written
and read by nodes only, but anyone may trace. Origin: DefaultAuthorizationContextBuilder, the
annotations of request headers. Codes that RocketMQ 5.3.3 does not check have a row here
(docs/security.md).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from batonmq.auth.policy import CLUSTER, NODES, Need
from batonmq.protocol.bodies import (
    BatchAckMessageRequestBody,
    HeartbeatData,
    LockBatchRequestBody,
    QueryAssignmentRequestBody,
    SetMessageRequestModeRequestBody,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
    TopicConfigList,
)
from batonmq.protocol.codes import RequestCode as Code
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.topic_name import DLQ_PREFIX, RETRY_PREFIX, TRACE_TOPIC, is_system_topic
from batonmq.remoting.command import RemotingCommand

TOPIC: Final = "Topic"
GROUP: Final = "Group"
PUB, SUB, GET, LIST = "Pub", "Sub", "Get", "List"
CREATE, UPDATE, DELETE = "Create", "Update", "Delete"

_READ: Final = ("consumerGroup", "topic")

Needs = Iterator[Need]
Reader = Callable[[RemotingCommand], Needs]


@dataclass(frozen=True, slots=True)
class Right:
    """`text`: for people. `needs`: of one request; raises BrokerRefusal. `changes`: an admin's
    change, to be audited. `fields`: if not empty, the fields that alone say what is needed."""

    text: str
    needs: Reader
    changes: bool = False
    fields: tuple[str, ...] = ()


def group_need(group: str, *actions: str) -> Need:
    # A client may write the group of a retry topic as the topic.
    return Need(((GROUP, group.removeprefix(RETRY_PREFIX)),), actions)


def topic_needs(topic: str, *actions: str) -> Needs:
    """What reading or managing a topic needs."""
    if topic.startswith(RETRY_PREFIX):
        yield group_need(topic.partition("+")[0], *actions)
    elif topic.startswith(DLQ_PREFIX):
        yield Need(((TOPIC, topic), (GROUP, topic.removeprefix(DLQ_PREFIX))), actions)
    elif SUB in actions and topic != TRACE_TOPIC and is_system_topic(topic):
        # It holds messages of every topic: delayed, half or discarded ones.
        yield Need(((NODES, topic),), actions)
    else:
        yield Need(((TOPIC, topic),), actions)


def pop_topic_needs(topic: str, group: str) -> Needs:
    """The same for a topic that the group reads: its own retry topic needs nothing more."""
    own = RETRY_PREFIX + group
    if topic != own and not topic.startswith(f"{own}+"):
        yield from topic_needs(topic, SUB)


def ack_topic_needs(topic: str, group: str) -> Needs:
    """The same for an ack, which names the topic where the popped message is stored."""
    older = f"{RETRY_PREFIX}{group}_"
    if topic.startswith(older):
        # POP's older name for the group's retries of a topic, or the retry topic of another group.
        # Clients acknowledge by that name and never read by it, so only here the topic is enough.
        other = topic.removeprefix(RETRY_PREFIX)
        yield Need(((GROUP, other), (TOPIC, topic.removeprefix(older))), (SUB,))
    else:
        yield from pop_topic_needs(topic, group)


def publish_needs(topic: str) -> Needs:
    """What a message to a topic needs. Of a retry topic the right to read for its group: consumers
    send there what they failed on."""
    if topic == TRACE_TOPIC:
        return
    if topic.startswith(RETRY_PREFIX):
        yield from topic_needs(topic, SUB)
    elif is_system_topic(topic):
        yield Need(((NODES, topic),), (PUB,))
    else:
        yield Need(((TOPIC, topic),), (PUB,))


def _field(request: RemotingCommand, name: str) -> str:
    """The field that the handler will read; other fields of a request decide nothing. Raises
    BrokerRefusal if it is missing."""
    if value := request.ext.get(name):
        return value
    raise BrokerRefusal(ResponseCode.NO_PERMISSION, f"the request has no field {name}")


def _publish(name: str) -> Right:
    return Right("Topic Pub", lambda request: publish_needs(_field(request, name)), fields=(name,))


def _topic(*actions: str, changes: bool = False) -> Right:
    text = f"Topic {'/'.join(actions)}"
    return Right(text, lambda request: topic_needs(_field(request, "topic"), *actions), changes)


def _group(*actions: str, name: str = "group", changes: bool = False) -> Right:
    def needs(request: RemotingCommand) -> Needs:
        yield group_need(_field(request, name), *actions)

    return Right(f"Group {'/'.join(actions)}", needs, changes)


def _reads(*actions: str) -> Right:
    """A group in a topic: fields `consumerGroup`, `topic`."""

    def needs(request: RemotingCommand) -> Needs:
        group, topic = _field(request, "consumerGroup"), _field(request, "topic")
        yield group_need(group, *actions)
        if topic != RETRY_PREFIX + group:
            yield from topic_needs(topic, *actions)

    actions_text = "/".join(actions)
    return Right(f"Group {actions_text}, Topic {actions_text}", needs, fields=_READ)


def _pops(of_topic: Callable[[str, str], Needs] = pop_topic_needs) -> Right:
    def needs(request: RemotingCommand) -> Needs:
        group = _field(request, "consumerGroup")
        yield group_need(group, SUB)
        yield from of_topic(_field(request, "topic"), group)

    return Right("Group Sub, Topic Sub", needs, fields=_READ)


def _cluster(*actions: str, changes: bool = False) -> Right:
    def needs(request: RemotingCommand) -> Needs:
        yield Need(((CLUSTER, ""),), actions)

    return Right(f"Cluster {'/'.join(actions)}", needs, changes)


def _open() -> Right:
    return Right("any user", lambda request: iter(()))


def _nodes(*, changes: bool = False) -> Right:
    def needs(request: RemotingCommand) -> Needs:
        yield Need(((NODES, ""),), (UPDATE,))

    return Right("super users, nodes", needs, changes)


def _group_and_topic(*actions: str, name: str = "group", changes: bool = False) -> Right:
    """A group, and the topics that are given: `topic`, and with semicolons `topicList`."""

    def needs(request: RemotingCommand) -> Needs:
        yield group_need(_field(request, name), *actions)
        get = request.ext.get
        for topic in {get("topic", ""), *get("topicList", "").split(";")} - {""}:
            yield from topic_needs(topic, *actions)

    text = "/".join(actions)
    return Right(f"Group {text}, Topic {text}", needs, changes)


def _route(request: RemotingCommand) -> Needs:
    topic = _field(request, "topic")
    # Clients ask for the template of new topics, and for the topic of traces.
    if not is_system_topic(topic):
        yield from topic_needs(topic, PUB, SUB, GET)


def _heartbeat(request: RemotingCommand) -> Needs:
    for consumer in HeartbeatData.decode_request(request.body).consumer_data_set:
        yield group_need(consumer.group_name, SUB)
        for subscription in consumer.subscription_data_set:
            yield from pop_topic_needs(subscription.topic, consumer.group_name)


def _unregister(request: RemotingCommand) -> Needs:
    if group := request.ext.get("consumerGroup"):
        yield group_need(group, SUB)


def _locks(request: RemotingCommand) -> Needs:
    body = LockBatchRequestBody.decode_request(request.body)
    yield group_need(body.consumer_group, SUB)
    for topic in {queue.topic for queue in body.mq_set}:
        yield from pop_topic_needs(topic, body.consumer_group)


def _assignment(request: RemotingCommand) -> Needs:
    body = QueryAssignmentRequestBody.decode_request(request.body)
    yield group_need(body.consumer_group, SUB)
    yield from pop_topic_needs(body.topic, body.consumer_group)


def _batch_ack(request: RemotingCommand) -> Needs:
    acks = BatchAckMessageRequestBody.decode_request(request.body).acks
    for group, topic in {(ack.consumer_group, ack.topic) for ack in acks}:
        yield group_need(group, SUB)
        yield from ack_topic_needs(topic, group)


def _request_mode(request: RemotingCommand) -> Needs:
    body = SetMessageRequestModeRequestBody.decode_request(request.body)
    yield group_need(body.consumer_group, UPDATE)
    yield from topic_needs(body.topic, UPDATE)


def _topics_made(request: RemotingCommand) -> Needs:
    for config in TopicConfigList.decode_request(request.body).topic_config_list:
        yield Need(((TOPIC, config.topic_name),), (CREATE, UPDATE))


def _group_made(request: RemotingCommand) -> Needs:
    name = SubscriptionGroupConfig.decode_request(request.body).group_name
    yield Need(((GROUP, name),), (CREATE, UPDATE))


def _groups_made(request: RemotingCommand) -> Needs:
    for config in SubscriptionGroupList.decode_request(request.body).group_config_list:
        yield Need(((GROUP, config.group_name),), (CREATE, UPDATE))


def _clone(request: RemotingCommand) -> Needs:
    yield group_need(_field(request, "srcGroup"), GET)
    yield group_need(_field(request, "destGroup"), UPDATE)
    if topic := request.ext.get("topic"):
        yield from topic_needs(topic, SUB, UPDATE)


RIGHTS: Final[dict[int, Right]] = {
    # Producers.
    Code.SEND_MESSAGE: _publish("topic"),
    Code.SEND_MESSAGE_V2: _publish("b"),
    Code.SEND_BATCH_MESSAGE: _publish("b"),
    Code.SEND_REPLY_MESSAGE: _publish("topic"),
    Code.SEND_REPLY_MESSAGE_V2: _publish("b"),
    Code.END_TRANSACTION: Right("Topic Pub, of the half message", lambda request: iter(())),
    Code.RECALL_MESSAGE: _publish("topic"),
    # Consumers.
    Code.PULL_MESSAGE: _reads(SUB),
    Code.LITE_PULL_MESSAGE: _reads(SUB),
    Code.QUERY_CONSUMER_OFFSET: _reads(SUB, GET),
    Code.UPDATE_CONSUMER_OFFSET: _reads(SUB, UPDATE),
    Code.CONSUMER_SEND_MSG_BACK: Right("Group Sub, Topic Sub of the message", _group(SUB).needs),
    Code.GET_CONSUMER_LIST_BY_GROUP: _group(SUB, GET, name="consumerGroup"),
    Code.POP_MESSAGE: _pops(),
    Code.PEEK_MESSAGE: _pops(),
    Code.NOTIFICATION: _pops(),
    Code.POLLING_INFO: _pops(),
    Code.ACK_MESSAGE: _pops(ack_topic_needs),
    Code.CHANGE_MESSAGE_INVISIBLETIME: _pops(ack_topic_needs),
    Code.BATCH_ACK_MESSAGE: Right("Group Sub, Topic Sub", _batch_ack),
    Code.QUERY_ASSIGNMENT: Right("Group Sub, Topic Sub", _assignment),
    Code.LOCK_BATCH_MQ: Right("Group Sub, Topic Sub", _locks),
    Code.UNLOCK_BATCH_MQ: Right("Group Sub, Topic Sub", _locks),
    # Both.
    Code.GET_ROUTEINFO_BY_TOPIC: Right("Topic Pub/Sub/Get", _route),
    Code.HEART_BEAT: Right("of each consumer Group Sub, Topic Sub", _heartbeat),
    Code.UNREGISTER_CLIENT: Right("of a consumer Group Sub", _unregister),
    Code.CHECK_CLIENT_CONFIG: _open(),
    Code.QUERY_MESSAGE: _topic(SUB, GET),
    Code.SEARCH_OFFSET_BY_TIMESTAMP: _topic(SUB, GET),
    Code.GET_MAX_OFFSET: _topic(SUB, GET),
    Code.GET_MIN_OFFSET: _topic(SUB, GET),
    Code.GET_EARLIEST_MSG_STORETIME: _topic(SUB, GET),
    # Any record of the log can be asked for by its place.
    Code.VIEW_MESSAGE_BY_ID: _nodes(),
    Code.CONSUME_MESSAGE_DIRECTLY: _nodes(changes=True),
    # Topics and groups.
    Code.UPDATE_AND_CREATE_TOPIC: _topic(CREATE, UPDATE, changes=True),
    Code.UPDATE_AND_CREATE_TOPIC_LIST: Right("Topic Create/Update", _topics_made, changes=True),
    Code.DELETE_TOPIC_IN_BROKER: _topic(DELETE, changes=True),
    Code.DELETE_TOPIC_IN_NAMESRV: _topic(DELETE, changes=True),
    Code.GET_TOPIC_CONFIG: _topic(GET),
    Code.GET_TOPIC_STATS_INFO: _topic(GET),
    Code.QUERY_TOPIC_CONSUME_BY_WHO: _topic(GET),
    Code.QUERY_CONSUME_QUEUE: _topic(GET),
    Code.CHECK_ROCKSDB_CQ_WRITE_PROGRESS: _topic(GET),
    Code.QUERY_CONSUME_TIME_SPAN: _group_and_topic(GET),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: Right(
        "Group Create/Update", _group_made, changes=True
    ),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: Right(
        "Group Create/Update", _groups_made, changes=True
    ),
    Code.DELETE_SUBSCRIPTIONGROUP: _group(DELETE, name="groupName", changes=True),
    Code.GET_SUBSCRIPTIONGROUP_CONFIG: _group(GET),
    Code.UPDATE_AND_GET_GROUP_FORBIDDEN: _group_and_topic(UPDATE, changes=True),
    Code.GET_CONSUME_STATS: _group_and_topic(GET, name="consumerGroup"),
    Code.GET_CONSUMER_CONNECTION_LIST: _group(GET, name="consumerGroup"),
    Code.GET_CONSUMER_RUNNING_INFO: _group(GET, name="consumerGroup"),
    Code.QUERY_TOPICS_BY_CONSUMER: _group(GET),
    Code.QUERY_SUBSCRIPTION_BY_CONSUMER: _group_and_topic(GET),
    Code.INVOKE_BROKER_TO_RESET_OFFSET: _group_and_topic(UPDATE, changes=True),
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _group_and_topic(GET),
    Code.CLONE_GROUP_OFFSET: Right("Groups Get and Update, Topic Sub/Update", _clone, True),
    Code.SET_MESSAGE_REQUEST_MODE: Right("Group Update, Topic Update", _request_mode, True),
    # The cluster.
    Code.UPDATE_BROKER_CONFIG: _cluster(UPDATE, changes=True),
    Code.CLEAN_EXPIRED_CONSUMEQUEUE: _cluster(UPDATE, changes=True),
    Code.DELETE_EXPIRED_COMMITLOG: _cluster(UPDATE, changes=True),
    Code.CLEAN_UNUSED_TOPIC: _cluster(UPDATE, changes=True),
    Code.RESUME_CHECK_HALF_MESSAGE: _cluster(UPDATE, changes=True),
    Code.PUT_KV_CONFIG: _cluster(UPDATE, changes=True),
    Code.DELETE_KV_CONFIG: _cluster(UPDATE, changes=True),
    Code.WIPE_WRITE_PERM_OF_BROKER: _cluster(UPDATE, changes=True),
    Code.ADD_WRITE_PERM_OF_BROKER: _cluster(UPDATE, changes=True),
    Code.REGISTER_TOPIC_IN_NAMESRV: _cluster(UPDATE, changes=True),
    Code.UPDATE_NAMESRV_CONFIG: _cluster(UPDATE, changes=True),
    Code.BATON_REPAIR_REPLICA: _cluster(UPDATE, changes=True),
    Code.UPDATE_COLD_DATA_FLOW_CTR_CONFIG: _cluster(UPDATE, changes=True),
    Code.REMOVE_COLD_DATA_FLOW_CTR_CONFIG: _cluster(UPDATE, changes=True),
    Code.SET_COMMITLOG_READ_MODE: _cluster(UPDATE, changes=True),
    Code.POP_ROLLBACK: _cluster(UPDATE, changes=True),
    Code.CONTROLLER_ELECT_MASTER: _cluster(UPDATE, changes=True),
    Code.CLEAN_BROKER_DATA: _cluster(UPDATE, changes=True),
    Code.UPDATE_CONTROLLER_CONFIG: _cluster(UPDATE, changes=True),
    Code.RESET_MASTER_FLUSH_OFFSET: _nodes(changes=True),
    Code.AUTH_CREATE_USER: _cluster(UPDATE, changes=True),
    Code.AUTH_UPDATE_USER: _cluster(UPDATE, changes=True),
    Code.AUTH_DELETE_USER: _cluster(UPDATE, changes=True),
    Code.AUTH_CREATE_ACL: _cluster(UPDATE, changes=True),
    Code.AUTH_UPDATE_ACL: _cluster(UPDATE, changes=True),
    Code.AUTH_DELETE_ACL: _cluster(UPDATE, changes=True),
    Code.AUTH_GET_USER: _cluster(GET),
    Code.AUTH_LIST_USER: _cluster(GET),
    Code.AUTH_GET_ACL: _cluster(GET),
    Code.AUTH_LIST_ACL: _cluster(GET),
    Code.BATON_ROTATE_USER: _cluster(UPDATE, changes=True),
    Code.BATON_WHO_AM_I: _open(),
    Code.BATON_GET_TLS: _cluster(GET),
    Code.GET_BROKER_CONFIG: _cluster(GET),
    Code.GET_BROKER_RUNTIME_INFO: _cluster(GET),
    Code.GET_TIMER_METRICS: _cluster(GET),
    Code.EXPORT_ROCKSDB_CONFIG_TO_JSON: _cluster(GET),
    Code.GET_COLD_DATA_FLOW_CTR_INFO: _cluster(GET),
    Code.GET_KV_CONFIG: _cluster(GET),
    Code.GET_KVLIST_BY_NAMESPACE: _cluster(GET),
    Code.GET_BROKER_CLUSTER_INFO: _cluster(GET),
    Code.GET_PRODUCER_CONNECTION_LIST: _cluster(GET),
    Code.GET_ALL_PRODUCER_INFO: _cluster(GET),
    Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: _cluster(GET, LIST),
    Code.GET_TOPICS_BY_CLUSTER: _cluster(GET, LIST),
    Code.GET_UNIT_TOPIC_LIST: _cluster(GET, LIST),
    Code.GET_HAS_UNIT_SUB_TOPIC_LIST: _cluster(GET, LIST),
    Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: _cluster(GET, LIST),
    Code.GET_ALL_TOPIC_CONFIG: _cluster(GET),
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _cluster(GET),
    Code.GET_ALL_CONSUMER_OFFSET: _cluster(GET),
    Code.GET_ALL_DELAY_OFFSET: _cluster(GET),
    Code.GET_ALL_MESSAGE_REQUEST_MODE: _cluster(GET),
    Code.GET_TIMER_CHECK_POINT: _cluster(GET),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_NS: _cluster(GET),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _cluster(GET),
    Code.VIEW_BROKER_STATS_DATA: _cluster(GET),
    Code.GET_BROKER_CONSUME_STATS: _cluster(GET),
    Code.GET_NAMESRV_CONFIG: _cluster(GET),
    Code.GET_CONTROLLER_CONFIG: _cluster(GET),
    Code.CONTROLLER_GET_METADATA_INFO: _cluster(GET),
    Code.CONTROLLER_GET_REPLICA_INFO: _cluster(GET),
    Code.CONTROLLER_GET_SYNC_STATE_DATA: _cluster(GET),
    Code.GET_BROKER_MEMBER_GROUP: _cluster(GET),
    Code.GET_BROKER_HA_STATUS: _cluster(GET),
    Code.GET_BROKER_EPOCH_CACHE: _cluster(GET),
    Code.QUERY_DATA_VERSION: _cluster(GET),
    # Between nodes.
    Code.REGISTER_BROKER: _nodes(),
    Code.UNREGISTER_BROKER: _nodes(),
    Code.BROKER_HEARTBEAT: _nodes(),
    Code.CONTROLLER_ALTER_SYNC_STATE_SET: _nodes(),
    Code.CONTROLLER_REGISTER_BROKER: _nodes(),
    Code.CONTROLLER_GET_NEXT_BROKER_ID: _nodes(),
    Code.CONTROLLER_APPLY_BROKER_ID: _nodes(),
    Code.NOTIFY_MIN_BROKER_ID_CHANGE: _nodes(),
    Code.NOTIFY_CONSUMER_IDS_CHANGED: _nodes(),
    Code.NOTIFY_BROKER_ROLE_CHANGED: _nodes(),
    Code.EXCHANGE_BROKER_HA_INFO: _nodes(),
    Code.BATON_GET_QUEUE_LOCKS: _nodes(),
    Code.BATON_GET_CONSUMER_SIGHTINGS: _nodes(),
    Code.BATON_SAME_BROKER_ID: _nodes(),
    Code.BATON_CONNECTION_ENDS: _nodes(),
    Code.BATON_GET_USERS: _nodes(),
    Code.BATON_PUT_USERS: _nodes(),
    Code.BATON_REGISTER_MASTER: _nodes(),
}


ALWAYS_CHECKED: Final = frozenset(
    {code for code in Code if code.name.startswith("AUTH_")}
    | {Code.BATON_GET_USERS, Code.BATON_PUT_USERS, Code.BATON_ROTATE_USER}
)
"""Also where authorizationEnabled is off: a user must not make itself a super user."""


def needs_of(code: int, request: RemotingCommand) -> list[Need]:
    """All that a request of this code needs; a code without a row is for super users only. Raises
    BrokerRefusal or RemoteProtocolError for a request that does not say what it is about."""
    right = RIGHTS.get(code)
    if right is None:
        return [Need(((NODES, ""),), (UPDATE,))]
    return list(right.needs(request))
