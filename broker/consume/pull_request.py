"""The checks of a pull (PULL_MESSAGE, 11; LITE_PULL_MESSAGE, 361), in Java's order.

The result is a `Pull`: what to read, and with which filter. The subscription comes from the pull
itself, or from the group's heartbeats. Origin: PullMessageProcessor in Java.
"""

from dataclasses import dataclass
from typing import Final

from batonmq.broker.config import BrokerConfig
from batonmq.broker.consume.consumer_manager import ConsumerManager
from batonmq.broker.consume.read_checks import (
    Forbidden,
    ReadForbiddenError,
    check_queue,
    check_subscription,
    consuming_group,
    readable_topic,
)
from batonmq.broker.filter.consumer_filter import ConsumerFilterManager
from batonmq.broker.filter.sql_values import Matches
from batonmq.broker.filter.subscription_filter import SubscriptionFilter, filter_of
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import BROADCASTING, SQL92, TAG, SubscriptionGroupConfig
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.sysflag import PULL_CLASS_FILTER, PULL_SUBSCRIPTION
from batonmq.remoting.connection import Connection
from batonmq.remoting.headers import PullFields, PullFrame, refusal

# A reply and its header must fit into a frame of 16 MiB.
MAX_REPLY_BYTES: Final = 15 * 1024 * 1024
UNANNOUNCED_MS = 1000
"""The heartbeat of a newer subscription, which is on its way, has come until then."""


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """A checked pull. `wanted`: tag hashes, None for all. `matches`: the SQL92 filter, None for
    none. `ours`: sent by this project's client, which finds a new master by itself."""

    channel: Connection
    opaque: int
    group: SubscriptionGroupConfig
    topic: str
    topic_sys_flag: int
    queue_id: int
    max_num: int
    max_bytes: int
    wanted: frozenset[int] | None
    matches: Matches | None
    ours: bool

    def refuse(self, code: int, remark: str) -> None:
        self.channel.write(refusal(self.opaque, code, remark))


class PullChecks:
    """Whether a pull may be answered, and by which filter."""

    def __init__(
        self,
        topics: TopicService,
        clients: ConsumerManager,
        filters: ConsumerFilterManager,
        config: BrokerConfig,
        path: WritePath,
    ) -> None:
        self._topics = topics
        self._clients = clients
        self._filters = filters
        self._config = config
        self._path = path

    def checked(self, channel: Connection, request: PullFrame) -> Pull:
        """Checks the request. Raises BrokerRefusal."""
        ext = request.ext
        if (
            request.code == RequestCode.LITE_PULL_MESSAGE
            and not self._config.lite_pull_message_enable
        ):
            raise BrokerRefusal(
                ResponseCode.NO_PERMISSION, "lite pulls are off: litePullMessageEnable is false"
            )
        # Unknown groups are created only while writes are taken.
        writable = self._path.gate.refusal is None
        group = consuming_group(self._topics, ext.consumer_group, writable=writable)
        config = readable_topic(self._topics, ext.topic)
        check_queue(config, ext.queue_id)
        wanted, matches = self._filter(ext, group, channel)
        return Pull(
            channel,
            request.opaque,
            group,
            ext.topic,
            config.topic_sys_flag,
            ext.queue_id,
            max(1, ext.max_msg_nums),  # 0 or less would never get on
            min(ext.max_msg_bytes or MAX_REPLY_BYTES, MAX_REPLY_BYTES),
            wanted,
            matches,
            request.is_ours,
        )

    def _filter(
        self, ext: PullFields, group: SubscriptionGroupConfig, channel: Connection
    ) -> SubscriptionFilter:
        if ext.sys_flag & PULL_CLASS_FILTER:
            raise BrokerRefusal(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED, "class filters are not supported"
            )
        if ext.sys_flag & PULL_SUBSCRIPTION:
            kind, expression = ext.expression_type or TAG, ext.subscription or "*"
        else:
            kind, expression = self._subscribed(ext, group, channel)
        check_subscription(self._topics, ext.consumer_group, ext.topic)
        return filter_of(kind, expression, sql92=self._config.enable_property_filter)

    def _subscribed(
        self, ext: PullFields, group: SubscriptionGroupConfig, channel: Connection
    ) -> tuple[str, str]:
        """(Expression type, expression) from the group's heartbeats."""
        name, topic = ext.consumer_group, ext.topic
        subscription = self._clients.subscription(name, topic)
        if subscription is None:
            raise BrokerRefusal(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"group {name} has no subscription of {topic} here",
            )
        is_broadcasting = self._clients.message_model(name) == BROADCASTING
        if is_broadcasting and not group.consume_broadcast_enable:
            raise ReadForbiddenError(
                Forbidden.BROADCASTING,
                f"group {name} may not broadcast: consumeBroadcastEnable is false",
            )
        kind = subscription.expression_type or TAG
        # The heartbeat with the newer subscription is on its way: filtered by the older one, the
        # group would skip messages.
        if subscription.sub_version < ext.sub_version:
            late_ms = self._clients.unannounced_ms(
                name, channel, topic, ext.sub_version, self._path.clock_ms()
            )
            # A stock client whose rebalance meets a running heartbeat sends none for it, and would
            # wait for its next one, 30 s. Tags it also compares itself, so it may get them all.
            if late_ms >= UNANNOUNCED_MS and kind == (ext.expression_type or TAG) == TAG:
                return TAG, "*"
            raise BrokerRefusal(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the subscription of {topic} known here is older than the pull's",
            )
        if kind == SQL92 and self._config.enable_property_filter:
            known = self._filters.get(name, topic)
            if known is None:
                raise BrokerRefusal(
                    ResponseCode.FILTER_DATA_NOT_EXIST,
                    f"group {name} has no filter of {topic} that can be used",
                )
            if known.client_version < ext.sub_version:
                raise BrokerRefusal(
                    ResponseCode.FILTER_DATA_NOT_LATEST,
                    f"the filter of {topic} known here is older than the pull's",
                )
            return kind, known.expression
        return kind, subscription.sub_string or "*"
