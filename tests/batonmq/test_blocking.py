"""The blocking client, and what `import batonmq` loads and offers."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import uvloop
from fake_cluster import TOPIC, open_cluster

from batonmq import ConsumeFromWhere, LitePullOptions, Message, MessageQueue, NoRouteError
from batonmq.blocking import (
    BlockingAdmin,
    BlockingLitePullConsumer,
    BlockingProducer,
    BlockingPullConsumer,
    _Blocking,
    _loop_thread,
    _taking,
)
from batonmq.protocol.message import MessageExt
from tests.records import message

Q0 = MessageQueue(TOPIC, "broker-a", 0)


def test_blocking_facade_sends_pulls_and_asks() -> None:
    """The servers run in a loop of another thread; this thread only blocks."""
    ready, stop = threading.Event(), asyncio.Event()
    shared: dict[str, object] = {}

    async def serve() -> None:
        async with open_cluster() as cluster:
            shared.update(addresses=cluster.name_server_addresses, loop=asyncio.get_running_loop())
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    try:
        assert ready.wait(5)
        addresses = shared["addresses"]
        assert isinstance(addresses, list)
        with (
            BlockingProducer("pg", name_servers=addresses) as producer,
            BlockingPullConsumer("cg", name_servers=addresses) as consumer,
            BlockingAdmin(addresses) as admin,
        ):
            assert producer.send(Message(TOPIC, b"hi"), queue=Q0).acknowledged
            consumer.assign(consumer.fetch_queues(TOPIC))
            assert [m.body for m in consumer.poll(2000)] == [b"hi"]
            options = LitePullOptions(ConsumeFromWhere.FIRST)
            lite = BlockingLitePullConsumer("lite", name_servers=addresses, options=options)
            lite.subscribe(TOPIC)
            with lite:
                assert Q0 in lite.assigned_queues
                assert next(iter(lite)).body == b"hi"
                assert lite.poll(0) == []
                lite.commit()
                assert lite.committed(Q0) == 1
            assert TOPIC in admin.topics.names()
            assert admin.run(admin.twin.topics.names()) == admin.topics.names()
            with pytest.raises(NoRouteError):
                admin.topics.route("Nowhere")
    finally:
        loop = shared["loop"]
        assert isinstance(loop, asyncio.AbstractEventLoop)
        loop.call_soon_threadsafe(stop.set)
        thread.join(5)


def test_importing_the_package_loads_next_to_nothing() -> None:
    code = (
        "import batonmq, sys; print([m for m in ('asyncio','msgspec','grpc') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "[]"


def test_every_exported_name_loads() -> None:
    import batonmq

    assert all(getattr(batonmq, name) is not None for name in batonmq.__all__)
    with pytest.raises(AttributeError):
        batonmq.nonsense  # noqa: B018


class Limit(Exception):
    """What a signal handler raises."""


@contextlib.contextmanager
def _signalled() -> Iterator[Callable[[], None]]:
    """Gives what makes a signal handler raise Limit in the main thread; callable in any thread."""

    def handler(*_: object) -> None:
        raise Limit

    before = signal.signal(signal.SIGUSR1, handler)
    main = threading.get_ident()
    try:
        yield lambda: signal.pthread_kill(main, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_r57_an_interrupted_call_has_ended_when_it_raises() -> None:
    ended: list[str] = []

    async def work(interrupt: Callable[[], None]) -> None:
        try:
            interrupt()
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    with _signalled() as interrupt:
        with pytest.raises(Limit):
            _loop_thread.run(work(interrupt))
        assert ended == ["cancelled"]


def test_r57_a_signal_just_before_the_wait_blocks_ends_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python only notes such a signal: the lock that the thread blocks in does not see it."""
    waits: list[float | None] = []
    wait = threading.Event.wait

    def unseen(event: threading.Event, timeout: float | None = None) -> bool:
        waits.append(timeout)
        return wait(event, None if timeout is None else 0)

    monkeypatch.setattr(threading.Event, "wait", unseen)

    async def work() -> int:
        while len(waits) < 3:  # noqa: ASYNC110 - the other thread counts
            await asyncio.sleep(0)
        return 7

    assert _loop_thread.run(work()) == 7
    assert None not in waits


def test_r57_what_an_interrupted_poll_took_the_next_poll_returns() -> None:
    """The signal comes when the messages are taken, and cancels nothing any more."""
    taken = [message(0)]

    class Twin:
        def __init__(self, interrupt: Callable[[], None]) -> None:
            self.polls = 0
            self.interrupt = interrupt

        async def poll(self, timeout_ms: int = 1000) -> list[MessageExt]:
            self.polls += 1
            self.interrupt()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return taken
            return []

    class BlockingTwin(_Blocking[Twin]):
        poll = _taking(Twin.poll)

    with _signalled() as interrupt:
        consumer = BlockingTwin(Twin(interrupt))
        with pytest.raises(Limit):
            consumer.poll(1000)
        assert consumer.poll(1000) is taken
        assert consumer.twin.polls == 1


def test_a_forked_process_begins_a_loop_of_its_own() -> None:
    """The loop's thread is not in it. `multiprocessing` forks by default on Linux."""

    async def seven() -> int:
        return 7

    assert _loop_thread.run(seven()) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of forks with threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(_loop_thread.run(seven()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_call_that_exits_ends_no_other_call() -> None:
    """A selector or a hook that calls `sys.exit`: the error is its caller's."""

    async def leave() -> None:
        sys.exit(3)

    async def seven() -> int:
        return 7

    with pytest.raises(SystemExit):
        _loop_thread.run(leave())
    assert _loop_thread.run(seven()) == 7
