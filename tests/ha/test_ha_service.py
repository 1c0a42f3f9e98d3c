"""Three real stores and services over loopback, role changes by hand.

Scenarios of Java's AutoSwitchHATest, then those that it leaves out. Each test is a story of
replicas 1, 2 and 3; a plain controller stands in the middle (`Group`).
"""

import asyncio
import errno
import socket
import struct
from dataclasses import replace
from unittest.mock import Mock

import pytest

from batonmq.ha.config import HAConfig
from batonmq.ha.java_peer import PeerIdentity
from batonmq.ha.links import UNACKNOWLEDGED_MS, MasterLink
from batonmq.ha.wire import OwnState, SlaveHandshake, encode_ack, encode_slave_handshake
from batonmq.protocol.errors import BatonError
from tests.ha.conftest import expire_first_segment, flip, until

# -- AutoSwitchHATest


async def test_confirm_offset(group):
    """Java testConfirmOffset: 1 leads {1,2}; 2 stops, a put stays unconfirmed; 1 stops, 2 leads
    epoch 2; 1 returns, drops the unacknowledged message and holds the same 20."""
    one, two = await group.pair()
    one.put(10)
    await group.caught_up(one, two)
    group.auto = False
    confirmed = one.confirm_offset
    acked = one.log_bytes()
    await two.stop()
    await until(lambda: not one.ha.required_set_whole)
    one.put()
    assert one.confirm_offset == confirmed < one.store.max_phy_offset
    await one.stop()

    group.auto = True
    await two.start()
    await group.elect(two)
    two.put(10)
    await one.start()
    await group.follow(one)
    await group.caught_up(one, two)
    assert one.truncated == [(confirmed + len(acked) // 10, confirmed)]
    assert one.log_bytes()[:confirmed] == acked, "a confirmed byte was cut"
    assert one.readable == two.readable == 20
    assert one.epochs == two.epochs == [(1, 0), (2, confirmed)]


async def test_async_learner(group):
    """Java testAsyncLearnerBrokerRole: a learner receives all and is never in the set."""
    one = await group.add(1)
    two = await group.add(2, HAConfig(async_learner=True))
    await group.elect(one)
    one.put(10)
    await group.caught_up(one, two)
    assert two.readable == 10
    assert one.ha.required_set == {1} and not one.proposals


async def test_change_role_many_times(group):
    """Java testChangeRoleManyTimes: 1 and 2 swap over epochs 1 to 3, ten messages each."""
    one, two = await group.add(1), await group.add(2)
    for master, slave in ((one, two), (two, one), (one, two)):
        await group.elect(master, 1, 2)
        await until(lambda m=master: m.ha.required_set_whole)
        master.put(10)
        await group.caught_up(master, slave)
    assert one.readable == two.readable == 30
    assert one.epochs == two.epochs
    assert [epoch for epoch, _ in one.epochs] == [1, 2, 3]
    assert not one.truncated and not two.truncated


async def test_truncate_epoch_log_and_change_master(group):
    """Java testTruncateEpochLogAndChangeMaster: then 2 leads epoch 3, 3 reads what is left, and the
    old master rejoins complete."""
    group.segment_size = 4096
    one, two = await group.pair()
    one.put(10)
    await group.elect(one, 1, 2)
    while one.store.max_phy_offset <= 4096:
        one.put(1)
    one.put(5)
    await group.caught_up(one, two)
    await expire_first_segment(one)
    await expire_first_segment(two)
    await group.elect(two, 1, 2)
    two.put(10)
    three = await group.add(3)
    group.commit(group.view.sync_state_set)
    two.ha.adopt_view(group.view)
    await group.follow(three)
    await until(lambda: two.ha.required_set == {1, 2, 3})
    await group.caught_up(one, two, three)
    assert three.store.min_phy_offset == 4096
    assert [e for e, _ in three.epochs] == [2, 3]
    await until(lambda: one.epochs == two.epochs == three.epochs)
    assert one.readable == two.readable == three.readable


async def test_add_broker_and_sync_from_last_file(group):
    """Java testAddBrokerAndSyncFromLastFile: a blank slave takes the last file only, and so is no
    candidate for the set: it lacks old messages (R13)."""
    group.segment_size = 4096
    one = await group.add(1)
    await group.elect(one)
    while one.store.max_phy_offset <= 8192:
        one.put(1)
    two = await group.add(2, HAConfig(sync_from_last_file=True))
    group.commit(frozenset({1}))
    one.ha.adopt_view(group.view)
    await group.follow(two)
    await group.caught_up(one, two)
    assert two.store.min_phy_offset == 8192
    assert one.ha.required_set == {1} and not one.proposals


# -- beyond


async def test_g8_r24_a_bad_record_of_the_master_is_never_acked_and_named_on_both_sides(group):
    """A byte flips on 1's disk, in a record that 2 lacks.

    1. 2 keeps and acks what lies before it, names file and offset, and tries ever more rarely.
    2. 2 requests that record again: 1 checks it, is suspect from then on, and reports it.
    3. The byte is what it was: 2 catches up.
    """
    group.segment_size = 64 << 10
    one = await group.add(1)
    await group.elect(one)
    end = one.put(20)
    bad = end // 20 * 10
    segment = one.root / "commitlog" / f"{0:020d}"
    flip(one, bad + 100)
    two = await group.add(2)
    one.ha.adopt_view(group.commit(frozenset({1})))
    await group.follow(two)
    await until(lambda: two.diverged)
    assert f"{0:020d} at offset {bad}" in two.diverged[0]
    assert two.store.max_phy_offset == bad and not two.store.trust.reason
    assert not one.damage
    await until(lambda: one.ha.required_set == {1})

    two.ha.adopt_view(group.commit(frozenset({1})))  # dials without waiting for its time
    await until(lambda: one.damage)
    assert f"{segment} at offset {bad}" in one.damage[0] == one.store.trust.reason
    await until(lambda: not two.is_following)
    assert two.store.max_phy_offset == bad and len(two.diverged) == 1
    await until(lambda: one.ha.required_set == {1})
    one.put(1)
    assert one.confirm_offset == one.store.max_phy_offset, "it serves all the rest"

    flip(one, bad + 100)
    two.ha.adopt_view(group.commit(frozenset({1})))
    await group.caught_up(one, two)


async def test_a_slave_with_a_full_disk_says_so_once_and_goes_on_when_there_is_room(
    group, monkeypatch
):
    """1. 2 cannot write: nothing is acked, the set stays {1}, writes continue. 2. It dials again
    and again: still one report. 3. There is space: it catches up."""
    one = await group.add(1)
    await group.elect(one)
    one.put(5)
    two = await group.add(2)
    append, tried = two.store.slave_log.append_replicated, []

    def no_room(offset, data):
        tried.append(offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(two.store.slave_log, "append_replicated", no_room)
    await group.follow(two)
    for times in range(1, 6):
        await until(lambda times=times: len(tried) == times)
        await until(lambda: not two.is_following)
        two.ha.adopt_view(group.commit(frozenset({1})))  # dials without waiting for its time
    assert len(two.diverged) == 1 and "disk is full" in two.diverged[0]
    assert "disk is full" in two.ha.following_problem
    one.ha.adopt_view(group.commit(frozenset({1})))
    one.put(1)
    await until(lambda: one.confirm_offset == one.store.max_phy_offset)
    assert two.store.max_phy_offset == 0

    monkeypatch.setattr(two.store.slave_log, "append_replicated", append)
    two.ha.dial_now()
    await group.caught_up(one, two)
    assert two.ha.following_problem == ""


async def test_a_slave_that_does_not_reach_its_master_says_so(group, monkeypatch):
    """It was in no problem: `mqctl verdict` said that it copies its master, for hours."""
    monkeypatch.setattr("batonmq.ha.slave_shell.UNREACHED_MS", 0)
    one, two = await group.add(1), await group.add(2)
    await group.elect(one, others=False)
    dial = MasterLink.dial
    monkeypatch.setattr(MasterLink, "dial", lambda link, loop, _: dial(link, loop, "127.0.0.1:1"))
    await group.follow(two)
    await until(lambda: "Connection refused" in two.ha.following_problem)
    assert two.ha.following_problem.startswith("no connection to 127.0.0.1:")
    monkeypatch.setattr(MasterLink, "dial", dial)
    await until(lambda: two.ha.following_problem == "")
    await group.caught_up(one, two)


async def test_a_slave_that_has_all_again_after_a_full_disk_reports_no_problem(group, monkeypatch):
    """Not only an append finds the disk full, and on a quiet group none would come to show that
    there is space again."""
    one, two = await group.add(1), await group.add(2)
    await group.elect(one)
    no_room = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    adopt = two.store.epochs.replace_all
    monkeypatch.setattr(two.store.epochs, "replace_all", no_room)
    await group.follow(two)
    await until(lambda: "disk is full" in two.ha.following_problem)
    monkeypatch.setattr(two.store.epochs, "replace_all", adopt)
    two.ha.dial_now()
    await group.caught_up(one, two)
    await until(lambda: two.ha.following_problem == "")


@pytest.mark.parametrize(
    "identity",
    [
        PeerIdentity("Other", "broker-a", 2, 2),
        PeerIdentity("C", "broker-b", 2, 2),
        PeerIdentity("C", "broker-a", 3, 2),
        PeerIdentity("C", "broker-a", 2, 1),
        BatonError("no answer"),
        ValueError("an answer of nonsense"),
    ],
)
async def test_r21_nothing_is_cut_without_proof(group, identity):
    """R21: 1 has a tail that 2's log does not share. The peer at 2's address must prove who it is
    first; while that is not the named master of the epoch, not a byte goes."""
    proofs = []

    async def prove(view):
        proofs.append(view.master_address)
        if isinstance(group.answer_of_peer, Exception):
            raise group.answer_of_peer
        return group.answer_of_peer

    group.prove_master = prove
    group.answer_of_peer = identity
    one, two = await group.pair()
    one.put(10)
    await group.caught_up(one, two)
    group.auto = False
    await two.ha.stand_down()
    one.put(3)
    kept = one.log_bytes()
    group.incarnations[1] = group.incarnations[2] = ""  # 2 is a Java broker from now on
    await group.elect(two, 1, 2, others=False)
    two.put(1)
    await one.ha.change_to_slave(group.view)
    await until(lambda: len(proofs) >= 2)
    assert one.log_bytes() == kept and not one.truncated
    group.answer_of_peer = PeerIdentity("C", "broker-a", 0, 2)  # Java's master calls itself 0
    await until(lambda: one.truncated)
    await group.caught_up(one, two)
    assert proofs[-1] == "remoting-2"


@pytest.mark.parametrize("held", [0, 4])
async def test_r23_towards_an_unclean_epoch_confirmed_bytes_go_and_are_kept_aside(group, held):
    """R23: 1 confirmed ten messages alone; the operator makes 2, which has `held` of them, master
    by an unclean election. 1 cuts what 2 lacks, keeps it aside, and catches up."""
    group.auto = False
    one, two = await group.add(1), await group.add(2)
    await group.elect(one, others=False)
    if held:
        one.put(held)
        await group.follow(two)
        await until(lambda: two.store.max_phy_offset == one.store.max_phy_offset)
        await two.ha.stand_down()
        one.ha.set_dead(frozenset({2}))
        await until(lambda: not one.ha.runtime_info().ha_connection_info)
        while one.proposal is not None:  # the expand of a while ago is refused
            one.ha.proposal_refused(2001, "no")
    one.put(10)
    assert one.confirm_offset == one.store.max_phy_offset
    old = one.log_bytes()
    common = two.store.max_phy_offset
    group.view = replace(group.view, unclean_epoch=group.view.master_epoch + 1)
    await group.elect(two, 2)
    two.put(3)
    await until(lambda: one.store.max_phy_offset == two.store.max_phy_offset)
    await until(lambda: one.log_bytes() == two.log_bytes())
    assert not one.diverged
    aside = b"".join(
        path.read_bytes() for path in sorted((one.root / "truncated").rglob("*")) if path.is_file()
    )
    assert old[common:] in aside
    await until(lambda: two.proposal is not None)


async def test_r23_a_cut_that_the_store_refuses_is_reported_and_changes_nothing(group):
    """R23: 1 and 2 wrote records of other sizes in an epoch of one number, so 2's epoch list leaves
    1's log within a record. 1 says so, and follows no one."""
    group.auto = False
    one, two = await group.add(1), await group.add(2)
    before = group.view
    await group.elect(two, others=False)
    two.put(3, b"a longer body" * 8)
    await two.ha.stand_down()
    group.view = before
    await group.elect(one, others=False)
    one.put(10)
    kept = one.log_bytes()
    group.view = replace(group.view, unclean_epoch=2)
    await group.elect(two, 2)
    await until(lambda: one.diverged)
    assert "no record ends there" in one.diverged[0]
    assert one.log_bytes() == kept and not one.truncated
    assert not list((one.root / "truncated").glob("*"))


async def test_r17_r24_a_suspect_slave_is_trusted_once_it_is_level_and_not_before(group):
    """1. 2 has four of ten messages, and was stopped uncleanly under another boot. 2. It follows:
    it stays suspect until it has all that 1 confirmed."""
    one, two = await group.pair()
    one.put(4)
    await group.caught_up(one, two)
    await two.stop()
    one.ha.set_dead(frozenset({2}))
    await until(lambda: one.ha.required_set == {1})
    one.put(6)
    (two.root / "abort").write_text("1\nanother boot\ncached\n")
    await two.start()
    trust = two.store.trust
    assert "another boot" in trust.reason
    trusted_at = []
    clear = trust.clear_suspect
    trust.clear_suspect = lambda: (trusted_at.append(two.store.max_phy_offset), clear())
    await group.follow(two)
    await until(lambda: not trust.reason)
    assert trusted_at[0] == one.store.max_phy_offset
    await group.caught_up(one, two)


@pytest.mark.parametrize("found", ["by a reader", "in a handshake"])
async def test_r24_damage_that_a_slave_finds_while_it_follows_is_fetched_again(group, found):
    """1. A byte of 2's log changes, in a record that ends an epoch. 2. 2 finds it while it follows:
    it has caught up, and suspect all the same. 3. Nothing is cut while 2 is in the set. 4. Once it
    has left it, it drops what lies behind the damage, fetches that again, and is whole."""
    one, two = await group.pair()
    before = one.put(2)
    one.put(1)
    await group.caught_up(one, two)
    await group.elect(one, 1, 2)
    one.put(3)
    await group.caught_up(one, two)
    good, trust = two.log_bytes(), two.store.trust
    flip(two, before + 100)
    group.auto = False  # 2 stays a member while it is away
    if found == "by a reader":
        assert trust.fault_at(before)
    else:
        link = two.ha._slave._link
        assert link is not None
        link.end()
    await until(lambda: trust.reason and two.is_following)
    assert f"at offset {before}" in trust.reason

    await group.follow(two)
    one.put(1)
    await until(lambda: one.confirm_offset == one.store.max_phy_offset)
    assert trust.reason and not list((two.root / "truncated").glob("*"))

    one.ha.adopt_view(group.commit(frozenset({1})))
    group.auto = True
    await group.follow(two)
    await until(lambda: not trust.reason)
    await group.caught_up(one, two)
    assert two.log_bytes() == one.log_bytes() and two.log_bytes().startswith(good)
    await until(lambda: one.ha.required_set == {1, 2})


@pytest.mark.parametrize("how", ["role change", "time"])
async def test_r27_a_link_with_a_last_word_ends_with_the_mastership_or_in_a_second(group, how):
    """A hung peer has megabytes unread before the frame that its next byte is gone: it can keep
    neither the socket nor the role change nor the end of the process waiting."""
    group.segment_size = 64 << 10
    one = await group.add(1)
    group.incarnations[2] = ""
    await group.add(2)
    await group.elect(one, others=False)
    while one.store.max_phy_offset < 6 << 20:
        one.put(100, b"z" * 300)
    loop = asyncio.get_running_loop()
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.setblocking(False)
    await loop.sock_connect(peer, ("127.0.0.1", one.ha.port))
    await loop.sock_sendall(peer, encode_slave_handshake(SlaveHandshake(2)))
    await loop.sock_recv(peer, 20)
    await loop.sock_sendall(peer, encode_ack(0))
    master = one.ha._master
    await until(lambda: master.core.connections)
    (connection,) = master.core.connections.values()
    await until(lambda: connection.next_offset > 4 << 20)
    effects = master.core._refuse_gone(connection, 0, one.ha._now_ms())
    master.perform(effects)
    (link,) = master._leaving
    assert link.transport is not None
    if how == "role change":
        await one.ha.stand_down()
    await until(lambda: link.transport is None and not master._leaving)
    await one.ha.close()  # would wait for the last link
    peer.close()


async def test_a_slave_serves_no_one(group):
    """A replica that is not master ends what dials its HA port, and stops doing so as master."""
    one = await group.add(1)
    group.incarnations[2] = ""
    await group.add(2)
    reader, writer = await asyncio.open_connection("127.0.0.1", one.ha.port)
    writer.write(struct.pack(">ihhq", 1, 0, 0, 2))
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(20)
    writer.close()
    await group.elect(one, others=False)
    reader, writer = await asyncio.open_connection("127.0.0.1", one.ha.port)
    writer.write(struct.pack(">ihhq", 1, 0, 0, 2))
    head = await reader.readexactly(20)
    assert struct.unpack(">iiqi", head) == (1, 12, 0, 1)
    writer.close()


async def test_r20_a_slave_takes_another_mastership_from_its_role_change_only(group):
    """That is where epochs are compared with the log (R2); a late view is of an earlier one."""
    one, two = await group.pair()
    current = group.view
    two.ha.adopt_view(replace(current, master_epoch=current.master_epoch - 1))
    assert two.ha._slave.core.view.master_epoch == current.master_epoch
    one.put(3)
    await group.caught_up(one, two)


async def test_a_slave_that_catches_up_shows_what_it_holds_close_behind(group):
    """16 MB are fetched at once. What is not shown yet when the log has caught up is what an
    election in that moment would wait for: it is bounded, however much there was."""
    group.segment_size = 4 << 20
    one = await group.add(1)
    await group.elect(one)
    while one.store.max_phy_offset < 16 << 20:
        one.put(100, b"z" * 2000)
    two = await group.add(2)
    lags = []
    append = two.store.slave_log.append_replicated

    def appended(offset, data):
        end = append(offset, data)
        lags.append(end - two.store.confirm_offset)
        return end

    two.store.slave_log.append_replicated = appended
    one.ha.adopt_view(group.commit(frozenset({1})))
    await group.follow(two)
    await group.caught_up(one, two)
    assert max(lags) <= 6 << 20, "two bounds, 2 and 1 MiB, and a read for each"


async def test_a_new_master_shows_a_long_backlog_without_standing_still(group):
    """2 has fetched a whole log and shown none of it to readers when it is elected. It shows all
    before it opens, and its loop continues meanwhile: else the controllers would call it dead."""
    group.segment_size = 1 << 20
    one = await group.add(1)
    await group.elect(one)
    for _ in range(80):
        one.put(10, b"y" * 10_000)
    two = await group.add(2)
    group.commit(frozenset({1}))
    one.ha.adopt_view(group.view)
    await group.follow(two)
    two.ha._slave.core.log._drains_backlog = lambda now_ms: True
    await until(lambda: one.ha.required_set == {1, 2} and one.ha.in_sync_count == 2)
    assert two.readable == 0
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    watcher = asyncio.create_task(others())
    await group.elect(two, 1, 2, others=False)
    watcher.cancel()
    assert two.readable == 800
    assert turns >= 10


async def test_runtime_info_names_slaves_and_master(group):
    """Request 907: the master lists its slaves, the slave names its master."""
    one, two = await group.pair()
    one.put(3)
    await group.caught_up(one, two)
    info = one.ha.runtime_info()
    assert info.master and info.in_sync_slave_nums == 1
    (slave,) = info.ha_connection_info
    assert slave.slave_ack_offset == one.store.max_phy_offset and slave.diff == 0
    client = two.ha.runtime_info().ha_client_runtime_info
    assert client.master_addr == f"127.0.0.1:{one.ha.port}"
    assert client.max_offset == one.store.max_phy_offset


class ShortPatience(HAConfig, frozen=True, kw_only=True):
    def slave_policy(self, **kwargs):
        return replace(super().slave_policy(**kwargs), silence_limit_ms=400)


async def test_both_ends_of_a_connection_give_up_what_no_kernel_acknowledges(group):
    one, two = await group.pair()
    (accepted,) = one.ha._master._links.values()
    for link in (accepted, two.ha._slave._link):
        sock = link.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == UNACKNOWLEDGED_MS


async def test_after_a_silent_cut_under_load_the_slave_dials_anew(group):
    """1. Everything passes a relay, and the master writes all the time, so that no heartbeat was
    ever seen. 2. The relay goes silent: both sockets stay open, nothing comes. 3. The slave dials
    again without waiting for the old connection, and has caught up."""
    one = await group.add(1)
    two = await group.add(2, ShortPatience())
    await group.elect(one, others=False)
    silent, pumps, ends = asyncio.Event(), [], []

    async def pump(reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)

    async def accepted(reader, writer):
        there = await asyncio.open_connection("127.0.0.1", one.ha.port)
        ends.extend((writer, there[1]))
        mine = [
            asyncio.create_task(pump(reader, there[1])),
            asyncio.create_task(pump(there[0], writer)),
        ]
        pumps.extend(mine)
        if len(pumps) == 2:
            await silent.wait()
            for task in mine:
                task.cancel()

    relay = await asyncio.start_server(accepted, "127.0.0.1", 0)
    address = f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
    group.view = replace(group.view, master_ha_address=address)
    await two.ha.change_to_slave(group.view)
    for _ in range(50):
        end = one.put(1)
        await until(lambda end=end: two.store.max_phy_offset == end)
    silent.set()
    one.put(5)
    await until(lambda: len(pumps) == 4)
    await group.caught_up(one, two)
    relay.close()
    for task in pumps:
        task.cancel()
    for writer in ends:
        writer.transport.abort()
    await asyncio.wait(pumps)


async def test_a_slave_that_dials_too_early_is_served_when_the_mastership_begins(group):
    """The role change reached the slave first: it dials, its handshake waits unanswered, and the
    new master takes it up without another dial."""
    one, two = await group.add(1), await group.add(2)
    reader, writer = await asyncio.open_connection("127.0.0.1", one.ha.port)
    writer.write(encode_slave_handshake(SlaveHandshake(2, identity=two.identity())))
    await writer.drain()
    await until(lambda: len(one.ha._waiting_links) == 1)
    await group.elect(one)
    head = await asyncio.wait_for(reader.readexactly(4), 5)
    assert int.from_bytes(head, "big") == OwnState.IDENTITY
    assert len(one.ha._waiting_links) == 0
    writer.close()
    await two.stop()
