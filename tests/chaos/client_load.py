"""A load of keyed writes through the project's own client, as an application would make it."""

from __future__ import annotations

import time

from batonmq import ClientOptions
from batonmq.blocking import BlockingProducer
from batonmq.client.producer.sending import SendResult
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import Message, MessageQueue
from lab.cluster.writer import QueueAck, WriterThread

PAUSE_S = 0.005
"""At most 200 writes a second, so that the load leaves room for the cluster."""


class ClientWriter(WriterThread):
    """Sends the numbers 0, 1, 2, … into one queue with the key `k<number>`.

    `failures`: the sends that failed; the number of each is sent again.
    """

    def __init__(
        self,
        name_servers: str,
        topic: str,
        queue_id: int,
        broker_name: str,
        options: ClientOptions | None = None,
    ) -> None:
        super().__init__(topic, queue_id)
        self.failures: list[str] = []
        self._name_servers = name_servers
        self._options = options
        self._queue = MessageQueue(topic, broker_name, queue_id)

    def write(self) -> None:
        with BlockingProducer(
            "chaos", name_servers=self._name_servers, client_options=self._options
        ) as producer:
            while not self.stopping.wait(PAUSE_S):
                number = len(self.acks)
                message = Message.of(self.topic, self.body(number), keys=f"k{number}")
                try:
                    result: SendResult = producer.send(message, queue=self._queue)
                except BatonError as error:
                    self.failures.append(str(error))
                    continue
                if result.acknowledged:
                    offset = result.queue_offset
                    self.acks.append(QueueAck(number, self.queue_id, offset, time.monotonic()))
                else:
                    self.failures.append(result.status.name)
