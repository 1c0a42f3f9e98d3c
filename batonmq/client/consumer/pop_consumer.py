"""A POP consumer: it receives messages, and acknowledges each one; the broker tracks them.

There is no rebalance and nothing to commit. A message that is not acknowledged within its invisible
time is delivered again to any member, with a higher `reconsume_times`; after the group's
`retryMaxTimes` it becomes a dead letter. An acknowledged message is not delivered again, even after
a failover. Origin: SimpleConsumer of RocketMQ's 5.x clients, PullAPIWrapper.popAsync.
"""

import contextlib
import itertools
from collections.abc import Sequence

from batonmq.client.arguments import check_number, check_received
from batonmq.client.consumer.options import HELD_CHECK_MS, ConsumeFromWhere, ConsumeType
from batonmq.client.consumer.pulling import ALL, for_reader, wanted_only
from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.consumer.subscriber import Receiver
from batonmq.client.errors import ClientError, NoMasterError, NoNameServerError, NoRouteError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.connections import ClientOptions
from batonmq.protocol.bodies import TAG, SubscriptionData
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import RemoteProtocolError, ResponseError
from batonmq.protocol.message import INFLATED_BODY_SIZE_MAX, MessageExt
from batonmq.protocol.pop import ANY_QUEUE, NORMAL, PopHandle, parse_offset_info
from batonmq.protocol.properties import POP_CK
from batonmq.protocol.records.codec import decode_records
from batonmq.protocol.records.faults import CorruptRecord
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import boot_ms, wall_ms

_ANSWER_MS = 1000
"""For the answer to arrive, after the time for which the broker may hold a POP."""
_TURN_MS = 1000
"""With several broker groups: how long to wait for one of them before asking the others again."""
_REACHED_MS = 3000
"""With several broker groups: how long to look for the master of one of them."""
_DOWN_MS = 5000
"""How long a broker group whose master was not reached is asked last."""


