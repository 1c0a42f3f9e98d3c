"""The formats of bodies: JSON, Avro, Protobuf, or bytes as they are. Free of Spark.

A decoder makes a document of a body: values by the names of fields, None where a field has none.
"""

import io
from collections.abc import Callable, Mapping
from datetime import time
from typing import Any, Final
from uuid import UUID

import msgspec
import pyarrow as pa
from google.protobuf import json_format

from batonmq.spark.topic_table.fields import TIME, json_text

RAW, JSON, AVRO, PROTOBUF = "raw", "json", "avro", "protobuf"
Decoded = tuple[Mapping[str, Any], bool]
Decode = Callable[[bytes], Decoded]
"""(document, whether it has all that the body has). Raises whatever a bad body leads to."""
_SINGLE_OBJECT: Final = b"\xc3\x01"
"""Avro's single-object encoding begins so; the fingerprint of the writer's schema follows."""


class Bodies(msgspec.Struct, frozen=True):
    """How the bodies of a topic are read; it travels to the tasks.

    `schemas`: of Avro, the newest last; of Protobuf, one set of file descriptors. `header_bytes`:
    what a serializer puts before each record.
    """

    form: str = JSON
    schemas: tuple[bytes, ...] = ()
    message: str = ""
    header_bytes: int = 0

    def columns(self) -> pa.Schema | None:
        """The columns that a schema of Avro or Protobuf gives; None where it gives none.

        Raises ValueError.
        """
        if self.form == RAW:
            return pa.schema([("body", pa.binary())])
        if self.form == AVRO:
            return _avro_columns(self._avro()[-1])
        if self.form == PROTOBUF:
            return _columns(self._protobuf().DESCRIPTOR, ())
        return None

    def decoder(self) -> Decode:
        made = {RAW: self._raw, JSON: lambda: _json, AVRO: self._of_avro,
                PROTOBUF: self._of_protobuf}[self.form]()  # fmt: skip
        skip = self.header_bytes
        return (lambda body: made(body[skip:])) if skip else made

    def _raw(self) -> Decode:
        return lambda body: ({"body": body}, True)

    def _avro(self) -> list[Any]:
        import fastavro

        try:
            found = [fastavro.parse_schema(msgspec.json.decode(each)) for each in self.schemas]
        except (ValueError, KeyError, fastavro.schema.SchemaParseException) as error:
            raise ValueError(f"--schema: it is no Avro schema: {error}") from error
        if not found or any(_type_of(each) != "record" for each in found):
            raise ValueError("--schema: Avro needs the file of a schema, of a record")
        return found

    def _of_avro(self) -> Decode:
        from fastavro import schemaless_reader
        from fastavro.schema import fingerprint, to_parsing_canonical_form

        every = self._avro()
        newest = every[-1]
        known = {
            bytes.fromhex(fingerprint(to_parsing_canonical_form(each), "CRC-64-AVRO")): each
            for each in every
        }

        def decode(body: bytes) -> Decoded:
            writer, begin = newest, 0
            if body[:2] == _SINGLE_OBJECT:
                if body[2:10] not in known:
                    raise ValueError(f"no --schema has the fingerprint {body[2:10].hex()}")
                writer, begin = known[body[2:10]], 10
            stream = io.BytesIO(body)
            stream.seek(begin)
            found = schemaless_reader(stream, writer, newest)
            if stream.tell() != len(body):
                raise ValueError(f"{len(body) - stream.tell()} bytes follow the record")
            return {name: _plain_value(value) for name, value in found.items()}, True

        return decode

    def _protobuf(self) -> Any:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

        pool = descriptor_pool.DescriptorPool()
        try:
            for text in self.schemas:
                for file in descriptor_pb2.FileDescriptorSet.FromString(text).file:
                    pool.Add(file)
            found = pool.FindMessageTypeByName(self.message)
        except Exception as error:  # the library has no narrower class for a file of other things
            raise ValueError(
                f"--schema, --message {self.message!r}: not found in the descriptor file, as "
                f"protoc --include_imports --descriptor_set_out writes it: {error}"
            ) from error
        return message_factory.GetMessageClass(found)

    def _of_protobuf(self) -> Decode:
        from google.protobuf.unknown_fields import UnknownFieldSet

        kind = self._protobuf()

        def decode(body: bytes) -> Decoded:
            found = kind.FromString(body)
            return _fields(found, (kind.DESCRIPTOR.full_name,)), not len(UnknownFieldSet(found))

        return decode


def _json(body: bytes) -> Decoded:
    found = msgspec.json.decode(body)
    if not isinstance(found, dict):
        raise ValueError("it is JSON, but no object")
    return found, True


