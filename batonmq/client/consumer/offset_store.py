"""The progress of a consumer group.

Stored on the brokers for clustering (`RemoteOffsetStore`), in a local file of each member for
broadcasting (`LocalOffsetStore`). An offset is the next one to read: everything below it is
consumed. Origin: RemoteBrokerOffsetStore, LocalFileOffsetStore.
"""

import asyncio
import logging
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import msgspec

from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.errors import ArgumentError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BatonError, ConnectError
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.topic_name import is_file_name
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime import disk
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.durable_file import replace_file
from batonmq.runtime.turns import gather_apart, in_turns, to_the_end

log = logging.getLogger(__name__)

_SENT_AT_ONCE = 64
_BROKER_NAME = attrgetter("broker_name")


class OffsetStore:
    """Offsets by queue. `update` and `reset` store in memory, `persist` stores durably."""

    def __init__(self) -> None:
        self._offsets: dict[MessageQueue, int] = {}
        self._dirty: set[MessageQueue] = set()

    async def load(self) -> None:
        """Call before the first `read`."""

    async def read(self, queue: MessageQueue, *, deadline_ms: int) -> int | None:
        """The group's offset; None if it has none yet."""
        raise NotImplementedError

    async def place(self, queue: MessageQueue, offset: int, *, deadline_ms: int) -> None:
        """Stores the first offset of the group in a queue."""
        raise NotImplementedError

    def known(self, queue: MessageQueue) -> int | None:
        return self._offsets.get(queue)

    def update(self, queue: MessageQueue, offset: int) -> None:
        """Notes progress; never lowers an offset."""
        if offset > self._offsets.get(queue, -1):
            self.reset(queue, offset)

    def reset(self, queue: MessageQueue, offset: int) -> None:
        """Sets the offset to where the broker moved it, even if that is lower."""
        self._offsets[queue] = offset
        self._dirty.add(queue)

    async def persist(self) -> None:
        raise NotImplementedError

    async def persist_forever(self, period_ms: int) -> None:
        while True:
            await asyncio.sleep(period_ms / 1000)
            try:
                await self.persist()
            except (BatonError, OSError) as error:
                log.error("offsets_not_persisted reason=%s", disk.described(error))

    async def release(self, queues: Iterable[MessageQueue]) -> None:
        """Lets go of these queues: another member gets them."""
        raise NotImplementedError

    def resend(self, held: Iterable[MessageQueue]) -> None:
        """After a failover: the new master may lack the last second of progress, so send it
        again. Only of queues that this member holds: of others another member has newer progress.
        """


class RemoteOffsetStore(OffsetStore):
    """Progress of a group on its brokers. Sent oneway while running; `release` waits for
    replies."""

    def __init__(self, client: ClientInstance, group: str) -> None:
        super().__init__()
        self._client = client
        self._calls = QueueCalls(client)
        self._group = group

    async def read(self, queue: MessageQueue, *, deadline_ms: int) -> int | None:
        """The broker's offset; None if it has none. Raises as QueueCalls."""
        offset = await self._calls.committed_offset(self._group, queue, deadline_ms=deadline_ms)
        if offset is not None:
            self._offsets[queue] = offset
        return offset

    async def place(self, queue: MessageQueue, offset: int, *, deadline_ms: int) -> None:
        """Returns once the broker has stored it. Raises as QueueCalls."""
        before = self._offsets.get(queue)
        await self._calls.commit_offset(self._group, queue, offset, deadline_ms=deadline_ms)
        # Else newer progress was noted meanwhile, or the queue was released.
        if self._offsets.get(queue) == before:
            self._offsets[queue] = offset
            self._dirty.discard(queue)

    def resend(self, held: Iterable[MessageQueue]) -> None:
        self._dirty |= {queue for queue in held if queue in self._offsets}

    async def persist(self) -> None:
        async for queue in in_turns(sorted(self._dirty), _SENT_AT_ONCE):
            if queue not in self._dirty:  # released meanwhile
                continue
            routes = self._client.routes
            route, offset = routes.cached(queue.topic), self._offsets[queue]
            address = route.master_address(queue.broker_name) if route is not None else None
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
            # Two routes disagree about the master: one is stale, so send again until they agree.
            if address == routes.master_of(queue.broker_name):
                self._dirty.discard(queue)
            try:
                await self._client.remoting.oneway(address, request)
            except ConnectError as error:
                log.info("offset_not_persisted queue=%s reason=%s", queue, error)
                if queue in self._offsets:  # else it was released while the broker was dialled
                    self._dirty.add(queue)

    async def release(self, queues: Iterable[MessageQueue]) -> None:
        """Stores the offsets of these queues for the next owner, then forgets them."""
        # Short: closing waits for it, and what is not stored is read again by the next owner.
        deadline_ms = boot_ms() + 1000
        # Of each broker group on its own: one that hangs uses up only its own time.
        await gather_apart(
            (self._hand_over(queue, deadline_ms) for queue in list(some))
            for _, some in groupby(sorted(queues, key=_BROKER_NAME), _BROKER_NAME)
        )

    async def _hand_over(self, queue: MessageQueue, deadline_ms: int) -> None:
        offset = self._offsets.get(queue)
        # An offset without progress could replace a newer one, of a reset say.
        if offset is not None and queue in self._dirty:
            try:
                await self._calls.commit_offset(self._group, queue, offset, deadline_ms=deadline_ms)
            except BatonError as error:
                log.warning("offset_not_handed_over queue=%s reason=%s", queue, error)
        self._offsets.pop(queue, None)
        self._dirty.discard(queue)


