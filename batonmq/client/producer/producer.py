"""Sending messages.

A send is retried until its deadline, so a failover only delays it. If a broker is not master, the
connection is lost, or a master is silent, the producer fetches the route from the name servers and
retries after a few milliseconds; if a refusal names the new master, it retries there at once. A try
without a reply may have been stored, so a message can be stored twice; consumers that must not
process it twice compare the unique key (`SendResult.msg_id`). Origin: DefaultMQProducerImpl.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import ClassVar, TypeVar

from batonmq.client.arguments import (
    CheckedOptions,
    check_queue,
    check_received,
    check_send,
    check_text,
    check_timeout,
    check_topic_name,
)
from batonmq.client.errors import (
    ArgumentError,
    MessageIllegalError,
    NoNameServerError,
    NoReplyError,
    NoRouteError,
)
from batonmq.client.hooks import HookCalls, SendCall
from batonmq.client.instance.client_instance import ClientInstance, GroupMember
from batonmq.client.instance.connections import ClientOptions
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.client.producer.outgoing import (
    COMPRESS_OVER_BYTES,
    MESSAGE_SIZE_MAX,
    NewKey,
    NewTopic,
    Outgoing,
    check_message,
    outgoing,
    outgoing_batch,
    timed,
)
from batonmq.client.producer.publish_routes import PublishRoutes
from batonmq.client.producer.request_reply import OpenRequests, answer, question
from batonmq.client.producer.sending import (
    NO_REPLY,
    RETRY_DECISIONS,
    STATUS_BY_CODE,
    ChooseQueue,
    QueuePicker,
    RetryDecision,
    Sending,
    SendResult,
)
from batonmq.protocol.codes import MASTER_ADDRESS_HINT, RequestCode
from batonmq.protocol.errors import ConnectError, RequestTimeoutError
from batonmq.protocol.message import Message, MessageExt, MessageQueue
from batonmq.protocol.message_id import UniqIdGenerator, decode_handle, host_bytes
from batonmq.protocol.topic_name import AUTO_CREATE_TOPIC
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.runtime.turns import for_each

R = TypeVar("R", bound=SendResult | None)

QueueSelector = Callable[[Sequence[MessageQueue], Message], MessageQueue]
"""Chooses the queue for a message among the topic's publish queues (ascending)."""


@dataclass(frozen=True, slots=True)
class ProducerOptions(CheckedOptions):
    """`default_topic_queue_nums`: queues per broker of a topic that a send creates."""

    send_timeout_ms: int = 3_000
    compress_over_bytes: int = COMPRESS_OVER_BYTES
    message_size_max: int = MESSAGE_SIZE_MAX
    default_topic: str = AUTO_CREATE_TOPIC
    default_topic_queue_nums: int = 4
    MAY_BE_ZERO: ClassVar = ("compress_over_bytes",)


