"""The name server as a process. `tests/runtime/test_server_main.py` has its exit codes."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest


@pytest.mark.process
async def test_sigterm_ends_it_cleanly_and_sighup_does_not(tmp_path: Path) -> None:
    """Also without TLS: who renews certificates signals every server."""
    config = tmp_path / "namesrv.yaml"
    config.write_text("namesrv:\n  listenPort: 0\n")
    command = [sys.executable, "-m", "batonmq.namesrv.main", "-c", str(config)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    async with asyncio.timeout(30):
        for awaited, signal_number in (
            (b"namesrv_started", signal.SIGHUP),
            (b"reload_asked", signal.SIGTERM),
        ):
            while awaited not in (line := await process.stderr.readline()):
                assert line, "it has ended"
            os.kill(process.pid, signal_number)
        await process.communicate()
    assert process.returncode == 0
