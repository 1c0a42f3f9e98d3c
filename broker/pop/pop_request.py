"""A POP request and its checks, in Java's order: who may pop what, with which filter.

Origin: `PopMessageProcessor`, `PeekMessageProcessor`, `NotificationProcessor` in Java.
"""

from dataclasses import dataclass
from typing import Final

from batonmq.broker.config import BrokerConfig
from batonmq.broker.consume.held_requests import HeldPop
from batonmq.broker.consume.read_checks import (
    check_queue,
    check_subscription,
    consuming_group,
    readable_topic,
)
from batonmq.broker.filter.sql_values import Matches
from batonmq.broker.filter.subscription_filter import SubscriptionFilter, filter_of
from batonmq.broker.request_fields import flag, invalid, number, text
from batonmq.broker.tables.topics import TopicService
from batonmq.protocol.bodies import TAG
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.topic_name import NAME_BYTES_MAX, check_pop_names
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection

MESSAGES_MAX: Final = 32
INVISIBLE_MAX_MS: Final = 12 * 3600 * 1000
"""As Java's proxy allows."""
POLL_MAX_MS: Final = 60_000
"""Bounds the different deadlines of held requests (R58); stock clients wait for 15 s."""
LATE_MS: Final = 500
"""A POP whose deadline passed longer ago finds nothing: its client has given it up."""
FROM_MAX: Final = 1


@dataclass(slots=True, eq=False)
class PopRequest(HeldPop):
    """`wanted` and `matches`: as in `Pull`. `from_max` (initMode 1): a group without an offset
    begins at the last message."""

    channel: Connection
    request: RemotingCommand
    max_num: int = MESSAGES_MAX
    invisible_ms: int = 0
    from_max: bool = False
    order: bool = False
    attempt: str = ""
    wanted: frozenset[int] | None = None
    matches: Matches | None = None

    @property
    def is_notification(self) -> bool:
        return self.request.code == RequestCode.NOTIFICATION


class PopChecks:
    """Checks requests; each method raises BrokerRefusal."""

    def __init__(self, topics: TopicService, config: BrokerConfig) -> None:
        self._topics = topics
        self._config = config

    def pop(
        self, request: RemotingCommand, connection: Connection, now_ms: int, clock_ms: int
    ) -> PopRequest:
        """POP_MESSAGE (200050). `now_ms` is wall clock, `clock_ms` the clock of deadlines; the
        deadline may be past."""
        pop = self.notification(request, connection, now_ms, clock_ms)
        pop.max_num = self._max_num(request)
        pop.invisible_ms = invisible_time(request, least_ms=1)
        pop.from_max = number(request, "initMode") == FROM_MAX
        pop.wanted, pop.matches = self._filter(request)
        pop.tags = len(pop.wanted or ())
        return pop

    def notification(
        self, request: RemotingCommand, connection: Connection, now_ms: int, clock_ms: int
    ) -> PopRequest:
        """NOTIFICATION (200054); also the first checks of a POP."""
        poll_ms = number(request, "pollTime")
        born_ms = number(request, "bornTime") or now_ms  # 0 is "now" in Java, too
        pop = self.peek(request, connection)
        # Not longer than `poll_ms`: the client's clock may be ahead.
        pop.deadline_ms = clock_ms + min(born_ms + poll_ms - now_ms, poll_ms, POLL_MAX_MS)
        pop.order = flag(request, "order")
        pop.attempt = request.ext.get("attemptId") or ""
        if len(pop.attempt) > NAME_BYTES_MAX:
            raise invalid(
                f"attemptId has {len(pop.attempt)} characters, allowed are {NAME_BYTES_MAX}"
            )
        return pop

    def peek(self, request: RemotingCommand, connection: Connection) -> PopRequest:
        """PEEK_MESSAGE (200052); also the first checks of the others."""
        name, topic = text(request, "consumerGroup"), text(request, "topic")
        queue_id = number(request, "queueId")
        config = readable_topic(self._topics, topic)
        check_queue(config, queue_id, any_queue=True)
        # Before anything is popped: later its retry would have no topic.
        check_pop_names(name, topic)
        consuming_group(self._topics, name, writable=True)
        check_subscription(self._topics, name, topic)
        # R58: it may be held for a minute, without its fields and body.
        asked = RemotingCommand(request.code, flag=request.flag, opaque=request.opaque)
        pop = PopRequest(topic, queue_id, 0, connection, name, connection, asked)
        if request.code == RequestCode.PEEK_MESSAGE:  # a notification has no such field
            pop.max_num = self._max_num(request)
        return pop

    def _max_num(self, request: RemotingCommand) -> int:
        count = number(request, "maxMsgNums")
        if not 1 <= count <= MESSAGES_MAX:
            raise invalid(f"maxMsgNums is {count}, allowed are 1 to {MESSAGES_MAX}")
        return count

    def _filter(self, request: RemotingCommand) -> SubscriptionFilter:
        kind, expression = request.ext.get("expType") or TAG, request.ext.get("exp") or "*"
        takes_sql, off = self._config.enable_property_filter, ResponseCode.SUBSCRIPTION_PARSE_FAILED
        return filter_of(kind, expression, sql92=takes_sql, off=off)


def invisible_time(request: RemotingCommand, *, least_ms: int) -> int:
    """The field `invisibleTime` in ms. Raises BrokerRefusal."""
    time_ms = number(request, "invisibleTime")
    if not least_ms <= time_ms <= INVISIBLE_MAX_MS:
        raise invalid(
            f"invisibleTime is {time_ms} ms, allowed are {least_ms} to {INVISIBLE_MAX_MS}"
        )
    return time_ms
