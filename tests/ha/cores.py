"""What the tests of the cores share: a log in memory, a host for a slave core, a mastership."""

from collections.abc import Iterable

from batonmq.epoch.entry import EpochEntry, with_ends
from batonmq.ha import slave_effects as fx
from batonmq.ha.follower import SyncPolicy
from batonmq.ha.java_peer import PeerIdentity
from batonmq.ha.proof import Registrations
from batonmq.ha.received_log import LocalLog
from batonmq.ha.slave_core import SlaveCore
from batonmq.ha.sync_state import RecordedSet, SyncState, WrittenLog
from batonmq.ha.wire import HAIdentity, MasterFrameReader, TransferHeader
from batonmq.protocol.role_view import Replica

NOW = 1_000_000


def identity(
    broker_id: int,
    *,
    cluster: str = "C",
    name: str = "broker-a",
    incarnation: str = "",
    log_id: str = "",
) -> HAIdentity:
    return HAIdentity(
        cluster, name, broker_id, incarnation or f"i{broker_id}", log_id or f"log {broker_id}"
    )


def registered(broker_id: int, *, incarnation: str = "", log_id: str = "") -> Replica:
    """As `identity` names it."""
    named = identity(broker_id, incarnation=incarnation, log_id=log_id)
    return Replica(broker_id, incarnation=named.incarnation, log_id=named.log_id)


def registrations(*replicas: Replica, master: int = 1) -> Registrations:
    return Registrations(identity(master), replicas)


def recorded_set(
    members: Iterable[int], epoch: int, candidates: Iterable[int] | None = None
) -> RecordedSet:
    eligible = None if candidates is None else frozenset(candidates)
    return RecordedSet(frozenset(members), epoch, eligible)


def mastership(
    members: Iterable[int] = (1,),
    *,
    broker_id: int = 1,
    epoch: int = 1,
    set_epoch: int = 1,
    candidates: Iterable[int] | None = None,
    start: int = 0,
    written: int = 0,
    confirm: int = 0,
    now: int = NOW,
    policy: SyncPolicy | None = None,
) -> SyncState:
    """A SyncState whose log holds [0, written), confirmed up to `confirm`, nothing flushed."""
    policy = policy or SyncPolicy()
    log = WrittenLog(written=written, flushed=0, confirm_offset=confirm, now_ms=now, policy=policy)
    recorded = recorded_set(members, set_epoch, candidates)
    return SyncState(broker_id, epoch, start, recorded, log, now, policy)


def entries(*pairs: tuple[int, int]) -> tuple[EpochEntry, ...]:
    return with_ends(EpochEntry(epoch, start) for epoch, start in pairs)


class MemoryLog:
    """A commit log of one byte string, with the epoch list beside it; what a slave core acts on."""

    def __init__(
        self, data: bytes = b"", *history: tuple[int, int], confirm: int = 0, first: int = 0
    ) -> None:
        self.first = first
        self.data = data
        self.entries = entries(*history)
        self.confirm = confirm
        self.cuts: list[tuple[int, int]] = []

    @property
    def end(self) -> int:
        return self.first + len(self.data)

    @property
    def history(self) -> list[tuple[int, int]]:
        return [(e.epoch, e.start_offset) for e in self.entries]

    def facts(self) -> LocalLog:
        return LocalLog(self.first, self.end, self.confirm, self.entries)

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset - self.first : offset - self.first + size]


class SlaveHost:
    """Performs a slave core's effects on a MemoryLog. `sent` is what went to the master. A Java
    master is what the view says, unless the test `proves` by itself."""

    def __init__(self, core: SlaveCore, log: MemoryLog, *, proves: bool = True) -> None:
        self.core = core
        self.proves = proves
        self.log = log
        self.reader = MasterFrameReader()
        self.sent = bytearray()
        self.connected = False
        self.effects: list[fx.SlaveEffect] = []

    def perform(self, effects: list[fx.SlaveEffect], now_ms: int) -> None:
        log = self.log
        for effect in effects:
            self.effects.append(effect)
            match effect:
                case fx.Dial():
                    self.reader = MasterFrameReader()
                case fx.Hangup():
                    self.connected = False
                case fx.SendToMaster(data):
                    self.sent += data
                case fx.AppendLog(offset, data):
                    assert offset == log.end, "written elsewhere than at the end"
                    log.data += bytes(data)
                case fx.AppendEpoch(epoch, start):
                    assert start <= log.end and (not log.history or epoch > log.history[-1][0])
                    log.entries = entries(*log.history, (epoch, start))
                case fx.AdoptEpochs(adopted):
                    log.entries = adopted
                case fx.BeginAt(offset):
                    log.data, log.first, log.entries, log.confirm = b"", offset, (), 0
                case fx.TruncateTo(_, offset, unclean):
                    assert offset >= log.confirm or unclean, "R23"
                    log.confirm = min(log.confirm, offset)
                    log.cuts.append((log.end, offset))
                    log.data = log.data[: offset - log.first]
                    log.entries = entries(*(e for e in log.history if e[1] < offset))
                    self.perform(self.core.log_changed(log.facts(), now_ms), now_ms)
                case fx.ProveMaster(view) if self.proves:
                    assert self.core._peer is not None
                    answer = PeerIdentity(
                        view.cluster_name, view.broker_name, 0, self.core._peer.last_epoch
                    )
                    self.perform(self.core.peer_proved(answer, log.facts(), now_ms), now_ms)
                case fx.Confirm(offset):
                    assert log.confirm <= offset <= log.end
                    log.confirm = offset
        self.core.check_invariants()

    def connect(self, now_ms: int) -> None:
        self.connected = True
        self.perform(self.core.connected(self.log.facts(), now_ms), now_ms)

    def receive(self, data: bytes, now_ms: int) -> None:
        for item in self.reader.feed(memoryview(data)):
            if isinstance(item, memoryview):
                effects = self.core.log.append(item)
            elif isinstance(item, TransferHeader):
                effects = self.core.frame_received(item, now_ms)
            else:
                effects = self.core.handshake_received(item, self.log.facts(), now_ms)
            self.perform(effects, now_ms)
            if not self.connected:
                return
        self.perform(self.core.turn_ended(self.log.end, now_ms), now_ms)

    def take_sent(self) -> bytes:
        data, self.sent = bytes(self.sent), bytearray()
        return data
