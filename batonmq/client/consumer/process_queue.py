"""The messages of one queue that are pulled but not consumed. Pure.

Invariant: `commit_offset` is the smallest offset not consumed yet, so committing it never skips a
message; it never decreases. Once `dropped` is set (another member has the queue, or its offset was
moved), nothing from it may be committed. Origin: ProcessQueue.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from batonmq.protocol.message import MessageExt


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """Limits of one queue at which pulling pauses: cached messages, cached body bytes, and offset
    span (last - first cached offset). The span bounds how much is consumed twice after a crash;
    orderly consumers ignore it."""

    messages: int = 1000
    size_bytes: int = 100 * 1024 * 1024
    span: int = 2000


class ProcessQueue:
    """Not thread safe: owned by the consumer's loop."""

    __slots__ = ("_cached", "_taken", "dropped", "locked_until_ms", "next_offset", "size_bytes")

    def __init__(self, next_offset: int) -> None:
        self.next_offset = next_offset
        """Where the next pull begins."""
        self.dropped = False
        self.size_bytes = 0
        self.locked_until_ms = 0
        """Orderly consumers: when this member's lock on the queue ends."""
        # Keys are offsets in ascending order, so the first key is the smallest.
        self._cached: dict[int, MessageExt] = {}
        self._taken: dict[int, MessageExt] = {}

    def __len__(self) -> int:
        return len(self._cached) + len(self._taken)

    @property
    def waiting(self) -> int:
        return len(self._cached)

    @property
    def commit_offset(self) -> int:
        """All below is consumed: the next owner of the queue begins here."""
        firsts = [next(iter(d)) for d in (self._cached, self._taken) if d]
        return min(firsts) if firsts else self.next_offset

    @property
    def span(self) -> int:
        lasts = [next(reversed(d)) for d in (self._cached, self._taken) if d]
        return max(lasts) - self.commit_offset if lasts else 0

    def put(self, messages: Iterable[MessageExt], next_offset: int) -> None:
        """Adds the messages of a pull: ascending, none below the current `next_offset`."""
        for message in messages:
            assert message.queue_offset >= self.next_offset, "pull result below the asked offset"
            self._cached[message.queue_offset] = message
            self.size_bytes += len(message.body)
        self.next_offset = max(self.next_offset, next_offset)

    def take(self, count: int) -> Sequence[MessageExt]:
        """Takes the next `count` messages in order; they count as cached until `done` or
        `put_back`."""
        offsets = list(islice(self._cached, count))
        in_order = not self._taken or not offsets or next(reversed(self._taken)) < offsets[0]
        batch = [self._cached.pop(offset) for offset in offsets]
        for message in batch:
            self._taken[message.queue_offset] = message
        # Out of order only after a `put_back`, so the sort is rare.
        if not in_order:
            self._taken = dict(sorted(self._taken.items()))
        return batch

    def done(self, messages: Iterable[MessageExt]) -> int:
        """Forgets consumed messages; returns `commit_offset`."""
        for message in messages:
            if self._taken.pop(message.queue_offset, None) is not None:
                self.size_bytes -= len(message.body)
        # A listener may have replaced bodies, so the sum may be wrong. The error must not add up:
        # at the size limit the queue would stop pulling.
        if not len(self):
            self.size_bytes = 0
        return self.commit_offset

    def put_back(self, messages: Iterable[MessageExt]) -> None:
        """Returns taken messages to the front, in order (orderly retry)."""
        for message in messages:
            # The one that is kept, not the caller's: `replace_taken` may have changed it.
            held = self._taken.pop(message.queue_offset, None)
            if held is not None:
                self._cached[message.queue_offset] = held
        self._cached = dict(sorted(self._cached.items()))

    def replace_taken(self, message: MessageExt) -> None:
        """Replaces a taken message by its retry, which has a higher count of tries."""
        if message.queue_offset in self._taken:
            self._taken[message.queue_offset] = message

    def flow_reason(self, limits: FlowLimits, *, orderly: bool = False) -> str | None:
        """Why pulling must pause, or None."""
        if len(self) > limits.messages:
            return f"{len(self)} messages cached, limit {limits.messages}"
        if self.size_bytes > limits.size_bytes:
            return f"{self.size_bytes} bytes cached, limit {limits.size_bytes}"
        if not orderly and self.span > limits.span:
            return f"offset span {self.span}, limit {limits.span}"
        return None
