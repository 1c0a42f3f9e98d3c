"""Acks of popped messages (ACK_MESSAGE, 200051; BATCH_ACK_MESSAGE, 200151), and changes of the
invisible time (CHANGE_MESSAGE_INVISIBLETIME, 200053).

The reply waits until the record of the ack is confirmed, so an acknowledged message does not come
again. For a message that is no longer in flight both succeed and change nothing. Java succeeds,
too, but with another invisible time it delivers a message again that was acknowledged. Origin:
AckMessageProcessor, ChangeInvisibleTimeProcessor in Java.
"""

import base64
import binascii
from collections.abc import Iterable
from typing import Final, NamedTuple

from batonmq.broker.consume.read_checks import check_queue
from batonmq.broker.pop.pop_request import invisible_time
from batonmq.broker.pop.pop_service import PopService
from batonmq.broker.pop.pop_table import Acked, Key, Popped, PopRecord, PutOff
from batonmq.broker.request_fields import invalid, number, text
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import BatchAckMessageRequestBody
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal, RemoteProtocolError
from batonmq.protocol.pop import FLAGS, PopHandle, real_topic
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors

ENTRIES_MAX: Final = 4096
BIT_SET_BYTES_MAX: Final = 4096
OFFSETS_MAX: Final = 4096
"""The most messages of one request, so that its turn of the loop stays short (R58)."""


class _Named(NamedTuple):
    """The message that a request names."""

    key: Key
    offset: int
    handle: PopHandle

    @property
    def acked(self) -> Acked:
        return Acked(key=self.key, pop_time=self.handle.pop_time, offsets=[self.offset])


