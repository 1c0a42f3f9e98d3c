"""Samples of a store's log, for comparing two logs in a handshake (R47)."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from batonmq.ha.lineage import SAMPLE_BYTES, LogSample

if TYPE_CHECKING:
    from batonmq.store.message_store import MessageStore


class StoreSamples:
    """`segment_size`: samples do not cross segments, because logs may begin at different
    segments."""

    def __init__(self, store: MessageStore, segment_size: int) -> None:
        self._store = store
        self._segment_size = segment_size

    @property
    def lost_epochs(self) -> bool:
        return self._store.trust.lost_epochs

    @property
    def lineage(self) -> str:
        return self._store.log.lineage.name

    def take(self, end: int) -> LogSample | None:
        segment_start = (end - 1) - (end - 1) % self._segment_size
        size = end - max(segment_start, end - SAMPLE_BYTES)
        crc = self.crc(end, size)
        return None if crc is None else LogSample(end, size, crc)

    def crc(self, end: int, size: int) -> int | None:
        begin = end - size
        if not 0 < size <= SAMPLE_BYTES or begin < max(0, self._store.min_phy_offset):
            return None
        held = self._store.log.view(begin, size)
        return zlib.crc32(held) if len(held) == size else None

    def fault_before(self, end: int) -> str:
        return self._store.trust.fault_before(end)
