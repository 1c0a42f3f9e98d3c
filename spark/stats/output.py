"""The folder of results of topic_stats.

`consumer_lag` is different: committed offsets are of a moment, so every run adds its snapshot, a
folder of its own, and runs with `--overwrite` keep those of earlier runs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from batonmq.spark.report.result_folder import ResultFolder
from batonmq.spark.stats.tables import TABLES

LAG: Final = "consumer_lag"


class Output(ResultFolder):
    """Use it as a context: what is not published is removed at its end."""

    def __init__(self, folder: str, *, overwrite: bool = False) -> None:
        """Raises ValueError if the folder holds what may not be replaced, or is no local path."""
        super().__init__(
            folder, TABLES, overwrite=overwrite, keeps=" and keeps its snapshots of consumer_lag"
        )

    def write(
        self,
        name: str,
        frame: DataFrame,
        snapshot: datetime | None = None,
        *,
        small: bool = False,
    ) -> DataFrame:
        """Write a table, not yet where readers look; what it is when read back.

        With `snapshot` it is partitioned by that as well. `small`: its rows go into one task.
        """
        parts = ["day"]
        if snapshot is not None:
            frame = frame.withColumn("snapshot", F.lit(f"{snapshot:%Y-%m-%dT%H-%M-%S}"))
            parts.append("snapshot")
        return self.write_table(
            name, frame.coalesce(1) if small else frame.repartition("day"), parts
        )

    def publish(self, summary: Mapping[str, Any]) -> None:
        """Put the tables in the place of earlier ones, then the summary. Raises OSError."""
        self._keep_snapshots(Path(self.table(LAG)))
        super().publish(summary)

    def _keep_snapshots(self, new: Path) -> None:
        """Earlier snapshots go along into the new table, by links: a crash loses none of them."""
        for old in sorted((self.path / LAG).glob("day=*/snapshot=*")):
            place = new / old.relative_to(self.path / LAG)
            if not place.exists():
                shutil.copytree(old, place, copy_function=os.link)


__all__ = ["LAG", "Output"]
