"""A controller with a log of its own publishes to a scripted broker over real sockets."""

import asyncio
import errno
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from local_log import LocalLog
from test_remoting_endpoint import Endpoint

from batonmq.controller.config import ControllerConfig
from batonmq.controller.raft.log import Machine
from batonmq.controller.service import ControllerService
from batonmq.history.message import history_name
from batonmq.history.reader import HistoryReader
from batonmq.protocol.batch import split_batch
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.properties import decode_properties
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from tests.records import record_of as encode_record
from tests.shared.ports import free_ports

LIMIT_S = 10
TOPIC = "BATON_SYS_HISTORY"


class Broker:
    """The master as the controller meets it. `codes`: what the next sends are answered."""

    def __init__(self, port: int, *, topics: tuple[str, ...] = (TOPIC,)) -> None:
        self.address = f"127.0.0.1:{port}"
        self.topics = set(topics)
        self.messages: list[tuple[bytes, bytes]] = []
        self.codes: list[int] = []
        self.created: list[dict[str, str]] = []
        self.first = 0  # what stood before has expired
        self.silent = False
        self.asked = 0
        self.changed = asyncio.Event()
        processors = Processors()
        processors.register(RequestCode.GET_MAX_OFFSET, self._max_offset)
        processors.register(RequestCode.PULL_MESSAGE, self._pull)
        processors.register(RequestCode.UPDATE_AND_CREATE_TOPIC, self._create)
        processors.register(RequestCode.SEND_BATCH_MESSAGE, self._send)
        self._server = RemotingServer(processors)

    async def listen(self) -> None:
        await self._server.listen("127.0.0.1", int(self.address.rpartition(":")[2]))

    async def close(self) -> None:
        await self._server.close()

    @property
    def kinds(self) -> list[str]:
        return [json.loads(body)["kind"] for body, _ in self.messages]

    @property
    def names(self) -> list[Any]:
        return [history_name(decode_properties(properties)) for _, properties in self.messages]

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not done():
                await self.changed.wait()
                self.changed.clear()

    async def _max_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        self.asked += 1
        if self.silent:
            self.changed.set()
            await asyncio.Event().wait()
        return RemotingCommand.response_to(request, ext={"offset": self.first + len(self.messages)})

    async def _pull(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        asked, count = request.require_int("queueOffset"), request.require_int("maxMsgNums")
        if asked < self.first:
            ext = {"nextBeginOffset": self.first, "minOffset": self.first, "maxOffset": self.first}
            return RemotingCommand.response_to(request, ResponseCode.PULL_OFFSET_MOVED, ext=ext)
        begin = asked - self.first
        found = self.messages[begin : begin + count]
        host = socket.inet_aton("127.0.0.1") + (0).to_bytes(4)
        body = b"".join(
            encode_record(
                topic=TOPIC.encode(), queue_id=0, queue_offset=asked + at, physical_offset=0,
                flag=0,
                sys_flag=0, born_timestamp=1, born_host=host, store_timestamp=1, store_host=host,
                reconsume_times=0, prepared_transaction_offset=0, body=text, properties=properties,
                append_prop_crc=False,
            )
            for at, (text, properties) in enumerate(found)
        )  # fmt: skip
        ext = {"nextBeginOffset": asked + len(found), "minOffset": 0, "maxOffset": 9}
        return RemotingCommand.response_to(request, ext=ext, body=body)

    async def _create(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        self.created.append(dict(request.ext))
        self.topics.add(request.require("topic"))
        return RemotingCommand.response_to(request)

    async def _send(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        self.changed.set()
        if request.require("b") not in self.topics:
            return RemotingCommand.response_to(request, ResponseCode.TOPIC_NOT_EXIST, "no topic")
        assert (request.require("a"), request.require_int("e")) == ("BATON_SYS_CONTROLLER", 0)
        code = self.codes.pop(0) if self.codes else 0
        self.messages += [(each.body, each.properties) for each in split_batch(request.body)]
        return RemotingCommand.response_to(request, code, "as told" if code else None)


Scenario = Callable[[Endpoint, Broker], Awaitable[None]]
Play = Callable[..., None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scenario: Scenario, *, topics: tuple[str, ...] = (TOPIC,), **settings: Any) -> None:
        async def main() -> None:
            base = free_ports(30)
            log = LocalLog("n0", Machine())
            config = ControllerConfig(
                controller_peers=f"n0-127.0.0.1:{base}",
                bind_address="127.0.0.1",
                controller_store_path=str(tmp_path),
                history_topic_delay_ms=1,
                **settings,
            )
            service = ControllerService(config, replicated_log=log)
            broker = Broker(base + 10, topics=topics)
            await broker.listen()
            await service.start()
            endpoint = Endpoint(service, log)
            try:
                await service.gate.wait_open()
                await scenario(endpoint, broker)
            finally:
                await endpoint.client.close()
                await service.close()
                await broker.close()

        asyncio.run(main())

    return run


async def serve(endpoint: Endpoint, address: str, broker_id: int = 1) -> None:
    """A broker of this address comes in and is elected."""
    await endpoint.join(broker_id, address)
    elect = {"brokerName": "broker-a", "clusterName": "DefaultCluster", "brokerId": broker_id}
    assert (await endpoint.ask(RequestCode.CONTROLLER_ELECT_MASTER, elect)).code == 0


def file_lines(folder: Path) -> list[bytes]:
    return (folder / "history-n0.jsonl").read_bytes().splitlines()


def test_what_is_written_down_is_published(play: Play, tmp_path: Path) -> None:
    async def scenario(endpoint: Endpoint, broker: Broker) -> None:
        await serve(endpoint, broker.address)
        await broker.until(lambda: "pushed" in broker.kinds)
        assert [body for body, _ in broker.messages] == file_lines(tmp_path)
        assert broker.kinds[:3] == ["controller_leader_changed", "broker_registered", "elected"]
        assert endpoint.service.requests.metadata().problems == ()
        assert broker.created == []

    play(scenario)


def test_a_new_leader_goes_on_behind_the_newest_message(play: Play, tmp_path: Path) -> None:
    async def scenario(endpoint: Endpoint, broker: Broker) -> None:
        await serve(endpoint, broker.address)
        await broker.until(lambda: "pushed" in broker.kinds)
        before = len(broker.messages)
        endpoint.log.set_leading(False)
        endpoint.log.set_leading(True)
        await broker.until(lambda: broker.kinds.count("controller_leader_changed") == 2)
        assert len(broker.messages) == before + 1
        assert [body for body, _ in broker.messages] == file_lines(tmp_path)

    play(scenario)


def test_a_java_broker_gets_the_topic_first(play: Play, tmp_path: Path) -> None:
    async def scenario(endpoint: Endpoint, broker: Broker) -> None:
        await serve(endpoint, broker.address)
        await broker.until(lambda: "pushed" in broker.kinds)
        (created,) = broker.created
        assert created["topic"] == TOPIC
        assert (created["readQueueNums"], created["writeQueueNums"]) == ("1", "1")
        assert [body for body, _ in broker.messages] == file_lines(tmp_path)

    play(scenario, topics=())


def test_what_was_not_acknowledged_comes_again_under_the_same_name(
    play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(endpoint: Endpoint, broker: Broker) -> None:
        broker.codes = [ResponseCode.FLUSH_SLAVE_TIMEOUT]
        await serve(endpoint, broker.address)
        await broker.until(lambda: "pushed" in broker.kinds and not broker.codes)
        told = dict.fromkeys(broker.names)
        lines = [json.loads(line) for line in file_lines(tmp_path)]
        assert list(told) == [(e["log"], e["raft_index"], e.get("part", 0)) for e in lines]

    play(scenario)
    assert caplog.text.count("history_not_published") == 1


def test_a_master_that_hangs_is_left_for_its_successor(play: Play) -> None:
    async def scenario(endpoint: Endpoint, broker: Broker) -> None:
        broker.silent = True
        await serve(endpoint, broker.address)
        await broker.until(lambda: broker.asked > 0)  # and it says nothing
        other = Broker(free_ports(10))
        await other.listen()
        try:
            join = {"clusterName": "DefaultCluster", "brokerName": "broker-a"}
            await endpoint.join(2, other.address)
            alter = {"invokeTime": 1, **join, "masterBrokerId": 1, "masterEpoch": 1}
            body = json.dumps({"syncStateSet": [1, 2], "syncStateSetEpoch": 1}).encode()
            reply = await endpoint.ask(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, alter, body)
            assert reply.code == 0, reply.remark
            reply = await endpoint.ask(
                RequestCode.CONTROLLER_ELECT_MASTER,
                {**join, "brokerId": 2, "designateElect": True},
            )
            assert reply.code == 0, reply.remark
            await other.until(lambda: "elected" in other.kinds)
            assert broker.messages == []
        finally:
            await other.close()

    play(scenario)


def test_the_group_may_be_chosen_and_publication_switched_off(play: Play) -> None:
    async def scenario(endpoint: Endpoint, broker: Broker) -> None:
        await serve(endpoint, broker.address)
        settings = endpoint.service.config
        assert settings.history_topic_group == "none"
        change = b"historyTopicGroup=broker-z"
        reply = await endpoint.ask(RequestCode.UPDATE_CONTROLLER_CONFIG, body=change)
        assert reply.code == 0, reply.remark
        (problem,) = endpoint.service.requests.metadata().problems
        assert "broker-z" in problem
        assert broker.messages == []
        change = b"historyTopicGroup=broker-a"
        assert (await endpoint.ask(RequestCode.UPDATE_CONTROLLER_CONFIG, body=change)).code == 0
        await broker.until(lambda: "elected" in broker.kinds)

    play(scenario, history_topic_group="none")


def test_a_master_nobody_reaches_is_told_of_later(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(endpoint: Endpoint, broker: Broker) -> None:
        tried = asyncio.Event()
        invoke = RemotingClient.invoke

        async def watched(self: RemotingClient, address: str, *rest: Any) -> RemotingCommand:
            try:
                return await invoke(self, address, *rest)
            finally:
                if address == broker.address:
                    asyncio.get_running_loop().call_soon(tried.set)

        monkeypatch.setattr(RemotingClient, "invoke", watched)
        await broker.close()
        await serve(endpoint, broker.address)
        async with asyncio.timeout(LIMIT_S):
            await tried.wait()
        requests = endpoint.service.requests
        assert requests.metadata().problems == ()
        monkeypatch.setattr("batonmq.controller.history_publisher.BEHIND_REPORTED_MS", 0)
        (problem,) = requests.metadata().problems
        assert f"history behind in {TOPIC}" in problem and broker.address in problem

    play(scenario)


def test_a_topic_whose_messages_expired_gets_what_is_new(play: Play, tmp_path: Path) -> None:
    old = [{"log": "log-old", "raft_index": at, "time_ms": at, "kind": "elected"} for at in (1, 2)]
    (tmp_path / "history-n0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in old))

    async def scenario(endpoint: Endpoint, broker: Broker) -> None:
        broker.first = 500
        await serve(endpoint, broker.address)
        await broker.until(lambda: "pushed" in broker.kinds)
        assert [body for body, _ in broker.messages] == file_lines(tmp_path)[2:]
        assert b"log-old" in file_lines(tmp_path)[1]

    play(scenario)


def test_a_group_without_a_master_is_told_of(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(endpoint: Endpoint, broker: Broker) -> None:
        await endpoint.join(1, broker.address)  # and is not elected
        problems = endpoint.service.requests.metadata
        assert problems().problems == ()
        monkeypatch.setattr("batonmq.controller.history_publisher.BEHIND_REPORTED_MS", 0)
        (problem,) = problems().problems
        assert "broker-a has no master; historyTopicGroup may name another group" in problem

    play(scenario)


def test_an_error_that_nobody_expected_is_a_pause(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    behind = HistoryReader.behind
    failures = [IndexError("list index out of range")]

    def failing(self: HistoryReader, *rest: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return behind(self, *rest, **more)

    monkeypatch.setattr(HistoryReader, "behind", failing)

    async def scenario(endpoint: Endpoint, broker: Broker) -> None:
        await serve(endpoint, broker.address)
        await broker.until(lambda: "pushed" in broker.kinds)
        assert [body for body, _ in broker.messages] == file_lines(tmp_path)

    play(scenario)
    assert caplog.text.count("history_publication_failed") == 1
    assert "IndexError: list index out of range" in caplog.text


def test_what_a_full_disk_refused_is_written_and_published_later(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(endpoint: Endpoint, broker: Broker) -> None:
        await serve(endpoint, broker.address)
        await broker.until(lambda: "pushed" in broker.kinds)

        def full(*_: Any, **_more: Any) -> int:
            raise OSError(errno.ENOSPC, "no space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("batonmq.history.file.HistoryFile.append", full)
            await endpoint.join(2, "127.0.0.1:1")
        await endpoint.join(3, "127.0.0.1:1")
        await broker.until(lambda: broker.kinds.count("broker_registered") == 3)
        indexes = [name[1] for name in broker.names]
        assert indexes == sorted(indexes)
        assert [body for body, _ in broker.messages] == file_lines(tmp_path)

    play(scenario)
