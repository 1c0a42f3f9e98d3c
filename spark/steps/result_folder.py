"""The folder of a job's results: tables, a page, and `summary.json`, which comes last."""

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from batonmq.runtime.lock_file import FolderLock
from batonmq.spark.read.storage import UnknownPlace, locate
from batonmq.spark.steps.sql import GROWING, ICEBERG, PARQUET, ResultTable, locked, names_in, put

SUMMARY: Final = "summary.json"
REPORT: Final = "report.html"


class Results:
    """A folder of results, a path or URI: tables, a page, and `summary.json`, which comes last.

    An output without `summary.json` is not whole. Close it.
    """

    def __init__(
        self,
        folder: str,
        tables: Collection[str],
        *,
        overwrite: bool = False,
        form: str = PARQUET,
        catalog: Mapping[str, str] | None = None,
        keeps: str = "",
    ) -> None:
        """`tables`: all that will be there, in which `form`. `catalog`: of Iceberg tables, by
        pyiceberg's properties, and their `namespace` (default: the folder's name). `keeps`: what
        --overwrite leaves, for the message. Raises ValueError if the folder holds something and may
        not, or for a catalog that does not fit the form.
        """
        self._catalog = dict(catalog or {})
        if (form == ICEBERG) != bool(self._catalog):
            raise ValueError("--catalog belongs to --format iceberg, which needs it")
        is_local = "://" not in folder and not folder.startswith("file:")
        self.folder = str(Path(folder).resolve()) if is_local else folder.rstrip("/")
        self.form = form
        name = self.folder.rpartition("/")[2].replace(".", "_")
        self._namespace = self._catalog.pop("namespace", name)
        self._ours = (*tables, SUMMARY, REPORT)
        self._overwrite, self._keeps = overwrite, keeps
        self._run = uuid.uuid4().hex
        self._lock: FolderLock | None = None
        try:
            self._check(names_in(self.folder))
        except UnknownPlace:  # its jar may come with Spark
            return
        except ValueError as error:
            raise ValueError(f"--output {error}".replace("--output --output", "--output")) from None

    def _check(self, held: Sequence[str]) -> None:
        # A run that died while it wrote a file has left it under the second name.
        ours = {*self._ours, *(f"{name}.growing" for name in self._ours)}
        others = [name for name in held if name not in ours and not name.startswith("_")]
        if others:
            raise ValueError(
                f"--output {self.folder}: it holds {others[0]}, which is not of this job; "
                "name a folder of its own"
            )
        # What a run left that did not come to its end is of no use; the summary is its end.
        is_whole = SUMMARY in held or GROWING not in held
        if not self._overwrite and is_whole and any(n in self._ours for n in held):
            raise ValueError(
                f"--output {self.folder}: it holds an earlier result; --overwrite replaces it"
                f"{self._keeps}"
            )

    def table(self, name: str, by: Sequence[str] = (), **only: str) -> ResultTable:
        place = f"{self._namespace}.{name}" if self.form == ICEBERG else f"{self.folder}/{name}"
        return ResultTable(place, self.form, by, only, self._catalog)

    def page_line(self, page: str | None) -> list[str]:
        """The line about the page for people."""
        return [] if page is None else [f"report: {self.folder}/{REPORT}"]

    def begin(self) -> None:
        """From now on the earlier result is not whole. Raises ValueError, also if another run of
        this host writes there, OSError."""
        self._lock = locked(self.folder)
        self._check(names_in(self.folder))  # another run may have ended since the first look
        put(f"{self.folder}/{GROWING}", self._run)
        for name in (SUMMARY, REPORT):
            put(f"{self.folder}/{name}", None)

    def publish(self, summary: Mapping[str, Any], page: str | None = None) -> None:
        """The summary, behind all tables, and a page. Raises ValueError if another run began here
        meanwhile, OSError."""
        storage, growing = locate(f"{self.folder}/{GROWING}")
        if storage.read_small(growing) != self._run.encode():
            # Storage without locks let both in: the other one's result is not whole, either.
            put(f"{self.folder}/{GROWING}", self._run)
            put(f"{self.folder}/{SUMMARY}", None)
            raise ValueError(
                f"--output {self.folder}: another run wrote there meanwhile, so the tables may "
                "hold rows of both; run it again, alone"
            )
        if page is not None:
            put(f"{self.folder}/{REPORT}", page)
        text = json.dumps(summary, indent=2, ensure_ascii=False, default=str)
        put(f"{self.folder}/{SUMMARY}", f"{text}\n")
        put(f"{self.folder}/{GROWING}", None)

    def close(self) -> None:
        """Lets other runs write there. Raises OSError."""
        if self._lock is not None:
            self._lock.release()


def own_version() -> str:
    """The program's version, for summaries."""
    try:
        return version("batonmq")
    except PackageNotFoundError:
        return "from a source tree"
