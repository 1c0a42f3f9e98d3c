"""Asks a producer for the state of a transaction: CHECK_TRANSACTION_STATE (39), broker to client.

The producers of a group are asked round robin. This broker learns of a producer by its heartbeats,
and by the half messages that it sends here, because after a failover a Java producer's next
heartbeat may be 30 s away. Origin: Java `AbstractTransactionalMessageCheckListener`,
`ProducerManager`.
"""

import logging
from collections.abc import Callable
from typing import Final, cast

from batonmq.broker.consume.consumer_manager import ConsumerManager
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.message_id import encode_offset_msg_id
from batonmq.protocol.records.codec import NewMessage, encode_record
from batonmq.protocol.topic_name import CLIENT_ID_LENGTH_MAX, TRANS_HALF_TOPIC
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection
from batonmq.store.appender import PutResult

log = logging.getLogger(__name__)

SENDERS_MAX: Final = 10_000
"""Groups of which the last sender is known: senders choose the names, and a name that no heartbeat
may have is not kept (R58)."""


class ProducerCheck:
    def __init__(self, clients: ConsumerManager, broker_name: str, store_host: bytes) -> None:
        self._clients = clients
        self._broker_name = broker_name
        self._store_host = store_host
        self._senders: dict[str, Connection] = {}
        #: Called with a group when a producer of it connects.
        self.came: Callable[[str], None] = lambda group: None
        self.may: Callable[[Connection, str], bool] = lambda channel, topic: True
        """Whether a client may see half messages of a topic. Any user can name any producer group
        in a heartbeat."""
        clients.producer_came = lambda group: self.came(group)

    def sent_half(self, group: str, channel: Connection) -> None:
        if len(group) > CLIENT_ID_LENGTH_MAX:
            return
        if group not in self._senders and len(self._senders) >= SENDERS_MAX:
            del self._senders[next(iter(self._senders))]
        # Not at each send: halves of the group that wait become due.
        is_new = self._senders.get(group) is not channel
        self._senders[group] = channel
        if is_new:
            self.came(group)

    def channel(self, group: str, topic: str) -> Connection | None:
        """The connection of a producer of the group that may write to the topic, if any."""
        heard = cast("Connection | None", self._clients.next_producer(group))
        known = (heard, self._senders.get(group))
        open_ones = (one for one in known if one is not None and not one.closed)
        return next((one for one in open_ones if self.may(one, topic)), None)

    def ask(
        self, channel: Connection, copy: NewMessage, put: PutResult, place: tuple[str, int]
    ) -> None:
        """Asks for the state of the half message `copy`, stored as `put`, whose real topic and
        queue are `place`. The producer answers with END_TRANSACTION (37)."""
        if channel.closed:
            return
        key = (copy.uniq_key or b"").decode("utf-8", "replace")
        # As it will be delivered: the listener sees its message, not the half.
        copy.topic, copy.queue_id = place
        record = encode_record(
            copy,
            place[0].encode(),
            put.queue_offset,
            put.physical_offset,
            put.store_timestamp,
            self._store_host,
            append_prop_crc=False,
        )
        ext = {
            "topic": TRANS_HALF_TOPIC,
            "tranStateTableOffset": str(put.queue_offset),
            "commitLogOffset": str(put.physical_offset),
            "msgId": key,
            "transactionId": key,
            "offsetMsgId": encode_offset_msg_id(self._store_host, put.physical_offset),
            "bname": self._broker_name,
        }
        channel.oneway(RemotingCommand.request(RequestCode.CHECK_TRANSACTION_STATE, ext, record))
