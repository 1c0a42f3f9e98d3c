"""R41: an ack counts only for the process that it is from; R42: and only with its tables; R58: who
shows nothing takes no space for long."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from batonmq.ha.config import HAConfig
from batonmq.ha.follower import SyncPolicy
from batonmq.ha.master_core import CloseConnection, MasterCore, MasterPolicy, SendBytes, SendLog
from batonmq.ha.proof import STRANGERS_MAX, Registrations
from batonmq.ha.sync_state import ConfirmAdvanced, ProposeSet
from batonmq.ha.wire import (
    MasterFrameReader,
    SlaveHandshake,
    decode_transfer_header,
    encode_ack,
    encode_identity,
    encode_slave_handshake,
)
from batonmq.protocol.role_view import Replica, RoleView
from tests.ha.conftest import until
from tests.ha.cores import (
    NOW,
    entries,
    identity,
    mastership,
    recorded_set,
    registered,
    registrations,
)

MEMBER, OTHER = 7, 8


def master(members=(1, 2), *, written=0, policy=None, replicas=None, window=1 << 20):
    sync = mastership(members, written=written, policy=policy)
    known = (registered(1), registered(2)) if replicas is None else replicas
    return MasterCore(
        sync,
        MasterPolicy(segment_size=1 << 20, window_bytes=window),
        entries((1, 0)),
        min_offset=0,
        now_ms=NOW,
        registrations=registrations(*known),
    )


def connect(core, connection_id, handshake, now=NOW):
    core.connection_opened(connection_id, "slave", now)
    return core.handshake_received(connection_id, handshake, now)


def follow(core, connection_id=MEMBER, ack=0, now=NOW, named=None, tables=1):
    named = named or identity(2)
    effects = connect(core, connection_id, SlaveHandshake(named.broker_id, identity=named), now)
    if tables is not None:
        effects += core.marks_received(connection_id, -1, tables, now)
    return effects + core.acks_received(connection_id, [ack], now)


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def to_connection(connection_id, effects):
    return [e for e in effects if getattr(e, "connection_id", None) == connection_id]


STRANGERS = {
    "cluster": SlaveHandshake(2, identity=identity(2, cluster="Other")),
    "group": SlaveHandshake(2, identity=identity(2, name="broker-b")),
    "id": SlaveHandshake(2, identity=identity(3)),
    "incarnation": SlaveHandshake(2, identity=identity(2, incarnation="earlier")),
    "log": SlaveHandshake(2, identity=identity(2, log_id="another log")),
    "nameless": SlaveHandshake(2),
}


@pytest.fixture
def core():
    return master()


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_r41_a_stranger_displaces_nobody_and_never_counts(core, stranger):
    """1 member 2 follows. 2 somebody claims to be 2: not a byte is sent there, 2 continues, and
    what the stranger acks confirms nothing. 3 within half a second its connection is closed."""
    follow(core)
    core.appended(100, NOW)
    effects = connect(core, OTHER, stranger)
    effects += core.acks_received(OTHER, [0, 100], NOW + 1)
    assert not of(ConfirmAdvanced, effects) and core.sync.required_set_whole
    assert not to_connection(MEMBER, effects)
    effects += core.tick(NOW + 500)
    assert len(of(CloseConnection, to_connection(OTHER, effects))) == 1
    assert not of(SendBytes, effects) and not of(SendLog, to_connection(OTHER, effects))
    assert core.acks_received(MEMBER, [100], NOW + 501)[0] == ConfirmAdvanced(100)
    core.check_invariants()


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_r41_a_stranger_does_not_count_in_the_members_absence_either(core, stranger):
    core.appended(100, NOW)
    effects = connect(core, OTHER, stranger)
    effects += core.acks_received(OTHER, [0, 100], NOW + 1)
    assert not of(ConfirmAdvanced, effects) and not core.sync.required_set_whole


@pytest.mark.parametrize("known", [(), (registered(2, incarnation="first"),)], ids=["new", "again"])
def test_r41_a_process_that_is_faster_than_its_registration_is_kept(known):
    """1 process i2 connects, and the controllers have not named it to the master yet: it waits. 2
    the view comes: it is answered on this very connection, and counts."""
    core = master(replicas=(registered(1), *known))
    assert connect(core, MEMBER, SlaveHandshake(2, identity=identity(2))) == []
    effects = core.replicas_changed((registered(1), registered(2)), NOW + 20)
    (answer,) = to_connection(MEMBER, effects)
    (handshake,) = MasterFrameReader().feed(memoryview(answer.data))
    assert handshake.identity == identity(1)
    core.acks_received(MEMBER, [0], NOW + 21)
    assert core.sync.required_set_whole


def test_r12_r41_a_new_registration_ends_the_earlier_processes_connection_only(core):
    follow(core)
    connect(core, OTHER, SlaveHandshake(2, identity=identity(2, incarnation="second")))
    renewed = (registered(1), registered(2, incarnation="second"))
    effects = core.replicas_changed(renewed, NOW + 20)
    assert [e.connection_id for e in of(CloseConnection, effects)] == [MEMBER]
    core.acks_received(OTHER, [0], NOW + 21)
    assert core.sync.required_set_whole


def test_r41_a_java_slave_counts_by_its_id_until_a_process_is_registered_for_it():
    """As in Java: no name, no proof. Its newest connection counts, and it has no tables to tell."""
    core = master((1,), replicas=(registered(1), Replica(2)))
    effects = connect(core, MEMBER, SlaveHandshake(2))
    (handshake,) = MasterFrameReader().feed(memoryview(of(SendBytes, effects)[0].data))
    assert handshake.identity is None
    effects = core.acks_received(MEMBER, [0], NOW)
    assert of(ProposeSet, effects)
    effects = core.replicas_changed((registered(1), registered(2)), NOW + 20)
    assert of(CloseConnection, effects)


# -- a master that is elected again


def elected_again(core, start, now=NOW + 100, epoch=2):
    recorded = recorded_set((1, 2), 2)
    effects = core.epoch_begun(epoch, recorded, entries((1, 0), (epoch, start)), now)
    assert core.sync.epoch_start_offset == start
    return effects


def test_r41_acks_of_an_earlier_epoch_confirm_nothing_in_the_next():
    """1 in epoch 1, 2 acks 100 of our 150 bytes. 2 the link breaks unheard; 2 follows a master of
    epoch 2 in between, and its log is cut to 40 there. 3 we are elected again, over the connection
    that for us still stands: its ack of 100 would confirm what 2 no longer has."""
    core = master((1, 2, 3), replicas=tuple(map(registered, (1, 2, 3))))
    follow(core)
    core.appended(150, NOW)
    core.acks_received(MEMBER, [100], NOW)
    assert core.log.confirm_offset == 0, "3 is missing"
    effects = elected_again(core, 150)
    effects += core.acks_received(MEMBER, [100], NOW + 101)  # was under way
    assert core.log.confirm_offset == 0 and not of(ConfirmAdvanced, effects)
    assert not core.sync.required_set_whole
    assert not of(CloseConnection, effects), "it may be alive: no reconnect is asked of it"


def test_r41_a_slave_that_follows_into_the_next_epoch_counts_on_the_same_connection(core):
    follow(core)
    core.appended(150, NOW)
    core.acks_received(MEMBER, [100], NOW)
    effects = elected_again(core, 150)
    assert of(SendLog, effects), "the new epoch is announced at once"
    core.marks_received(MEMBER, 2, 1, NOW + 101)
    effects = core.acks_received(MEMBER, [150], NOW + 101)
    assert ConfirmAdvanced(150) in effects and core.sync.required_set_whole


def test_r2_where_an_epoch_was_skipped_a_slave_counts_by_its_mark_alone():
    """1 in epoch 1. 2 epoch 2 is another master's, of which neither we nor the slave have heard. 3
    we are elected for epoch 3. The slave acks bytes of epoch 1 sent since, and could still follow
    the master of epoch 2, and cut them: they are not confirmed by that."""
    core = master(window=100)
    follow(core)
    core.appended(150, NOW)
    elected_again(core, 150, epoch=3)
    since = of(SendLog, core.acks_received(MEMBER, [100], NOW + 101))[0]
    assert (since.offset, since.size) == (100, 50)
    core.acks_received(MEMBER, [150], NOW + 101)
    assert core.log.confirm_offset == 0 and not core.sync.required_set_whole
    core.marks_received(MEMBER, 3, 1, NOW + 102)
    assert ConfirmAdvanced(150) in core.acks_received(MEMBER, [150], NOW + 102)


@pytest.mark.parametrize(("is_ours", "epoch"), [(False, 2), (False, 3), (True, 2)])
def test_r41_a_slave_without_a_mark_counts_again_with_the_first_byte_sent_since(is_ours, epoch):
    """A Java slave marks nothing; what it acks above all that was sent before, it got in this
    epoch."""
    core = master(replicas=(registered(1), registered(2) if is_ours else Replica(2)))
    if is_ours:
        follow(core)
    else:
        connect(core, MEMBER, SlaveHandshake(2))
        core.acks_received(MEMBER, [0], NOW)
    core.appended(150, NOW)
    elected_again(core, 150, epoch=epoch)
    assert not of(ConfirmAdvanced, core.acks_received(MEMBER, [150], NOW + 101))
    core.appended(160, NOW + 102)
    assert ConfirmAdvanced(160) in core.acks_received(MEMBER, [160], NOW + 103)


def test_r25_each_epoch_without_bytes_is_announced():
    core = master(written=200)
    follow(core, ack=200)
    frames = of(SendLog, core.epochs_changed(entries((1, 0), (2, 200), (3, 200)), NOW))
    assert {decode_transfer_header(frame.header).epoch for frame in frames} == {2, 3}


def test_r41_a_late_mark_of_the_earlier_epoch_shows_no_entry_into_the_next(core):
    follow(core)
    core.appended(150, NOW)
    elected_again(core, 150)
    core.marks_received(MEMBER, 1, 1, NOW + 101)
    assert core.marks_received(OTHER, 2, 1, NOW + 101) == [], "its connection has ended"
    effects = core.acks_received(MEMBER, [150], NOW + 101)
    assert not of(ConfirmAdvanced, effects) and not core.sync.required_set_whole


def test_r41_a_first_ack_is_measured_by_the_handshake_though_our_log_has_grown(core):
    """What was written since, no slave can hold: it has the bytes of another master there."""
    core.appended(100, NOW)
    connect(core, MEMBER, SlaveHandshake(2, identity=identity(2)))
    core.appended(150, NOW)
    (close,) = of(CloseConnection, core.acks_received(MEMBER, [120], NOW))
    assert "our log ended at 100" in close.reason and core.log.confirm_offset == 0


# -- R42


def test_r42_a_slave_without_this_epochs_tables_does_not_join():
    core = master((1,))
    assert not of(ProposeSet, follow(core, tables=None))
    assert not of(ProposeSet, core.marks_received(MEMBER, -1, 0, NOW + 10)), "of an earlier epoch"
    (proposed,) = of(ProposeSet, core.marks_received(MEMBER, -1, 1, NOW + 20))
    assert proposed.proposal.add == {2}


def test_r42_reconnecting_gives_no_new_time():
    core = master(policy=SyncPolicy(tables_ms=5_000))
    effects = []
    for now in range(NOW, NOW + 5_100, 50):
        if now % 500 == 0:
            effects += follow(core, now, tables=None, now=now)
        effects += core.acks_received(now - now % 500, [0], now) + core.tick(now)
        assert bool(of(ProposeSet, effects)) == (now >= NOW + 5_000)


# -- connections that show nothing (R58)


def test_r58_a_handshake_is_whole_within_five_seconds_however_its_bytes_come(core):
    core.connection_opened(OTHER, "a:1", NOW)
    assert not to_connection(OTHER, core.tick(NOW + 4_999))
    assert of(CloseConnection, to_connection(OTHER, core.tick(NOW + 5_000)))


def test_r58_a_flood_from_one_host_leaves_room_for_a_slave_of_another(core):
    """1 a slave connects and its handshake is on its way. 2 a host opens ten times as many
    connections as may wait. 3 the handshake comes, and is answered."""
    core.connection_opened(MEMBER, "member:1", NOW)
    effects = []
    for number in range(100, 100 + 10 * STRANGERS_MAX):
        effects += core.connection_opened(number, f"flood:{number}", NOW)
        assert len(core.connections) <= STRANGERS_MAX
    assert [e.connection_id for e in effects] == list(range(100, 101 + 9 * STRANGERS_MAX))
    answer = core.handshake_received(MEMBER, SlaveHandshake(2, identity=identity(2)), NOW)
    assert of(SendBytes, answer)


def test_r58_a_member_is_no_stranger_and_one_that_waits_for_its_record_is(core):
    follow(core)
    earlier = SlaveHandshake(2, identity=identity(2, incarnation="earlier"))
    for number in range(100, 100 + 2 * STRANGERS_MAX):
        connect(core, number, earlier)
    assert len(core.connections) == 1 + STRANGERS_MAX and core.sync.required_set_whole


def test_r58_an_id_that_no_controller_registered_is_no_slave(core):
    """A thousand of them would each be a connection that stays, and a candidate for the set."""
    for number in range(100, 1_100):
        assert not of(SendBytes, connect(core, number, SlaveHandshake(number)))
        assert not core.acks_received(number, [0], NOW)
    assert len(core.connections) == STRANGERS_MAX
    assert len(of(CloseConnection, core.tick(NOW + 500))) == STRANGERS_MAX


# -- over real connections


async def test_r58_strangers_that_say_little_or_nothing_keep_no_slave_out(group):
    """Real sockets: idle ones, one that sends a byte of a name now and then, one that sends half a
    name; more of them than may wait. The oldest are closed, and a slave joins behind them."""
    one, two = await group.add(1), await group.add(2)
    await group.elect(one, others=False)
    opened = []
    for number in range(2 * STRANGERS_MAX):
        reader, writer = await asyncio.open_connection("127.0.0.1", one.ha.port)
        writer.write(encode_identity(identity(2))[: number % 30])
        opened.append((reader, writer))
    connections = one.ha._master.core.connections
    await until(lambda: len(connections) == STRANGERS_MAX)
    for reader, _ in opened[:STRANGERS_MAX]:
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    await group.follow(two)
    one.put(3)
    await group.caught_up(one, two)
    await until(lambda: one.ha.in_sync_count == 2)
    for _, writer in opened:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_r41_a_slave_of_another_group_at_a_reused_address(group, tmp_path):
    """1 Member A-2 has lost its link. 2 B-2, whose own master once had that address, dials A-1:
    nothing is sent to it, nothing that A-2 lacks is confirmed, and A-2 counts when it is back."""
    one, two = await group.add(1), await group.add(2)
    group.auto = False
    await group.elect(one, 1, 2)
    one.put(3)
    await group.caught_up(one, two)
    held = one.confirm_offset
    await two.ha.stand_down()
    other = type(group)(tmp_path / "B")
    other.view = RoleView("C", "broker-b")
    stranger = type(one)(other, 2, tmp_path / "B" / "b2", HAConfig())
    await stranger.start()
    address = f"127.0.0.1:{one.ha.port}"
    view = replace(
        other.view,
        master_broker_id=1,
        master_address="remoting",
        master_ha_address=address,
        master_incarnation="B-1",
        master_epoch=1,
        sync_state_set_epoch=1,
        sync_state_set=frozenset({1, 2}),
    )
    await stranger.ha.change_to_slave(view)
    stranger.ha.tables_followed(1)
    end = one.put(2)
    await until(lambda: stranger.ha._slave.core._redial._lost._failures >= 2)
    assert one.confirm_offset == held and stranger.store.max_phy_offset <= 0
    assert not one.ha.required_set_whole
    await group.follow(two)
    await until(lambda: one.confirm_offset == end)
    await group.caught_up(one, two)
    await stranger.stop()


async def test_r41_many_strangers_leave_the_member_its_connection(group):
    """Real sockets: the member's connection is the same one before and after."""

    async def refused(port, stranger):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(encode_slave_handshake(stranger) + encode_ack(0))
        assert await reader.read() == b""
        writer.close()

    one, two = await group.add(1), await group.add(2)
    await group.elect(one, 1, 2)
    await until(lambda: one.ha.required_set_whole)
    (before,) = one.ha._master.core.connections
    strangers = list(STRANGERS.values()) * 5
    await asyncio.gather(*(refused(one.ha.port, each) for each in strangers))
    assert list(one.ha._master.core.connections) == [before]
    one.put(3)
    await group.caught_up(one, two)


