"""Frames and readers: Java's bytes, every cut of them, and what is refused."""

import json
import struct
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.epoch.entry import EpochEntry, with_ends
from batonmq.ha.wire import (
    BODY_SIZE_MAX,
    EPOCHS_MAX,
    IDENTITY_SIZE_MAX,
    MasterFrameReader,
    MasterHandshake,
    SlaveFrameReader,
    SlaveHandshake,
    TransferHeader,
    decode_master_handshake,
    decode_transfer_header,
    encode_ack,
    encode_epoch_mark,
    encode_identity,
    encode_master_handshake,
    encode_slave_handshake,
    encode_tables_mark,
    encode_transfer_header,
    identity_size,
    master_handshake_size,
)
from batonmq.protocol.errors import RemoteProtocolError
from tests.ha.cores import entries, identity

GOLDEN = Path(__file__).parents[1] / "golden" / "java-5.3.3" / "ha-streams.json"


def golden(stream, direction):
    for entry in json.loads(GOLDEN.read_text()):
        if entry["stream"] == stream and entry["direction"].startswith(direction):
            return bytes.fromhex(entry["hex"])
    raise KeyError(stream)


def read_slave(pieces):
    reader = SlaveFrameReader()
    handshake, acks = None, []
    for piece in pieces:
        arrived, more = reader.feed(piece)
        handshake = handshake or arrived
        acks += more
    return handshake, acks


def read_master(pieces):
    reader = MasterFrameReader()
    handshake, headers, bodies = None, [], []
    for piece in pieces:
        for item in reader.feed(memoryview(piece)):
            if isinstance(item, MasterHandshake):
                handshake = item
            elif isinstance(item, TransferHeader):
                headers.append(item)
                bodies.append(b"")
            else:
                assert len(item)
                bodies[-1] += bytes(item)
    assert [len(body) for body in bodies[:-1]] == [head.body_size for head in headers[:-1]]
    return handshake, headers, bodies


def cuts_of(data, points):
    edges = [0, *sorted({p % (len(data) + 1) for p in points}), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("stream", [6, 57, 74])
def test_golden_slave_bytes_decode_and_encode_to_the_same(stream):
    """What b0 and b1 sent as slaves, re-encoded byte for byte."""
    data = golden(stream, "slave")
    handshake, acks = read_slave([data])
    assert encode_slave_handshake(handshake) + b"".join(map(encode_ack, acks)) == data


@pytest.mark.parametrize("stream", [6, 57, 74])
def test_golden_master_bytes_decode_and_encode_to_the_same(stream):
    """What they sent as masters, re-encoded byte for byte."""
    data = golden(stream, "master")
    handshake, headers, bodies = read_master([data])
    frames = zip(map(encode_transfer_header, headers), bodies, strict=True)
    encoded = encode_master_handshake(handshake.max_offset, handshake.entries)
    assert encoded + b"".join(head + body for head, body in frames) == data


@given(points=st.lists(st.integers(0, 10_000), max_size=12))
def test_slave_frames_may_be_cut_anywhere(points):
    data = golden(6, "slave")
    assert read_slave(cuts_of(data, points)) == read_slave([data])


@given(points=st.lists(st.integers(0, 10_000), max_size=12))
def test_master_frames_may_be_cut_anywhere(points):
    data = golden(6, "master")
    assert read_master(cuts_of(data, points)) == read_master([data])


def test_the_master_waits_for_all_16_bytes_of_a_handshake():
    """Java reads the id from a frame of 12 bytes, and so gets another one."""
    frame = encode_slave_handshake(SlaveHandshake(7, async_learner=True))
    reader = SlaveFrameReader()
    for byte in frame[:15]:
        assert reader.feed(bytes([byte])) == (None, [])
    handshake, acks = reader.feed(frame[15:])
    assert handshake == SlaveHandshake(7, async_learner=True) and acks == []


def test_more_than_a_thousand_epochs_pass():
    """Java's connection fails above 1,000."""
    history = entries(*((n, n * 10) for n in range(1, 5_001)))
    frame = encode_master_handshake(60_000, history)
    handshake, _, _ = read_master(cuts_of(frame, range(0, len(frame), 997)))
    assert handshake.entries == history


def test_equal_starts_pass():
    """R25: an epoch without a write is still an epoch."""
    history = entries((1, 0), (2, 100), (3, 100))
    frame = encode_master_handshake(100, history)
    assert decode_master_handshake(frame).entries == history


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">ihhq", 2, 0, 0, 1),
        struct.pack(">ihhq", 1, 0, 0, -5),
        encode_slave_handshake(SlaveHandshake(1)) + struct.pack(">iq", 1, 5),
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_nonsense_of_a_slave_is_refused(frame):
    with pytest.raises(RemoteProtocolError):
        SlaveFrameReader().feed(frame)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">iiqi", 2, 0, 0, -1),
        struct.pack(">iiqi", 1, 13, 0, -1),
        struct.pack(">iiqi", 1, -12, 0, -1),
        struct.pack(">iiqi", 1, 0x7FFFFFF0, 0, -1),
        struct.pack(">iiqi", 1, 12, 0, 9) + struct.pack(">iq", 1, 0),
        struct.pack(">iiqi", 1, 12, 0, -1) + struct.pack(">iq", -1, 0),
        struct.pack(">iiqi", 1, 24, 0, 1) + struct.pack(">iqiq", 2, 0, 1, 0),
        struct.pack(">iiqi", 1, 24, 0, 2) + struct.pack(">iqiq", 1, 10, 2, 0),
        struct.pack(">iiqi", 1, 0, 0, -1) + struct.pack(">iiqiqq", 1, 0, 0, 0, 0, 0),
        struct.pack(">iiqi", 1, 0, 0, -1) + struct.pack(">iiqiqq", 2, -1, 0, 0, 0, 0),
        struct.pack(">iiqi", 1, 0, 0, -1) + struct.pack(">iiqiqq", 2, 5, -1, 0, 0, 0),
    ],
)
def test_nonsense_of_a_master_is_refused(frame):
    with pytest.raises(RemoteProtocolError):
        list(MasterFrameReader().feed(memoryview(frame)))


