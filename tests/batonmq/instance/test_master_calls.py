"""Requests to a group's master: where the next try goes, and what a silence causes."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from batonmq.client.errors import NoMasterError, NoNameServerError
from batonmq.client.instance import master_calls
from batonmq.client.instance.master_calls import MasterCalls
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import ConnectError
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import boot_ms


def request(_: int = 0) -> RemotingCommand:
    return RemotingCommand.request(RequestCode.GET_MAX_OFFSET)


class Connections:
    """What brokers reply, in turn: a code, an error to raise, or None for silence."""

    def __init__(self, *replies: object) -> None:
        self.replies = list(replies)
        self.options = SimpleNamespace(suspicion_ms=1)
        self.running = True
        self.closed: list[str] = []
        self.remoting = SimpleNamespace(invoke=self.invoke, close_connection=self.closed.append)
        self.tasks: list[asyncio.Task[None]] = []

    async def invoke(self, address: str, asked: RemotingCommand, _: int) -> RemotingCommand:
        reply = self.replies.pop(0)
        if reply is None:
            await asyncio.Event().wait()
        if isinstance(reply, BaseException):
            raise reply
        assert isinstance(reply, ResponseCode)
        return RemotingCommand.response_to(asked, reply)

    def spawn(self, work: Any) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))


class Routes:
    """`failed`: where the call before had failed, of each question for the master."""

    def __init__(self) -> None:
        self.failed: list[str | None] = []

    async def master(self, topic: str, name: str, **more: Any) -> str:
        self.failed.append(more["failed_at"])
        return f"h:{len(self.failed)}"


@pytest.mark.parametrize("failure", [ResponseCode.SYSTEM_BUSY, ConnectError("h:1", "refused")])
def test_the_next_try_asks_for_another_master_than_the_one_that_failed(failure: object) -> None:
    routes = Routes()
    calls = MasterCalls(Connections(failure, ResponseCode.SUCCESS), routes)  # type: ignore[arg-type]

    async def run() -> str:
        _, address = await calls.invoke("T", "b", request, deadline_ms=boot_ms() + 60_000)
        calls.close()
        return address

    assert asyncio.run(run()) == "h:2"
    assert routes.failed == [None, "h:1"]


async def test_the_deadline_ends_the_tries_with_the_last_reason() -> None:
    calls = MasterCalls(Connections(ResponseCode.SYSTEM_BUSY), Routes())  # type: ignore[arg-type]
    with pytest.raises(NoMasterError, match="h:1 answers 2"):
        await calls.invoke("T", "b", request, deadline_ms=boot_ms())
    calls.close()


async def test_a_silence_that_name_servers_could_not_resolve_is_looked_into_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. The master hangs, and no name server answers. 2. A moment later one names another master:
    the connection is closed, which fails the request over."""
    monkeypatch.setattr(master_calls, "_RECHECK_MS", 1)
    connections, looks = Connections(None), 0

    class Answering(Routes):
        async def refresh(self, topic: str, *, suspects: tuple[str, ...]) -> Any:
            nonlocal looks
            looks += 1
            assert suspects == ("h:1",)
            if looks == 1:
                raise NoNameServerError(())
            return SimpleNamespace(master_address=lambda name: "h:2")

    calls = MasterCalls(connections, Answering())  # type: ignore[arg-type]

    hung = asyncio.create_task(calls.invoke_once("T", "b", "h:1", request(), 60_000))
    async with asyncio.timeout(10):
        while not connections.closed:  # noqa: ASYNC110  the real client waits for the socket
            await asyncio.sleep(0.001)
    hung.cancel()
    await asyncio.gather(hung, *connections.tasks, return_exceptions=True)
    calls.close()
    assert connections.closed[0] == "h:1"
