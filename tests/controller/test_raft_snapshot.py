"""Snapshots are checked bytes: a changed one is refused before anything is replaced."""

import random
from typing import Any

import pytest
from pysyncobj.config import SERIALIZER_STATE

from controller.raft.snapshot import (
    BadSnapshot,
    LogEntry,
    MemorySnapshots,
    decode_snapshot,
    encode_snapshot,
)

ENTRIES: tuple[LogEntry, LogEntry] = ((b"\x00last \xff", 9, 2), (b"", 8, 1))
STATE = {"groups": {"broker-a": [1, 2, 3]}, "clock": 5}


def snapshots(
    restored: list[tuple[dict[str, Any], int]] | None = None, *, batch_size_bytes: int = 16
) -> MemorySnapshots:
    target = restored if restored is not None else []
    return MemorySnapshots(
        None,
        batch_size_bytes,
        False,
        lambda: dict(STATE),
        lambda state, index: target.append((state, index)),
        None,
    )


def test_round_trip() -> None:
    assert decode_snapshot(encode_snapshot(STATE, ENTRIES)) == (STATE, ENTRIES)


def test_a_missing_or_changed_byte_is_noticed() -> None:
    data = encode_snapshot(STATE, ENTRIES)
    for size in range(len(data)):
        with pytest.raises(BadSnapshot):
            decode_snapshot(data[:size])
    choice = random.Random(1)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= choice.randrange(1, 256)
        with pytest.raises(BadSnapshot):
            decode_snapshot(bytes(changed))


def test_a_snapshot_travels_in_pieces_and_is_restored() -> None:
    """Leader serializes, sends pieces until an empty one, the follower loads it."""
    leader = snapshots()
    assert leader.getTransmissionData("n1") is None, "nothing was taken yet"
    leader.serialize((None, *ENTRIES, ()), 8)
    assert leader.getTransmissionData("n1") is None, "the shortening of the log comes first"
    assert leader.checkSerializing() == (SERIALIZER_STATE.SUCCESS, 8)
    assert leader.checkSerializing() == (SERIALIZER_STATE.NOT_SERIALIZING, None)

    restored: list[tuple[dict[str, Any], int]] = []
    follower = snapshots(restored)
    pieces = 0
    while True:
        piece = leader.getTransmissionData("n1")
        assert piece is not None
        pieces += 1
        if follower.setTransmissionData(piece):
            break
    assert pieces > 2 and piece == (b"", False, True)
    assert follower.deserialize() == (None, *ENTRIES, ())
    assert restored == [(STATE, 9)]


def test_a_piece_that_is_lost_does_not_load() -> None:
    """The connection broke between two pieces; the rest comes over the next one."""
    leader, follower = snapshots(), snapshots()
    leader.serialize((None, *ENTRIES, ()), 8)
    leader.checkSerializing()
    first = leader.getTransmissionData("n1")
    assert first is not None and not follower.setTransmissionData(first)
    leader.getTransmissionData("n1")  # lost
    while (piece := leader.getTransmissionData("n1")) is not None:
        assert not follower.setTransmissionData(piece)
        if piece[2]:
            break
    assert follower.getTransmissionData("n2") is None, "nothing was taken over"


def test_pieces_without_a_first_one_are_passed_over() -> None:
    follower = snapshots()
    assert not follower.setTransmissionData((b"rest", False, False))
    assert not follower.setTransmissionData((b"", False, True))
    assert not follower.setTransmissionData(None)
