"""Makes rows of a table from messages; the proof makes the same rows from the log. Free of Spark.

No message is dropped and none stops the stream: what has no column is in `_rest`, a body that
cannot be read is in `_body`, with the reason in `_error`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from batonmq.spark.read.columns import batch_of, columns_of
from batonmq.spark.topic_table.bodies import Bodies
from batonmq.spark.topic_table.fields import (
    NAME,
    Misfit,
    fitting,
    inferred,
    json_text,
    kind_of,
)

OWN: Final = columns_of("""
    string: _broker
    int: _queue_id
    long: _queue_offset _physical_offset _epoch
    time: _store_at _born_at
    string: _keys _tags _message_id _rest _error
    binary: _body
""")
"""Our columns, before those of the records' fields."""
#: Column of the table -> column of the message, for all but the last three.
MESSAGE: Final = {name: name.removeprefix("_") for name in OWN.names[:-3]} | {
    "_message_id": "unique_key"
}
_ERROR_MAX: Final = 500
Fresh = dict[str, set[str]]
"""Fields without a column, with the types of their values."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What rows are made of; it travels to the tasks.

    `fields`: the columns of the records' fields. `infers`: new fields may become columns, as long
    as there are fewer than `columns_max`.
    """

    bodies: Bodies
    fields: pa.Schema
    infers: bool = False
    columns_max: int = 0

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([*OWN, *self.fields])


def new_columns(plan: RowPlan, fresh: Mapping[str, set[str]]) -> list[pa.Field]:
    """The columns that new fields get. To Spark names that differ by case only are one name: of
    such fields the one in lower case gets the column."""
    taken = {name.casefold() for name in plan.fields.names}
    made = []
    for name in sorted(fresh, key=lambda name: (name.casefold(), name.swapcase())):
        if len(taken) >= plan.columns_max:
            break
        if name.casefold() not in taken:
            taken.add(name.casefold())
            made.append(pa.field(name, inferred(fresh[name])))
    return made


class RowMaker:
    """Makes rows of messages. `fresh`: fields that could be columns; `broken`: bad bodies."""

    def __init__(self, plan: RowPlan) -> None:
        self.fresh: Fresh = {}
        self.broken = 0
        self._plan = plan
        self._decode = plan.bodies.decoder()
        self._fields = plan.fields
        self._fits = {field.name: fitting(field.type) for field in self._fields}
        self._folded = {name.casefold() for name in self._fits}

    def rows(self, messages: pa.RecordBatch) -> pa.RecordBatch:
        """A row for each message, in order."""
        bodies = messages.column("body").to_pylist()
        columns = {name: [None] * len(bodies) for name in self._fits}
        rest: list[Any] = [None] * len(bodies)
        errors: list[str | None] = [None] * len(bodies)
        kept: list[bytes | None] = [None] * len(bodies)
        for at, body in enumerate(bodies):
            try:
                found, is_whole = self._decode(body)
                values, more = self._place(found)
                text = json_text(more) if more else None
            except Exception as error:  # whatever strangers send: it is kept and named (R54)
                errors[at], kept[at] = _reason(error), body
                self.broken += 1
                continue
            rest[at] = text
            if not is_whole:
                kept[at] = body
            for name, value in values:
                columns[name][at] = value
        own = {name: messages.column(of) for name, of in MESSAGE.items()}
        own |= {"_rest": rest, "_error": errors, "_body": kept}
        return batch_of(self._plan.schema, len(bodies), own | columns)

    def _place(self, found: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
        """The values of columns, and what has none."""
        values: list[tuple[str, Any]] = []
        rest: dict[str, Any] = {}
        more: list[bool] = []
        for name, value in found.items():
            if value is None:
                continue
            fit = self._fits.get(name)
            if fit is None:
                rest[name] = value
                self._note(name, value)
                continue
            try:
                values.append((name, fit(value, more)))
            except Misfit:
                more.append(True)
            if more:
                rest[name] = value
                more.clear()
        return values, rest

    def _note(self, name: str, value: object) -> None:
        if not self._plan.infers or not NAME.fullmatch(name) or name.casefold() in self._folded:
            return
        kind = kind_of(value)
        if kind and (name in self.fresh or len(self.fresh) < self._plan.columns_max):
            self.fresh.setdefault(name, set()).add(kind)

    def texts(self, rows: pa.RecordBatch) -> Iterator[str]:
        """Each row as one text; equal rows have equal ones.

        What `_rest` had from before a field became a column counts as that column's value.
        """
        for row in rows.to_pylist():
            left = json.loads(row["_rest"] or "{}")
            values, rest = self._place(left)
            shown = {name: value for name, value in row.items() if value is not None}
            shown["_rest"] = {name: left[name] for name in rest}
            for name, value in values:
                if name not in shown:
                    kind = self._fields.field(name).type
                    shown[name] = pa.array([value], kind).to_pylist()[0]
            yield json.dumps(shown, default=repr, sort_keys=True)


def _reason(error: Exception) -> str:
    text = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    # It may quote the body, with half of a surrogate pair that no column takes.
    return " ".join(text.split()).encode(errors="replace").decode()[:_ERROR_MAX]
