"""The proof of the nodes' secret without controllers: `test_ha_node_secret` has what both modes
share. A hello, its answer and a proof come before the first report."""

import asyncio
import contextlib
import os
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from batonmq.ha import slave_effects as fx
from batonmq.ha.classic.master_core import ClassicMasterCore, ClassicPolicy
from batonmq.ha.classic.service import ClassicHAService
from batonmq.ha.classic.slave_core import AskLogEnd, ClassicPhase, ClassicSlaveCore, MasterAddresses
from batonmq.ha.classic.slave_shell import ClassicSlaveShell
from batonmq.ha.classic.wire import (
    Answer,
    ClassicFrameReader,
    FrameHead,
    Hello,
    ReportReader,
    encode_answer,
    encode_hello,
    encode_report,
)
from batonmq.ha.config import HAConfig
from batonmq.ha.links import OpenLinks
from batonmq.ha.master_core import CloseConnection, SendBytes, SendLog
from batonmq.ha.node_secret import NONCE_BYTES, PROVE_MS, NodeSecret, SlaveProof, Unproven
from batonmq.ha.slave_policy import SlavePolicy
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.records.codec import NewMessage
from batonmq.runtime.secret_file import Secrets
from batonmq.store.config import StoreConfig
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedByLog
from tests.ha.conftest import HOST, until

NOW, SEGMENT = 1_000_000, 16 << 10
GROUP = ("C", "broker-a")
OLD, NEXT, FORMER, NEW = (
    Secrets("old"),
    Secrets("old", next="new"),
    Secrets("new", former="old"),
    Secrets("new"),
)


def secret(known: Callable[[], Secrets] = lambda: OLD, *, required: bool = True) -> NodeSecret:
    """Of broker 2, as which a slave names itself."""
    return NodeSecret(known, lambda: os.urandom(NONCE_BYTES), required, "", (*GROUP, "2"))


# -- the bytes


def test_a_hello_is_no_report_to_java_and_to_earlier_versions() -> None:
    """They read each eight bytes as the end of a log: all of them are below zero."""
    hello = Hello(bytes(range(16)), 3)
    words = struct.iter_unpack(">q", encode_hello(hello))
    assert all(word < 0 for (word,) in words)
    reader, stream = ReportReader(), encode_hello(hello) + b"p" * 32 + encode_report(7)
    found = [(reader.feed(bytes([byte])), reader.hello, reader.proof) for byte in stream]
    assert [one for one in found if one != (None, None, b"")] == [
        (None, hello, b""),
        (None, None, b"p" * 32),
        (7, None, b""),
    ]
    with pytest.raises(RemoteProtocolError, match="-1"):
        ReportReader().feed(struct.pack(">q", -1))


def test_an_answer_comes_before_the_first_frame_or_the_connection_ends() -> None:
    reader = ClassicFrameReader()
    reader.answer_first = True
    answer = Answer(b"n" * 16, b"p" * 32)
    pieces = [bytes([byte]) for byte in encode_answer(answer)]
    assert [item for piece in pieces for item in reader.feed(memoryview(piece))] == [answer]
    reader.answer_first = True
    with pytest.raises(RemoteProtocolError, match="proves nothing"):
        list(reader.feed(memoryview(bytes(64))))


# -- the cores


def master(*, required: bool = True) -> ClassicMasterCore:
    policy = ClassicPolicy(SEGMENT, needed_slaves=1)
    core = ClassicMasterCore(policy, 0, 500, NOW, secret(required=required))
    core.connection_opened(1, "a:1", NOW)
    return core


def answer_to(core: ClassicMasterCore, hello: Hello) -> Answer:
    """What the master answers on connection 1."""
    (sent,) = core.hello_received(1, hello, NOW)
    assert isinstance(sent, SendBytes)
    reader = ClassicFrameReader()
    reader.answer_first = True
    (answer,) = reader.feed(memoryview(sent.data))
    assert isinstance(answer, Answer)
    return answer


def proof_for(core: ClassicMasterCore, known: Secrets = OLD) -> bytes:
    """What a slave of that secret sends."""
    slave = SlaveProof(secret(lambda: known), (*GROUP, "2"), "")
    slave.accepts((*GROUP, "0"), *answer_to(core, Hello(slave.nonce, 2)))
    return slave.proof


