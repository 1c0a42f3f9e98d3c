"""The options of a read, checked; `docs/spark.md` lists them for users. Free of Spark."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from batonmq.protocol.record import FIXED_SIZE_V1
from batonmq.spark.read.damage import Mode
from batonmq.spark.read.schemas import LIVE_TABLE, TABLES
from batonmq.spark.read.storage import locate, split_paths

_MIB: Final = 1 << 20
# Arrow counts the bytes of a column of one window with 31 bits.
_WINDOW_MAX: Final = 1 << 30
_TRUTHS: Final = {"true": True, "false": False}


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
        given = {name.lower(): value.strip() for name, value in options.items()}
        if {"owner", "provider"} <= set(given):  # what Spark passes for a table of its catalog
            raise ValueError(
                "a table of a catalog cannot lie in stores: use CREATE TEMPORARY VIEW ... USING "
                "batonmq OPTIONS (...)"
            )
        unknown = sorted(set(given) - set(_NAMES))
        if unknown:
            allowed = ", ".join(sorted(_NAMES.values()))
            raise ValueError(f"unknown option {', '.join(unknown)}; there are {allowed}")
        table = given.get("table", "messages").lower()
        if table not in TABLES:
            allowed = ", ".join((*TABLES, LIVE_TABLE))
            raise ValueError(f"table={table!r}: it must be one of {allowed}")
        paths = split_paths(given.get("path", "")) + split_paths(given.get("paths", ""))
        if not paths:
            raise ValueError("no path: name one or several stores, as load(path) or option paths")
        access = _one_of(given, "access", "log", ("log", "queues"))
        default = cls(table, tuple(paths))
        return cls(
            table,
            tuple(paths),
            tuple(part.strip() for part in given.get("columns", "").split(",") if part.strip()),
            Mode(_one_of(given, "mode", Mode.FAILFAST, tuple(Mode))),
            _truth(given, "unconfirmed", default.unconfirmed),
            _truth(given, "checkcrc", default.check_crc),
            access == "queues",
            _number(given, "splitbytes", default.split_bytes, _MIB // 16),
            _number(given, "batchbytes", default.batch_bytes, _MIB // 16, _WINDOW_MAX),
            _number(given, "maxrecordbytes", default.record_bytes_max, FIXED_SIZE_V1, _WINDOW_MAX),
            _number(given, "timeslackms", default.time_slack_ms, 0),
            _local_folder(given, "damagereport"),
            _number(given, "maxhashslotnum", 0, 0),
            _truth(given, "pushdown", default.pushdown),
        )

    def ranges_of(self, size_bytes: int) -> int:
        """Into how many ranges so many bytes of one file are split: equal ones, at least one.

        The last range of a file must hold the blank that ends it: what lies behind that may be left
        from before a truncation, and no range may begin there. So none is below maxRecordBytes.
        """
        return max(1, min(-(-size_bytes // self.split_bytes), size_bytes // self.record_bytes_max))


_NAMES: Final = {
    name.lower(): name
    for name in (
        "path",
        "paths",
        "table",
        "columns",
        "mode",
        "unconfirmed",
        "checkCrc",
        "access",
        "splitBytes",
        "batchBytes",
        "maxRecordBytes",
        "timeSlackMs",
        "damageReport",
        "maxHashSlotNum",
        "pushdown",
    )
}


def _one_of(given: Mapping[str, str], name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = given.get(name, default)
    for each in allowed:
        if value.lower() == each.lower():
            return str(each)
    raise ValueError(f"{_NAMES[name]}={value!r}: it must be one of {', '.join(allowed)}")


def _truth(given: Mapping[str, str], name: str, default: bool) -> bool:
    value = given.get(name, str(default)).lower()
    if value not in _TRUTHS:
        raise ValueError(f"{_NAMES[name]}={value!r}: it must be true or false")
    return _TRUTHS[value]


def _local_folder(given: Mapping[str, str], name: str) -> str:
    """The absolute path, since tasks run in folders of their own; empty if not given."""
    value = given.get(name, "")
    if not value:
        return ""
    if "://" in value and not value.lower().startswith("file:"):
        raise ValueError(
            f"{_NAMES[name]}={value!r}: it must be a path, or file:///path, of a folder that all "
            "executors share; no object store"
        )
    return locate(value)[1]


def _number(
    given: Mapping[str, str], name: str, default: int, least: int, most: int | None = None
) -> int:
    value = given.get(name, str(default))
    if not value.isdecimal() or int(value) < least or (most is not None and int(value) > most):
        allowed = f"from {least} on" if most is None else f"from {least} to {most}"
        raise ValueError(f"{_NAMES[name]}={value!r}: it must be a number {allowed}")
    return int(value)


__all__ = ["ReadOptions"]
