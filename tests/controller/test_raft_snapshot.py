"""Snapshots are checked bytes: a changed one is refused before anything is replaced."""

import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from failing_disk import failing
from pysyncobj.config import SERIALIZER_STATE
from raft_files import fatal

from batonmq.controller.raft import snapshot
from batonmq.controller.raft.snapshot import (
    BadSnapshot,
    FileSnapshots,
    LogEntry,
    decode_snapshot,
    encode_snapshot,
)

ENTRIES: tuple[LogEntry, LogEntry] = ((b"\x00last \xff", 9, 2), (b"", 8, 1))
STATE = {"groups": {"broker-a": [1, 2, 3]}, "clock": 5}


class Node:
    """The snapshots of one node; `held` says which entries its log holds."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self.restored: list[tuple[dict[str, Any], int]] = []
        self.held: set[tuple[int, int]] = set()
        self.snapshots = self.open()

    def open(self) -> FileSnapshots:
        return FileSnapshots(
            self.path,
            capture=lambda: dict(STATE),
            restore=lambda state, index: self.restored.append((state, index)),
            holds=lambda index, term: (index, term) in self.held,
            on_fatal=fatal,
            piece_bytes=16,
        )

    def take(self) -> None:
        self.snapshots.serialize((None, *ENTRIES, ()), 8)
        assert self.snapshots.checkSerializing() == (SERIALIZER_STATE.SUCCESS, 8)

    def send_to(self, other: "Node") -> bool:
        """All pieces; whether the other one may load what came."""
        while True:
            piece = self.snapshots.getTransmissionData(other.path.name)
            assert piece is not None
            loadable = other.snapshots.setTransmissionData(piece)
            if loadable or piece[2]:
                return loadable


def test_a_missing_or_changed_byte_is_noticed():
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
    later = data[12:].replace(b'"v":1', b'"v":2')
    with pytest.raises(BadSnapshot, match="version 2 is not 1"):
        decode_snapshot(data[:8] + zlib.crc32(later).to_bytes(4, "big") + later)


def test_a_snapshot_travels_in_pieces_and_is_restored(tmp_path):
    """Leader serializes, sends pieces until an empty one, the follower stores and loads it."""
    leader, follower = Node(tmp_path, "n1"), Node(tmp_path, "n2")
    assert leader.snapshots.getTransmissionData("n2") is None, "nothing was taken yet"
    leader.snapshots.serialize((None, *ENTRIES, ()), 8)
    assert leader.snapshots.getTransmissionData("n2") is None, "the log is shortened first"
    assert leader.snapshots.checkSerializing() == (SERIALIZER_STATE.SUCCESS, 8)
    assert leader.snapshots.checkSerializing() == (SERIALIZER_STATE.NOT_SERIALIZING, None)
    assert leader.send_to(follower)
    assert follower.path.read_bytes() == leader.path.read_bytes()
    assert follower.snapshots.deserialize() == (None, *ENTRIES, ())
    assert follower.restored == [(STATE, 9)]


def test_a_snapshot_of_what_the_log_holds_is_passed_over(tmp_path):
    """1. The leader heard a late question for entries that it has no more, and sends its snapshot
    again. 2. By now the follower's log holds that and acknowledged entries behind it: loading the
    snapshot would cut them."""
    leader, follower = Node(tmp_path, "n1"), Node(tmp_path, "n2")
    leader.take()
    follower.held.add((9, 2))
    assert not leader.send_to(follower)
    assert not follower.path.exists()


def test_a_disk_that_refuses_ends_the_node(tmp_path):
    node = Node(tmp_path, "n1")
    node.path.mkdir()
    with pytest.raises(AssertionError, match="cannot store the snapshot"):
        node.take()


def test_r53_a_snapshot_that_found_no_room_is_tried_again_a_second_later(tmp_path, monkeypatch):
    now_s, node = 100.0, Node(tmp_path, "n1")
    monkeypatch.setattr(snapshot, "boot_s", lambda: now_s)
    with failing("pwrite * ENOSPC"):
        node.snapshots.serialize((None, *ENTRIES, ()), 8)
    assert node.snapshots.checkSerializing()[0] == SERIALIZER_STATE.SERIALIZING
    now_s += 1
    assert node.snapshots.checkSerializing()[0] == SERIALIZER_STATE.NOT_SERIALIZING
    node.take()


def test_a_piece_that_is_lost_does_not_load(tmp_path):
    """The connection broke between two pieces; the rest comes over the next one."""
    leader, follower = Node(tmp_path, "n1"), Node(tmp_path, "n2")
    leader.take()
    first = leader.snapshots.getTransmissionData("n2")
    assert first is not None and not follower.snapshots.setTransmissionData(first)
    leader.snapshots.getTransmissionData("n2")  # lost
    assert not leader.send_to(follower)
    assert follower.snapshots.getTransmissionData("n3") is None, "nothing was taken over"
    assert leader.send_to(follower), "behind its last piece it starts again with the first"


@pytest.mark.parametrize("newer", [False, True], ids=["sent again", "a newer one"])
def test_another_snapshot_takes_the_place_of_the_one_under_way(tmp_path, newer):
    """The log behind an older one is gone: its follower would ask for entries that are nowhere."""
    leader, follower = Node(tmp_path, "leader"), Node(tmp_path, "follower")
    leader.take()
    for _ in range(2):
        piece = leader.snapshots.getTransmissionData("follower")
        assert not follower.snapshots.setTransmissionData(piece)
    if newer:
        leader.snapshots.serialize((None, (b"newer", 12, 2), (b"", 11, 2), ()), 11)
        assert leader.snapshots.checkSerializing() == (SERIALIZER_STATE.SUCCESS, 11)
    else:
        leader.snapshots.cancelTransmisstion("follower")
        follower.snapshots = follower.open()  # started again, it has nothing of the first two
    assert leader.send_to(follower)
    assert follower.snapshots.last_index == (12 if newer else 9)


def test_pieces_without_a_first_one_are_passed_over(tmp_path):
    follower = Node(tmp_path, "n2").snapshots
    assert not follower.setTransmissionData((b"rest", False, False))
    assert not follower.setTransmissionData((b"", False, True))
    assert not follower.setTransmissionData(None)
