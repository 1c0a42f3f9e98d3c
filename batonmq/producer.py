"""Sending messages.

A send has one deadline. Inside it a failover is bridged: a reply that says "not the master", a lost
connection or a silent master makes the producer fetch the route from all name servers in turn and
try again after a few milliseconds; a refusal that names the new master saves both. What was tried
and not answered may have been stored, so a bridged send can be stored twice; readers that mind
compare the unique key (`SendResult.msg_id`).
Origin: DefaultMQProducerImpl.
"""

import asyncio
import os
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from batonmq.client_instance import ClientInstance, ClientMember, ClientOptions
from batonmq.clock import boot_ms, wall_ms
from batonmq.errors import (
    ClientClosedError,
    MessageIllegalError,
    NoNameServerError,
    NoRouteError,
    SendAttempt,
    SendFailedError,
)
from batonmq.lifecycle import Startable
from batonmq.outgoing import (
    COMPRESS_OVER_BYTES,
    MESSAGE_SIZE_MAX,
    Outgoing,
    outgoing,
    outgoing_batch,
)
from batonmq.queue_choice import QueuePicker
from batonmq.retry import ADVICE_BY_CODE, ELSEWHERE_TRIES, Verdict, judge_send_reply, pause_ms
from batonmq.route import TopicRoute
from batonmq.send_result import STATUS_BY_CODE, SendResult
from protocol.codes import MASTER_ADDRESS_HINT, RequestCode
from protocol.errors import ConnectError, RequestTimeoutError
from protocol.message import Message, MessageQueue
from protocol.message_id import UniqIdGenerator, host_bytes
from protocol.topic_name import AUTO_CREATE_TOPIC, group_problem
from remoting.command import RemotingCommand

QueueSelector = Callable[[Sequence[MessageQueue], Message], MessageQueue]
"""Given the topic's publish queues (ascending) and the message, the queue to send it to."""

_NO_REPLY = -1
SENT_ON_MAX = 4
"""How often one send follows a hint without a pause: two that name each other must not spin."""


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """`default_topic_queue_nums`: queues per broker of a topic that the first send creates."""

    send_timeout_ms: int = 3_000
    compress_over_bytes: int = COMPRESS_OVER_BYTES
    message_size_max: int = MESSAGE_SIZE_MAX
    default_topic: str = AUTO_CREATE_TOPIC
    default_topic_queue_nums: int = 4


@dataclass(slots=True)
class _Sending:
    """One send under way: what is fixed, and what its failed tries have taught."""

    message: Outgoing
    choose: Callable[[Sequence[MessageQueue], str | None], MessageQueue]
    started_ms: int
    deadline_ms: int
    born_ms: int
    attempts: list[SendAttempt] = field(default_factory=list)
    suspects: set[str] = field(default_factory=set)
    last_broker: str | None = None
    elsewhere: int = 0
    sent_on: int = 0
    follow_hint: bool = False
    """The last refusal named another master: go there at once."""

    def failed(self, queue: MessageQueue | None, address: str, code: int, remark: str) -> None:
        name = queue.broker_name if queue is not None else "-"
        self.last_broker = name if queue is not None else self.last_broker
        if address:
            self.suspects.add(address)
        self.attempts.append(
            SendAttempt(name, address or "-", boot_ms() - self.started_ms, code, remark)
        )

    def error(self) -> SendFailedError:
        code = self.attempts[-1].code if self.attempts else _NO_REPLY
        advice = ADVICE_BY_CODE.get(code, "see `mqctl health`")
        return SendFailedError(
            self.message.topic, self.attempts, boot_ms() - self.started_ms, advice=advice
        )


