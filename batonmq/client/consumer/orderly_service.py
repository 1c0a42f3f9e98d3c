"""Orderly consumption: one listener call at a time per queue, in the order of the queue.

The broker locks each queue for one member (LOCK_BATCH_MQ, 41) for 60 s; the member renews the lock
every 20 s, and stops by itself after 30 s without renewal. A message that fails pauses its queue
for `orderly_suspend_ms` and is then delivered again, before any later message.
Origin: ConsumeMessageOrderlyService, RebalancePushImpl.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from batonmq.client.consumer.consume_service import ConsumeService
from batonmq.client.consumer.listener import ConsumeContext, ConsumeStatus
from batonmq.client.consumer.options import MessageModel
from batonmq.client.consumer.process_queue import ProcessQueue
from batonmq.client.consumer.queue_reader import QueueReader
from batonmq.client.errors import UnsupportedByBrokerError
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageExt
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.turns import gather_some, is_set_within

log = logging.getLogger(__name__)

# Half of the broker's 60 s: this member stops long before another one can get the lock.
LOCK_LIVE_MS = 30_000
LOCK_RENEW_MS = 20_000
_LOCK_CALL_MS = 1_000
_NEVER_MS = 1 << 62


class OrderlyService(ConsumeService):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._locks = self._model is MessageModel.CLUSTERING
        self._slots = asyncio.Semaphore(self._options.concurrency)
        self._readers: set[QueueReader] = set()
        self._consuming: dict[QueueReader, asyncio.Task[None]] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._unlocking: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        if self._locks:
            self._renewing = self._client.spawn(self._renew_locks())

    async def close(self) -> None:
        """Waits for listener calls in progress, at most `close_wait_ms`, then cancels coroutines. A
        listener in a thread cannot be cancelled: its queue stays locked until the lock expires."""
        self._closing.set()
        if self._renewing is not None:
            self._renewing.cancel()
        tasks = list(self._consuming.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._options.close_wait_ms / 1000)
            if late:
                log.warning("listeners_still_busy group=%s count=%d", self._group, len(late))
            if late and self._listener.on_loop:
                for task in late:
                    task.cancel()
                await asyncio.wait(late)
        for unlocking in self._unlocking:
            unlocking.cancel()

    async def acquire(self, reader: QueueReader) -> bool:
        """Locks the queue at its broker. False also while an earlier listener call for this queue,
        from before it was given up, still runs. Raises UnsupportedByBrokerError."""
        if any(busy.queue == reader.queue for busy in self._consuming):
            return False
        if not self._locks:
            reader.process_queue.locked_until_ms = _NEVER_MS
        elif not await self._lock([reader]):
            return False
        self._readers.add(reader)
        return True

    async def release(self, readers: Sequence[QueueReader]) -> None:
        """Unlocks queues that are given up, each when its last listener call has ended. Waits at
        most `close_wait_ms`; a call that takes longer keeps its queue locked."""
        running = {t: r for r in readers if (t := self._consuming.get(r)) is not None}
        late: set[asyncio.Task[None]] = set()
        if running:
            _, late = await asyncio.wait(running, timeout=self._options.close_wait_ms / 1000)
        for task in late:
            if not self._closing.is_set():
                unlocking = self._client.spawn(self._unlock_after(task, running[task]))
                self._unlocking.add(unlocking)
                unlocking.add_done_callback(self._unlocking.discard)
        # A listener that takes minutes keeps its own queue only.
        kept = {running[task] for task in late}
        await self._unlock([reader for reader in readers if reader not in kept])

    async def _unlock_after(self, task: asyncio.Task[None], reader: QueueReader) -> None:
        """Unlocks the queue once its listener call has ended. Until then the lock is renewed, so
        that the next owner does not read at the same time."""
        log.warning("listener_still_busy group=%s queue=%s", self._group, reader.queue)
        await asyncio.wait([task])
        await self._unlock([reader])

    async def _unlock(self, readers: Sequence[QueueReader]) -> None:
        self._readers.difference_update(readers)
        if not self._locks:
            return
        deadline_ms = boot_ms() + _LOCK_CALL_MS
        await gather_some(self._unlock_at(some, deadline_ms) for some in _by_broker(readers))

    async def _unlock_at(self, readers: Sequence[QueueReader], deadline_ms: int) -> None:
        queues = [reader.queue for reader in readers]
        try:
            await self._calls.unlock_queues(self._group, queues, deadline_ms=deadline_ms)
        except BatonError as error:
            log.info("unlock_failed broker_name=%s reason=%s", queues[0].broker_name, error)

    def arrived(self, reader: QueueReader) -> None:
        running = self._consuming.get(reader)
        # A finished task is removed from the table only a loop turn later.
        if running is None or running.done():
            task = self._client.spawn(self._consume_queue(reader))
            self._consuming[reader] = task
            task.add_done_callback(lambda done: self._forget(reader, done))

    def _forget(self, reader: QueueReader, task: asyncio.Task[None]) -> None:
        if self._consuming.get(reader) is task:
            del self._consuming[reader]

    async def _lock(self, readers: Sequence[QueueReader]) -> bool:
        """Locks queues; returns whether all were locked."""
        return all(await gather_some(self._lock_at(some) for some in _by_broker(readers)))

    async def _lock_at(self, readers: Sequence[QueueReader]) -> bool:
        queues = [reader.queue for reader in readers]
        # The lock counts from before the request: the broker counts from when it got it.
        sent_ms = boot_ms()
        try:
            held = await self._calls.lock_queues(
                self._group, queues, deadline_ms=sent_ms + _LOCK_CALL_MS
            )
        except UnsupportedByBrokerError:
            raise
        except BatonError as error:
            log.info("lock_failed broker_name=%s reason=%s", queues[0].broker_name, error)
            return False
        # Not all of these need still be in `_readers`: one that was given up while this renewal was
        # under way must not be renewed again, or no other member could ever lock its queue.
        for reader in readers:
            if reader.queue not in held:
                reader.process_queue.locked_until_ms = 0
                continue
            reader.process_queue.locked_until_ms = sent_ms + LOCK_LIVE_MS
            reader.consumed()
            if reader.process_queue.waiting:
                self.arrived(reader)
        return held.issuperset(queues)

    async def _renew_locks(self) -> None:
        while True:
            await asyncio.sleep(LOCK_RENEW_MS / 1000)
            try:
                await self._lock(list(self._readers))
            except UnsupportedByBrokerError as error:
                log.error("locks_lost group=%s reason=%s", self._group, error)

    async def _consume_queue(self, reader: QueueReader) -> None:
        """Consumes until no message waits, the queue is dropped, or the lock is lost."""
        while True:
            process_queue = reader.process_queue
            if not self._may_consume(process_queue):
                return
            batch = process_queue.take(self._options.batch)
            if not batch:
                return
            async with self._slots:
                if not self._may_consume(process_queue):  # lost while waiting for the slot
                    process_queue.put_back(batch)
                    continue
                context = ConsumeContext(reader.queue)
                status = await self._listener(batch, context)
            # Another member has the queue, or it was moved: this progress counts no more. Where it
            # was moved to, messages may wait already, and nothing else would begin with them.
            if process_queue.dropped:
                continue
            if status is ConsumeStatus.SUCCESS:
                self._offsets.update(reader.queue, process_queue.done(batch))
                reader.consumed()
            else:
                await self._again(process_queue, batch)

    def _may_consume(self, process_queue: ProcessQueue) -> bool:
        held = not process_queue.dropped and process_queue.locked_until_ms > boot_ms()
        return held and not self._closing.is_set()

    async def _again(self, process_queue: ProcessQueue, batch: Sequence[MessageExt]) -> None:
        for message in batch:
            process_queue.replace_taken(
                replace(message, reconsume_times=message.reconsume_times + 1)
            )
        process_queue.put_back(batch)
        await is_set_within(self._closing, self._options.orderly_suspend_ms / 1000)


def _by_broker(readers: Iterable[QueueReader]) -> Iterator[list[QueueReader]]:
    """Those of one topic and broker group in each list."""
    in_order = sorted(readers, key=attrgetter("queue"))
    for _, some in groupby(in_order, attrgetter("queue.topic", "queue.broker_name")):
        yield list(some)
