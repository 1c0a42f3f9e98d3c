"""Sends rows of one task and writes down what was acknowledged.

Rows of one queue are sent in order, one request after the other; other requests go side by side.
Only code 0 is an acknowledgement: what was stored and not confirmed is sent again, under the same
unique key.

Files of attempts are `acks-<job>-<batch>-<partition>-<attempt>.jsonl`; `message_audit --acked`
reads the folder. A whole write or batch leaves `_committed-<job>-<batch>.json`. Free of Spark.
"""

import asyncio
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from batonmq.client.errors import MessageIllegalError, NoNameServerError, NoRouteError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.producer.outgoing import outgoing
from batonmq.client.producer.producer import Producer
from batonmq.client.producer.sending import SendResult
from batonmq.protocol import properties as names
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import Message, MessageQueue
from batonmq.protocol.tags import java_string_hash
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.durable_file import replace_file, sync_directory
from batonmq.spark.live.cluster import DOWN, Tries, is_down, route_of
from batonmq.spark.live.options import SinkOptions

Ack = dict[str, str | int]
"""topic, broker, queue_id, queue_offset, unique_key, and msg_id if the broker sent it."""

_encode: Final = msgspec.json.encode


class AckFile:
    """One JSON line per acknowledged message, in a file of this attempt; made with the first.

    The lines of a request are there when `add` returns, and on the disk when it is closed.
    """

    def __init__(self, folder: str, prefix: str) -> None:
        """`folder` "": nothing is written, only counted."""
        self.count = 0
        self._path = Path(folder) / f"{prefix}{uuid.uuid4().hex[:8]}.jsonl" if folder else None
        self._file: int | None = None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None and self._path is not None:
            file, self._file = self._file, None
            try:
                os.fsync(file)
            finally:
                os.close(file)
            sync_directory(self._path.parent)  # a new file's name is in its folder

    def add(self, acks: list[Ack]) -> None:
        """Raises OSError. Nothing is buffered: the file of a killed task is complete up to then."""
        if self._path is not None:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            lines = memoryview(b"".join(_encode(ack) + b"\n" for ack in acks))
            while lines:
                lines = lines[os.write(self._file, lines) :]
        self.count += len(acks)


def write_committed(folder: str, job: str, batch_id: int, counts: Mapping[str, Any]) -> None:
    """What a whole write or batch came to; there as a whole, or not at all. Raises OSError."""
    path = Path(folder) / f"_committed-{job}-{batch_id}.json"
    replace_file(path, f"{json.dumps({'job': job, 'batch': batch_id, **counts})}\n".encode())


_HASH_BYTES: Final = 8


class SinkError(BatonError):
    """A row cannot be sent, or was not acknowledged in time; the text names it and the reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """One message to be sent. `number` is its place in the partition."""

    number: int
    unique_key: str
    message: Message
    queue_id: int | None = None
    broker: str | None = None
    sharding_key: str | None = None

    @property
    def size_bytes(self) -> int:
        properties = sum(len(name) + len(value) for name, value in self.message.properties.items())
        return len(self.message.body) + properties + 256

    @property
    def is_illegal(self) -> bool:
        try:
            outgoing(self.message, lambda: self.unique_key)
        except MessageIllegalError:
            return True
        return False


def row_of(number: int, prefix: str, values: Mapping[str, Any], topic: str) -> Row:
    """A row out of its columns. `topic` is that of rows which name none. Raises SinkError.

    Its unique key is `prefix`, its number and a hash of its content: a task that is repeated
    over other rows, or in another order, gives no row the key of another one, which a reader that
    drops repeats would lose.
    """
    body = values["body"]
    to_topic = values.get("topic") or topic
    for what, value in (("body", body), ("topic", to_topic)):
        if not value:
            raise SinkError(f"row {number} of its partition has no {what}: it cannot be sent")
    properties = {name: value for name, value in values.get("properties") or () if value}
    own = sorted(names.RESERVED & properties.keys() - {names.KEYS, names.TAGS})
    if own:
        raise SinkError(
            f"row {number} of its partition sets {', '.join(own)} in properties: these belong to "
            "the broker and the client"
        )
    for name, column in (
        (names.KEYS, "keys"),
        (names.TAGS, "tags"),
        (names.SHARDING_KEY, "sharding_key"),
    ):
        if values.get(column):
            properties[name] = values[column]
    raw = body.encode() if isinstance(body, str) else bytes(body)
    way = values.get("queue_id"), values.get("broker"), values.get("sharding_key")
    digest = hashlib.blake2b(raw, digest_size=_HASH_BYTES)
    digest.update(_encode((len(raw), to_topic, sorted(properties.items()), way)))
    unique_key = f"{prefix}{number}-{digest.hexdigest()}"
    return Row(number, unique_key, Message(to_topic, raw, properties=properties), *way)


@dataclass(slots=True)
class _QueueLane:
    """Rows that go the same way. `queue` None: any of the topic's, in no order."""

    queue: MessageQueue | None
    waiting: list[Row] = field(default_factory=list)
    size_bytes: int = 0
    last: asyncio.Task[None] | None = None


