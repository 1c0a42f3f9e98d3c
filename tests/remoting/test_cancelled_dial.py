"""A caller that is cancelled while it waits for a connection ends, whenever that happens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from batonmq.remoting.endpoint import RemotingClient


@pytest.mark.parametrize("turns", range(8))
def test_a_cancellation_that_meets_the_end_of_the_dial_is_not_swallowed(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Whoever swallows it continues, and who cancelled waits forever (`batonmq up` did)."""

    async def run() -> None:
        client = RemotingClient(name="test")
        dialled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def dial(address: str) -> Any:
            return await dialled

        monkeypatch.setattr(client, "_dial", dial)
        caller = asyncio.create_task(client.connection("127.0.0.1:1", timeout_ms=10_000))
        for _ in range(4):
            await asyncio.sleep(0)
        dialled.set_result(object())
        for _ in range(turns):
            await asyncio.sleep(0)
        if caller.cancel():
            with pytest.raises(asyncio.CancelledError):
                await caller
        await client.close()

    asyncio.run(run())
