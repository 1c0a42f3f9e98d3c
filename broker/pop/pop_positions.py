"""Where each group pops next, ahead of its committed offset. Pure."""

from dataclasses import dataclass

from batonmq.broker.pop.pop_table import Key
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager


@dataclass(slots=True, eq=False)
class Taken:
    """The group has popped up to `next_offset`; `pending` records of these pops are unconfirmed.
    `committed`: the group's offset when it was last read."""

    next_offset: int
    committed: int
    pending: int = 0


class PopPositions:
    """Where each group pops next, ahead of its committed offset. That is committed when the pop is
    confirmed, not before (R30); until then only this master knows the position."""

    def __init__(self, offsets: ConsumerOffsetManager) -> None:
        self._offsets = offsets
        self._taken: dict[Key, Taken] = {}

    def clear(self) -> None:
        self._taken.clear()

    def forget(self, key: Key) -> None:
        """After a reset: pops before it no longer move the offset."""
        self._taken.pop(key, None)

    def require_place(self, key: Key) -> None:
        """Raises BrokerRefusal if the group may begin in no further queue (R58)."""
        if (refusal := self._offsets.no_place(*key)) is not None:
            raise refusal

    def next_of(self, key: Key) -> int:
        """The next offset to pop; -1 if the group has none."""
        taken = self._current(key)
        return self._offsets.query(*key) if taken is None else taken.next_offset

    def _current(self, key: Key) -> Taken | None:
        taken = self._taken.get(key)
        # A reset or a pulling consumer has set the group's offset since: that one counts.
        if taken is not None and taken.committed != self._offsets.query(*key):
            del self._taken[key]
            return None
        return taken

    def take(self, key: Key, next_offset: int) -> Taken:
        """A record was put by which all messages below `next_offset` are in flight."""
        taken = self._current(key)
        if taken is None:
            taken = self._taken[key] = Taken(next_offset, self._offsets.query(*key))
        taken.next_offset = next_offset
        taken.pending += 1
        return taken

    def confirmed(self, key: Key, taken: Taken, next_offset: int, *, ok: bool) -> None:
        """The record of `take` is confirmed; not `ok`: its outcome is unknown, it may still be
        confirmed."""
        taken.pending -= 1
        if not ok or self._current(key) is not taken:
            return
        # While later pops are unconfirmed, commit only up to this one (R30).
        self._offsets.commit(*key, next_offset if taken.pending else taken.next_offset)
        taken.committed = self._offsets.query(*key)
        if not taken.pending:
            del self._taken[key]

    def skip(self, key: Key, next_offset: int) -> None:
        """No message below `next_offset` matches the group's filter."""
        taken = self._current(key)
        if taken is None:
            self._offsets.commit(*key, next_offset)
        else:
            taken.next_offset = next_offset
