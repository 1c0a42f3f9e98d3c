"""The folder of results of topic_stats, and the files of one task. Free of Spark.

`consumer_lag` is different: committed offsets are of a moment, so every run adds its snapshot, a
folder of its own, and runs with `--overwrite` keep those of earlier runs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from batonmq.spark.read.columns import TIMESTAMP
from batonmq.spark.stats.tables import TABLES
from batonmq.spark.steps.result_folder import PARQUET, ResultFolder
from batonmq.spark.steps.tables import day_of, partition_of, write_empty, write_part

LAG: Final = "consumer_lag"
_MS: Final = pa.timestamp("ms", "UTC")


class Output(ResultFolder):
    """Use it as a context: what is not published is removed at its end."""

    def __init__(self, folder: str, *, overwrite: bool = False, form: str = PARQUET) -> None:
        """Raises ValueError if the folder holds what may not be replaced, or is no local path."""
        super().__init__(
            folder,
            tuple(TABLES),
            overwrite=overwrite,
            form=form,
            keeps=" and keeps its snapshots of consumer_lag",
        )

    def publish(self, summary: Mapping[str, Any]) -> None:
        """Put the tables in the place of earlier ones, then the summary. Raises OSError."""
        for name, schema in TABLES.items():
            snapshot = {"snapshot": pa.string()} if name == LAG else {}
            write_empty(Path(self.table(name)), schema, day=pa.string(), **snapshot)
        self._keep_snapshots(Path(self.table(LAG)))
        super().publish(summary)

    def _keep_snapshots(self, new: Path) -> None:
        """Earlier snapshots go along into the new table, by links: a crash loses none of them."""
        for old in sorted((self.path / LAG).glob("day=*/snapshot=*")):
            place = new / old.relative_to(self.path / LAG)
            if not place.exists():
                shutil.copytree(old, place, copy_function=os.link)


def write_rows(folder: Path, name: str, rows: pa.Table, task: int, snapshot: str) -> None:
    """Write the rows of a task by day, and consumer_lag by snapshot. Raises OSError."""
    more = {"snapshot": snapshot} if name == LAG else {}
    columns = [
        rows[each.name].cast(_MS if each.type == TIMESTAMP else each.type).cast(each.type)
        for each in TABLES[name]
    ]
    table = pa.Table.from_arrays(columns, schema=TABLES[name])
    for day in pc.unique(rows["day"]).to_pylist():
        place = folder / name / partition_of(day=day_of(day), **more)
        part = table.filter(pc.equal(rows["day"], day))
        write_part(place / f"part-{task:05}.parquet", part)
