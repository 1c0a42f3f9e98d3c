"""What the two consume services commit, keep and give back, over stand-ins for broker and listener.

`test_push_consumer` plays the same over sockets; here each moment can be chosen.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from batonmq.blocking import _loop_thread
from batonmq.client.consumer import concurrent_service, orderly_service
from batonmq.client.consumer.concurrent_service import ConcurrentService
from batonmq.client.consumer.listener import ConsumeContext, ConsumeStatus, ListenerCall
from batonmq.client.consumer.member_stats import MemberStats
from batonmq.client.consumer.options import ConsumeOptions, MessageModel
from batonmq.client.consumer.orderly_service import OrderlyService
from batonmq.client.consumer.process_queue import ProcessQueue
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageExt, MessageQueue
from tests.records import message
from tests.shared.waiting import until

QUEUE = MessageQueue("T", "b", 0)
SUCCESS, LATER = ConsumeStatus.SUCCESS, ConsumeStatus.RECONSUME_LATER


class Reader:
    """A queue of `count` messages, and how often the service said that there is room again."""

    def __init__(self, count: int = 3) -> None:
        self.queue, self.process_queue = QUEUE, ProcessQueue(0)
        self.process_queue.put([message(offset) for offset in range(count)], count)
        self.room = 0

    def consumed(self) -> None:
        self.room += 1


class Listener:
    """Answers `replies` in turn, then SUCCESS; `seen`: (offset, tries) of each message. `during`
    runs inside the call."""

    def __init__(self, *replies: ConsumeStatus) -> None:
        self.replies = list(replies)
        self.seen: list[tuple[int, int]] = []
        self.during: Callable[[], Awaitable[object]] | None = None

    async def __call__(
        self, messages: Sequence[MessageExt], context: ConsumeContext
    ) -> ConsumeStatus:
        self.seen += [(each.queue_offset, each.reconsume_times) for each in messages]
        if self.during is not None:
            await self.during()
        return self.replies.pop(0) if self.replies else SUCCESS


class Scene:
    """A service and what it reported: progress, and calls to the broker as (name, queue ids)."""

    def __init__(self, kind: type, listener: Listener, **options: int) -> None:
        self.progress: list[int] = []
        self.calls: list[str] = []
        self.held: list[MessageQueue] = [QUEUE]
        self.refusal: BatonError | None = None
        spawn = asyncio.get_running_loop().create_task
        offsets = SimpleNamespace(update=lambda queue, offset: self.progress.append(offset))
        self.service: Any = kind(
            SimpleNamespace(spawn=spawn),
            "g",
            listener,
            offsets,
            MessageModel.CLUSTERING,
            ConsumeOptions(orderly_suspend_ms=1, **options),
        )
        self.service._calls = self

    async def send_back(self, *_: object, **__: object) -> None:
        self.calls.append("send_back")
        if self.refusal is not None:
            raise self.refusal

    async def lock_queues(self, *_: object, **__: object) -> frozenset[MessageQueue]:
        self.calls.append("lock")
        return frozenset(self.held)

    async def unlock_queues(self, *_: object, **__: object) -> None:
        self.calls.append("unlock")


async def test_what_could_not_be_sent_back_is_consumed_again_and_holds_the_offset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(concurrent_service, "redelivery_delay_ms", lambda tries: 0)
    listener, reader = Listener(LATER), Reader()
    scene = Scene(ConcurrentService, listener, concurrency=1)
    scene.refusal = BatonError("the broker is away")
    scene.service.start()
    scene.service.arrived(reader)
    await until(lambda: len(listener.seen) == 4)
    await scene.service.close()
    assert listener.seen == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert scene.progress == [0, 0, 0, 3], "the first message holds it until it is consumed"
    assert reader.process_queue.size_bytes == 0


async def test_what_waits_to_be_consumed_again_is_left_to_the_next_owner_at_the_end() -> None:
    listener, reader = Listener(LATER), Reader(1)
    scene = Scene(ConcurrentService, listener, concurrency=1)
    scene.refusal = BatonError("the broker is away")
    scene.service.start()
    scene.service.arrived(reader)
    await until(lambda: scene.service._timers)
    (timer,) = scene.service._timers
    await scene.service.close()
    assert timer.cancelled() and scene.progress == [0]


@pytest.mark.parametrize(
    ("model", "calls"), [(MessageModel.CLUSTERING, ["send_back"]), (MessageModel.BROADCASTING, [])]
)
async def test_what_failed_is_sent_back_or_given_up(model: MessageModel, calls: list[str]) -> None:
    """A retry goes to one member of the group, whichever that is: none while broadcasting."""
    listener, reader = Listener(LATER), Reader(1)
    scene = Scene(ConcurrentService, listener, concurrency=1)
    scene.service._model = model
    scene.service.start()
    scene.service.arrived(reader)
    await until(lambda: scene.progress == [1])
    await scene.service.close()
    assert scene.calls == calls


@pytest.mark.parametrize("moment", ["listener", "send back"])
async def test_of_a_queue_that_is_given_up_meanwhile_nothing_is_committed(moment: str) -> None:
    """Its next owner may have stored other progress by now."""
    listener, reader = Listener(LATER), Reader(1)
    scene = Scene(ConcurrentService, listener, concurrency=1)
    done = asyncio.Event()

    async def give_up(*_: object, **__: object) -> None:
        reader.process_queue.dropped = True
        done.set()

    if moment == "listener":
        listener.during = give_up
    else:
        scene.send_back = give_up  # type: ignore[method-assign]
    scene.service.start()
    scene.service.arrived(reader)
    await done.wait()
    await scene.service.close()
    assert scene.progress == []


async def test_without_its_lock_a_queue_is_not_consumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Locked, and consumed. 2. No renewal came in time. 3. It is locked again, and continues.
    4. The broker gave the lock to another member: it stops at once."""
    now_ms = 1_000_000
    monkeypatch.setattr(orderly_service, "boot_ms", lambda: now_ms)
    listener, reader = Listener(), Reader(1)
    scene = Scene(OrderlyService, listener)

    async def comes(offset: int) -> None:
        reader.process_queue.put([message(offset)], offset + 1)
        scene.service.arrived(reader)
        await asyncio.gather(*scene.service._consuming.values())

    assert await scene.service.acquire(reader)
    await comes(1)
    assert scene.progress == [1, 2]
    now_ms += orderly_service.LOCK_LIVE_MS
    await comes(2)
    assert scene.progress == [1, 2]
    assert await scene.service.acquire(reader)
    await comes(3)
    assert scene.progress == [1, 2, 3, 4]
    scene.held.clear()
    assert not await scene.service.acquire(reader)
    await comes(4)
    assert scene.progress == [1, 2, 3, 4]
    await scene.service.close()


