"""Pulls that found nothing and wait for the next message of their queue.

Pure: which pull waits for which queue, and which an arrival ends. The dispatch itself ends a held
pull. The 5 s scan of Java's PullRequestHoldService remains as a second way (`PullProcessor.tick`):
it finds a message that arrived between the look-up and the hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from batonmq.broker.consume.held_requests import HeldRequest, HeldRequests

P = TypeVar("P", bound=Hashable)


@dataclass(slots=True, eq=False)
class Held(HeldRequest, Generic[P]):
    """One waiting pull. `offset` is the first queue offset that would answer it."""

    offset: int
    pull: P


class PullHold(HeldRequests[Held[P]], Generic[P]):
    """Held pulls by (topic, queue id)."""

    def __init__(self) -> None:
        super().__init__()
        self._by_queue: dict[tuple[str, int], dict[Held[P], None]] = {}

    def waiting(self, topic: str, queue_id: int) -> int:
        """How many pulls wait for a queue."""
        return len(self._by_queue.get((topic, queue_id), ()))

    def queues(self) -> list[tuple[str, int]]:
        """The queues that a pull waits for."""
        return list(self._by_queue)

    def arrived(
        self, topic: str, queue_id: int, max_offset: int, limit: int | None = None
    ) -> list[Held[P]]:
        """Takes out up to `limit` pulls of a queue that `max_offset` (exclusive) reaches."""
        waiting = self._by_queue.get((topic, queue_id))
        if not waiting:
            return []
        reached = (held for held in waiting if held.offset < max_offset)
        return self._removed(list(itertools.islice(reached, limit)))

    def _link(self, one: Held[P]) -> None:
        self._by_queue.setdefault((one.topic, one.queue_id), {})[one] = None

    def _unlink(self, one: Held[P]) -> None:
        key = one.topic, one.queue_id
        del self._by_queue[key][one]
        if not self._by_queue[key]:
            del self._by_queue[key]
