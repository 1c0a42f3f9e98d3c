"""Logs errors of application code without flooding the log: it may fail for every message."""

import logging

log = logging.getLogger(__name__)


class Failures:
    """The errors of one listener or hook. The first of each kind is logged with its traceback, then
    only the count at the second, fourth, eighth, ..."""

    def __init__(self, event: str) -> None:
        """`event`: the first word of each line."""
        self._event = event
        self._counts: dict[type[BaseException], int] = {}

    def note(self, error: BaseException, where: str) -> None:
        kind = type(error)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count & (count - 1):  # no power of two
            return
        log.error(
            "%s %s reason=%r count=%d",
            self._event,
            where,
            error,
            count,
            exc_info=error if count == 1 else None,
        )