class SinkSender:
    """`start`, `add` as often as needed, `finish`; `close` whatever happened.

    `acknowledged` is called with the acks of each request.
    """

    def __init__(self, options: SinkOptions, acknowledged: Callable[[list[Ack]], None]) -> None:
        self._options = options
        self._acknowledged = acknowledged
        self._client = ClientInstance(list(options.name_servers), options.access.client_options())
        self._producer = Producer(options.group, client=self._client)
        self._lanes: dict[tuple[str, MessageQueue | None], _QueueLane] = {}
        self._queues: dict[str, tuple[MessageQueue, ...]] = {}
        self._room = asyncio.Semaphore(options.in_flight)
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    async def start(self) -> None:
        await self._client.start()
        await self._producer.start()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._producer.close()
        await self._client.close()

    async def add(self, rows: Sequence[Row]) -> None:
        """Takes rows to send; waits while too much is under way. Raises what failed so far."""
        for row in rows:
            queue = await self._queue_of(row)
            lane = self._lanes.setdefault((row.message.topic, queue), _QueueLane(queue))
            size_bytes = row.size_bytes
            full = len(lane.waiting) >= self._options.batch_messages
            if full or (lane.waiting and lane.size_bytes + size_bytes > self._options.batch_bytes):
                await self._flush(lane)
            lane.waiting.append(row)
            lane.size_bytes += size_bytes

    async def finish(self) -> None:
        """Sends the rest and waits for every acknowledgement. Raises what failed."""
        for lane in self._lanes.values():
            if lane.waiting:
                await self._flush(lane)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._error is not None:
            raise self._error

    async def _flush(self, lane: _QueueLane) -> None:
        await self._room.acquire()
        if self._error is not None:
            self._room.release()
            raise self._error
        rows, lane.waiting, lane.size_bytes = lane.waiting, [], 0
        # Rows that may go into any queue have no order to keep.
        before = lane.last if lane.queue is not None else None
        task = asyncio.get_running_loop().create_task(self._send_after(before, rows, lane.queue))
        lane.last = task
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            # The first one counts: those that waited for it fail by it.
            self._error = self._error or error

    async def _send_after(
        self, before: asyncio.Task[None] | None, rows: list[Row], queue: MessageQueue | None
    ) -> None:
        if before is not None:
            # Raises what ended it: then this one has failed, too, and so does the next. Nothing
            # may overtake what was not acknowledged.
            await before
        self._acknowledged(_acks(rows, await self._send(rows, queue)))

    async def _send(self, rows: list[Row], queue: MessageQueue | None) -> SendResult:
        options = self._options
        deadline_ms = boot_ms() + options.send_timeout_ms
        tries, unknown = Tries(deadline_ms), 0
        while True:
            left_ms = deadline_ms - boot_ms()
            try:
                result = await self._request(rows, queue, max(left_ms, 1))
                if result.acknowledged:
                    return result
                why = f"stored, but {result.status.name}"
            except NoNameServerError as error:
                why = str(error)
            except NoRouteError as error:
                # Two requests: its brokers may have registered between them.
                unknown = 0 if await is_down(self._client, deadline_ms) else unknown + 1
                if unknown > 1:
                    raise SinkError(f"{_rows_text(rows)}: {error}") from error
                why = f"no route at the name servers: {DOWN}; see `mqctl health`"
            except MessageIllegalError as error:
                guilty = [row for row in rows if row.is_illegal][:1]
                raise SinkError(f"{_rows_text(guilty or rows)}: {error}") from error
            except BatonError as error:
                raise SinkError(f"{_rows_text(rows)}: {error}") from error
            if not await tries.pause():
                raise SinkError(
                    f"{_rows_text(rows)}: not acknowledged in {options.send_timeout_ms} ms (option "
                    f"sendTimeout): {why}"
                )

    async def _request(
        self, rows: list[Row], queue: MessageQueue | None, timeout_ms: int
    ) -> SendResult:
        if len(rows) == 1:
            (row,) = rows
            return await self._producer.send(
                row.message, queue=queue, timeout_ms=timeout_ms, unique_key=row.unique_key
            )
        return await self._producer.send_batch(
            [row.message for row in rows],
            queue=queue,
            timeout_ms=timeout_ms,
            unique_keys=[row.unique_key for row in rows],
        )

    async def _queue_of(self, row: Row) -> MessageQueue | None:
        """The queue that a row names, None for any. Raises SinkError if there is no such queue."""
        if row.queue_id is None and row.sharding_key is None:
            return None
        topic = row.message.topic
        queues = self._queues.get(topic)
        if queues is None:
            deadline_ms = boot_ms() + self._options.send_timeout_ms
            try:
                route = await route_of(self._client, topic, deadline_ms)
            except BatonError as error:
                raise SinkError(f"{_rows_text([row])}: {error}") from error
            queues = self._queues[topic] = route.subscribe_queues
        if row.sharding_key is not None:
            return queues[java_string_hash(row.sharding_key) % len(queues)] if queues else None
        found = [
            queue
            for queue in queues
            if queue.queue_id == row.queue_id and row.broker in (None, queue.broker_name)
        ]
        if len(found) == 1:
            return found[0]
        what = (
            "no such queue" if not found else "several brokers have it: name one in column broker"
        )
        raise SinkError(
            f"{_rows_text([row])}: queue_id {row.queue_id}: {what}; there are "
            f"{', '.join(map(str, queues)) or 'none'}"
        )


def _acks(rows: list[Row], result: SendResult) -> list[Ack]:
    queue = result.queue
    acks: list[Ack] = [
        {
            "topic": queue.topic,
            "broker": queue.broker_name,
            "queue_id": queue.queue_id,
            "queue_offset": result.queue_offset + place,
            "unique_key": row.unique_key,
        }
        for place, row in enumerate(rows)
    ]
    for ack, msg_id in zip(acks, result.offset_msg_id.split(","), strict=False):
        if msg_id:
            ack["msg_id"] = msg_id
    return acks


def _rows_text(rows: list[Row]) -> str:
    first, last = rows[0], rows[-1]
    which = f"row {first.number}" if first is last else f"rows {first.number} to {last.number}"
    return f"{which} of their partition (topic {first.message.topic}, from {first.unique_key})"