# -- Avro -----------------------------------------------------------------------------------------

_AVRO: Final = {
    "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(),
    "double": pa.float64(), "bytes": pa.binary(), "fixed": pa.binary(), "string": pa.string(),
    "enum": pa.string(), "date": pa.date32(), "timestamp-millis": TIME, "timestamp-micros": TIME,
    "local-timestamp-millis": pa.timestamp("us"), "local-timestamp-micros": pa.timestamp("us"),
    "time-millis": pa.string(), "time-micros": pa.string(), "uuid": pa.string(),
}  # fmt: skip


def _type_of(schema: Any) -> Any:
    return schema["type"] if isinstance(schema, dict) else schema


def _avro_columns(schema: Any) -> pa.Schema:
    named: dict[str, Any] = {}
    fields = [(each["name"], _avro_type(each["type"], named, ())) for each in schema["fields"]]
    return pa.schema(fields)


def _avro_type(schema: Any, named: dict[str, Any], within: tuple[str, ...]) -> pa.DataType:
    """`named`: types that are defined before; `within`: the records around it. A recursive record
    and a union of several types are JSON text."""
    if isinstance(schema, list):
        rest = [each for each in schema if _type_of(each) != "null"]
        return _avro_type(rest[0], named, within) if len(rest) == 1 else pa.string()
    if isinstance(schema, str):
        if schema in named:
            return _avro_type(named[schema], named, within)
        return _AVRO.get(schema, pa.string())
    kind, logical = schema["type"], schema.get("logicalType")
    if isinstance(kind, dict | list):
        return _avro_type(kind, named, within)
    name = schema.get("name", "")
    if name:
        named[name] = schema
    if logical == "decimal":
        return pa.decimal128(schema["precision"], schema.get("scale", 0))
    if logical in _AVRO:
        return _AVRO[logical]
    if kind == "array":
        return pa.list_(_avro_type(schema["items"], named, within))
    if kind == "map":
        return pa.map_(pa.string(), _avro_type(schema["values"], named, within))
    if kind == "record":
        if name in within or not schema["fields"]:
            return pa.string()
        inner = (*within, name)
        return pa.struct(
            [(each["name"], _avro_type(each["type"], named, inner)) for each in schema["fields"]]
        )
    return _avro_type(kind, named, within) if kind in named else _AVRO.get(kind, pa.string())


def _plain_value(value: Any) -> Any:
    """Values of types that no column has as text."""
    if isinstance(value, dict):
        return {name: _plain_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain_value(each) for each in value]
    return str(value) if isinstance(value, time | UUID) else value


# -- Protobuf -------------------------------------------------------------------------------------


def _columns(message: Any, within: tuple[str, ...]) -> pa.Schema:
    inner = (*within, message.full_name)
    return pa.schema([(each.name, _protobuf_type(each, inner)) for each in message.fields])


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _protobuf_type(field: Any, within: tuple[str, ...]) -> pa.DataType:
    if _is_map(field):
        key, value = field.message_type.fields
        return pa.map_(_protobuf_item(key, within), _protobuf_item(value, within))
    item = _protobuf_item(field, within)
    return pa.list_(item) if field.is_repeated else item


def _protobuf_item(field: Any, within: tuple[str, ...]) -> pa.DataType:
    """A message that holds itself, or has no fields, is JSON text."""
    if field.message_type is None:
        return _SCALARS[field.cpp_type] if field.type != field.TYPE_BYTES else pa.binary()
    if field.message_type.full_name in within or not field.message_type.fields:
        return pa.string()
    return pa.struct(list(_columns(field.message_type, within)))


#: By FieldDescriptor.CPPTYPE_*: int32, int64, uint32, uint64, double, float, bool, enum, string.
_SCALARS: Final = dict(zip(range(1, 10), (
    pa.int32(), pa.int64(), pa.int64(), pa.decimal128(20, 0), pa.float64(), pa.float32(),
    pa.bool_(), pa.string(), pa.string(),
), strict=True))  # fmt: skip


def _fields(message: Any, within: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if _is_map(field):
            item = field.message_type.fields_by_name["value"]
            found[field.name] = {key: _value(item, value[key], within) for key in value}
        elif field.is_repeated:
            found[field.name] = [_value(field, each, within) for each in value]
        else:
            found[field.name] = _value(field, value, within)
    return found


def _value(field: Any, value: Any, within: tuple[str, ...]) -> Any:
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else str(value)
    if field.message_type is None:
        return value
    name = field.message_type.full_name
    if name in within or not field.message_type.fields:
        return json_text(json_format.MessageToDict(value, preserving_proto_field_name=True))
    return _fields(value, (*within, name))
