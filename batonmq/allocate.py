"""How the members of a consumer group share a topic's queues. Pure.

Every member computes this for itself from the same sorted lists, so it must be total, disjoint and
the same arithmetic as Java's AllocateMessageQueueAveragely: Java and Python members of one group
share queues with each other.
"""

from collections.abc import Sequence

from protocol.message import MessageQueue


def allocate_averagely(
    queues: Sequence[MessageQueue], client_ids: Sequence[str], own_id: str
) -> tuple[MessageQueue, ...]:
    """The own consecutive share of `queues`, empty if `own_id` is not a member.

    `queues` and `client_ids` must be sorted and without repetition. With n queues and m members
    the first n mod m members get one queue more than the others.
    """
    if own_id not in client_ids:
        return ()
    index = client_ids.index(own_id)
    share, rest = divmod(len(queues), len(client_ids))
    size = share + (1 if index < rest else 0)
    start = index * share + min(index, rest)
    return tuple(queues[start : start + size])
