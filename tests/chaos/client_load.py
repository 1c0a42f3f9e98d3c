"""A load of keyed writes through the project's own client, as an application would make it."""

from __future__ import annotations

import threading
import time

from raw_probe import Ack, Writer

from batonmq.blocking import BlockingProducer
from batonmq.send_result import SendResult
from protocol.errors import BatonError
from protocol.message import Message, MessageQueue

PAUSE_S = 0.005


class SteadyWriter(Writer):
    """A `Writer` of at most 200 writes a second, so that the load leaves room for the cluster."""

    def body(self, number: int) -> bytes:
        self._stop.wait(PAUSE_S)
        return super().body(number)


class ClientWriter:
    """A thread that sends the numbers 0, 1, 2, … into one queue with the key `k<number>`.

    A send that failed is counted and its number sent again; `acks` as those of `Writer`.
    """

    def __init__(self, name_servers: str, topic: str, queue_id: int, broker_name: str) -> None:
        self._name_servers = name_servers
        self._queue = MessageQueue(topic, broker_name, queue_id)
        self.queue_id = queue_id
        self.acks: list[Ack] = []
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="client-writer")
        self.error: BaseException | None = None

    def __enter__(self) -> ClientWriter:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends after the send in progress. Raises what ended the thread, if anything did."""
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the client's writer hangs"
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            with BlockingProducer("chaos", name_servers=self._name_servers) as producer:
                self._send(producer)
        except BaseException as error:
            self.error = error

    def _send(self, producer: BlockingProducer) -> None:
        number = 0
        while not self._stop.wait(PAUSE_S):
            body = b"%d %d x" % (self.queue_id, number)
            message = Message.of(self._queue.topic, body, keys=f"k{number}")
            try:
                result: SendResult = producer.send(message, queue=self._queue)
            except BatonError as error:
                self.failures.append(str(error))
                continue
            if not result.acknowledged:
                self.failures.append(result.status.name)
                continue
            ack = Ack(number, self.queue_id, result.queue_offset, time.monotonic())
            self.acks.append(ack)
            number += 1
