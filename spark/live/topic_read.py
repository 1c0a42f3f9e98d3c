"""One read of topics, without Spark: what there is to read on the driver, and reading on a task.

The columns of a stored record have the names and types of the table `messages`, and come from its
code. Two things differ: `body` is the plain body (a zlib-compressed one is inflated; what cannot be
stays as it is, and `sys_flag` has the compression), and there is no folder to name. Free of Spark.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.message import MessageQueue
from batonmq.spark.live.cluster import LiveCluster, lose
from batonmq.spark.live.offsets import ENDS_BELOW, Loss, Offsets, QueueRange, loss_of, share_out
from batonmq.spark.live.options import TopicOptions
from batonmq.spark.live.range_reader import TopicRangeReader
from batonmq.spark.read.columns import TOPIC, wanted_columns
from batonmq.spark.read.message_columns import message_batch, with_plain_bodies
from batonmq.spark.read.selection import EARLIEST, LATEST, Bound, Place, Selection
from batonmq.spark.read.store_facts import StoreFacts

_OPEN: Final = Bound()


@dataclass(frozen=True, slots=True)
class TopicTask:
    """What one Spark task reads. `clusters`: broker group -> its cluster, as far as known."""

    ranges: tuple[QueueRange, ...]
    clusters: dict[str, str]


@dataclass(frozen=True, slots=True)
class TopicRead:
    """A read of topics; it travels to the tasks."""

    options: TopicOptions

    @property
    def schema(self) -> pa.Schema:
        """Its columns. Raises ValueError for unknown ones."""
        columns = self.options.columns
        return wanted_columns("topic", TOPIC, columns) if columns else TOPIC

    def connect(self) -> LiveCluster:
        options = self.options
        return LiveCluster(
            options.name_servers,
            group=options.group,
            patience_ms=options.operation_timeout_ms,
            client_options=options.access.client_options(),
        )

    # -- planning -------------------------------------------------------------------------------

    def plan(self) -> list[TopicTask]:
        """The tasks of a batch read, their ranges fixed now.

        Raises ValueError for offsets of queues that are not there, DataLossError, ClusterError.
        """
        options = self.options
        with self.connect() as cluster:
            routes = cluster.routes(options.topics)
            queues = [queue for route in routes for queue in route.subscribe_queues]
            for bound, name in ((options.starting, "starting"), (options.ending, "ending")):
                (bound or _OPEN).check_known(queues, f"{name}Offsets")
            bounds = cluster.bounds(queues, whole=True)
            starts = resolve(cluster, options.starting or _OPEN, EARLIEST, bounds)
            ends = resolve(cluster, options.ending or _OPEN, LATEST, bounds)
            ranges = [QueueRange(queue, starts[queue], ends[queue]) for queue in queues]
            ranges = [check_loss(cluster, each, bounds[each.queue], options) for each in ranges]
            ranges = [each for each in ranges if len(each)]
            clusters = {name: at for route in routes for name, at in route.clusters.items()}
        return self.tasks(ranges, clusters)

    def tasks(self, ranges: Sequence[QueueRange], clusters: dict[str, str]) -> list[TopicTask]:
        """The ranges shared out over tasks."""
        shared = share_out(ranges, self.options.offsets_per_partition_max)
        return [TopicTask(part, clusters) for part in shared]

    # -- reading --------------------------------------------------------------------------------

    def run(self, task: TopicTask) -> Iterator[pa.RecordBatch]:
        """The batches of one task, in the order of each queue.

        Raises DataLossError, or ClusterError if nothing comes for `operation_timeout_ms`.
        """
        schema = self.schema
        wanted_tags = Selection(tags=frozenset(self.options.tags) or None)
        with self.connect() as cluster:
            for wanted in task.ranges:
                reader = TopicRangeReader(cluster.client, wanted, self.options)
                queue, known_end = wanted.queue, -1
                epochs: tuple[EpochEntry, ...] = ()
                while (window := cluster.run(reader.next_window())) is not None:
                    records = wanted_tags.rows(window.data, window.records)
                    if not len(records):
                        continue
                    end = int((records.physical_offset + records.size).max())
                    if "epoch" in schema.names and end > known_end:
                        # Behind the records: an older list might have the epoch of bytes that a
                        # failover cut and replaced.
                        epochs, known_end = cluster.epochs(queue, end), end
                    at = task.clusters.get(queue.broker_name)
                    facts = StoreFacts("", at, queue.broker_name, None, epochs, False, None)
                    batch = message_batch(window.data, records, facts, schema)
                    yield with_plain_bodies(batch, records.sys_flag)


def resolve(
    cluster: LiveCluster, bound: Bound, default: Place, bounds: dict[MessageQueue, tuple[int, int]]
) -> Offsets:
    """The offset of each queue that a bound means; `default` where it has none."""
    queues = list(bounds)
    if bound.time_ms is not None:
        return cluster.offsets_by_time(queues, bound.time_ms)
    found: Offsets = {}
    for queue, (low, high) in bounds.items():
        place = bound.place(queue, default)
        found[queue] = {EARLIEST: low, LATEST: high}[place] if isinstance(place, str) else place
    return found


def check_loss(
    cluster: LiveCluster, wanted: QueueRange, bounds: tuple[int, int], options: TopicOptions
) -> QueueRange:
    """The range, or what of it there is. Raises DataLossError if that is less and must not be."""
    low, high = bounds
    loss = loss_of(wanted, low, high)
    if loss is not None and loss.why == ENDS_BELOW:
        short = cluster.shortfall(wanted.queue, max(wanted.begin, wanted.end))
        if short is None:  # there, and not shown yet: the task waits for it
            loss = loss_of(wanted, low, max(wanted.begin, wanted.end))
        else:
            low, high = short
            loss = Loss(wanted, low, high, ENDS_BELOW)
    if loss is None:
        return wanted
    lose(loss, fails=options.fail_on_data_loss)
    return wanted.cut(low, high if loss.why == ENDS_BELOW else wanted.end)
