"""Computes which queues a group member takes up and which it gives up. Pure.

Each member computes its own share from the same sorted lists. All shares together must be all
queues, each once, so the arithmetic is that of Java's AllocateMessageQueueAveragely: a group may
have Java and Python members. For a moment two members may have the same queue and read its messages
twice. Origin: RebalanceImpl.
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
    """The plan for one topic. `held`: the queues that this member has; `queues`: all of the topic.

    `client_ids` None: no broker reported the members. A clustering consumer then keeps its queues:
    anything else would be a guess."""
    held_now = set(held)
    if model is MessageModel.BROADCASTING:
        target = set(queues)
    elif client_ids is None:
        return RebalancePlan((), ())
    else:
        in_order = sorted(dict.fromkeys(queues))  # usually in order already, so this is fast
        # Sets: a member that two brokers report counts once, else its share would be doubled.
        target = set(allocate_averagely(in_order, sorted(set(client_ids)), own_id))
    return RebalancePlan(
        give_up=tuple(sorted(held_now - target)), take_up=tuple(sorted(target - held_now))
    )
