"""Which queues a member of a consumer group takes up and which it gives away. Pure.

Every member computes this for itself from the same sorted lists, so it must be total, disjoint and
the same arithmetic as Java's AllocateMessageQueueAveragely: Java and Python members of one group
share queues with each other. Safety does not rest on it: two members may hold a queue at once for a
moment, and then read its messages twice. Origin: RebalanceImpl.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batonmq.client.consumer.options import MessageModel
from batonmq.protocol.allocation import allocate_averagely
from batonmq.protocol.message import MessageQueue

_SHOWN = 64


@dataclass(frozen=True, slots=True)
class RebalancePlan:
    """`give_up` and `take_up` are ascending and disjoint."""

    give_up: tuple[MessageQueue, ...]
    take_up: tuple[MessageQueue, ...]

    def __str__(self) -> str:
        return f"take_up={_shown(self.take_up)} give_up={_shown(self.give_up)}"

    @property
    def changed(self) -> bool:
        return bool(self.give_up or self.take_up)


def _shown(queues: tuple[MessageQueue, ...]) -> str:
    more = f" and {len(queues) - _SHOWN} more" if len(queues) > _SHOWN else ""
    return f"{[str(queue) for queue in queues[:_SHOWN]]}{more}"


def plan_rebalance(
    held: Iterable[MessageQueue],
    queues: Sequence[MessageQueue],
    client_ids: Sequence[str] | None,
    own_id: str,
    model: MessageModel,
) -> RebalancePlan:
    """For one topic. `held`: what this member has of it now; `queues`: all that it has.

    `client_ids` None: no broker reported the members. A clustering consumer then keeps what it
    holds, as to give up all or to take all would be a guess.
    """
    held_now = set(held)
    if model is MessageModel.BROADCASTING:
        target = set(queues)
    elif client_ids is None:
        return RebalancePlan((), ())
    else:
        in_order = sorted(dict.fromkeys(queues))  # quick where a route gives them in order
        target = set(allocate_averagely(in_order, sorted(set(client_ids)), own_id))
    return RebalancePlan(
        give_up=tuple(sorted(held_now - target)), take_up=tuple(sorted(target - held_now))
    )
