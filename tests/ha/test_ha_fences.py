"""Role changes that the HA service refuses, and what it asks of a damaged log (R2, R3, R17, R24);
what ends before a mastership begins (R1); what a log that failed does not vouch for (R37). Store
and sockets only note calls."""

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest

from batonmq.ha import service as ha_service
from batonmq.ha.classic.slave_core import ClassicSlaveCore, MasterAddresses
from batonmq.ha.classic.slave_shell import ClassicSlaveShell
from batonmq.ha.classic.wire import encode_head, encode_report
from batonmq.ha.config import HAConfig
from batonmq.ha.links import OpenLinks
from batonmq.ha.service import AutoSwitchHAService
from batonmq.ha.slave_policy import SlavePolicy
from batonmq.protocol.errors import CorruptLogError, FencedError
from batonmq.protocol.role_view import RoleView
from batonmq.runtime.clock import boot_ms
from batonmq.store.config import StoreConfig
from tests.ha.cores import entries, identity
from tests.shared.waiting import until


class Reached(Exception):
    """The step behind the checks."""


def service_on(store: Mock) -> AutoSwitchHAService:
    store.epochs.last_epoch, store.config = 5, StoreConfig()
    return AutoSwitchHAService(
        store,
        HAConfig(),
        Mock(),
        identity_of=lambda: identity(1),
        java_master=Mock(),
        clock_ms=lambda: 0,
    )


def view(epoch: int, unclean_epoch: int = 0) -> RoleView:
    return RoleView(
        "C", "broker-a", 2, master_epoch=epoch, sync_state_set_epoch=1, unclean_epoch=unclean_epoch
    )


@pytest.mark.parametrize("epoch", [3, 4])
def test_r2_a_log_of_a_newer_epoch_follows_no_older_master(epoch):
    with pytest.raises(FencedError):
        asyncio.run(service_on(Mock()).change_to_slave(view(epoch)))


@pytest.mark.parametrize("epoch", [3, 4, 5])
def test_r3_a_log_that_knows_the_epoch_leads_in_no_such(epoch):
    with pytest.raises(FencedError):
        asyncio.run(service_on(Mock()).change_to_master(view(epoch)))


@pytest.mark.parametrize("change", ["change_to_master", "change_to_slave"])
def test_r37_r40_a_log_that_failed_takes_no_role(change):
    """The check comes before all else: no end of the log is read, and no epoch is written."""
    store = Mock(**{"log.health.check_usable.side_effect": Reached})
    with pytest.raises(Reached):
        asyncio.run(getattr(service_on(store), change)(view(7)))
    store.prepare_master.assert_not_called()
    store.epochs.append.assert_not_called()


def test_r1_a_replica_that_becomes_master_ends_its_slave_connection_first(monkeypatch):
    """Before its log's end is read: no byte of the old master comes behind it, and no ack of one
    leaves."""
    follows = Mock()
    monkeypatch.setattr(ha_service, "SlaveShell", follows)
    follows.return_value.core.log.known_confirm = 0
    store = Mock(confirm_offset=0, max_phy_offset=0, min_phy_offset=0)
    store.epochs.entries = entries((5, 0))

    def read_end(**_: object) -> int:
        follows.return_value.close.assert_called_once_with()
        raise Reached

    store.prepare_master.side_effect = read_end

    async def play() -> None:
        service = service_on(store)
        await service.change_to_slave(view(6))
        follows.return_value.close.assert_not_called()
        await service.change_to_master(view(7))

    with pytest.raises(Reached):
        asyncio.run(play())


@pytest.mark.parametrize("unclean_epoch, discards", [(0, False), (6, False), (7, True)])
def test_r17_damage_is_cut_for_a_mastership_only_where_this_election_chose_a_suspect(
    unclean_epoch, discards
):
    store = Mock(confirm_offset=0, **{"prepare_master.side_effect": Reached})
    with pytest.raises(Reached):
        asyncio.run(service_on(store).change_to_master(view(7, unclean_epoch)))
    store.prepare_master.assert_called_once_with(discard_damage=discards)


