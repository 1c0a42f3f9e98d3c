"""What a master knows of one connection of a slave. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from batonmq.epoch.entry import EpochEntry
from batonmq.ha.node_secret import MasterProof
from batonmq.ha.wire import SlaveHandshake

ANY_ACK: Final = 1 << 62


@dataclass(slots=True)
class Flow:
    """The flow control of one connection: bytes sent in the current second."""

    second: int = -1
    sent: int = 0

    def within(self, bytes_per_second: int, size: int, now_ms: int) -> int:
        """How many of `size` bytes may be sent now; counts them as sent."""
        second = now_ms // 1000
        if self.second != second:
            self.second, self.sent = second, 0
        size = max(0, min(size, bytes_per_second - self.sent))
        self.sent += size
        return size


class LinkStage(Enum):
    WAIT_HANDSHAKE = "wait_handshake"
    WAIT_RECORD = "wait_record"
    WAIT_PROOF = "wait_proof"
    WAIT_ACK = "wait_ack"
    TRANSFER = "transfer"
    CLOSED = "closed"


@dataclass(slots=True)
class SlaveConnection:
    """One socket of a slave. Offsets are exclusive ends; `next_offset` is the next byte to send."""

    connection_id: int
    address: str
    read_ms: int
    sent_ms: int
    stage: LinkStage = LinkStage.WAIT_HANDSHAKE
    certified: bool = False  # the peer has shown a certificate
    handshake: SlaveHandshake | None = None
    proof: MasterProof | None = None
    broker_id: int = -1  # -1 until the connection is known to be that replica's
    verified: int = 0
    """The end of our log at the handshake: the first ack cannot be above it."""
    epoch: int = -1  # the epoch that the slave has entered on this connection
    earlier_end: int = 0
    """Acks up to here may be from before this mastership; ANY_ACK: all may."""
    start_offset: int = 0
    next_offset: int = 0
    acked: int = -1
    entry: EpochEntry | None = None
    announced_epoch: int = -1
    sent_confirm: int = -1
    bytes_sent: int = 0
    flow: Flow = field(default_factory=Flow)

    @property
    def is_ours(self) -> bool:
        """Whether the peer is a BatonMQ broker, which names itself."""
        return self.handshake is not None and self.handshake.identity is not None
