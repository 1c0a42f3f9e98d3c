"""The offsets of a stream: where it begins, how far the next batch goes, what a batch reads.

Spark keeps the offsets in its checkpoint, before it reads what lies between them; a batch that is
repeated is planned from the same offsets again. Free of Spark.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.message import MessageQueue
from batonmq.runtime.clock import boot_ms
from batonmq.spark.live.cluster import ClusterError, LiveCluster, lose
from batonmq.spark.live.offsets import (
    BEFORE_IT_WAS_SEEN,
    ENDS_BELOW,
    EXPIRED,
    Loss,
    Offsets,
    QueueRange,
    fair_end,
    from_checkpoint,
    ranges_between,
    to_checkpoint,
)
from batonmq.spark.live.topic_read import TopicRead, TopicTask, check_loss, resolve
from batonmq.spark.read.selection import LATEST, Bound

log = logging.getLogger(__name__)

# How old a route may be until it is fetched again: a topic may have grown.
ROUTE_MS: Final = 2_000
# Spark polls again 10 ms after there was nothing; the masters get requests this often at most.
IDLE_MS: Final = 100
# How soon a route that lacks a group is fetched again.
AGAIN_MS: Final = 200


class TopicStreamRead(TopicRead):
    """A read of topics as a stream."""

    @property
    def most(self) -> int:
        """Offsets of one batch; 0: no limit."""
        return self.options.offsets_per_trigger_max

    to_checkpoint = staticmethod(to_checkpoint)

    def from_checkpoint(self, raw: Mapping[str, Any]) -> Offsets:
        return from_checkpoint(raw, self.options.topics)

    def stream(self) -> StreamPlan:
        return StreamPlan(self)


class StreamPlan:
    """The driver's side of a stream; connects at first use and stays connected."""

    def __init__(self, read: TopicRead) -> None:
        self._read = read
        self._options = read.options
        self._cluster: LiveCluster | None = None
        self._routes: list[TopicRoute] = []
        self._routes_ms = -ROUTE_MS  # long ago: they are fetched at first use
        self._target: Offsets | None = None
        self._idle_until_ms = 0
        self._batch_ms: int | None = None
        self._reported: set[MessageQueue] = set()
        self._silent: set[MessageQueue] = set()
        self._unknown: set[str] = set()
        self.available: Offsets = {}
        """The ends that were seen last, of all queues."""

    def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()

    def initial(self) -> Offsets:
        """Where a new stream begins. Raises ValueError, DataLossError, ClusterError."""
        options = self._options
        queues = self._queues(known=False)
        bound = options.starting or Bound()
        bound.check_known(queues, "startingOffsets")
        bounds = self._open().bounds(queues)
        starts = resolve(self._open(), bound, LATEST, bounds)
        for queue in queues:
            low, high = bounds[queue]
            wanted = QueueRange(queue, starts[queue], max(starts[queue], high))
            there = check_loss(self._open(), wanted, (low, high), options)
            starts[queue] = min(there.begin, there.end)
        return starts

    def aim(self) -> None:
        """From now on nothing is offered that is not there already."""
        self._target = {queue: high for queue, (_, high) in self._bounds(whole=True).items()}

    def next_end(self, start: Offsets, most: int) -> Offsets:
        """How far the batch after `start` goes: `start` itself if there is nothing to read.

        `most`: offsets at most, 0 for all. Raises DataLossError, ClusterError.
        """
        time.sleep(max(0, self._idle_until_ms - boot_ms()) / 1000)
        ends = self._ends(start)
        base = {queue: offset if offset <= ends[queue] else 0 for queue, offset in start.items()}
        ranges = ranges_between(start, ends)
        self._idle_until_ms = boot_ms() + IDLE_MS  # unless this becomes a batch
        if self._waits_for_more(sum(map(len, ranges))):
            return dict(start)
        if most and sum(map(len, ranges)) > most:
            ends = fair_end(base, ends, most)
        if ranges:
            self._idle_until_ms, self._batch_ms = 0, boot_ms()
        # A queue without a message yet is no news.
        return {queue: end for queue, end in ends.items() if end or queue in start}

    def _waits_for_more(self, offsets: int) -> bool:
        """Whether so few are no batch yet. The first batch of a run never waits, as with Kafka; nor
        does a stream that ends with what is there: it would end without them."""
        options = self._options
        if offsets >= options.offsets_per_trigger_min:
            return False
        if self._batch_ms is None or self._target is not None:
            return False
        return boot_ms() - self._batch_ms < options.trigger_delay_max_ms

    def tasks(self, start: Offsets, end: Offsets) -> list[TopicTask]:
        """What a batch reads; the same for the same offsets."""
        ranges = ranges_between(start, end)
        clusters = {n: at for route in self._route(known=True) for n, at in route.clusters.items()}
        return self._read.tasks(ranges, clusters)

    # -- the cluster ----------------------------------------------------------------------------

    def _open(self) -> LiveCluster:
        if self._cluster is None:
            self._cluster = self._read.connect()
        return self._cluster

    def _route(self, *, known: bool) -> Sequence[TopicRoute]:
        if boot_ms() - self._routes_ms >= ROUTE_MS:
            self._routes = self._open().routes(self._options.topics, known=known)
            self._routes_ms = boot_ms()
        return self._routes

    def _queues(self, *, known: bool) -> list[MessageQueue]:
        return [queue for route in self._route(known=known) for queue in route.subscribe_queues]

    def _bounds(
        self, *, some: bool = False, whole: bool = False
    ) -> dict[MessageQueue, tuple[int, int]]:
        """`some`: without those of silent groups, which are in `_silent` then."""
        queues = self._queues(known=True)
        bounds = self._open().bounds(queues, some=some, whole=whole)
        silent = {queue for queue in queues if queue not in bounds}
        for name in sorted({queue.broker_name for queue in silent - self._silent}):
            log.warning("group_silent broker_name=%s: its queues are passed over for now", name)
        self._silent = silent
        self.available |= {queue: high for queue, (_, high) in bounds.items()}
        return bounds

    def _ends(self, start: Offsets) -> Offsets:
        """The end of what each queue has to read; below its start if it was created again."""
        # A stream that is to end with what was there must not end without a silent group's.
        may_pass = self._options.pass_over_silent and self._target is None
        self._await_groups(start, may_pass)
        bounds = self._bounds(some=may_pass)
        if self._target is not None:  # of a group that no name server named when it was set
            self._target = {q: high for q, (_, high) in bounds.items() if q in start} | self._target
        brokers = {name for route in self._routes for name in route.brokers}
        ends: Offsets = {}
        for queue in sorted(start.keys() | bounds.keys()):
            begin = start.get(queue, 0)
            if queue in bounds:
                low, high = bounds[queue]
                if begin < low:
                    why = EXPIRED if queue in start else BEFORE_IT_WAS_SEEN
                    self._tell(Loss(QueueRange(queue, begin, high), low, high, why))
                ends[queue] = self._end(queue, begin, high)
                continue
            ends[queue] = begin
            if queue.broker_name in brokers and begin and queue not in self._silent:
                gone = QueueRange(queue, begin, begin)
                self._tell(Loss(gone, 0, 0, "the topic has this queue no more"))
        return ends

    def _await_groups(self, start: Offsets, may_pass: bool) -> None:
        """Waits for broker groups of the checkpoint that no name server names: all of their brokers
        are down, or the name server has just begun. Raises ClusterError if that stays so.

        What is to be lost anyhow, or may be left out, is not waited for.
        """
        options = self._options
        deadline_ms = boot_ms() + options.operation_timeout_ms
        while True:
            routes = self._route(known=True)
            named = {name for route in routes for name in route.brokers}
            unknown = {queue.broker_name for queue in start} - named
            if not unknown or may_pass or not options.fail_on_data_loss:
                break
            if boot_ms() >= deadline_ms:
                raise ClusterError(
                    f"topic {', '.join(options.topics)}, broker group {', '.join(sorted(unknown))}:"
                    f" the checkpoint has offsets of it, and no name server has it (tried for "
                    f"{options.operation_timeout_ms} ms: option operationTimeout); start its "
                    "brokers. passOverSilentGroups=true continues without it until it is back, "
                    "failOnDataLoss=false also in a stream that ends by itself"
                )
            time.sleep(AGAIN_MS / 1000)
            self._routes_ms = -ROUTE_MS
        for name in sorted(unknown - self._unknown):
            log.warning("group_silent broker_name=%s: no name server has it", name)
        self._unknown = unknown

    def _end(self, queue: MessageQueue, begin: int, high: int) -> int:
        if high < begin:
            short = self._open().shortfall(queue, begin)
            if short is None:
                return begin
            self._tell(Loss(QueueRange(queue, begin, begin), *short, ENDS_BELOW))
            high = short[1]
        if self._target is not None:
            return min(high, max(begin, self._target.get(queue, begin))) if high >= begin else high
        return high

    def _tell(self, loss: Loss) -> None:
        """Raises DataLossError, or logs it once per queue."""
        if loss.wanted.queue not in self._reported:
            lose(loss, fails=self._options.fail_on_data_loss)
            self._reported.add(loss.wanted.queue)
