"""Frames out of a stream that comes in pieces of any size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.protocol.errors import RemoteProtocolError
from batonmq.remoting.command import BUFFER_SIZE, FRAME_SIZE_MAX, FrameReader, receive_buffer

Frame = tuple[int, bytes, bytes]
FRAME = st.tuples(st.integers(0, 1), st.binary(min_size=1, max_size=40), st.binary(max_size=200))


def bytes_of(frame: Frame) -> bytes:
    serialize_type, header, body = frame
    length = 4 + len(header) + len(body)
    return length.to_bytes(4) + (serialize_type << 24 | len(header)).to_bytes(4) + header + body


def feed(reader: FrameReader, data: bytes, piece: int) -> list[Frame]:
    frames: list[Frame] = []
    while data:
        buffer = reader.get_buffer()
        assert len(buffer) > 0
        n = min(piece, len(buffer), len(data))
        buffer[:n] = data[:n]
        data = data[n:]
        frames += reader.received(n)
    return frames


@given(st.lists(FRAME, max_size=12), st.integers(1, 300))
def test_pieces_of_any_size_give_the_same_frames(frames: list[Frame], piece: int) -> None:
    reader = FrameReader(receive_buffer())
    assert feed(reader, b"".join(map(bytes_of, frames)), piece) == frames
    assert reader.waiting == 0


@given(st.lists(st.tuples(FRAME, FRAME), max_size=8), st.integers(1, 300))
def test_connections_that_read_into_one_buffer_do_not_disturb_each_other(
    pairs: list[tuple[Frame, Frame]], piece: int
) -> None:
    shared = receive_buffer()
    readers = FrameReader(shared), FrameReader(shared)
    streams = [b"".join(bytes_of(pair[side]) for pair in pairs) for side in (0, 1)]
    found: tuple[list[Frame], list[Frame]] = ([], [])
    while any(streams):
        for side in (0, 1):
            found[side].extend(feed(readers[side], streams[side][:piece], piece))
            streams[side] = streams[side][piece:]
    assert found == ([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def test_r58_pieces_of_a_large_frame_are_put_by() -> None:
    frame = (0, b"h", bytes(range(256)) * (BUFFER_SIZE // 64))
    reader, data, found = FrameReader(receive_buffer()), bytes_of(frame), list[Frame]()
    while data:
        buffer = reader.get_buffer()
        n = min(len(buffer), len(data), 1000)
        buffer[:n], data = data[:n], data[n:]
        reader.put_by(n)
        reader.get_buffer()
        found += reader.received(0)
    assert found == [frame]


def test_an_idle_connection_has_no_buffer_of_its_own() -> None:
    shared = receive_buffer()
    reader = FrameReader(shared)
    feed(reader, bytes_of((0, b"h", b"x" * (3 * BUFFER_SIZE))), 1 << 24)
    assert reader.get_buffer() is shared and reader.waiting == 0


@pytest.mark.parametrize("size", [BUFFER_SIZE - 9, BUFFER_SIZE, 3 * BUFFER_SIZE + 1, 3 << 20])
def test_a_frame_larger_than_the_buffer_makes_it_grow_for_a_while(size: int) -> None:
    reader = FrameReader(receive_buffer())
    frames: list[Frame] = [(0, b"h", b"small"), (0, b"h", b"x" * size), (0, b"i", b"after")]
    for piece in (4096, 1 << 24):
        assert feed(reader, b"".join(map(bytes_of, frames)), piece) == frames
    assert len(reader.get_buffer()) <= 1 << 20


def test_copied_frames_stay_when_the_buffer_is_used_again() -> None:
    reader = FrameReader(receive_buffer())
    (first,) = feed(reader, bytes_of((0, b"first", b"body")), 100)
    feed(reader, bytes_of((0, b"SECOND", b"BODY")), 100)
    assert first == (0, b"first", b"body")


def test_the_frame_limit_is_16_mib_with_the_length_field() -> None:
    reader = FrameReader(receive_buffer())
    largest: Frame = (0, b"h", b"x" * (FRAME_SIZE_MAX - 9))
    assert len(bytes_of(largest)) == FRAME_SIZE_MAX == 16_777_216
    assert feed(reader, bytes_of(largest), 1 << 24) == [largest]
    with pytest.raises(RemoteProtocolError, match="16777217 bytes is over the limit"):
        feed(reader, bytes_of((0, b"h", b"x" * (FRAME_SIZE_MAX - 8)))[:8], 8)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"GET / HTTP/1.1\r\n", "over the limit"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "TLS handshake"),
        (b"\x00\x00\x00\x10\x02\x00\x00\x01", "header type 2"),
        (b"\x00\x00\x00\x10\x00\x00\x00\x0d", "does not fit"),
        (b"\x00\x00\x00\x10\x00\x00\x00\x00", "without a header"),
        (b"\x00\x00\x00\x00\x00\x00\x00\x01", "does not fit"),
        (b"\xff\xff\xff\xff\x00\x00\x00\x01", "over the limit"),
    ],
)
def test_nonsense_says_what_it_is_behind_the_good_frames_before_it(data: bytes, what: str) -> None:
    reader = FrameReader(receive_buffer())
    good: Frame = (1, b"header", b"body")
    buffer = reader.get_buffer()
    whole = bytes_of(good) + data
    buffer[: len(whole)] = whole
    frames = reader.received(len(whole))
    assert next(frames) == good
    with pytest.raises(RemoteProtocolError, match=what):
        next(frames)
