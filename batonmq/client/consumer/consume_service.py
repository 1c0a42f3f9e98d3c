"""What concurrent and orderly consumption of a push consumer have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

from batonmq.client.consumer.listener import ListenerCall
from batonmq.client.consumer.offset_store import OffsetStore
from batonmq.client.consumer.options import ConsumeOptions, MessageModel
from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.consumer.queue_reader import QueueReader
from batonmq.client.instance.client_instance import ClientInstance


@dataclass(frozen=True, slots=True)
class Consuming:
    """Whose messages are consumed, by what, and how."""

    client: ClientInstance
    group: str
    listener: ListenerCall
    offsets: OffsetStore
    model: MessageModel
    options: ConsumeOptions


class ConsumeService:
    """Its life is that of a consumer, from `start` to `close`."""

    def __init__(self, what: Consuming) -> None:
        self._client = what.client
        self._calls = QueueCalls(what.client)
        self._group = what.group
        self._listener = what.listener
        self._offsets = what.offsets
        self._model = what.model
        self._options = what.options

    def start(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Waits for listener calls in progress; waiting messages are left to the next owner."""
        raise NotImplementedError

    def arrived(self, reader: QueueReader) -> None:
        """There are messages to take in the reader's process queue."""
        raise NotImplementedError

    async def acquire(self, reader: QueueReader) -> bool:
        """Whether its queue may be consumed. Raises UnsupportedByBrokerError."""
        return True

    async def release(self, readers: Sequence[QueueReader]) -> None:
        """Their queues are given up."""