class PopConsumer(Receiver):
    """Methods raise NoMasterError, NoRouteError, NoNameServerError when a broker cannot be reached
    in time, ResponseError when it refuses. Several tasks may receive at once."""

    consume_type = ConsumeType.POP

    def __init__(
        self,
        group: str,
        *,
        name_servers: str | Sequence[str] | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
        from_where: ConsumeFromWhere = ConsumeFromWhere.FIRST,
    ) -> None:
        """`from_where`: where a new group begins (FIRST, or LAST: at the last message)."""
        super().__init__(group, name_servers, client, client_options, from_where)
        self._calls = QueueCalls(self._client)
        self._turns = itertools.count()
        self._down: dict[str, int] = {}
        """The broker groups whose master was not reached at the last try, and until when they are
        asked last."""

    async def subscribe(
        self, topic: str, expression: str = ALL, *, expression_type: str = TAG
    ) -> None:
        """`expression`: tags joined by `||`, or an SQL92 condition. Messages that do not match are
        skipped for the whole group. Call it after `start`. Raises ArgumentError for an invalid
        expression, ResponseError for a condition that a broker refuses."""
        self._check_running()
        self._subscribe(topic, expression, expression_type)
        route = await self._client.routes.get(topic)
        await self._calls.check_subscription(self.group, self._subscriptions[topic])
        await self._client.heartbeats.send(route.masters().values())

    async def receive(
        self,
        topic: str,
        *,
        max_messages: int = 32,
        invisible_ms: int = 60_000,
        timeout_ms: int = 15_000,
    ) -> list[MessageExt]:
        """Receives up to `max_messages` (at most 32) messages of a subscribed topic, in any order
        between queues; empty after the timeout. No other member gets them for `invisible_ms`. If
        compressed messages inflate to more than 128 MiB together, the rest comes again after
        `invisible_ms`. A broker group without a master raises NoMasterError only if the others
        have no message."""
        subscription = self._subscription(topic)
        check_number("max_messages", max_messages, 1)
        check_number("invisible_ms", invisible_ms, 1)
        check_number("timeout_ms", timeout_ms, 0)
        limits = {"maxMsgNums": str(max_messages), "invisibleTime": str(invisible_ms)}
        began_ms, deadline_ms = wall_ms(), boot_ms() + timeout_ms
        waits_ms = 0
        while True:
            names = await self._groups_of(topic, deadline_ms)
            turn = next(self._turns) % len(names)
            failure: NoMasterError | None = None
            # A group whose brokers are all down must not keep away what the others have.
            for name in sorted(names[turn:] + names[:turn], key=self._is_down):
                now_ms = boot_ms()
                if failure is not None and now_ms >= deadline_ms and self._is_down(name):
                    break
                until_ms = max(deadline_ms, now_ms)
                if len(names) > 1:
                    until_ms = min(until_ms, now_ms + waits_ms + _REACHED_MS)
                try:
                    wait_ms = min(waits_ms, max(deadline_ms - now_ms, 0))
                    messages = await self._pop(subscription, name, limits, wait_ms, until_ms)
                    self._down.pop(name, None)
                except NoMasterError as error:
                    messages, failure = [], error
                    self._down[name] = boot_ms() + _DOWN_MS
                if messages:
                    self._note_received(messages, began_ms)
                    return messages
                waits_ms = 0
            if boot_ms() >= deadline_ms:
                if failure is not None:
                    raise failure
                return []
            # The first round asks each broker without a wait: one of them may have messages. Then
            # only one is waited at, in turns, so that no broker is left out for long.
            waits_ms = timeout_ms if len(names) == 1 else _TURN_MS

    def _is_down(self, broker_name: str) -> bool:
        return boot_ms() < self._down.get(broker_name, 0)

    def _subscription(self, topic: str) -> SubscriptionData:
        self._check_running()
        subscription = self._subscriptions.get(topic)
        if subscription is None:
            raise ClientError(f"topic {topic} is not subscribed: call subscribe() first")
        return subscription

    async def _groups_of(self, topic: str, deadline_ms: int) -> list[str]:
        """The broker groups to receive from, ascending. Raises NoRouteError if none may be read."""
        route = await self._client.routes.get(topic, deadline_ms=deadline_ms)
        if len(route.masters()) < len(route.brokers):
            # Fetched during a failover. The next poll of routes may be 30 s away.
            with contextlib.suppress(NoNameServerError):
                route = await self._client.routes.refresh(topic, deadline_ms=deadline_ms)
        readable = {queue.broker_name for queue in route.subscribe_queues}
        if not readable:
            addresses = self._client.name_server_addresses
            raise NoRouteError(topic, addresses, "no broker lets it be read now")
        # Without any master the election is waited for.
        return sorted(readable & route.masters().keys() or readable)

    async def _pop(
        self,
        subscription: SubscriptionData,
        broker_name: str,
        fields: dict[str, str],
        poll_ms: int,
        deadline_ms: int,
    ) -> list[MessageExt]:
        ext = {
            "consumerGroup": self.group,
            "topic": subscription.topic,
            "queueId": str(ANY_QUEUE),
            "initMode": "1" if self._from_where is ConsumeFromWhere.LAST else "0",
            "expType": subscription.expression_type,
            "exp": subscription.sub_string,
            "order": "false",
            "bname": broker_name,
            **fields,
        }

        def command(left_ms: int) -> RemotingCommand:
            # The broker counts `pollTime` from `bornTime`, so each try has its own.
            times = {"pollTime": str(min(poll_ms, left_ms)), "bornTime": str(wall_ms())}
            return RemotingCommand.request(RequestCode.POP_MESSAGE, ext | times)

        reply, address = await self._client.masters.invoke(
            subscription.topic,
            broker_name,
            command,
            deadline_ms=deadline_ms + _ANSWER_MS,
            held_check_ms=HELD_CHECK_MS if poll_ms else None,
        )
        if reply.code == ResponseCode.POLLING_TIMEOUT:
            return []
        if reply.code != ResponseCode.SUCCESS:
            raise ResponseError(reply.code, reply.remark, address)
        messages = _with_handles(reply, subscription.topic, broker_name)
        wanted = list(wanted_only(messages, subscription))
        if len(wanted) < len(messages):
            # Acknowledged, or they come again after each invisible time, and end as dead letters.
            kept = {id(message) for message in wanted}
            for message in messages:
                if id(message) not in kept:
                    with contextlib.suppress(NoMasterError):  # it comes again, and then to this
                        await self.ack(message)
        return wanted

    async def ack(self, message: MessageExt, *, timeout_ms: int = 3000) -> None:
        """Acknowledges the message. After its invisible time this has no effect: it is delivered
        again."""
        handle = self._handle(message)
        await self._change(message, handle, RequestCode.ACK_MESSAGE, {}, timeout_ms)

    async def change_invisible_time(
        self, message: MessageExt, invisible_ms: int, *, timeout_ms: int = 3000
    ) -> None:
        """Makes the message visible again `invisible_ms` from now. Has no effect if it was
        acknowledged or its invisible time is over."""
        check_number("invisible_ms", invisible_ms, 1)
        handle = self._handle(message)
        fields = {"invisibleTime": str(invisible_ms)}
        code = RequestCode.CHANGE_MESSAGE_INVISIBLETIME
        reply = await self._change(message, handle, code, fields, timeout_ms)
        # The broker tracks this one message from now on, by its new times: an ack names them.
        renewed = handle._replace(
            start_offset=handle.queue_offset,
            pop_time=reply.require_int("popTime"),
            invisible_time=reply.require_int("invisibleTime"),
            revive_qid=reply.require_int("reviveQid"),
        )
        message.properties[POP_CK] = renewed.encode()

    def _handle(self, message: MessageExt) -> PopHandle:
        self._check_running()
        check_received("message", message)
        text = message.properties.get(POP_CK)
        if text is None:
            raise ClientError(f"message {message.msg_id} was not received by a PopConsumer")
        return PopHandle.decode(text)

    async def _change(
        self,
        message: MessageExt,
        handle: PopHandle,
        code: RequestCode,
        fields: dict[str, str],
        timeout_ms: int,
    ) -> RemotingCommand:
        ext = {
            "consumerGroup": self.group,
            "topic": message.topic,
            "queueId": str(handle.queue_id),
            "offset": str(handle.queue_offset),
            "extraInfo": handle.encode(),
            "bname": message.broker_name,
            **fields,
        }
        request, deadline_ms = RemotingCommand.request(code, ext), boot_ms() + timeout_ms
        return await self._client.masters.call(
            message.topic, message.broker_name, request, deadline_ms=deadline_ms
        )


