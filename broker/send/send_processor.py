"""Send: one message (SEND_MESSAGE_V2, 310; SEND_MESSAGE, 10) or a batch (SEND_BATCH_MESSAGE, 320).
The hot path of the whole cluster.

A request is checked and put as a record into the store's turn buffer. Its finished reply waits in
`PendingAcks` until confirmOffset reaches the end of the record. Nothing else releases a success
(G1, R1, R4), not even WAIT=false (R29).

Origin: org.apache.rocketmq.broker.processor.SendMessageProcessor; the checks come in its order.
"""

import asyncio
import importlib
import os
import random
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Final

from batonmq.broker.config import BrokerSections
from batonmq.broker.relay import NOT_STORED, Relay, relayed_by
from batonmq.broker.request_fields import invalid, system_error
from batonmq.broker.role_gate import GateClosedError, Refusal
from batonmq.broker.send.send_back import dead_letter_properties
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.transaction.transaction_records import is_half, make_half
from batonmq.broker.write.put_hooks import (
    SendProperties,
    refuse_inner_batch,
    refuse_to_wait,
    require_space,
)
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.batch import split_batch
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, BrokerRefusal
from batonmq.protocol.message_id import RecallHandle, UniqIdGenerator, host_bytes, split_address
from batonmq.protocol.properties import find_property
from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.sysflag import UNIT_SUB_TOPIC, UNIT_TOPIC
from batonmq.protocol.topic_name import (
    RETRY_PREFIX,
    TIMER_TOPIC,
    check_send_allowed,
    check_topic,
    dlq_topic,
)
from batonmq.remoting.command import FLAG_ONEWAY
from batonmq.remoting.connection import Connection, Later, Processors
from batonmq.remoting.headers import (
    SendFields,
    SendFrame,
    SendReplies,
    decode_send,
    recode,
    refusal_of,
)
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.turns import in_turns
from batonmq.store.appender import BatchResult, PutResult

BATCH_AT_ONCE: Final = 128
"""Messages of a batch that are handled in one turn, about 6 µs each."""
_BATCH_CODE: Final = int(RequestCode.SEND_BATCH_MESSAGE)  # compared in each send
_COLUMNS: Final = "batonmq.protocol.records.columns"


async def _load_columns() -> None:
    """Imports what gives the records of a batch their places; in the loop that takes 0.1 s."""
    if _COLUMNS not in sys.modules:
        await asyncio.to_thread(importlib.import_module, _COLUMNS)


