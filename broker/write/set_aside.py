"""Records that a broker could not carry out, and features that fail now (R54).

One record must not stop a feature. A record that can never be carried out stays in the log, is
named in the process log and by `mqctl health`, and the feature continues with the next one.
"""

import logging
from collections import deque
from typing import Final

log = logging.getLogger(__name__)

_NAMED_MAX: Final = 8


class SetAside:
    """The records that this process set aside. All are counted, the newest are named."""

    def __init__(self) -> None:
        self.total = 0
        self._newest: deque[str] = deque(maxlen=_NAMED_MAX)
        self._failing: dict[str, str] = {}

    def add(self, feature: str, what: str, error: Exception) -> None:
        """`what`, a record of this feature, is not tried again."""
        log.error("set_aside feature=%s what=%s reason=%r", feature, what, error, exc_info=error)
        self.total += 1
        self._newest.append(f"{feature}: {what}: {error!r}")

    def turn_failed(self, feature: str, error: Exception) -> None:
        """A turn of the feature failed; the next one tries again."""
        log.error("feature_failed feature=%s reason=%r", feature, error, exc_info=error)
        self._failing[feature] = repr(error)

    def turn_done(self, feature: str) -> None:
        # Each slice of each feature comes here, and almost always nothing fails.
        if self._failing:
            self._failing.pop(feature, None)

    @property
    def problem(self) -> str:
        """For `mqctl health`; empty if there is none."""
        parts = [f"{feature} is tried again: {why}" for feature, why in self._failing.items()]
        if self.total:
            parts.append(f"{self.total} since the start, last {', '.join(self._newest)}")
        return "; ".join(parts)
