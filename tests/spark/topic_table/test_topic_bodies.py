"""Bodies of each format: which columns a schema gives, and which values a body."""

import io
import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from uuid import UUID

import fastavro
import pyarrow as pa
import pytest
from fastavro.schema import fingerprint, to_parsing_canonical_form
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from batonmq.spark.topic_table.bodies import AVRO, PROTOBUF, RAW, Bodies
from batonmq.spark.topic_table.fields import Misfit, columns_of, fitting
from batonmq.spark.topic_table.rows import RowMaker, RowPlan
from tests.spark.topic_table.table_runs import messages

MOMENT = datetime(2026, 11, 28, 10, 0, 0, 5000, tzinfo=UTC)


def made(bodies, *values, columns=None):
    """The rows of bodies without our own columns, but for those that have something."""
    columns = bodies.columns() if columns is None else columns
    maker = RowMaker(RowPlan(bodies, columns))
    rows = maker.rows(messages(list(values)))
    said = ("_rest", "_error", "_body")
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith("_") or (name in said and value is not None)
        }
        for row in rows.to_pylist()
    ]


V1 = {"type": "record", "name": "Order", "fields": [
    {"name": "id", "type": "long"},
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    {"name": "day", "type": {"type": "int", "logicalType": "date"}},
    {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9,
                               "scale": 2}},
    {"name": "key", "type": {"type": "string", "logicalType": "uuid"}},
    {"name": "open", "type": {"type": "int", "logicalType": "time-millis"}},
    {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
    {"name": "lines", "type": {"type": "array", "items": {"type": "record", "name": "Line",
        "fields": [{"name": "sku", "type": ["null", "string"]}]}}},
    {"name": "extra", "type": {"type": "map", "values": "double"}},
    {"name": "next", "type": ["null", "Order"]},
]}  # fmt: skip
V2 = V1 | {"fields": [*V1["fields"], {"name": "coupon", "type": ["null", "string"],
                                      "default": None}]}  # fmt: skip
ORDER = {"id": 7, "at": MOMENT, "day": date(2026, 11, 28), "price": Decimal("1.50"),
         "key": UUID(int=5), "open": time(9, 30), "state": "PAID", "lines": [{"sku": "a"}],
         "extra": {"x": 1.5}, "next": None}  # fmt: skip


def avro(schema, value):
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


def single_object(schema, value):
    text = to_parsing_canonical_form(fastavro.parse_schema(schema))
    return b"\xc3\x01" + bytes.fromhex(fingerprint(text, "CRC-64-AVRO")) + avro(schema, value)


def test_avro_records_of_two_schemas_come_into_the_newest_columns():
    schemas = tuple(json.dumps(each).encode() for each in (V1, V2))
    bodies = Bodies(AVRO, schemas)
    assert [(each.name, str(each.type)) for each in bodies.columns()] == [
        ("id", "int64"),
        ("at", "timestamp[us, tz=UTC]"),
        ("day", "date32[day]"),
        ("price", "decimal128(9, 2)"),
        ("key", "string"),
        ("open", "string"),
        ("state", "string"),
        ("lines", "list<item: struct<sku: string>>"),
        ("extra", "map<string, double>"),
        ("next", "string"),
        ("coupon", "string"),
    ]
    newest = ORDER | {"coupon": "c", "next": ORDER | {"coupon": None, "id": 8}}
    plain = avro(V2, newest)
    first, second, cut, long, strange = made(
        bodies, plain, single_object(V1, ORDER), plain[:-3], plain + b"x", b"\xc3\x01" + b"?" * 9
    )
    plain_values = {"key": str(UUID(int=5)), "open": "09:30:00", "extra": [("x", 1.5)]}
    assert second == ORDER | plain_values | {"coupon": None}
    assert first | {"next": None} == ORDER | plain_values | {"coupon": "c"}
    assert json.loads(first["next"])["id"] == 8
    assert cut["_error"] and cut["_body"] == plain[:-3] and cut["id"] is None
    assert long["_error"] == "1 bytes follow the record"
    assert strange["_error"] == f"no --schema has the fingerprint {(b'?' * 8).hex()}"


def test_a_header_before_each_record_is_left_out():
    bodies = Bodies(AVRO, (json.dumps(V1).encode(),), header_bytes=5)
    (row,) = made(bodies, b"\0\0\0\0\1" + avro(V1, ORDER))
    assert row["id"] == 7


def descriptors():
    """message Order { int64 id = 1; optional string note = 2; repeated Line lines = 3;
    map<string, int32> counts = 4; State state = 5; bytes raw = 6; uint64 big = 7; Order next = 8; }
    """
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="o.proto", package="shop", syntax="proto3")
    file.enum_type.add(name="State").value.add(name="NEW", number=0)
    file.enum_type[0].value.add(name="PAID", number=1)
    file.message_type.add(name="Line").field.add(name="sku", number=1, type=9, label=1)
    order = file.message_type.add(name="Order")
    entry = order.nested_type.add(name="CountsEntry", options={"map_entry": True})
    entry.field.add(name="key", number=1, type=9, label=1)
    entry.field.add(name="value", number=2, type=5, label=1)
    order.oneof_decl.add(name="_note")
    for name, number, kind, label, type_name in (
        ("id", 1, field.TYPE_INT64, 1, ""), ("note", 2, field.TYPE_STRING, 1, ""),
        ("lines", 3, field.TYPE_MESSAGE, 3, ".shop.Line"),
        ("counts", 4, field.TYPE_MESSAGE, 3, ".shop.Order.CountsEntry"),
        ("state", 5, field.TYPE_ENUM, 1, ".shop.State"), ("raw", 6, field.TYPE_BYTES, 1, ""),
        ("big", 7, field.TYPE_UINT64, 1, ""), ("next", 8, field.TYPE_MESSAGE, 1, ".shop.Order"),
    ):  # fmt: skip
        made = order.field.add(name=name, number=number, type=kind, label=label)
        if type_name:
            made.type_name = type_name
        if name == "note":
            made.proto3_optional, made.oneof_index = True, 0
    return descriptor_pb2.FileDescriptorSet(file=[file])


