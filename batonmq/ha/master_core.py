"""The master's end of all HA connections: decides what to send next and which acks count. Pure.

A connection's stages are WAIT_HANDSHAKE -> WAIT_ACK -> TRANSFER, with WAIT_RECORD in between if it
names a process that the controllers have not named yet, and WAIT_PROOF if it is to prove that it
knows the secret of the nodes. After the first ack log bytes are sent
while less than a window of them is unacked. A frame never crosses an epoch or a segment.

Invariants: an ack counts only on the newest connection of its broker id (R18), from the registered
process (R41), up to what was verified or sent there, and only after that connection entered this
mastership's epoch. Origin: Java AutoSwitchHAConnection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import structs

from batonmq.epoch.entry import EpochEntry, entry_after, entry_at, entry_of, with_bytes, with_ends
from batonmq.ha.java_peer import heartbeat_epoch
from batonmq.ha.lineage import LogSamples, points_of
from batonmq.ha.node_secret import PROVE_MS, SWITCH, MasterProof, NodeSecret, Unproven
from batonmq.ha.proof import STRANGERS_MAX, ProofVerdict, Registrations, master_introduced
from batonmq.ha.slave_connection import ANY_ACK, LinkStage, SlaveConnection
from batonmq.ha.sync_state import RecordedSet, SyncEffect, SyncState
from batonmq.ha.wire import (
    TRANSFER_HEADER,
    HAState,
    SlaveHandshake,
    TransferHeader,
    encode_master_handshake,
    encode_transfer_header,
)
from batonmq.protocol.role_view import Replica
from batonmq.runtime.eviction import Crowd
from batonmq.runtime.recent_events import RecentEvents, records_event, shows_events

pack_transfer_header = TRANSFER_HEADER.pack


@dataclass(frozen=True, slots=True)
class MasterPolicy:
    """Times in ms, sizes in bytes. `segment_size`: the commit log's mapped file size."""

    segment_size: int
    batch_bytes: int = 1 << 20
    window_bytes: int = 8 << 20
    heartbeat_ms: int = 100
    confirm_beat_ms: int = 20
    """If no other frame carried a new confirmOffset, it is sent after this time."""
    housekeeping_ms: int = 20_000
    handshake_ms: int = PROVE_MS  # From the connection to its handshake, and to its proof (R58).
    record_wait_ms: int = 500  # How long a new process waits for the view that registers it.
    flow_bytes_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class SendBytes:
    connection_id: int
    data: bytes


class SendLog(NamedTuple):  # a NamedTuple, made per turn and slave: a third of the cost
    """Send `header`, then the log's bytes [offset, offset + size) of one segment."""

    connection_id: int
    header: bytes
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """`flush`: first deliver what was sent."""

    connection_id: int
    reason: str
    flush: bool = False


@dataclass(frozen=True, slots=True)
class SlaveFollowing:
    """The slave has accepted our history and follows from `offset`."""

    broker_id: int
    offset: int


MasterEffect = SyncEffect | SendBytes | SendLog | CloseConnection | SlaveFollowing | Unproven


