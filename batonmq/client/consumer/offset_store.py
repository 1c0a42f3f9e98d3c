"""The progress of a consumer group.

Clustering: on the brokers (`RemoteOffsetStore`); broadcasting: in a local file of this member
(`LocalOffsetStore`). An offset is the next one to read, so that everything below it is consumed.
Origin: RemoteBrokerOffsetStore, LocalFileOffsetStore.
"""

import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.process.clock import boot_ms
from batonmq.process.durable_file import replace_file
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BatonError, ConnectError
from batonmq.protocol.message import MessageQueue
from batonmq.remoting.command import RemotingCommand

log = logging.getLogger(__name__)


class OffsetStore(Protocol):
    """`update` stores in memory, `persist` durably. `update` never lowers an offset; `reset` may
    (the broker moved it)."""

    async def load(self) -> None: ...

    async def read(self, queue: MessageQueue, *, deadline_ms: int) -> int | None: ...

    def known(self, queue: MessageQueue) -> int | None: ...

    def update(self, queue: MessageQueue, offset: int) -> None: ...

    def reset(self, queue: MessageQueue, offset: int) -> None: ...

    async def persist(self) -> None: ...

    async def release(self, queues: Iterable[MessageQueue]) -> None: ...

    def resend(self, broker_names: Collection[str]) -> None: ...


class _Table:
    """Offsets by queue, and which of them are not persisted yet."""

    def __init__(self) -> None:
        self.offsets: dict[MessageQueue, int] = {}
        self.dirty: set[MessageQueue] = set()

    def update(self, queue: MessageQueue, offset: int) -> None:
        if offset > self.offsets.get(queue, -1):
            self.reset(queue, offset)

    def reset(self, queue: MessageQueue, offset: int) -> None:
        self.offsets[queue] = offset
        self.dirty.add(queue)

    def forget(self, queue: MessageQueue) -> None:
        self.offsets.pop(queue, None)
        self.dirty.discard(queue)


class RemoteOffsetStore:
    """Progress of a group on its brokers. Sent oneway while running, with a reply on release."""

    def __init__(self, client: ClientInstance, group: str) -> None:
        self._client = client
        self._calls = QueueCalls(client)
        self._group = group
        self._table = _Table()

    async def load(self) -> None:
        """Nothing: `read` asks the broker queue by queue."""

    async def read(self, queue: MessageQueue, *, deadline_ms: int) -> int | None:
        """The broker's offset, None if it has none. Raises as QueueCalls."""
        offset = await self._calls.committed_offset(self._group, queue, deadline_ms=deadline_ms)
        if offset is not None:
            self._table.offsets[queue] = offset
        return offset

    def known(self, queue: MessageQueue) -> int | None:
        return self._table.offsets.get(queue)

    def update(self, queue: MessageQueue, offset: int) -> None:
        self._table.update(queue, offset)

    def reset(self, queue: MessageQueue, offset: int) -> None:
        self._table.reset(queue, offset)

    def resend(self, broker_names: Collection[str]) -> None:
        """After a failover: the new master may have missed the last second of progress."""
        self._table.dirty |= {q for q in self._table.offsets if q.broker_name in broker_names}

    async def persist(self) -> None:
        for queue in sorted(self._table.dirty):
            address = self._master(queue)
            offset = self._table.offsets[queue]
            if address is None:
                continue
            ext = {
                "consumerGroup": self._group,
                "topic": queue.topic,
                "queueId": str(queue.queue_id),
                "commitOffset": str(offset),
                "bname": queue.broker_name,
            }
            request = RemotingCommand.request(RequestCode.UPDATE_CONSUMER_OFFSET, ext)
            self._table.dirty.discard(queue)
            try:
                await self._client.remoting.oneway(address, request)
            except ConnectError as error:
                self._table.dirty.add(queue)
                log.info("offset_not_persisted queue=%s why=%s", queue, error)

    async def release(self, queues: Iterable[MessageQueue]) -> None:
        """Stores the offsets of these queues for their next owner, then drops them."""
        deadline_ms = boot_ms() + 1000
        for queue in sorted(queues):
            offset = self._table.offsets.get(queue)
            if offset is not None and queue in self._table.dirty:
                try:
                    await self._calls.commit_offset(
                        self._group, queue, offset, deadline_ms=deadline_ms
                    )
                except BatonError as error:
                    log.warning("offset_not_handed_over queue=%s why=%s", queue, error)
            self._table.forget(queue)

    def _master(self, queue: MessageQueue) -> str | None:
        route = self._client.routes.cached(queue.topic)
        return route.master_address(queue.broker_name) if route is not None else None


class _StoredOffset(msgspec.Struct, rename="camel"):
    topic: str
    broker_name: str
    queue_id: int
    offset: int


class _StoredOffsets(msgspec.Struct):
    offsets: list[_StoredOffset]
    v: int = 1


def default_offset_dir() -> Path:
    return Path.home() / ".batonmq" / "offsets"


class LocalOffsetStore:
    """Progress of one broadcasting member, in `<directory>/<instance>/<group>.json`.

    Processes of one user share the file unless their instance names differ; the last write counts.
    A crash leaves the old or the new file. `load` raises BatonError for a file that cannot be
    decoded, and names it.
    """

    def __init__(self, directory: Path, instance_name: str, group: str) -> None:
        self._path = directory / instance_name / f"{group}.json"
        self._table = _Table()

    @property
    def path(self) -> Path:
        return self._path

    async def load(self) -> None:
        try:
            stored = msgspec.json.decode(self._path.read_bytes(), type=_StoredOffsets)
        except FileNotFoundError:
            return
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BatonError(
                f"{self._path} is no offset file ({error}): move it away to start without it"
            ) from error
        for entry in stored.offsets:
            queue = MessageQueue(entry.topic, entry.broker_name, entry.queue_id)
            self._table.offsets[queue] = entry.offset

    async def read(self, queue: MessageQueue, *, deadline_ms: int) -> int | None:
        return self._table.offsets.get(queue)

    def known(self, queue: MessageQueue) -> int | None:
        return self._table.offsets.get(queue)

    def update(self, queue: MessageQueue, offset: int) -> None:
        self._table.update(queue, offset)

    def reset(self, queue: MessageQueue, offset: int) -> None:
        self._table.reset(queue, offset)

    def resend(self, broker_names: Collection[str]) -> None:
        """Nothing: brokers do not hold these offsets."""

    async def persist(self) -> None:
        if not self._table.dirty:
            return
        entries = [
            _StoredOffset(q.topic, q.broker_name, q.queue_id, offset)
            for q, offset in sorted(self._table.offsets.items())
        ]
        replace_file(self._path, msgspec.json.encode(_StoredOffsets(entries)), shared=True)
        self._table.dirty.clear()

    async def release(self, queues: Iterable[MessageQueue]) -> None:
        """The offsets stay: the queues belong to this member whenever it runs."""
        await self.persist()
