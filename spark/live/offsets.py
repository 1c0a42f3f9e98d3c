"""Queue offsets: as a checkpoint and as options have them, and ranges of them. Pure.

The checkpoint's form, version 1: `{"version": 1, "topics": {topic: {broker: {queueId: offset}}}}`.
An offset is the next one to be read. A queue that is not named begins at 0. Names are in order, so
that equal offsets are equal texts.

A range, once planned, always means the same messages: offsets are given once, and consumers see
none that a failover could take back. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from batonmq.protocol.codes import LONG_MAX
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageQueue
from batonmq.spark.read.selection import OFFSETS_FORM
from batonmq.spark.read.storage import even_parts, gather

VERSION: Final = 1

Offsets = dict[MessageQueue, int]
_Stored = dict[str, dict[str, dict[int, Annotated[int, msgspec.Meta(ge=0, le=LONG_MAX)]]]]


def to_checkpoint(offsets: Mapping[MessageQueue, int]) -> dict[str, Any]:
    """The form in which a checkpoint keeps them."""
    topics: dict[str, dict[str, dict[str, int]]] = {}
    for queue in sorted(offsets):
        brokers = topics.setdefault(queue.topic, {})
        brokers.setdefault(queue.broker_name, {})[str(queue.queue_id)] = offsets[queue]
    return {"version": VERSION, "topics": topics}


def from_checkpoint(raw: Mapping[str, Any], topics: Iterable[str]) -> Offsets:
    """What `to_checkpoint` made. Raises ValueError for another version, form, or set of topics."""
    version = raw.get("version") if isinstance(raw, Mapping) else None
    if version != VERSION:
        raise ValueError(
            f"the checkpoint's offsets have version {version!r}; this program reads version "
            f"{VERSION}: begin with a new checkpoint"
        )
    try:
        stored = msgspec.convert(raw.get("topics"), _Stored, str_keys=True)
    except msgspec.ValidationError:
        raise ValueError(
            f"the checkpoint's offsets are not of the form {OFFSETS_FORM}: {raw}; begin with a new "
            "checkpoint"
        ) from None
    found = {
        MessageQueue(topic, broker, queue_id): offset
        for topic, brokers in stored.items()
        for broker, queues in brokers.items()
        for queue_id, offset in queues.items()
    }
    wanted = set(topics)
    gone = sorted({queue.topic for queue in found} - wanted)
    if gone:
        raise ValueError(
            f"the checkpoint has offsets of topic {', '.join(gone)}, which option topic does not "
            f"name ({', '.join(sorted(wanted))}): name it again, or begin with a new checkpoint"
        )
    return found


# Ranges of fewer offsets than this share a task: starting one costs more than reading them.
SMALL: Final = 2000


@dataclass(frozen=True, slots=True)
class QueueRange:
    """Queue offsets [begin, end)."""

    queue: MessageQueue
    begin: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.begin)

    def cut(self, begin: int, end: int) -> QueueRange:
        """What of it lies in [begin, end)."""
        return QueueRange(self.queue, max(self.begin, begin), min(self.end, end))


class DataLossError(BatonError):
    """Requested messages are not there (any more)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Of the requested [begin, end) the queue holds only what lies in [low, high)."""

    wanted: QueueRange
    low: int
    high: int
    why: str

    def __str__(self) -> str:
        queue = self.wanted.queue
        return (
            f"topic {queue.topic}, broker {queue.broker_name}, queue {queue.queue_id}: requested "
            f"offsets [{self.wanted.begin}, {self.wanted.end}), available are [{self.low}, "
            f"{self.high}): {self.why}"
        )

    def error(self) -> DataLossError:
        return DataLossError(
            f"{self}; set failOnDataLoss=false to continue with what there is, or begin with other "
            "offsets (a new checkpoint)"
        )


EXPIRED: Final = "the messages before have expired"
BEFORE_IT_WAS_SEEN: Final = (
    "the stream has not seen this queue before, and its first messages have expired"
)
ENDS_BELOW: Final = "the queue ends below, as after its topic was deleted and created again"
GONE: Final = "the log behind these offsets is gone"


def loss_of(wanted: QueueRange, low: int, high: int) -> Loss | None:
    """What a queue that holds [low, high) lacks of a range; None if nothing.

    An empty range lacks something only if even its beginning lies behind the queue's end.
    """
    if max(wanted.begin, wanted.end) > high:
        return Loss(wanted, low, high, ENDS_BELOW)
    if len(wanted) and wanted.begin < low:
        return Loss(wanted, low, high, EXPIRED)
    return None


def ranges_between(start: Mapping[MessageQueue, int], end: Offsets) -> list[QueueRange]:
    """What lies between two offsets, by queue in order.

    A queue that `start` does not name begins at 0. So does one that ends below its start: it was
    found to have been created again, and failOnDataLoss is false (else no such end is planned).
    """
    found = []
    for queue in sorted(end):
        begin = start.get(queue, 0)
        found.append(QueueRange(queue, begin if begin <= end[queue] else 0, end[queue]))
    return [each for each in found if len(each)]


def share_out(ranges: Iterable[QueueRange], most: int = 0) -> list[tuple[QueueRange, ...]]:
    """The ranges of each task: none of more than `most` offsets (0: no limit), small ones together.

    The same ranges are always shared out in the same way.
    """
    parts = [
        QueueRange(each.queue, low, high)
        for each in sorted(ranges, key=len)
        for low, high in even_parts(each.begin, each.end, -(-len(each) // most) if most else 1)
    ]
    return gather(parts, len, min(SMALL, most) if most else SMALL)


def fair_end(start: Mapping[MessageQueue, int], ends: Offsets, most: int) -> Offsets:
    """Ends so near that at most `most` offsets lie before them.

    Every queue with a backlog gets the same share; what a short one leaves over goes to the
    others. The last few that cannot be shared go to the queues with the longest backlog.
    """
    backlog = {queue: max(0, ends[queue] - start.get(queue, 0)) for queue in ends}
    granted = dict.fromkeys(backlog, 0)
    left = most
    waiting = sorted(backlog, key=lambda queue: (backlog[queue], queue))
    for position, queue in enumerate(waiting):
        share = left // (len(waiting) - position)
        granted[queue] = min(backlog[queue], share)
        left -= granted[queue]
    return {queue: start.get(queue, 0) + granted[queue] for queue in ends}
