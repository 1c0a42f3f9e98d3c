"""What counts as confirmed after a start: one rule for each mode.

With controllers a record is confirmed once every member of the SyncStateSet has it, so the end of
the log proves nothing. In classic mode, without controllers, every whole record counts.
"""

from __future__ import annotations

from typing import Protocol

from batonmq.store.store_files import StoreFiles


class ConfirmRule(Protocol):
    """Offsets are exclusive ends. `visible`: the end of what the consume queues hold."""

    @property
    def writes_at_once(self) -> bool:
        """Whether the store takes writes before the broker is given a role."""

    def proven(self, visible: int) -> int:
        """How far the queues alone prove that the log was confirmed."""

    def confirmed(self, stored: int, visible: int, end: int) -> int:
        """confirmOffset of a log that ends at `end`. `stored`: the checkpoint's."""

    def settle_epochs(self, files: StoreFiles, end: int) -> None:
        """After recovery: no epoch may begin behind `end`."""

    def begin_run(self, files: StoreFiles) -> None:
        """Before the first write of this run. Raises OSError."""


class ConfirmedBySet:
    """Controller mode."""

    writes_at_once = False

    def proven(self, visible: int) -> int:
        return visible  # only confirmed records have units in a queue

    def confirmed(self, stored: int, visible: int, end: int) -> int:
        return min(max(stored, visible), end)

    def settle_epochs(self, files: StoreFiles, end: int) -> None:
        files.epochs.drop_above(end)

    def begin_run(self, files: StoreFiles) -> None:
        """The epochs stay: they say which master wrote what."""


class ConfirmedByLog:
    """Classic mode."""

    writes_at_once = True

    def proven(self, visible: int) -> int:
        return 0  # a queue may be ahead of a log that lost its unflushed end

    def confirmed(self, stored: int, visible: int, end: int) -> int:
        return end

    def settle_epochs(self, files: StoreFiles, end: int) -> None:
        """Without effect: `begin_run` drops them all."""

    def begin_run(self, files: StoreFiles) -> None:
        files.drop_epochs()
