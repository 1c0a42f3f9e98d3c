"""A classic master and its slaves, each a whole broker in this process; real sockets and files."""

import contextlib
import errno
import os
from pathlib import Path

import pytest

from batonmq.broker.config import BrokerSections
from batonmq.broker.main import SECTIONS
from batonmq.protocol.bodies import HARuntimeInfo
from batonmq.protocol.codes import LanguageCode, RequestCode, ResponseCode
from batonmq.protocol.role_view import Role
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime import disk
from batonmq.runtime.settings import load_settings
from batonmq.store import scrub
from tests.broker.lone_broker import Rig, free_port, lone_broker, pull_header, until


def ha_port_of(rig: Rig) -> int:
    return rig.service.config.store.ha_listen_port


@contextlib.asynccontextmanager
async def master(folder: Path, role: str = "SYNC_MASTER", **settings: object):
    async with lone_broker(
        folder, broker={"broker_role": role}, ha_listen_port=free_port(), **settings
    ) as rig:
        yield rig


@contextlib.asynccontextmanager
async def slave(folder: Path, of: Rig, *, broker_id: int = 1, **settings: object):
    """A slave that knows its master's addresses, as from a name server."""
    async with lone_broker(
        folder, broker={"broker_role": "SLAVE", "broker_id": broker_id}, **settings
    ) as rig:
        tell(rig, of)
        yield rig


@contextlib.asynccontextmanager
async def pair(folder: Path, **settings: object):
    """A synchronous master and its slave, which is in sync."""
    async with master(folder / "m", **settings) as m, slave(folder / "s", m, **settings) as s:
        await in_sync(m)
        yield m, s


async def in_sync(of: Rig, count: int = 2) -> None:
    await until(lambda: of.service.replication.in_sync_count() == count)


def tell(rig: Rig, of: Rig) -> bool:
    ha_address = f"127.0.0.1:{ha_port_of(of)}"
    return rig.service.replication.master_named(of.service.address, ha_address)


def log_of(rig: Rig) -> bytes:
    store = rig.service.store
    return bytes(store.log.view(0, store.max_phy_offset))


async def level(rig: Rig, of: Rig) -> None:
    await until(lambda: rig.service.store.max_phy_offset == of.service.store.max_phy_offset)


async def test_a_sync_master_acknowledges_what_a_slave_has(tmp_path):
    async with pair(tmp_path) as (m, s):
        replies = [await m.send(body=b"x%d" % n) for n in range(50)]
        assert {reply.code for reply in replies} == {0}
        assert log_of(s) == log_of(m)
        found = await m.pull(offset=0)
        assert found.code == 0
        info = HARuntimeInfo.decode((await m.ask(RequestCode.GET_BROKER_HA_STATUS)).body)
        assert info.master
        assert info.in_sync_slave_nums == 1
        (link,) = info.ha_connection_info
        broker = s.service.config.broker
        assert link.slave_name == f"{broker.broker_name}:1 {s.service.address}"
        assert link.addr.startswith("127.0.0.1:")
        assert [name for name, *_ in m.service.replication.slaves()] == [link.slave_name]
        own = HARuntimeInfo.decode((await s.ask(RequestCode.GET_BROKER_HA_STATUS)).body)
        assert not own.master
        assert own.ha_client_runtime_info.max_offset == m.service.store.max_phy_offset


async def test_without_a_slave_a_write_is_stored_answered_11_and_consumed(tmp_path):
    async with master(tmp_path / "m") as m:
        reply = await m.send(body=b"alone")
        assert reply.code == ResponseCode.SLAVE_NOT_AVAILABLE
        assert reply.ext["queueOffset"] == "0"
        assert "slaves" in reply.remark
        assert (await m.pull(offset=0)).code == 0
        async with slave(tmp_path / "s", m) as s:
            await level(s, m)
            assert (await m.send(body=b"two")).code == 0


async def test_an_async_master_waits_for_no_slave(tmp_path):
    async with master(tmp_path / "m", "ASYNC_MASTER") as m:
        assert (await m.send()).code == 0
        async with slave(tmp_path / "s", m) as s:
            await level(s, m)
            assert log_of(s) == log_of(m)


async def test_a_slave_shows_what_it_has_and_refuses_writes(tmp_path):
    async with pair(tmp_path) as (m, s):
        await m.send(body=b"seen")
        store = s.service.store
        await until(lambda: store.confirm_offset == store.max_phy_offset > 0)
        assert s.service.path.gate.role is Role.SLAVE
        assert store.queries.max_offset_in_queue("T", 0) == 1
        refused = await s.send()
        assert refused.code != 0
        assert "slave" in refused.remark


