"""Damage in files, and what to do about it: stop, leave it out and count, or make a row of it.

Free of Spark.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, islice
from typing import Any, Final

import pyarrow as pa

from batonmq.protocol.errors import BatonError
from batonmq.spark.read.columns import CORRUPT, batch_of

_ROWS: Final = 1024


class Mode(StrEnum):
    """The option `mode`, as Spark's own sources spell it."""

    FAILFAST = "FAILFAST"
    DROPMALFORMED = "DROPMALFORMED"
    PERMISSIVE = "PERMISSIVE"


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes [offset, offset + size) of the log are no records; `file` holds them.

    `in_log` False: bytes of another file; the offset is that in it (of a queue: in the queue).
    """

    file: str
    offset: int
    size: int
    reason: str
    in_log: bool = True

    def __str__(self) -> str:
        where = "log offset" if self.in_log else "offset"
        return f"{self.file}: {self.reason} at {where} {self.offset} ({self.size} bytes)"


class DamagedFile(BatonError):
    """A file is damaged and the mode is FAILFAST; the text names file, offset and reason."""


@dataclass(slots=True)
class DamageCount:
    """Damaged stretches left out of one partition."""

    stretches: int = 0
    size_bytes: int = 0
    first: Damage | None = None

    def add(self, damage: Damage) -> None:
        self.stretches += 1
        self.size_bytes += damage.size
        self.first = self.first or damage


def corrupt_rows(
    damages: list[Damage], facts: Mapping[str, object], schema: pa.Schema
) -> pa.RecordBatch:
    """A row for each damaged stretch: what is known of its store, and the column `corrupt`."""
    shown = [
        {"file": each.file, "offset": each.offset, "bytes": each.size, "reason": each.reason}
        for each in damages
    ]
    places = [each.offset if each.in_log else None for each in damages]
    return batch_of(schema, len(damages), {"physical_offset": places, CORRUPT: shown, **facts})


def settle(
    items: Iterator[Any],
    mode: Mode,
    facts: Mapping[str, object],
    schema: pa.Schema,
    count: DamageCount,
) -> Iterator[pa.RecordBatch]:
    """Batches of `items`, which are batches and Damage, in order: damage raises DamagedFile, is
    counted, or becomes a row."""
    for is_damage, run in groupby(items, lambda item: isinstance(item, Damage)):
        if not is_damage:
            yield from run
            continue
        # Neighbours become one batch. With FAILFAST nothing is read behind the first.
        while damages := list(islice(run, _ROWS if mode is Mode.PERMISSIVE else 1)):
            if mode is Mode.FAILFAST:
                raise DamagedFile(
                    f"{damages[0]}; read with mode DROPMALFORMED to leave it out, or with "
                    "PERMISSIVE to get a row for it"
                )
            for damage in damages:
                count.add(damage)
            if mode is Mode.PERMISSIVE:
                yield corrupt_rows(damages, facts, schema)
