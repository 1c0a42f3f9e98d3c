"""Tables that are larger than a frame come to slaves of ours in pages (R58)."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from lone_broker import tables_in

from batonmq.broker.role_gate import RoleGate
from batonmq.broker.tables import slave_sync
from batonmq.broker.tables.broker_tables import BrokerTables
from batonmq.broker.tables.slave_sync import (
    BODIES_KEPT,
    EXT_BODY_FROM,
    EXT_BODY_ID,
    EXT_MASTER_EPOCH,
    EXT_PAGES,
    Followed,
    SlaveSourceProcessor,
    SlaveSynchronize,
)
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.remoting.command import FRAME_SIZE_MAX, RemotingCommand
from batonmq.remoting.connection import Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer


def source(path: Path) -> tuple[BrokerTables, Processors]:
    gate = Mock(spec=RoleGate, is_master=True, master_epoch=5)
    own = tables_in(path)
    processors = Processors()
    SlaveSourceProcessor(own, gate, lambda: 0, lambda: 0, lambda: 0).register(processors)
    return own, processors


async def test_r58_offsets_of_18_mb_reach_a_slave(tmp_path):
    master, processors = source(tmp_path / "master")
    for number in range(72_000):
        master.offsets.commit(f"g{number}".ljust(240, "x"), "T", 0, number)
    assert len(master.offsets.wrapper().encode()) > FRAME_SIZE_MAX
    own = tables_in(tmp_path / "own")

    server, client = RemotingServer(processors), RemotingClient()
    address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    followed = Followed(address, 5)
    sync = SlaveSynchronize(client, own, 1000, lambda: None, Mock(max_phy_offset=0))
    sync.followed, sync._by_main_port, sync._failures = followed, True, 8
    assert await sync.synchronize(followed) and sync.held_epoch == 5
    await client.close()
    await server.close()
    assert own.offsets.query("g71999".ljust(240, "x"), "T", 0) == 71_999


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
    first = await ask({EXT_PAGES: "100"})
    assert len(first.body) == 100 and first.ext[EXT_MASTER_EPOCH] == "5"
    name = first.ext[EXT_BODY_ID]
    second = await ask({EXT_BODY_ID: name, EXT_BODY_FROM: "100"})
    assert second.body == whole[100:200]
    for wrong in (
        {EXT_BODY_ID: "x", EXT_BODY_FROM: "0"},
        {EXT_BODY_ID: name, EXT_BODY_FROM: "-1"},
    ):
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
