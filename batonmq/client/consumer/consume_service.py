"""The common interface of concurrent and orderly consumption."""

from collections.abc import Sequence
from dataclasses import dataclass

from batonmq.client.consumer.listener import ListenerCall
from batonmq.client.consumer.offset_store import OffsetStore
from batonmq.client.consumer.options import ConsumeOptions, MessageModel
from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.consumer.queue_reader import QueueReader
from batonmq.client.instance.client_instance import ClientInstance


@dataclass(eq=False)
class ConsumeService:
    """Calls the listener, from the consumer's `start` to its `close`."""

    _client: ClientInstance
    _group: str
    _listener: ListenerCall
    _offsets: OffsetStore
    _model: MessageModel
    _options: ConsumeOptions

    def __post_init__(self) -> None:
        self._calls = QueueCalls(self._client)

    def start(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Waits for listener calls in progress. Messages not yet taken are left to the next
        owner."""
        raise NotImplementedError

    def arrived(self, reader: QueueReader) -> None:
        """The reader's process queue has new messages."""
        raise NotImplementedError

    async def acquire(self, reader: QueueReader) -> bool:
        """Returns whether the reader's queue may be consumed. Raises UnsupportedByBrokerError."""
        return True

    async def release(self, readers: Sequence[QueueReader]) -> None:
        """The queues of these readers are given up."""
