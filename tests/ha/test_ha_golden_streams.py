"""The three HA connections of the Java cluster, replayed through our cores.

Our master is fed what Java's slave sent and must send the same log bytes (and, where nothing but
timing differs, the same frames); our slave is fed what Java's master sent and must end with the
same log, epochs and acks. How both directions interleaved was not recorded; the acks are enough.
"""

import json
import random
from pathlib import Path

import pytest

from batonmq.ha.java_peer import NO_EPOCH
from batonmq.ha.master_core import CloseConnection, MasterCore, MasterPolicy, SendBytes, SendLog
from batonmq.ha.slave_core import SlaveCore, SlavePhase
from batonmq.ha.slave_policy import SlavePolicy
from batonmq.ha.wire import (
    MasterFrameReader,
    SlaveFrameReader,
    TransferHeader,
    encode_transfer_header,
)
from batonmq.protocol.role_view import Replica, RoleView
from tests.ha.cores import NOW, MemoryLog, SlaveHost, entries, identity, mastership, registrations

GOLDEN = Path(__file__).parents[1] / "golden" / "java-5.3.3"
LOG_END = 6760
HISTORY = ((1, 0), (2, 6269), (3, 6516))
# stream -> master's id, slave's id, epoch, first byte the slave lacks, log end of the connection
STREAMS = {6: (1, 2, 1, 0, 6269), 57: (2, 1, 2, 6269, 6516), 74: (1, 2, 3, 6516, 6760)}


def stored_log():
    path = GOLDEN / "store" / "b0" / "commitlog" / "00000000000000000000"
    with path.open("rb") as file:
        return file.read(LOG_END)


def stream_bytes(stream, direction):
    for entry in json.loads((GOLDEN / "ha-streams.json").read_text()):
        if entry["stream"] == stream and entry["direction"].startswith(direction):
            return bytes.fromhex(entry["hex"])
    raise KeyError(stream)


def java_master_frames(stream):
    """(handshake, [(header, body)])"""
    handshake, frames = None, []
    for item in MasterFrameReader().feed(memoryview(stream_bytes(stream, "master"))):
        if isinstance(item, TransferHeader):
            frames.append([item, b""])
        elif isinstance(item, memoryview):
            frames[-1][1] += bytes(item)
        else:
            handshake = item
    return handshake, frames


def our_master(stream, *, written, recorded):
    master_id, _, epoch, _, _ = STREAMS[stream]
    history = [e for e in HISTORY if e[0] <= epoch]
    sync = mastership(
        recorded, broker_id=master_id, epoch=epoch, start=history[-1][1], written=written
    )
    policy = MasterPolicy(segment_size=1 << 20, batch_bytes=32 << 10)
    return MasterCore(
        sync,
        policy,
        entries(*history),
        min_offset=0,
        now_ms=NOW,
        registrations=registrations(Replica(1), Replica(2), master=master_id),
    )


@pytest.mark.parametrize("stream", STREAMS)
def test_our_master_serves_the_java_slave(stream):
    """The handshake is Java's byte for byte, each recorded ack is taken, and the log bytes that go
    out are those of the stored commit log."""
    _, slave_id, _, start, end = STREAMS[stream]
    log = stored_log()
    java_handshake, _ = java_master_frames(stream)
    core = our_master(stream, written=java_handshake.max_offset, recorded=(1, 2))
    handshake, acks = SlaveFrameReader().feed(stream_bytes(stream, "slave"))
    assert handshake.broker_id == slave_id
    core.connection_opened(1, "java", NOW)
    out = b""

    def perform(effects):
        nonlocal out
        for effect in effects:
            assert not isinstance(effect, CloseConnection), effect
            if isinstance(effect, SendBytes):
                out += effect.data
            elif isinstance(effect, SendLog):
                out += effect.header + log[effect.offset : effect.offset + effect.size]
        core.check_invariants()

    perform(core.handshake_received(1, handshake, NOW))
    java = stream_bytes(stream, "master")
    assert out == java[: 20 + 12 * len(java_handshake.entries)]
    for ack in acks:
        perform(core.appended(ack, NOW))
        perform(core.acks_received(1, [ack], NOW))
    frames = []
    for item in MasterFrameReader().feed(memoryview(out)):
        if isinstance(item, memoryview):
            frames[-1][1] += bytes(item)
        elif isinstance(item, TransferHeader):
            frames.append([item, b""])
    assert b"".join(body for _, body in frames) == log[start:end]
    offset = start
    for header, body in frames:
        expected = STREAMS[stream][2] if body or offset else NO_EPOCH
        assert header.offset == offset and header.epoch == expected
        offset += len(body)
    assert core.log.confirm_offset == end and core.sync.required_set_whole


def test_our_frames_are_javas_byte_for_byte():
    """Stream 6, the log growing as it did there: all data frames, confirmOffset included."""
    _, java_frames = java_master_frames(6)
    core = our_master(6, written=0, recorded=(1, 2))
    handshake, _ = SlaveFrameReader().feed(stream_bytes(6, "slave")[:16])
    core.connection_opened(1, "java", NOW)
    core.handshake_received(1, handshake, NOW)
    core.acks_received(1, [0], NOW)
    data_frames = [(header, body) for header, body in java_frames if body]
    assert len(data_frames) > 3
    for header, body in data_frames:
        (sent,) = core.appended(header.offset + len(body), NOW)
        assert (sent.offset, sent.size) == (header.offset, len(body))
        assert sent.header == encode_transfer_header(header)
        core.acks_received(1, [header.offset + len(body)], NOW)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("seed", range(5))
def test_our_slave_follows_the_java_master(stream, seed):
    """The log, the epochs and the last ack are those of Java's slave, however the bytes are cut."""
    master_id, slave_id, epoch, start, end = STREAMS[stream]
    stored = stored_log()
    history = [e for e in HISTORY if e[0] < epoch]
    log = MemoryLog(stored[:start], *history, confirm=start)
    view = RoleView(
        "DefaultCluster",
        "broker-a",
        master_broker_id=master_id,
        master_ha_address="127.0.0.1:30912",
        master_epoch=epoch,
    )
    core = SlaveCore(identity(slave_id), view, log.facts(), SlavePolicy(), NOW)
    host = SlaveHost(core, log)
    host.perform(core.tick(NOW), NOW)
    host.connect(NOW)
    java = stream_bytes(stream, "master")
    cuts = sorted(random.Random(seed).sample(range(1, len(java)), 40)) if seed else []
    for at, until in zip([0, *cuts], [*cuts, len(java)], strict=True):
        host.receive(java[at:until], NOW)
    assert core.phase is SlavePhase.TRANSFER and not log.cuts
    assert log.data == stored[:end]
    assert log.history == [e for e in HISTORY if e[0] <= epoch]
    handshake, acks = SlaveFrameReader().feed(host.take_sent())
    java_handshake, java_acks = SlaveFrameReader().feed(stream_bytes(stream, "slave"))
    assert handshake == java_handshake
    assert acks[0] == java_acks[0] == start, "the first ack comes at once and is Java's"
    assert acks[-1] == java_acks[-1] == end
    assert acks == sorted(acks)
    _, java_frames = java_master_frames(stream)
    assert log.confirm == min(end, java_frames[-1][0].confirm_offset)