async def test_a_queue_is_unlocked_when_its_last_listener_call_has_ended() -> None:
    """Else the next owner would consume beside it."""
    listener, reader = Listener(), Reader(1)
    scene = Scene(OrderlyService, listener)
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        inside.set()
        await go_on.wait()

    listener.during = slow
    assert await scene.service.acquire(reader)
    await inside.wait()
    releasing = asyncio.create_task(scene.service.release([reader]))
    for _ in range(5):
        await asyncio.sleep(0)
    assert scene.calls == ["lock"]
    go_on.set()
    await releasing
    assert scene.calls == ["lock", "unlock"]
    await scene.service.close()


async def test_r57_a_queue_stays_locked_until_its_listener_has_ended_however_long_that_takes() -> (
    None
):
    """1. The queue is given up while the listener works, longer than `close_wait_ms`. 2. It stays
    locked, its lock is renewed, and it is not taken up again beside the listener. 3. The listener
    ends: the queue is unlocked."""
    listener, reader = Listener(), Reader(1)
    scene = Scene(OrderlyService, listener, close_wait_ms=1)
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        inside.set()
        await go_on.wait()

    listener.during = slow
    assert await scene.service.acquire(reader)
    await inside.wait()
    reader.process_queue.dropped = True
    await scene.service.release([reader])
    assert scene.calls == ["lock"]
    assert reader in scene.service._readers, "the lock is renewed"
    assert not await scene.service.acquire(Reader(1)), "two calls at a time for one queue"
    go_on.set()
    await until(lambda: scene.calls == ["lock", "unlock"])
    assert reader not in scene.service._readers
    assert await scene.service.acquire(Reader(0))
    await scene.service.close()