def test_a_proven_slave_is_sent_the_log_and_counts() -> None:
    core = master()
    assert core.proof_received(1, proof_for(core), NOW) == []
    assert [e for e in core.reported(1, 100, NOW) if isinstance(e, SendLog)]
    assert core.slaves_within_gap() == 1


def test_r41_a_report_without_a_proof_gets_no_byte_and_does_not_count() -> None:
    for proof in (None, b"?" * 32, proof_for(master()), proof_for(master(), known=NEW)):
        core = master()
        effects = []
        if proof is not None:
            core.hello_received(1, Hello(b"n" * 16, 2), NOW)
            effects += core.proof_received(1, proof, NOW)
        effects += core.reported(1, 500, NOW)
        assert not [e for e in effects if isinstance(e, SendLog)] and not core.acknowledged
        assert [e.connection_id for e in effects if isinstance(e, CloseConnection)] == [1]
        assert [e.passes for e in effects if isinstance(e, Unproven)] == [False]


def test_r58_silence_ends_after_five_seconds_and_a_stranger_silences_no_slave_of_its_host() -> None:
    core = master()
    core.proof_received(1, proof_for(core), NOW)
    core.reported(1, 500, NOW)
    core.connection_opened(2, "a:2", NOW)
    assert core.slaves_within_gap() == 1
    assert core.wakeup_ms <= NOW + PROVE_MS
    closed = [e for e in core.tick(NOW + PROVE_MS) if isinstance(e, CloseConnection)]
    assert [e.connection_id for e in closed] == [2]


def test_ha_allow_unproven_lets_a_slave_of_java_in_and_names_it() -> None:
    core = master(required=False)
    found, *effects = core.reported(1, 100, NOW)
    assert isinstance(found, Unproven) and found.passes and "haAllowUnproven" in found.reason
    assert [e for e in effects if isinstance(e, SendLog)]


def slave(remoting: str = "", *, required: bool = True) -> ClassicSlaveCore:
    core = ClassicSlaveCore(SlavePolicy(), NOW, secret(required=required))
    core.follow(MasterAddresses("m:10912", remoting), NOW)
    return core


def test_a_slave_asks_for_proof_and_log_end_at_once_and_reports_after_both() -> None:
    """No round trip more than the question for the log's end."""
    core = slave("m:10911")
    hello, asked = core.connected(100, 100, NOW)
    assert isinstance(hello, fx.SendToMaster) and asked == AskLogEnd("m:10911")
    assert core.log_end_received(500, 100, 100, NOW) == []
    reader, answering = ReportReader(), master()
    reader.feed(hello.data)
    assert reader.hello is not None
    answer = answer_to(answering, reader.hello)
    sent, report = core.answer_received(answer, 100, 100, NOW)
    reader.feed(sent.data)
    assert answering.proof_received(1, reader.proof, NOW) == []
    assert report.data == encode_report(100)


@pytest.mark.parametrize("answer", [Answer(b"n" * 16, b"?" * 32), None], ids=["a guess", "silence"])
def test_r41_a_master_without_a_proof_gets_no_report(answer: Answer | None) -> None:
    core = slave()
    core.connected(100, 100, NOW)
    if answer is not None:
        effects = core.answer_received(answer, 100, 100, NOW)
    else:
        effects = core.tick(core.wakeup_ms)
    assert [type(each) for each in effects] == [Unproven, fx.Hangup]
    assert core.stage is ClassicPhase.WAIT


def test_a_master_that_closes_at_a_hello_gets_none_the_next_time_if_it_may_be_unproven() -> None:
    core = slave(required=False)
    assert isinstance(core.connected(100, 100, NOW)[0], fx.SendToMaster)
    assert core.disconnected(NOW) == []
    core.tick(core.wakeup_ms)
    found, report = core.connected(100, 100, NOW)
    assert isinstance(found, Unproven) and found.passes
    assert report == fx.SendToMaster(encode_report(100))