class SendProcessor:
    """`in_sync_count()`: the size of the required set, compared with minInSyncReplicas."""

    def __init__(
        self,
        config: BrokerSections,
        path: WritePath,
        topics: TopicService,
        in_sync_count: Callable[[], int],
        relay: Relay,
        half_comes: Callable[[str, Connection | None], None],
        when_known: Callable[[Callable[[], None]], None],
    ) -> None:
        """`half_comes` gets group and connection of each half message; it may refuse it.
        `when_known` calls back when name servers know all topics."""
        broker = config.broker
        self._half_comes = half_comes
        self._broker_name = broker.broker_name
        self._settings = broker
        self._path = path
        self._store = path.store
        self._hold = path.hold
        self._relay = relay
        self._gate = path.gate
        self._acks = path.acks
        self._flow = path.flow
        self._clock_ms = path.clock_ms
        self._topics = topics
        self._replies = SendReplies(broker.region_id)
        unique_ids = UniqIdGenerator(broker.store_host[:-4], os.getpid(), wall_ms)
        self._properties = SendProperties(broker.broker_cluster_name, broker.region_id, unique_ids)
        self._msg_id_prefix = broker.store_host.hex().upper().encode("ascii")
        self._min_in_sync = config.store.min_in_sync_replicas
        self._in_sync_count = in_sync_count
        self._queues: dict[str, int] = {}
        """Topic -> its number of queues: a look-up in the tables costs more."""
        self._when_known = when_known
        self._new_topics: set[str] = set()
        """Made by a send whose reply waits until name servers know them."""
        self._random = random.Random()
        self.stored_total = 0

    def register(self, processors: Processors) -> None:
        processors.register_send(RequestCode.SEND_MESSAGE_V2, self.send)
        # Raw: `guard` finds the topic of the two others by its one-letter name, without decoding.
        processors.register_raw(RequestCode.SEND_MESSAGE, self.send)
        processors.register_send(RequestCode.SEND_BATCH_MESSAGE, self.send)

    def topics_changed(self, topics: Collection[str] | None) -> None:
        """Drops the cached facts of these topics, or of all."""
        if topics is None:
            self._queues.clear()
            return
        for topic in topics:
            self._queues.pop(topic, None)
            self._new_topics.discard(topic)

    def send(
        self,
        channel: Connection,
        kind: int,
        header: bytes,
        body: bytes,
        request: SendFrame | None = None,
    ) -> Later:
        """One message, or a batch: consecutive queue offsets, all stored or none."""
        if self._hold.active and self._held(channel, kind, header, body):
            return None
        if request is None:
            request = decode_send(kind, header)
        try:
            if request.ext.batch or request.code == _BATCH_CODE:
                return self._batch(channel, request, kind, header, body)
            self._put_one(channel, request, body)
        except BatonError as exc:
            self._not_put(exc, request, channel, kind, header, body)
        return None

    def _batch(
        self, channel: Connection, request: SendFrame, kind: int, header: bytes, body: bytes
    ) -> Later:
        """Puts a small batch at once, so that sends of a connection stay in order. A large one is
        checked and encoded over several turns, then put in one (R58). Raises BatonError; later
        errors are answered here."""
        topic, queue_id = self._target(request.ext)
        messages = self._messages(channel, request.ext, topic, queue_id, body)
        first = list(islice(messages, BATCH_AT_ONCE))
        if len(first) < BATCH_AT_ONCE:
            result = BatchResult.of(self._store.appender.put_batch(first))
            unique_keys = [message.uniq_key for message in first]
            self._batch_put(channel, request, topic, queue_id, result, unique_keys)
            return None
        batch = self._store.appender.encoded_batch(topic, queue_id)

        async def later() -> None:
            try:
                async for message in in_turns(chain(first, messages), BATCH_AT_ONCE):
                    batch.add(message)
                await _load_columns()
                if channel.closed:
                    return
                # The role or the topic may have changed since.
                if self._hold.active and self._held(channel, kind, header, body):
                    return
                self._target(request.ext)
                result = self._store.appender.put_encoded(batch)
            except BatonError as exc:
                self._not_put(exc, request, channel, kind, header, body)
                return
            self._batch_put(channel, request, topic, queue_id, result, batch.uniq_keys)

        return later()

    def _held(self, channel: Connection, kind: int, header: bytes, body: bytes) -> bool:
        """Holds the send until the switch ends (R33), or refuses it if the hold is full."""
        if not self._hold.take(self.send, channel, kind, header, body):
            full = BrokerRefusal(
                ResponseCode.SERVICE_NOT_AVAILABLE,
                f"the master of this group is changing, and {len(self._hold)} sends wait already",
            )
            self._refuse(channel, decode_send(kind, header), full)
        return True

    def _not_put(
        self,
        exc: BatonError,
        request: SendFrame,
        channel: Connection,
        kind: int,
        header: bytes,
        body: bytes,
    ) -> None:
        """Relays the send to the master if only the gate refused it; else refuses it."""
        if not isinstance(exc, GateClosedError) or not self._relay.take_raw(
            channel, self.send, kind, header, body
        ):
            self._refuse(channel, request, exc)

    def _put_one(self, channel: Connection, request: SendFrame, body: bytes) -> None:
        ext = request.ext
        topic, queue_id = self._target(ext)
        message = self._message(ext, topic, queue_id, body, channel)
        if b"TRAN_MSG\x01" in message.properties and is_half(message):
            result = self._put_half(message, channel, ext)
        else:
            result = self._path.put_message(message)
        if not request.flag & FLAG_ONEWAY:
            reply = self._replies.ok(
                request.opaque,
                self._msg_id(result),
                queue_id,
                result.queue_offset,
                message.uniq_key or b"",
                self._recall_handle(topic, message) if message.topic == TIMER_TOPIC else b"",
            )
            self._wait(topic, result.end_offset, channel, reply)
        self.stored_total += 1
        self._path.schedule_flush()

    def _message(
        self, ext: SendFields, topic: str, queue_id: int, body: bytes, channel: Connection
    ) -> NewMessage:
        if not body:
            raise BrokerRefusal(ResponseCode.MESSAGE_ILLEGAL, "the message has no body")
        given = ext.properties or ""
        if topic != ext.topic:
            given = dead_letter_properties(given)
        properties, tags, keys, unique_key = self._properties.prepare(given)
        require_space(properties)
        refuse_inner_batch(properties, ext.sys_flag)
        born_host = channel.attachments.get("born_host")
        if born_host is None or ext.relayed is not None:
            born_host = self._born_host(channel, ext)
        return NewMessage(
            topic,
            queue_id,
            body,
            properties,
            tags,
            keys,
            unique_key,
            ext.born_timestamp,
            born_host,  # type: ignore[arg-type]
            ext.flag,
            ext.sys_flag,
            ext.reconsume_times or 0,
        )

    def place_of(self, ext: SendFields) -> tuple[str, int]:
        """Topic and queue of a send that another processor will store. Raises BrokerRefusal."""
        self._hold.require_inactive()
        return self._target(ext)

    def put_for(
        self, ext: SendFields, body: bytes, channel: Connection
    ) -> tuple[PutResult, dict[str, str]]:
        """Puts a message; returns also the fields of the reply. Raises BrokerRefusal."""
        topic, queue_id = self.place_of(ext)
        result = self._path.put_message(self._message(ext, topic, queue_id, body, channel))
        self.stored_total += 1
        self._path.schedule_flush()
        fields = {
            "msgId": self._msg_id(result).decode("ascii"),
            "queueId": str(queue_id),
            "queueOffset": str(result.queue_offset),
        }
        return result, fields

    def _msg_id(self, result: PutResult) -> bytes:
        return self._msg_id_prefix + b"%016X" % result.physical_offset

    def _msg_ids(self, physical_offsets: Sequence[int]) -> bytes:
        """Of a batch, with commas; in C, for there may be 20,000 (R58)."""
        offsets = struct.pack(f">{len(physical_offsets)}Q", *physical_offsets).hex(",", 8).upper()
        prefix = self._msg_id_prefix.decode("ascii")
        return f"{prefix}{offsets.replace(',', f',{prefix}')}".encode("ascii")

    def _recall_handle(self, topic: str, message: NewMessage) -> bytes:
        """The handle by which a producer can recall this timer message; empty for retries."""
        if topic.startswith(RETRY_PREFIX):
            return b""
        # Its unit in the timers' queue carries the due time, negative if it is a recall itself.
        # Plus 1 as in Java, whose timers round down.
        time_ms = abs(message.tags_code) + 1
        key = find_property(message.properties, b"UNIQ_KEY") or b""
        return RecallHandle(topic, self._broker_name, time_ms, key.decode()).encode().encode()

    def _put_half(self, message: NewMessage, channel: Connection, ext: SendFields) -> PutResult:
        """Puts a message of a transaction into the half topic."""
        if self._settings.reject_transaction_message:
            raise BrokerRefusal(
                ResponseCode.NO_PERMISSION,
                "this broker takes no transactions (rejectTransactionMessage)",
            )
        make_half(message)
        # Checked again, since `make_half` has added properties.
        require_space(message.properties)
        # A relayed send came over the connection of another replica, not of its producer.
        self._half_comes(ext.producer_group, channel if ext.relayed is None else None)
        result = self._store.appender.put_message(message)
        self._path.stats.put(message.topic, 1, result.size)
        return result

    def _messages(
        self, channel: Connection, ext: SendFields, topic: str, queue_id: int, body: bytes
    ) -> Iterator[NewMessage]:
        """The messages of a batch, each checked. Raises BrokerRefusal for a bad one."""
        if topic.startswith(RETRY_PREFIX):
            raise BrokerRefusal(ResponseCode.MESSAGE_ILLEGAL, "a batch may not hold retries")
        born_host = self._born_host(channel, ext)
        for item in split_batch(body):
            properties, tags, keys, unique_key = self._properties.prepare(
                item.properties.decode("utf-8")
            )
            require_space(properties)
            refuse_to_wait(properties)
            refuse_inner_batch(properties, ext.sys_flag)
            yield NewMessage(
                topic,
                queue_id,
                item.body,
                properties,
                tags,
                keys,
                unique_key,
                ext.born_timestamp,
                born_host,
                item.flag,
                ext.sys_flag,
                ext.reconsume_times or 0,
            )

    def _batch_put(
        self,
        channel: Connection,
        request: SendFrame,
        topic: str,
        queue_id: int,
        result: BatchResult,
        unique_keys: Sequence[bytes | None],
    ) -> None:
        """The batch is put: holds its reply until it is confirmed."""
        count = len(result.physical_offsets)
        self._path.stats.put(topic, count, result.size)
        if not request.flag & FLAG_ONEWAY:
            reply = self._replies.ok(
                request.opaque,
                self._msg_ids(result.physical_offsets),
                queue_id,
                result.queue_offset,
                b",".join(filter(None, unique_keys)),
            )
            self._wait(topic, result.end_offset, channel, reply)
        self.stored_total += count
        self._path.schedule_flush()

    def _wait(self, topic: str, end_offset: int, channel: Connection, reply: bytes) -> None:
        """Holds the reply until all below `end_offset` is confirmed. If the send created its topic,
        also until name servers know the topic, because the client may ask them at once."""
        if topic not in self._new_topics:
            self._acks.add(end_offset, self._clock_ms(), channel, reply)
            return

        def known() -> None:
            self._new_topics.discard(topic)
            if self._gate.is_master and self._acks.master_epoch == epoch:
                # Through `acks` again: this process may have been stopped since, and acks must wait
                # (R8).
                self._acks.add(end_offset, self._clock_ms(), channel, reply)
                self._path.confirmed(end_offset)
            else:
                channel.write(reply)

        epoch = self._acks.master_epoch

        def outcome(code: int, remark: str) -> None:
            if code != ResponseCode.SUCCESS:
                channel.write(recode(reply, code, remark))
            elif topic in self._new_topics:
                self._when_known(known)
            else:
                channel.write(reply)

        self._acks.add_waiter(end_offset, self._clock_ms(), outcome)

    def _target(self, ext: SendFields) -> tuple[str, int]:
        """Topic and queue of the message. Raises BrokerRefusal if it may not be stored."""
        if self._gate.refusal is not None:
            raise GateClosedError(self._gate.refusal)
        self._flow.check(len(self._acks), self._clock_ms())
        if self._min_in_sync > 1 and self._in_sync_count() < self._min_in_sync:
            raise system_error(
                f"in-sync replicas not enough: {self._in_sync_count()},"
                f" minInSyncReplicas is {self._min_in_sync}"
            )
        topic = ext.topic
        queues = self._queues.get(topic)
        # Retries are looked up each time: after too many they become dead letters.
        if queues is None or topic[0] == "%":
            topic, queues = self._look_up(ext)
        queue_id = ext.queue_id
        if queue_id < 0:
            queue_id = self._random.randrange(queues)
        elif queue_id >= queues:
            if topic != ext.topic:
                # Now a dead letter: the client chose among the queues of the retry topic.
                queue_id = 0
            else:
                raise invalid(f"queueId {queue_id} of topic {topic}: it has {queues} queues")
        return topic, queue_id

    def _look_up(self, ext: SendFields) -> tuple[str, int]:
        topic = ext.topic
        if topic.startswith(RETRY_PREFIX):
            topic = self._retry_target(ext)
        check_topic(topic)
        check_send_allowed(topic)
        made = self._topics.get(topic) is None
        # Of clients in unit mode; tools list such topics.
        unit = UNIT_SUB_TOPIC if topic.startswith(RETRY_PREFIX) else UNIT_TOPIC
        config = self._topics.for_send(
            topic, ext.default_topic, ext.default_topic_queue_nums, unit if ext.unit_mode else 0
        )
        if made and topic[0] != "%":
            self._new_topics.add(topic)
        # As in Java, a send may name a queue that is read only.
        queues = max(config.read_queue_nums, config.write_queue_nums)
        self._queues[topic] = queues
        return topic, queues

    def _retry_target(self, ext: SendFields) -> str:
        """The dead-letter topic for a retry that was consumed too often, and for every retry of an
        orderly group: its clients send one only when they give a message up."""
        group = ext.topic[len(RETRY_PREFIX) :].partition("+")[0]
        config = self._topics.group(group, writable=True)
        allowed = ext.max_reconsume_times
        if allowed is None:
            allowed = config.retry_max_times
        if (ext.reconsume_times or 0) <= allowed and not self._topics.locks.has_locks(
            group, self._clock_ms()
        ):
            return ext.topic
        self._topics.of_group(dlq_topic(group), 1)
        return dlq_topic(group)

    def _born_host(self, channel: Connection, ext: SendFields) -> bytes:
        """The client's address as records store it; a relayed send names its client."""
        if ext.relayed is not None:
            epoch, client = relayed_by(ext.relayed)
            if epoch > self._gate.master_epoch:
                ended = f"the mastership of epoch {self._gate.master_epoch} has ended"
                raise GateClosedError(Refusal(ResponseCode.SERVICE_NOT_AVAILABLE, ended))
            return host_bytes(*split_address(client))
        # Parsed once for a connection, not for each send.
        host = channel.attachments.get("born_host")
        if host is None:
            host = channel.attachments["born_host"] = host_bytes(*split_address(channel.peer))
        return host  # type: ignore[return-value]

    def _refuse(self, channel: Connection, request: SendFrame, exc: BatonError) -> None:
        if request.flag & FLAG_ONEWAY:
            return
        fields: Mapping[str, str] = {}
        if isinstance(exc, GateClosedError):
            # NOT_STORED lets the relaying replica send it again.
            fields = exc.refusal.hint if request.ext.relayed is None else NOT_STORED
        channel.write(refusal_of(request.opaque, exc, fields))
