"""Columns of a JSON schema. Free of Spark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from batonmq.spark.topic_table.fields import TIME

_KINDS: Final = {"integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_FORMATS: Final = {"date-time": TIME, "date": pa.date32()}


def columns_of(schema: Mapping[str, Any]) -> pa.Schema:
    """The properties of an object as columns. `$ref` within the document is followed; what has
    several types, or is recursive, is JSON text. Raises ValueError.
    """
    found = _kind(schema, schema, ())
    if not pa.types.is_struct(found):
        raise ValueError("--schema: the JSON schema must describe an object with properties")
    return pa.schema(list(found))


def _kind(
    part: Mapping[str, Any], whole: Mapping[str, Any], within: tuple[str, ...]
) -> pa.DataType:
    reference = part.get("$ref")
    if reference is not None:
        if reference in within:
            return pa.string()
        return _kind(_referred(whole, reference), whole, (*within, reference))
    types = part.get("type", "object" if "properties" in part else None)
    names = [each for each in (types if isinstance(types, list) else [types]) if each != "null"]
    name = names[0] if len(names) == 1 else None
    if name == "object" and part.get("properties"):
        fields = part["properties"].items()
        return pa.struct([(key, _kind(each, whole, within)) for key, each in fields])
    if name == "object" and isinstance(part.get("additionalProperties"), Mapping):
        return pa.map_(pa.string(), _kind(part["additionalProperties"], whole, within))
    if name == "array" and isinstance(part.get("items"), Mapping):
        return pa.list_(_kind(part["items"], whole, within))
    if name == "string":
        return _FORMATS.get(part.get("format", ""), pa.string())
    return _KINDS.get(name or "", pa.string())


def _referred(whole: Mapping[str, Any], reference: str) -> Mapping[str, Any]:
    found: Any = whole
    for step in filter(None, reference.removeprefix("#").split("/")):
        if not isinstance(found, Mapping) or step not in found:
            raise ValueError(f"--schema: $ref {reference!r} is not in the document")
        found = found[step]
    return found
