"""The folder of results of epoch_history: how each of its tables is written."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame

from batonmq.spark.result_folder import SUMMARY, ResultFolder

TABLES: Final = (
    "masterships", "failovers", "unavailability", "set_changes", "truncations", "findings",
    "controllers",
)  # fmt: skip
# One row for each day of each group: a file for each would be nothing but files.
_FOLDERS: Final = {"unavailability": ("group",)}


class Output(ResultFolder):
    """Use it as a context: what is not published is removed at its end."""

    def __init__(self, folder: str, *, overwrite: bool = False) -> None:
        """Raises ValueError if the folder holds something and may not, or is no local path."""
        super().__init__(folder, TABLES, overwrite=overwrite)

    def write(self, name: str, frame: DataFrame, *, small: bool = False) -> DataFrame:
        """Write a table, not yet where readers look; the rows from now on.

        `small`: `frame` is one partition that is read again as easily as the table.
        """
        folders = _FOLDERS.get(name, ("group", "day"))
        rows = frame.coalesce(1) if small else frame.repartition(*folders)
        written = self.write_table(name, rows.sortWithinPartitions("group", "day"), folders)
        return frame if small else written


__all__ = ["SUMMARY", "TABLES", "Output"]
