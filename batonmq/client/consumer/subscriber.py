"""The base of all consumers: a group member with subscriptions."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from batonmq.client.consumer.options import ConsumeFromWhere, ConsumeType, MessageModel
from batonmq.client.consumer.pulling import build_subscription
from batonmq.client.errors import ArgumentError
from batonmq.client.hooks import ConsumeCall, HookCalls
from batonmq.client.instance.client_instance import ClientInstance, GroupMember
from batonmq.client.instance.connections import ClientOptions
from batonmq.protocol.bodies import TAG, ConsumerData, SubscriptionData
from batonmq.protocol.message import MessageExt, MessageQueue
from batonmq.runtime.clock import wall_ms


class Subscriber(GroupMember):
    consume_type: ClassVar[ConsumeType]

    def __init__(
        self,
        group: str,
        name_servers: str | Sequence[str] | None,
        client: ClientInstance | None,
        client_options: ClientOptions | None,
        from_where: ConsumeFromWhere,
        model: MessageModel = MessageModel.CLUSTERING,
    ) -> None:
        if not isinstance(from_where, ConsumeFromWhere):
            raise ArgumentError("from_where", from_where, "a ConsumeFromWhere is allowed")
        super().__init__(group, name_servers, client, client_options)
        self._from_where = from_where
        self._model = model
        self._subscriptions: dict[str, SubscriptionData] = {}

    def consumer_data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type=self.consume_type,
            message_model=self._model,
            consume_from_where=self._from_where,
            subscription_data_set=list(self._subscriptions.values()),
        )

    def topics(self) -> Collection[str]:
        return self._subscriptions.keys()

    def _subscribe(self, topic: str, expression: str, expression_type: str = TAG) -> None:
        """Raises BatonError for an invalid expression."""
        self._subscriptions[topic] = build_subscription(
            topic, expression, wall_ms(), expression_type
        )


class Receiver(Subscriber):
    """A consumer whose program asks for messages and processes them itself."""

    def __init__(
        self,
        group: str,
        name_servers: str | Sequence[str] | None,
        client: ClientInstance | None,
        client_options: ClientOptions | None,
        from_where: ConsumeFromWhere,
    ) -> None:
        if from_where is ConsumeFromWhere.TIMESTAMP:
            raise ArgumentError("from_where", from_where, "FIRST and LAST are allowed")
        super().__init__(group, name_servers, client, client_options, from_where)
        hook = self._client.options.hook
        self._watch = None if hook is None else HookCalls(hook)

    @contextmanager
    def processing(self, *messages: MessageExt) -> Iterator[None]:
        """`with consumer.processing(message): ...` marks the processing of messages of one queue,
        so that the hook sees it like a listener call. Without a hook it does nothing."""
        if self._watch is None or not messages:
            yield
            return
        first = messages[0]
        queue = MessageQueue(first.topic, first.broker_name, first.queue_id)
        call = ConsumeCall(self.group, queue, messages)
        with self._watch.consuming(call):
            yield
            call.succeeded = True  # not reached if the block raises

    def _note_received(self, messages: Sequence[MessageExt], began_ms: int) -> None:
        """Tells the hook. `began_ms`: wall clock."""
        if self._watch is not None:
            self._watch.received(self.group, messages, began_ms)
