"""R42: a slave fetches the tables of its master by either port, retries, and reports it."""

import asyncio
import contextlib
from unittest.mock import Mock

import pytest
from lone_broker import tables_in
from test_slave_sync import MasterTables

from batonmq.broker.tables.slave_sync import (
    EXT_CARRIED_OUT,
    EXT_MASTER_EPOCH,
    EXT_OFFSET_VERSION,
    EXT_TABLE_VERSION,
    Followed,
    SlaveSynchronize,
)
from batonmq.protocol.errors import ConnectError
from tests.shared.waiting import until

MAIN, VIP = "10.0.0.1:10911", "10.0.0.1:10909"


class Master(MasterTables):
    """Answers at both ports of a master, and notes where it was asked."""

    def __init__(self, folder):
        offsets = b'{"dataVersion":{},"offsetTable":{"T@G":{"0":5}}}'
        ext = {EXT_MASTER_EPOCH: "3", EXT_TABLE_VERSION: "1", EXT_CARRIED_OUT: "1000"}
        super().__init__(folder, offsets, **ext)
        self.tables.delays.set_all({1: 7, 3: 2})
        self.blocked: set[str] = set()
        self.ports: list[str] = []
        self.limits: list[int] = []

    async def invoke(self, address, request, timeout_ms):
        self.ports.append(address)
        self.limits.append(timeout_ms)
        await asyncio.sleep(0)
        if address in self.blocked:
            raise ConnectError(address, "no answer")
        reply = await super().invoke(address, request, timeout_ms)
        if request.ext.get(EXT_OFFSET_VERSION) == "1":
            reply.body = b""
        return reply


@pytest.fixture
@contextlib.asynccontextmanager
async def scene(tmp_path):
    """A master, a slave that follows it in epoch 3, the epochs that it reported, its tables."""
    master, reported, tables = Master(tmp_path / "master"), [], tables_in(tmp_path)
    sync = SlaveSynchronize(master, tables, 40, lambda: None, Mock(max_phy_offset=1000))
    sync.on_tables = reported.append
    sync.start()
    try:
        yield master, sync, reported, tables
    finally:
        await sync.close()


async def test_r42_complete_tables_are_reported_once(scene):
    master, sync, reported, tables = scene
    master.ext[EXT_OFFSET_VERSION] = "1"
    sync.follow(Followed(MAIN, 3))
    await until(lambda: reported)
    assert reported == [3] and sync.held_epoch == 3 and not sync.failure
    assert tables.offsets.query("G", "T", 0) == 5
    assert tables.delays.table == {1: 7, 3: 2}
    assert set(master.ports) == {VIP}
    asked = len(master.ports)
    await until(lambda: len(master.ports) >= asked + 3)
    assert reported == [3], "once for each epoch"
    sync.follow(Followed(MAIN, 4))
    assert sync.held_epoch == -1
    master.ext[EXT_MASTER_EPOCH] = "4"
    await until(lambda: reported == [3, 4])


async def test_r42_with_one_port_blocked_the_other_serves(scene):
    master, sync, reported, _tables = scene
    master.blocked = {VIP}
    master.ext[EXT_OFFSET_VERSION] = "1"
    sync.follow(Followed(MAIN, 3))
    await until(lambda: reported)
    assert not sync.failure, "one way is enough"
    asked = len(master.ports)
    await until(lambda: len(master.ports) >= asked + 4)
    assert set(master.ports[asked:]) == {MAIN}, "it stays with the port that answers"


async def test_r42_with_both_ports_blocked_it_is_reported_and_retried(scene):
    master, sync, reported, _tables = scene
    master.blocked = {VIP, MAIN}
    sync.follow(Followed(MAIN, 3))
    await until(lambda: "4 times" in sync.failure)
    assert not reported and MAIN in sync.failure and "no answer" in sync.failure
    assert master.ports[:4] == [VIP, MAIN, VIP, MAIN]
    assert master.limits[:4] == [1000, 1000, 2000, 2000], "big tables need longer"
    master.blocked = set()
    await until(lambda: reported)
    assert not sync.failure


async def test_r44_offsets_that_were_set_back_here_are_fetched_again(scene):
    """The master has not changed its own: by their version it would send none."""
    master, sync, reported, tables = scene
    master.ext[EXT_OFFSET_VERSION] = "1"
    sync.follow(Followed(MAIN, 3))
    await until(lambda: reported)
    tables.offsets.commit("G", "T", 0, 2)
    sync.fetch_offsets_again()
    await until(lambda: tables.offsets.query("G", "T", 0) == 5)


async def test_r42_a_failure_at_the_master_before_says_nothing_of_this_one(scene):
    master, sync, _told, _tables = scene
    master.blocked = {VIP, MAIN}
    sync.follow(Followed(MAIN, 3))
    await until(lambda: sync.failure)
    asked = asyncio.Event()

    async def hangs(address, request, timeout_ms):
        asked.set()
        await gone.wait()
        raise ConnectError(address, "no answer")

    gone, answers = asyncio.Event(), master.invoke
    master.invoke = hangs
    await asked.wait()
    master.invoke, master.blocked = answers, {"10.0.0.2:10909"}
    sync.follow(Followed("10.0.0.2:10911", 4))
    gone.set()
    await until(lambda: master.ports[-1].startswith("10.0.0.2"))
    first = next(at for at, address in enumerate(master.ports) if address[7] == "2")
    assert master.ports[first] == "10.0.0.2:10909", "the port that is asked first"


async def test_r42_a_master_that_has_not_opened_yet_is_asked_again_soon(scene):
    """It says -1: a slave learns of an election before the winner has opened."""
    master, sync, reported, _tables = scene
    master.ext[EXT_MASTER_EPOCH] = "-1"
    sync.follow(Followed(MAIN, 3))
    await until(lambda: len(master.ports) >= 3)
    assert not reported and sync.held_epoch == -1 and not sync.failure
    master.ext[EXT_MASTER_EPOCH] = "3"
    await until(lambda: reported)


async def test_r39_r42_a_master_that_waits_for_this_replica_to_carry_out_deletions(scene):
    """After a failover the new master's confirmOffset lags, and with minInSyncReplicas 2 it needs a
    second member before it rises. So the slave's join cannot wait for it: what the slave has is
    newer. Its own offsets stay, and it asks on."""
    master, sync, reported, tables = scene
    tables.offsets.deletions.end = 500
    master.ext[EXT_CARRIED_OUT] = "400"
    sync.follow(Followed(MAIN, 3))
    await until(lambda: reported)
    assert tables.offsets.query("G", "T", 0) == -1
    master.ext[EXT_CARRIED_OUT] = "500"
    await until(lambda: tables.offsets.query("G", "T", 0) == 5)
    assert reported == [3]
