"""Reads a range of one queue: windows of records, and no end before the range's end.

Pulls ahead: where nothing is filtered, the next pulls are sent before the replies to the first ones
come, so a window costs few round trips though a reply has at most 32 messages. Each reply has the
next offset; pulls that were too far ahead are sent again.

A failover in the middle costs time only: offsets stay, and what a consumer may see stays.
Free of Spark.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from batonmq.client.consumer.pulling import (
    ALL,
    PulledRecords,
    PullRequest,
    PullStatus,
    build_subscription,
)
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.protocol.records.columns import Records, chain, locate, wrong_crc
from batonmq.protocol.records.search import is_record
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.spark.live.cluster import ClusterError, Tries, lose, pulled, shortfall
from batonmq.spark.live.offsets import ENDS_BELOW, EXPIRED, GONE, Loss, QueueRange
from batonmq.spark.live.options import TopicOptions

PULL_MESSAGES: Final = 32
AHEAD: Final = 8


@dataclass(frozen=True, slots=True)
class Window:
    """Records of the queue offsets [begin, end), one behind the other in `data`."""

    data: bytes
    records: Records
    begin: int
    end: int


class TopicRangeReader:
    """`next_window` until None. One at a time: it keeps the place."""

    def __init__(self, client: ClientInstance, wanted: QueueRange, options: TopicOptions) -> None:
        self._client, self._wanted, self._options = client, wanted, options
        # What the broker sifts by.
        tags = " || ".join(sorted(options.tags)) or ALL
        self._subscription = build_subscription(wanted.queue.topic, tags, wall_ms())
        self._filters = bool(options.tags)
        self._patience_ms = options.operation_timeout_ms
        self._position = wanted.begin
        self._stride = PULL_MESSAGES

    async def next_window(self) -> Window | None:
        """At least one more answer's worth, at most `batchBytes` and a few answers; None at the
        range's end.

        Raises DataLossError, ClusterError, and what the client raises (BatonError).
        """
        begin = self._position
        parts: list[bytes] = []
        size_bytes = 0
        deadline_ms = boot_ms() + self._patience_ms
        tries = Tries(deadline_ms)
        while self._position < self._wanted.end and size_bytes < self._options.batch_bytes:
            before = self._position
            first = await self._pull_ahead(parts, deadline_ms)
            if self._position > before:
                deadline_ms = boot_ms() + self._patience_ms
                tries = Tries(deadline_ms)
                size_bytes = sum(map(len, parts))
                continue
            if parts:
                break  # what is there goes first: the rest may take its time
            if first.status is PullStatus.OFFSET_ILLEGAL and await self._pass_loss(
                first, deadline_ms
            ):
                begin = self._position
                continue
            if not await tries.pause():
                raise self._stalled(first)
        if begin == self._position:
            return None
        return self._window(b"".join(parts), begin, self._position)

    async def _pull_ahead(self, parts: list[bytes], deadline_ms: int) -> PulledRecords:
        """Several pulls at once; takes the answers that follow on each other. The first answer."""
        begin, end = self._position, self._wanted.end
        ahead = 1 if self._filters else AHEAD
        offsets = range(begin, end, self._stride)[:ahead]
        asked = [asyncio.ensure_future(self._pull(offset, deadline_ms)) for offset in offsets]
        try:
            answers: Sequence[PulledRecords] = await asyncio.gather(*asked)
        except BaseException:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            raise
        short = 0
        for offset, answer in zip(offsets, answers, strict=True):
            if offset != self._position or answer.status is PullStatus.OFFSET_ILLEGAL:
                break
            if answer.status is PullStatus.NO_NEW_MSG:
                break
            if answer.records:
                parts.append(answer.records)
            self._position = min(max(answer.next_begin_offset, offset), end)
            if self._position - offset < self._stride and self._position < end:
                short = self._position - offset
        if not self._filters:
            # Large messages fill a reply sooner: then fewer pulls are sent at a time.
            self._stride = short or min(PULL_MESSAGES, 2 * self._stride)
        return answers[0]

    async def _pull(self, offset: int, deadline_ms: int) -> PulledRecords:
        request = PullRequest(
            self._options.group,
            self._wanted.queue,
            offset,
            self._subscription,
            min(PULL_MESSAGES if self._filters else self._stride, self._wanted.end - offset),
        )
        # A name server that has just started may not know the topic yet.
        return await pulled(self._client, request, deadline_ms)

    async def _pass_loss(self, answer: PulledRecords, deadline_ms: int) -> bool:
        """Whether the place moved on behind what is lost. Raises DataLossError."""
        low, high = answer.min_offset, answer.max_offset
        why = EXPIRED
        if self._position >= low:
            short = await shortfall(
                self._client, self._options.group, self._wanted.queue, self._position, deadline_ms
            )
            if short is None:
                return False
            low, high = short
            why = ENDS_BELOW
        missing = QueueRange(self._wanted.queue, self._position, self._wanted.end)
        lose(Loss(missing, low, high, why), fails=self._options.fail_on_data_loss)
        self._position = min(low, self._wanted.end) if why == EXPIRED else self._wanted.end
        return True

    def _stalled(self, answer: PulledRecords) -> ClusterError:
        queue = self._wanted.queue
        return ClusterError(
            f"topic {queue.topic}, broker {queue.broker_name}, queue {queue.queue_id}: nothing "
            f"came for offset {self._position} of [{self._wanted.begin}, {self._wanted.end}) in "
            f"{self._patience_ms} ms (option operationTimeout); its master answers "
            f"{answer.status.name} and shows [{answer.min_offset}, {answer.max_offset})"
        )

    def _window(self, data: bytes, begin: int, end: int) -> Window:
        starts, reached = chain(data, 0, len(data))
        records, good = locate(data, starts)
        if reached != len(data) or good < len(starts) or _is_damaged(data, records):
            raise ClusterError(
                f"{self._wanted.queue}: the reply for offsets [{begin}, {end}) is damaged; the "
                "task may be tried again"
            )
        inside = (records.queue_offset >= begin) & (records.queue_offset < end)
        if not inside.all():
            records = records.keep(inside)
        if not self._filters and len(records) < end - begin:
            there = np.isin(np.arange(begin, end), records.queue_offset)
            first = begin + int(np.argmin(there))
            missing = QueueRange(self._wanted.queue, first, end)
            loss = Loss(missing, first + 1, end, f"{GONE} ({(~there).sum()} of them)")
            lose(loss, fails=self._options.fail_on_data_loss)
        return Window(data, records, begin, end)


def _is_damaged(data: bytes, records: Records) -> bool:
    """Whether a record is not as it was written. What `wrong_crc` marks may still be whole: a
    record without a property CRC may end in ten digits of its own."""
    marked = np.flatnonzero(wrong_crc(data, records)).tolist()
    return not all(
        is_record(data, int(records.start[each]), int(records.physical_offset[each]))
        for each in marked
    )
