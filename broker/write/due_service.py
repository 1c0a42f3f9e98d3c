"""What delays, timers, transactions and POP have in common: a turn that does what is due.

Nothing is done while this master takes no writes, within a planned switch, or while the replicas
are far behind; a turn of the loop has one slice; between two looks nothing runs. The wall clock may
jump, so no pause is longer than LOOK_AGAIN_MS. One record stops no feature (R54): what can never be
carried out is set aside, and no exception ends the timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.errors import CorruptLogError
from batonmq.runtime.clock import wall_ms
from batonmq.store.errors import PutIllegal, PutRefused

log = logging.getLogger(__name__)

UNCONFIRMED_BYTES_MAX: Final = 16 << 20
LOOK_AGAIN_MS: Final = 1000
BLOCKED_MS: Final = 10
"""Until it is tried again while this master takes no writes, or replicas lag."""
REFUSED_MS: Final = 100
DAMAGED_MS: Final = 10_000
FAILED_MS: Final = 1000


class DueService:
    """On the broker's loop. `damaged` is called with the fault of a bad record."""

    def __init__(self, path: WritePath, damaged: Callable[[str], None]) -> None:
        self._path = path
        self._store = path.store
        self._damaged = damaged
        self._timer: asyncio.Handle | None = None
        self._is_running = False

    def begin(self) -> None:
        """This broker has become master. Subclasses call `end` first: a mastership may begin again
        without one (R55)."""
        self._is_running = True
        self._wake_in(0)

    def end(self) -> None:
        """This broker is not master any more: a slave delivers nothing."""
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def now_ms(self) -> int:
        """The wall clock that due times are of."""
        return wall_ms()

    def _slice(self, now_ms: int) -> int:
        """Does some of what is due; the least pause in ms before the next slice. Raises
        CorruptLogError."""
        raise NotImplementedError

    def _has_to_wait(self) -> bool:
        path, store = self._path, self._store
        behind = store.max_phy_offset - store.confirm_offset
        return path.gate.refusal is not None or path.hold.active or behind > UNCONFIRMED_BYTES_MAX

    def _carried_out(self, what: str, put: Callable[[], bool]) -> bool:
        """Whether `put` need not be tried again: it says so, or can never succeed (R54). Raises
        PutRefused and others where it may succeed later, CorruptLogError."""
        try:
            return put()
        except (OSError, CorruptLogError):
            raise
        except Exception as error:
            if isinstance(error, PutRefused) and not isinstance(error, PutIllegal):
                raise
            self._path.aside.add(type(self).__name__, what, error)
            return True

    @property
    def _look_ms(self) -> int:
        """When to look next, wall clock ms; by default `_slice` says when."""
        return 0

    def _wake_in(self, delay_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay_ms / 1000, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if not self._is_running:
            return
        if self._has_to_wait():
            self._wake_in(BLOCKED_MS)
            return
        path, store = self._path, self._store
        feature = type(self).__name__
        try:
            pause_ms = self._slice(wall_ms())
            path.aside.turn_done(feature)
        except CorruptLogError as error:
            log.error("waiting_message_damaged reason=%s", error)
            store.trust.fault_at(error.offset)  # suspect: a whole replica is to lead (R17, G8)
            self._damaged(str(error))
            pause_ms = DAMAGED_MS
        except Exception as error:  # R54: the timer of a feature does not end
            path.aside.turn_failed(feature, error)
            pause_ms = FAILED_MS
        if self._timer is None:
            due_in_ms = self._look_ms - wall_ms()
            self._wake_in(max(pause_ms, min(due_in_ms, LOOK_AGAIN_MS)))