@pytest.mark.parametrize("loss", ["given up", "lock lost", "closing"])
async def test_r57_a_queue_that_was_lost_while_its_messages_waited_for_a_slot_is_not_consumed(
    loss: str,
) -> None:
    listener, reader = Listener(), Reader(1)
    scene = Scene(OrderlyService, listener, concurrency=1)
    async with scene.service._slots:
        assert await scene.service.acquire(reader)
        await until(lambda: not reader.process_queue.waiting)
        if loss == "given up":
            reader.process_queue.dropped = True
        elif loss == "lock lost":
            reader.process_queue.locked_until_ms = 0
        else:
            scene.service._closing.set()
    await until(lambda: not scene.service._consuming)
    assert listener.seen == [] and scene.progress == []
    assert reader.process_queue.waiting == 1, "it is consumed when the lock is back"
    await scene.service.close()


async def test_r57_a_listener_that_does_not_end_is_cancelled_and_its_queue_unlocked_after() -> None:
    listener, reader = Listener(), Reader(1)
    listener.on_loop = True  # type: ignore[attr-defined]
    scene = Scene(OrderlyService, listener, close_wait_ms=1)
    ended = asyncio.Event()

    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    listener.during = stuck
    assert await scene.service.acquire(reader)
    await until(lambda: bool(listener.seen))
    await scene.service.close()
    assert ended.is_set()
    await scene.service.release([reader])
    assert scene.calls == ["lock", "unlock"] and scene.progress == []


def _call_of(listener: Any) -> ListenerCall:
    return ListenerCall("g", listener, 1, MemberStats())


@pytest.mark.parametrize("reply", [False, True, 0, "RECONSUME_LATER", "SUCCESS", b"", [], object()])
@pytest.mark.parametrize("kind", ["coroutine function", "plain function"])
async def test_r57_a_reply_that_is_no_status_is_not_success(reply: object, kind: str) -> None:
    async def on_loop(messages: object, context: object) -> object:
        return reply

    listener = on_loop if kind == "coroutine function" else lambda messages, context: reply
    call = _call_of(listener)
    assert await call([message(0)], ConsumeContext(QUEUE)) is LATER
    call.close()


async def test_r57_none_and_success_are_success() -> None:
    for reply in (None, SUCCESS):
        call = _call_of(lambda messages, context, reply=reply: reply)
        assert await call([message(0)], ConsumeContext(QUEUE)) is SUCCESS
        call.close()


@pytest.mark.parametrize("kind", [ConcurrentService, OrderlyService])
async def test_r57_a_listener_that_awaited_a_cancelled_task_has_failed_and_is_called_again(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrent_service, "redelivery_delay_ms", lambda tries: 0)
    seen: list[int] = []

    async def listener(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        seen.append(messages[0].queue_offset)
        if len(seen) == 1:
            task = asyncio.create_task(asyncio.Event().wait())
            task.cancel()
            await task

    reader = Reader(2)
    scene = Scene(kind, _call_of(listener), concurrency=1)  # type: ignore[arg-type]
    scene.refusal = BatonError("the broker is away")
    scene.service.start()
    assert await scene.service.acquire(reader)
    scene.service.arrived(reader)
    await until(lambda: scene.progress[-1:] == [2])
    assert seen.count(0) == 2 and seen.count(1) == 1
    await scene.service.close()


@pytest.mark.parametrize("kind", [ConcurrentService, OrderlyService])
async def test_r57_a_listener_that_empties_its_list_has_consumed_the_messages(kind: type) -> None:
    async def listener(messages: list[MessageExt], context: ConsumeContext) -> None:
        while messages:
            messages.pop()

    reader = Reader()
    scene = Scene(kind, _call_of(listener), batch=3)  # type: ignore[arg-type]
    scene.service.start()
    assert await scene.service.acquire(reader)
    scene.service.arrived(reader)
    await until(lambda: scene.progress == [3])
    await scene.service.close()


@pytest.mark.parametrize("index", ["0", 1.5, b"", []])
async def test_r57_an_ack_index_that_is_no_number_counts_as_failed(index: object) -> None:
    """A worker that ended by it would leave its queue unread for good."""

    def listener(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        context.ack_index = index  # type: ignore[assignment]
        context.queue = None  # type: ignore[assignment]

    call = _call_of(listener)
    assert await call([message(0)], ConsumeContext(QUEUE)) is LATER
    call.close()


async def test_r57_a_queue_given_up_while_its_lock_is_renewed_is_not_locked_for_ever() -> None:
    """The renewal's answer comes after the unlock. With each further renewal this member would
    take the lock again that it does not use, and no member would consume the queue."""
    reader = Reader(0)
    scene = Scene(OrderlyService, Listener())
    assert await scene.service.acquire(reader)
    came, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*_: object, **__: object) -> frozenset[MessageQueue]:
        came.set()
        await go_on.wait()
        return frozenset({QUEUE})

    scene.lock_queues = slow  # type: ignore[method-assign]
    renewing = asyncio.ensure_future(scene.service._lock([reader]))
    await came.wait()
    reader.process_queue.dropped = True
    await scene.service.release([reader])
    go_on.set()
    await renewing
    assert scene.calls == ["lock", "unlock"] and not scene.service._readers
    await scene.service.close()


async def test_what_waits_where_an_orderly_queue_was_moved_to_is_consumed_after_the_call() -> None:
    """1. The listener works. 2. The broker moves the offset, and messages come from there. 3. The
    listener ends: nothing else would begin with them before the next message or renewal."""
    listener, reader = Listener(), Reader(1)
    scene = Scene(OrderlyService, listener)

    async def move() -> None:
        listener.during = None
        old, reader.process_queue = reader.process_queue, ProcessQueue(50)
        old.dropped = True
        reader.process_queue.locked_until_ms = old.locked_until_ms
        reader.process_queue.put([message(50)], 51)
        scene.service.arrived(reader)

    listener.during = move
    assert await scene.service.acquire(reader)
    await until(lambda: scene.progress == [51])
    await scene.service.close()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, StopIteration])
