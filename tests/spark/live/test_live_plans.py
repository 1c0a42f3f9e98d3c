"""Options, offsets and ranges of topics: the pure core, without Spark or a cluster."""

import json
import zlib
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from batonmq.protocol.message import MessageQueue
from batonmq.protocol.sysflag import COMPRESSED, COMPRESSION_LZ4, COMPRESSION_ZLIB
from batonmq.spark.live.offsets import (
    ENDS_BELOW,
    EXPIRED,
    SMALL,
    QueueRange,
    fair_end,
    from_checkpoint,
    loss_of,
    ranges_between,
    share_out,
    to_checkpoint,
)
from batonmq.spark.live.options import SinkOptions, TopicOptions, check_columns
from batonmq.spark.live.sink_sender import SinkError, row_of
from batonmq.spark.live.topic_read import TopicRead
from batonmq.spark.read.message_columns import with_plain_bodies
from batonmq.spark.read.selection import EARLIEST, LATEST, parse_bound
from batonmq.spark.source import BatonmqSource

GIVEN = {"table": "topic", "nameServers": "a:1;b:2", "topic": "T"}


def queue(queue_id, topic="T", broker="b"):
    return MessageQueue(topic, broker, queue_id)


def options(streaming=None, **more):
    return TopicOptions.from_mapping({**GIVEN, **more}, streaming=streaming)


def test_options_are_read_in_every_documented_form():
    read = options(
        topic='["T", "U"]',
        startingTimestamp="2026-11-21T10:00:00.0001",
        endingTimestamp="1795000000000",
        operationTimeout="2m",
        tags="x || y",
        maxOffsetsPerPartition="500",
    )
    assert read.topics == ("T", "U")
    assert read.starting.time_ms == 1795255200001  # a part of a millisecond rounds up
    assert read.ending.time_ms == 1795000000000
    assert read.operation_timeout_ms == 120_000
    assert read.tags == ("x", "y")
    assert read.offsets_per_partition_max == 500
    assert options().name_servers == ("a:1", "b:2")
    assert options(nameServers='["h:1", "i:2"]').name_servers == ("h:1", "i:2")
    assert options(nameServers="[::1]:9876,h:1").name_servers == ("[::1]:9876", "h:1")
    assert options(FAILondataLOSS="false").fail_on_data_loss is False
    assert options(startingTimestamp="2026-11-21T11:00:00+01:00").starting.time_ms == 1795255200000


