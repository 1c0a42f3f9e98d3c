"""BATON_SYS_HISTORY at a broker: always there, written by controllers only, never a first ack."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lone_broker import Rig, run_with_broker, send_header

from batonmq.broker.send.send_processor import SendProcessor
from batonmq.broker.write.pending_acks import PendingAcks
from batonmq.protocol.batch import BatchItem, encode_batch
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.properties import encode_properties
from batonmq.protocol.records.codec import decode_records
from batonmq.protocol.topic_name import HISTORY_PRODUCER, HISTORY_TOPIC, is_system_topic

ITEMS = [BatchItem(b'{"part":0}', encode_properties({"KEYS": "7 log-7-0"}).encode())] * 2


def header(group: str) -> dict[str, str]:
    return send_header(HISTORY_TOPIC, 0, {}) | {"a": group, "c": "", "m": "true"}


def test_only_controllers_send_to_it_and_anybody_reads(tmp_path: Path) -> None:
    async def play(rig: Rig) -> None:
        for _ in range(2):
            # Whoever came before: what was allowed to one is not allowed to the other.
            sent = await rig.ask(320, header(HISTORY_PRODUCER), encode_batch(ITEMS))
            assert sent.code == 0, sent.remark
            refused = await rig.ask(320, header("pg"), encode_batch(ITEMS))
            assert refused.code == ResponseCode.NO_PERMISSION
            refused = await rig.send(HISTORY_TOPIC)
            assert refused.code == ResponseCode.NO_PERMISSION
        pulled = await rig.pull(HISTORY_TOPIC)
        messages = decode_records(pulled.body)
        assert [each.queue_offset for each in messages] == [0, 1, 2, 3]
        assert {each.keys for each in messages} == {"7 log-7-0"}

    run_with_broker(tmp_path, play, broker={"auto_create_topic_enable": False})


def test_it_is_a_system_topic_of_one_queue(tmp_path: Path) -> None:
    async def play(rig: Rig) -> None:
        assert is_system_topic(HISTORY_TOPIC)
        config = rig.service.topics.get(HISTORY_TOPIC)
        assert config is not None
        assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (1, 1, 6)
        deleted = await rig.ask(215, {"topic": HISTORY_TOPIC})
        assert deleted.code == ResponseCode.INVALID_PARAMETER

    run_with_broker(tmp_path, play)


@pytest.mark.parametrize("end", ["confirmed", "role changed"])
def test_its_writes_are_never_the_first_acknowledged_one(end: str) -> None:
    """`confirm` returns how many clients were answered: that is the first ack of a mastership."""
    acks = PendingAcks(3_000)
    sink = SimpleNamespace(frames=[])
    sink.write = sink.frames.append
    waits = SimpleNamespace(_acks=acks, _clock_ms=lambda: 5, _made=set())
    wait = cast(Any, SendProcessor._wait)
    wait(waits, HISTORY_TOPIC, 100, sink, _ok(1))
    assert acks.waited_ms(50) == 0
    if end == "confirmed":
        assert acks.confirm(99) == 0 and not sink.frames
        assert acks.confirm(100) == 0
        assert sink.frames == [_ok(1)]
    else:
        acks.fail_all(ResponseCode.SERVICE_NOT_AVAILABLE, "the role changed")
        (frame,) = sink.frames
        assert b'"code":14' in frame and b"the role changed" in frame
    wait(waits, "T", 200, sink, _ok(2))
    assert acks.confirm(200) == 1


def _ok(opaque: int) -> bytes:
    header = b'{"code":0,"opaque":%d}' % opaque
    return (4 + len(header)).to_bytes(4) + len(header).to_bytes(4) + header