class _StoredOffset(msgspec.Struct, rename="camel"):
    topic: str
    broker_name: str
    queue_id: int
    offset: int


class _StoredOffsets(msgspec.Struct):
    offsets: list[_StoredOffset]
    v: int = 1


class LocalOffsetStore(OffsetStore):
    """Progress of one broadcasting member, in `<directory>/<instance>/<group>.json`.

    Processes of one user share the file unless their instance names differ; the last write counts.
    A crash leaves the old or the new file. `load` raises BatonError for a file that cannot be
    read, and names it. Raises ArgumentError for what cannot be part of the path."""

    def __init__(self, directory: Path, instance_name: str, group: str) -> None:
        super().__init__()
        # `replace_file` writes it under this name first; 2^22 is Linux's highest process id.
        temp = f"{group}.json.{1 << 22}.tmp"
        for what, name, file in (
            ("instance_name", instance_name, instance_name),
            ("group", group, temp),
        ):
            if not is_file_name(file):
                allowed = f"broadcasting needs a file {file[:300]!r}, which no folder can have"
                raise ArgumentError(what, name, allowed)
        self._path = directory / instance_name / f"{group}.json"
        self._writing = asyncio.Lock()

    async def load(self) -> None:
        try:
            stored = msgspec.json.decode(disk.read_bytes(self._path), type=_StoredOffsets)
        except FileNotFoundError:
            return
        except OSError as error:
            raise BatonError(disk.described(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BatonError(
                f"{self._path} is no offset file ({error}): move it away to start without it"
            ) from error
        for entry in stored.offsets:
            queue = MessageQueue(entry.topic, entry.broker_name, entry.queue_id)
            self._offsets[queue] = entry.offset

    async def read(self, queue: MessageQueue, *, deadline_ms: int) -> int | None:
        return self._offsets.get(queue)

    async def place(self, queue: MessageQueue, offset: int, *, deadline_ms: int) -> None:
        """Durable on return. Raises OSError."""
        self.reset(queue, offset)
        try:
            await self.persist()
        except OSError:
            # Known, it would count as stored: after a crash the member would begin at a later end.
            del self._offsets[queue]
            self._dirty.discard(queue)
            raise

    async def persist(self) -> None:
        async with self._writing:
            if not self._dirty:
                return
            entries = [
                _StoredOffset(q.topic, q.broker_name, q.queue_id, offset)
                for q, offset in sorted(self._offsets.items())
            ]
            body, written = msgspec.json.encode(_StoredOffsets(entries)), self._dirty
            self._dirty = set()
            try:
                # A thread cannot be cancelled, and two would write the same temporary file.
                await to_the_end(asyncio.to_thread(replace_file, self._path, body, shared=True))
            except BaseException:
                self._dirty |= written
                raise

    async def release(self, queues: Iterable[MessageQueue]) -> None:
        """Keeps the offsets: a broadcasting member always reads all queues."""
        await self.persist()
