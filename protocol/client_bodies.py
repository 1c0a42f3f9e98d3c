"""Bodies between clients and brokers: heartbeats, connections, queue locks, assignments.

Origin: Java packages `remoting.protocol.heartbeat` and `.body`.
"""

from typing import Final

import msgspec

from protocol.body import Body
from protocol.message import MessageQueue

CONSUME_ACTIVELY: Final = "CONSUME_ACTIVELY"
CONSUME_PASSIVELY: Final = "CONSUME_PASSIVELY"
CONSUME_POP: Final = "CONSUME_POP"
BROADCASTING: Final = "BROADCASTING"
CLUSTERING: Final = "CLUSTERING"
FROM_LAST_OFFSET: Final = "CONSUME_FROM_LAST_OFFSET"
FROM_FIRST_OFFSET: Final = "CONSUME_FROM_FIRST_OFFSET"
FROM_TIMESTAMP: Final = "CONSUME_FROM_TIMESTAMP"


class SubscriptionData(Body):
    """What of a topic is wanted. `sub_string` "*" with both lists empty means all of it;
    `code_set` are Java hashes of `tags_set`; `sub_version` is the time it was made, ms."""

    class_filter_mode: bool = False
    code_set: list[int] = msgspec.field(default_factory=list)
    expression_type: str = "TAG"
    sub_string: str = "*"
    sub_version: int = 0
    tags_set: list[str] = msgspec.field(default_factory=list)
    topic: str = ""


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
    """`without_sub`: subscriptions are left out because nothing changed (V2)."""

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


class GetConsumerListByGroupResponseBody(Body):
    consumer_id_list: list[str] = msgspec.field(default_factory=list)


class LockBatchRequestBody(Body):
    client_id: str = ""
    consumer_group: str = ""
    mq_set: list[MessageQueue] = msgspec.field(default_factory=list)
    only_this_broker: bool = False


class UnlockBatchRequestBody(LockBatchRequestBody):
    pass


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


__all__ = [
    "BROADCASTING",
    "CLUSTERING",
    "CONSUME_ACTIVELY",
    "CONSUME_PASSIVELY",
    "CONSUME_POP",
    "FROM_FIRST_OFFSET",
    "FROM_LAST_OFFSET",
    "FROM_TIMESTAMP",
    "CheckClientRequestBody",
    "ClientConnection",
    "ConsumerConnection",
    "ConsumerData",
    "GetConsumerListByGroupResponseBody",
    "HeartbeatData",
    "LockBatchRequestBody",
    "LockBatchResponseBody",
    "MessageQueueAssignment",
    "ProducerConnection",
    "ProducerData",
    "QueryAssignmentRequestBody",
    "QueryAssignmentResponseBody",
    "SubscriptionData",
    "UnlockBatchRequestBody",
]
