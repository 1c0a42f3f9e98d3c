"""Frames out of a stream of bytes, without any I/O.

The reader owns one buffer that a socket reads into; what lies between two frames' borders stays
there until the rest has come. Header and body are copied out, because the next read overwrites the
buffer. Invariant: `get_buffer()` is never empty, and one frame alone makes the buffer grow beyond
its 64 KiB, to that frame's size, known from its first 8 bytes and limited to 16 MiB.

Origin: Java `NettyDecoder` (LengthFieldBasedFrameDecoder of 16777216 bytes).
"""

import struct
from collections.abc import Iterator
from typing import Final

from protocol.errors import RemoteProtocolError

# Length field included, as Java counts.
FRAME_SIZE_MAX: Final = 16_777_216
BUFFER_SIZE: Final = 65_536
# A buffer up to this size is kept between large frames; a larger one is given back.
BUFFER_SIZE_KEPT: Final = 1 << 20

_unpack = struct.Struct(">II").unpack_from


class FrameReader:
    """Use: read into `get_buffer()`, then iterate over `received(n)` to its end."""

    __slots__ = ("_buffer", "_end", "_size", "_start", "_view")

    def __init__(self) -> None:
        self._buffer = bytearray(BUFFER_SIZE)
        self._view = memoryview(self._buffer)
        self._size = BUFFER_SIZE
        self._start = 0
        self._end = 0

    @property
    def waiting(self) -> int:
        """Bytes of a frame that has not wholly come."""
        return self._end - self._start

    def get_buffer(self) -> memoryview:
        """Where the next bytes go. Never empty."""
        return self._view[self._end :]

    def received(self, n: int) -> Iterator[tuple[int, bytes, bytes]]:
        """(header type, header, body) of each frame that is whole now that `n` bytes were read.

        Raises RemoteProtocolError behind the frames that stand before the malformed one; the
        connection is then of no more use.
        """
        self._end += n
        view = self._view
        start = self._start
        needed = 8
        while self._end - start >= 8:
            length, mark = _unpack(view, start)
            header_len = mark & 0xFFFFFF
            needed = length + 4
            if needed > FRAME_SIZE_MAX or header_len + 4 > length or mark >> 25 or not header_len:
                raise RemoteProtocolError(self._complaint(length, mark, start))
            if self._end - start < needed:
                break
            body_at = start + 8 + header_len
            stop = start + needed
            self._start = stop
            yield mark >> 24, view[start + 8 : body_at].tobytes(), view[body_at:stop].tobytes()
            start = stop
            needed = 8
        self._make_room(needed)

    def _make_room(self, needed: int) -> None:
        """Room for a frame of `needed` bytes whose beginning is kept."""
        waiting = self._end - self._start
        if waiting == 0:
            self._start = self._end = 0
            if self._size > BUFFER_SIZE_KEPT:
                self._replace(BUFFER_SIZE, b"")
        elif needed > self._size:
            self._replace(needed, bytes(self._view[self._start : self._end]))
        elif self._start:
            self._view[:waiting] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, waiting

    def _replace(self, size: int, kept: bytes) -> None:
        self._buffer = bytearray(size)
        self._view = memoryview(self._buffer)
        self._size = size
        self._view[: len(kept)] = kept
        self._start, self._end = 0, len(kept)

    def _complaint(self, length: int, mark: int, start: int) -> str:
        first = bytes(self._view[start : min(self._end, start + 16)])
        if first[0] == 0x16:
            return "a TLS handshake, but this port speaks plaintext"
        if length + 4 > FRAME_SIZE_MAX:
            what = f"frame of {length + 4} bytes is over the limit of {FRAME_SIZE_MAX}"
        elif mark >> 25:
            what = f"header type {mark >> 24} is neither JSON (0) nor binary (1)"
        elif not mark & 0xFFFFFF:
            what = "frame without a header"
        else:
            what = f"header of {mark & 0xFFFFFF} bytes does not fit into a frame of {length}"
        return f"{what}; it begins with {first!r}"


__all__ = ["BUFFER_SIZE", "FRAME_SIZE_MAX", "FrameReader"]
