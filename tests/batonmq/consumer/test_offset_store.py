"""Offsets: those of broadcasting members are in one file for all processes of a user by default."""

import asyncio
import os
import threading
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from batonmq.client.consumer import offset_store
from batonmq.client.consumer.offset_store import LocalOffsetStore, RemoteOffsetStore
from batonmq.client.consumer.options import PushConsumerOptions
from batonmq.client.errors import ArgumentError
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageQueue
from batonmq.runtime import disk
from tests.shared.failing_disk import failing

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
    the same instance name persists. 3. This one continues: its content is there, and whole."""
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


def test_offsets_that_could_not_be_written_are_written_the_next_time(tmp_path: Path) -> None:
    """The failed write leaves the former ones, and no other file."""
    persist(tmp_path, 3)
    store = LocalOffsetStore(tmp_path, "DEFAULT", "g")
    store.update(QUEUE, 5)
    with failing("replace g.json ENOSPC"), pytest.raises(OSError, match="No space"):
        asyncio.run(store.persist())
    assert [path.name for path in (tmp_path / "DEFAULT").iterdir()] == ["g.json"]
    assert loaded(tmp_path) == 3
    asyncio.run(store.persist())
    assert loaded(tmp_path) == 5


async def test_an_offset_that_could_not_be_stored_is_not_known(tmp_path: Path) -> None:
    """The next rebalance would begin to read, and a crash would skip what it had not read."""
    store = LocalOffsetStore(tmp_path, "DEFAULT", "g")
    with failing("open g.json ENOSPC once"), pytest.raises(OSError, match="No space"):
        await store.place(QUEUE, 5, deadline_ms=0)
    assert await store.read(QUEUE, deadline_ms=0) is None
    await store.place(QUEUE, 7, deadline_ms=0)
    with (
        failing("read_bytes g.json EIO"),
        pytest.raises(BatonError, match=r"g\.json: Input/output"),
    ):
        await store.load()


async def test_a_write_that_is_cancelled_ends_before_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread continues: two at once would write into one temporary file."""
    store, replace = LocalOffsetStore(tmp_path, "DEFAULT", "g"), os.replace
    came, go_on = threading.Event(), threading.Event()
    store.update(QUEUE, 5)

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(disk, "replace", replace)
        came.set()
        go_on.wait()
        replace(source, target)

    monkeypatch.setattr(disk, "replace", late)
    first = asyncio.ensure_future(store.persist())
    await asyncio.to_thread(came.wait)
    first.cancel()
    store.update(QUEUE, 6)
    second = asyncio.ensure_future(store.persist())
    try:
        for _ in range(5):
            await asyncio.sleep(0)
        assert not second.done() and not first.done()
    finally:
        go_on.set()
        await asyncio.wait([first, second])
    after = LocalOffsetStore(tmp_path, "DEFAULT", "g")
    await after.load()
    assert first.cancelled() and after.known(QUEUE) == 6


def test_a_user_without_a_home_keeps_offsets_in_the_working_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every push consumer has this default, also one that keeps no offsets in files."""
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home directory")))
    assert PushConsumerOptions().offset_dir == Path(".batonmq/offsets")


@pytest.mark.parametrize("group", ["g" * 239, "../g", "g\0"])
def test_a_group_without_a_file_name_is_refused_at_once(tmp_path: Path, group: str) -> None:
    """One of 239 to 250 bytes was taken, and no offset of it was ever stored."""
    with pytest.raises(ArgumentError, match=r"^group is 'g*.*which no folder can have$"):
        LocalOffsetStore(tmp_path, "DEFAULT", group)


def test_the_longest_group_has_its_file(tmp_path: Path) -> None:
    store = LocalOffsetStore(tmp_path, "DEFAULT", "g" * 238)
    store.update(QUEUE, 5)
    asyncio.run(store.persist())
    assert (tmp_path / "DEFAULT" / f"{'g' * 238}.json").exists()


async def test_queues_that_are_released_while_progress_is_sent_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offset_store, "_SENT_AT_ONCE", 1)
    monkeypatch.setattr(offset_store.QueueCalls, "commit_offset", AsyncMock())
    client = Mock()
    store = RemoteOffsetStore(client, "g")
    queues = [MessageQueue("T", "b", number) for number in range(9)]
    for queue in queues:
        store.update(queue, 1)
    client.routes.cached.return_value = None
    persisting = asyncio.create_task(store.persist())
    await store.release(queues)
    await persisting
    assert client.routes.cached.call_count < len(queues)
