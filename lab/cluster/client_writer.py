"""A thread of numbered writes through the project's own client, as an application makes them."""

import asyncio
import time

from batonmq import BatonError, ClientOptions, Message, MessageQueue, Producer
from lab.cluster.frames import BROKER_NAME
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
        queue_id: int = 0,
        options: ClientOptions | None = None,
        *,
        timeout_ms: int | None = None,
    ) -> None:
        """`timeout_ms`: of one send, with all its tries."""
        super().__init__(topic, queue_id)
        self.failures: list[str] = []
        self._name_servers = name_servers
        self._options = options
        self._timeout_ms = timeout_ms

    def write(self) -> None:
        # A loop of its own: its thread may be in another network or mount namespace.
        asyncio.run(self._send())

    async def _send(self) -> None:
        queue = MessageQueue(self.topic, BROKER_NAME, self.queue_id)
        async with Producer(
            f"writer-{self.queue_id}", name_servers=self._name_servers, client_options=self._options
        ) as producer:
            while not self.stopping.is_set():
                number = len(self.acks)
                message = Message.of(self.topic, self.body(number), keys=f"k{number}")
                try:
                    result = await producer.send(message, queue=queue, timeout_ms=self._timeout_ms)
                except BatonError as error:
                    self.failures.append(str(error))
                else:
                    if result.acknowledged:
                        offset = result.queue_offset
                        self.acks.append(QueueAck(number, self.queue_id, offset, time.monotonic()))
                    else:
                        self.failures.append(result.status.name)
                await asyncio.sleep(PAUSE_S)
