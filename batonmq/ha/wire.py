"""The frames of an AutoSwitch HA connection and their readers. Pure.

Integers are big-endian. Slave to master: a handshake, then acks. Master to slave: a handshake, then
transfer frames; one without a body is a heartbeat with the next offset. Frames may cut messages
anywhere.

Two BatonMQ brokers send more: each names itself in an identity frame before its handshake (R41),
and the slave reports which epoch it has entered and whose tables it has (R42). With a secret of the
nodes the identities also carry random numbers and the master's proof, and the slave's proof comes
before its first ack (`node_secret`). A slave sends these only to a BatonMQ master, so Java brokers
see the original protocol.

A reader takes bytes in pieces of any size and returns whole frames. Log bytes are not collected:
each piece of a body is a view of the receive buffer, valid until the next read. Origin: Java
AutoSwitchHAClient, AutoSwitchHAConnection (RIP-44).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from batonmq.epoch.entry import EpochEntry, order_fault, with_ends
from batonmq.ha.lineage import LogSample
from batonmq.ha.node_secret import PROOF_BYTES, Name
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.fastjson import NOT_JSON


class HAState(IntEnum):
    """Java's HAConnectionState, the first i32 of every frame."""

    READY = 0
    HANDSHAKE = 1
    TRANSFER = 2
    SUSPEND = 3
    SHUTDOWN = 4


class OwnState(IntEnum):
    """First i32 of the frames between BatonMQ brokers, in ASCII. A Java broker closes a connection
    on an unknown state."""

    IDENTITY = int.from_bytes(b"BATI")
    EPOCH_MARK = int.from_bytes(b"BATE")
    TABLES_MARK = int.from_bytes(b"BATT")
    PROOF = int.from_bytes(b"BATP")


IDENTITY_HEAD: Final = struct.Struct(
    ">"
    "i"  # 0  state, IDENTITY
    "i"  # 4  size of the JSON that follows
)
SLAVE_HANDSHAKE: Final = struct.Struct(
    ">"
    "i"  # 0  state, HANDSHAKE
    "h"  # 4  isSyncFromLastFile, 0 or 1
    "h"  # 6  isAsyncLearner, 0 or 1
    "q"  # 8  slaveBrokerId
)
SLAVE_ACK: Final = struct.Struct(
    ">"
    "i"  # 0  state, TRANSFER; or EPOCH_MARK, TABLES_MARK
    "q"  # 4  end of the slave's log, exclusive; of a mark: the masterEpoch
)
SLAVE_PROOF: Final = struct.Struct(
    ">"
    "i"  # 0  state, PROOF
    f"{PROOF_BYTES}s"  # 4
)
MASTER_HANDSHAKE: Final = struct.Struct(
    ">"
    "i"  # 0  state, HANDSHAKE
    "i"  # 4  size of the epoch list in bytes, 12 an entry
    "q"  # 8  end of the master's log, exclusive
    "i"  # 16 last epoch, -1 if there is none
)
EPOCH_ENTRY: Final = struct.Struct(
    ">"
    "i"  # 0  epoch
    "q"  # 4  start offset
)
TRANSFER_HEADER: Final = struct.Struct(
    ">"
    "i"  # 0  state, TRANSFER
    "i"  # 4  size of the body
    "q"  # 8  offset of the body's first byte
    "i"  # 16 epoch of the body
    "q"  # 20 start offset of that epoch
    "q"  # 28 confirmOffset
)

EPOCHS_MAX: Final = 1 << 20  # a longer list is refused (Java fails above 1,000)
BODY_SIZE_MAX: Final = 1 << 30  # a body stays in one segment of at most 1 GiB
IDENTITY_SIZE_MAX: Final = 4096
SLAVE_OPENING_SIZE_MAX: Final = IDENTITY_HEAD.size + IDENTITY_SIZE_MAX + SLAVE_HANDSHAKE.size
"""The most that a slave sends before the master answers."""


