"""Offsets that an operator has reset, until a consumer goes on from them (222). Pure.

A reset is parked for its (group, topic, queue). Every pull from elsewhere is answered with the
parked offset (21), and progress from before is not taken. The pull that asks for that very offset
ends it. So the held pull of a member that gave the queue away, or has gone, does not use it up, as
it does in Java. A new master has no resets parked: the group's offsets are what they were set to.
Origin: `ConsumerOffsetManager.resetOffsetTable` in Java.
"""

from __future__ import annotations


class OffsetResets:
    """(group, topic, queue id) -> the offset to go on from."""

    def __init__(self) -> None:
        self._parked: dict[tuple[str, str, int], int] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """The next pull of the group from this queue goes on at `offset`."""
        self._parked[group, topic, queue_id] = offset

    def is_parked(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether progress of the group in this queue is from before a reset."""
        return bool(self._parked) and (group, topic, queue_id) in self._parked

    def redirected(self, group: str, topic: str, queue_id: int, offset: int) -> int | None:
        """Where a pull at `offset` has to go instead. None: it may go on, and the reset is over."""
        if not self._parked:
            return None
        key = (group, topic, queue_id)
        parked = self._parked.get(key)
        if parked is None or parked != offset:
            return parked
        del self._parked[key]
        return None

    def clear(self) -> None:
        """This broker is not the master any more."""
        self._parked.clear()
