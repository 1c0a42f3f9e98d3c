"""The health check of the containers, as the engine runs it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingServer

HEALTH = Path(__file__).resolve().parents[2] / "deploy" / "config" / "health.py"


async def check(*arguments: object) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-IS", str(HEALTH), *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode().strip()


def test_each_process_is_asked_and_the_unwell_one_is_named() -> None:
    async def scenario() -> None:
        leaders = ["n1", ""]
        codes = [0, 1]

        def metadata(cmd: RemotingCommand, _: Connection) -> RemotingCommand:
            return RemotingCommand.response_to(cmd, ext={"controllerLeaderId": leaders.pop(0)})

        def runtime(cmd: RemotingCommand, _: Connection) -> RemotingCommand:
            return RemotingCommand.response_to(cmd, codes.pop(0), remark="starting")

        processors = Processors()
        processors.register(106, lambda cmd, _: RemotingCommand.response_to(cmd))
        processors.register(1005, metadata)
        processors.register(28, runtime)
        server = RemotingServer(processors, name="test")
        port = await server.listen("127.0.0.1", 0)
        both = ("namesrv", port, "controller", port)
        assert await check(*both) == (0, "well")
        assert await check(*both) == (1, f"controller on port {port}: knows no leader")
        assert await check("broker", port) == (0, "well")
        assert await check("broker", port) == (1, f"broker on port {port}: answers 1 starting")
        await server.close()
        code, said = await check("broker", port)
        assert code == 1 and said.startswith(f"broker on port {port}: ")

    uvloop.run(scenario())
