"""R41: with a secret of the nodes, and without TLS, both ends of an HA connection prove that they
know it. Not a byte of the log goes to a peer without a proof, and none is taken from one."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec import structs

from batonmq.ha import slave_effects as fx
from batonmq.ha.links import OpenLinks
from batonmq.ha.master_core import CloseConnection, MasterCore, MasterPolicy, SendBytes, SendLog
from batonmq.ha.node_secret import (
    NONCE_BYTES,
    PROVE_MS,
    MasterProof,
    NodeSecret,
    SlaveProof,
    Unproven,
)
from batonmq.ha.proof import Registrations
from batonmq.ha.received_log import LocalLog
from batonmq.ha.slave_core import SlaveCore, SlavePhase
from batonmq.ha.slave_policy import SlavePolicy
from batonmq.ha.slave_shell import SlaveShell
from batonmq.ha.wire import (
    HAIdentity,
    MasterFrameReader,
    MasterHandshake,
    SlaveFrameReader,
    SlaveHandshake,
    encode_ack,
    encode_identity,
    encode_proof,
    encode_slave_handshake,
)
from batonmq.protocol.role_view import RoleView
from batonmq.runtime.secret_file import Secrets
from tests.ha.conftest import until
from tests.ha.cores import NOW, entries, identity, mastership, registered
from tests.shared.certificates import authority, node_tls

NAME = ("C", "broker-a", "0")
ADDRESS = "master:10912"
OLD, NEXT, NEW = Secrets("old"), Secrets("old", next="new"), Secrets("new")
FORMER = Secrets("new", former="old")


def chance() -> Callable[[], bytes]:
    """Another number at each call."""
    numbers = iter(range(1, 1 << 30))
    return lambda: next(numbers).to_bytes(NONCE_BYTES)


def secret(known: Secrets = OLD, *, required: bool = True, address: str = ADDRESS) -> NodeSecret:
    return NodeSecret(lambda: known, chance(), required, address, NAME)


# -- the proofs

SLAVE, MASTER = identity(2).name, identity(1).name


def ends(slave: Secrets = OLD, master: Secrets = OLD) -> tuple[SlaveProof, MasterProof]:
    asking = SlaveProof(secret(slave), SLAVE, ADDRESS)
    return asking, MasterProof(secret(master), SLAVE, MASTER, asking.nonce, ADDRESS)


@pytest.mark.parametrize(
    "slave, master, fits",
    [
        (OLD, OLD, True),
        (OLD, NEW, False),
        # Each two neighbouring steps of a rotation.
        (OLD, NEXT, True),
        (NEXT, OLD, True),
        (NEXT, FORMER, True),
        (FORMER, NEXT, True),
        (FORMER, NEW, True),
        (NEW, FORMER, True),
    ],
)
def test_both_ends_prove_a_secret_that_the_other_one_knows(
    slave: Secrets, master: Secrets, fits: bool
) -> None:
    asking, answering = ends(slave, master)
    assert asking.accepts(MASTER, answering.nonce, answering.proof) == fits
    assert answering.accepts(asking.proof) == fits


def test_a_proof_is_good_for_one_connection_one_end_one_pair_and_one_address() -> None:
    asking, answering = ends()
    assert asking.accepts(MASTER, answering.nonce, answering.proof)
    # Reflected: what an end has sent comes back to it.
    assert not answering.accepts(answering.proof)
    assert not asking.accepts(MASTER, answering.nonce, asking.proof)
    asking.accepts(MASTER, answering.nonce, answering.proof)
    # Replayed: the other end of a later connection has chosen another number.
    later = SlaveProof(secret(), SLAVE, ADDRESS)
    later.nonce = b"later"
    assert not later.accepts(MASTER, answering.nonce, answering.proof)
    again = MasterProof(secret(), SLAVE, MASTER, asking.nonce, ADDRESS)
    again_next = MasterProof(again._secret, SLAVE, MASTER, asking.nonce, ADDRESS)
    assert not again_next.accepts(asking.proof)
    # Another master, another slave, another group, another address: relayed.
    for other in (identity(3).name, identity(1, name="broker-b").name):
        assert not asking.accepts(other, answering.nonce, answering.proof)
        relayed = MasterProof(secret(), other, MASTER, asking.nonce, ADDRESS)
        assert not relayed.accepts(asking.proof)
    elsewhere = MasterProof(secret(), SLAVE, MASTER, asking.nonce, "rogue:1")
    assert not asking.accepts(MASTER, elsewhere.nonce, elsewhere.proof)


# -- the master's core


def master(required: bool = True, known: Secrets = OLD) -> MasterCore:
    return MasterCore(
        mastership((1, 2), written=100),
        MasterPolicy(segment_size=1 << 20),
        entries((1, 0)),
        min_offset=0,
        now_ms=NOW,
        registrations=Registrations(
            identity(1), (registered(1), registered(2)), secret(known, required=required)
        ),
    )


def hello(core: MasterCore, number: int, slave: HAIdentity, *, certified: bool = False) -> list:
    core.connection_opened(number, "slave:1", NOW, certified=certified)
    return core.handshake_received(number, SlaveHandshake(slave.broker_id, identity=slave), NOW)


def answer_in(effects: list) -> MasterHandshake:
    (sent,) = [e for e in effects if isinstance(e, SendBytes)]
    (handshake,) = MasterFrameReader().feed(memoryview(sent.data))
    return handshake


def proven(core: MasterCore, number: int, known: Secrets = OLD) -> list:
    """A true slave on connection `number`, up to its proof."""
    slave = SlaveProof(secret(known), SLAVE, ADDRESS)
    slave.nonce = number.to_bytes(NONCE_BYTES)
    own = answer_in(hello(core, number, structs.replace(identity(2), nonce=slave.nonce.hex())))
    assert own.identity is not None
    assert slave.accepts(own.identity.name, *own.identity.challenge)
    return core.proof_received(number, slave.proof, NOW)


def test_the_proof_comes_with_the_handshake_and_the_log_after_the_slaves_proof() -> None:
    """No round trip more than without a secret: handshake, its answer, then proof and ack."""
    core = master()
    assert proven(core, 7) == []
    assert [e for e in core.acks_received(7, [0], NOW) if isinstance(e, SendLog)]
    core.check_invariants()


NAMED = structs.replace(identity(2), nonce="11" * NONCE_BYTES)


@pytest.mark.parametrize(
    "slave, proof",
    [
        (identity(2), None),
        (NAMED, b"?" * 32),
        (NAMED, b""),
        (structs.replace(NAMED, nonce="no hex"), b"?" * 32),
        (structs.replace(NAMED, broker_name="broker-b"), b"?" * 32),
    ],
    ids=["no proof", "a guess", "an ack instead", "no number", "another group"],
)
def test_r41_a_stranger_with_the_name_of_a_member_gets_no_byte_and_displaces_nobody(
    slave: HAIdentity, proof: bytes | None
) -> None:
    core = master()
    proven(core, 7)
    core.acks_received(7, [100], NOW)
    effects = hello(core, 8, slave)
    if proof:
        effects += core.proof_received(8, proof, NOW)
    effects += core.acks_received(8, [0, 100], NOW)
    closed = [e.connection_id for e in effects if isinstance(e, CloseConnection)]
    assert closed == [8] and not [e for e in effects if isinstance(e, SendLog)]
    assert core.sync.required_set_whole and core.connections.keys() == {7}
    core.check_invariants()


def test_a_replayed_proof_of_a_member_is_refused_and_reported() -> None:
    core = master()
    slave = SlaveProof(secret(), SLAVE, ADDRESS)
    own = answer_in(hello(core, 7, structs.replace(identity(2), nonce=slave.nonce.hex())))
    assert own.identity is not None
    slave.accepts(own.identity.name, *own.identity.challenge)
    hello(core, 8, structs.replace(identity(2), nonce=slave.nonce.hex()))
    (found, closed) = core.proof_received(8, slave.proof, NOW)
    assert isinstance(found, Unproven) and "wrong" in found.reason and not found.passes
    assert closed == CloseConnection(8, found.reason)


def test_r58_a_slave_that_answers_nothing_or_in_drops_has_five_seconds() -> None:
    core = master()
    hello(core, 7, NAMED)
    assert core.tick(NOW + PROVE_MS - 1) == []
    (closed,) = core.tick(NOW + PROVE_MS)
    assert isinstance(closed, CloseConnection)
    reader = SlaveFrameReader()
    reader.feed(encode_slave_handshake(SlaveHandshake(2, identity=NAMED)))
    for byte in encode_proof(b"p" * 32)[:-1]:
        assert reader.feed(bytes([byte])) == (None, []) and not reader.proof
    reader.feed(b"p" + encode_ack(5))
    assert reader.proof == b"p" * 32


def test_r58_a_slave_that_acks_nothing_yet_instead_of_its_proof_is_closed() -> None:
    core = master()
    hello(core, 7, NAMED)
    (closed,) = core.acks_received(7, [-1], NOW + 1)
    assert isinstance(closed, CloseConnection) and not core.connections


def test_a_peer_with_a_certificate_needs_no_proof() -> None:
    core = master()
    own = answer_in(hello(core, 7, identity(2), certified=True))
    assert own.identity == identity(1), "the same bytes as without a secret"


@pytest.mark.parametrize("slave", [identity(2), None], ids=["an earlier version", "Java"])
def test_ha_allow_unproven_lets_peers_without_a_proof_in_and_names_them(
    slave: HAIdentity | None,
) -> None:
    core = master(required=False)
    if slave is None:
        core._registrations.renew((registered(1), replace(registered(2), incarnation="")))
    core.connection_opened(7, "slave:1", NOW)
    found, *effects = core.handshake_received(7, SlaveHandshake(2, identity=slave), NOW)
    assert isinstance(found, Unproven) and found.passes and "haAllowUnproven" in found.reason
    answer_in(effects)
    assert [e for e in core.acks_received(7, [0], NOW) if isinstance(e, SendLog)]


# -- the slave's core

VIEW = RoleView(
    "C",
    "broker-a",
    master_broker_id=1,
    master_ha_address=ADDRESS,
    master_incarnation="i1",
    master_epoch=1,
)


def slave(known: Secrets = OLD, *, view: RoleView = VIEW, required: bool = True) -> SlaveCore:
    log = LocalLog(0, 0, 0, ())
    core = SlaveCore(identity(2), view, log, SlavePolicy(), NOW, secret(known, required=required))
    core.tick(NOW)
    return core


def connected(core: SlaveCore) -> HAIdentity:
    """As which it names itself."""
    (sent,) = core.connected(LocalLog(0, 0, 0, ()), NOW)
    handshake, _ = SlaveFrameReader().feed(sent.data)
    assert handshake is not None and handshake.identity is not None
    return handshake.identity


def answered(
    named: HAIdentity, known: Secrets = OLD, address: str = ADDRESS
) -> tuple[HAIdentity, MasterProof]:
    proof = MasterProof(secret(known), named.name, MASTER, named.challenge[0], address)
    own = structs.replace(identity(1), nonce=proof.nonce.hex(), proof=proof.proof.hex())
    return own, proof


def test_a_slave_sends_its_proof_to_a_proven_master_only() -> None:
    core = slave()
    own, proof = answered(connected(core))
    (sent,) = core.identity_received(own, NOW)
    reader = SlaveFrameReader()
    reader.feed(encode_slave_handshake(SlaveHandshake(2, identity=NAMED)) + sent.data)
    assert proof.accepts(reader.proof)
    log = LocalLog(0, 0, 0, ())
    core.handshake_received(MasterHandshake(0, 1, entries((1, 0)), own), log, NOW)
    assert core.phase is SlavePhase.TRANSFER


def rogues() -> dict[str, Callable[[HAIdentity], HAIdentity]]:
    return {
        "no proof": lambda named: identity(1),
        "a guess": lambda named: structs.replace(identity(1), nonce="00", proof="00" * 32),
        "half a character": lambda named: structs.replace(answered(named)[0], log_id="\ud800"),
        "no hex": lambda named: structs.replace(identity(1), nonce="zz", proof="yy"),
        "another secret": lambda named: answered(named, NEW)[0],
        "reflected": lambda named: structs.replace(identity(1), nonce=named.nonce, proof="00" * 32),
        "replayed": lambda named: answered(structs.replace(named, nonce="22" * 16))[0],
        "relayed from another address": lambda named: answered(named, address="rogue:1")[0],
        "relayed from another broker": lambda named: structs.replace(
            answered(named)[0], broker_id=3
        ),
        "another group": lambda named: structs.replace(answered(named)[0], broker_name="broker-b"),
    }


@pytest.mark.parametrize("rogue", rogues().values(), ids=rogues())
def test_r41_a_master_without_a_proof_gets_none_and_nothing_is_taken_from_it(
    rogue: Callable[[HAIdentity], HAIdentity],
) -> None:
    core = slave()
    found, hung_up = core.identity_received(rogue(connected(core)), NOW)
    assert isinstance(found, Unproven) and not found.passes and found.address == ADDRESS
    assert hung_up == fx.Hangup(found.reason) and core.phase is SlavePhase.READY


def test_r41_a_master_of_java_is_followed_with_the_switch_only() -> None:
    """The refusal names the switch, and comes before the first byte."""
    java = replace(VIEW, master_incarnation="")
    found, hung_up = slave(view=java).connected(LocalLog(0, 0, 0, ()), NOW)
    assert isinstance(found, Unproven) and "haAllowUnproven" in found.reason
    assert isinstance(hung_up, fx.Hangup)
    found, sent = slave(view=java, required=False).connected(LocalLog(0, 0, 0, ()), NOW)
    assert isinstance(found, Unproven) and found.passes
    assert sent.data == encode_slave_handshake(SlaveHandshake(2)), "Java's bytes"


def test_a_master_that_drops_its_identity_byte_by_byte_has_three_seconds() -> None:
    core = slave()
    connected(core)
    reader = MasterFrameReader()
    reader.identity_first = core.wants_proof
    assert list(reader.feed(memoryview(encode_identity(identity(1))[:40]))) == []
    ticks = range(NOW, NOW + core.policy.connect_ms + 1, core.policy.tick_ms)
    (hung_up,) = [effect for now_ms in ticks for effect in core.tick(now_ms)]
    assert isinstance(hung_up, fx.Hangup)


async def test_a_slave_that_cannot_follow_stays_unwell_when_an_unproven_master_is_let_in() -> None:
    """Why it cannot is reported once, the unproven master at each dial."""
    core = slave(required=False)
    shell = SlaveShell(core, Mock(), Mock(), lambda: NOW, AsyncMock(), OpenLinks())
    shell._perform([fx.Diverged("another history"), Unproven("m", "let in", passes=True)])
    assert shell.problem == "another history"
    shell._perform([Unproven("m", "refused", passes=False), fx.Following(100)])
    assert shell.problem == "another history", "until the master sends its next bytes"
    shell._diverged = ""
    assert not shell.problem


# -- over loopback


@pytest.fixture
def known() -> list[Secrets]:
    """The secrets of all nodes: the last one counts."""
    return [OLD]


def nodes(group, known, numbers=(1, 2, 3), *, required=True):
    for number in numbers:
        group.secrets[number] = NodeSecret(
            lambda: known[-1], lambda: os.urandom(NONCE_BYTES), required, "", NAME
        )


async def test_a_rotation_keeps_connections_and_each_step_takes_new_ones(group, known):
    nodes(group, known)
    one, two = await group.pair()
    for step in (NEXT, FORMER, NEW):
        known.append(step)
        one.put(10)
        await group.caught_up(one, two)
        await group.restart(two)
        await group.follow(two)
        one.put(10)
        await group.caught_up(one, two)
    assert one.following == [2] * 4 and not one.unproven


async def test_a_replica_of_another_secret_and_one_without_never_follow(group, known):
    nodes(group, known, (1,))
    nodes(group, [NEW], (2,))
    one, two, three = [await group.add(number) for number in (1, 2, 3)]
    await group.elect(one)
    one.put(10)
    await until(lambda: two.unproven and one.unproven)
    assert two.readable == three.readable == 0 and one.ha.required_set == {1}
    assert "wrong" in two.ha.following_problem
    assert all(not each.passes for each in (*one.unproven, *two.unproven))


async def test_replicas_that_showed_certificates_prove_no_secret(group, known, tmp_path):
    made = authority(tmp_path / "tls")
    nodes(group, known, (1,))
    nodes(group, [NEW], (2,))
    for number in (1, 2):
        tls = node_tls(made, f"broker/broker-a/{number}")
        group.tls[number] = tls.for_replicas("broker-a")
    one, two = await group.pair()
    one.put(10)
    await group.caught_up(one, two)
    assert not one.unproven and not two.unproven


async def test_a_group_that_takes_up_a_secret_in_stages_follows_all_the_while(group, known):
    """1 no secret, 2 and 3 allow unproven peers, each as master; then all but one require."""
    nodes(group, known, (2, 3), required=False)
    one, two, three = [await group.add(number) for number in (1, 2, 3)]
    for leader in (one, two):
        await group.elect(leader, 1, 2, 3)
        await until(lambda m=leader: m.ha.required_set_whole)
        leader.put(10)
        await group.caught_up(one, two, three)
    assert all(each.passes for each in (*two.unproven, *three.unproven))
    assert two.unproven and three.unproven and not one.unproven
    nodes(group, known, (1, 3))
    for node in (one, three):
        await group.restart(node)
        await group.follow(node)
    await until(lambda: two.ha.required_set_whole)
    two.put(10)
    await group.caught_up(one, two, three)


async def test_a_stranger_with_a_members_name_gets_no_byte_of_the_log(group, known):
    """Without a proof, with one that was recorded, and with half of one."""
    nodes(group, known)
    one, two = await group.pair()
    one.put(10)
    await group.caught_up(one, two)
    own = two.identity()
    offering = structs.replace(own, nonce="33" * NONCE_BYTES)
    for claimed, more in (
        (own, b""),
        (offering, encode_proof(b"r" * 32) + encode_ack(0)),
        (offering, encode_ack(0)),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", one.ha.port)
        opening = encode_slave_handshake(SlaveHandshake(2, identity=claimed))
        writer.write(opening + more)
        got = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert b"HaTopic" not in got and len(got) < 4096
    one.put(10)
    await group.caught_up(one, two)
    assert one.following == [2]