def test_protobuf_messages_and_what_is_unknown_in_them():
    files = descriptors()
    pool = descriptor_pool.DescriptorPool()
    pool.Add(files.file[0])
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    order = kind(id=7, lines=[{"sku": "a"}], counts={"x": 2}, state=1, raw=b"\xff", big=1 << 63,
                 next={"id": 8, "next": {"id": 9}})  # fmt: skip
    bodies = Bodies(PROTOBUF, (files.SerializeToString(),), "shop.Order")
    text = order.SerializeToString()
    plain, more, broken, empty = made(bodies, text, text + b"\x98\x06\x01", b"\x08", b"")
    assert plain == {
        "id": 7,
        "note": None,
        "lines": [{"sku": "a"}],
        "counts": [("x", 2)],
        "state": "PAID",
        "raw": b"\xff",
        "big": Decimal(1 << 63),
        "next": '{"id":"8","next":{"id":"9"}}',
    }
    assert more == plain | {"_body": text + b"\x98\x06\x01"}, "a field that the schema lacks"
    assert broken["_error"].startswith("DecodeError") and broken["_body"] == b"\x08"
    assert (empty["id"], empty["note"], empty["next"]) == (0, None, None)
    with pytest.raises(ValueError, match=r"shop\.Payment'?: not found in the descriptor file"):
        Bodies(PROTOBUF, (files.SerializeToString(),), "shop.Payment").columns()


def test_bytes_as_they_are():
    assert made(Bodies(RAW), b"\xff\0") == [{"body": b"\xff\0"}]


@pytest.mark.parametrize("text", [b"no schema", b"{}", b'"string"'])
def test_what_is_no_avro_schema_is_refused(text):
    with pytest.raises(ValueError, match="--schema"):
        Bodies(AVRO, (text,)).columns()


def test_a_json_schema_gives_columns():
    text = {
        "type": "object", "$defs": {"tag": {"type": "string"}},
        "properties": {
            "id": {"type": ["integer", "null"]}, "at": {"type": "string", "format": "date-time"},
            "price": {"type": "number"},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
            "where": {"properties": {"city": {"type": "string"}}},
            "any": {"type": ["string", "object"]},
            "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
            "child": {"$ref": "#"},
        },
    }  # fmt: skip
    found = columns_of(text)
    assert [str(field.type) for field in found][:7] == [
        "int64", "timestamp[us, tz=UTC]", "double", "list<item: string>", "struct<city: string>",
        "string", "map<string, int64>",
    ]  # fmt: skip
    assert str(found.field("child").type).count("struct") == 2, "recursion is text within itself"
    with pytest.raises(ValueError, match="must describe an object"):
        columns_of({"type": "string"})
    with pytest.raises(ValueError, match="is not in the document"):
        columns_of({"properties": {"x": {"$ref": "#/nowhere"}}})


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.int32(), 2**31 - 1, 2**31 - 1),
        (pa.int32(), 2**31, Misfit),
        (pa.int64(), True, Misfit),
        (pa.int64(), 1.0, Misfit),
        (pa.float64(), 3, 3.0),
        (pa.float64(), 2**53 + 1, Misfit),
        (pa.bool_(), 1, Misfit),
        (pa.string(), 1, Misfit),
        (pa.string(), {"a": 1}, '{"a":1}'),
        (pa.string(), "\ud800", Misfit),
        (pa.binary(), "/w==", b"\xff"),
        (pa.binary(), "?", Misfit),
        (pa.decimal128(5, 2), 1.1, Decimal("1.10")),
        (pa.decimal128(5, 2), "1000", Misfit),
        (pa.decimal128(5, 2), "1.001", Misfit),
        (pa.decimal128(5, 2), "NaN", Misfit),
        (pa.date32(), "2026-11-28", date(2026, 11, 28)),
        (pa.date32(), "28.11.", Misfit),
        (pa.timestamp("us", "UTC"), "2026-11-28T10:00:00.005Z", MOMENT),
        (pa.timestamp("us", "UTC"), "9999-12-31T23:59:59-10:00", Misfit),
        (pa.timestamp("us"), "2026-11-28T11:00:00.005+01:00", MOMENT.replace(tzinfo=None)),
        (pa.list_(pa.int64()), [1, None], [1, None]),
        (pa.list_(pa.int64()), [1, "x"], Misfit),
        (pa.map_(pa.string(), pa.int64()), {"a": 1}, [("a", 1)]),
    ],
)
def test_a_column_takes_what_it_can_hold_and_nothing_else(kind, value, expected):
    fit = fitting(kind)
    if expected is Misfit:
        with pytest.raises(Misfit):
            fit(value, [])
    else:
        assert fit(value, []) == expected
        assert pa.array([expected], kind).type == kind