def test_registrations_take_any_log_where_the_controllers_know_none():
    known = Registrations(identity(1), [Replica(2, incarnation="i2")])
    standing, _ = known.judge(SlaveHandshake(2, identity=identity(2)))
    assert standing.value == "counts"


def test_r12_a_registration_ends_the_connection_of_the_process_before_it(core):
    """1 process i2 follows. 2 it is killed, and its successor registers, without a connection yet:
    what i2 acked is under way still, and may be lost with its page cache."""
    follow(core)
    core.appended(100, NOW)
    effects = core.replicas_changed((registered(1), registered(2, incarnation="second")), NOW + 20)
    assert [e.connection_id for e in of(CloseConnection, effects)] == [MEMBER]
    assert not core.sync.required_set_whole
    assert not of(ConfirmAdvanced, core.acks_received(MEMBER, [100], NOW + 21))


def test_r41_a_first_ack_under_way_while_the_next_epoch_begins_counts_for_the_earlier_one():
    """A Java slave shook hands in the epoch before, and has acked nothing by then."""
    core = master(replicas=(registered(1), Replica(2)))
    core.appended(150, NOW)
    connect(core, MEMBER, SlaveHandshake(2))
    effects = elected_again(core, 150)
    effects += core.acks_received(MEMBER, [150], NOW + 101)
    assert not of(ConfirmAdvanced, effects) and not core.sync.required_set_whole
