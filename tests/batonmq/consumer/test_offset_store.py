"""The offsets of broadcasting members: one file for all processes of a user, by default."""

import asyncio
import os
from pathlib import Path

import pytest

from batonmq.client.consumer.offset_store import LocalOffsetStore
from batonmq.protocol.message import MessageQueue
from batonmq.runtime import disk

QUEUE = MessageQueue("T", "b", 0)


def persist(folder: Path, offset: int) -> None:
    store = LocalOffsetStore(folder, "DEFAULT", "g")
    store.update(QUEUE, offset)
    asyncio.run(store.persist())


def loaded(folder: Path) -> int | None:
    store = LocalOffsetStore(folder, "DEFAULT", "g")
    asyncio.run(store.load())
    return store.known(QUEUE)


def test_two_processes_that_persist_at_once_leave_a_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. This process has written its new content, and is about to rename it. 2. Another one with
    the same instance name persists. 3. This one goes on: its content is there, and whole."""
    rename, store = os.replace, LocalOffsetStore(tmp_path, "DEFAULT", "g")
    store.update(QUEUE, 5)

    def rename_late(source: Path, target: Path) -> None:
        monkeypatch.setattr(disk, "replace", rename)
        with monkeypatch.context() as other_process:
            other_process.setattr(os, "getpid", lambda: 1)
            other = LocalOffsetStore(tmp_path, "DEFAULT", "g")
            other.update(QUEUE, 7)
            asyncio.run(other.persist())
        assert loaded(tmp_path) == 7
        rename(source, target)

    monkeypatch.setattr(disk, "replace", rename_late)
    asyncio.run(store.persist())
    assert loaded(tmp_path) == 5


def test_a_write_that_failed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    persist(tmp_path, 3)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "replace", full)
        with pytest.raises(OSError, match="No space"):
            persist(tmp_path, 4)
    assert [path.name for path in (tmp_path / "DEFAULT").iterdir()] == ["g.json"]
    assert loaded(tmp_path) == 3


def test_offsets_that_could_not_be_written_are_written_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalOffsetStore(tmp_path, "DEFAULT", "g")
    store.update(QUEUE, 5)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "replace", full)
        with pytest.raises(OSError, match="No space"):
            asyncio.run(store.persist())
    asyncio.run(store.persist())
    assert loaded(tmp_path) == 5