class HAIdentity(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The identity of the process at this end (R41), and samples for comparing the logs (R47).
    Older versions neither send nor read the fields with defaults."""

    cluster_name: str
    broker_name: str
    broker_id: int
    incarnation: str
    log_id: str
    points: tuple[int, ...] = ()  # slave: ends at which it wants samples of the master's log
    disputed: tuple[int, ...] = ()  # slave: those at which the bytes differed before
    samples: tuple[LogSample, ...] = ()  # master: the answer to `points`, its own ends included
    lineage: str = ""  # master: the lineage of its log
    nonce: str = ""  # a random number in hex: this end knows the secret of the nodes
    proof: str = ""  # master: in hex

    @property
    def name(self) -> Name:
        """What a proof is about."""
        return (
            self.cluster_name,
            self.broker_name,
            str(self.broker_id),
            self.incarnation,
            self.log_id,
        )

    @property
    def challenge(self) -> tuple[bytes, bytes]:
        """Nonce and proof; empty if they are missing or cannot be read."""
        try:
            return bytes.fromhex(self.nonce), bytes.fromhex(self.proof)
        except ValueError:
            return b"", b""

    def __str__(self) -> str:
        return (
            f"{self.cluster_name}/{self.broker_name}/{self.broker_id}"
            f" (incarnation {self.incarnation}, log {self.log_id})"
        )


class SlaveHandshake(NamedTuple):
    """A slave's first frame. `identity` comes in a frame before it, which Java does not send."""

    broker_id: int
    sync_from_last_file: bool = False
    async_learner: bool = False
    identity: HAIdentity | None = None


class MasterHandshake(NamedTuple):
    """The master's history: `entries` ascend, with ends except for the last. `identity` comes in a
    frame before it, if the slave named itself."""

    max_offset: int
    last_epoch: int
    entries: tuple[EpochEntry, ...]
    identity: HAIdentity | None = None


class TransferHeader(NamedTuple):
    """The head of a transfer frame. `offset` is -1 while a Java master has not chosen a start. Java
    may send an `epoch_start_offset` above `offset`: it labels the last chunk of an epoch with the
    next epoch."""

    body_size: int
    offset: int
    epoch: int
    epoch_start_offset: int
    confirm_offset: int


def encode_identity(identity: HAIdentity) -> bytes:
    body = msgspec.json.encode(identity)
    return IDENTITY_HEAD.pack(OwnState.IDENTITY, len(body)) + body


def identity_size(head: bytes | bytearray | memoryview) -> int:
    """The size of the identity frame that begins with these 8 bytes; 0 for another frame. Raises
    RemoteProtocolError for an impossible size."""
    size: int
    state, size = IDENTITY_HEAD.unpack_from(head)
    if state != OwnState.IDENTITY:
        return 0
    if not 0 < size <= IDENTITY_SIZE_MAX:
        raise RemoteProtocolError(f"HA identity of {size} bytes")
    return IDENTITY_HEAD.size + size


def decode_identity(frame: bytes | bytearray | memoryview) -> HAIdentity:
    """Reads a whole identity frame. Raises RemoteProtocolError if it has no incarnation."""
    try:
        identity = msgspec.json.decode(bytes(frame[IDENTITY_HEAD.size :]), type=HAIdentity)
    except NOT_JSON as error:
        raise RemoteProtocolError(f"HA identity that cannot be read: {error}") from error
    if not identity.incarnation:
        raise RemoteProtocolError(f"HA identity without an incarnation: {identity}")
    return identity


def encode_slave_handshake(handshake: SlaveHandshake) -> bytes:
    named = b"" if handshake.identity is None else encode_identity(handshake.identity)
    return named + SLAVE_HANDSHAKE.pack(
        HAState.HANDSHAKE,
        handshake.sync_from_last_file,
        handshake.async_learner,
        handshake.broker_id,
    )


def decode_slave_handshake(frame: bytes | bytearray | memoryview) -> SlaveHandshake:
    """Reads 16 bytes. Raises RemoteProtocolError for another state or a negative id."""
    state, last_file, learner, broker_id = SLAVE_HANDSHAKE.unpack_from(frame)
    if state != HAState.HANDSHAKE:
        raise RemoteProtocolError(f"HA frame of state {state} where a handshake was expected")
    if broker_id < 0:
        raise RemoteProtocolError(f"HA handshake of broker id {broker_id}")
    return SlaveHandshake(broker_id, last_file == 1, learner == 1)


def encode_ack(max_offset: int) -> bytes:
    return SLAVE_ACK.pack(HAState.TRANSFER, max_offset)


def encode_proof(proof: bytes) -> bytes:
    return SLAVE_PROOF.pack(OwnState.PROOF, proof)


def encode_epoch_mark(epoch: int) -> bytes:
    """A slave's mark: it has durably entered `epoch`, and later acks count in it."""
    return SLAVE_ACK.pack(OwnState.EPOCH_MARK, epoch)


def encode_tables_mark(epoch: int) -> bytes:
    """A slave's mark: it has the tables of the master of `epoch` (R42); -1: none, or outdated
    ones."""
    return SLAVE_ACK.pack(OwnState.TABLES_MARK, epoch)


def encode_master_handshake(
    max_offset: int, entries: Sequence[EpochEntry], identity: HAIdentity | None = None
) -> bytes:
    """`max_offset`: the end of the master's log. `entries`: ascending."""
    named = b"" if identity is None else encode_identity(identity)
    last_epoch = entries[-1].epoch if entries else -1
    head = MASTER_HANDSHAKE.pack(
        HAState.HANDSHAKE, EPOCH_ENTRY.size * len(entries), max_offset, last_epoch
    )
    return named + head + b"".join(EPOCH_ENTRY.pack(e.epoch, e.start_offset) for e in entries)


def master_handshake_size(head: bytes | bytearray | memoryview) -> int:
    """The size of the handshake frame, from its first 20 bytes. Raises RemoteProtocolError for
    another state or an impossible size."""
    state: int
    body_size: int
    state, body_size, _, _ = MASTER_HANDSHAKE.unpack_from(head)
    if state != HAState.HANDSHAKE:
        raise RemoteProtocolError(f"HA frame of state {state} where a handshake was expected")
    if not 0 <= body_size <= EPOCHS_MAX * EPOCH_ENTRY.size or body_size % EPOCH_ENTRY.size:
        raise RemoteProtocolError(f"HA handshake with an epoch list of {body_size} bytes")
    return MASTER_HANDSHAKE.size + body_size


def decode_master_handshake(frame: bytes | bytearray | memoryview) -> MasterHandshake:
    """Reads a whole handshake. Raises RemoteProtocolError if epochs are out of order. Equal starts
    are valid: an epoch without bytes."""
    size = master_handshake_size(frame)
    _, _, max_offset, last_epoch = MASTER_HANDSHAKE.unpack_from(frame)
    pairs = EPOCH_ENTRY.iter_unpack(frame[MASTER_HANDSHAKE.size : size])
    entries = with_ends(EpochEntry(epoch, start) for epoch, start in pairs)
    fault = order_fault(entries)
    if fault:
        raise RemoteProtocolError(f"HA handshake: {fault}")
    if entries and entries[-1].epoch != last_epoch:
        raise RemoteProtocolError(
            f"HA handshake of last epoch {last_epoch}, its list ends at {entries[-1].epoch}"
        )
    return MasterHandshake(max_offset, last_epoch, entries)


def encode_transfer_header(header: TransferHeader) -> bytes:
    return TRANSFER_HEADER.pack(HAState.TRANSFER, *header)


def decode_transfer_header(frame: bytes | bytearray | memoryview, at: int = 0) -> TransferHeader:
    """Reads 36 bytes at `at`. Raises RemoteProtocolError for another state or an impossible
    size."""
    state, *fields = TRANSFER_HEADER.unpack_from(frame, at)
    header = TransferHeader._make(fields)
    if state != HAState.TRANSFER:
        raise RemoteProtocolError(f"HA frame of state {state} where a transfer was expected")
    if not 0 <= header.body_size <= BODY_SIZE_MAX:
        raise RemoteProtocolError(f"HA transfer frame with a body of {header.body_size} bytes")
    if header.body_size and header.offset < 0:
        raise RemoteProtocolError(f"HA transfer frame with a body at offset {header.offset}")
    return header


_ACK_SIZE: Final = SLAVE_ACK.size
_PROOF_STATE: Final = OwnState.PROOF.to_bytes(4)
_HEADER_SIZE: Final = TRANSFER_HEADER.size


class SlaveFrameReader:
    """Reads what a slave sends: its handshake, maybe a proof, then acks and marks."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._identity: HAIdentity | None = None
        self.handshake: SlaveHandshake | None = None
        self.proof = b""  # that of the last `feed`; acks of the same `feed` came after it
        self.marked = False  # whether the last `feed` had a mark
        self.entered_epoch = -1  # the last epoch mark; acks of the same `feed` came after it
        self.tables_epoch = -1  # the last tables mark

    def feed(self, data: bytes | bytearray | memoryview) -> tuple[SlaveHandshake | None, list[int]]:
        """Returns the handshake, once complete, and the acked offsets in order. Raises
        RemoteProtocolError for anything else; then the reader is unusable."""
        pending = self._pending
        pending += data
        self.marked, self.proof = False, b""
        arrived: SlaveHandshake | None = None
        if self.handshake is None:
            arrived = self.handshake = self._handshake_in(pending)
            if arrived is None:
                return None, []
        if pending.startswith(_PROOF_STATE):
            if len(pending) < SLAVE_PROOF.size:
                return arrived, []
            _, self.proof = SLAVE_PROOF.unpack_from(pending)
            del pending[: SLAVE_PROOF.size]
        whole = len(pending) - len(pending) % _ACK_SIZE
        acks: list[int] = []
        for state, offset in SLAVE_ACK.iter_unpack(bytes(pending[:whole])):
            if state == HAState.TRANSFER:
                acks.append(offset)
            else:
                self._mark(state, offset, acks)
        del pending[:whole]
        return arrived, acks

    def _handshake_in(self, pending: bytearray) -> SlaveHandshake | None:
        """Takes identity and handshake out of `pending` once they are complete."""
        if self._identity is None and len(pending) >= IDENTITY_HEAD.size:
            size = identity_size(pending)
            if size > len(pending):
                return None
            if size:
                self._identity = decode_identity(pending[:size])
                del pending[:size]
        # Wait for all 16 bytes. (Java reads from byte 12 on, and misreads a frame that is cut
        # there.)
        if len(pending) < SLAVE_HANDSHAKE.size:
            return None
        handshake = decode_slave_handshake(pending)
        del pending[: SLAVE_HANDSHAKE.size]
        return handshake._replace(identity=self._identity)

    def _mark(self, state: int, epoch: int, acks: list[int]) -> None:
        if state not in (OwnState.EPOCH_MARK, OwnState.TABLES_MARK) or self._identity is None:
            raise RemoteProtocolError(f"HA frame of state {state} where an ack was expected")
        self.marked = True
        if state == OwnState.EPOCH_MARK:
            self.entered_epoch = epoch
            acks.clear()
        else:
            self.tables_epoch = epoch


class MasterFrameReader:
    """Reads what a master sends: `feed` yields a MasterHandshake, then TransferHeaders, each
    followed by the pieces of its body (memoryview, never empty)."""

    def __init__(self) -> None:
        self.identity_first = False
        """Its HAIdentity must come before the handshake, and is yielded by itself."""
        self._pending = bytearray()
        self._wanted = MASTER_HANDSHAKE.size
        self._identity: HAIdentity | None = None
        self._body_left = 0
        self.handshake: MasterHandshake | None = None

    def feed(
        self, data: memoryview
    ) -> Iterator[HAIdentity | MasterHandshake | TransferHeader | memoryview]:
        """Yields what `data` completes; exhaust it before the next `feed`. Raises
        RemoteProtocolError for an impossible frame."""
        at = 0
        end = len(data)
        if self.handshake is None:
            at = self._feed_handshake(data)
            if self.identity_first and self._identity is not None:
                self.identity_first = False
                yield self._identity
                at += self._feed_handshake(data[at:])
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
        """Collects identity and handshake; returns how many bytes of `data` it used."""
        at = 0
        pending = self._pending
        while len(pending) < self._wanted:
            take = min(self._wanted - len(pending), len(data) - at)
            if take == 0:
                return at
            pending += data[at : at + take]
            at += take
            if len(pending) == MASTER_HANDSHAKE.size:
                size = identity_size(pending)
                if self.identity_first and not size:
                    raise RemoteProtocolError("the master does not name itself")
                self._wanted = size or master_handshake_size(pending)
            if len(pending) == self._wanted and identity_size(pending):
                if self._identity is not None:
                    raise RemoteProtocolError("a second HA identity on one connection")
                self._identity = decode_identity(pending)
                pending.clear()
                self._wanted = MASTER_HANDSHAKE.size
                if self.identity_first:
                    return at
        self.handshake = decode_master_handshake(pending)._replace(identity=self._identity)
        pending.clear()
        return at
