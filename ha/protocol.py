"""Frame readers of both ends of an HA connection, without any I/O.

Bytes go in as they come, cut anywhere; whole frames come out. Log bytes are not collected: the
slave's reader hands each piece of a body on as a view of the receive buffer, so a frame of any size
needs no memory of its own, and the view must be used before the next read.
Invariant: what comes out is the same for every way of cutting the same stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ha.wire import (
    MASTER_HANDSHAKE,
    SLAVE_ACK,
    SLAVE_HANDSHAKE,
    TRANSFER_HEADER,
    HAState,
    MasterHandshake,
    SlaveHandshake,
    TransferHeader,
    decode_master_handshake,
    decode_slave_handshake,
    decode_transfer_header,
    master_handshake_size,
)
from protocol.errors import RemoteProtocolError

_ACK_SIZE: Final = SLAVE_ACK.size
_HEADER_SIZE: Final = TRANSFER_HEADER.size


class SlaveFrameReader:
    """Reads what a slave sends: its 16-byte handshake once it is whole, then acks."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self.handshake: SlaveHandshake | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> tuple[SlaveHandshake | None, list[int]]:
        """The handshake, if `data` completed it, and the acked offsets in order.

        Raises RemoteProtocolError on anything else; the reader is then of no more use.
        """
        pending = self._pending
        pending += data
        arrived: SlaveHandshake | None = None
        if self.handshake is None:
            # All 16 bytes: Java starts to read at 12 and misreads a frame cut there.
            if len(pending) < SLAVE_HANDSHAKE.size:
                return None, []
            arrived = self.handshake = decode_slave_handshake(pending)
            del pending[: SLAVE_HANDSHAKE.size]
        whole = len(pending) - len(pending) % _ACK_SIZE
        acks: list[int] = []
        for state, offset in SLAVE_ACK.iter_unpack(bytes(pending[:whole])):
            if state != HAState.TRANSFER:
                raise RemoteProtocolError(f"HA frame of state {state} where an ack was expected")
            acks.append(offset)
        del pending[:whole]
        return arrived, acks


class MasterFrameReader:
    """Reads what a master sends: its handshake, then transfer frames.

    After each `feed` the caller iterates: MasterHandshake, then TransferHeaders, each followed by
    as many pieces of its body (memoryview, never empty) as it takes to make `body_size`.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._wanted = MASTER_HANDSHAKE.size
        self._body_left = 0
        self.handshake: MasterHandshake | None = None

    @property
    def body_left(self) -> int:
        """Bytes of the current body that have not come yet; 0 between frames."""
        return self._body_left

    def feed(self, data: memoryview) -> Iterator[MasterHandshake | TransferHeader | memoryview]:
        """Yields what `data` completes. Raises RemoteProtocolError on nonsense.

        The iterator must be run to its end before the next feed.
        """
        at = 0
        end = len(data)
        if self.handshake is None:
            at = self._feed_handshake(data)
            if self.handshake is None:
                return
            yield self.handshake
        while at < end:
            if self._body_left:
                size = min(self._body_left, end - at)
                self._body_left -= size
                yield data[at : at + size]
                at += size
                continue
            if not self._pending and end - at >= _HEADER_SIZE:
                header = decode_transfer_header(data, at)
                at += _HEADER_SIZE
            else:
                take = min(_HEADER_SIZE - len(self._pending), end - at)
                self._pending += data[at : at + take]
                at += take
                if len(self._pending) < _HEADER_SIZE:
                    return
                header = decode_transfer_header(self._pending)
                self._pending.clear()
            self._body_left = header.body_size
            yield header

    def _feed_handshake(self, data: memoryview) -> int:
        """Collects the handshake; returns how many bytes of `data` it took."""
        at = 0
        while len(self._pending) < self._wanted:
            take = min(self._wanted - len(self._pending), len(data) - at)
            if take == 0:
                return at
            self._pending += data[at : at + take]
            at += take
            if len(self._pending) == MASTER_HANDSHAKE.size:
                self._wanted = master_handshake_size(self._pending)
        self.handshake = decode_master_handshake(self._pending)
        self._pending.clear()
        return at


__all__ = ["MasterFrameReader", "SlaveFrameReader"]
