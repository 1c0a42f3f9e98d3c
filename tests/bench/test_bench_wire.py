"""The probe's own frames, against the codec that is measured with them."""

from __future__ import annotations

import json

from bench import wire
from bench.part_catchup import batch_body
from bench.probe import parse_ha_status
from bench.side import ports_of
from protocol.batch import split_batch
from remoting.codec import decode_frame


def _reply(opaque: int, body: bytes = b"") -> bytes:
    header = json.dumps({"code": 0, "flag": 1, "opaque": opaque, "extFields": {"a": "b"}}).encode()
    size = 4 + len(header) + len(body)
    return size.to_bytes(4, "big") + len(header).to_bytes(4, "big") + header + body


def test_request_is_read_by_the_real_codec() -> None:
    frame = wire.encode(wire.SEND_V2, wire.send_ext("T", 3, "K", 17), 5, b"body")
    header_size = int.from_bytes(frame[5:8], "big")
    command = decode_frame(frame[8 : 8 + header_size], frame[8 + header_size :], frame[4])
    assert (command.code, command.opaque, command.body) == (310, 5, b"body")
    assert command.ext["b"] == "T" and command.ext["i"].startswith("UNIQ_KEY\x01K\x02")


def test_replies_cut_anywhere_come_out_whole() -> None:
    stream = _reply(1, b"x" * 10) + _reply(2)
    for cut in range(len(stream)):
        frames = wire.Frames()
        got = [*frames.feed(stream[:cut]), *frames.feed(stream[cut:])]
        assert [(reply.opaque, reply.body) for reply in got] == [(1, b"x" * 10), (2, b"")]


def test_requests_of_the_broker_are_passed_over() -> None:
    stream = wire.encode(40, {}, 9) + _reply(2)
    assert [reply.opaque for reply in wire.Frames().feed(stream)] == [2]


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


def test_ports_of_a_cluster_do_not_collide() -> None:
    ports = list(ports_of(11_000))
    assert len(ports) == len(set(ports))
