"""Request-reply: messages that ask for a reply, and the replies that brokers push.

A request names its client (REPLY_TO_CLIENT) and itself (CORRELATION_ID). Its reply is a message of
`<cluster>_REPLY_TOPIC` that the broker pushes over the client's connection. So the broker must know
the client from a heartbeat before the request arrives. Origin: DefaultMQProducerImpl.request,
MessageUtil.createReplyMessage, RequestFutureHolder.
"""

import asyncio
import uuid

from batonmq.client.consumer.pulling import for_reader
from batonmq.client.errors import MessageIllegalError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol import properties as names
from batonmq.protocol.message import Message, MessageExt
from batonmq.protocol.properties import decode_properties
from batonmq.protocol.topic_name import reply_topic
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection

_REPLY = "reply"


def question(message: Message, client_id: str, timeout_ms: int) -> Message:
    """The message with the properties of a request, and its correlation id."""
    asks = {
        names.CORRELATION_ID: str(uuid.uuid4()),
        names.REPLY_TO_CLIENT: client_id,
        names.TTL: str(timeout_ms),
    }
    return Message(message.topic, message.body, message.flag, {**message.properties, **asks})


def answer(asked: MessageExt, body: bytes) -> Message:
    """The reply to a consumed message. Raises MessageIllegalError if that does not ask for one."""
    wanted = (names.CLUSTER, names.CORRELATION_ID, names.REPLY_TO_CLIENT)
    lacking = [name for name in wanted if not asked.properties.get(name)]
    if lacking:
        raise MessageIllegalError(
            f"message {asked.msg_id} of {asked.topic} asks for no answer: it lacks {lacking[0]}"
        )
    properties = {
        names.MSG_TYPE: _REPLY,
        names.CORRELATION_ID: asked.properties[names.CORRELATION_ID],
        names.REPLY_TO_CLIENT: asked.properties[names.REPLY_TO_CLIENT],
        names.TTL: asked.properties.get(names.TTL, "0"),
    }
    return Message(reply_topic(asked.properties[names.CLUSTER]), body, properties=properties)


def _pushed_answer(request: RemotingCommand, properties: dict[str, str]) -> MessageExt:
    """The reply in a push. It does not say where the reply is stored."""
    ext = request.ext

    def number(name: str) -> int:
        # A bad field must not keep the reply from its requester.
        text = ext.get(name, "")
        return int(text) if text.isdecimal() else 0

    message = MessageExt(
        topic=ext.get("topic", ""),
        queue_id=number("queueId"),
        queue_offset=-1,
        physical_offset=-1,
        store_size=0,
        msg_id="",
        body=request.body,
        body_crc=0,
        flag=number("flag"),
        sys_flag=number("sysFlag"),
        born_timestamp=number("bornTimestamp"),
        born_host=ext.get("bornHost", ""),
        store_timestamp=number("storeTimestamp"),
        store_host=ext.get("storeHost", ""),
        reconsume_times=number("reconsumeTimes"),
        prepared_transaction_offset=0,
        properties=properties,
    )
    for_reader(message, "")
    return message


class OpenRequests:
    """The requests of one producer that wait for replies, and the brokers that know the
    producer."""

    def __init__(self, client: ClientInstance) -> None:
        self._client = client
        self._waiting: dict[str, asyncio.Future[MessageExt]] = {}
        # Master -> the connection over which it got this client's heartbeat.
        self._announced: dict[str, Connection] = {}

    def wait_for(self, asked: Message) -> "asyncio.Future[MessageExt]":
        """Waits for the reply; call `forget` at the end."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[asked.properties[names.CORRELATION_ID]] = future
        return future

    def forget(self, asked: Message) -> None:
        self._waiting.pop(asked.properties[names.CORRELATION_ID], None)

    def answered(self, request: RemotingCommand) -> bool:
        """Takes a pushed reply; returns whether it is for one of these requests. Only the first one
        counts."""
        properties = decode_properties(request.ext.get("properties", ""))
        waiting = self._waiting.get(properties.get(names.CORRELATION_ID, ""))
        if waiting is None:
            return False
        # A later reply is taken as well: the replier must not send it again.
        if not waiting.done():
            waiting.set_result(_pushed_answer(request, properties))
        return True

    async def announce(self, route: TopicRoute) -> None:
        """Sends heartbeats to the topic's masters that do not know this client yet. Unreachable
        ones are skipped: when the send finds a new master, that one gets a heartbeat, too."""
        remoting = self._client.remoting
        news = [
            address
            for address in route.masters().values()
            if (known := remoting.live_connection(address)) is None
            or self._announced.get(address) is not known
        ]
        if not news:
            return
        await self._client.heartbeats.send(news)
        for address in news:
            connection = remoting.live_connection(address)
            if connection is not None:
                self._announced[address] = connection