def test_r57_what_a_listener_raises_ends_no_loop_beside_the_main_thread(
    error: type[BaseException],
) -> None:
    """All blocking clients share that loop: their calls would wait without end."""

    def listener(messages: object, context: object) -> None:
        raise error

    async def called() -> ConsumeStatus:
        call = _call_of(listener)
        try:
            return await call([message(0)], ConsumeContext(QUEUE))
        finally:
            call.close()

    assert _loop_thread.run(called()) is LATER


async def test_queues_are_unlocked_at_all_brokers_though_one_hangs() -> None:
    scene = Scene(OrderlyService, Listener())
    readers = [Reader(0), Reader(0)]
    readers[1].queue = MessageQueue("T", "c", 0)
    both = asyncio.Event()

    async def unlock(group: str, queues: Sequence[MessageQueue], **_: object) -> None:
        scene.calls.append(queues[0].broker_name)
        if len(scene.calls) == 2:
            both.set()
        await both.wait()

    scene.unlock_queues = unlock  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        await scene.service.release(readers)
    assert scene.calls == ["b", "c"]


@pytest.mark.parametrize(
    ("index", "consumed"), [(None, 3), (-5, 0), (-1, 0), (0, 1), (2, 3), (9, 3)]
)
def test_an_ack_index_beyond_the_batch_is_its_end(index: int | None, consumed: int) -> None:
    messages = [message(offset) for offset in range(3)]
    context = ConsumeContext(QUEUE, ack_index=index)
    done, failed = concurrent_service._split(messages, SUCCESS, context)
    assert (list(done), list(failed)) == (messages[:consumed], messages[consumed:])


async def test_what_waited_without_a_lock_is_consumed_once_it_is_locked_again() -> None:
    listener, reader = Listener(), Reader(2)
    scene = Scene(OrderlyService, listener)
    scene.held = []
    assert not await scene.service.acquire(reader)
    assert listener.seen == []
    scene.held = [QUEUE]
    scene.service._readers.add(reader)
    await scene.service._lock([reader])
    await until(lambda: scene.progress[-1:] == [2])
    await scene.service.close()


async def test_what_no_worker_has_begun_is_left_to_the_next_owner_at_the_end() -> None:
    listener, reader = Listener(), Reader(3)
    scene = Scene(ConcurrentService, listener, concurrency=1)
    closing: list[asyncio.Task[None]] = []

    async def close() -> None:
        closing.append(asyncio.create_task(scene.service.close()))
        await asyncio.sleep(0)

    listener.during = close
    scene.service.start()
    scene.service.arrived(reader)
    await until(lambda: bool(closing))
    await closing[0]
    assert listener.seen == [(0, 0)] and scene.progress == [1]
