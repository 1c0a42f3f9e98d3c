"""Columns of fields: which type a value has, and whether a value fits a column. Free of Spark.

A column takes only what it holds exactly (but for 32-bit floats, which round). Everything else is a
`Misfit`, and stays in the column `_rest`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import pyarrow as pa
from pyarrow import types

Fit = Callable[[Any, list[bool]], Any]
"""The value as Arrow takes it. The list gets an entry for what a struct has no field for. Raises
Misfit."""
TIME: Final = pa.timestamp("us", "UTC")
NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,127}")
"""Fields of other names get no column: table formats refuse them, or they look like ours."""
_EXACT: Final = 1 << 53
_BITS: Final = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64}
_INFERRED: Final = {"boolean": pa.bool_(), "bigint": pa.int64(), "double": pa.float64()}


class Misfit(ValueError):
    """A column cannot hold this value."""


def plain(kind: pa.DataType) -> pa.DataType:
    """The type as we write it, of what a table format or Spark calls it.

    Raises ValueError for one that no column can have.
    """
    if types.is_large_string(kind) or types.is_string_view(kind) or types.is_string(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind) or types.is_binary(kind):
        return pa.binary()
    if types.is_fixed_size_binary(kind):
        return pa.binary()
    if types.is_timestamp(kind):
        return TIME if kind.tz is not None else pa.timestamp("us")
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(plain(kind.value_type))
    if types.is_map(kind):
        return pa.map_(plain(kind.key_type), plain(kind.item_type))
    if types.is_struct(kind) and kind.num_fields:
        return pa.struct([pa.field(each.name, plain(each.type)) for each in kind])
    if types.is_decimal128(kind) or types.is_floating(kind) or types.is_date32(kind):
        return kind
    if types.is_boolean(kind) or kind in _BITS:
        return kind
    raise ValueError(f"a column cannot be {kind}")


def kind_of(value: object) -> str:
    """The inferred type of a JSON value by Spark's name; "" for a number without one."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "bigint" if -(1 << 63) <= value < 1 << 63 else ""
    return "double" if isinstance(value, float) else "string"


def inferred(kinds: set[str]) -> pa.DataType:
    """The column of a field that had values of these types."""
    single = "double" if kinds == {"bigint", "double"} else "".join(sorted(kinds))
    return _INFERRED.get(single, pa.string())


def fitting(kind: pa.DataType) -> Fit:
    """What makes values fit a column. Raises ValueError for a type that no column can have."""
    kind = plain(kind)
    if types.is_list(kind):
        return _list(fitting(kind.value_type))
    if types.is_map(kind):
        return _map(fitting(kind.key_type), fitting(kind.item_type))
    if types.is_struct(kind):
        return _struct({each.name: fitting(each.type) for each in kind})
    single = _single(kind)
    return lambda value, _: single(value)


def _single(kind: pa.DataType) -> Callable[[Any], Any]:
    if kind in _BITS:
        return _integer(_BITS[kind])
    if types.is_floating(kind):
        return _float
    if types.is_decimal128(kind):
        return _decimal(kind.precision, kind.scale)
    if types.is_timestamp(kind):
        return _moment if kind.tz is not None else lambda v: _moment(v).replace(tzinfo=None)
    if types.is_date32(kind):
        return _date
    return {pa.bool_(): _bool, pa.string(): _string, pa.binary(): _bytes}[kind]


def _list(fit: Fit) -> Fit:
    def apply(value: Any, more: list[bool]) -> Any:
        if not isinstance(value, list):
            raise Misfit
        return [None if each is None else fit(each, more) for each in value]

    return apply


def _map(key: Fit, item: Fit) -> Fit:
    def apply(value: Any, more: list[bool]) -> Any:
        if not isinstance(value, Mapping):
            raise Misfit
        return [(key(k, more), None if v is None else item(v, more)) for k, v in value.items()]

    return apply


def _struct(fits: Mapping[str, Fit]) -> Fit:
    def apply(value: Any, more: list[bool]) -> Any:
        if not isinstance(value, Mapping):
            raise Misfit
        made = {}
        for name, each in value.items():
            if each is None:
                continue
            if name in fits:
                made[name] = fits[name](each, more)
            else:
                more.append(True)
        return made

    return apply


def _bool(value: Any) -> Any:
    if not isinstance(value, bool):
        raise Misfit
    return value


def _integer(bits: int) -> Callable[[Any], Any]:
    low, high = -(1 << bits - 1), 1 << bits - 1

    def apply(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
            raise Misfit
        return value

    return apply


def _float(value: Any) -> Any:
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _EXACT:
        raise Misfit
    return float(value)


def _decimal(precision: int, scale: int) -> Callable[[Any], Any]:
    def apply(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
            raise Misfit
        try:
            number = Decimal(str(value))
            exact = number.quantize(Decimal(1).scaleb(-scale))
        except InvalidOperation:
            raise Misfit from None
        if exact != number or len(exact.as_tuple().digits) > precision:
            raise Misfit
        return exact

    return apply


def _moment(value: Any) -> datetime:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise Misfit from None
    if not isinstance(value, datetime):
        raise Misfit
    try:
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except OverflowError:
        raise Misfit from None


def _date(value: Any) -> date:
    if isinstance(value, str):
        try:
            value = date.fromisoformat(value)
        except ValueError:
            raise Misfit from None
    if isinstance(value, datetime) or not isinstance(value, date):
        raise Misfit
    return value


def _string(value: Any) -> str:
    """Text as it is, what has parts as JSON."""
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise Misfit from None
        return value
    if isinstance(value, dict | list):
        return json_text(value)
    raise Misfit


def _bytes(value: Any) -> bytes:
    """In JSON bytes are base64."""
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except ValueError:
            raise Misfit from None
    if not isinstance(value, bytes):
        raise Misfit
    return value


def json_text(value: object) -> str:
    """JSON of a value, also of one that only Avro or Protobuf has."""
    return json.dumps(value, default=_no_json, separators=(",", ":"))


def _no_json(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, datetime | date) else str(value)
