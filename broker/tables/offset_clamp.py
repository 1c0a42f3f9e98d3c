"""Corrects offsets of consumer groups that point to messages which are gone.

An unclean election cuts acknowledged messages (R44). Groups may have consumed messages that the new
master lacks, and would skip the new messages that get those offsets. So a new master lowers each
such offset to the end of its queue before it takes a write. A replica that cuts its log, or starts
with a suspect one, does so with its own table (`OffsetClamp`). The progress of delay levels and
timers is lowered as well.

A topic that is deleted and created again has new queues, and its offsets are deleted with it (R39).
In both cases consumers may still have an old offset: they may not commit it, and a pull from there
continues at the group's offset.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from batonmq.broker.role_gate import GateClosedError, RoleGate
from batonmq.broker.tables.broker_tables import BrokerTables
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.role_view import RoleView
from batonmq.protocol.topic_name import (
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TRANS_GROUP,
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
)
from batonmq.runtime.turns import in_turns
from batonmq.store.message_store import MessageStore


class OffsetClamp:
    """`store` has the ends of the queues."""

    def __init__(self, tables: BrokerTables, store: MessageStore) -> None:
        self._offsets = tables.offsets
        self._delays = tables.delays
        self._store = store

    async def for_view(self, view: RoleView) -> int:
        """Before a role is taken: how many offsets were lowered; 0 unless the table is older than
        the last unclean election."""
        # Table and epoch are in one file, so after a crash this is either done or repeated.
        if not view.unclean_epoch or self._offsets.master_epoch >= view.unclean_epoch:
            return 0
        self._read_transactions_again()
        return await self.run()

    def of_suspect_log(self) -> None:
        """At a start, in a thread: the log may have lost its end."""
        # After a power failure, say: tables are synced by themselves, so they may have the effects
        # of messages that were not. New messages will get those offsets.
        self._read_transactions_again()
        for _ in self._lowered():
            pass

    def _read_transactions_again(self) -> None:
        # The op of an ended transaction may have been cut: its half message, which is below the
        # progress, would never be checked.
        for topic in (TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC):
            if self._offsets.query(TRANS_GROUP, topic, 0) > 0:
                self._offsets.commit(TRANS_GROUP, topic, 0, 0)

    async def run(self) -> int:
        """Lowers every offset above the end of its queue, some of the table in each turn; returns
        how many."""
        count = 0
        async for queues in in_turns(self._lowered()):
            count += queues
        return count

    def _lowered(self) -> Iterator[int]:
        """One `topic@group` a step: in how many queues its offset was lowered."""
        self._delays.clamp(
            lambda level: queue_end(self._store, SCHEDULE_TOPIC, level - 1),
            queue_end(self._store, TIMER_TOPIC, 0),
        )
        self._offsets.log_ends(self._store.max_phy_offset)
        yield from self._offsets.clamped(partial(queue_end, self._store))


class PositionReport(NamedTuple):
    """A consumer's report: its group continues at `offset` in this queue."""

    group: str
    topic: str
    queue_id: int
    offset: int


def commit_refusal(
    gate: RoleGate, store: MessageStore, offsets: ConsumerOffsetManager, progress: PositionReport
) -> BrokerRefusal | None:
    """Why a master does not accept this progress of a group, None if it does."""
    # A master that is cut off, or stops, would lose it: no slave fetches it, and the offsets of the
    # next master replace it (R31).
    if gate.refusal is not None and not gate.takes_offsets:
        return GateClosedError(gate.refusal)
    group, topic, queue_id, offset = progress
    # After an unclean election or a deletion an offset above the end points to a message that is
    # gone. With it the group would skip the message that gets this offset next (R44, R39).
    may_be_gone = gate.after_unclean or offsets.was_deleted(topic)
    if may_be_gone and offset > (end := queue_end(store, topic, queue_id)):
        why = f"above its end, {end}: it is of messages that are gone"
    elif offsets.is_old(group, topic, queue_id, offset, store.queries.min_offset_in_queue):
        why = "of a topic that was deleted: ask where to begin in the one made again"
    else:
        return offsets.no_place(group, topic, queue_id)
    what = f"offset {offset} of {topic} queue {queue_id} is {why}"
    return BrokerRefusal(ResponseCode.INVALID_PARAMETER, what)


def where_reset(gate: RoleGate, offsets: ConsumerOffsetManager, pull: PositionReport) -> int | None:
    """Where a pull must continue while a reset runs; None: at its own offset. A pull from the
    reset's offset, at the master, ends the reset (R56)."""
    group, topic, queue_id, offset = pull
    if not offsets.resets.runs(group, topic, queue_id):
        return None
    target = offsets.query(group, topic, queue_id)
    # On a slave the reset continues: its end comes with the master's offsets.
    if offset == target and (gate.is_master or gate.is_acting):
        offsets.resets.finish(f"{topic}@{group}", queue_id)
        return None
    return target


def next_pull_offset(gate: RoleGate, corrected: int, committed: int) -> int:
    """The next offset for a pull from above the queue's end: that end. After an unclean election it
    is the group's committed offset, so that the group gets what came after the cut (R44)."""
    return min(corrected, committed) if gate.after_unclean and committed >= 0 else corrected


def queue_end(store: MessageStore, topic: str, queue_id: int) -> int:
    """One past the last message that the log has of a queue."""
    queries = store.queries
    return max(
        queries.next_offset_in_queue(topic, queue_id), queries.max_offset_in_queue(topic, queue_id)
    )
