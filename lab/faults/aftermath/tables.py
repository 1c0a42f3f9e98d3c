"""What the jobs wrote, as far as it is held against the record: a few rows of Parquet each."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class FailoverRow:
    """A row of the table `failovers`. `times_ms`: the moments that are known, since 1970.

    `without_writes_ms`: `unavailable_ms` with the silence of a master that hung before.
    `changed_set`: whether the SyncStateSet is another one than before the election.
    """

    group: str
    epoch: int
    kind: str
    cause: str
    master_before: int
    master: int
    times_ms: dict[str, int]
    unavailable_ms: int | None
    truncated_bytes: int
    changed_set: bool
    without_writes_ms: int | None = None


@dataclass(frozen=True, slots=True)
class MastershipRow:
    """A row of the table `masterships`; `ended_ms` None: master to the end."""

    group: str
    epoch: int
    broker_id: int
    began_ms: int
    ended_ms: int | None


@dataclass(frozen=True, slots=True)
class SetChangeRow:
    """A row of the table `set_changes`. `epoch`: the syncStateSetEpoch."""

    group: str
    at_ms: int
    epoch: int
    joined: frozenset[int]
    left: frozenset[int]
    after: frozenset[int]


@dataclass(frozen=True, slots=True)
class Tables:
    """Everything in the order of time."""

    failovers: list[FailoverRow]
    masterships: list[MastershipRow]
    set_changes: list[SetChangeRow]


Name = tuple[str, int, int]
"""(log, raft index, part): names an event of the history."""


def read_streamed(output: Path) -> list[tuple[Name, int]]:
    """(name, masterEpoch of an election, else 0) of every row that `stream_history` wrote so far.

    Nothing yet is an empty list.
    """
    rows: list[tuple[Name, int]] = []
    for file in sorted(output.glob("part-*.parquet")):
        for row in _rows(file, "log", "raft_index", "part", "kind", "master_epoch"):
            epoch = row["master_epoch"] if row["kind"] == "elected" else 0
            rows.append(((row["log"], row["raft_index"], row["part"] or 0), epoch))
    return rows


_TIMES = ("detected_at", "elected_at", "role_at", "opened_at", "first_ack_at")


def read_tables(output: Path) -> Tables:
    """The tables that `spark.jobs.epoch_history` wrote. Raises OSError if one is not there."""
    failovers = [
        FailoverRow(
            row["group"],
            row["master_epoch"],
            row["kind"],
            row["cause"] or "",
            row["master_before"] or 0,
            row["master"] or 0,
            {name: ms for name in _TIMES if (ms := _ms(row[name])) is not None},
            row["unavailable_ms"],
            row["truncated_bytes"] or 0,
            sorted(row["set_before"] or ()) != sorted(row["sync_state_set"] or ()),
            row["without_writes_ms"],
        )
        for row in _rows(output / "failovers")
    ]
    masterships = [
        MastershipRow(
            row["group"],
            row["master_epoch"],
            row["broker_id"],
            _ms(row["began_at"]) or 0,
            _ms(row["ended_at"]),
        )
        for row in _rows(output / "masterships")
    ]
    changes = [
        SetChangeRow(
            row["group"],
            _ms(row["at"]) or 0,
            row["sync_state_set_epoch"] or 0,
            frozenset(row["joined"] or ()),
            frozenset(row["left"] or ()),
            frozenset(row["set_after"] or ()),
        )
        for row in _rows(output / "set_changes")
    ]
    return Tables(
        sorted(failovers, key=lambda row: (row.group, row.epoch)),
        sorted(masterships, key=lambda row: (row.group, row.epoch)),
        sorted(changes, key=lambda row: (row.group, row.at_ms, row.epoch)),
    )


def _rows(path: Path, *columns: str) -> list[dict[str, Any]]:
    """The rows of a table, or of one file of it."""
    from pyarrow import parquet

    partitioning = None if path.is_file() else "hive"
    table = parquet.read_table(path, columns=list(columns) or None, partitioning=partitioning)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)
