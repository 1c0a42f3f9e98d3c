"""Steps of a long job: what two later steps need is made once, and plans stay short.

Spark would else repeat all that leads to a frame each time it is used, and analyse it each time.
Steps of a small input stay in memory, in one partition, so that no later step has a shuffle. Else
they are Parquet below one folder, removed at the end.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.storagelevel import StorageLevel


class Work:
    """Keeps frames in memory if `small`, else below `folder`, which the executors share."""

    def __init__(self, session: SparkSession, folder: str, *, small: bool = False) -> None:
        self.session = session
        self.small = small
        self._folder = folder

    def keep(self, frame: DataFrame, name: str) -> DataFrame:
        """The same rows, made now and only read from now on; a name is used once."""
        if self.small:
            return self._in_memory(frame)
        path = self.write(frame, name)
        return self.session.read.schema(frame.schema).parquet(path)

    def write(self, frame: DataFrame, name: str) -> str:
        """The folder of Parquet files with these rows; a name is used once."""
        path = f"{self._folder}/{name}"
        frame.write.parquet(path)
        return path

    def keep_small(self, frame: DataFrame) -> DataFrame:
        """The same rows of a step that is written anyway: kept only where that costs nothing."""
        return self._in_memory(frame) if self.small else frame

    def _in_memory(self, frame: DataFrame) -> DataFrame:
        return frame.coalesce(1).localCheckpoint(storageLevel=StorageLevel.MEMORY_AND_DISK)


__all__ = ["Work"]
