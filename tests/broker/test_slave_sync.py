"""What a slave takes over from its master's tables, and what it does not (R31); tables that are
larger than a frame come in pages (R58)."""

import asyncio
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lone_broker import Rig, lone_broker, pop_header, tables_in, unconfirmed, until

from batonmq.broker.role_gate import RoleGate
from batonmq.broker.tables import slave_sync
from batonmq.broker.tables.broker_tables import BrokerTables
from batonmq.broker.tables.slave_sync import (
    BODIES_KEPT,
    EXT_BODY_FROM,
    EXT_BODY_ID,
    EXT_BODY_SIZE,
    EXT_CARRIED_OUT,
    EXT_MASTER_EPOCH,
    EXT_OFFSET_VERSION,
    EXT_PAGES,
    EXT_TABLE_VERSION,
    Followed,
    SlaveSourceProcessor,
    SlaveSynchronize,
)
from batonmq.protocol.bodies import SubscriptionGroupWrapper, TopicConfigAndMappingSerializeWrapper
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BrokerRefusal, RemoteProtocolError
from batonmq.protocol.records.codec import decode_records
from batonmq.remoting.command import FRAME_SIZE_MAX, RemotingCommand
from batonmq.remoting.connection import Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer

MASTER = Followed("h:10911", 4)


ANSWERS = {EXT_MASTER_EPOCH: "4", EXT_OFFSET_VERSION: "v1", EXT_TABLE_VERSION: "t1"}


def slave_of(
    master: Any, own: BrokerTables, *, every_ms: int = 1_000, log: Any = None
) -> SlaveSynchronize:
    """It follows MASTER; `log` is the one that it has."""
    log = log or Mock(max_phy_offset=0)
    sync = SlaveSynchronize(master, own, every_ms, lambda: None, log)
    sync.follow(MASTER)
    return sync


def offsets_of_master(folder: Path, epoch: int) -> bytes:
    other = tables_in(folder).offsets
    other.set_state_version(epoch)
    other.commit("g", "T", 0, 70)
    return other.wrapper().encode()


class MasterTables:
    """A client that reaches a master with these tables; `ext` goes with each answer."""

    def __init__(self, folder: Path, offsets: bytes = b"", **ext: str) -> None:
        self.tables = tables_in(folder)
        self.offsets = offsets
        self.ext = ext
        self.asked: list[RemotingCommand] = []

    @property
    def fetches(self) -> int:
        """How often the tables were fetched; offsets are asked for each time."""
        return sum(one.code == RequestCode.GET_ALL_TOPIC_CONFIG for one in self.asked)

    @property
    def versions(self) -> list[str]:
        """Which offsets the slave said it has, each time that it asked."""
        return [one.ext[EXT_OFFSET_VERSION] for one in self.asked if EXT_OFFSET_VERSION in one.ext]

    async def invoke(
        self, address: str, request: RemotingCommand, timeout_ms: int
    ) -> RemotingCommand:
        self.asked.append(request)
        match request.code:
            case RequestCode.GET_ALL_CONSUMER_OFFSET:
                body = self.offsets
            case RequestCode.GET_ALL_DELAY_OFFSET:
                body = self.tables.delays.wrapper().encode()
            case RequestCode.GET_ALL_TOPIC_CONFIG:
                body = TopicConfigAndMappingSerializeWrapper().encode()
            case RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG:
                body = SubscriptionGroupWrapper().encode()
            case RequestCode.BATON_GET_QUEUE_LOCKS:
                body = self.tables.locks.wrapper().encode()
            case _:
                body = self.tables.request_modes.wrapper().encode()
        return RemotingCommand.response_to(request, ext=dict(self.ext), body=body)


