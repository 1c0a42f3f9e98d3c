"""What a store does while its threads run: jobs beside the loop, and room that comes back."""

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from batonmq.runtime import disk
from tests.shared.no_threads import no_new_threads
from tests.shared.waiting import until


def within(
    seconds: float, started: Callable[[asyncio.AbstractEventLoop], Coroutine[Any, Any, None]]
) -> None:
    async def run() -> None:
        async with asyncio.timeout(seconds):
            await started(asyncio.get_running_loop())

    asyncio.run(run())


def test_r39_a_topic_may_be_deleted_while_a_thread_makes_its_files(rig, monkeypatch):
    """In a running store: the thread makes the file, the loop deletes the topic in its middle, and
    waits for that file."""
    store = rig.open_master(flush_interval_consume_queue=20)
    fatal: list[BaseException] = []

    async def play(loop: asyncio.AbstractEventLoop) -> None:
        store.start(loop, fatal.append)
        real, threads = disk.makedirs, list[str]()
        begun, deleted = threading.Event(), threading.Event()

        def delete() -> None:
            begun.set()
            store.delete_topic("T")
            deleted.set()

        def makedirs(folder: object) -> None:
            real(folder)
            if "/T/" in str(folder) and not threads:
                threads.append(threading.current_thread().name)
                loop.call_soon_threadsafe(delete)
                assert begun.wait(5)

        monkeypatch.setattr(disk, "makedirs", makedirs)
        rig.put_confirmed(store, b"x")
        await until(deleted.is_set)
        assert not (rig.root / "consumequeue" / "T" / "0").exists()
        rig.put_confirmed(store, b"y", topic="U")
        await until((rig.root / "consumequeue" / "U").exists)
        assert threads == ["store-jobs"] and not fatal and not store.health.has_failed

    within(8, play)


def test_r45_expired_segments_go_while_another_job_waits_for_room(rig, monkeypatch):
    store = rig.open_master(clean_resource_interval=20, disk_space_clean_forcibly_ratio=85)
    rig.put_confirmed(store, *[b"z" * 1000] * 30)
    store.checkpoints.flush_derived()
    folder = rig.root / "commitlog"
    before = len(list(folder.iterdir()))
    tried = threading.Event()

    def table() -> None:
        tried.set()
        if len(list(folder.iterdir())) >= before:
            raise OSError(errno.ENOSPC, "no space")

    async def play(loop: asyncio.AbstractEventLoop) -> None:
        store.start(loop, lambda error: pytest.fail(str(error)))
        store.background.run_job(table)
        await until(tried.is_set)
        rig.disk_ratio = 0.95
        await until(lambda: len(list(folder.iterdir())) < before)

    within(8, play)


def test_a_segment_is_allocated_although_no_thread_can_be_started(rig, store):
    with no_new_threads():
        for _ in range(30):
            rig.put_confirmed(store, bytes(850))
    assert len(store.log.segments) > 2


def test_r54_a_timer_of_the_store_does_not_end_with_an_error(store):

    async def play(loop: asyncio.AbstractEventLoop) -> None:
        unhandled: list[object] = []
        loop.set_exception_handler(lambda _, context: unhandled.append(context["exception"]))
        store.start(loop, unhandled.append)
        calls = 0

        def work() -> None:
            nonlocal calls
            calls += 1
            raise RuntimeError("can't start new thread")

        store.background.repeat("test", 0.001, work)
        await until(lambda: calls == 3)
        assert {str(error) for error in unhandled} == {"can't start new thread"}

    within(20, play)
    store.close()
