"""Reads the next messages of a group from the queues of a topic and of its retry topics.

One call looks at a bounded number of queues; a `Walk` remembers which are left.
Origin: Java `PopMessageProcessor.popMsgFromTopic`, `popMsgFromQueue`.
"""

import itertools
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from batonmq.broker.config import BrokerConfig
from batonmq.broker.consume.pull_request import MAX_REPLY_BYTES
from batonmq.broker.pop.pop_request import PopRequest
from batonmq.broker.pop.pop_service import PopService
from batonmq.broker.pop.pop_table import Key
from batonmq.broker.tables.offset_clamp import queue_end
from batonmq.broker.tables.topics import TopicService
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.layout import RECORD_HEAD
from batonmq.protocol.message_id import host_bytes, split_address
from batonmq.protocol.pop import ANY_QUEUE, NORMAL, RETRY_V1, RETRY_V2, PopHandle, real_topic
from batonmq.protocol.properties import (
    POP_CK,
    PROPERTIES_SIZE_MAX,
    with_properties,
)
from batonmq.protocol.records.codec import (
    Buffer,
    decode_record,
    encode_record,
    message_to_store,
)
from batonmq.protocol.topic_name import is_retry_or_dlq
from batonmq.store.message_store import MessageStore
from batonmq.store.reader import GetMessageResult

log = logging.getLogger(__name__)

BUDGET: Final = 256
"""Queues read per turn of the loop; a read without a match counts as `_READ_COST` queues."""
_READ_COST: Final = 64
_LEFT_COST: Final = 8  # of a queue whose messages are only counted
_RETRY_FIRST_PERCENT: Final = 20

_PLACE: Final = RECORD_HEAD.only("queue_offset", "physical_offset")


@dataclass(slots=True)
class QueueSlice:
    """Messages of one queue: those at `offsets`, all below `next_offset`."""

    key: Key
    flag: str
    offsets: list[int]
    next_offset: int
    last_phy: int
    body: bytes


@dataclass(slots=True)
class Walk:
    """The queues left to read, and what was found so far."""

    places: Iterator[tuple[str, int]]
    pop_time: int
    parts: list[QueueSlice] = field(default_factory=list)
    count: int = 0
    size: int = 0
    rest: int = 0
    """How many messages are left in the queues that were read."""
    is_over: bool = False
    cost: int = 0
    """In units of BUDGET."""
    damage: CorruptLogError | None = None
    """Of a queue that could not be read."""


