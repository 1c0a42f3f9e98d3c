"""Bytes that are no UTF-8 within JSON that is whole otherwise: another error of msgspec."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from batonmq.broker.tables.topics import MetadataChange
from batonmq.controller.endpoints.remoting_endpoint import _decode
from batonmq.controller.raft.membership import Membership, check_members
from batonmq.controller.rules.commands import CommandDecodeError, decode
from batonmq.history.event import HistoryEvent, lenient_event
from batonmq.history.file import HistoryFile
from batonmq.protocol.bodies import HeartbeatData
from batonmq.protocol.errors import (
    BatonError,
    BrokerRefusal,
    RemoteProtocolError,
)
from batonmq.store.queue_positions import QueuePositions, decode_positions

LINE = (
    b'{"v":1,"log":"l","raft_index":%d,"part":0,"time_ms":5,"kind":"elected","broker_name":"b"}\n'
)


@pytest.mark.parametrize(
    "read, data, error",
    [
        (MetadataChange.decode, b'{"v":1,"deletedTopics":["\xff"]}', RemoteProtocolError),
        (decode, b'{"v":1,"command":{"type":"\xff"}}', CommandDecodeError),
        (lambda data: _decode(data, HeartbeatData), b'{"clientID":"\xff"}', BrokerRefusal),
        (HeartbeatData.decode, b'{"clientID":"\xff"', RemoteProtocolError),
    ],
)
def test_it_is_refused_as_other_noise_is(
    read: Callable[[bytes], Any], data: bytes, error: type[Exception]
) -> None:
    with pytest.raises(error):
        read(data)


def test_a_record_of_positions_that_is_no_text_is_passed_over() -> None:
    assert decode_positions(b'{"v":1,"since":1,"positions":{"\xff":{}}}') is None


def test_files_that_are_no_text_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "positions"
    body = b'{"wanted":1,"placed":{"\xff":{}}}'
    path.write_bytes(b"%08x\n%b\n" % (crc32(body), body))
    assert QueuePositions(path).was_damaged
    assert f"queue_positions_damaged file={path}" in caplog.text
    members = tmp_path / "members.json"
    three = Membership("c", ("n0@h:1",))
    check_members(tmp_path, three)
    (kept,) = (each for each in tmp_path.iterdir() if each != path)
    assert kept.name.startswith(members.name[:4])
    kept.write_bytes(b'{"cluster":"\xff","ids":["n0"]}')
    with pytest.raises(BatonError, match=str(kept)):
        check_members(tmp_path, three)


def test_a_rotten_line_of_the_history_keeps_no_controller_from_starting(tmp_path: Path) -> None:
    path = tmp_path / "history-n0.jsonl"
    path.write_bytes(LINE % 3 + LINE.replace(b'"b"', b'"\xff"') % 4 + LINE % 5)
    file = HistoryFile(path)
    assert file.unreadable_lines == 1
    assert [event.raft_index for event in file.newest(9, 1 << 20)] == [3, 5]
    file.close()
    event = lenient_event(LINE.replace(b'"b"', b'"\xff"') % 4)
    assert event is None or isinstance(event, HistoryEvent)
