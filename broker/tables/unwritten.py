"""Changes of tables whose records may not be in the log yet (SAFETY R55). Pure.

A master changes a table when it puts the record of the change. If a full disk keeps the record from
the log, and the broker leaves its role, the record is dropped, and the change must be undone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Unwritten:
    """The changes of one mastership, in the order of the log."""

    def __init__(self) -> None:
        self._undo: deque[tuple[int, Callable[[], object]]] = deque()

    def note(self, end: int, undo: Callable[[], object]) -> None:
        """A change was made here; its record ends at `end`. `undo` takes it back."""
        self._undo.append((end, undo))

    def written(self, end: int) -> None:
        """The log has all below `end`."""
        while self._undo and self._undo[0][0] <= end:
            self._undo.popleft()

    def dropped(self, end: int) -> bool:
        """What was put after `end` never reached the log: undoes the changes, the last one first.
        Returns whether there were any."""
        self.written(end)
        found = bool(self._undo)
        while self._undo:
            # A later change of the same name has the earlier one as what was before.
            self._undo.pop()[1]()
        return found
