"""Request-reply: a consumer's reply to a message that asked for one (SEND_REPLY_MESSAGE, 324;
SEND_REPLY_MESSAGE_V2, 325).

The reply is a message of `<cluster>_REPLY_TOPIC`. Its property REPLY_TO_CLIENT names the producer
that waits. This broker pushes it to that producer (PUSH_REPLY_MESSAGE_TO_CLIENT, 326) over the
connection that the producer has opened, and stores it (storeReplyMessageEnable). Success means that
the stored message is confirmed, as for every send (R1), and that the push arrived; if the requester
does not answer, the result is SYSTEM_ERROR, although the message is stored. Origin:
ReplyMessageProcessor in Java.
"""

from typing import Final, cast

from batonmq.broker.config import BrokerConfig
from batonmq.broker.consume.consumer_manager import ConsumerManager
from batonmq.broker.send.send_processor import SendProcessor
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError
from batonmq.protocol.properties import (
    MSG_REGION,
    PUSH_REPLY_TIME,
    REPLY_TO_CLIENT,
    TRACE_ON,
    decode_properties,
    encode_properties,
)
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.headers import SendFields, send_fields
from batonmq.runtime.clock import wall_ms

PUSH_MS: Final = 10_000
NOT_STORED: Final = {"msgId": "0", "queueOffset": "0"}


class ReplyProcessor:
    """Runs on masters; the relay passes on requests of other replicas."""

    def __init__(
        self, path: WritePath, send: SendProcessor, clients: ConsumerManager, config: BrokerConfig
    ) -> None:
        self._path = path
        self._send = send
        self._clients = clients
        self._config = config

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.SEND_REPLY_MESSAGE, self.reply)
        processors.register(RequestCode.SEND_REPLY_MESSAGE_V2, self.reply)

    async def reply(self, request: RemotingCommand, channel: Connection) -> RemotingCommand:
        """Fields as in a send, with long names (SEND_REPLY_MESSAGE, 324) or short ones
        (SEND_REPLY_MESSAGE_V2, 325)."""
        self._path.gate.require_open()
        fields = send_fields(request.code, request.ext)
        # Before the push: the requester must not get a reply that is refused.
        _, queue_id = self._send.place_of(fields)
        problem = await self._push(fields, request.body, channel)
        ext = NOT_STORED | {"queueId": str(queue_id)}
        if self._config.store_reply_message_enable:
            # Checked again: within the push a planned switch may begin, or the topic be deleted.
            stored, ext = self._send.put_for(fields, request.body, channel)
            await self._path.wait_confirmed(stored.end_offset, "the reply message")
        code = ResponseCode.SYSTEM_ERROR if problem else ResponseCode.SUCCESS
        return RemotingCommand.response_to(request, code, problem or None, ext)

    async def _push(self, fields: SendFields, body: bytes, channel: Connection) -> str:
        """Pushes the reply to the requester; returns what failed, or ""."""
        properties = decode_properties(fields.properties or "")
        client_id = properties.get(REPLY_TO_CLIENT)
        if not client_id:
            return f"reply message properties[{REPLY_TO_CLIENT}] is null"
        requester = self._clients.producer_channel(client_id)
        if requester is None:
            return f"push reply message fail, channel of <{client_id}> not found."
        now_ms = wall_ms()
        region = {MSG_REGION: self._config.region_id, TRACE_ON: "true"}
        pushed: dict[str, str | int | bool | None] = {
            "producerGroup": fields.producer_group,
            "topic": fields.topic,
            "defaultTopic": fields.default_topic,
            "defaultTopicQueueNums": fields.default_topic_queue_nums,
            "queueId": fields.queue_id,
            "sysFlag": fields.sys_flag,
            "bornTimestamp": fields.born_timestamp,
            "flag": fields.flag,
            "reconsumeTimes": fields.reconsume_times or 0,
            "unitMode": bool(fields.unit_mode),
            "bornHost": channel.peer,
            "storeHost": channel.local,
            "storeTimestamp": now_ms,
            "properties": encode_properties(properties | region | {PUSH_REPLY_TIME: str(now_ms)}),
        }
        push = RemotingCommand.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, pushed, body)
        try:
            answer = await cast(Connection, requester).invoke(push, PUSH_MS)
        except BatonError as error:
            return f"push reply message to {client_id} fail: {error}"
        if answer.code != ResponseCode.SUCCESS:
            return f"push reply message to {client_id} fail: {answer.code} {answer.remark}"
        return ""
