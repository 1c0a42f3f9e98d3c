"""The cores of a group: scripts in testdata/*.txt, verbs with the effects that they cause.

Each verb acts on a little group in memory; see `tests/shared/scripts.py`.

    log ID HISTORY END [confirm=N] [first=N]   a replica with that epoch list (1@0,2@50) and log
    lead ID EPOCH SET [batch=N] [window=N] [segment=N]
    follow ID [SET] [epoch=N] [java]           a slave core dials the leader of that epoch; both
                                               name themselves, unless the leader is a Java broker
    settle                                     carries bytes both ways until there are none
    append N        the leader writes N bytes, one message
    epoch N         the leader is elected again
    break ID        the connection of ID ends
    send ID FRAME   raw slave frames to the leader: handshake, ack=N
    receive ID FRAME  raw master frames to a slave: hand=END;HISTORY, data=OFF+N;E@S;CONFIRM
    tick MS         time passes, then both sides tick
    dead IDS | applied | refused CODE | unknown | trim N | prove CLUSTER/NAME/ID/EPOCH
    show            logs, epochs, set
"""

from pathlib import Path

import pytest

from batonmq.ha import slave_effects as fx
from batonmq.ha.java_peer import PeerIdentity
from batonmq.ha.master_core import (
    CloseConnection,
    MasterCore,
    MasterPolicy,
    SendBytes,
    SendLog,
    SlaveFollowing,
)
from batonmq.ha.slave_core import SlaveCore, SlavePhase
from batonmq.ha.slave_policy import SlavePolicy
from batonmq.ha.sync_state import ConfirmAdvanced, ProposeSet, RecordedSet
from batonmq.ha.wire import (
    HAState,
    SlaveFrameReader,
    SlaveHandshake,
    TransferHeader,
    decode_transfer_header,
    encode_ack,
    encode_master_handshake,
    encode_slave_handshake,
    encode_transfer_header,
)
from batonmq.protocol.role_view import Replica, RoleView
from tests.ha.cores import (
    MemoryLog,
    SlaveHost,
    entries,
    identity,
    mastership,
    registered,
    registrations,
)

SCRIPTS = sorted((Path(__file__).parent / "testdata").glob("*.txt"))


def pairs(text):
    """`1@0,2@50` as epoch and start; `-` for none."""
    return [tuple(map(int, item.split("@"))) for item in text.split(",")] if text != "-" else []


def ids(text):
    return frozenset(map(int, text.split(","))) if text != "-" else frozenset()


def options(words):
    return {k: int(v) for k, v in (w.split("=") for w in words if "=" in w)}


def bytes_of(history, first, end):
    """Log bytes name their epoch: all of epoch 1 are `1`."""
    data = bytearray()
    for n, (epoch, start) in enumerate(history):
        stop = history[n + 1][1] if n + 1 < len(history) else end
        data += b"%d" % (epoch % 10) * (min(stop, end) - start)
    return bytes(data[first - (history[0][1] if history else 0) :]) if history else b"?" * end