class MasterCore:
    """All HA connections of one mastership. The shell assigns connection ids and never reuses
    one."""

    def __init__(
        self,
        sync: SyncState,
        policy: MasterPolicy,
        entries: Sequence[EpochEntry],
        *,
        min_offset: int,
        now_ms: int,
        registrations: Registrations,
        samples: LogSamples | None = None,
    ) -> None:
        self.recent_events = RecentEvents()
        self.sync = sync
        self.log = sync.log
        self.policy = policy
        self.min_offset = min_offset
        self.connections: dict[int, SlaveConnection] = {}
        self.wakeup_ms = now_ms + sync.tick_ms
        self._half_window = policy.window_bytes // 2
        self._entries = with_ends(entries)
        self._following: dict[int, SlaveConnection] = {}
        self._strangers: Crowd[int] = Crowd(STRANGERS_MAX)
        self._registrations = registrations
        self._samples = samples
        self._secret = registrations.secret

    # -- the log and the history

    @records_event
    def appended(self, written: int, now_ms: int) -> list[MasterEffect]:
        """This log now ends at `written`, the end of a message."""
        effects: list[MasterEffect] = list(self.sync.appended(written, now_ms))
        for connection in self._following.values():
            self._transfer(connection, now_ms, effects)
        return effects

    @records_event
    def flushed(self, flushed: int, now_ms: int) -> list[MasterEffect]:
        return self._confirming(list(self.sync.flushed_to(flushed, now_ms)), now_ms)

    @records_event
    def epochs_changed(self, entries: Sequence[EpochEntry], now_ms: int) -> list[MasterEffect]:
        """An epoch was appended, or old ones dropped."""
        self._entries = with_ends(entries)
        effects: list[MasterEffect] = []
        # At once: a connection with the old list would continue in an epoch that has ended
        # (RocketMQ issues 9689, 6505).
        for connection in list(self._following.values()):
            current = connection.entry
            found = entry_of(self._entries, current.epoch) if current is not None else None
            connection.entry = found or entry_at(self._entries, connection.next_offset)
            self._transfer(connection, now_ms, effects)
            self._announce(connection, now_ms, effects)
        return effects

    @records_event
    def log_trimmed(self, min_offset: int, now_ms: int) -> list[MasterEffect]:
        """The log now begins at `min_offset`. Slaves that need older bytes are sent that offset
        (R27)."""
        if min_offset <= self.min_offset:
            return []
        self.min_offset = min_offset
        effects: list[MasterEffect] = []
        for connection in list(self._following.values()):
            if connection.next_offset < min_offset:
                effects += self._refuse_gone(connection, connection.next_offset, now_ms)
        return effects

    # -- connections

    @records_event
    def connection_opened(
        self, connection_id: int, address: str, ms: int, *, certified: bool = False
    ) -> list[MasterEffect]:
        """A new connection. If too many have not named themselves, closes one of them (R58).
        `certified`: the peer has shown a certificate."""
        extra = self._strangers.add(connection_id, address)
        effects = []
        if extra is not None:
            effects = self._close(self.connections[extra], "too many without a name", ms)
        connection = SlaveConnection(connection_id, address, ms, ms, certified=certified)
        self.connections[connection_id] = connection
        return effects

    @records_event
    def handshake_received(
        self, connection_id: int, handshake: SlaveHandshake, now_ms: int
    ) -> list[MasterEffect]:
        """Answers a process of this group with our history (R41)."""
        connection = self.connections[connection_id]
        assert connection.stage is LinkStage.WAIT_HANDSHAKE
        connection.handshake = handshake
        connection.read_ms = connection.sent_ms = now_ms
        effects: list[MasterEffect] = []
        offered = handshake.identity is not None and handshake.identity.nonce
        if self._secret is not None and not connection.certified and not offered:
            reason = f"slave {handshake.broker_id} offers no proof of the nodes' secret ({SWITCH})"
            effects = self._unproven(connection, self._secret, reason, now_ms)
        if connection_id not in self.connections:
            return effects
        return effects + self._admit(connection, handshake, now_ms)

    @records_event
    def proof_received(self, connection_id: int, proof: bytes, now_ms: int) -> list[MasterEffect]:
        """The slave's proof. Feed this before marks and acks of the same read."""
        connection = self.connections.get(connection_id)
        if connection is None:
            return []
        if connection.stage is not LinkStage.WAIT_PROOF:
            return self._close(connection, "a proof that was not asked for", now_ms)
        assert connection.proof is not None and self._secret is not None
        effects: list[MasterEffect] = []
        if not connection.proof.accepts(proof):
            assert connection.handshake is not None
            reason = f"the proof of slave {connection.handshake.broker_id} is wrong"
            effects = self._unproven(connection, self._secret, reason, now_ms)
        if connection_id not in self.connections:
            return effects
        return effects + self._count_in(connection, now_ms)

    def _unproven(
        self, connection: SlaveConnection, secret: NodeSecret, reason: str, now_ms: int
    ) -> list[MasterEffect]:
        """Reports it; closes the connection if the proof is required."""
        found = secret.unproven(connection.address, reason)
        return [found] if found.passes else [found, *self._close(connection, reason, now_ms)]

    def _admit(
        self, connection: SlaveConnection, handshake: SlaveHandshake, now_ms: int
    ) -> list[MasterEffect]:
        """Answers a connection that counts. It is counted at once, or after its proof."""
        standing, reason = self._registrations.judge(handshake)
        if standing is ProofVerdict.REFUSED:
            return self._close(connection, reason, now_ms)
        if standing is ProofVerdict.AWAITED:
            connection.stage = LinkStage.WAIT_RECORD
            return []
        connection.read_ms = connection.sent_ms = now_ms
        # The slave compares its log with this one, so its first ack may be as high as our end.
        connection.verified = self.log.written
        connection.epoch = self.sync.master_epoch
        own, identity = None, handshake.identity
        if identity is not None:
            own = master_introduced(
                self._registrations.own,
                identity,
                points_of(self._entries, self.log.written),
                self._samples,
            )
            if self._secret is not None and identity.nonce:
                proof = MasterProof(
                    self._secret,
                    identity.name,
                    own.name,
                    identity.challenge[0],
                    self._secret.address,
                )
                own = structs.replace(own, nonce=proof.nonce.hex(), proof=proof.proof.hex())
                connection.proof = proof
        # Java misreads epochs without bytes (`java_peer`), so they are left out.
        history = self._entries if own is not None else with_bytes(self._entries, self.log.written)
        reply = encode_master_handshake(self.log.written, history, own)
        answer = SendBytes(connection.connection_id, reply)
        if connection.proof is not None:
            connection.stage = LinkStage.WAIT_PROOF
            return [answer]
        return [*self._count_in(connection, now_ms), answer]

    def _count_in(self, connection: SlaveConnection, now_ms: int) -> list[MasterEffect]:
        """The connection is that replica's; closes an older one of the same replica (R18)."""
        handshake = connection.handshake
        assert handshake is not None
        effects: list[MasterEffect] = []
        for older in list(self.connections.values()):
            if older.broker_id == handshake.broker_id:
                effects += self._close(older, "superseded by a newer connection", now_ms)
        self._strangers.remove(connection.connection_id)
        connection.stage = LinkStage.WAIT_ACK
        connection.broker_id = handshake.broker_id
        connection.read_ms = now_ms
        self.sync.connected(
            handshake.broker_id,
            connection.connection_id,
            now_ms,
            learner=handshake.async_learner,
            tables_awaited=handshake.identity is not None,
        )
        return effects

    @records_event
    def acks_received(
        self, connection_id: int, offsets: Sequence[int], now_ms: int
    ) -> list[MasterEffect]:
        """Acks of one read, oldest first. An ack that goes back, or is beyond what was sent, ends
        the connection. Offsets below 0 mean "nothing yet" (RocketMQ issue 6728)."""
        connection = self.connections.get(connection_id)
        if connection is None:
            return []
        if connection.stage is LinkStage.WAIT_PROOF:  # R58: not even "nothing yet" buys it time
            return self._close(connection, "an ack where a proof was expected", now_ms)
        connection.read_ms = now_ms
        offsets = [offset for offset in offsets if offset >= 0]
        if not offsets:
            return []
        effects: list[MasterEffect] = []
        first = connection.stage is LinkStage.WAIT_ACK
        if first:
            effects += self._start_transfer(connection, offsets[0], now_ms)
        if connection.stage is not LinkStage.TRANSFER:  # refused, or a late read
            return effects
        for offset in offsets:
            # An ack outside of this range cannot be about this log.
            if not connection.acked <= offset <= max(connection.next_offset, connection.verified):
                return effects + self._close(
                    connection,
                    f"ack of {offset}; acked before {connection.acked}, "
                    f"sent up to {connection.next_offset}",
                    now_ms,
                )
            connection.acked = offset
        # After the first ack only sent bytes can be acked.
        connection.verified = 0
        if connection.epoch != self.sync.master_epoch and connection.acked > connection.earlier_end:
            # It acked bytes sent since the election, so it has entered this epoch.
            connection.epoch = self.sync.master_epoch
        # Before that an ack may be about bytes that the slave has cut since, under another master.
        if connection.epoch == self.sync.master_epoch:
            effects += self.sync.acked(
                connection.broker_id, connection_id, connection.acked, now_ms
            )
        if first:
            effects.append(SlaveFollowing(connection.broker_id, connection.acked))
        self._transfer(connection, now_ms, effects)
        return self._confirming(effects, now_ms)

    @records_event
    def marks_received(
        self, connection_id: int, entered_epoch: int, tables_epoch: int, now_ms: int
    ) -> list[MasterEffect]:
        """The slave has entered `entered_epoch`, and has the tables of `tables_epoch` (-1: none).
        Feed this before the acks of the same read, which came after the mark."""
        connection = self.connections.get(connection_id)
        if connection is None or connection.broker_id < 0:
            return []
        if entered_epoch == self.sync.master_epoch:
            connection.epoch = entered_epoch
        settled = self.sync.tables_held(connection.broker_id, connection_id, tables_epoch, now_ms)
        return self._confirming(list(settled), now_ms)

    @records_event
    def connection_closed(self, connection_id: int, now_ms: int) -> list[MasterEffect]:
        """A connection closed, by either side. Unknown ids are ignored."""
        connection = self.connections.pop(connection_id, None)
        if connection is None:
            return []
        return self._confirming(self._forget(connection, now_ms), now_ms)

    # -- the controllers' decisions

    @records_event
    def replicas_changed(self, replicas: Sequence[Replica], now_ms: int) -> list[MasterEffect]:
        """A newer role view. Only acks of the registered process count (R41)."""
        # What an earlier process acked may be lost (R12). A process may connect before the view
        # that registers it comes: it waits for that (WAIT_RECORD).
        self._registrations.renew(replicas)
        effects: list[MasterEffect] = []
        for connection in list(self.connections.values()):
            if connection.handshake is None or connection.stage is LinkStage.WAIT_RECORD:
                continue
            standing, reason = self._registrations.judge(connection.handshake)
            if standing is not ProofVerdict.COUNTS:
                effects += self._close(connection, reason, now_ms)
        for connection in list(self.connections.values()):
            if connection.handshake is not None and connection.stage is LinkStage.WAIT_RECORD:
                effects += self._admit(connection, connection.handshake, now_ms)
        return self._confirming(effects, now_ms)

    @records_event
    def set_adopted(self, recorded: RecordedSet, now_ms: int) -> list[MasterEffect]:
        """The controllers recorded another set (R20)."""
        return self._confirming(list(self.sync.adopt(recorded, now_ms)), now_ms)

    @records_event
    def epoch_begun(
        self, master_epoch: int, recorded: RecordedSet, entries: Sequence[EpochEntry], now_ms: int
    ) -> list[MasterEffect]:
        """This master was elected again; `entries` end with the new, durable epoch. Connections
        stay. Acks count again after the slave's mark of this epoch, or for bytes sent since."""
        # Earlier acks do not count: a slave may have followed another master in between and cut its
        # log. If there was an epoch in between only the mark counts: the slave may still hear of
        # that master.
        start, skips = entries[-1].start_offset, master_epoch > self.sync.master_epoch + 1
        for connection in self.connections.values():
            sent = max(connection.next_offset, connection.verified)
            connection.earlier_end = ANY_ACK if skips and connection.is_ours else sent
        # R9: old acks must not count once anything is sent in the new epoch.
        settled = self.sync.begin_epoch(master_epoch, start, recorded, now_ms)
        effects = self.epochs_changed(entries, now_ms)
        return self._confirming(effects + list(settled), now_ms)

    @records_event
    def dead_changed(self, broker_ids: frozenset[int], now_ms: int) -> list[MasterEffect]:
        """The broker ids that the controllers report dead now (R14)."""
        return self._confirming(list(self.sync.set_dead(broker_ids, now_ms)), now_ms)

    @records_event
    def proposal_refused(self, code: int, now_ms: int) -> list[MasterEffect]:
        """The controllers refused the open proposal. (A missing answer is not an event, R11.)"""
        return self._confirming(list(self.sync.refused(code, now_ms)), now_ms)

    # -- time

    @records_event
    def tick(self, now_ms: int) -> list[MasterEffect]:
        """Handles heartbeats, timeouts and deadlines of the set; due at `wakeup_ms`."""
        effects: list[MasterEffect] = list(self.sync.tick(now_ms))
        self.wakeup_ms = now_ms + self.sync.tick_ms
        policy = self.policy
        for connection in list(self.connections.values()):
            silent_ms = now_ms - connection.read_ms
            unnamed = connection.stage in (LinkStage.WAIT_HANDSHAKE, LinkStage.WAIT_PROOF)
            if silent_ms >= (policy.handshake_ms if unnamed else policy.housekeeping_ms):
                effects += self._close(connection, f"nothing read for {silent_ms} ms", now_ms)
            elif connection.handshake is not None and connection.stage is LinkStage.WAIT_RECORD:
                if now_ms - connection.sent_ms >= policy.record_wait_ms:
                    _, reason = self._registrations.judge(connection.handshake)
                    effects += self._close(connection, reason, now_ms)
            elif connection.stage is LinkStage.TRANSFER:
                self._transfer(connection, now_ms, effects)
                behind = connection.sent_confirm < self.log.confirm_offset
                due_ms = policy.confirm_beat_ms if behind else policy.heartbeat_ms
                if now_ms - connection.sent_ms >= due_ms:
                    self._announce(connection, now_ms, effects)
                else:
                    self.wakeup_ms = min(self.wakeup_ms, connection.sent_ms + due_ms)
        return effects

    # -- inside

    def _start_transfer(
        self, connection: SlaveConnection, ack: int, now_ms: int
    ) -> list[MasterEffect]:
        """Chooses the first byte to send: the slave's end; for an empty slave our first byte."""
        if ack > connection.verified:
            return self._close(
                connection, f"first ack is {ack}, our log ended at {connection.verified}", now_ms
            )
        start = ack
        if ack == 0:
            start = self.min_offset
            if connection.handshake is not None and connection.handshake.sync_from_last_file:
                written = self.log.written
                start = max(start, written - written % self.policy.segment_size)
        if start < self.min_offset:
            # R27: the heartbeat shows our first byte, and our slaves start their log again there.
            return self._refuse_gone(connection, start, now_ms)
        connection.next_offset = connection.start_offset = start
        connection.entry = entry_at(self._entries, start)
        if connection.entry is None:
            return self._close(connection, f"no epoch covers offset {start}", now_ms)
        connection.stage = LinkStage.TRANSFER
        self._following[connection.connection_id] = connection
        # R13: without our first bytes it cannot join
        if start > self.min_offset and ack == 0:
            self.sync.lacks_beginning(connection.broker_id)
        return []

    def _refuse_gone(
        self, connection: SlaveConnection, wanted: int, now_ms: int
    ) -> list[MasterEffect]:
        entry = entry_at(self._entries, self.min_offset) or EpochEntry(self.sync.master_epoch, 0)
        head = TransferHeader(
            0, self.min_offset, entry.epoch, entry.start_offset, self.log.confirm_offset
        )
        notice = SendBytes(connection.connection_id, encode_transfer_header(head))
        reason = f"wants offset {wanted}, our log begins at {self.min_offset}"
        return [notice, *self._close(connection, reason, now_ms, flush=True)]

    def _transfer(
        self, connection: SlaveConnection, now_ms: int, effects: list[MasterEffect]
    ) -> None:
        """Sends what the window allows, in order, and announces the epochs that end in between."""
        written = self.log.written
        if connection.next_offset == written and connection.entry is self._entries[-1]:
            if connection.announced_epoch < self._entries[-1].epoch:
                self._announce(connection, now_ms, effects)
            return
        policy = self.policy
        entry = connection.entry
        while entry is not None:
            offset = connection.next_offset
            if offset >= entry.end_offset:
                following = entry_after(self._entries, entry.epoch)
                assert following is not None, "an ended epoch without a next one"
                if connection.announced_epoch < entry.epoch and connection.is_ours:
                    # The slave's history must equal ours, so epochs without bytes are announced,
                    # too (R25).
                    self._announce(connection, now_ms, effects)
                connection.entry = entry = following
                continue
            if offset == written:
                if connection.announced_epoch < entry.epoch:
                    self._announce(connection, now_ms, effects)
                return
            space = policy.window_bytes - (offset - max(connection.acked, connection.start_offset))
            size = min(
                written - offset,
                entry.end_offset - offset,
                policy.batch_bytes,
                space,
                policy.segment_size - offset % policy.segment_size,
            )
            if size <= 0 or (size == space and space < min(policy.batch_bytes, self._half_window)):
                return  # a small frame would cost the slave a wake-up
            if policy.flow_bytes_per_s is not None:
                size = connection.flow.within(policy.flow_bytes_per_s, size, now_ms)
                if size == 0:
                    return
            self._emit(connection, entry, size, now_ms, effects)

    def _announce(
        self, connection: SlaveConnection, now_ms: int, effects: list[MasterEffect]
    ) -> None:
        """Sends a heartbeat: the next offset, its epoch, confirmOffset."""
        if connection.entry is not None:
            self._emit(connection, connection.entry, 0, now_ms, effects)

    def _emit(
        self,
        connection: SlaveConnection,
        entry: EpochEntry,
        size: int,
        now_ms: int,
        effects: list[MasterEffect],
    ) -> None:
        offset = connection.next_offset
        confirm = self.log.confirm_offset
        epoch = entry.epoch
        if not size and not connection.is_ours:
            epoch = heartbeat_epoch(entry, offset)
        header = pack_transfer_header(
            HAState.TRANSFER, size, offset, epoch, entry.start_offset, confirm
        )
        effects.append(SendLog(connection.connection_id, header, offset, size))
        connection.next_offset = offset + size
        connection.announced_epoch = entry.epoch
        connection.sent_confirm = confirm
        connection.sent_ms = now_ms
        connection.bytes_sent += size

    def _confirming(self, effects: list[MasterEffect], now_ms: int) -> list[MasterEffect]:
        """Sets when to send a new confirmOffset that no other frame has carried."""
        confirm = self.log.confirm_offset
        for connection in self._following.values():
            if connection.sent_confirm < confirm:
                due_ms = max(now_ms, connection.sent_ms + self.policy.confirm_beat_ms)
                if due_ms < self.wakeup_ms:
                    self.wakeup_ms = due_ms
        return effects

    def _close(
        self, connection: SlaveConnection, reason: str, now_ms: int, *, flush: bool = False
    ) -> list[MasterEffect]:
        self.connections.pop(connection.connection_id, None)
        effects: list[MasterEffect] = [CloseConnection(connection.connection_id, reason, flush)]
        return effects + self._forget(connection, now_ms)

    def _forget(self, connection: SlaveConnection, now_ms: int) -> list[MasterEffect]:
        connection.stage = LinkStage.CLOSED
        self._strangers.remove(connection.connection_id)
        self._following.pop(connection.connection_id, None)
        if connection.broker_id < 0:
            return []
        return list(self.sync.disconnected(connection.broker_id, connection.connection_id, now_ms))

    @shows_events
    def check_invariants(self) -> None:
        """Called after each step of tests and simulation."""
        self.sync.check_invariants()
        newest: set[int] = set()
        for connection in self.connections.values():
            if connection.broker_id >= 0:
                assert connection.broker_id not in newest, "R18: two connections of one broker"
                newest.add(connection.broker_id)
            following = connection.connection_id in self._following
            assert following == (connection.stage is LinkStage.TRANSFER)
            if connection.stage is LinkStage.TRANSFER:
                assert connection.acked <= connection.next_offset <= self.log.written
                entry = connection.entry
                assert entry is None or (
                    entry.start_offset <= connection.next_offset <= entry.end_offset
                )