def test_what_ends_a_connection_but_is_no_answer_to_the_hello_says_nothing_of_the_proof() -> None:
    """The question for the log's end fails; nothing answers it; a dial fails after a hang-up."""
    core = slave("m:10911")
    core.connected(100, 100, NOW)
    assert [type(e) for e in core.log_end_unknown("no master", NOW)] == [fx.Hangup]
    core.tick(core.wakeup_ms)
    assert core.disconnected(NOW) == []
    core.tick(core.wakeup_ms)
    core.connected(100, 100, NOW)
    assert [type(e) for e in core.tick(core.wakeup_ms)] == [fx.Hangup]
    core.tick(core.wakeup_ms)
    core.connected(100, 100, NOW)
    diverged = core.log_end_received(50, 100, 100, NOW)
    assert [type(e) for e in diverged] == [fx.Hangup, fx.Diverged]
    core.tick(core.wakeup_ms)
    assert core.disconnected(NOW) == [] and not core.unproven


def test_where_a_proof_is_optional_a_failed_question_costs_no_hello_and_accuses_nobody() -> None:
    core = slave("m:10911", required=False)
    for _ in range(3):
        hello, _ = core.connected(100, 100, NOW)
        assert isinstance(hello, fx.SendToMaster) and core.wants_proof
        core.log_end_unknown("no master", NOW)
        core.tick(core.wakeup_ms)
    core.connected(100, 100, NOW)
    core.disconnected(NOW)
    core.tick(core.wakeup_ms)
    assert core.connected(100, 100, NOW) == [AskLogEnd("m:10911")], "it may be a slave"
    assert isinstance(core.log_end_received(100, 100, 100, NOW)[0], Unproven)


def test_a_silent_master_that_serves_without_a_hello_gets_none_again_at_that_address() -> None:
    """Each would cost three seconds. One that does not serve may be another process by then."""
    core = slave(required=False)
    core.connected(100, 100, NOW)
    core.tick(core.wakeup_ms)
    for served in (True, True, False):
        core.tick(core.wakeup_ms)
        core.disconnected(NOW)  # a dial that failed
        core.tick(core.wakeup_ms)
        core.connected(100, 100, NOW)
        assert not core.wants_proof
        if served:
            core.frame_received(FrameHead(100, 0), 100, NOW)
        core.disconnected(NOW)
    core.tick(core.wakeup_ms)
    core.connected(100, 100, NOW)
    assert core.wants_proof


def test_a_wrong_answer_to_the_hello_is_named_as_such() -> None:
    core = slave()
    core.connected(100, 100, NOW)
    found, hung_up = core.nonsense_received("it proves nothing", NOW)
    assert isinstance(found, Unproven) and found.reason.startswith("it proves nothing")
    assert isinstance(hung_up, fx.Hangup) and core.unproven == found.reason


def test_a_good_proof_ends_the_complaint_before_a_byte_of_the_log_comes() -> None:
    core = slave()
    core.connected(100, 100, NOW)
    core.disconnected(NOW)
    assert "hello" in core.unproven
    core.tick(core.wakeup_ms)
    (hello,) = core.connected(100, 100, NOW)
    reader = ReportReader()
    reader.feed(hello.data)
    assert reader.hello is not None
    core.answer_received(answer_to(master(), reader.hello), 100, 100, NOW)
    assert not core.unproven


# -- over loopback


class Replica:
    def __init__(self, root: Path, secret: NodeSecret | None) -> None:
        self.unproven: list[Unproven] = []
        self.closed = False
        config = StoreConfig(
            store_path_root_dir=str(root),
            mapped_file_size_commit_log=SEGMENT,
            mapped_file_size_consume_queue=20_000,
            max_hash_slot_num=100,
            max_index_num=400,
            ha_listen_port=0,
        )
        self.store = MessageStore(config, store_host=HOST, confirm_rule=ConfirmedByLog())
        self.store.open()
        self.store.start(asyncio.get_running_loop(), Mock())
        listener = Mock(on_unproven=self.unproven.append)
        self.ha = ClassicHAService(
            self.store,
            HAConfig(),
            listener,
            needed_slaves=0,
            log_end_of=Mock(),
        )
        self.secret = secret

    def put(self) -> None:
        message = NewMessage("T", 0, b"body", b"", 0, None, None, born_timestamp=1, born_host=HOST)
        self.store.appender.put_message(message)
        self.ha.notify_append(self.store.end_turn())

    @property
    def end(self) -> int:
        return self.store.max_phy_offset

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            await self.ha.close()
            self.store.close()