@pytest.mark.parametrize(
    ("streaming", "more", "says"),
    [
        (None, {"startingOffset": "latest"}, "did you mean startingOffsets[?] There are accessKey"),
        (None, {"nameServers": ""}, "no nameServers"),
        (None, {"nameServers": "host"}, "an address is 'host': host:port is allowed"),
        (None, {"topic": " "}, "no topic"),
        (None, {"topic": "a b"}, "topic='a b'"),
        (True, {"endingOffsets": "latest"}, "endingOffsets is an option of batch reads only"),
        (False, {"maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger is an option of streams only"),
        (None, {"startingOffsets": "latest", "startingTimestamp": "5"}, "exclude each other"),
        (None, {"startingOffsets": "newest"}, "must be earliest, latest, or JSON"),
        (None, {"startingOffsets": '{"X": {}}'}, "names topic X, option topic has T"),
        (None, {"startingOffsets": '{"T": {"b": {"q": 5}}}'}, "queueId.* got `str` - at `key`"),
        (None, {"startingOffsets": '{"T": {"b": {"-1": 5}}}'}, "`int` >= 0 - at `key`"),
        (None, {"startingOffsets": '{"T": {"b": {"1": -7}}}'}, "from 0 on, .* >= -2"),
        (None, {"startingOffsets": '{"T": 7}'}, "got `int`"),
        (None, {"startingOffsets": '{"T": {"b": "latest"}}'}, "got `str`"),
        (None, {"startingOffsets": '{"T": {"b": {"1": true}}}'}, "got `bool`"),
        (None, {"startingOffsets": '{"T": {"b": {"1": "newest"}}}'}, "newest.* matching regex"),
        (
            None,
            {"startingOffsets": f'{{"T": {{"b": {{"1": {1 << 63}}}}}}}'},
            "<= 9223372036854775807",
        ),
        (None, {"startingTimestamp": "yesterday"}, "ms since 1970 or a time such as"),
        (None, {"operationTimeout": "soon"}, "a time such as 500ms, 30s or 2m"),
        (None, {"maxOffsetsPerTrigger": "0.5"}, "must be a number from 1 on"),
        (None, {"failOnDataLoss": "maybe"}, "must be true or false"),
        (None, {"tags": "a b"}, "name tags as a"),
        (None, {"consumerGroup": "a b"}, "consumerGroup='a b'"),
    ],
)
def test_wrong_options_are_refused_with_what_is_allowed(streaming, more, says):
    with pytest.raises(ValueError, match=says):
        options(streaming, **more)


def test_columns_are_named_as_those_of_messages():
    assert TopicRead(options(columns="body,topic")).schema.names == ["body", "topic"]
    with pytest.raises(ValueError, match="table topic has no store"):
        _ = TopicRead(options(columns="store")).schema


def test_bodies_are_plain_where_they_can_be():
    packed = zlib.compress(b"plain")
    flags = [0, COMPRESSED | COMPRESSION_ZLIB, COMPRESSED, COMPRESSED | COMPRESSION_LZ4, COMPRESSED]
    bodies = pa.array([packed, packed, packed, packed, b"garbage"], pa.binary())
    batch = pa.record_batch({"n": pa.array(range(5)), "body": bodies})
    found = with_plain_bodies(batch, np.array(flags))["body"].to_pylist()
    assert found == [packed, b"plain", b"plain", packed, b"garbage"]
    assert with_plain_bodies(batch.select(["n"]), np.array(flags)).schema.names == ["n"]


def test_checkpoints_keep_offsets_and_refuse_what_they_do_not_know():
    offsets = {queue(10): 5, queue(9): 7, queue(0, "U"): 0}
    raw = to_checkpoint(offsets)
    text = json.dumps(raw)
    assert text == (
        '{"version": 1, "topics": {"T": {"b": {"9": 7, "10": 5}}, "U": {"b": {"0": 0}}}}'
    )
    assert from_checkpoint(json.loads(text), ["T", "U"]) == offsets
    assert json.dumps(to_checkpoint(dict(reversed(offsets.items())))) == text
    with pytest.raises(ValueError, match="version 2; this program reads version 1"):
        from_checkpoint({**raw, "version": 2}, ["T", "U"])
    with pytest.raises(ValueError, match="topic U, which option topic does not name"):
        from_checkpoint(raw, ["T"])
    for wrong in (5, {"0": -1}, {"0": True}, {"0": "7"}, {"0": 1 << 63}, {"x": 7}):
        with pytest.raises(ValueError, match=r"not of the form .* begin with a new checkpoint"):
            from_checkpoint({"version": 1, "topics": {"T": {"b": wrong}}}, ["T"])
    for wrong in ([], 7, None, {}):
        with pytest.raises(ValueError, match="have version None; this program reads version 1"):
            from_checkpoint(wrong, ["T"])


def test_a_bound_says_it_for_queues_or_all():
    assert parse_bound("-1", "startingOffsets", ["T"]).place(queue(0), EARLIEST) == LATEST
    text = '{"T": {"b": {"0": 0, "1": "LATEST", "2": "-2"}}}'
    bound = parse_bound(text, "startingOffsets", ["T", "U"])
    assert [bound.place(queue(i), 77) for i in range(4)] == [0, LATEST, EARLIEST, 77]
    there = [queue(0), queue(1), queue(2), queue(0, broker="c")]
    bound.check_known(there, "startingOffsets")
    with pytest.raises(
        ValueError, match="startingOffsets names T@b:2; there are T@b:0, T@b:1, T@c"
    ):
        bound.check_known([q for q in there if q != queue(2)], "startingOffsets")


def test_what_a_queue_lacks_of_a_range_is_told():
    assert loss_of(QueueRange(queue(0), 5, 9), 5, 9) is None
    assert loss_of(QueueRange(queue(0), 0, 0), 5, 9) is None
    assert loss_of(QueueRange(queue(0), 4, 9), 5, 9).why == EXPIRED
    assert loss_of(QueueRange(queue(0), 5, 10), 5, 9).why == ENDS_BELOW
    short = loss_of(QueueRange(queue(3), 12, 12), 5, 9)
    assert short.why == ENDS_BELOW
    says = str(short.error())
    for part in ("topic T", "broker b", "queue 3", "[12, 12)", "[5, 9)", "failOnDataLoss=false"):
        assert part in says


def test_ranges_between_offsets_with_new_and_remade_queues():
    start = {queue(0): 5, queue(1): 8, queue(2): 9}
    end = {queue(0): 7, queue(1): 8, queue(2): 3, queue(3): 2}
    assert ranges_between(start, end) == [
        QueueRange(queue(0), 5, 7),
        QueueRange(queue(2), 0, 3),  # made anew
        QueueRange(queue(3), 0, 2),
    ]


def test_tasks_hold_every_offset_once():
    ranges = [
        QueueRange(queue(i), 10, 10 + size) for i, size in enumerate([3, 5000, 1999, 7, 12001])
    ]
    for most in (0, 1, 2, 4000, 10**9):
        tasks = share_out(ranges, most)
        assert tasks == share_out(ranges, most)
        for wanted in ranges:
            parts = [part for task in tasks for part in task if part.queue == wanted.queue]
            assert (parts[0].begin, parts[-1].end) == (wanted.begin, wanted.end)
            assert all(a.end == b.begin for a, b in pairwise(parts))
        if most:
            assert max(sum(map(len, task)) for task in tasks) <= most
        assert all(len(task) == 1 or sum(map(len, task)) <= SMALL for task in tasks)
    assert share_out([], 5) == []


def test_a_limit_is_spread_fairly_and_used_up():
    start = {queue(0): 100, queue(1): 0, queue(2): 0}
    ends = {queue(0): 103, queue(1): 1000, queue(2): 1000, queue(3): 50}
    near = fair_end(start, ends, 100)
    assert near == {queue(0): 103, queue(1): 32, queue(2): 33, queue(3): 32}
    assert sum(near.values()) - 100 == 100
    assert fair_end(start, ends, 10**6) == ends
    tiny = fair_end(start, ends, 1)
    assert sum(tiny.values()) - 100 == 1


def test_what_can_be_written_is_checked():
    sink = SinkOptions.from_mapping({"nameServers": "a:1", "topic": "T", "sendTimeout": "5s"})
    assert sink.send_timeout_ms == 5000
    check_columns({"body": "string", "keys": "string", "properties": "map<string,string>"}, sink)
    nowhere = SinkOptions.from_mapping({"nameServers": "a:1"})
    for columns, given, says in (
        ({"value": "string"}, sink, "no column body among value"),
        ({"body": "string"}, nowhere, "no topic"),
        ({"body": "string", "colour": "string"}, sink, "column colour cannot be sent"),
        ({"body": "int"}, sink, "column body is int; it must be binary or string"),
        ({"body": "binary", "queue_id": "int", "sharding_key": "string"}, sink, "both choose"),
        ({"body": "binary", "broker": "string"}, sink, "column queue_id, which is missing"),
    ):
        with pytest.raises(ValueError, match=says):
            check_columns(columns, given)
    for wrong, says in (
        ({"ackReports": "x"}, "ackreports for writing, did you mean ackReport[?] There are access"),
        ({"topic": "T,U"}, "name one"),
        ({"table": "messages"}, "only topics are written"),
        ({"batchBytes": "4194305"}, "batchBytes=4194305: a broker takes no more than 4194304"),
    ):
        with pytest.raises(ValueError, match=says):
            SinkOptions.from_mapping({"nameServers": "a:1", **wrong})


def test_wrong_use_is_refused_before_anything_is_asked():
    live = BatonmqSource({**GIVEN, "columns": "body"})
    schema = live.schema()
    assert schema.names == ["body"]
    assert live.reader(schema) and live.streamReader(schema)
    for source, says in (
        (BatonmqSource({**GIVEN, "startOffsets": "latest"}), "unknown option startoffsets"),
        (BatonmqSource({**GIVEN, "columns": "store"}), "table topic has no store"),
        (BatonmqSource({**GIVEN, "maxOffsetsPerTrigger": "5"}), "give none; the option columns"),
    ):
        with pytest.raises(ValueError, match=says):
            source.reader(schema)
    limited = BatonmqSource({**GIVEN, "columns": "body", "maxOffsetsPerTrigger": "5"})
    with pytest.raises(ValueError, match="streams only"):
        limited.reader(schema)
    with pytest.raises(ValueError, match="epochs cannot be streamed: streams read table=topic or"):
        BatonmqSource({"table": "epochs", "path": "/tmp"}).streamReader(schema)
    writing = BatonmqSource({"nameServers": "a:1", "topic": "T"})
    assert writing.writer(schema, False) and writing.streamWriter(schema, False)
    for make in (writing.writer, writing.streamWriter):
        with pytest.raises(ValueError, match="cannot be overwritten: use mode append"):
            make(schema, True)


def test_a_row_becomes_a_message_or_a_sentence():
    values = {"body": "é", "keys": "k", "tags": None, "properties": [("a", "1"), ("b", None)]}
    row = row_of(3, "job-0-0-", {**values, "sharding_key": "s"}, "T")
    assert (row.message.topic, row.message.body) == ("T", "é".encode())
    assert row.message.properties == {"a": "1", "KEYS": "k", "__SHARDINGKEY": "s"}
    with pytest.raises(SinkError, match="row 4 of its partition has no body"):
        row_of(4, "x", {"body": b""}, "T")
    with pytest.raises(SinkError, match="row 5 of its partition has no topic"):
        row_of(5, "x", {"body": b"b", "topic": None}, "")
    with pytest.raises(SinkError, match="sets UNIQ_KEY in properties"):
        row_of(6, "x", {"body": b"b", "properties": [("UNIQ_KEY", "mine")]}, "T")
