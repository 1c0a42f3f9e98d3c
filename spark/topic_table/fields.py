"""Columns of fields: which type a value has, whether a value fits, and those of a JSON schema.
Free of Spark.

A column takes only what it holds exactly (but for 32-bit floats, which round). Everything else is a
`Misfit`, and stays in the column `_rest`.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyarrow import types

Fit = Callable[[Any, list[bool]], Any]
"""The value as Arrow takes it. The list gets an entry for what a struct has no field for. Raises
Misfit."""
TIME: Final = pa.timestamp("us", "UTC")
NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,127}")
"""Fields of other names get no column: table formats refuse them, or they look like ours."""
_EXACT: Final = 1 << 53  # a double does not hold every whole number beyond it
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
    if types.is_boolean(kind):
        return lambda value: _is(value, bool)
    return {pa.string(): _string, pa.binary(): _bytes}[kind]


def _is(value: Any, *kinds: type) -> Any:
    """The value, if it is of one of these types. To Python a boolean is a number, to us it is
    none."""
    if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
        raise Misfit
    return value


def _list(fit: Fit) -> Fit:
    return lambda value, more: [
        None if each is None else fit(each, more) for each in _is(value, list)
    ]


def _map(key: Fit, item: Fit) -> Fit:
    return lambda value, more: [
        (key(k, more), None if v is None else item(v, more)) for k, v in _is(value, Mapping).items()
    ]


def _struct(fits: Mapping[str, Fit]) -> Fit:
    def apply(value: Any, more: list[bool]) -> Any:
        there = {n: each for n, each in _is(value, Mapping).items() if each is not None}
        more += [True for name in there if name not in fits]
        return {name: fits[name](each, more) for name, each in there.items() if name in fits}

    return apply


def _integer(bits: int) -> Callable[[Any], Any]:
    low, high = -(1 << bits - 1), 1 << bits - 1

    def apply(value: Any) -> Any:
        if not low <= _is(value, int) < high:
            raise Misfit
        return value

    return apply


def _float(value: Any) -> Any:
    if isinstance(_is(value, int, float), int) and abs(value) > _EXACT:
        raise Misfit
    return float(value)


def _decimal(precision: int, scale: int) -> Callable[[Any], Any]:
    def apply(value: Any) -> Any:
        try:
            number = Decimal(str(_is(value, int, float, str, Decimal)))
            exact = number.quantize(Decimal(1).scaleb(-scale))
        except InvalidOperation:
            raise Misfit from None
        if exact != number or len(exact.as_tuple().digits) > precision:
            raise Misfit
        return exact

    return apply


def _read(read: Callable[[str], Any], value: Any) -> Any:
    """What a text says, any other value as it is."""
    try:
        return read(value) if isinstance(value, str) else value
    except ValueError:
        raise Misfit from None


def _moment(value: Any) -> datetime:
    moment: datetime = _is(_read(datetime.fromisoformat, value), datetime)
    try:
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError:
        raise Misfit from None


def _date(value: Any) -> Any:
    day = _read(date.fromisoformat, value)
    if isinstance(day, datetime):
        raise Misfit
    return _is(day, date)


def _string(value: Any) -> str:
    """Text as it is, what has parts as JSON."""
    if isinstance(_is(value, str, dict, list), str):
        if not value.isascii():
            _read(str.encode, value)  # half of a surrogate pair is no text
        return value
    return json_text(value)


def _bytes(value: Any) -> Any:
    """In JSON bytes are base64."""
    return _is(_read(partial(base64.b64decode, validate=True), value), bytes)


def json_text(value: object) -> str:
    """JSON of a value, also of one that only Avro or Protobuf has."""
    return json.dumps(value, default=_no_json, separators=(",", ":"))


def _no_json(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, datetime | date) else str(value)


# -- columns of a JSON schema ---------------------------------------------------------------------

_JSON_KINDS: Final = {"integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_JSON_FORMATS: Final = {"date-time": TIME, "date": pa.date32()}


def columns_of(schema: Mapping[str, Any]) -> pa.Schema:
    """The properties of an object as columns. `$ref` within the document is followed; what has
    several types, or is recursive, is JSON text. Raises ValueError.
    """
    found = _json_kind(schema, schema, ())
    if not pa.types.is_struct(found):
        raise ValueError("--schema: the JSON schema must describe an object with properties")
    return pa.schema(list(found))


def _json_kind(
    part: Mapping[str, Any], whole: Mapping[str, Any], within: tuple[str, ...]
) -> pa.DataType:
    reference = part.get("$ref")
    if reference is not None:
        if reference in within:
            return pa.string()
        return _json_kind(_referred(whole, reference), whole, (*within, reference))
    types = part.get("type", "object" if "properties" in part else None)
    names = [each for each in (types if isinstance(types, list) else [types]) if each != "null"]
    name = names[0] if len(names) == 1 else None
    if name == "object" and part.get("properties"):
        fields = part["properties"].items()
        return pa.struct([(key, _json_kind(each, whole, within)) for key, each in fields])
    if name == "object" and isinstance(part.get("additionalProperties"), Mapping):
        return pa.map_(pa.string(), _json_kind(part["additionalProperties"], whole, within))
    if name == "array" and isinstance(part.get("items"), Mapping):
        return pa.list_(_json_kind(part["items"], whole, within))
    if name == "string":
        return _JSON_FORMATS.get(part.get("format", ""), pa.string())
    return _JSON_KINDS.get(name or "", pa.string())


def _referred(whole: Mapping[str, Any], reference: str) -> Mapping[str, Any]:
    found: Any = whole
    for step in filter(None, reference.removeprefix("#").split("/")):
        if not isinstance(found, Mapping) or step not in found:
            raise ValueError(f"--schema: $ref {reference!r} is not in the document")
        found = found[step]
    return found
