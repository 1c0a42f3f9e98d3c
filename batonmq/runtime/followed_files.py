"""Files whose new content counts while the process runs: certificates and secrets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, Generic, TypeVar

from batonmq.protocol.errors import BatonError
from batonmq.runtime import disk

log = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S: Final = 2.0
SIGNALLED_S: Final = 0.05
"""From a SIGHUP until the files are read: many signals together cost one reading."""

Stamp = tuple[tuple[int, int, int] | None, ...]


class FollowedFiles(Generic[T]):
    """`read` reads the files under `paths`, and raises BatonError if they are no use: at the start
    to the caller, later into the log, and the former `value` stays."""

    watched: ClassVar[set[FollowedFiles[Any]]] = set()
    """Of this process; each knows its files by name."""

    def __init__(self, name: str, paths: Iterable[str], read: Callable[[], T]) -> None:
        self.name = name
        self._paths = tuple(paths)
        self._read = read
        self._stamp = stamp_of(self._paths)
        self.value = read()
        self.taken_ms = _newest_ms(self._stamp)
        """When the files in force were changed last, ms since 1970."""
        self.version = 1
        """Grows with each reload."""
        self.refusal = ""
        """Why the present files are not in force; "" if they are."""
        self.on_reload: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._signalled: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Checks the files for changes every POLL_S, until `close`."""
        self.watched.add(self)
        self._timer = asyncio.get_running_loop().call_later(POLL_S, self._poll)

    def close(self) -> None:
        self.watched.discard(self)
        for timer in (self._timer, self._signalled):
            if timer is not None:
                timer.cancel()

    def reload_soon(self) -> None:
        """As `reload`, within SIGNALLED_S."""
        if self._signalled is None:
            loop = asyncio.get_running_loop()
            self._signalled = loop.call_later(SIGNALLED_S, self._reload_signalled)

    def _reload_signalled(self) -> None:
        self._signalled = None
        self.reload()

    def _poll(self) -> None:
        try:
            self.reload_if_changed()
        finally:  # R54: also after an unexpected error
            self.watch()

    def reload_if_changed(self) -> None:
        # Refused ones are read again: what was wrong may not show in the files' stamp, as their
        # mode, or that this process had no descriptor left.
        if self.refusal or stamp_of(self._paths) != self._stamp:
            self.reload()

    def reload(self) -> bool:
        """Reads the files again. Returns False if they are unusable; then the former ones stay."""
        # Before they are read: what changes meanwhile is seen at the next poll.
        self._stamp = stamp_of(self._paths)
        changed_ms = _newest_ms(self._stamp)
        try:
            value = self._read()
        except (BatonError, OSError) as error:
            return self._refused(disk.described(error))
        # They are read one after the other; of two versions none is whole.
        if stamp_of(self._paths) != self._stamp:
            return self._refused("the files changed while they were read; the next try follows")
        self.value, self.taken_ms, self.refusal = value, changed_ms, ""
        self.version += 1
        log.info("files_reloaded name=%s", self.name)
        self.on_reload()
        return True

    def _refused(self, why: str) -> bool:
        if why != self.refusal:  # not at each poll
            log.error("files_not_reloaded name=%s reason=%s", self.name, why)
        self.refusal = why
        return False


def changed_ms(paths: Iterable[str]) -> int:
    """When these files were changed last, ms since 1970; 0 if none is there. What a process reports
    as `taken_ms` of files that it follows."""
    return _newest_ms(stamp_of(paths))


def _newest_ms(stamp: Stamp) -> int:
    return max((each[1] // 1_000_000 for each in stamp if each), default=0)


def stamp_of(paths: Iterable[str]) -> Stamp:
    """Another one for other files under these paths: inode, time of the last change in ns, size."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        status = None
        with contextlib.suppress(OSError):
            status = os.stat(os.path.expanduser(path)) if path else None
        found.append(status and (status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)