@contextlib.asynccontextmanager
async def replicas(tmp_path: Path, *secrets: NodeSecret | None) -> AsyncIterator[list[Replica]]:
    """The first one leads, and has a message; the others follow."""
    made = [Replica(tmp_path / str(at), each) for at, each in enumerate(secrets)]
    try:
        port, *_ = [await one.ha.start("127.0.0.1", None, one.secret) for one in made]
        made[0].ha.lead()
        made[0].put()
        for one in made[1:]:
            one.ha.follow(MasterAddresses(f"127.0.0.1:{port}"))
        yield made
    finally:
        for one in made:
            await one.close()


async def test_a_slave_of_the_secret_follows_through_a_rotation_and_a_restart(
    tmp_path: Path,
) -> None:
    known = [OLD]
    node = secret(lambda: known[-1])
    async with replicas(tmp_path, node, node) as (one, two):
        for step in (NEXT, FORMER, NEW):
            known.append(step)
            one.put()
            await until(lambda: two.end == one.end)
        await two.close()
        again = Replica(tmp_path / "1", node)
        await again.ha.start("127.0.0.1", None, node)
        port = one.ha._open_links._server.sockets[0].getsockname()[1]
        again.ha.follow(MasterAddresses(f"127.0.0.1:{port}"))
        one.put()
        await until(lambda: again.end == one.end)
        await again.close()
        assert not one.unproven and not two.unproven


@pytest.mark.parametrize("other", [secret(lambda: NEW), None], ids=["another secret", "none"])
@pytest.mark.parametrize("leads", [True, False])
async def test_r41_no_byte_goes_between_a_node_of_the_secret_and_one_without_it(
    tmp_path: Path, other: NodeSecret | None, leads: bool
) -> None:
    pair = (secret(), other) if leads else (other, secret())
    async with replicas(tmp_path, *pair) as (one, two):
        # A slave that finds its master's proof wrong sends none itself.
        await until(lambda: one.unproven or two.unproven)
        assert two.end <= 0 and not any(each.passes for each in one.unproven + two.unproven)
        # The connection may still be listed, but nothing was reported on it.
        slaves = one.ha.runtime_info().ha_connection_info
        assert not any(slave.in_sync or slave.slave_ack_offset >= 0 for slave in slaves)


@pytest.mark.parametrize("leads", [True, False])
async def test_a_node_that_allows_it_replicates_with_one_that_has_no_secret_yet(
    tmp_path: Path, leads: bool
) -> None:
    allowing = secret(required=False)
    pair = (allowing, None) if leads else (None, allowing)
    async with replicas(tmp_path, *pair) as (one, two):
        await until(lambda: two.end == one.end)
        knowing = one if leads else two
        assert [each.passes for each in knowing.unproven] == [True]


async def test_a_slave_that_cannot_follow_stays_unwell_when_an_unproven_master_is_let_in() -> None:
    """Why it cannot is reported once, the unproven master at each dial."""
    core, store = slave(required=False), Mock(max_phy_offset=0)
    shell = ClassicSlaveShell(core, store, Mock(), lambda: NOW, AsyncMock(), OpenLinks())
    shell._perform([fx.Diverged("a longer log"), Unproven("m", "let in", passes=True)])
    assert shell.problem == "a longer log"
    shell._perform([fx.Following(100)])
    assert not shell.problem


async def test_r41_strangers_at_the_port_get_no_byte_of_the_log(tmp_path: Path) -> None:
    """A report at once; a hello and a guess; the same again."""
    async with replicas(tmp_path, secret()) as (one,):
        port = one.ha._open_links._server.sockets[0].getsockname()[1]
        guess = encode_hello(Hello(b"n" * 16, 1)) + b"?" * 32 + encode_report(0)
        for opening in (encode_report(0), guess, guess):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(opening)
            got = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            assert len(got) <= 52
        assert len(one.unproven) == 3