class Producer(GroupMember):
    """`async with Producer("group", name_servers="host:9876") as producer: ...`

    Tasks of the loop that started it may call all methods concurrently."""

    def __init__(
        self,
        group: str,
        *,
        name_servers: str | Sequence[str] | None = None,
        options: ProducerOptions | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        """`client`: an instance to share, started and closed by its owner. Raises
        MessageIllegalError for a bad group name, NoNameServerError without addresses."""
        super().__init__(group, name_servers, client, client_options)
        self.options = options or ProducerOptions()
        hook = self._client.options.hook
        self._watch = None if hook is None else HookCalls(hook)
        self._pickers: dict[str, QueuePicker] = {}
        self._new_topic = NewTopic(
            self.options.default_topic, self.options.default_topic_queue_nums
        )
        self._routes = PublishRoutes(self._client, self._new_topic)
        self._questions = OpenRequests(self._client)
        self._ids = _new_ids(self._client.ip)

    async def start(self) -> None:
        # Again: processes that were forked since would give different messages the same keys.
        self._ids = _new_ids(self._client.ip)
        await super().start()

    def producer_group(self) -> str | None:
        return self.group

    def topics(self) -> Collection[str]:
        return [topic for topic in self._pickers if not self._routes.is_template(topic)]

    def route_changed(self, route: TopicRoute) -> None:
        self._routes.changed(route.topic)

    def masters_moved(self, broker_names: Collection[str]) -> None:
        for_each(list(self._pickers.values()), lambda picker: picker.moved(broker_names))

    async def publish_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The topic's queues that are writable now, ascending. Raises NoRouteError."""
        self._check_running()
        check_topic_name(topic)
        deadline_ms = boot_ms() + self.options.send_timeout_ms
        return (await self._routes.get(topic, deadline_ms)).publish_queues

    async def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
        unique_key: str | None = None,
        delay: timedelta | float | None = None,
        deliver_at: datetime | float | None = None,
    ) -> SendResult:
        """Sends one message and waits for the acknowledgement.

        The queue is chosen round robin, unless `queue` or `selector` names it. `unique_key`: the
        caller's own id of the message, kept when it is sent again; by default a new one. Consumers
        get the message after `delay` (seconds), or at `deliver_at` (seconds since 1970, or a
        datetime with a time zone), to the millisecond; until then `recall` can cancel it. If the
        result's `acknowledged` is false, the message is stored, but not confirmed by every in-sync
        replica. Raises ArgumentError and MessageIllegalError for invalid arguments, NoRouteError,
        NoNameServerError, ResponseError if this user may not see the topic, and SendFailedError:
        the message may still be stored, unless a broker refused it."""
        check_send([message], queue, timeout_ms)
        if unique_key is not None:
            check_text("unique_key", unique_key)
        new_key = self._ids.next if unique_key is None else lambda: unique_key

        async def send(messages: Sequence[Message]) -> SendResult:
            # First: a topic that is refused here must not be among those whose routes are polled.
            ready = self._outgoing(messages[0], new_key)
            return await self._send(ready, self._chooser(message, queue, selector), timeout_ms)

        return await self._observed([timed(message, delay, deliver_at)], send)

    async def recall(self, topic: str, recall_handle: str, *, timeout_ms: int | None = None) -> str:
        """Cancels a timed message by its `SendResult.recall_handle`; returns its unique key. Once
        this returns, the message will not be delivered. Raises MessageIllegalError for an invalid
        handle, ResponseError if the broker refuses (ILLEGAL_OPERATION, 604: already due;
        NO_PERMISSION, 16: recallMessageEnable is off), NoMasterError."""
        self._check_running()
        check_text("recall_handle", recall_handle)
        check_timeout(timeout_ms)
        try:
            handle = decode_handle(recall_handle)
        except ValueError as error:
            raise MessageIllegalError(str(error)) from None
        fields = {"producerGroup": self.group, "topic": topic, "recallHandle": recall_handle}
        request = RemotingCommand.request(RequestCode.RECALL_MESSAGE, fields)
        deadline_ms = boot_ms() + self._limit_ms(timeout_ms)
        masters = self._client.masters
        await masters.call(topic, handle.broker_name, request, deadline_ms=deadline_ms)
        return handle.unique_key

    def _limit_ms(self, timeout_ms: int | None) -> int:
        return self.options.send_timeout_ms if timeout_ms is None else timeout_ms

    async def request(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> MessageExt:
        """Sends a request and waits for the reply that a consumer sends with `reply`.

        Both together may take `timeout_ms`. The request is consumed at least once, so there may be
        several replies: the first one counts, even if it comes before the request is acknowledged.
        Raises NoReplyError if none came in time, and as `send`."""
        self._check_running()
        check_send([message], queue, timeout_ms)
        limit_ms = self._limit_ms(timeout_ms)
        deadline_ms = boot_ms() + limit_ms
        asked = question(message, self._client.client_id, limit_ms)
        # Here, not only in `send`: what is refused must cost no look-up and no heartbeat.
        check_message(asked, self.options.message_size_max)
        reply = self._questions.wait_for(asked)
        try:
            await self._questions.announce(await self._routes.get(asked.topic, deadline_ms))
            sending = asyncio.create_task(
                self.send(asked, queue=queue, selector=selector, timeout_ms=limit_ms)
            )
            try:
                await asyncio.wait((sending, reply), return_when=asyncio.FIRST_COMPLETED)
                if not reply.done():
                    await sending
            finally:
                # With a reply it does not matter whether the request was acknowledged.
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            async with asyncio.timeout(max(0, deadline_ms - boot_ms()) / 1000):
                return await reply
        except TimeoutError as error:
            raise NoReplyError(message.topic, limit_ms) from error
        finally:
            self._questions.forget(asked)

    async def reply(
        self, asked: MessageExt, body: bytes, *, timeout_ms: int | None = None
    ) -> SendResult:
        """Replies to a message that `request` sent, through the broker that it came from.

        Returns once the requester has the reply. Raises MessageIllegalError if the message does not
        ask for a reply, SendFailedError if the requester is gone, and as `send`."""
        check_received("asked", asked)
        check_timeout(timeout_ms)
        message = answer(asked, body)
        queue = MessageQueue(message.topic, asked.broker_name, 0)  # a reply topic has one queue

        async def send(messages: Sequence[Message]) -> SendResult:
            ready = replace(self._outgoing(messages[0], self._ids.next), reply=True)
            return await self._send(ready, lambda queues, last_broker: queue, timeout_ms)

        return await self._observed([message], send)

    def replied(self, request: RemotingCommand) -> bool:
        return self._questions.answered(request)

    async def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
        unique_keys: Sequence[str] | None = None,
    ) -> SendResult:
        """Sends messages of one topic in one request, with consecutive queue offsets.

        All are stored, or none. `msg_id` and `offset_msg_id` of the result are comma lists.
        `unique_keys`: the caller's own ids, one per message. Errors as `send`."""
        if not isinstance(messages, list | tuple):
            raise ArgumentError("messages", messages, "a list of messages is allowed")
        if not messages:
            raise MessageIllegalError("the batch is empty")
        check_send(messages, queue, timeout_ms)
        if unique_keys is not None and len(unique_keys) != len(messages):
            allowed = f"one text for each of the {len(messages)} messages is allowed"
            raise ArgumentError("unique_keys", unique_keys, allowed)
        # The batch itself takes one more key, after those of its messages.
        keys = None if unique_keys is None else iter((*unique_keys, self._ids.next()))

        async def send(messages: Sequence[Message]) -> SendResult:
            ready = outgoing_batch(
                messages,
                self._ids.next if keys is None else keys.__next__,
                size_max=self.options.message_size_max,
            )
            return await self._send(ready, self._chooser(messages[0], queue, None), timeout_ms)

        return await self._observed(messages, send)

    async def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
    ) -> None:
        """Sends without waiting for a reply: nothing is promised, nothing is retried.

        Raises MessageIllegalError, NoRouteError, NoNameServerError, ConnectError."""
        self._check_running()
        check_send([message], queue, None)

        async def send(messages: Sequence[Message]) -> None:
            ready = self._outgoing(messages[0], self._ids.next)
            deadline_ms = boot_ms() + self.options.send_timeout_ms
            route = await self._routes.get(ready.topic, deadline_ms)
            # A oneway send is tried once, so it does not wait for an election.
            if not route.publish_queues:
                raise NoRouteError(
                    ready.topic,
                    self._client.name_server_addresses,
                    "no broker takes writes for it now",
                )
            chosen = self._chooser(message, queue, selector)(route.publish_queues, None)
            address = route.master_address(chosen.broker_name)
            if address is None:
                raise ConnectError(chosen.broker_name, "the group has no master now")
            request = ready.command(self.group, chosen, wall_ms(), self._new_topic)
            await self._client.remoting.oneway(address, request)

        await self._observed([message], send)

    async def _observed(
        self, messages: Sequence[Message], send: Callable[[Sequence[Message]], Awaitable[R]]
    ) -> R:
        if self._watch is None:
            return await send(messages)
        call = SendCall(self.group, messages)
        with self._watch.sending(call) as entered:
            result = await send(call.messages if entered else messages)
            if result is not None:
                call.queue, call.msg_id = result.queue, result.msg_id
                call.acknowledged = result.acknowledged
            return result

    def _outgoing(self, message: Message, new_key: NewKey) -> Outgoing:
        return outgoing(
            message,
            new_key,
            compress_over_bytes=self.options.compress_over_bytes,
            size_max=self.options.message_size_max,
        )

    def _chooser(
        self, message: Message, queue: MessageQueue | None, selector: QueueSelector | None
    ) -> ChooseQueue:
        if queue is not None:
            fixed = queue
            return lambda queues, last_broker: fixed
        if selector is not None:
            select = selector

            def chosen(queues: Sequence[MessageQueue], last_broker: str | None) -> MessageQueue:
                queue = select(queues, message)
                check_queue(queue, message.topic, "the result of the selector")
                return queue

            return chosen
        picker = self._pickers.get(message.topic)
        if picker is None:
            # Begin at random, or all producers that start together would use the same queue.
            picker = self._pickers[message.topic] = QueuePicker(random.randrange(1024))
        return lambda queues, last_broker: picker.pick(queues, boot_ms(), last_broker=last_broker)

    async def _send(
        self, ready: Outgoing, choose: ChooseQueue, timeout_ms: int | None
    ) -> SendResult:
        self._check_running()
        now_ms = boot_ms()
        limit_ms = self._limit_ms(timeout_ms)
        sending = Sending(ready, choose, now_ms, now_ms + limit_ms, wall_ms())
        # Ends by a result or an error: `pause_ms` raises one at the deadline.
        while True:
            route = await self._route_for(sending)
            if route is not None:
                result = await self._try(sending, route)
                if result is not None:
                    return result
            pause = sending.pause_ms(boot_ms())
            if pause:
                await asyncio.sleep(pause / 1000)

    async def _route_for(self, sending: Sending) -> TopicRoute | None:
        """The route, fetched again after a failure. None: the failure is noted. Raises if it is
        final."""
        topic = sending.message.topic
        try:
            # After a hint the known route names the new master, maybe before any name server does.
            if not sending.attempts or sending.follow_hint:
                sending.follow_hint = False
                return await self._routes.get(topic, sending.deadline_ms)
            return await self._routes.refresh(topic, sending.deadline_ms, sending.suspects)
        except (NoRouteError, NoNameServerError) as error:
            if isinstance(error, NoRouteError) and not sending.attempts:
                raise  # no such topic; after a failed try its brokers may only be down
            sending.failed(None, "", NO_REPLY, str(error), boot_ms())
        return None

    async def _try(self, sending: Sending, route: TopicRoute) -> SendResult | None:
        """One try: returns the result, or None with the failure noted. Raises SendFailedError if it
        is final."""
        target = sending.target(route, boot_ms())
        if target is None:
            return None
        queue, address = target
        now_ms = boot_ms()
        left_ms = sending.deadline_ms - now_ms
        # The route may have taken all the time, and the first try has had no pause before it.
        if left_ms <= 0:
            raise sending.error(now_ms)
        topic = sending.message.topic
        request = sending.message.command(self.group, queue, sending.born_ms, self._new_topic)
        try:
            reply = await self._client.masters.invoke_once(
                topic, queue.broker_name, address, request, left_ms
            )
        except (ConnectError, RequestTimeoutError) as error:
            # Else a hint that names this address would win over each route that is fetched.
            self._client.routes.master_unreachable(address)
            self._failed(sending, queue, address, NO_REPLY, str(error))
            return None
        decision = RETRY_DECISIONS.get(reply.code, RetryDecision.FINAL)
        if decision is RetryDecision.STORED:
            return self._stored(sending, queue, address, reply)
        self._failed(sending, queue, address, reply.code, reply.remark or "")
        hinted = None
        if decision is RetryDecision.RETRY:
            hinted = self._client.routes.hinted_master(topic, queue.broker_name, reply)
            if MASTER_ADDRESS_HINT not in reply.ext:  # not master, without a hint to the new one
                self._client.routes.master_unreachable(address)
        other = hinted not in (None, address) and not self._routes.is_template(topic)
        sending.refused(decision, other_master=other, now_ms=boot_ms())
        return None

    def _stored(
        self, sending: Sending, queue: MessageQueue, address: str, reply: RemotingCommand
    ) -> SendResult:
        topic = sending.message.topic
        picker = self._pickers.get(topic)
        if picker is not None:
            picker.broker_answered(queue.broker_name)
        self._routes.stored(topic)  # perhaps the send created it
        ext = reply.ext
        return SendResult(
            status=STATUS_BY_CODE[reply.code],
            msg_id=sending.message.msg_id,
            offset_msg_id=ext.get("msgId", ""),
            queue=MessageQueue(topic, queue.broker_name, reply.get_int("queueId", queue.queue_id)),
            queue_offset=reply.get_int("queueOffset", -1),
            attempts=len(sending.attempts) + 1,
            address=address,
            recall_handle=ext.get("recallHandle", ""),
        )

    def _failed(
        self, sending: Sending, queue: MessageQueue, address: str, code: int, remark: str
    ) -> None:
        now_ms = boot_ms()
        sending.failed(queue, address, code, remark, now_ms)
        picker = self._pickers.get(sending.message.topic)
        if picker is not None:
            picker.broker_failed(queue.broker_name, now_ms)


def _new_ids(ip: str) -> UniqIdGenerator:
    host = host_bytes(ip, 0)[:-4]  # without the port
    return UniqIdGenerator(host, os.getpid(), wall_ms, instance_hash=random.getrandbits(31))
