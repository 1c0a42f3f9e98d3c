"""Decides when a connection reads and hands out frames (R58). It does not read while earlier frames
wait for a turn or a handler, while the peer does not read its answers, or while memory is short."""

import asyncio
from collections.abc import Callable
from typing import Final

from batonmq.remoting.budget import SLICE_S, MemoryBudget, TurnBudget
from batonmq.remoting.command import FrameReader
from batonmq.runtime.clock import boot_s

SLICE_BYTES: Final = 4 * 1024 * 1024
"""After so many bytes of answers the connection's frames wait for the next turn."""
HANDLER_BYTES: Final = 4096
"""What a running handler takes beside its request, roughly."""
RUNNING_MAX: Final = 64
"""The most running handlers of one connection; its next request waits for one to end."""


class Intake:
    """`reader` has the read bytes. `take(nbytes, begin_s)` hands out frames until `must_wait`, then
    calls `slice_ended`. `running`: the number of handlers that have not answered."""

    def __init__(
        self,
        reader: FrameReader,
        turn: TurnBudget,
        memory: MemoryBudget,
        take: Callable[[int, float], None],
        abort: Callable[[str], None],
    ) -> None:
        self.reader = reader
        self.running = 0
        self.peer_host = ""
        self._turn = turn
        self._memory = memory
        self._take = take
        self.abort = abort
        self._transport: asyncio.Transport | None = None
        self._has_frames = False
        self._has_memory = True
        self._is_blocked = False
        self._is_reading = True
        self._held_bytes = self._out_bytes = 0

    def connected(self, transport: asyncio.Transport, peer_host: str) -> None:
        self._transport = transport
        self.peer_host = peer_host

    def read_on(self) -> None:
        """Reads on until the peer ends the connection, but hands out nothing more. `close`
        follows."""
        if self._transport is not None and not self._is_reading:
            self._transport.resume_reading()

    def close(self) -> None:
        """Stops handing out frames."""
        self._transport = None
        self._has_frames = False  # a step that waits for its turn finds nothing
        self._memory.hold(self, 0)

    def put_by(self, nbytes: int) -> None:
        """Keeps `nbytes` that came after the turn's time was used up."""
        self.reader.put_by(nbytes)
        self._wait_for_turn()

    def must_wait(self, begin_s: float, out_bytes: int) -> bool:
        """Whether further frames must wait. `out_bytes`: answers that are not written yet."""
        self._has_frames = (
            boot_s() - begin_s > SLICE_S or self.running >= RUNNING_MAX or out_bytes > SLICE_BYTES
        )
        return self._has_frames

    def slice_ended(self, begin_s: float) -> None:
        self._turn.spend(boot_s() - begin_s)
        if self._has_frames:
            self._wait_for_turn()
        # Usually nothing is held, and then reads need no call of the budget.
        if self.reader.held != self._held_bytes:
            self.hold(self._out_bytes)

    def _wait_for_turn(self) -> None:
        self._has_frames = True
        self._read_or_not()
        self._turn.later(self._continue)

    def _continue(self) -> None:
        # What blocks it calls again when it ends: `block`, `handler_ended`.
        if not self._has_frames or self._is_blocked or self.running >= RUNNING_MAX:
            return
        self._has_frames = False  # `take` sets it if it must stop once more
        # Puts the kept bytes back into the shared buffer before they are parsed.
        self.reader.get_buffer()
        self._take(0, boot_s())
        self._read_or_not()

    def handler_began(self, size: int) -> None:
        """`size`: of its request, which it keeps until it ends."""
        self.running += 1
        if not self._memory.run(self.peer_host, HANDLER_BYTES + size):
            self.hold(self._out_bytes)

    def handler_ended(self, size: int) -> None:
        self.running -= 1
        self._memory.run(self.peer_host, -HANDLER_BYTES - size)
        if not self._has_memory:
            self.hold(self._out_bytes)
        # Only the first that ends below the limit: then the frames are already being handled.
        if self._has_frames and self.running == RUNNING_MAX - 1:
            self._turn.later(self._continue)

    def block(self, is_blocked: bool) -> None:
        """Sets whether the peer does not read its answers."""
        self._is_blocked = is_blocked
        if not is_blocked:
            self.hold(0)
            if self._has_frames:
                self._turn.later(self._continue)
        self._read_or_not()

    def hold(self, out_bytes: int) -> None:
        """Counts the memory held for this connection, including `out_bytes` of answers."""
        if self._transport is None:
            return
        self._held_bytes, self._out_bytes = self.reader.held, out_bytes
        size = self._held_bytes + out_bytes
        self._has_memory = self._memory.hold(self, size, is_running=self.running > 0)
        self._read_or_not()

    def memory_came(self) -> None:
        """There is memory again: reads on."""
        self._has_memory = True
        self._read_or_not()

    def _read_or_not(self) -> None:
        reads = not self._has_frames and self._has_memory and not self._is_blocked
        if reads is self._is_reading or self._transport is None:
            return
        self._is_reading = reads
        if reads:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
