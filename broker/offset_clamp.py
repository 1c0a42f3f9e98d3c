"""Offsets of consumer groups above the end of their queue, after acknowledged messages were cut.

Only an unclean election does that (SAFETY R44): groups had consumed what the new master lacks. Left
as they are, they would skip the new messages that get those offsets. So the new master sets each to
the end of its queue before it takes a write, and a replica that cuts its log does so with what its
own table still has of then. Consumers that hold such a position themselves may not commit it, and a
pull from there goes on where the group does.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from batonmq.broker.role_gate import GateClosedError, RoleGate
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.role_view import RoleView
from batonmq.store.consumer_offset import ConsumerOffsetManager
from batonmq.store.message_store import MessageStore

log = logging.getLogger(__name__)

STEPS_PER_TURN: Final = 256


class OffsetClamp:
    """`store` tells where the queues end."""

    def __init__(self, offsets: ConsumerOffsetManager, store: MessageStore) -> None:
        self._offsets = offsets
        self._store = store
        self.total = 0
        """How many offsets were lowered since the start."""

    async def for_view(self, view: RoleView) -> int:
        """Before a role is taken: how many offsets were lowered; 0 unless the table is from before
        the last unclean election. Table and epoch are one file: a crash leaves nothing out."""
        if not view.unclean_epoch or self._offsets.master_epoch >= view.unclean_epoch:
            return 0
        return await self.run()

    async def run(self) -> int:
        """Lowers what lies above the end of its queue, some of the table in each turn."""
        count = 0
        for step, lowered in enumerate(self._offsets.clamped(partial(queue_end, self._store)), 1):
            if lowered is not None:
                count += lowered.queues
                log.warning(
                    "consumer_offsets_clamped group=%s topic=%s queues=%d messages=%d",
                    lowered.group,
                    lowered.topic,
                    lowered.queues,
                    lowered.messages,
                )
            if step % STEPS_PER_TURN == 0:
                await asyncio.sleep(0)
        self.total += count
        return count


def commit_refusal(
    gate: RoleGate, store: MessageStore, topic: str, queue_id: int, offset: int
) -> BrokerRefusal | None:
    """Why a master does not take this progress of a group, None if it does.

    One that is cut off, or stops, would lose it: no slave fetches it, and a successor's offsets
    replace it (R31). After an unclean election an offset above the queue's end is of messages that
    are cut; kept, it would let the group skip those that come in their place (R44).
    """
    if gate.refusal is not None:
        return GateClosedError(gate.refusal)
    if not gate.after_unclean:
        return None
    end = queue_end(store, topic, queue_id)
    if offset <= end:
        return None
    return BrokerRefusal(
        ResponseCode.INVALID_PARAMETER,
        f"offset {offset} of {topic} queue {queue_id} is above its end, {end}: those messages were"
        " cut by an unclean election",
    )


def where_to_go_on(gate: RoleGate, corrected: int, committed: int) -> int:
    """The next offset for a pull from above the queue's end. Usually that end; after an unclean
    election what the group has committed, so that it gets what came after the cut (R44)."""
    return min(corrected, committed) if gate.after_unclean and committed >= 0 else corrected


def queue_end(store: MessageStore, topic: str, queue_id: int) -> int:
    """One past the last message that the log has of a queue."""
    queries = store.queries
    return max(
        queries.next_offset_in_queue(topic, queue_id), queries.max_offset_in_queue(topic, queue_id)
    )
