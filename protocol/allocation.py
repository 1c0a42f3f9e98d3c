"""How the queues of a topic are shared among the members of a group. Pure.

Every member computes the same from the same lists, or a broker does it for them (400).
Origin: Java `AllocateMessageQueueAveragely`, `AllocateMessageQueueAveragelyByCircle`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from batonmq.protocol.message import MessageQueue

Allocate = Callable[[Sequence[MessageQueue], Sequence[str], str], tuple[MessageQueue, ...]]
"""Given sorted queues, sorted client ids, both without repetition, and the own id: its queues,
empty if it is not a member."""


def allocate_averagely(
    queues: Sequence[MessageQueue], client_ids: Sequence[str], own_id: str
) -> tuple[MessageQueue, ...]:
    """A consecutive share. With n queues and m members the first n mod m members get one queue more
    than the others."""
    if own_id not in client_ids:
        return ()
    index = client_ids.index(own_id)
    share, rest = divmod(len(queues), len(client_ids))
    size = share + (1 if index < rest else 0)
    start = index * share + min(index, rest)
    return tuple(queues[start : start + size])


def allocate_by_circle(
    queues: Sequence[MessageQueue], client_ids: Sequence[str], own_id: str
) -> tuple[MessageQueue, ...]:
    """Every m-th queue, for m members."""
    if own_id not in client_ids:
        return ()
    return tuple(queues[client_ids.index(own_id) :: len(client_ids)])


STRATEGIES: Final[Mapping[str, Allocate]] = {
    "AVG": allocate_averagely,
    "AVG_BY_CIRCLE": allocate_by_circle,
}
