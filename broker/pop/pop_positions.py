"""Where a group goes on popping: its consumer offset, and what is taken beyond it.

The offset is committed when what was taken up to there is confirmed to be in flight, and not before
(R30); until then this master knows better. Whoever else sets the offset (a reset, a consumer that
pulls) is followed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from batonmq.broker.pop.pop_records import Key
from batonmq.store.consumer_offset import ConsumerOffsetManager


@dataclass(slots=True, eq=False)
class Taken:
    """Taken up to `next_offset`, in `pending` writes that are not confirmed; the offset was
    `committed` when that was looked at last."""

    next_offset: int
    committed: int
    pending: int = 0


class PopPositions:
    """`topic@group` and queue id, as in the table of consumer offsets."""

    def __init__(self, offsets: ConsumerOffsetManager) -> None:
        self._offsets = offsets
        self._taken: dict[Key, Taken] = {}

    def clear(self) -> None:
        self._taken.clear()

    def next_of(self, key: Key) -> int:
        """The next offset to give; -1 if the group was never here."""
        taken = self._current(key)
        return self._offsets.query(*key) if taken is None else taken.next_offset

    def _current(self, key: Key) -> Taken | None:
        taken = self._taken.get(key)
        if taken is not None and taken.committed != self._offsets.query(*key):
            del self._taken[key]
            return None
        return taken

    def take(self, key: Key, next_offset: int) -> Taken:
        """What was before `next_offset` is in flight once a write is confirmed."""
        taken = self._current(key)
        if taken is None:
            taken = self._taken[key] = Taken(next_offset, self._offsets.query(*key))
        taken.next_offset = next_offset
        taken.pending += 1
        return taken

    def confirmed(self, key: Key, taken: Taken, next_offset: int, *, ok: bool) -> None:
        """The write of `take` is confirmed; not `ok`: it may be, later."""
        taken.pending -= 1
        if not ok or self._current(key) is not taken:
            return
        self._commit(key, next_offset if taken.pending else taken.next_offset)
        taken.committed = self._offsets.query(*key)
        if not taken.pending:
            del self._taken[key]

    def skip(self, key: Key, next_offset: int) -> None:
        """Nothing before `next_offset` is for the group."""
        taken = self._current(key)
        if taken is None:
            self._commit(key, next_offset)
        else:
            taken.next_offset = next_offset

    def _commit(self, key: Key, next_offset: int) -> None:
        self._offsets.commit(*key, next_offset)
