"""The folder of results: tables appear whole or not at all, and `summary.json` last.

Everything is made in a folder of its own below the output and renamed at the end, so a run that is
killed leaves what was there. An output without `summary.json` is not whole. Several runs may go on
at once if each has its own output.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame

TABLES: Final = (
    "masterships", "failovers", "unavailability", "set_changes", "truncations", "findings",
    "controllers",
)  # fmt: skip
SUMMARY: Final = "summary.json"
_OURS: Final = (*TABLES, SUMMARY, "report.html")
_MAKING: Final = "_making-"
# One row for each day of each group: a file for each would be nothing but files.
_FOLDERS: Final = {"unavailability": ("group",)}


class Output:
    """Use it as a context: what is not published is removed at its end."""

    def __init__(self, folder: str, *, overwrite: bool = False) -> None:
        """Raises ValueError if the folder holds something and may not, or is no local path."""
        if "://" in folder and not folder.startswith("file://"):
            raise ValueError(
                f"--output {folder}: tables are renamed when they are whole, so it must be a path "
                "on a file system that all executors share; copy the result from there"
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
                f"--output {self.path}: it holds an earlier result; --overwrite replaces it"
            )
        self._making = self.path / f"{_MAKING}{uuid.uuid4().hex[:12]}"

    def __enter__(self) -> Output:
        self._making.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._making, ignore_errors=True)

    @property
    def work_folder(self) -> str:
        """Where steps may be kept until the end."""
        return str(self._making / "steps")

    def table(self, name: str) -> str:
        """Where a table is before it is published."""
        return str(self._making / name)

    def write(self, name: str, frame: DataFrame, *, small: bool = False) -> DataFrame:
        """Write a table, not yet where readers look; the rows from now on.

        `small`: `frame` is one partition that is read again as easily as the table.
        """
        folder = self.table(name)
        folders = _FOLDERS.get(name, ("group", "day"))
        rows = frame.coalesce(1) if small else frame.repartition(*folders)
        rows.sortWithinPartitions("group", "day").write.partitionBy(*folders).parquet(folder)
        if not any(Path(folder).glob("group=*")):
            # Without rows there is no folder to tell the columns from: an empty file does.
            shutil.rmtree(folder)
            frame.limit(0).coalesce(1).write.parquet(folder)
        return frame if small else frame.sparkSession.read.schema(frame.schema).parquet(folder)

    def publish(self, summary: Mapping[str, Any]) -> None:
        """Put the tables in the place of earlier ones, then the summary. Raises OSError."""
        for name in (SUMMARY, "report.html"):
            (self.path / name).unlink(missing_ok=True)
        for name in TABLES:
            shutil.rmtree(self.path / name, ignore_errors=True)
            os.rename(self._making / name, self.path / name)
        text = json.dumps(summary, indent=2, ensure_ascii=False, default=str) + "\n"
        growing = self._making / SUMMARY
        with growing.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(growing, self.path / SUMMARY)


__all__ = ["SUMMARY", "TABLES", "Output"]
