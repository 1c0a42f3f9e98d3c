"""Which queues a member takes up and which it gives away. Pure.

Origin: RebalanceImpl. Fairness comes from every member sorting the same lists; safety does not:
two members may hold a queue at once for a moment, and then read its messages twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batonmq.allocate import allocate_averagely
from batonmq.consume_types import MessageModel
from protocol.message import MessageQueue


@dataclass(frozen=True, slots=True)
class RebalancePlan:
    """`give_up` and `take_up` are ascending and disjoint."""

    give_up: tuple[MessageQueue, ...]
    take_up: tuple[MessageQueue, ...]

    @property
    def changed(self) -> bool:
        return bool(self.give_up or self.take_up)


def plan_rebalance(
    held: Iterable[MessageQueue],
    queues: Sequence[MessageQueue],
    client_ids: Sequence[str] | None,
    own_id: str,
    model: MessageModel,
) -> RebalancePlan:
    """For one topic. `held`: what this member has of it now; `queues`: all that it has.

    `client_ids` None means that no broker told the members: then a clustering consumer keeps what
    it holds, as giving up or taking everything would both be guesses.
    """
    held_now = set(held)
    if model is MessageModel.BROADCASTING:
        target = set(queues)
    elif client_ids is None:
        return RebalancePlan((), ())
    else:
        target = set(allocate_averagely(sorted(set(queues)), sorted(set(client_ids)), own_id))
    return RebalancePlan(
        give_up=tuple(sorted(held_now - target)), take_up=tuple(sorted(target - held_now))
    )
