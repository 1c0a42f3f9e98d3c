"""The folder of a job's results: tables appear whole or not at all, and `summary.json` last.

Everything is made in a folder of its own below the output and renamed at the end, so a run that is
killed leaves what was there. An output without `summary.json` is not whole. Several runs may work
at once if each has its own output.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.dataset as ds

from batonmq.spark.steps.sql import DELTA, PARQUET, Engine, names_in

SUMMARY: Final = "summary.json"
REPORT: Final = "report.html"
_MAKING: Final = "_making-"


class Results:
    """A folder of results, a path or URI: tables, a page, and `summary.json`, which comes last.

    An output without `summary.json` is not whole.
    """

    def __init__(
        self,
        folder: str,
        tables: Sequence[str],
        *,
        overwrite: bool = False,
        form: str = PARQUET,
        keeps: str = "",
    ) -> None:
        """`tables`: all that will be there, in which `form`. `keeps`: what --overwrite leaves, for
        the message. Raises ValueError if the folder holds something and may not.
        """
        is_local = "://" not in folder and not folder.startswith("file:")
        self.folder = str(Path(folder).resolve()) if is_local else folder.rstrip("/")
        self.form = form
        self._ours = (*tables, SUMMARY, REPORT)
        self._overwrite, self._keeps = overwrite, keeps
        self._is_checked = False
        try:
            self._check(names_in(self.folder))
        except ValueError as error:
            if str(error).startswith("path="):  # only Spark knows such a URI
                return
            raise ValueError(f"--output {error}".replace("--output --output", "--output")) from None

    def _check(self, held: Sequence[str]) -> None:
        self._is_checked = True
        others = [name for name in held if name not in self._ours and not name.startswith("_")]
        if others:
            raise ValueError(
                f"--output {self.folder}: it holds {others[0]}, which is not of this job; "
                "name a folder of its own"
            )
        if not self._overwrite and any(name in self._ours for name in held):
            raise ValueError(
                f"--output {self.folder}: it holds an earlier result; --overwrite replaces it"
                f"{self._keeps}"
            )

    def table(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def page_line(self, page: str | None) -> list[str]:
        """What people are told of the page."""
        return [] if page is None else [f"report: {self.folder}/{REPORT}"]

    def begin(self, engine: Engine) -> None:
        """From now on the earlier result is not whole. Raises ValueError, OSError."""
        if not self._is_checked:
            self._check(engine.names(self.folder))
        for name in (SUMMARY, REPORT):
            engine.put(f"{self.folder}/{name}", None)

    def publish(self, engine: Engine, summary: Mapping[str, Any], page: str | None = None) -> None:
        """The summary, behind all tables, and a page. Raises OSError."""
        if page is not None:
            engine.put(f"{self.folder}/{REPORT}", page)
        text = json.dumps(summary, indent=2, ensure_ascii=False, default=str)
        engine.put(f"{self.folder}/{SUMMARY}", f"{text}\n")


class ResultFolder:
    """Use it as a context: what is not published is removed at its end."""

    def __init__(
        self,
        folder: str,
        tables: Sequence[str],
        *,
        overwrite: bool = False,
        form: str = PARQUET,
        keeps: str = "",
    ) -> None:
        """`tables`: all that will be published, in which `form`. `keeps`: what --overwrite leaves,
        for the message.

        Raises ValueError if the folder holds something and may not, or is no local path.
        """
        if "://" in folder and not folder.startswith("file://"):
            raise ValueError(
                f"--output {folder}: tables are renamed when they are whole, so it must be a path "
                "on a file system that all executors share; copy the result from there"
            )
        self.path = Path(folder.removeprefix("file://")).resolve()
        self._tables = tables
        self._form = form
        ours = (*tables, SUMMARY, REPORT)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--output {self.path}: it must be a folder")
        held = sorted(os.listdir(self.path)) if self.path.exists() else []
        others = [name for name in held if name not in ours and not name.startswith(_MAKING)]
        if others:
            raise ValueError(
                f"--output {self.path}: it holds {others[0]}, which is not of this job; "
                "name a folder of its own"
            )
        if not overwrite and any(name in ours for name in held):
            raise ValueError(
                f"--output {self.path}: it holds an earlier result; --overwrite replaces it{keeps}"
            )
        self._making = self.path / f"{_MAKING}{uuid.uuid4().hex[:12]}"

    def __enter__(self) -> Self:
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

    def publish(self, summary: Mapping[str, Any]) -> None:
        """Put the tables in the place of earlier ones, then the summary. Raises OSError."""
        if self._form == DELTA:
            for name in self._tables:
                to_delta(self._making / name)
        for name in (SUMMARY, REPORT):
            (self.path / name).unlink(missing_ok=True)
        for name in self._tables:
            if (self.path / name).exists():  # put aside: killed here, nothing is lost
                os.rename(self.path / name, self._making / f"before-{name}")
            os.rename(self._making / name, self.path / name)
        growing = self._making / SUMMARY
        with growing.open("w") as file:
            file.write(json.dumps(summary, indent=2, ensure_ascii=False, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(growing, self.path / SUMMARY)


def own_version() -> str:
    """The program's version, for summaries."""
    try:
        return version("batonmq")
    except PackageNotFoundError:
        return "from a source tree"


def to_delta(folder: Path) -> None:
    """Make Parquet files in folders `name=value` a Delta table in their place. Raises OSError.

    Needs the package deltalake. The rows are written anew: its conversion of files as they are does
    not find folders whose names are escaped.
    """
    import deltalake

    file = next(iter(folder.rglob("*.parquet")))
    names = [each.partition("=")[0] for each in file.relative_to(folder).parent.parts]
    kinds = [(name, pa.date32() if name == "day" else pa.string()) for name in names]
    by_folder = ds.partitioning(pa.schema(kinds), flavor="hive")
    rows = ds.dataset(folder, partitioning=by_folder, format="parquet").scanner().to_reader()
    made = folder.with_name(f"{folder.name}.{DELTA}")
    deltalake.write_deltalake(str(made), rows, partition_by=names)
    if not names:  # no rows: readers of Parquet take the columns from the file
        shutil.copy(file, made)
    shutil.rmtree(folder)
    made.rename(folder)
