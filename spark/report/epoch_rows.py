"""The tables on the page on epochs: rows of the driver into cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from batonmq.spark.report.epoch_tables import FAILOVERS_LISTED, PARTS, Group, Totals
from batonmq.spark.report.page import Badge, Cell, Code, Column, Table
from batonmq.spark.report.palette import kind_label
from batonmq.spark.report.quantities import (
    UNKNOWN,
    bytes_text,
    count_text,
    counted,
    duration_text,
    moment_text,
)

_TONES: Final = {"critical": "bad", "warning": "warn"}


def failover_table(rows: Sequence[Any], totals: Totals) -> Table:
    """`rows` of the table failovers, times in ms."""
    all_of_them = totals.failovers <= FAILOVERS_LISTED
    caption = (
        f"{counted(len(rows), 'change')} of master, the longest first."
        if all_of_them
        else f"The {len(rows)} longest of {count_text(totals.failovers)} changes of master; "
        "unclean ones first. All are in the table failovers."
    )
    columns = [
        Column("Elected at", "time"), Column("Group", "name"), Column("Epoch", "number"),
        Column("Kind"), Column("Cause"), Column("Broker", "name"),
        Column("No writes", "number"),
        *(Column(title, "number") for title in ("Detect", "Elect", "Role", "Open", "Ack")),
        Column("Cut", "number"), Column("Remarks"),
    ]  # fmt: skip
    return Table(caption, columns, [_failover(row) for row in rows])


def _failover(row: Any) -> list[Cell]:
    kind = kind_label(row.kind)
    remarks = []
    if row.idle:
        remarks.append("no client waited")
    if row.complete is False:
        remarks.append("its end is unknown")
    if row.clock_problem:
        remarks.append(row.clock_problem)
    before, after = row.master_before or UNKNOWN, row.master or UNKNOWN
    return [
        moment_text(row.elected_at),
        row.group or "",
        UNKNOWN if row.master_epoch is None else count_text(row.master_epoch),
        Badge(kind, "bad") if row.unclean else kind,
        (row.cause or UNKNOWN).replace("_", " "),
        f"{before} → {after}",
        duration_text(row.unavailable_ms),
        *(duration_text(row[name]) for name in PARTS),
        bytes_text(row.truncated_bytes) if row.truncated_bytes else UNKNOWN,
        "; ".join(remarks),
    ]


def finding_table(numbers: Mapping[str, int], rows: Sequence[Any]) -> Table:
    every = sum(numbers.values())
    split = ", ".join(f"{count_text(number)} {name}" for name, number in sorted(numbers.items()))
    caption = f"{counted(every, 'finding')}: {split}."
    if every > len(rows):
        caption += f" The gravest {len(rows)} are listed, all are in the table findings."
    columns = [
        Column("Severity"), Column("Group", "name"), Column("What", "words"), Column("Who or what"),
        Column("At", "time"), Column("Evidence"),
    ]  # fmt: skip
    return Table(
        caption,
        columns,
        [
            [
                Badge(row.severity, _TONES.get(row.severity, "")),
                row.group or "",
                row.text or (row.kind or "").replace("_", " "),
                row.subject or "",
                moment_text(row.at),
                Code(row.evidence or ""),
            ]
            for row in rows
        ],
    )


def group_table(groups: Sequence[Group], totals: Totals) -> Table:
    caption = f"{counted(totals.groups, 'group')}."
    if totals.groups > len(groups):
        caption += f" The {len(groups)} with most time without writes are listed."
    columns = [
        Column("Group", "name"), Column("Changes of master", "number"),
        Column("Outages", "number"), Column("Without writes", "number"),
        Column("Longest", "number"), Column("Set changes", "number"), Column("Now"),
    ]  # fmt: skip
    return Table(
        caption,
        columns,
        [
            [
                group.name,
                count_text(group.failovers),
                count_text(group.outages),
                duration_text(group.unavailable_ms),
                duration_text(group.longest_ms),
                count_text(group.set_changes),
                Badge("no master", "bad") if group.is_open else "has a master",
            ]
            for group in groups
        ],
    )


def truncation_table(number: int, size: int, rows: Sequence[Any]) -> Table:
    caption = f"{counted(number, 'truncation')}, {bytes_text(size)} altogether."
    if number > len(rows):
        caption += f" The largest {len(rows)} are listed."
    columns = [
        Column("At", "time"), Column("Group", "name"), Column("Broker", "number"),
        Column("Epoch", "number"), Column("From offset", "number"), Column("To offset", "number"),
        Column("Cut", "number"),
    ]  # fmt: skip
    return Table(
        caption,
        columns,
        [
            [
                moment_text(row.at), row.group or "", str(row.broker_id or UNKNOWN),
                UNKNOWN if row.master_epoch is None else str(row.master_epoch),
                _offset(row.from_offset), _offset(row.to_offset), bytes_text(row.bytes),
            ]
            for row in rows
        ],
    )  # fmt: skip


def leader_table(number: int, rows: Sequence[Any]) -> Table:
    caption = f"{counted(number, 'change')} of the leading controller, the latest first."
    columns = [
        Column("At", "time"), Column("Leader", "name"), Column("Before", "name"),
        Column("Controller epoch", "number"),
    ]  # fmt: skip
    return Table(
        caption,
        columns,
        [
            [
                moment_text(row.at), row.leader or UNKNOWN, row.leader_before or UNKNOWN,
                UNKNOWN if row.controller_epoch is None else str(row.controller_epoch),
            ]
            for row in rows
        ],
    )  # fmt: skip


def _offset(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"
