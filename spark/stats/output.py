"""The folder of results: tables appear whole or not at all, `summary.json` last.

`consumer_lag` is different: committed offsets are of a moment, so every run adds its snapshot, a
folder of its own, and runs with `--overwrite` keep those of earlier runs.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.stats.tables import TABLES

SUMMARY: Final = "summary.json"
REPORT: Final = "report.html"
LAG: Final = "consumer_lag"
_OURS: Final = (*TABLES, SUMMARY, REPORT)
_MAKING: Final = "_making-"


class Output:
    """Use it as a context: what is not published is removed at its end."""

    def __init__(self, folder: str, *, overwrite: bool = False) -> None:
        """Raises ValueError if the folder holds what may not be replaced, or is no local path."""
        if "://" in folder and not folder.startswith("file://"):
            raise ValueError(
                f"--output {folder}: tables are renamed when they are whole, so it must be a path "
                "on a file system that all executors share"
            )
        self.path = Path(folder.removeprefix("file://")).resolve()
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--output {self.path}: it must be a folder")
        held = sorted(os.listdir(self.path)) if self.path.exists() else []
        others = [name for name in held if name not in _OURS and not name.startswith(_MAKING)]
        if others:
            raise ValueError(
                f"--output {self.path}: it holds {others[0]}, which is not of this job; "
                "name a folder of its own"
            )
        if not overwrite and any(name in _OURS for name in held):
            raise ValueError(
                f"--output {self.path}: it holds an earlier result; --overwrite replaces it and "
                "keeps its snapshots of consumer_lag"
            )
        self._making = self.path / f"{_MAKING}{uuid.uuid4().hex[:12]}"

    def __enter__(self) -> Output:
        self._making.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._making, ignore_errors=True)

    def step(self, name: str, frame: DataFrame) -> DataFrame:
        """Keep a step on disk; what it is when read back."""
        folder = str(self._making / "steps" / name)
        frame.write.parquet(folder)
        return frame.sparkSession.read.schema(frame.schema).parquet(folder)

    def write(self, name: str, frame: DataFrame, snapshot: datetime | None = None) -> DataFrame:
        """Write a table, not yet where readers look; what it is when read back.

        With `snapshot` it is partitioned by that as well.
        """
        folder = str(self._making / name)
        parts = ["day"]
        if snapshot is not None:
            frame = frame.withColumn("snapshot", F.lit(f"{snapshot:%Y-%m-%dT%H-%M-%S}"))
            parts.append("snapshot")
        frame.repartition("day").write.partitionBy(*parts).parquet(folder)
        if not any(Path(folder).glob("day=*")):
            # Without rows there is no folder to tell the columns from: an empty file does.
            shutil.rmtree(folder)
            frame.limit(0).coalesce(1).write.parquet(folder)
        return frame.sparkSession.read.schema(frame.schema).parquet(folder)

    def publish(self, summary: Mapping[str, Any]) -> None:
        """Put the tables in the place of earlier ones, then the summary. Raises OSError."""
        for name in (SUMMARY, REPORT):
            (self.path / name).unlink(missing_ok=True)
        for name in TABLES:
            new = self._making / name
            if name == LAG:
                self._keep_snapshots(new)
            if (self.path / name).exists():  # put aside: killed here, nothing is lost
                os.rename(self.path / name, self._making / f"before-{name}")
            os.rename(new, self.path / name)
        growing = self._making / SUMMARY
        with growing.open("w") as file:
            file.write(json.dumps(summary, indent=2, ensure_ascii=False, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(growing, self.path / SUMMARY)

    def _keep_snapshots(self, new: Path) -> None:
        """Earlier snapshots go along into the new table, by links: a crash loses none of them."""
        for old in sorted((self.path / LAG).glob("day=*/snapshot=*")):
            place = new / old.relative_to(self.path / LAG)
            if not place.exists():
                shutil.copytree(old, place, copy_function=os.link)


__all__ = ["LAG", "REPORT", "SUMMARY", "Output"]
