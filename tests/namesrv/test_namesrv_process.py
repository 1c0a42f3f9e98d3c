"""The name server as a process: exit codes and what it says."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

STARTED_WITHIN_S = 30


async def spawn(config: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "batonmq.namesrv.main",
        "-c",
        str(config),
        stderr=asyncio.subprocess.PIPE,
    )


def written(folder: Path, text: str) -> Path:
    path = folder / "namesrv.yaml"
    path.write_text(text)
    return path


async def finished(process: asyncio.subprocess.Process) -> tuple[int, list[str]]:
    _, errors = await asyncio.wait_for(process.communicate(), STARTED_WITHIN_S)
    assert process.returncode is not None
    return process.returncode, errors.decode().splitlines()


async def test_sigterm_ends_it_cleanly_and_sighup_does_not(tmp_path: Path) -> None:
    """Also without TLS: who renews certificates signals every server."""
    process = await spawn(written(tmp_path, "namesrv:\n  listenPort: 0\n"))
    assert process.stderr is not None
    async with asyncio.timeout(STARTED_WITHIN_S):
        while b"namesrv_started" not in await process.stderr.readline():
            assert process.returncode is None
        os.kill(process.pid, signal.SIGHUP)
        while b"reload_asked" not in (line := await process.stderr.readline()):
            assert line, "it has ended"
    os.kill(process.pid, signal.SIGTERM)
    code, _ = await finished(process)
    assert code == 0


async def test_a_taken_port_is_one_line_and_exit_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = f"namesrv:\n  listenPort: {port}\n  bindAddress: 127.0.0.1\n"
        code, lines = await finished(await spawn(written(tmp_path, text)))
    assert code == 1
    said = [line for line in lines if line.startswith("namesrv:")]
    assert len(said) == 1 and str(port) in said[0]
    assert not any("Traceback" in line for line in lines)


async def test_an_unknown_key_is_exit_2_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, "namesrv:\n  listenPort: 0\n  listenPrt: 1\n")
    code, lines = await finished(await spawn(path))
    assert code == 2
    assert len(lines) == 1
    assert f"{path}:3" in lines[0] and "listenPrt" in lines[0] and "listenPort" in lines[0]
