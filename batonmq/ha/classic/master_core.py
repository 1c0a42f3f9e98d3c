"""The master's end of all classic HA connections: decides what to send and what is acknowledged.
Pure.

The first report of a connection says where to start: at its value; for 0 at the start of the last
segment (a new slave gets no older history). A slave that reports an offset outside this log is
refused with the reason: its bytes are of another history, or it would wait forever.

Slaves are counted by connection, because nothing on it names the slave. A slave whose old
connection is half open connects again from the same host. So a connection counts if it is the
newest of its host, or has reported since the newest was made. Origin: Java DefaultHAConnection,
GroupTransferService.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from batonmq.ha.classic.wire import BODY_SIZE_MAX, Answer, Hello, encode_answer, encode_head
from batonmq.ha.master_core import CloseConnection, SendBytes, SendLog
from batonmq.ha.node_secret import PROVE_MS, SWITCH, MasterProof, NodeSecret, Unproven
from batonmq.ha.proof import STRANGERS_MAX
from batonmq.ha.slave_connection import Flow
from batonmq.runtime.eviction import Crowd
from batonmq.runtime.recent_events import RecentEvents, records_event

SLAVES_MAX: Final = 64
"""Classic HA has no names, so any peer that reports counts as a slave. Above this limit the host
with the most slaves loses its oldest (R58)."""


@dataclass(frozen=True, slots=True)
class ClassicPolicy:
    """Times in ms, sizes in bytes. `segment_size`: the commit log's mapped file size."""

    segment_size: int
    needed_slaves: int = 0
    """How many slaves must have a byte before it is acknowledged; 0 for ASYNC_MASTER."""
    gap_bytes: int = 256 << 20  # haMaxGapNotInSync: slaves further behind do not count.
    batch_bytes: int = 1 << 20
    window_bytes: int = 8 << 20
    heartbeat_ms: int = 5_000
    housekeeping_ms: int = 20_000
    flow_bytes_per_s: int | None = None

    def __post_init__(self) -> None:
        assert 0 < self.batch_bytes <= BODY_SIZE_MAX


class Acknowledged(NamedTuple):
    """Enough slaves have all bytes below `offset`."""

    offset: int


@dataclass(frozen=True, slots=True)
class SlavesMissing:
    """Too few slaves are within the gap: no write can be acknowledged now."""

    wanted: int
    present: int


ClassicEffect = SendBytes | SendLog | CloseConnection | Acknowledged | SlavesMissing | Unproven


@dataclass(slots=True)
class ReportingSlave:
    """One slave connection. Offsets are exclusive ends; -1 before the first report."""

    connection_id: int
    address: str
    read_ms: int
    sent_ms: int
    start_offset: int = -1
    next_offset: int = -1
    acked: int = -1
    name: str = ""  # As the slave named itself; only shown.
    opened_ms: int = 0
    proven: bool = True  # Or it need not be.
    proof: MasterProof | None = None
    counts: bool = True  # Not while its host has a newer connection and it has not reported since.
    bytes_sent: int = 0
    flow: Flow = field(default_factory=Flow)

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]


