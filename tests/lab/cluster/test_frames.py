"""The probe's own frames, against the codec that is measured with them."""

import json

from batonmq.protocol.batch import split_batch
from batonmq.protocol.message_id import host_bytes
from batonmq.remoting.command import decode_frame
from lab.bench.part_catchup import batch_body
from lab.cluster import frames
from lab.cluster.connection import parse_ha_status
from tests.records import record_of as encode_record


def _reply(opaque: int, body: bytes = b"") -> bytes:
    header = json.dumps({"code": 0, "flag": 1, "opaque": opaque, "extFields": {"a": "b"}}).encode()
    size = 4 + len(header) + len(body)
    return size.to_bytes(4, "big") + len(header).to_bytes(4, "big") + header + body


def test_request_is_read_by_the_real_codec() -> None:
    frame = frames.encode(
        frames.SEND_V2, frames.send_ext("T", 3, frames.key_properties("K")), 5, b"body"
    )
    header_size = int.from_bytes(frame[5:8], "big")
    command = decode_frame(frame[8 : 8 + header_size], frame[8 + header_size :], frame[4])
    assert (command.code, command.opaque, command.body) == (310, 5, b"body")
    assert command.ext["b"] == "T" and command.ext["i"].startswith("UNIQ_KEY\x01K\x02")


def test_stored_records_are_read_as_the_real_codec_wrote_them() -> None:
    def record(number: int, at: int) -> bytes:
        host = host_bytes("127.0.0.1", 10911)
        properties = b"UNIQ_KEY\x01%d\x02KEYS\x01a b\x02" % number
        return encode_record(
            topic=b"T", queue_id=1, queue_offset=number, physical_offset=at, flag=0, sys_flag=0,
            born_timestamp=1, born_host=host, store_timestamp=2, store_host=host,
            reconsume_times=0, prepared_transaction_offset=0, body=b"b" * number,
            properties=properties, append_prop_crc=True,
        )  # fmt: skip

    first = record(3, 0)
    found = list(frames.stored_records(first + record(5, len(first))))
    assert [at for at, _ in found] == [0, len(first)]
    assert [properties["UNIQ_KEY"] for _, properties in found] == ["3", "5"]
    assert found[0][1]["KEYS"] == "a b"


def test_replies_cut_anywhere_come_out_whole() -> None:
    stream = _reply(1, b"x" * 10) + _reply(2)
    for cut in range(len(stream)):
        stream_of_frames = frames.Frames()
        got = [*stream_of_frames.feed(stream[:cut]), *stream_of_frames.feed(stream[cut:])]
        assert [(reply.opaque, reply.body) for reply in got] == [(1, b"x" * 10), (2, b"")]


def test_requests_of_the_broker_are_passed_over() -> None:
    stream = frames.encode(40, {}, 9) + _reply(2)
    assert [reply.opaque for reply in frames.Frames().feed(stream)] == [2]


def test_batch_body_holds_whole_records() -> None:
    parts = list(split_batch(batch_body("p" * 16, 0, 3)))
    assert len(parts) == 3


def test_level_needs_the_whole_log_on_a_slave_of_the_set() -> None:
    def status(ack: int, in_sync: bool) -> bool:
        connection = {"addr": "a:1", "inSync": in_sync, "slaveAckOffset": ack}
        body = {"master": True, "masterCommitLogMaxOffset": 9, "haConnectionInfo": [connection]}
        return parse_ha_status(json.dumps(body).encode()).is_level(1)

    assert status(9, True)
    assert not status(8, True)
    assert not status(9, False)
