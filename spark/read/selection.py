"""Which messages a read wants, by its options: topics, queues, times, queue offsets.

The reader alone decides: Spark does not see these options, so they hold exactly. Free of Spark.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batonmq.protocol.codes import LONG_MAX
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.properties import TAGS
from batonmq.protocol.records.columns import Bools, Int64s, Records
from batonmq.spark.read.columns import binaries, texts
from batonmq.spark.read.message_columns import split_properties

LOW: Final = -(2**63)
HIGH: Final = 2**63 - 1
EARLIEST: Final = "earliest"
LATEST: Final = "latest"
_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST, "-2": EARLIEST, "-1": LATEST}
OFFSETS_FORM: Final = '{"topic": {"broker": {"queueId": offset}}}'
Place = int | str
"""An offset, or one of the words EARLIEST and LATEST."""
_Word = Annotated[str, msgspec.Meta(pattern=rf"(?i)^({'|'.join(_WORDS)})\Z")]
_Given = Annotated[int, msgspec.Meta(ge=-2, le=LONG_MAX)] | _Word
_Places = dict[str, dict[str, dict[Annotated[int, msgspec.Meta(ge=0)], _Given]]]


@dataclass(frozen=True, slots=True)
class Bound:
    """Where a read begins or ends: at a time (wall clock ms), or at a place per queue.

    What `queues` lack is read from where the default is.
    """

    time_ms: int | None = None
    everywhere: str | None = None
    queues: Mapping[MessageQueue, Place] = field(default_factory=dict)

    def place(self, queue: MessageQueue, default: Place) -> Place:
        """The place given for one queue, else `default`."""
        return self.queues.get(queue, self.everywhere or default)

    def check_known(self, queues: Sequence[MessageQueue], option: str) -> None:
        """Raises ValueError if a place is given for a queue that is not there."""
        strange = [str(queue) for queue in sorted(set(self.queues) - set(queues))]
        if strange:
            raise ValueError(
                f"{option} names {', '.join(strange)}; there are "
                f"{', '.join(map(str, queues)) or 'no queues'}"
            )


def parse_bound(text: str, option: str, topics: Sequence[str]) -> Bound:
    """`earliest`, `latest`, or JSON {topic: {broker: {queueId: place}}}; a place is an offset,
    `earliest` (-2) or `latest` (-1). `topics`: those that may be named; empty: any.

    Raises ValueError that names the option.
    """
    word = _WORDS.get(text.lower())
    if word is not None:
        return Bound(everywhere=word)
    try:
        given = msgspec.json.decode(text, type=_Places)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{option}={text!r}: it must be earliest, latest, or JSON {OFFSETS_FORM} with offsets "
            f"from 0 on, earliest (-2) or latest (-1): {error}"
        ) from None
    if topics and (others := sorted(given.keys() - set(topics))):
        raise ValueError(
            f"{option} names topic {others[0]}, option topic has {', '.join(topics)}: name it there"
        )
    return Bound(
        queues={
            MessageQueue(topic, broker, queue_id): _WORDS.get(str(place).lower(), place)
            for topic, brokers in given.items()
            for broker, queues in brokers.items()
            for queue_id, place in queues.items()
        }
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers from `low` to `high`, both included."""

    low: int = LOW
    high: int = HIGH

    @property
    def is_all(self) -> bool:
        return self.low == LOW and self.high == HIGH

    def holds(self, values: Int64s) -> Bools:
        return np.asarray((values >= self.low) & (values <= self.high))


@dataclass(frozen=True, slots=True)
class Selection:
    """None, an empty pattern, an unbounded span, a bound without a place: no condition.

    `pattern` must match the whole topic. Store times are ms. `starting` is included, `ending` not.
    """

    topics: frozenset[str] | None = None
    pattern: str = ""
    queue_ids: frozenset[int] | None = None
    tags: frozenset[str] | None = None
    store_ms: Span = Span()
    starting: Bound = Bound()
    ending: Bound = Bound()

    def wants_topic(self, topic: str) -> bool:
        if self.topics is not None and topic not in self.topics:
            return False
        return not self.pattern or re.fullmatch(self.pattern, topic) is not None

    def wants_queue(self, topic: str, queue_id: int) -> bool:
        return self.wants_topic(topic) and (self.queue_ids is None or queue_id in self.queue_ids)

    def queue_offsets(self, queue: MessageQueue) -> Span:
        """The wanted offsets of one queue. Of files, `latest` is behind all that they hold."""
        ends = {EARLIEST: LOW, LATEST: HIGH}
        low, high = self.starting.place(queue, EARLIEST), self.ending.place(queue, LATEST)
        first, behind = ends.get(str(low), low), ends.get(str(high), high)
        assert isinstance(first, int) and isinstance(behind, int)
        return Span(first, behind if behind == HIGH else behind - 1 if behind > LOW else LOW)

    def rows(self, window: bytes, records: Records, broker: str = "") -> Records:
        """The wanted records of a window of a store of `broker`; cheap conditions come first."""
        wanted = np.ones(len(records), np.bool_)
        if self.queue_ids is not None:
            wanted &= np.isin(records.queue_id, np.array(sorted(self.queue_ids), np.int64))
        if not self.store_ms.is_all:
            wanted &= self.store_ms.holds(records.store_ms)
        if not wanted.all():
            records = records.keep(wanted)
        bounds = self.starting, self.ending
        if bounds != (Bound(), Bound()) or self.topics is not None or self.pattern:
            topics = texts(binaries(window, records.topic_at, records.topic_length))
            records = records.keep(self._of_queues(topics, records, broker))
        if self.tags is not None and len(records):
            pairs = split_properties(window, records.properties_at, records.properties_length)
            tagged = pc.is_in(pairs.column(TAGS), pa.array(sorted(self.tags)))
            records = records.keep(tagged.to_numpy(zero_copy_only=False))
        return records

    def _of_queues(self, topics: pa.Array, records: Records, broker: str) -> Bools:
        """Which records have a wanted topic and queue offset."""
        named = topics.dictionary_encode()
        which, names = named.indices.to_numpy(), named.dictionary.to_pylist()
        wanted = np.array([self.wants_topic(name) for name in names], np.bool_)[which]
        other = self.queue_offsets(MessageQueue("", "", -1))
        within = other.holds(records.queue_offset)
        for queue in self.starting.queues.keys() | self.ending.queues.keys():
            if queue.broker_name == broker and queue.topic in names:
                mine = (which == names.index(queue.topic)) & (records.queue_id == queue.queue_id)
                within[mine] = self.queue_offsets(queue).holds(records.queue_offset[mine])
        return np.asarray(wanted & within)