@pytest.mark.parametrize("epoch, taken", [(3, False), (-1, False), (4, True), (5, True)])
def test_r31_offsets_of_a_lower_epoch_are_not_taken_over(tmp_path, epoch, taken):
    """Who answers at the master's address may be a deposed one, or none any more (-1)."""
    own = tables_in(tmp_path / "own")
    body = offsets_of_master(tmp_path / "master", max(epoch, 0))
    ext = {EXT_MASTER_EPOCH: str(epoch), EXT_OFFSET_VERSION: "v1"}
    master = MasterTables(tmp_path / "other", body, **ext)
    sync = slave_of(master, own)
    for _ in range(2):
        asyncio.run(sync.synchronize(MASTER))
    assert own.offsets.query("g", "T", 0) == (70 if taken else -1)
    assert bool(master.fetches) == taken
    assert master.versions == ["", "v1" if taken else ""]


def test_r31_an_answer_that_another_role_change_overtook_is_dropped(tmp_path):
    own = tables_in(tmp_path / "own")
    body = offsets_of_master(tmp_path / "master", 4)

    async def answer(address: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        sync.followed = Followed("other:10911", 5)
        return RemotingCommand.response_to(request, ext={EXT_MASTER_EPOCH: "4"}, body=body)

    sync = slave_of(Mock(invoke=answer), own)
    asyncio.run(sync.synchronize(MASTER))
    assert own.offsets.query("g", "T", 0) == -1


async def test_r31_an_answer_that_makes_no_sense_is_reported_and_asked_for_again(
    tmp_path, monkeypatch
):
    """It says that it is the first page of a table, and not of which. Without the fetches a slave
    would keep old offsets for good, and nothing would show that."""
    monkeypatch.setattr(slave_sync, "RETRY_FIRST_MS", 1)
    master = MasterTables(tmp_path / "master", **{EXT_MASTER_EPOCH: "4", EXT_BODY_SIZE: "1000"})
    sync = slave_of(master, tables_in(tmp_path / "own"), every_ms=1)
    sync.start()
    await until(lambda: "batonBodyId" in sync.failure)
    del master.ext[EXT_BODY_SIZE]
    await until(lambda: sync.held_epoch == 4 and not sync.failure)
    await sync.close()


@pytest.mark.parametrize("failure", [AssertionError("rule"), OSError("no space left on device")])
async def test_a_broken_rule_behind_the_tables_ends_the_broker(tmp_path, failure):
    """`on_tables` runs the core of the HA slave: the loop's handler hears of a rule that does not
    hold. After any other error the fetches continue."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: reported.append(context["exception"])
    )
    master = MasterTables(tmp_path / "master", offsets_of_master(tmp_path / "other", 4), **ANSWERS)
    sync = slave_of(master, tables_in(tmp_path / "own"), every_ms=1)
    sync.on_tables = on_tables = Mock(side_effect=failure)
    sync.start()
    await until(lambda: on_tables.called and sync._failures == 0)
    assert reported == [failure] * isinstance(failure, AssertionError)
    await sync.close()


async def test_r42_tables_are_held_when_all_of_them_are_here_and_of_one_master(tmp_path):
    """1 topics change while they are fetched: again. 2 they are here. 3 another master: of it
    nothing is here, whatever its versions are."""
    own = tables_in(tmp_path / "own")
    master = MasterTables(tmp_path / "master", **ANSWERS | {EXT_MASTER_EPOCH: "5"})
    held: list[int] = []
    changes = ["NewTopic"]
    """What the log shows while the tables are fetched for the first time."""

    async def invoke(address: str, request: RemotingCommand, ms: int) -> RemotingCommand:
        if request.code == RequestCode.GET_ALL_DELAY_OFFSET and changes:
            own.topics.create_by_message(changes.pop(), 4)
        return await master.invoke(address, request, ms)

    sync = slave_of(Mock(invoke=invoke), own)
    sync.on_tables = held.append
    assert not await sync.synchronize(MASTER) and held == []
    assert await sync.synchronize(MASTER) and held == [5]
    assert await sync.synchronize(MASTER) and master.fetches == 2
    other = Followed("other:10911", 5)
    sync.follow(other)
    assert await sync.synchronize(other) and held == [5, 5]
    assert master.fetches == 3
    assert master.versions == ["", "v1", "v1", ""]


async def _popped(rig: Rig) -> list[int]:
    """The offsets in queue 0 of T that group g gets of the broker's POP."""
    reply = await rig.ask(200050, pop_header(queueId=0, maxMsgNums=4))
    return [message.queue_offset for message in decode_records(reply.body)]


async def test_r30_an_unclean_winner_gives_what_was_popped_behind_the_end_of_its_log(
    tmp_path, monkeypatch
):
    """1. A slave has eight messages, and no more of the log. 2. A group pops four of them; the
    record that says so is not at the slave, but its port for tables answers. 3. The slave is
    elected uncleanly: by its log no consumer has these four, so they are given."""
    monkeypatch.setattr(slave_sync, "LOG_WAIT_S", 0.0)
    async with lone_broker(tmp_path / "master") as master:
        for _ in range(8):
            assert (await master.send()).code == 0
    shutil.copytree(tmp_path / "master", tmp_path / "slave")
    async with lone_broker(tmp_path / "master") as master, lone_broker(tmp_path / "slave") as slave:
        assert await _popped(master) == [0, 1, 2, 3]
        assert master.service.tables.offsets.query("g", "T", 0) == 4
        sync, followed = slave.service.slave_sync, Followed(master.service.address, 0)
        sync.followed = followed
        assert not await sync.synchronize(followed)
        assert "T" in slave.service.tables.topics
        assert sync.held_epoch == -1, "R42: so far it does not join"
        assert await _popped(slave) == [0, 1, 2, 3]


@pytest.mark.parametrize("progress", ["offsets", "delays"])
async def test_r30_progress_waits_for_the_log_that_it_rests_on(tmp_path, progress, monkeypatch):
    """Groups have popped, and delays are delivered, by records up to 100. The log here ends at 99,
    then it holds them."""
    own = tables_in(tmp_path / "own")
    master = MasterTables(tmp_path / "master", offsets_of_master(tmp_path / "other", 4), **ANSWERS)
    master.tables.delays.set_all({1: 7})
    log = Mock(max_phy_offset=99)
    held: list[int] = []

    async def answer(address: str, request: RemotingCommand, ms: int) -> RemotingCommand:
        rests_on = {"offsets": RequestCode.GET_ALL_CONSUMER_OFFSET}.get(
            progress, RequestCode.GET_ALL_DELAY_OFFSET
        )
        master.ext[EXT_CARRIED_OUT] = "100" if request.code == rests_on else "99"
        return await master.invoke(address, request, ms)

    sync = slave_of(Mock(invoke=answer), own, log=log)
    sync.on_tables = held.append
    monkeypatch.setattr(slave_sync, "LOG_WAIT_S", 0.0)
    for _ in range(2):  # the other tables are here after the first time
        assert not await sync.synchronize(MASTER)
    assert own.offsets.query("g", "T", 0) == (-1 if progress == "offsets" else 70)
    assert own.delays.table == ({} if progress == "delays" else {1: 7})
    assert held == []
    monkeypatch.setattr(slave_sync, "LOG_WAIT_S", 60.0)
    again = asyncio.ensure_future(sync.synchronize(MASTER))
    await asyncio.sleep(0)
    log.max_phy_offset = 100
    assert await again
    assert own.offsets.query("g", "T", 0) == 70 and own.delays.table == {1: 7}
    assert held == [4]


async def test_r30_progress_of_a_master_that_is_followed_no_more_waits_for_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(slave_sync, "LOG_WAIT_S", 3_600.0)
    own = tables_in(tmp_path / "own")
    body = offsets_of_master(tmp_path / "master", 4)
    waits = asyncio.Event()

    class Log:
        @property
        def max_phy_offset(self) -> int:
            waits.set()
            return 0

    async def answer(address: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        ext = {EXT_MASTER_EPOCH: "4", EXT_CARRIED_OUT: "100"}
        return RemotingCommand.response_to(request, ext=ext, body=body)

    sync = slave_of(Mock(invoke=answer), own, log=Log())
    asked = asyncio.ensure_future(sync.synchronize(MASTER))
    async with asyncio.timeout(5):
        await waits.wait()
        sync.follow(Followed("other:10911", 5))
        assert not await asked
    assert own.offsets.query("g", "T", 0) == -1


async def test_r30_a_master_says_of_all_progress_which_log_it_rests_on(rig):
    """Its confirmed end: what lies above may be cut."""
    assert (await rig.send("T")).code == 0
    store = rig.service.store
    with unconfirmed(rig):
        waits = asyncio.ensure_future(rig.send("T"))
        await until(lambda: store.max_phy_offset > store.confirm_offset)
        for code in (RequestCode.GET_ALL_CONSUMER_OFFSET, RequestCode.GET_ALL_DELAY_OFFSET):
            reply = await rig.ask(code)
            assert reply.ext[EXT_CARRIED_OUT] == str(store.confirm_offset)
    assert (await waits).code == 0


@pytest.mark.parametrize("error", [None, "no such code"])
def test_r42_tables_that_are_no_longer_followed_are_reported(tmp_path, monkeypatch, error):
    """By an answer that is never taken (another epoch) as by one that refuses."""
    monkeypatch.setattr(slave_sync, "STALE_AFTER_S", 0.0)
    master = MasterTables(tmp_path / "master", offsets_of_master(tmp_path / "other", 4), **ANSWERS)
    reported: list[int] = []
    stale = False

    async def answer(address: str, request: RemotingCommand, ms: int) -> RemotingCommand:
        if stale and error:
            return RemotingCommand.response_to(request, 1, error)
        master.ext[EXT_MASTER_EPOCH] = "-1" if stale else "4"
        return await master.invoke(address, request, ms)

    async def follow() -> None:
        nonlocal stale
        sync = slave_of(Mock(invoke=answer), tables_in(tmp_path / "own"), every_ms=1)
        sync.on_tables = reported.append
        sync.start()
        try:
            await until(lambda: reported == [4] and not sync.failure)
            stale = True
            await until(lambda: reported == [4, -1] and bool(sync.failure))
            assert sync.held_epoch == -1
            stale = False
            await until(lambda: reported == [4, -1, 4] and not sync.failure)
        finally:
            await sync.close()

    asyncio.run(follow())


async def test_r31_offsets_that_a_new_log_cleared_are_fetched_though_the_master_changed_none(
    tmp_path,
):
    """1. The slave has the offsets of version v1, and asks whether there are newer ones. 2. Before
    the answer comes its log begins again: it has no offsets any more. 3. The answer is that v1 is
    the newest, without a table. With it, it would join and be electable with no offsets (R42)."""
    master = MasterTables(tmp_path / "master", offsets_of_master(tmp_path / "other", 4), **ANSWERS)
    own = tables_in(tmp_path / "own")

    async def invoke(address: str, request: RemotingCommand, ms: int) -> RemotingCommand:
        reply = await master.invoke(address, request, ms)
        if request.ext.get(EXT_OFFSET_VERSION) == "v1":
            own.offsets.clear_for_new_log()
            sync.fetch_offsets_again()
            reply.body = b""
        return reply

    sync = slave_of(Mock(invoke=invoke), own)
    assert await sync.synchronize(MASTER)
    assert not await sync.synchronize(MASTER)
    assert await sync.synchronize(MASTER) and own.offsets.query("g", "T", 0) == 70


async def test_r42_stale_tables_that_could_not_be_reported_are_reported_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(slave_sync, "STALE_AFTER_S", 0.0)
    monkeypatch.setattr(slave_sync, "RETRY_FIRST_MS", 1)
    master = MasterTables(tmp_path / "master", offsets_of_master(tmp_path / "other", 4), **ANSWERS)
    sync = slave_of(master, tables_in(tmp_path / "own"), every_ms=1)
    sync.on_tables = reported = Mock(side_effect=[None, OSError("no"), None])
    sync.start()
    await until(lambda: sync.held_epoch == 4)
    master.ext[EXT_MASTER_EPOCH] = "-1"
    await until(lambda: sync.held_epoch == -1)
    assert [call.args[0] for call in reported.call_args_list] == [4, -1, -1]
    await sync.close()


async def test_a_table_of_absurd_size_is_not_collected(tmp_path):
    ext = {EXT_MASTER_EPOCH: "4", EXT_BODY_SIZE: str(1 << 40), EXT_BODY_ID: "a"}
    master = MasterTables(tmp_path / "master", b"x" * 100, **ext)
    sync = slave_of(master, tables_in(tmp_path / "own"), every_ms=1)
    with pytest.raises(RemoteProtocolError, match="announces a table of 1099511627776 bytes"):
        await sync.synchronize(MASTER)
    assert len(master.asked) == 1


def source(path: Path) -> tuple[BrokerTables, Processors]:
    gate = Mock(spec=RoleGate, is_master=True, master_epoch=5)
    own = tables_in(path)
    processors = Processors()
    SlaveSourceProcessor(own, gate, lambda: 0, lambda: 0, lambda: 0).register(processors)
    return own, processors


async def test_r58_a_table_of_many_pages_reaches_a_slave(tmp_path, monkeypatch):
    assert slave_sync.PAGE_SIZE < FRAME_SIZE_MAX
    monkeypatch.setattr(slave_sync, "PAGE_SIZE", 1_000)
    master, processors = source(tmp_path / "master")
    for number in range(720):
        master.offsets.commit(f"g{number}", "T", 0, number)
    assert len(master.offsets.wrapper().encode()) > 10 * 1_000
    own = tables_in(tmp_path / "own")

    server, client = RemotingServer(processors), RemotingClient()
    address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    followed = Followed(address, 5)
    sync = slave_of(client, own)
    sync.followed, sync._by_main_port, sync._failures = followed, True, 8
    assert await sync.synchronize(followed) and sync.held_epoch == 5
    await client.close()
    await server.close()
    assert own.offsets.query("g719", "T", 0) == 719


async def test_r58_what_is_kept_for_pages_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(slave_sync, "PAGE_SIZE", 100)
    master, processors = source(tmp_path / "master")
    for number in range(20):
        master.offsets.commit(f"g{number}", "T", 0, number)
    whole = master.offsets.wrapper().encode()
    handler = processors.handlers[RequestCode.GET_ALL_CONSUMER_OFFSET]

    async def ask(ext: dict[str, str]) -> RemotingCommand:
        request = RemotingCommand.request(RequestCode.GET_ALL_CONSUMER_OFFSET, ext)
        reply = await handler(request, Mock())
        assert isinstance(reply, RemotingCommand)
        return reply

    java = await ask({})
    assert java.body == whole and EXT_BODY_ID not in java.ext
    # The page that is asked for is larger than any that is sent.
    assert len((await ask({EXT_PAGES: "1000000"})).body) == 100
    first = await ask({EXT_PAGES: "100"})
    assert len(first.body) == 100 and first.ext[EXT_MASTER_EPOCH] == "5"
    name = first.ext[EXT_BODY_ID]
    second = await ask({EXT_BODY_ID: name, EXT_BODY_FROM: "100"})
    assert second.body == whole[100:200]
    for wrong in ({EXT_BODY_ID: "x", EXT_BODY_FROM: "0"}, {EXT_BODY_ID: name, EXT_BODY_FROM: "-1"}):
        with pytest.raises(BrokerRefusal, match="ask again"):
            await ask(wrong)
    for _ in range(BODIES_KEPT):
        await ask({EXT_PAGES: "100"})
    with pytest.raises(BrokerRefusal, match="ask again"):
        await ask({EXT_BODY_ID: name, EXT_BODY_FROM: "100"})


async def test_r31_pages_of_a_body_that_an_earlier_process_cut_are_refused(tmp_path):
    """A slave would put a table together of two, if the master restarts between two pages."""
    asked = RemotingCommand.request(RequestCode.GET_ALL_CONSUMER_OFFSET, {EXT_PAGES: "10"})
    before, after = (source(tmp_path / name)[1] for name in ("before", "after"))
    first = await before.handlers[asked.code](asked, Mock())
    await after.handlers[asked.code](asked, Mock())
    name = {EXT_BODY_ID: first.ext[EXT_BODY_ID], EXT_BODY_FROM: "10"}
    with pytest.raises(BrokerRefusal, match="ask again"):
        await after.handlers[asked.code](RemotingCommand.request(asked.code, name), Mock())
