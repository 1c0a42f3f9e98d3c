"""The socket of a running `batonmq up`: requests are answered, and only the owner may connect."""

import asyncio
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from batonmq.launcher import control


async def answer(asked: Mapping[str, Any]) -> Mapping[str, str]:
    return {"name": str(asked["group"])}


async def test_a_request_is_answered_in_a_folder_with_a_long_name(tmp_path: Path) -> None:
    """A socket's own name may have 107 bytes. What an earlier one left is no hindrance."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    for _ in range(2):
        server = await control.serve(folder, answer)
        assert await control.ask(folder, {"group": "broker-a"}) == {"name": "broker-a"}
        mode = (folder / control.SOCKET).stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
        server.close()
    with pytest.raises(ConnectionRefusedError):
        await control.ask(folder, {})


@pytest.mark.parametrize("sent", [b"\n", b"[]\n", b"{\n", b"\xff\n", b"x" * 9_000])
async def test_what_is_no_request_changes_nothing(tmp_path: Path, sent: bytes) -> None:
    asked: list[Mapping[str, Any]] = []

    async def note(request: Mapping[str, Any]) -> Mapping[str, str]:
        asked.append(request)
        return {}

    server = await control.serve(tmp_path, note)
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / control.SOCKET))
    writer.write(sent)
    said = await reader.read()
    assert said in (b"", b'{"error": "not an object"}\n')
    writer.close()
    server.close()
    assert asked == []


async def test_a_supervisor_that_is_stopped_is_no_endless_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "ANSWER_S", 0.01)
    wakes = asyncio.Event()

    async def late(asked: Mapping[str, Any]) -> Mapping[str, str]:
        await wakes.wait()
        return {}

    server = await control.serve(tmp_path, late)
    with pytest.raises(TimeoutError, match="no answer within"):
        await control.ask(tmp_path, {"do": "add"})
    wakes.set()
    server.close()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
