"""The health check of the containers, as the engine runs it."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from batonmq.auth.config import AuthConfig
from batonmq.auth.guard import Guard
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingServer
from tests.shared.certificates import authority, node_tls

HEALTH = Path(__file__).resolve().parents[2] / "deploy" / "config" / "health.py"


async def check(*arguments: object, **environ: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-IS", str(HEALTH), *map(str, arguments),
        stdout=asyncio.subprocess.PIPE, env=os.environ | environ,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode().strip()


async def test_each_process_is_asked_and_the_unwell_one_is_named() -> None:
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


@pytest.mark.parametrize("in_file", [True, False])
async def test_it_dials_with_tls_and_signs_where_the_process_asks_for_both(
    tmp_path: Path, in_file: bool
) -> None:
    """By the variables of the environment, and the file, that the process itself reads."""
    made = authority(tmp_path / "tls")
    node = '{"accessKey":"node","secretKey":"secret"}'
    auth = AuthConfig(
        authentication_enabled=True,
        authorization_enabled=True,
        inner_client_authentication_credentials=node,
    )
    tls = {
        "BATONMQ_TLS__SERVERMODE": "enforcing",
        "BATONMQ_TLS__SERVERTRUSTCERTPATH": str(made.trust),
    }
    (tmp_path / "node.json").write_text(node)
    key, value = ("FILE", str(tmp_path / "node.json")) if in_file else ("", node)
    user = {
        "BATONMQ_AUTH__AUTHENTICATIONENABLED": "true",
        f"BATONMQ_AUTH__INNERCLIENTAUTHENTICATIONCREDENTIALS{key}": value,
    }
    processors = Processors()
    processors.register(28, lambda cmd, _: RemotingCommand.response_to(cmd))
    guard = Guard(auth, "test", tmp_path / "audit.log")
    guard.book("group", "test")
    guard.stand_before(processors)
    server = RemotingServer(processors, name="test", tls=node_tls(made).for_clients)
    port = await server.listen("127.0.0.1", 0)
    assert await check("broker", port, **tls, **user) == (0, "well")
    code, said = await check("broker", port, **tls)
    assert code == 1 and "answers 16" in said
    assert (await check("broker", port, **user))[0] == 1
    await server.close()
    guard.close()