async def test_a_slave_serves_reads_where_that_is_wanted(tmp_path):
    """slaveReadEnable. Behind its end it sends the consumer back to the master."""
    reads = {"slave_read_enable": True, "broker_role": "SLAVE", "broker_id": 1}
    async with master(tmp_path / "m") as m, lone_broker(tmp_path / "s", broker=reads) as s:
        assert (await stock_pull(s, 0)).code != 0
        tell(s, m)
        await in_sync(m)
        assert (await m.send(body=b"seen")).code == 0
        await until(lambda: s.service.store.queries.max_offset_in_queue("T", 0) == 1)
        await until(lambda: "T" in s.service.tables.topics.table)
        found = await stock_pull(s, 0)
        assert found.code == 0
        assert b"seen" in found.body
        behind = await stock_pull(s, 1)
        assert behind.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert behind.ext["suggestWhichBrokerId"] == "0"


async def stock_pull(rig: Rig, offset: int) -> RemotingCommand:
    """As the Java client asks: it goes where the routes lead it."""
    request = RemotingCommand.request(RequestCode.PULL_MESSAGE, pull_header(offset))
    request.language = LanguageCode.JAVA
    return await rig.client.invoke(rig.service.address, request, 5000)


@pytest.mark.parametrize("key", ["ha_max_gap_not_in_sync", "ha_slave_fallbehind_max"])
async def test_a_slave_too_far_behind_does_not_count(tmp_path, key):
    """Also by the key's old name."""
    role = {"broker_role": "SYNC_MASTER"}
    async with (
        lone_broker(tmp_path / "m", broker=role, ha={key: 1}, ha_listen_port=free_port()) as m,
        slave(tmp_path / "s", m),
    ):
        await in_sync(m)
        assert (await m.send()).code == ResponseCode.SLAVE_NOT_AVAILABLE


async def test_a_slave_ahead_of_its_master_is_not_followed_and_named(tmp_path):
    """Java idles into a divergent log there."""
    async with pair(tmp_path) as (m, s):
        for _ in range(5):
            await m.send()
        await level(s, m)
    async with master(tmp_path / "other") as other, slave(tmp_path / "s", other) as s:
        await until(lambda: s.service.replication.service.following_problem != "")
        problem = s.service.replication.service.following_problem
        assert "above the end of its master's" in problem
        reply = await other.send()
        assert reply.code == ResponseCode.SLAVE_NOT_AVAILABLE
        status = s.service.status.problems()
        assert any("cannot follow its master" in line for line in status)


async def test_a_slave_that_comes_back_continues_at_the_end_of_its_log(tmp_path):
    async with master(tmp_path / "m") as m:
        async with slave(tmp_path / "s", m) as s:
            await in_sync(m)
            assert (await m.send(body=b"one")).code == 0
            await level(s, m)
        await in_sync(m, 1)
        assert (await m.send(body=b"two")).code == ResponseCode.SLAVE_NOT_AVAILABLE
        async with slave(tmp_path / "s", m) as s:
            await level(s, m)
            assert log_of(s) == log_of(m)
            assert (await m.send(body=b"three")).code == 0


async def test_a_slave_is_promoted_by_its_configuration(tmp_path):
    async with pair(tmp_path) as (m, s):
        for n in range(10):
            assert (await m.send(body=b"%d" % n)).code == 0
        await until(lambda: "T" in s.service.tables.topics.table)
    async with master(tmp_path / "s", "ASYNC_MASTER") as promoted:
        reply = await promoted.send(body=b"after")
        assert reply.code == 0
        assert reply.ext["queueOffset"] == "10"


async def test_with_three_in_sync_replicas_one_slave_is_not_enough(tmp_path):
    role: dict[str, object] = {"broker_role": "SYNC_MASTER"}
    needs: dict[str, object] = {"in_sync_replicas": 3}
    # It counts again with its next report, since the other one is on the same host.
    often = {"ha_send_heartbeat_interval": 50}
    async with (
        lone_broker(tmp_path / "m", broker=role, ha=needs, ha_listen_port=free_port()) as m,
        slave(tmp_path / "s1", m, ha=often) as first,
    ):
        await in_sync(m)
        assert (await m.send()).code == ResponseCode.SLAVE_NOT_AVAILABLE
        async with slave(tmp_path / "s2", m, broker_id=2) as second:
            await in_sync(m, 3)
            assert (await m.send()).code == 0
            assert log_of(first) == log_of(second) == log_of(m)


@pytest.mark.parametrize("sync_flush", [False, True])
async def test_haSyncFlush_reports_only_what_is_on_the_slaves_disk(tmp_path, sync_flush):
    kind = {"flush_disk_type": "SYNC_FLUSH", "ha_sync_flush": sync_flush}
    async with pair(tmp_path, **kind) as (m, s):
        assert (await m.send()).code == 0
        assert m.service.store.log.flushed_offset == m.service.store.max_phy_offset
        if sync_flush:
            assert s.service.store.log.flushed_offset == m.service.store.max_phy_offset