class ClassicMasterCore:
    """Feed it events and perform the effects in order. `begin` and `end`: those of our log."""

    def __init__(
        self,
        policy: ClassicPolicy,
        begin: int,
        end: int,
        now_ms: int,
        secret: NodeSecret | None = None,
    ) -> None:
        """`secret`: of the nodes; None: peers need no proof."""
        self.policy = policy
        self._secret = secret
        self.begin = begin
        self.end = end
        self.acknowledged = 0
        self.connections: dict[int, ReportingSlave] = {}
        self.wakeup_ms = now_ms + policy.heartbeat_ms
        self.recent_events = RecentEvents()
        self._strangers: Crowd[int] = Crowd(STRANGERS_MAX)
        self._reporting: Crowd[int] = Crowd(SLAVES_MAX)

    # -- events

    @records_event
    def connection_opened(
        self, connection_id: int, address: str, now_ms: int, *, certified: bool = False
    ) -> list[ClassicEffect]:
        """A new connection. If too many have not reported, closes one of them (R58).
        `certified`: the peer has shown a certificate."""
        extra = self._strangers.add(connection_id, address)
        effects = [] if extra is None else self._close(extra, "too many report nothing")
        slave = ReportingSlave(connection_id, address, now_ms, now_ms, opened_ms=now_ms)
        slave.proven = self._secret is None or certified
        if slave.proven:
            self._is_newest(slave)
        else:
            self.wakeup_ms = min(self.wakeup_ms, now_ms + PROVE_MS)
        self.connections[connection_id] = slave
        return effects

    def _is_newest(self, slave: ReportingSlave) -> None:
        for other in self.connections.values():
            if other is not slave and other.host == slave.host:
                other.counts = False

    @records_event
    def hello_received(self, connection_id: int, hello: Hello, now_ms: int) -> list[ClassicEffect]:
        """The slave offers a proof, and asks for ours."""
        slave = self.connections.get(connection_id)
        if slave is None:
            return []
        if self._secret is None:
            return self._close(connection_id, "it asks for a proof of a secret that is not set")
        name, master = self._secret.named(str(hello.broker_id)), self._secret.named("0")
        # Slaves may be configured with another address of this broker, so none is compared.
        slave.proof = MasterProof(self._secret, name, master, hello.nonce, "")
        answer = encode_answer(Answer(slave.proof.nonce, slave.proof.proof))
        return [SendBytes(connection_id, answer)]

    @records_event
    def proof_received(self, connection_id: int, proof: bytes, now_ms: int) -> list[ClassicEffect]:
        slave = self.connections.get(connection_id)
        if slave is None or slave.proof is None:
            return []
        if slave.proof.accepts(proof):
            slave.proven = True
            self._is_newest(slave)
            return []
        return self._unproven(slave, "its proof of the nodes' secret is wrong")

    def _unproven(self, slave: ReportingSlave, reason: str) -> list[ClassicEffect]:
        """Reports it; closes the connection if the proof is required."""
        if slave.proven or self._secret is None:
            return []
        found = self._secret.unproven(slave.address, reason)
        if not found.passes:
            return [found, *self._close(slave.connection_id, reason)]
        slave.proven = True
        self._is_newest(slave)
        return [found]

    @records_event
    def connection_closed(self, connection_id: int, now_ms: int) -> list[ClassicEffect]:
        self._forget(connection_id)
        return self._count()

    @records_event
    def reported(self, connection_id: int, log_end: int, now_ms: int) -> list[ClassicEffect]:
        """The slave has all bytes below `log_end`."""
        slave = self.connections.get(connection_id)
        if slave is None:
            return []
        reason = f"it offers no proof of the nodes' secret ({SWITCH})"
        unproven = self._unproven(slave, reason)
        if connection_id not in self.connections:
            return unproven
        slave.read_ms = now_ms
        if slave.next_offset < 0:  # the first report says where to start
            refusal = self._begin(slave, log_end)
        else:
            refusal = (
                f"it reports {log_end}, but was sent nothing above {slave.next_offset}"
                if log_end > slave.next_offset
                else ""
            )
        if refusal:
            return [*unproven, *self._close(connection_id, refusal)]
        # It reported after the newest connection of its host was made, so it belongs to another
        # slave.
        slave.counts = True
        slave.acked = max(slave.acked, log_end)
        effects = [*unproven, *self._send(slave, now_ms), *self._count()]
        if connection_id in self._strangers:  # now it counts as a slave (R58)
            self._strangers.remove(connection_id)
            extra = self._reporting.add(connection_id, slave.address)
            if extra is not None:
                effects += self._close(extra, f"more than {SLAVES_MAX} slaves")
        return effects

    def appended(self, end: int, now_ms: int) -> list[ClassicEffect]:
        """Our log ends at `end`."""
        self.end = end
        effects: list[ClassicEffect] = []
        for slave in self.connections.values():
            effects += self._send(slave, now_ms)
        return effects + self._count()

    @records_event
    def log_trimmed(self, begin: int) -> None:
        """The oldest segments have expired."""
        self.begin = begin

    def tick(self, now_ms: int) -> list[ClassicEffect]:
        effects: list[ClassicEffect] = []
        policy = self.policy
        for slave in list(self.connections.values()):
            if not slave.proven and now_ms - slave.opened_ms >= PROVE_MS:
                effects += self._close(slave.connection_id, f"it proved nothing for {PROVE_MS} ms")
                continue
            if now_ms - slave.read_ms >= policy.housekeeping_ms:
                effects += self._close(
                    slave.connection_id, f"nothing was read for {policy.housekeeping_ms} ms"
                )
                continue
            effects += self._send(slave, now_ms)
            if slave.next_offset >= 0 and now_ms - slave.sent_ms >= policy.heartbeat_ms:
                slave.sent_ms = now_ms
                head = encode_head(slave.next_offset, 0)
                effects.append(SendLog(slave.connection_id, head, slave.next_offset, 0))
        self.wakeup_ms = now_ms + self._pause_ms(now_ms)
        return effects

    # -- reading

    def slaves_within_gap(self) -> int:
        """The number of slaves at most `gap_bytes` behind."""
        # RocketMQ's criterion for an in-sync slave in this mode
        lowest = self.end - self.policy.gap_bytes
        return sum(slave.counts and slave.acked > lowest for slave in self._slaves())

    def is_followed_from(self, host: str) -> bool:
        return any(slave.host == host for slave in self._slaves())

    # -- inside

    def _slaves(self) -> list[ReportingSlave]:
        return [slave for slave in self.connections.values() if slave.acked >= 0]

    def _begin(self, slave: ReportingSlave, log_end: int) -> str:
        """Sets where the connection starts; returns why it cannot, "" if it can."""
        if log_end > self.end:
            return (
                f"its log ends at {log_end}, above the end of this one, {self.end}: it holds"
                " another history; cut or empty it, or make it the master"
            )
        if log_end == 0:
            start = max(self.begin, self.end - self.end % self.policy.segment_size)
        elif log_end < self.begin:
            return (
                f"its log ends at {log_end}, but this one begins at {self.begin}: the bytes"
                " between them have expired; empty its store"
            )
        else:
            start = log_end
        slave.start_offset = slave.next_offset = start
        return ""

    def _send(self, slave: ReportingSlave, now_ms: int) -> list[ClassicEffect]:
        """Sends frames up to the log's end, within window and flow control."""
        effects: list[ClassicEffect] = []
        policy = self.policy
        while 0 <= slave.next_offset < self.end:
            unacked = slave.next_offset - max(slave.acked, slave.start_offset)
            segment_left = policy.segment_size - slave.next_offset % policy.segment_size
            size = min(
                segment_left,
                policy.batch_bytes,
                self.end - slave.next_offset,
                policy.window_bytes - unacked,
            )
            if policy.flow_bytes_per_s is not None:
                size = slave.flow.within(policy.flow_bytes_per_s, size, now_ms)
            if size <= 0:
                break
            head = encode_head(slave.next_offset, size)
            effects.append(SendLog(slave.connection_id, head, slave.next_offset, size))
            slave.next_offset += size
            slave.bytes_sent += size
            slave.sent_ms = now_ms
        return effects

    def _close(self, connection_id: int, reason: str) -> list[ClassicEffect]:
        self._forget(connection_id)
        return [CloseConnection(connection_id, reason), *self._count()]

    def _forget(self, connection_id: int) -> None:
        self.connections.pop(connection_id, None)
        self._strangers.remove(connection_id)
        self._reporting.remove(connection_id)

    def _count(self) -> list[ClassicEffect]:
        """Updates what enough slaves have, or that there are too few."""
        needed = self.policy.needed_slaves
        if needed == 0:
            return []
        effects: list[ClassicEffect] = []
        acks = sorted((slave.acked for slave in self._slaves() if slave.counts), reverse=True)
        if len(acks) >= needed and acks[needed - 1] > self.acknowledged:
            self.acknowledged = acks[needed - 1]
            effects.append(Acknowledged(self.acknowledged))
        present = self.slaves_within_gap()
        if present < needed:
            effects.append(SlavesMissing(needed, present))
        return effects

    def _pause_ms(self, now_ms: int) -> int:
        """Milliseconds until a heartbeat, a timeout or the next second's flow is due."""
        due = [now_ms + self.policy.heartbeat_ms]
        for slave in self.connections.values():
            due.append(slave.read_ms + self.policy.housekeeping_ms)
            if not slave.proven:
                due.append(slave.opened_ms + PROVE_MS)
            if slave.next_offset >= 0:
                due.append(slave.sent_ms + self.policy.heartbeat_ms)
                if self.policy.flow_bytes_per_s is not None and slave.next_offset < self.end:
                    due.append((now_ms // 1000 + 1) * 1000)
        return max(1, min(due) - now_ms)