# -- the frames of our own (R41, R42)

NAMED = identity(7, cluster="C\u00e4", log_id="l" * 32)


@given(st.lists(st.integers(0, 400)))
def test_r41_a_slaves_name_and_marks_come_out_of_every_cut(points):
    handshake = SlaveHandshake(7, async_learner=True, identity=NAMED)
    data = encode_slave_handshake(handshake) + encode_tables_mark(2) + encode_ack(5)
    data += encode_epoch_mark(3) + encode_ack(9)
    reader = SlaveFrameReader()
    arrived, acks = None, []
    for piece in cuts_of(data, points):
        came, more = reader.feed(piece)
        arrived = arrived or came
        acks += more
    assert arrived == handshake
    assert acks in ([9], [5, 9]), "an ack in front of the mark may be gone, none behind it"
    assert (reader.entered_epoch, reader.tables_epoch) == (3, 2)


@given(st.lists(st.integers(0, 400)))
def test_r41_a_masters_name_comes_out_of_every_cut(points):
    history = with_ends([EpochEntry(1, 0), EpochEntry(4, 100)])
    data = encode_master_handshake(100, history, NAMED)
    data += encode_transfer_header(TransferHeader(3, 100, 4, 100, 0)) + b"abc"
    handshake, _, bodies = read_master(cuts_of(data, points))
    assert handshake == MasterHandshake(100, 4, history, NAMED) and bodies == [b"abc"]


def test_r41_an_ack_before_the_mark_of_one_read_does_not_follow_it():
    reader = SlaveFrameReader()
    reader.feed(encode_slave_handshake(SlaveHandshake(7, identity=NAMED)))
    assert reader.feed(encode_ack(5) + encode_epoch_mark(3)) == (None, [])
    assert reader.marked
    assert reader.feed(encode_ack(5)) == (None, [5]) and not reader.marked


def test_each_frame_may_be_as_large_as_its_limit_says():
    head = TransferHeader(BODY_SIZE_MAX, 0, 1, 0, 0)
    assert decode_transfer_header(encode_transfer_header(head)) == head
    with pytest.raises(RemoteProtocolError, match="body"):
        decode_transfer_header(encode_transfer_header(head._replace(body_size=BODY_SIZE_MAX + 1)))
    size = EPOCHS_MAX * 12
    assert master_handshake_size(struct.pack(">iiqi", 1, size, 0, 1)) == 20 + size
    with pytest.raises(RemoteProtocolError, match="epoch list"):
        master_handshake_size(struct.pack(">iiqi", 1, size + 12, 0, 1))
    assert identity_size(struct.pack(">4si", b"BATI", IDENTITY_SIZE_MAX)) == 8 + IDENTITY_SIZE_MAX
    with pytest.raises(RemoteProtocolError, match="identity"):
        identity_size(struct.pack(">4si", b"BATI", IDENTITY_SIZE_MAX + 1))


def test_broker_id_0_is_an_id():
    handshake = SlaveHandshake(0)
    assert read_slave([encode_slave_handshake(handshake)]) == (handshake, [])


def framed(body):
    return struct.pack(">4si", b"BATI", len(body)) + body


@pytest.mark.parametrize(
    "frame",
    [
        framed(b"{}"),
        framed(b"no json at all, yet long enough to be"),
        framed(encode_identity(msgspec.structs.replace(NAMED, incarnation=""))[8:]),
        struct.pack(">4si", b"BATI", 0),
        struct.pack(">4si", b"BATI", 5_000),
        struct.pack(">4si", b"BATI", -1),
        framed(b'{"x":%b%b}' % (b"[" * 2_000, b"]" * 2_000)),
        framed(encode_identity(NAMED)[8:].replace(b"log", b"\xff\xfe\xfd")),
        2 * encode_identity(NAMED),
    ],
    ids=["empty", "noise", "nobody", "size 0", "long", "size -1", "nested", "no text", "twice"],
)
def test_r41_a_name_that_cannot_be_is_refused_by_both_readers(frame):
    frame += bytes(40)
    with pytest.raises(RemoteProtocolError):
        SlaveFrameReader().feed(frame)
    with pytest.raises(RemoteProtocolError):
        list(MasterFrameReader().feed(memoryview(frame)))


def test_r41_marks_of_a_nameless_slave_are_refused():
    reader = SlaveFrameReader()
    reader.feed(encode_slave_handshake(SlaveHandshake(7)))
    with pytest.raises(RemoteProtocolError):
        reader.feed(encode_epoch_mark(1))