class Env:
    """One leader, its slaves, and the wires between them."""

    def __init__(self):
        self.now = 1_000_000
        self.logs, self.slaves, self.links, self.readers = {}, {}, {}, {}
        self.leader = self.core = None
        self.wire = {}
        self.replicas = {}
        self.next_connection = 0
        self.out = []

    def put(self, who, text):
        self.out.append(f"{who}: {text}")

    # -- effects in words

    def on_master(self, effects):
        log = self.logs[self.leader]
        for effect in effects:
            match effect:
                case SendLog(connection_id, header, offset, size):
                    head = decode_transfer_header(header)
                    what = f"[{offset},{offset + size})" if size else f"beat at {offset}"
                    self.put(
                        self.leader,
                        f"-> {self.name(connection_id)} {what} of {head.epoch}@"
                        f"{head.epoch_start_offset} confirm {head.confirm_offset}",
                    )
                    data = log.read(offset, size)
                    assert len(data) == size
                    self.wire.setdefault(connection_id, bytearray()).extend(header + data)
                case SendBytes(connection_id, data):
                    head = int.from_bytes(data[:4], "big")
                    kind = "beat" if head == HAState.TRANSFER else "handshake"
                    self.put(self.leader, f"-> {self.name(connection_id)} {kind}")
                    self.wire.setdefault(connection_id, bytearray()).extend(data)
                case CloseConnection(connection_id, reason):
                    self.put(self.leader, f"closes {self.name(connection_id)}: {reason}")
                    self.dropped(connection_id)
                case ConfirmAdvanced(offset):
                    log.confirm = offset
                    self.put(self.leader, f"confirms {offset}")
                case ProposeSet(proposal):
                    self.put(self.leader, f"proposes {sorted(proposal.new_set)}: {proposal.reason}")
                case SlaveFollowing(broker_id, offset):
                    self.put(self.leader, f"is followed by {broker_id} from {offset}")
        self.core.check_invariants()

    def on_slave(self, broker_id, effects):
        host = self.slaves[broker_id]
        for effect in effects:
            text = {
                fx.Dial: lambda e: f"dials {e.address}",
                fx.Hangup: lambda e: f"hangs up: {e.reason}",
                fx.ProveMaster: lambda e: "requests the master's identity",
                fx.TruncateTo: lambda e: f"cuts {e.from_offset} to {e.offset}",
                fx.BeginAt: lambda e: f"begins at {e.offset}: {e.reason}",
                fx.AdoptEpochs: lambda e: f"adopts epochs {self.brief(e.entries)}",
                fx.AppendEpoch: lambda e: f"enters epoch {e.epoch}@{e.start_offset}",
                fx.AppendLog: lambda e: f"writes [{e.offset},{e.offset + len(e.data)})",
                fx.Confirm: lambda e: f"shows {e.offset}",
                fx.Following: lambda e: f"follows from {e.offset}",
                fx.Diverged: lambda e: f"DIVERGED {e.reason}",
            }.get(type(effect))
            if text is not None:
                self.put(broker_id, text(effect))
            if isinstance(effect, fx.Hangup):
                self.links.pop(broker_id, None)
        del host.effects[:]

    @staticmethod
    def brief(epochs):
        return ",".join(f"{e.epoch}@{e.start_offset}" for e in epochs) or "-"

    def name(self, connection_id):
        for broker_id, connection in self.links.items():
            if connection == connection_id:
                return broker_id
        return f"#{connection_id}"

    def dropped(self, connection_id):
        """The leader's side has gone; what it sent before still arrives."""
        broker_id = self.name(connection_id)
        if broker_id in self.slaves:
            self.deliver_to(broker_id, connection_id)
            if self.links.get(broker_id) == connection_id:
                del self.links[broker_id]
                host = self.slaves[broker_id]
                host.connected = False
                host.perform(host.core.disconnected(self.now), self.now)
                self.on_slave(broker_id, list(host.effects))

    # -- bytes

    def deliver_to(self, broker_id, connection_id):
        data = self.wire.pop(connection_id, None)
        if data is None:
            return False
        host = self.slaves[broker_id]
        if host.connected:
            host.receive(bytes(data), self.now)
            self.on_slave(broker_id, list(host.effects))
        return True

    def deliver_from(self, broker_id):
        host = self.slaves[broker_id]
        data = host.take_sent()
        if not data:
            return False
        self.to_leader(self.links.get(broker_id), data)
        return True

    def to_leader(self, connection_id, data):
        if connection_id not in self.readers or self.core is None:
            return
        handshake, acks = self.readers[connection_id].feed(data)
        if handshake is not None:
            self.on_master(self.core.handshake_received(connection_id, handshake, self.now))
        reader = self.readers[connection_id]
        if reader.marked:
            entered, tables = reader.entered_epoch, reader.tables_epoch
            self.on_master(self.core.marks_received(connection_id, entered, tables, self.now))
        if acks:
            self.put(self.name(connection_id), f"acks {','.join(map(str, acks))}")
            self.on_master(self.core.acks_received(connection_id, acks, self.now))

    def open_link(self, broker_id):
        self.next_connection += 1
        self.links[broker_id] = self.next_connection
        self.readers[self.next_connection] = SlaveFrameReader()
        self.core.connection_opened(self.next_connection, str(broker_id), self.now)

    # -- verbs

    def do_log(self, who, history, end, *rest):
        opts = options(rest)
        first = opts.get("first", 0)
        data = bytes_of(pairs(history), first, int(end))
        confirm = opts.get("confirm", 0)
        self.logs[int(who)] = MemoryLog(data, *pairs(history), confirm=confirm, first=first)

    def do_lead(self, who, epoch, members, *rest):
        opts = options(rest)
        self.leader = int(who)
        log = self.logs[self.leader]
        log.entries = entries(*log.history, (int(epoch), log.end))
        sync = mastership(
            ids(members),
            broker_id=self.leader,
            epoch=int(epoch),
            start=log.end,
            written=log.end,
            confirm=log.confirm,
            now=self.now,
        )
        policy = MasterPolicy(
            segment_size=opts.get("segment", 1 << 20),
            batch_bytes=opts.get("batch", 1 << 20),
            window_bytes=opts.get("window", 8 << 20),
        )
        self.core = MasterCore(
            sync,
            policy,
            log.entries,
            min_offset=log.first,
            now_ms=self.now,
            registrations=registrations(*self.replicas.values(), master=self.leader),
        )
        self.on_master(self.core.dead_changed(frozenset(), self.now))

    def do_follow(self, who, *rest):
        broker_id = int(who)
        members = next((ids(w) for w in rest if "=" not in w and w != "java"), frozenset())
        is_java = "java" in rest or self.core is None
        view = RoleView(
            "C",
            "broker-a",
            master_broker_id=self.leader or 99,
            master_address="master",
            master_ha_address=f"broker-{self.leader or 99}",
            master_incarnation="" if is_java else f"i{self.leader}",
            master_epoch=options(rest).get(
                "epoch", self.core.sync.master_epoch if self.core else 1
            ),
            sync_state_set=members,
        )
        log = self.logs[broker_id]
        core = SlaveCore(identity(broker_id), view, log.facts(), SlavePolicy(), self.now)
        self.slaves[broker_id] = SlaveHost(core, log, proves="java" not in rest)
        self.slaves[broker_id].core.tables_followed(view.master_epoch)
        self.register(broker_id, Replica(broker_id) if is_java else registered(broker_id))
        self.slave_event(broker_id, core.tick(self.now))

    def register(self, broker_id, replica):
        self.replicas[broker_id] = replica
        if self.core is not None:
            self.on_master(self.core.replicas_changed(tuple(self.replicas.values()), self.now))

    def slave_event(self, broker_id, effects):
        host = self.slaves[broker_id]
        host.perform(effects, self.now)
        self.on_slave(broker_id, list(host.effects))

    def do_settle(self):
        for _ in range(200):
            moved = False
            for broker_id, host in self.slaves.items():
                if host.core.phase is SlavePhase.CONNECTING and self.core is not None:
                    self.open_link(broker_id)
                    host.connect(self.now)
                    self.on_slave(broker_id, list(host.effects))
                    moved = True
                moved |= self.deliver_from(broker_id)
                if broker_id in self.links:
                    moved |= self.deliver_to(broker_id, self.links[broker_id])
            if not moved:
                return
        raise AssertionError("never settles")

    def do_append(self, size):
        log = self.logs[self.leader]
        log.data += b"%d" % (self.core.sync.master_epoch % 10) * int(size)
        self.on_master(self.core.appended(log.end, self.now))

    def do_epoch(self, epoch):
        log = self.logs[self.leader]
        log.entries = entries(*log.history, (int(epoch), log.end))
        sync = self.core.sync
        recorded = RecordedSet(sync.recorded, sync.sync_state_set_epoch + 1)
        self.on_master(self.core.epoch_begun(int(epoch), recorded, log.entries, self.now))
        for broker_id, host in self.slaves.items():
            self.slave_event(broker_id, host.core.tables_followed(int(epoch)))

    def do_break(self, who):
        broker_id = int(who)
        connection_id = self.links.pop(broker_id)
        host = self.slaves[broker_id]
        host.connected = False
        host.take_sent()
        self.slave_event(broker_id, host.core.disconnected(self.now))
        self.on_master(self.core.connection_closed(connection_id, self.now))

    def do_send(self, who, *frames):
        broker_id = int(who)
        for frame in frames:
            if frame == "handshake":
                self.register(broker_id, Replica(broker_id))
                self.open_link(broker_id)
                data = encode_slave_handshake(SlaveHandshake(broker_id))
            else:
                data = encode_ack(int(frame.removeprefix("ack=")))
            self.to_leader(self.links[broker_id], data)

    def do_receive(self, who, frame):
        host = self.slaves[int(who)]
        if not host.connected:
            host.connect(self.now)
        host.take_sent()
        kind, text = frame.split("=")
        if kind == "hand":
            end, history = text.split(";")
            data = encode_master_handshake(int(end), entries(*pairs(history)))
        else:
            place, label, confirm = text.split(";")
            offset, size = map(int, place.split("+"))
            ((epoch, start),) = pairs(label)
            header = TransferHeader(size, offset, epoch, start, int(confirm))
            data = encode_transfer_header(header) + b"%d" % (epoch % 10) * size
        host.receive(data, self.now)
        self.on_slave(int(who), list(host.effects))
        sent = host.take_sent()
        for at in range(0, len(sent), 12):
            self.put(who, f"acks {int.from_bytes(sent[at + 4 : at + 12], 'big')}")

    def do_tick(self, ms):
        """Time passes in steps of 50 ms, as the timers would see it."""
        for _ in range(max(1, int(ms) // 50)):
            self.now += min(50, int(ms))
            if self.core is not None:
                self.on_master(self.core.tick(self.now))
            for broker_id, host in self.slaves.items():
                self.slave_event(broker_id, host.core.tick(self.now))
                if host.connected:
                    self.slave_event(broker_id, host.core.turn_ended(host.log.end, self.now))

    def do_dead(self, who):
        self.on_master(self.core.dead_changed(ids(who), self.now))

    def do_applied(self):
        sync = self.core.sync
        recorded = RecordedSet(sync.proposal.new_set, sync.sync_state_set_epoch + 1)
        self.on_master(self.core.set_adopted(recorded, self.now))

    def do_refused(self, code):
        self.on_master(self.core.proposal_refused(int(code), self.now))

    def do_unknown(self):
        """No reply came, which changes nothing: the union stays (R11)."""

    def do_trim(self, offset):
        log = self.logs[self.leader]
        log.data, log.first = log.data[int(offset) - log.first :], int(offset)
        self.on_master(self.core.log_trimmed(int(offset), self.now))

    def do_prove(self, who, identity):
        cluster, name, broker_id, epoch = identity.split("/")
        proof = PeerIdentity(cluster, name, int(broker_id), int(epoch))
        host = self.slaves[int(who)]
        self.slave_event(int(who), host.core.peer_proved(proof, host.log.facts(), self.now))

    def do_show(self):
        for broker_id, log in sorted(self.logs.items()):
            self.put(
                broker_id,
                f"[{log.first},{log.end}) epochs {self.brief(log.entries)} confirm {log.confirm}",
            )
        if self.core is not None:
            sync = self.core.sync
            self.put(
                "set", f"recorded {sorted(sync.recorded)} required {sorted(sync.required_set)}"
            )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_script(path, check_script):
    """Each verb causes exactly the effects of the script."""
    check_script(path, Env())


def test_there_are_scripts():
    assert len(SCRIPTS) >= 8
