"""Errors of an application's own code, logged once with a count: it may fail at every message."""

import logging

log = logging.getLogger(__name__)


class Failures:
    """Of one listener or hook. Of each kind of error the first is logged whole, the others as their
    number at the second, fourth, eighth, ..."""

    def __init__(self, event: str) -> None:
        """`event` begins each line."""
        self._event = event
        self._counts: dict[type[BaseException], int] = {}

    def note(self, error: BaseException, where: str) -> None:
        kind = type(error)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count & (count - 1):
            return
        log.error(
            "%s %s reason=%r count=%d",
            self._event,
            where,
            error,
            count,
            exc_info=error if count == 1 else None,
        )
