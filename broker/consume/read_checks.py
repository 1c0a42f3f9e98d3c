"""The checks that pulls, POP and assignments share. Each processor calls them in the order of its
Java counterpart, because the first that fails decides the answer.
"""

from enum import IntEnum

from batonmq.broker.tables.topics import TopicService
from batonmq.protocol.bodies import PERM_READ, SubscriptionGroupConfig, TopicConfig
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.pop import ANY_QUEUE


class Forbidden(IntEnum):
    """What is forbidden: the `forbiddenType` in the answer to a pull."""

    GROUP = 2
    TOPIC = 3
    BROADCASTING = 4
    SUBSCRIPTION = 5


class ReadForbiddenError(BrokerRefusal):
    """NO_PERMISSION (16), with the kind of prohibition."""

    def __init__(self, kind: Forbidden, remark: str) -> None:
        super().__init__(ResponseCode.NO_PERMISSION, remark)
        self.kind = kind


def readable_topic(topics: TopicService, name: str) -> TopicConfig:
    """Raises BrokerRefusal TOPIC_NOT_EXIST, ReadForbiddenError."""
    config = topics.existing(name)
    if not config.perm & PERM_READ:
        raise ReadForbiddenError(
            Forbidden.TOPIC, f"topic {name} may not be read: perm {config.perm}"
        )
    return config


def check_queue(
    config: TopicConfig,
    queue_id: int,
    code: int = ResponseCode.INVALID_PARAMETER,
    *,
    any_queue: bool = False,
) -> None:
    """Raises BrokerRefusal `code` for a queue that the topic does not have."""
    if any_queue and queue_id == ANY_QUEUE:  # a POP: the broker chooses
        return
    if not 0 <= queue_id < config.read_queue_nums:
        raise BrokerRefusal(
            code,
            f"queueId {queue_id} of topic {config.topic_name}: it has {config.read_queue_nums}"
            f" queues{', and -1 means any' if any_queue else ''}",
        )


def consuming_group(topics: TopicService, name: str, *, writable: bool) -> SubscriptionGroupConfig:
    """As `TopicService.group`, but raises ReadForbiddenError if consumeEnable is false."""
    group = topics.group(name, writable=writable)
    if not group.consume_enable:
        raise ReadForbiddenError(
            Forbidden.GROUP, f"group {name} may not consume: consumeEnable is false"
        )
    return group


def check_subscription(topics: TopicService, group: str, topic: str) -> None:
    """Raises ReadForbiddenError if an operator has forbidden the group to read this topic."""
    if topics.groups.is_forbidden(group, topic):
        raise ReadForbiddenError(
            Forbidden.SUBSCRIPTION, f"group {group} is forbidden to read topic {topic}"
        )
