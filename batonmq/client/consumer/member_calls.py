"""An operator's requests that brokers pass on to a member of a consumer group: a reset, its
progress, its state, a message to consume at once.

Origin: ClientRemotingProcessor, MQClientInstance.resetOffset, DefaultMQPushConsumerImpl in Java.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batonmq.client.consumer.listener import ConsumeContext, ConsumeStatus, ListenerCall
from batonmq.client.consumer.member_stats import MemberStats
from batonmq.client.consumer.offset_store import OffsetStore
from batonmq.client.consumer.pulling import for_reader
from batonmq.client.consumer.queue_reader import QueueReader
from batonmq.protocol.bodies import (
    ConsumeMessageDirectlyResult,
    ConsumerData,
    GetConsumerStatusBody,
    ResetOffsetBody,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.json_body import encode_json, encode_queue_map
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.records.codec import decode_record
from batonmq.protocol.records.faults import CorruptRecord
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import boot_ms

_RESULTS = {ConsumeStatus.SUCCESS: "CR_SUCCESS", ConsumeStatus.RECONSUME_LATER: "CR_LATER"}


@dataclass(frozen=True, slots=True)
class MemberState:
    """The state that a consumer shows. `properties`: those of Java's ConsumerRunningInfo."""

    readers: Mapping[MessageQueue, QueueReader]
    offsets: OffsetStore
    listener: ListenerCall
    data: ConsumerData
    properties: Mapping[str, str]
    stats: MemberStats
    orderly: bool


async def answer(state: MemberState, request: RemotingCommand) -> RemotingCommand | None:
    """The member's answer, None for a request that needs none. Raises RemoteProtocolError for a
    body that cannot be read."""
    handlers: dict[int, Callable[..., Awaitable[RemotingCommand | None]]] = {
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET: _reset,
        RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: _status,
        RequestCode.GET_CONSUMER_RUNNING_INFO: _running_info,
        RequestCode.CONSUME_MESSAGE_DIRECTLY: _consume,
    }
    return await handlers[request.code](state, request)


async def _reset(state: MemberState, request: RemotingCommand) -> None:
    """RESET_CONSUMER_CLIENT_OFFSET (220): moves this member's queues to the given offsets."""
    # Queues of other members come too: the broker sends one table to all of them.
    for queue, offset in ResetOffsetBody.decode(request.body).offset_table.items():
        reader = state.readers.get(queue)
        if reader is not None:
            await reader.restart_at(offset)


async def _status(state: MemberState, request: RemotingCommand) -> RemotingCommand:
    """GET_CONSUMER_STATUS_FROM_CLIENT (221): this member's offsets in a topic."""
    topic = request.ext.get("topic", "")
    table = {
        queue: known
        for queue in state.readers
        if queue.topic == topic and (known := state.offsets.known(queue)) is not None
    }
    body = GetConsumerStatusBody(message_queue_table=table).encode()
    return RemotingCommand.response_to(request, body=body)


async def _running_info(state: MemberState, request: RemotingCommand) -> RemotingCommand:
    """GET_CONSUMER_RUNNING_INFO (307): Java's ConsumerRunningInfo, without jstack: coroutines have
    none."""
    queues = {queue: _queue_info(state, reader) for queue, reader in state.readers.items()}
    members = {
        "mqPopTable": b"{}",
        "mqTable": encode_queue_map(queues),
        "properties": encode_json(dict(state.properties)),
        "statusTable": encode_json(state.stats.shown(boot_ms())),
        "subscriptionSet": encode_json(state.data.subscription_data_set),
        "userConsumerInfo": b"{}",
    }
    body = b"{%b}" % b",".join(b'"%b":%b' % (k.encode(), v) for k, v in members.items())
    return RemotingCommand.response_to(request, body=body)


def _queue_info(state: MemberState, reader: QueueReader) -> dict[str, Any]:
    process_queue = reader.process_queue
    committed = state.offsets.known(reader.queue)
    return {
        "cachedMsgCount": len(process_queue),
        "cachedMsgMinOffset": process_queue.commit_offset if len(process_queue) else 0,
        "commitOffset": -1 if committed is None else committed,
        "droped": process_queue.dropped,
        "locked": state.orderly and process_queue.locked_until_ms > boot_ms(),
    }


async def _consume(state: MemberState, request: RemotingCommand) -> RemotingCommand:
    """CONSUME_MESSAGE_DIRECTLY (309): calls the listener once, and commits nothing."""
    broker_name = request.ext.get("brokerName", "")
    try:
        message = decode_record(request.body)
    except CorruptRecord as error:
        return RemotingCommand.response_to(
            request, ResponseCode.SYSTEM_ERROR, f"the message cannot be read: {error}"
        )
    for_reader(message, broker_name)
    began_ms = boot_ms()
    context = ConsumeContext(MessageQueue(message.topic, broker_name, message.queue_id))
    status = await state.listener([message], context)
    result = ConsumeMessageDirectlyResult(
        consume_result=_RESULTS[status], order=state.orderly, spent_time_mills=boot_ms() - began_ms
    )
    return RemotingCommand.response_to(request, body=result.encode())
