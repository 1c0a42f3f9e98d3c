"""Concurrent consumption: a fixed number of workers take messages of a queue in any order.

A message that fails is sent back to its broker, which delivers it again. If that is not possible,
the message stays here, uncommitted, and is delivered again after growing delays; it is never
skipped. Origin: ConsumeMessageConcurrentlyService.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from batonmq.client.consumer.consume_service import ConsumeService
from batonmq.client.consumer.listener import ConsumeContext, ConsumeStatus
from batonmq.client.consumer.options import MessageModel
from batonmq.client.consumer.process_queue import ProcessQueue
from batonmq.client.consumer.queue_reader import QueueReader
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageExt
from batonmq.runtime.backoff import pause_ms
from batonmq.runtime.clock import boot_ms

log = logging.getLogger(__name__)

FIRST_DELAY_MS = 1_000
LAST_DELAY_MS = 60_000


@dataclass(frozen=True, slots=True)
class _Work:
    reader: QueueReader
    process_queue: ProcessQueue
    messages: Sequence[MessageExt]


class ConcurrentService(ConsumeService):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._work: asyncio.Queue[_Work | None] = asyncio.Queue()
        self._workers: list[asyncio.Task[None]] = []
        self._timers: set[asyncio.TimerHandle] = set()

    def start(self) -> None:
        self._workers = [self._client.spawn(self._run()) for _ in range(self._options.concurrency)]

    async def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        # What no worker has begun stays uncommitted.
        while not self._work.empty():
            self._work.get_nowait()
        for _ in self._workers:
            self._work.put_nowait(None)  # ends one worker, after its call
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=self._options.close_wait_ms / 1000)
            for worker in late:
                worker.cancel()
            if late:
                log.warning("listeners_still_busy group=%s count=%d", self._group, len(late))
                await asyncio.wait(late)
        self._workers = []

    def arrived(self, reader: QueueReader) -> None:
        process_queue = reader.process_queue
        # The queue's flow limits bound what waits here.
        while batch := process_queue.take(self._options.batch):
            self._work.put_nowait(_Work(reader, process_queue, batch))

    async def _run(self) -> None:
        while (work := await self._work.get()) is not None:
            if not work.process_queue.dropped:
                await self._consume(work)

    async def _consume(self, work: _Work) -> None:
        context = ConsumeContext(work.reader.queue)
        status = await self._listener(work.messages, context)
        if work.process_queue.dropped:  # the next owner of the queue gets these messages again
            return
        done, failed = _split(work.messages, status, context)
        # As in Java: retries go through a topic of the whole group, and a member that reads all
        # queues by itself has no part in it.
        if failed and self._model is MessageModel.BROADCASTING:
            for message in failed:
                log.warning("broadcast_message_given_up message=%s", message.uniq_key)
            done, failed = [*done, *failed], []
        kept: list[MessageExt] = []
        for message in failed:
            if await self._send_back(message, context):
                done = [*done, message]
            else:
                kept.append(message)
        if kept and not work.process_queue.dropped:
            self._offer_again(work, kept)
        if not work.process_queue.dropped:
            self._offsets.update(work.reader.queue, work.process_queue.done(done))
            work.reader.consumed()

    async def _send_back(self, message: MessageExt, context: ConsumeContext) -> bool:
        try:
            await self._calls.send_back(
                self._group,
                message,
                context.delay_level,
                self._options.max_reconsume_times,
                deadline_ms=boot_ms() + 3000,
            )
        except BatonError as error:
            log.warning("send_back_failed message=%s reason=%s", message.uniq_key, error)
            return False
        return True

    def _offer_again(self, work: _Work, messages: Sequence[MessageExt]) -> None:
        again = [replace(m, reconsume_times=m.reconsume_times + 1) for m in messages]
        for message in again:
            # `==`, not `>=`: once for each message.
            if message.reconsume_times == self._options.max_reconsume_times:
                log.error(
                    "message_fails_persistently group=%s queue=%s offset=%d tries=%d: it is kept "
                    "and holds back the group's offset on this queue",
                    self._group,
                    work.reader.queue,
                    message.queue_offset,
                    message.reconsume_times,
                )
        delay_ms = redelivery_delay_ms(max(m.reconsume_times for m in again))
        loop = asyncio.get_running_loop()

        def put() -> None:
            self._timers.discard(timer)
            if not work.process_queue.dropped:
                self._work.put_nowait(replace(work, messages=again))

        timer = loop.call_later(delay_ms / 1000, put)
        self._timers.add(timer)


def _split(
    messages: Sequence[MessageExt], status: ConsumeStatus, context: ConsumeContext
) -> tuple[Sequence[MessageExt], Sequence[MessageExt]]:
    """(consumed, failed): RECONSUME_LATER fails all, SUCCESS those behind ack_index."""
    if status is ConsumeStatus.RECONSUME_LATER:
        return (), messages
    if context.ack_index is None:
        return messages, ()
    cut = min(max(context.ack_index + 1, 0), len(messages))
    return messages[:cut], messages[cut:]


def redelivery_delay_ms(tries: int) -> int:
    """The pause before the next local delivery after `tries` >= 1 failures: 1 s, doubling up to 60
    s."""
    return pause_ms(FIRST_DELAY_MS, LAST_DELAY_MS, tries)