def test_r24_a_slave_cuts_what_is_damaged_before_it_follows():
    store = Mock(**{"trust.discard_damaged_tail.side_effect": Reached})
    with pytest.raises(Reached):
        asyncio.run(service_on(store).change_to_slave(view(5)))


async def test_r37_g8_a_failed_log_of_a_classic_slave_reports_nothing_keeps_no_bad_record():
    """1. A frame arrives, and its end is reported. 2. A record is bad: it is taken back. 3. The log
    fails: what seems to be in it is reported no more."""
    streams: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_server(lambda *ends: streams.put_nowait(ends), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    store = Mock(max_phy_offset=0)
    store.log.health.has_failed = False
    store.log.flushed_offset = store.slave_log.whole_end = 0
    core = ClassicSlaveCore(SlavePolicy(), boot_ms())
    shell = ClassicSlaveShell(core, store, Mock(), boot_ms, AsyncMock(), OpenLinks())
    writers = []

    async def connected() -> asyncio.StreamReader:
        reader, writer = await streams.get()
        writers.append(writer)
        assert await reader.readexactly(8) == encode_report(store.max_phy_offset)
        return reader

    def written(*_: object) -> int:
        store.max_phy_offset += 4
        return store.max_phy_offset

    shell.follow(MasterAddresses(address))
    reader = await connected()
    store.slave_log.append_replicated.side_effect = written
    writers[-1].write(encode_head(0, 4) + b"good")
    assert await reader.readexactly(8) == encode_report(4)
    store.slave_log.append_replicated.side_effect = CorruptLogError("file", 4, "bad")
    writers[-1].write(encode_head(4, 4) + b"evil")
    assert await reader.read() == b""
    store.slave_log.drop_unverified.assert_called_once_with()
    shell.dial_now()
    reader = await connected()
    store.slave_log.append_replicated.side_effect = written
    store.log.health.has_failed = True
    writers[-1].write(encode_head(4, 4) + b"more")
    await until(lambda: store.max_phy_offset == 8)
    shell.close()
    assert await reader.read() == b""
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    server.close()
    await server.wait_closed()


async def test_r14_r42_a_new_role_knows_what_the_last_one_was_told(monkeypatch):
    """Who is dead to the controllers, and of which master the tables are."""
    store = Mock(confirm_offset=0, max_phy_offset=0, min_phy_offset=0)
    store.log.flushed_offset = 0
    store.prepare_master.return_value = 0
    store.epochs.entries = entries((7, 0))
    leads, follows = Mock(), Mock()
    monkeypatch.setattr(ha_service, "MasterShell", leads)
    monkeypatch.setattr(ha_service, "SlaveShell", follows)
    service = service_on(store)
    service.set_dead(frozenset({3}))
    service.tables_followed(6)
    await service.change_to_slave(view(6))
    follows.return_value.tables_followed.assert_called_once_with(6)
    follows.return_value.core.log.known_confirm = 0
    await service.change_to_master(view(7))
    assert leads.call_args.args[0].sync.dead == {3}


async def test_r2_while_a_newer_epoch_is_stored_the_older_master_gets_no_ack(group):
    """1. 2 took a newer view, and its disk is slow. 2. 1 continues writing: nothing is confirmed.
    3. The same master was elected again: the connection stays, and all is acknowledged."""
    one, two = await group.add(1), await group.add(2)
    await group.elect(one)
    await until(lambda: one.ha.in_sync_count == 2)
    end = one.put(1)
    await until(lambda: one.confirm_offset == end)
    two.ha.fence(2)
    written = one.put(3)
    await until(lambda: two.store.max_phy_offset == written)
    await asyncio.sleep(0)
    assert one.confirm_offset == end and one.ha.sync_state.follower(2).ack == end
    await group.elect(one, 1, 2)
    await until(lambda: one.confirm_offset == one.store.max_phy_offset)
    assert one.following == [2]
