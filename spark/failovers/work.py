"""Steps of a long job, kept on disk: what two later steps need is made once, and plans stay short.

Spark would else repeat all that leads to a frame each time it is used, and analyse it each time.
The files are Parquet below one folder, removed at the end.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession


class Work:
    """Keeps frames below `folder`, which the executors share."""

    def __init__(self, session: SparkSession, folder: str) -> None:
        self.session = session
        self._folder = folder

    def keep(self, frame: DataFrame, name: str) -> DataFrame:
        """The same rows, read from disk from now on; a name is used once."""
        path = f"{self._folder}/{name}"
        frame.write.parquet(path)
        return self.session.read.schema(frame.schema).parquet(path)


__all__ = ["Work"]
