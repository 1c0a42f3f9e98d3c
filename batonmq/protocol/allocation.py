"""Divides the queues of a topic among a group's members. Pure. Each member computes its share from
the same lists, or a broker does it (QUERY_ASSIGNMENT, 400). Origin: Java
`AllocateMessageQueueAveragely`, `AllocateMessageQueueAveragelyByCircle`."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from batonmq.protocol.message import MessageQueue

Allocate = Callable[[Sequence[MessageQueue], Sequence[str], str], tuple[MessageQueue, ...]]
"""(sorted queues, sorted unique client ids, own id) -> the own queues; empty for a non-member."""


def place_of(client_ids: Sequence[str], own_id: str) -> int | None:
    """The index of `own_id` among sorted ids; None if it is missing."""
    place = bisect_left(client_ids, own_id)
    return place if place < len(client_ids) and client_ids[place] == own_id else None


def allocate_averagely(
    queues: Sequence[MessageQueue], client_ids: Sequence[str], own_id: str
) -> tuple[MessageQueue, ...]:
    """A consecutive share. With n queues and m members the first n mod m members get one more."""
    index = place_of(client_ids, own_id)
    if index is None:
        return ()
    share, rest = divmod(len(queues), len(client_ids))
    size = share + (1 if index < rest else 0)
    start = index * share + min(index, rest)
    return tuple(queues[start : start + size])


def allocate_by_circle(
    queues: Sequence[MessageQueue], client_ids: Sequence[str], own_id: str
) -> tuple[MessageQueue, ...]:
    """Every m-th queue, for m members."""
    index = place_of(client_ids, own_id)
    return () if index is None else tuple(queues[index :: len(client_ids)])


STRATEGIES: Final[Mapping[str, Allocate]] = {
    "AVG": allocate_averagely,
    "AVG_BY_CIRCLE": allocate_by_circle,
}