def _with_handles(reply: RemotingCommand, topic: str, broker_name: str) -> list[MessageExt]:
    """The messages of a POP's reply, with handles. Retried messages contain their handle; for
    others it is made from the lists in the reply. Raises RemoteProtocolError."""
    ext = reply.ext
    starts = parse_offset_info(ext.get("startOffsetInfo", ""))
    try:
        messages = decode_records(reply.body)
        pop_time, invisible_ms = int(ext["popTime"]), int(ext["invisibleTime"])
        revive_qid = int(ext["reviveQid"])
    except (CorruptRecord, KeyError, ValueError) as error:
        raise RemoteProtocolError(f"the answer of a POP cannot be read: {error}") from error
    size = 0
    for count, message in enumerate(messages):
        # R58: each of 32 small messages may inflate to 128 MiB. The rest comes with a later POP.
        if size > INFLATED_BODY_SIZE_MAX:
            return messages[:count]
        if POP_CK not in message.properties:
            start = starts.get((NORMAL, message.queue_id), [message.queue_offset])[0]
            message.properties[POP_CK] = PopHandle(
                start,
                pop_time,
                invisible_ms,
                revive_qid,
                NORMAL,
                broker_name,
                message.queue_id,
                message.queue_offset,
            ).encode()
        for_reader(message, broker_name)
        size += len(message.body)
        message.topic = topic
    return messages
