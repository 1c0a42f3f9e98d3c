"""Frames that several steps of an audit use: Spark computes them once and forgets them at its end.

Were they not forgotten, Spark would take them for any later query that looks alike, though the
files behind it have changed.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.storagelevel import StorageLevel


class Kept:
    """`small`: they may stay in memory; else they go to the executors' disks."""

    def __init__(self, *, small: bool = False) -> None:
        self._level = StorageLevel.MEMORY_AND_DISK if small else StorageLevel.DISK_ONLY
        self._frames: list[DataFrame] = []

    def keep(self, frame: DataFrame) -> DataFrame:
        """The frame, computed when it is first used, and not again."""
        self._frames.append(frame.persist(self._level))
        return self._frames[-1]

    def forget(self) -> None:
        """They may not be used any more."""
        while self._frames:
            self._frames.pop().unpersist()


__all__ = ["Kept"]
