"""A broker whose port listens while its store is still being opened: what it does with requests."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lone_broker import Rig, lone_broker, pull_header, sections_of, send_header, until

from batonmq.broker.broker_endpoint import STARTING
from batonmq.broker.relay import NOT_STORED, WAIT_MS
from batonmq.broker.service import BrokerService
from batonmq.protocol.bodies import BrokerMemberGroup, GetBrokerMemberGroupResponseBody
from batonmq.protocol.codes import (
    MASTER_ADDRESS_HINT,
    RELAY_FIELD,
    LanguageCode,
    RequestCode,
    ResponseCode,
)
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.records.codec import decode_records
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from batonmq.runtime.clock import boot_ms

OFFSET_OF = {"topic": "T", "queueId": "0"}


class Start:
    """A broker in the middle of its start: `go_on` lets the store be opened. `master` is another
    broker, which a name server knows once `named` is set."""

    def __init__(self, folder: Path, master: Rig, name_server: str, named: asyncio.Event) -> None:
        config = sections_of(folder, broker={"namesrv_addr": name_server})
        self.service = BrokerService(config, lambda error: None)
        self.service.relay.enabled = True
        self.master, self.named = master, named
        self.client = RemotingClient()
        self.go_on = threading.Event()
        opens = self.service._open_store

        def wait_and_open() -> None:
            self.go_on.wait(20)
            opens()

        self.service._open_store = wait_and_open
        self.started = asyncio.ensure_future(self.service.start())

    async def listening(self) -> None:
        await until(lambda: self.service.endpoint.is_listening)

    def ask(
        self,
        code: int = RequestCode.SEND_MESSAGE_V2,
        ext: dict[str, str] | None = None,
        language: LanguageCode = LanguageCode.JAVA,
        **other: str,
    ) -> asyncio.Future[RemotingCommand]:
        header = send_header("T", 0, {}) if ext is None else ext
        request = RemotingCommand.request(code, header | other, b"x")
        request.language = language
        return asyncio.ensure_future(self.client.invoke(self.service.address, request, 5000))


@pytest.fixture
@contextlib.asynccontextmanager
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with asyncio.timeout(20), lone_broker(tmp_path / "b") as master:
        named = asyncio.Event()

        def members(request: RemotingCommand, _: Connection) -> RemotingCommand:
            known = {0: master.service.address} if named.is_set() else {}
            group = BrokerMemberGroup(broker_addrs=known, broker_name="broker-a")
            body = GetBrokerMemberGroupResponseBody(broker_member_group=group).encode()
            return RemotingCommand.response_to(request, body=body)

        processors = Processors()
        processors.register(RequestCode.GET_BROKER_MEMBER_GROUP, members)
        name_server = RemotingServer(processors)
        port = await name_server.listen("127.0.0.1", 0)
        start = Start(tmp_path / "a", master, f"127.0.0.1:{port}", named)
        try:
            await start.listening()
            yield start
        finally:
            start.go_on.set()
            (failed,) = await asyncio.gather(start.started, return_exceptions=True)
            await start.client.close()
            if failed is None:
                await start.service.close()
            await name_server.close()


async def test_sends_and_pulls_go_to_the_master_before_the_store_is_open(start):
    early = start.ask()
    await until(lambda: len(start.service.relay) == 1)
    start.named.set()
    assert (await early).code == 0
    assert (await start.ask()).code == 0
    pulled = await start.ask(RequestCode.PULL_MESSAGE, pull_header())
    assert len(decode_records(pulled.body)) == 2
    commit = {"consumerGroup": "g", **OFFSET_OF, "commitOffset": "2"}
    assert (await start.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0
    assert start.master.service.tables.offsets.query("g", "T", 0) == 2
    assert not start.started.done()


async def test_nothing_is_answered_from_a_store_that_is_not_open(start):
    asked = [start.ask(RequestCode.GET_MAX_OFFSET, OFFSET_OF) for _ in range(3)]
    send = start.ask()
    await until(lambda: len(start.service.endpoint) == 3 and len(start.service.relay) == 1)
    start.go_on.set()
    await start.started
    assert [(await one).ext["offset"] for one in asked] == ["0", "0", "0"]
    assert (await send).code == 0, "it is the master itself"
    assert len(start.service.endpoint) == len(start.service.relay) == 0
    assert start.service.relay.passed_on == 0


async def test_what_waits_too_long_is_14(start):
    endpoint = start.service.endpoint
    asked = [start.ask(RequestCode.GET_MAX_OFFSET, OFFSET_OF), start.ask()]
    await until(lambda: len(endpoint) == len(endpoint.relay) == 1)
    now_ms = boot_ms()
    endpoint.tick(now_ms + WAIT_MS - 100)
    assert len(endpoint) == len(endpoint.relay) == 1
    endpoint.tick(now_ms + WAIT_MS)
    codes = {(await one).code for one in asked}
    assert codes == {ResponseCode.SERVICE_NOT_AVAILABLE}


async def test_no_more_waits_than_fits(start, monkeypatch):
    monkeypatch.setattr("batonmq.broker.broker_endpoint.HELD_MAX", 1)
    first = start.ask(RequestCode.GET_MAX_OFFSET, OFFSET_OF)
    await until(lambda: len(start.service.endpoint) == 1)
    reply = await start.ask(RequestCode.GET_MAX_OFFSET, OFFSET_OF)
    assert (reply.code, reply.remark) == (ResponseCode.SERVICE_NOT_AVAILABLE, STARTING)
    start.go_on.set()
    assert (await first).code == 0


async def test_our_own_client_is_sent_to_the_master(start):
    assert (await start.ask(language=LanguageCode.PYTHON)).ext == {}
    start.named.set()
    assert (await start.ask()).code == 0
    reply = await start.ask(language=LanguageCode.PYTHON)
    assert reply.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert reply.ext[MASTER_ADDRESS_HINT] == start.master.service.address


async def test_a_relaying_member_learns_that_nothing_was_stored(start):
    """It took this one for the master, of an earlier life: its client's send waits there."""
    reply = await start.ask(**{RELAY_FIELD: "7@127.0.0.1:1"})
    assert (reply.code, reply.remark) == (ResponseCode.SERVICE_NOT_AVAILABLE, STARTING)
    assert reply.ext == NOT_STORED


async def test_a_start_that_fails_closes_the_endpoint_and_writes_nothing(start, tmp_path):
    def fail() -> None:
        raise CorruptLogError("commitlog", 0, "no record")

    start.service.store.open = fail
    asked = start.ask(RequestCode.GET_MAX_OFFSET, OFFSET_OF)
    await until(lambda: len(start.service.endpoint) == 1)
    start.go_on.set()
    with pytest.raises(CorruptLogError):
        await start.started
    assert (await asked).code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert not start.service.endpoint.server.connections
    assert not list((tmp_path / "a").rglob("*.json"))