class PopReader:
    """Reads for pops. Its only change: it moves a group's position past messages that do not
    match."""

    def __init__(
        self,
        store: MessageStore,
        topics: TopicService,
        service: PopService,
        config: BrokerConfig,
        *,
        has_users: bool,
    ) -> None:
        self._has_users = has_users
        self._store = store
        self._topics = topics
        self._service = service
        self._broker_name = config.broker_name
        self._random = random.Random()

    def walk(self, pop: PopRequest) -> Walk:
        """Begins a walk over the queues, for `read_more`."""
        return Walk(self._places(pop), self._service.now_ms())

    def _places(self, pop: PopRequest) -> Iterator[tuple[str, int]]:
        """(flag, queue id) to read. Retry topics are first in one of five requests, else last; an
        orderly POP reads none."""
        retries: list[tuple[str, int]] = []
        if not pop.order and not is_retry_or_dlq(pop.topic):
            # `%RETRY%a_b` is also the retry topic of a group `a_b`, or POP's of other names. What
            # they have there, this group need not be allowed to see. While they exist, this broker
            # writes nothing there for this group.
            topics = self._topics
            shares_v1 = self._has_users and (
                f"{pop.group}_{pop.topic}" in topics.groups
                or topics.has_namesake(pop.group, pop.topic)
            )
            retries = [
                (flag, queue_id)
                for flag in ((RETRY_V2,) if shares_v1 else (RETRY_V1, RETRY_V2))
                if (config := topics.get(real_topic(flag, pop.topic, pop.group)))
                for queue_id in range(config.read_queue_nums)
            ]
        # Always first, failing messages would starve new ones; always last, they would wait as long
        # as new ones arrive.
        retry_first = self._random.randrange(100) < _RETRY_FIRST_PERCENT
        if retry_first:
            yield from retries
        if pop.queue_id != ANY_QUEUE:
            yield NORMAL, pop.queue_id
        elif (config := self._topics.get(pop.topic)) is not None:
            queues = config.read_queue_nums
            # Begin anywhere, or all consumers of a group would compete for the first queues.
            start = self._random.randrange(queues) if queues else 0
            for queue_id in range(queues):
                yield NORMAL, (start + queue_id) % queues
        if not retry_first:
            yield from retries

    def read_more(self, pop: PopRequest, walk: Walk, *, peek: bool = False) -> None:
        """Reads more queues, until there are enough messages. Raises CorruptLogError if a queue
        cannot be read and the others have none."""
        end = walk.cost + BUDGET
        # Also when there are enough: what the other queues have counts as left.
        while walk.cost < end:
            place = next(walk.places, None)
            if place is None:
                walk.is_over = True
                if walk.damage is not None and not walk.parts:
                    raise walk.damage
                return
            try:
                walk.cost += self._read_queue(pop, walk, *place, peek=peek)
            except CorruptLogError as error:
                # Its messages wait for a repair, those of the other queues do not.
                log.error("queue_not_popped file=%s offset=%d", error.file, error.offset)
                walk.damage = error
                walk.cost += _READ_COST
        # With messages the reply leaves now; without, the next turn continues.
        walk.is_over = walk.count > 0

    def has_more(self, pop: PopRequest, walk: Walk) -> bool:
        """For a notification: whether a queue has messages beyond the group's position."""
        for _ in range(BUDGET):
            walk.cost += 1
            place = next(walk.places, None)
            if place is None:
                walk.is_over = True
                return False
            key = pop.group, real_topic(place[0], pop.topic, pop.group), place[1]
            if self._is_blocked(pop, key):
                continue
            if self._begin(pop, key) < self._store.queries.max_offset_in_queue(*key[1:]):
                walk.is_over = True
                return True
        return False

    def _is_blocked(self, pop: PopRequest, key: Key) -> bool:
        service = self._service
        return pop.order and service.table.is_blocked(key, pop.attempt, service.now_ms())

    def _read_queue(
        self, pop: PopRequest, walk: Walk, flag: str, queue_id: int, *, peek: bool
    ) -> int:
        """Reads one queue; returns the cost in units of BUDGET."""
        key = pop.group, real_topic(flag, pop.topic, pop.group), queue_id
        _, topic, _ = key
        begin, end = self._begin(pop, key), self._store.queries.max_offset_in_queue(*key[1:])
        if begin >= end or self._is_blocked(pop, key):
            return 1
        is_full = walk.count >= pop.max_num or walk.size >= MAX_REPLY_BYTES
        if is_full or topic in self._store.deleting_topics:
            walk.rest += end - begin
            return _LEFT_COST
        # Retried messages passed the filter when they were first popped.
        wanted, matches = (pop.wanted, pop.matches) if flag == NORMAL else (None, None)
        cost = 1
        while begin < end and cost <= BUDGET:
            found = self._store.queries.get_message(
                topic,
                queue_id,
                begin,
                pop.max_num - walk.count,
                MAX_REPLY_BYTES - walk.size,
                wanted,
                matches,
            )
            if walk.parts and walk.size + found.size > MAX_REPLY_BYTES:
                # A read returns at least one message, which may be too large for this reply.
                walk.rest += end - begin
                return cost
            if found.message_count:
                part = self._part(pop, walk.pop_time, key, flag, found)
                walk.parts.append(part)
                walk.count += found.message_count
                walk.size += len(part.body)
                walk.rest += max(0, end - part.next_offset)
                return cost
            if found.next_begin_offset <= begin:
                return cost
            begin = found.next_begin_offset
            # Messages that do not match are never read again for this group.
            if not peek:
                self._service.positions.skip(key, begin)
            cost += _READ_COST
        if begin < end and not peek:
            # Not at the end of this queue: the next turn continues here.
            walk.places = itertools.chain(((flag, queue_id),), walk.places)
        return cost

    def _begin(self, pop: PopRequest, key: Key) -> int:
        """Where the group continues; corrects a position outside the queue."""
        queries = self._store.queries
        position = self._service.positions.next_of(key)
        least = queries.min_offset_in_queue(*key[1:])
        if position < 0:
            if key[1] == pop.topic:  # its retried messages are few
                self._service.positions.require_place(key)
            # As in Java: a group that is to begin at the end of a queue that is still in memory has
            # all of it. The first messages of a new topic may be there before its group is.
            if not pop.from_max or key[1] != pop.topic or queries.begins_in_memory(*key[1:]):
                return least
            position = max(least, queries.max_offset_in_queue(*key[1:]) - 1)
            self._service.positions.skip(key, position)
        if position <= least:
            return least
        return min(position, queue_end(self._store, *key[1:]))

    def _part(
        self, pop: PopRequest, pop_time: int, key: Key, flag: str, found: GetMessageResult
    ) -> QueueSlice:
        records: Sequence[Buffer] = found.parts
        places = [_PLACE.unpack_from(record) for record in records]
        offsets = [offset for offset, _ in places]
        if flag != NORMAL:
            handle = PopHandle(
                offsets[0], pop_time, pop.invisible_ms, 0, flag, self._broker_name, key[2], 0
            )
            records = [
                _as_of_topic(record, pop.topic, handle._replace(queue_offset=offset))
                for record, offset in zip(records, offsets, strict=True)
            ]
        data = b"".join(records)
        return QueueSlice(key, flag, offsets, found.next_begin_offset, places[-1][1], data)


def _as_of_topic(record: Buffer, topic: str, handle: PopHandle) -> bytes:
    """A retried message as the consumer sees it: with the subscribed topic and a handle."""
    place, message = decode_record(record, read_body=False), message_to_store(record)
    own = {POP_CK.encode(): handle.encode().encode()}
    properties = with_properties(message.properties, own)
    while len(properties) > PROPERTIES_SIZE_MAX:  # an older broker left no space for the handle
        pairs = properties.split(b"\x02")
        longest = max((pair for pair in pairs if not pair.startswith(b"POP_CK\x01")), key=len)
        name = longest.partition(b"\x01")[0]
        log.warning("property_left_out topic=%s handle=%s name=%r", topic, handle, name[:64])
        pairs.remove(longest)
        properties = b"\x02".join(pairs)
    message.properties = properties
    return encode_record(
        message,
        topic.encode(),
        place.queue_offset,
        place.physical_offset,
        place.store_timestamp,
        host_bytes(*split_address(place.store_host)),
        append_prop_crc=False,
    )
