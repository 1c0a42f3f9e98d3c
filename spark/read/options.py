"""The options of a read, checked; `docs/spark.md` lists them for users. Free of Spark."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from batonmq.protocol.record import FIXED_SIZE_V1
from batonmq.spark.read.damage import Mode
from batonmq.spark.read.option_values import GivenOptions
from batonmq.spark.read.schemas import LIVE_TABLE, TABLES
from batonmq.spark.read.storage import locate, split_paths

_MIB: Final = 1 << 20
# Arrow counts the bytes of a column of one window with 31 bits.
_WINDOW_MAX: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read. Sizes are bytes; see `from_mapping` for the names."""

    table: str
    paths: tuple[str, ...]
    columns: tuple[str, ...] = ()
    mode: Mode = Mode.FAILFAST
    unconfirmed: bool = False
    check_crc: bool = True
    by_queues: bool = False
    split_bytes: int = 128 * _MIB
    batch_bytes: int = 8 * _MIB
    record_bytes_max: int = 32 * _MIB
    time_slack_ms: int = 3_600_000
    damage_folder: str = ""
    slot_num: int = 0
    pushdown: bool = False
    """Spark keeps what a pushed filter planned with the `load`, not with the query: a data frame
    used twice would get rows of another query. Hence the default."""

    @classmethod
    def from_mapping(cls, options: Mapping[str, str]) -> Self:
        """The options by their names in Spark, which are not case-sensitive.

        Raises ValueError, with what is allowed, for a bad value or an unknown name.
        """
        if {"owner", "provider"} <= {name.lower() for name in options}:  # of Spark's catalog
            raise ValueError(
                "a table of a catalog cannot lie in stores: use CREATE TEMPORARY VIEW ... USING "
                "batonmq OPTIONS (...)"
            )
        given = GivenOptions(options, _NAMES, "reading stores")
        table = given.text("table", "messages").lower()
        if table not in TABLES:
            allowed = ", ".join((*TABLES, LIVE_TABLE))
            raise ValueError(f"table={table!r}: it must be one of {allowed}")
        paths = (*split_paths(given.text("path")), *split_paths(given.text("paths")))
        if not paths:
            raise ValueError("no path: name one or several stores, as load(path) or option paths")
        default = cls(table, paths)
        columns = given.text("columns").split(",")
        return cls(
            table,
            paths,
            tuple(part.strip() for part in columns if part.strip()),
            Mode(given.one_of("mode", tuple(Mode))),
            given.truth("unconfirmed", default.unconfirmed),
            given.truth("checkCrc", default.check_crc),
            given.one_of("access", ("log", "queues")) == "queues",
            given.number("splitBytes", default.split_bytes, _MIB // 16),
            given.number("batchBytes", default.batch_bytes, _MIB // 16, _WINDOW_MAX),
            given.number("maxRecordBytes", default.record_bytes_max, FIXED_SIZE_V1, _WINDOW_MAX),
            given.number("timeSlackMs", default.time_slack_ms, 0),
            _damage_folder(given.text("damageReport")),
            given.number("maxHashSlotNum", 0, 0),
            given.truth("pushdown", default.pushdown),
        )

    def ranges_of(self, size_bytes: int) -> int:
        """Into how many ranges so many bytes of one file are split: equal ones, at least one.

        The last range of a file must hold the blank that ends it: what lies behind that may be left
        from before a truncation, and no range may begin there. So none is below maxRecordBytes.
        """
        return max(1, min(-(-size_bytes // self.split_bytes), size_bytes // self.record_bytes_max))


_NAMES: Final = (
    "path", "paths", "table", "columns", "mode", "unconfirmed", "checkCrc", "access", "splitBytes",
    "batchBytes", "maxRecordBytes", "timeSlackMs", "damageReport", "maxHashSlotNum", "pushdown",
)  # fmt: skip


def _damage_folder(value: str) -> str:
    """The absolute path, since tasks run in folders of their own; empty if not given."""
    if "://" in value and not value.lower().startswith("file:"):
        raise ValueError(
            f"damageReport={value!r}: it must be a path, or file:///path, of a folder that all "
            "executors share; no object store"
        )
    return locate(value)[1] if value else ""