class Producer(Startable, ClientMember):
    """`async with Producer("group", name_servers="host:9876") as producer: ...`

    All methods may be called concurrently from tasks of the loop that started it.
    """

    def __init__(
        self,
        group: str,
        *,
        name_servers: str | Sequence[str] | None = None,
        options: ProducerOptions | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        """`client`: an instance to share; the producer then neither starts nor closes it.
        Raises MessageIllegalError for a bad group name, NoNameServerError without addresses."""
        problem = group_problem(group)
        if problem is not None:
            raise MessageIllegalError(problem)
        self.group = group
        self.options = options or ProducerOptions()
        self._own_client = client is None
        self._client = client or ClientInstance(name_servers, client_options)
        self._pickers: dict[str, QueuePicker] = {}
        self._templates: dict[str, TopicRoute] = {}
        self._greeted: dict[str, TopicRoute] = {}
        self._running = False
        ip = host_bytes(self._client.ip, 0)[:-4]
        self._ids = UniqIdGenerator(ip, os.getpid(), wall_ms, instance_hash=random.getrandbits(31))

    # -- life ---------------------------------------------------------------------------------

    @property
    def client(self) -> ClientInstance:
        return self._client

    async def start(self) -> None:
        if self._running:
            return
        if self._own_client:
            await self._client.start()
        self._client.add_member(self)
        self._running = True

    async def close(self) -> None:
        if not self._running:
            return
        self._running = False
        await self._client.remove_member(self)
        if self._own_client:
            await self._client.close()

    # -- what the client instance asks --------------------------------------------------------

    def producer_group(self) -> str | None:
        return self.group

    def topics(self) -> Collection[str]:
        return self._pickers.keys() - self._templates.keys()

    def route_changed(self, route: TopicRoute, moved: frozenset[str]) -> None:
        self._templates.pop(route.topic, None)
        for picker in self._pickers.values():
            for broker_name in moved:
                picker.broker_answered(broker_name)

    # -- sending ------------------------------------------------------------------------------

    async def publish_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The topic's queues that can be written now, ascending. Raises NoRouteError."""
        deadline_ms = boot_ms() + self.options.send_timeout_ms
        return (await self._route(topic, deadline_ms)).publish_queues

    async def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
        unique_key: str | None = None,
    ) -> SendResult:
        """Sends one message and waits for the acknowledgement.

        The queue is chosen round robin, unless `queue` or `selector` names it. `unique_key`: the
        caller's own id of the message, the same if it is sent again; else it gets a fresh one.
        A result whose `acknowledged` is false was stored but not confirmed by every replica that
        counts.
        Raises MessageIllegalError, NoRouteError, NoNameServerError, SendFailedError; after a
        SendFailedError without a final reply the message may still be stored.
        """
        ready = outgoing(
            message,
            self._ids.next if unique_key is None else lambda: unique_key,
            compress_over_bytes=self.options.compress_over_bytes,
            size_max=self.options.message_size_max,
        )
        return await self._send(ready, self._chooser(message, queue, selector), timeout_ms)

    async def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
        unique_keys: Sequence[str] | None = None,
    ) -> SendResult:
        """Sends messages of one topic in one request; they get consecutive queue offsets.

        All are stored or none. `msg_id` and `offset_msg_id` of the result are comma lists.
        `unique_keys`: the caller's own ids, one per message. Errors as `send`.
        """
        keys = None if unique_keys is None else iter((*unique_keys, self._ids.next()))
        ready = outgoing_batch(
            messages,
            self._ids.next if keys is None else keys.__next__,
            size_max=self.options.message_size_max,
        )
        return await self._send(ready, self._chooser(messages[0], queue, None), timeout_ms)

    async def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
    ) -> None:
        """Sends without waiting or knowing: nothing is promised, nothing is tried again.

        Raises MessageIllegalError, NoRouteError, NoNameServerError, ConnectError.
        """
        self._check_running()
        ready = outgoing(
            message,
            self._ids.next,
            compress_over_bytes=self.options.compress_over_bytes,
            size_max=self.options.message_size_max,
        )
        deadline_ms = boot_ms() + self.options.send_timeout_ms
        route = await self._route(ready.topic, deadline_ms)
        if not route.publish_queues:
            raise NoRouteError(
                ready.topic, self._client.name_server_addresses, "no broker takes writes for it now"
            )
        chosen = self._chooser(message, queue, selector)(route.publish_queues, None)
        address = route.master_address(chosen.broker_name)
        if address is None:
            raise ConnectError(chosen.broker_name, "the group has no master now")
        await self._client.remoting.oneway(address, self._request(ready, chosen, wall_ms()))

    def _chooser(
        self, message: Message, queue: MessageQueue | None, selector: QueueSelector | None
    ) -> Callable[[Sequence[MessageQueue], str | None], MessageQueue]:
        if queue is not None:
            fixed = queue
            return lambda queues, last_broker: fixed
        if selector is not None:
            select = selector
            return lambda queues, last_broker: select(queues, message)
        picker = self._pickers.get(message.topic)
        if picker is None:
            picker = self._pickers[message.topic] = QueuePicker(random.randrange(1024))
        return lambda queues, last_broker: picker.pick(queues, boot_ms(), last_broker=last_broker)

    async def _send(
        self,
        ready: Outgoing,
        choose: Callable[[Sequence[MessageQueue], str | None], MessageQueue],
        timeout_ms: int | None,
    ) -> SendResult:
        self._check_running()
        now_ms = boot_ms()
        limit_ms = self.options.send_timeout_ms if timeout_ms is None else timeout_ms
        sending = _Sending(ready, choose, now_ms, now_ms + limit_ms, wall_ms())
        while True:
            result = await self._try(sending)
            if result is not None:
                return result
            await self._before_next_try(sending)

    async def _try(self, sending: _Sending) -> SendResult | None:
        """One attempt: the result, or None with the failure noted. Raises what is final."""
        route = await self._route_for(sending)
        if route is None:
            return None
        topic = sending.message.topic
        if not route.publish_queues:
            why = "no broker group of the topic has a master"
            if route.masters():
                why = "its masters take no writes of the topic: its perm, see `mqctl topicRoute`"
            sending.failed(None, "", _NO_REPLY, why)
            return None
        queue = sending.choose(route.publish_queues, sending.last_broker)
        address = route.master_address(queue.broker_name)
        if address is None:
            sending.failed(queue, "", _NO_REPLY, "the group has no master")
            return None
        left_ms = sending.deadline_ms - boot_ms()
        if left_ms <= 0:
            raise sending.error()
        request = self._request(sending.message, queue, sending.born_ms)
        try:
            reply = await self._client.invoke_master(
                topic, queue.broker_name, address, request, left_ms
            )
        except (ConnectError, RequestTimeoutError) as error:
            self._client.master_unreachable(address)
            self._note_failure(sending, queue, address, _NO_REPLY, str(error))
            return None
        verdict = judge_send_reply(reply.code)
        if verdict is Verdict.STORED:
            return self._stored(sending, queue, address, reply)
        self._note_failure(sending, queue, address, reply.code, reply.remark or "")
        if verdict is Verdict.RETRY:
            named = self._client.hinted_master(queue.broker_name, reply)
            if MASTER_ADDRESS_HINT not in reply.ext:  # it leads no more, and does not know who does
                self._client.master_unreachable(address)
            if named not in (None, address) and sending.sent_on < SENT_ON_MAX:
                sending.sent_on += 1
                sending.follow_hint = topic not in self._templates
        if verdict is Verdict.ELSEWHERE:
            sending.elsewhere += 1
        if verdict is Verdict.FINAL or sending.elsewhere >= ELSEWHERE_TRIES:
            raise sending.error()
        return None

    async def _route_for(self, sending: _Sending) -> TopicRoute | None:
        """The route, fetched anew after a failure. None: noted as failed; raises if final."""
        topic = sending.message.topic
        try:
            if not sending.attempts or sending.follow_hint:
                sending.follow_hint = False
                return await self._route(topic, sending.deadline_ms)
            return await self._client.refresh_route(
                topic, deadline_ms=sending.deadline_ms, suspects=sending.suspects
            )
        except NoRouteError as error:
            if not sending.attempts:
                raise
            template = self._templates.get(topic)
            if template is not None:
                return await self._renewed_template(topic, sending, template)
            sending.failed(None, "", _NO_REPLY, str(error))
        except NoNameServerError as error:
            cached = self._client.cached_route(topic)
            if cached is not None and sending.attempts:
                return cached
            sending.failed(None, "", _NO_REPLY, str(error))
        return None

    async def _renewed_template(
        self, topic: str, sending: _Sending, template: TopicRoute
    ) -> TopicRoute:
        """A topic not created yet: the template's route shows the new master instead."""
        del self._templates[topic]
        try:
            return await self._route(topic, sending.deadline_ms)
        except (NoRouteError, NoNameServerError):
            self._templates[topic] = template
            return template

    async def _route(self, topic: str, deadline_ms: int) -> TopicRoute:
        """The known route; of an unknown topic the one that the first send makes true."""
        template = self._templates.get(topic)
        if template is not None:
            return template
        route = await self._client.route_or_template(
            topic,
            self.options.default_topic,
            self.options.default_topic_queue_nums,
            deadline_ms=deadline_ms,
        )
        if self._client.cached_route(topic) is None:
            self._templates[topic] = route
        if self._greeted.get(topic) is not route:
            self._greeted[topic] = route
            self._client.spawn(self._client.send_heartbeats(route.masters().values()))
        return route

    def _stored(
        self, sending: _Sending, queue: MessageQueue, address: str, reply: RemotingCommand
    ) -> SendResult:
        topic = sending.message.topic
        picker = self._pickers.get(topic)
        if picker is not None:
            picker.broker_answered(queue.broker_name)
        if topic in self._templates:
            self._client.spawn(self._learn_created(topic))
        ext = reply.ext
        return SendResult(
            status=STATUS_BY_CODE[reply.code],
            msg_id=sending.message.msg_id,
            offset_msg_id=ext.get("msgId", ""),
            queue=MessageQueue(topic, queue.broker_name, int(ext.get("queueId", queue.queue_id))),
            queue_offset=int(ext.get("queueOffset", -1)),
            attempts=len(sending.attempts) + 1,
            address=address,
        )

    async def _learn_created(self, topic: str) -> None:
        """Fetches the route of a topic that the first send just created."""
        try:
            await self._client.refresh_route(topic)
        except (NoRouteError, NoNameServerError):
            return  # not registered yet; the next send comes by here again
        self._templates.pop(topic, None)

    def _note_failure(
        self, sending: _Sending, queue: MessageQueue, address: str, code: int, remark: str
    ) -> None:
        sending.failed(queue, address, code, remark)
        picker = self._pickers.get(sending.message.topic)
        if picker is not None:
            picker.broker_failed(queue.broker_name, boot_ms())

    async def _before_next_try(self, sending: _Sending) -> None:
        """Pauses. Raises SendFailedError if the deadline would come first."""
        if sending.follow_hint:
            return
        pause = pause_ms(len(sending.attempts))
        if boot_ms() + pause >= sending.deadline_ms:
            raise sending.error()
        await asyncio.sleep(pause / 1000)

    def _request(self, ready: Outgoing, queue: MessageQueue, born_ms: int) -> RemotingCommand:
        ext = {
            "a": self.group,
            "b": ready.topic,
            "c": self.options.default_topic,
            "d": str(self.options.default_topic_queue_nums),
            "e": str(queue.queue_id),
            "f": str(ready.sys_flag),
            "g": str(born_ms),
            "h": str(ready.flag),
            "i": ready.properties,
            "j": "0",
            "k": "false",
            "m": "true" if ready.batch else "false",
            "n": queue.broker_name,
        }
        code = RequestCode.SEND_BATCH_MESSAGE if ready.batch else RequestCode.SEND_MESSAGE_V2
        return RemotingCommand.request(code, ext, ready.body)

    def _check_running(self) -> None:
        if not self._running:
            raise ClientClosedError(f"producer {self.group}")