class AckProcessor:
    """Runs on masters; the relay passes on requests of other replicas."""

    def __init__(self, path: WritePath, topics: TopicService, service: PopService) -> None:
        self._path = path
        self._store = path.store
        self._topics = topics
        self._service = service

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.ACK_MESSAGE, self.ack)
        processors.register(RequestCode.BATCH_ACK_MESSAGE, self.batch_ack)
        processors.register(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, self.change_time)

    def ack(self, request: RemotingCommand, connection: Connection) -> None:
        """Acknowledges one message (ACK_MESSAGE, 200051)."""
        self._service.require_master()
        named = self._named(request)
        maximum = self._store.queries.max_offset_in_queue(*named.key[1:])
        # As in Java, the queue's end offset is allowed, too.
        self._check_offset(named, maximum + 1)
        order = self._service.table.order_by_handle(named.key, named.handle.pop_time)
        if order is not None and named.offset not in order.offsets:
            raise BrokerRefusal(
                ResponseCode.MESSAGE_ILLEGAL,
                f"offset {named.offset} was not popped with this handle,"
                f" but {order.offsets[0]} to {order.offsets[-1]}",
            )
        self._settle([named.acked], request, connection)

    def batch_ack(self, request: RemotingCommand, connection: Connection) -> None:
        """Acknowledges many messages, given as bit sets (BATCH_ACK_MESSAGE, 200151)."""
        self._service.require_master()
        entries = BatchAckMessageRequestBody.decode_request(request.body).acks
        if not entries:
            raise BrokerRefusal(ResponseCode.NO_MESSAGE, "acks is empty: it names no message")
        if len(entries) > ENTRIES_MAX:
            raise invalid(f"{len(entries)} entries in acks, at most {ENTRIES_MAX} are allowed")
        acked, count = [], 0
        for entry in entries:
            if entry.retry not in FLAGS:
                raise invalid(f"acks: 'r' is {entry.retry[:32]!r}, allowed are 0, 1 and 2")
            topic = real_topic(entry.retry, entry.topic, entry.consumer_group)
            # It may have been deleted: what is not in flight is skipped, and the others count.
            key = entry.consumer_group, topic, entry.queue_id
            bits = _bits(entry.bit_set)
            count += bits.bit_count()
            if count > OFFSETS_MAX:
                raise invalid(f"acks: more than {OFFSETS_MAX} messages in one request")
            offsets = [entry.start_offset + bit for bit in _positions(bits)]
            acked.append(Acked(key=key, pop_time=entry.pop_time, offsets=offsets))
        self._settle(acked, request, connection)

    def change_time(self, request: RemotingCommand, connection: Connection) -> None:
        """Makes the message visible again after `invisibleTime` (CHANGE_MESSAGE_INVISIBLETIME,
        200053)."""
        self._service.require_master()
        named, time_ms = self._named(request), invisible_time(request, least_ms=0)
        self._check_offset(named, self._store.queries.max_offset_in_queue(*named.key[1:]))
        now_ms, pop_time = self._service.now_ms(), named.handle.pop_time
        if self._service.table.order_by_handle(named.key, pop_time) is not None:
            record = PopRecord(
                put_off=[
                    PutOff(
                        key=named.key,
                        pop_time=pop_time,
                        offset=named.offset,
                        visible=now_ms + time_ms,
                    )
                ]
            )
            answer = pop_time, now_ms + time_ms - pop_time
        else:
            # As a new pop: the old handle acknowledges nothing from now on.
            record = PopRecord(popped=[self._popped_again(named, now_ms, time_ms)])
            answer = now_ms, time_ms
        fields = {
            "popTime": str(answer[0]),
            "invisibleTime": str(answer[1]),
            "reviveQid": str(named.handle.revive_qid),
        }
        # The ack that has ended it may be unconfirmed: this reply must wait for it, too.
        end = self._store.appender.end
        if self._service.table.open_offsets(named.acked):
            end = self._service.put(record)
        self._path.answer_when_confirmed(end, request, connection, fields)

    def _popped_again(self, named: _Named, now_ms: int, time_ms: int) -> Popped:
        return Popped(
            key=named.key,
            pop_time=now_ms,
            due=now_ms + time_ms,
            offsets=[named.offset],
            last_phy=self._store.queries.phy_offset_of(*named.key[1:], named.offset),
        )

    def _named(self, request: RemotingCommand) -> _Named:
        """Raises BrokerRefusal."""
        group, topic = text(request, "consumerGroup"), text(request, "topic")
        queue_id, offset = number(request, "queueId"), number(request, "offset")
        try:
            handle = PopHandle.decode(text(request, "extraInfo"))
        except RemoteProtocolError as exc:
            raise invalid(f"extraInfo: {exc}") from exc
        topic = real_topic(handle.flag, topic, group)
        check_queue(self._topics.existing(topic), queue_id, ResponseCode.MESSAGE_ILLEGAL)
        return _Named((group, topic, queue_id), offset, handle)

    def _check_offset(self, named: _Named, end: int) -> None:
        """Raises BrokerRefusal NO_MESSAGE unless the offset is in [first of the queue, `end`)."""
        begin = self._store.queries.min_offset_in_queue(*named.key[1:])
        if not begin <= named.offset < end:
            raise BrokerRefusal(
                ResponseCode.NO_MESSAGE,
                f"offset {named.offset} of {named.key[1]} queue {named.key[2]}: it has"
                f" {begin} to {end - 1}",
            )

    def _settle(
        self, every: Iterable[Acked], request: RemotingCommand, connection: Connection
    ) -> None:
        service = self._service
        acked = [
            Acked(key=one.key, pop_time=one.pop_time, offsets=offsets)
            for one in every
            if (offsets := service.table.open_offsets(one))
        ]
        if not acked:
            # The earlier ack may be unconfirmed: this reply must wait for it, too.
            self._path.answer_when_confirmed(self._store.appender.end, request, connection)
            return
        # Before the record is put: it drops an order that it settles.
        orders = {
            one.key: order
            for one in acked
            if (order := service.table.order_by_handle(one.key, one.pop_time)) is not None
        }
        end = service.put(PopRecord(acked=acked))
        if orders:
            # An orderly group continues only after the first message that is not settled.
            service.when_confirmed(end, [(key, order.first_open) for key, order in orders.items()])
        for key, order in orders.items():
            if not order.open:
                service.read_again(key)
        self._path.answer_when_confirmed(end, request, connection)


def _bits(text: str) -> int:
    """The bits of a base64 bit set, lowest byte and bit first. Raises BrokerRefusal."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise invalid(f"acks: 'b' is {text[:32]!r}, base64 is needed: {exc}") from exc
    if len(data) > BIT_SET_BYTES_MAX:
        raise invalid(f"acks: 'b' has {len(data)} bytes, at most {BIT_SET_BYTES_MAX} are allowed")
    return int.from_bytes(data, "little")


def _positions(bits: int) -> list[int]:
    # Via a text of the bits: shifting a large int bit by bit would be quadratic.
    return [at for at, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"]