async def test_r45_a_slaves_full_disk_is_named_and_ends_by_itself(tmp_path, monkeypatch):
    """Java ignores the failed append and redials without end, and logs nothing."""
    async with pair(tmp_path) as (m, s):
        assert (await m.send()).code == 0
        log_folder = str(tmp_path / "s" / "commitlog")
        full = True
        pwrite = disk.pwrite

        def no_room_at_the_slave(fd, data, offset):
            if full and os.readlink(f"/proc/self/fd/{fd}").startswith(log_folder):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return pwrite(fd, data, offset)

        monkeypatch.setattr(disk, "pwrite", no_room_at_the_slave)
        late = await m.send(body=b"late")
        assert late.code in (ResponseCode.FLUSH_SLAVE_TIMEOUT, ResponseCode.SLAVE_NOT_AVAILABLE)
        assert "disk is full" in s.service.replication.service.following_problem
        full = False
        await level(s, m)
        assert log_of(s) == log_of(m)
        await in_sync(m)
        assert (await m.send(body=b"after")).code == 0
        assert s.service.replication.service.following_problem == ""


async def test_r24_a_slave_fetches_again_what_its_background_check_finds(tmp_path, monkeypatch):
    """No consumer reads there; the damaged bytes are kept aside."""
    monkeypatch.setattr(scrub, "_FIRST_MS", 0)
    rate = {"scrub_bytes_per_second": 1 << 30}
    async with master(tmp_path / "m") as m, slave(tmp_path / "s", m, **rate) as s:
        await in_sync(m)
        for n in range(20):
            assert (await m.send(body=b"x%d" % n)).code == 0
        with (tmp_path / "s" / "commitlog" / f"{0:020d}").open("r+b") as file:
            file.seek(len(log_of(m)) // 2)
            file.write(bytes(8))
        store = s.service.store
        store.scrub._not_before_ms = 0
        await until(lambda: store.scrub.found_total == 1)
        await until(lambda: not store.trust.reason)
        await level(s, m)
        assert log_of(s) == log_of(m)
        assert any((tmp_path / "s" / "truncated").iterdir())
        await in_sync(m)
        assert (await m.send(body=b"after")).code == 0


async def test_a_java_style_write_that_no_slave_takes_in_time_is_answered_12(tmp_path):
    """The slave is connected and near, but its report does not come."""
    async with master(tmp_path / "m", slave_timeout=300) as m, slave(tmp_path / "s", m) as s:
        await in_sync(m)
        shell = s.service.replication.ha._slave
        shell.core.turn_ended = lambda *_: []
        reply = await m.send()
        assert reply.code == ResponseCode.FLUSH_SLAVE_TIMEOUT
        assert (await m.pull()).code == 0, "it is stored, and consumers see it"


STOCK = """\
brokerClusterName=DefaultCluster
brokerName=broker-a
brokerId={id}
deleteWhen=04
fileReservedTime=48
brokerRole={role}
flushDiskType=ASYNC_FLUSH
"""


@pytest.mark.parametrize(
    ("role", "broker_id", "needed", "is_slave"),
    [("SYNC_MASTER", 0, 1, False), ("ASYNC_MASTER", 0, 0, False), ("SLAVE", 1, 0, True)],
)
def test_rocketmqs_stock_files_are_taken_as_they_are(tmp_path, role, broker_id, needed, is_slave):
    """conf/2m-2s-sync and conf/2m-2s-async: no controllers are named, so the role counts."""
    sections = stock_sections(tmp_path, role, broker_id)
    assert not sections.controller_mode
    assert sections.needed_slaves == needed
    assert sections.is_classic_slave is is_slave


def test_heartbeats_are_rocketmqs_there(tmp_path):
    """5 s, and a file that says so starts; under controllers so rare ones are refused."""
    assert stock_sections(tmp_path, "SYNC_MASTER", 0).ha.classic_heartbeat_ms == 5_000
    rare = "haSendHeartbeatInterval=5000\n"
    assert stock_sections(tmp_path, "SLAVE", 1, rare).ha.classic_heartbeat_ms == 5_000
    with pytest.raises(ValueError, match="haSlaveSilentTime is 600 ms"):
        stock_sections(tmp_path, "SLAVE", -1, rare + "controllerAddr=127.0.0.1:9878\n")
    with pytest.raises(ValueError, match="haHousekeepingInterval is 9000 ms"):
        stock_sections(tmp_path, "SLAVE", 1, "haHousekeepingInterval=9000\n")


def test_a_slave_needs_an_id_of_its_own(tmp_path):
    with pytest.raises(ValueError, match="brokerId is 0: a broker with brokerRole SLAVE"):
        stock_sections(tmp_path, "SLAVE", 0)


def test_named_controllers_outweigh_the_role(tmp_path):
    """As with Java, where such a file says SLAVE and brokerId -1."""
    sections = stock_sections(tmp_path, "SLAVE", -1, "controllerAddr=127.0.0.1:9878\n")
    assert sections.controller_mode
    assert not sections.is_classic_slave


def stock_sections(folder, role, broker_id, more=""):
    path = folder / "broker.properties"
    path.write_text(STOCK.format(id=broker_id, role=role) + more)
    loaded = load_settings(path, SECTIONS, environ={})
    return BrokerSections(loaded["broker"], loaded["store"], loaded["ha"], loaded["replicas"])
