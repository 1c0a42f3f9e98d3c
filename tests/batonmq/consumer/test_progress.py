"""The progress of a group on its way to the brokers (R31): it never falls, none is forgotten."""

import asyncio
from collections.abc import Coroutine
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from batonmq.client.consumer.lite_pull_consumer import LitePullConsumer
from batonmq.client.consumer.offset_store import RemoteOffsetStore
from batonmq.client.consumer.pulling import PullResult, PullStatus
from batonmq.client.consumer.push_consumer import PushConsumer
from batonmq.client.consumer.queue_reader import QueueReader, slave_address
from batonmq.client.instance.routes import RouteTable
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BatonError, ConnectError, ResponseError
from batonmq.protocol.message import MessageQueue
from tests.records import message

Q0, Q1 = (MessageQueue("T", "broker-a", number) for number in (0, 1))


def store(*, address: str | None = "h:1") -> RemoteOffsetStore:
    """On a client whose routes name one master; `remoting.oneway` notes what is sent."""
    routes = RouteTable(Mock(), Mock())
    name_master(routes, address)
    client = Mock(routes=routes, remoting=Mock(oneway=AsyncMock()))
    made = RemoteOffsetStore(client, "g")
    made._calls = Mock(commit_offset=AsyncMock())
    return made


def name_master(routes: RouteTable, address: str | None, topic: str = "T") -> None:
    """A route of the topic arrives."""
    of_group = {0: address} if address is not None else {2: "h:9"}
    routes._adopt(TopicRoute(topic, (), (), {"broker-a": of_group, "broker-b": of_group}, {}))


def sent(made: RemoteOffsetStore) -> list[tuple[str, str]]:
    calls = made._client.remoting.oneway.await_args_list  # type: ignore[attr-defined]
    return [(call.args[1].ext["queueId"], call.args[1].ext["commitOffset"]) for call in calls]


def test_progress_never_falls_but_by_a_reset() -> None:
    made = store()
    made.update(Q0, 7)
    made.update(Q0, 5)
    assert made.known(Q0) == 7
    made.reset(Q0, 3)
    assert made.known(Q0) == 3


def test_each_offset_is_sent_once_until_it_changes() -> None:
    made = store()
    made.update(Q0, 7)
    made.update(Q1, 9)
    asyncio.run(made.persist())
    asyncio.run(made.persist())
    assert sent(made) == [("0", "7"), ("1", "9")]
    made.update(Q0, 8)
    asyncio.run(made.persist())
    assert sent(made)[2:] == [("0", "8")]


def test_what_could_not_be_sent_is_sent_again() -> None:
    made = store()
    made.update(Q0, 7)
    made._client.remoting.oneway.side_effect = [ConnectError("h:1", "refused"), None]  # type: ignore[attr-defined]
    asyncio.run(made.persist())
    asyncio.run(made.persist())
    assert sent(made) == [("0", "7"), ("0", "7")]


def test_without_a_master_progress_waits() -> None:
    made = store(address=None)
    made.update(Q0, 7)
    asyncio.run(made.persist())
    assert sent(made) == []
    name_master(made._client.routes, "h:1")
    asyncio.run(made.persist())
    assert sent(made) == [("0", "7")]


def test_a_stale_route_of_another_topic_sends_no_progress_to_the_old_master() -> None:
    made = store(address="new:1")
    routes = made._client.routes
    name_master(routes, "old:1", topic="C")
    made.update(Q0, 7)
    asyncio.run(made.persist())
    oneway = made._client.remoting.oneway
    assert [call.args[0] for call in oneway.await_args_list] == ["new:1"]  # type: ignore[attr-defined]
    assert routes.is_master("new:1") and routes.is_master("old:1")


def test_what_a_stale_route_sent_to_the_old_master_is_sent_again_to_the_new_one() -> None:
    made = store(address="old:1")
    name_master(made._client.routes, "new:1", topic="C")
    made.update(Q0, 7)
    asyncio.run(made.persist())
    name_master(made._client.routes, "new:1")
    asyncio.run(made.persist())
    asyncio.run(made.persist())
    oneway = made._client.remoting.oneway
    assert [call.args[0] for call in oneway.await_args_list] == ["old:1", "new:1"]  # type: ignore[attr-defined]


async def test_progress_that_is_noted_during_a_commit_is_kept_and_sent() -> None:
    """`commit` stores 7; the program polls meanwhile, and its poll notes 9."""
    made = store()

    async def commit(*_: object, **__: object) -> None:
        made.reset(Q0, 9)

    made._calls = Mock(commit_offset=commit)
    made.update(Q0, 5)
    await made.place(Q0, 7, deadline_ms=0)
    assert made.known(Q0) == 9
    await made.persist()
    assert sent(made) == [("0", "9")]


async def test_a_commit_is_not_sent_again() -> None:
    made = store()
    made.update(Q0, 5)
    await made.place(Q0, 7, deadline_ms=0)
    await made.persist()
    assert made.known(Q0) == 7 and sent(made) == []


async def test_a_queue_that_is_released_during_a_commit_stays_forgotten() -> None:
    made = store()

    async def commit(*_: object, **__: object) -> None:
        made._calls.commit_offset = AsyncMock()  # type: ignore[method-assign]
        await made.release([Q0])

    made._calls = Mock(commit_offset=commit)
    made.update(Q0, 5)
    await made.place(Q0, 7, deadline_ms=0)
    assert made.known(Q0) is None


def test_a_queue_that_is_given_up_hands_over_what_is_not_stored() -> None:
    made = store()
    made.update(Q0, 7)
    made.update(Q1, 9)
    asyncio.run(made.persist())
    made.update(Q0, 8)
    asyncio.run(made.release([Q0, Q1]))
    calls = made._calls.commit_offset.await_args_list  # type: ignore[attr-defined]
    assert [call.args[1:3] for call in calls] == [(Q0, 8)]
    assert made.known(Q0) is None and made.known(Q1) is None


@pytest.mark.parametrize("failure", [OSError("no space left on device"), BatonError("no master")])
def test_progress_that_could_not_be_stored_is_stored_the_next_time(failure: Exception) -> None:
    outcomes = [failure, failure]

    async def persist() -> None:
        if not outcomes:
            raise asyncio.CancelledError
        raise outcomes.pop()

    made = store()
    made.persist = persist  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(made.persist_forever(0))
    assert outcomes == []


def test_progress_is_handed_over_before_the_next_owner_may_lock_the_queue() -> None:
    """1. Reading ends, and what listener calls still consume counts no more. 2. Progress goes to
    the broker. 3. The queue is unlocked: its next owner begins at that progress."""
    steps: list[str] = []

    def step(name: str) -> AsyncMock:
        return AsyncMock(side_effect=lambda *_: steps.append(name))

    reader: Any = Mock(queue=Q0, stop=step("reading ends"))
    consumer: Any = Mock(_offsets=Mock(release=step("progress")))
    service: Any = Mock(release=step("unlocked"))
    asyncio.run(PushConsumer._hand_over(consumer, [reader], service))
    assert steps == ["reading ends", "progress", "unlocked"]


@pytest.mark.parametrize(
    ("least", "waiting", "resets"),
    [(100, 3, []), (0, 0, [100])],
    ids=["expired", "moved by an operator"],
)
async def test_r57_what_was_pulled_before_the_queue_expired_behind_it_is_consumed(
    least: int, waiting: int, resets: list[int]
) -> None:
    """Offsets 5 to 7 wait for the listener, and the broker has nothing below `least` any more."""
    offsets = Mock(persist=AsyncMock())
    reader = QueueReader(Mock(offsets=offsets), Q0, 5)
    reader.process_queue.put([message(offset) for offset in (5, 6, 7)], 8)
    await reader._apply(PullResult(PullStatus.OFFSET_ILLEGAL, 100, least, 120))
    assert (reader.process_queue.waiting, reader.process_queue.next_offset) == (waiting, 100)
    assert [call.args[1] for call in offsets.reset.call_args_list] == resets


async def test_progress_of_a_queue_that_is_released_while_its_broker_is_dialled_is_forgotten() -> (
    None
):
    """Else the next round would look for the offset of a queue that has none, and be the last."""
    made = store()
    made.update(Q0, 5)

    async def dial(*_: object) -> None:
        await made.release([Q0])
        raise ConnectError("h:1", "refused")

    made._client.remoting.oneway = dial  # type: ignore[method-assign]
    await made.persist()
    made._client.remoting.oneway = AsyncMock()  # type: ignore[method-assign]
    await made.persist()
    assert sent(made) == []


@pytest.mark.parametrize("moment", ["while it pauses", "while it stores the offset"])
async def test_r57_a_reset_of_a_queue_that_is_given_up_meanwhile_does_not_read_on(
    moment: str,
) -> None:
    """Its next owner reads it now: both would consume its messages and store their progress."""
    offsets = Mock()
    spawn = asyncio.get_running_loop().create_task
    reader = QueueReader(Mock(offsets=offsets, client=Mock(spawn=spawn)), Q0, 5)
    reader._run = asyncio.Event().wait  # type: ignore[method-assign]
    reader.start()

    async def stop() -> None:
        await reader.stop()

    offsets.persist = stop if moment == "while it stores the offset" else AsyncMock()
    restarting = asyncio.ensure_future(reader.restart_at(3))
    await asyncio.sleep(0)
    if moment == "while it pauses":
        await reader.stop()
    await restarting
    assert reader._task is None and reader.process_queue.dropped
    assert offsets.reset.called == (moment == "while it stores the offset")


async def test_a_reset_whose_offset_finds_no_disk_space_reads_on() -> None:
    """A broadcasting member stood still until it was restarted."""
    offsets = Mock(persist=AsyncMock(side_effect=OSError("no space")))
    spawn = asyncio.get_running_loop().create_task
    reader = QueueReader(Mock(offsets=offsets, client=Mock(spawn=spawn)), Q0, 5)
    reader._run = asyncio.Event().wait  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no space"):
        await reader.restart_at(3)
    assert reader._task is not None and not reader._task.done()
    await reader.stop()


async def test_two_resets_at_a_time_leave_one_reader() -> None:
    spawned: list[asyncio.Task[bool]] = []

    def spawn(work: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        spawned.append(asyncio.ensure_future(work))
        return spawned[-1]

    offsets = Mock(persist=lambda: asyncio.sleep(0))
    reader = QueueReader(Mock(offsets=offsets, client=Mock(spawn=spawn)), Q0, 5)
    reader._run = asyncio.Event().wait  # type: ignore[method-assign,assignment]
    reader.start()
    await asyncio.gather(reader.restart_at(3), reader.restart_at(4))
    assert sum(not task.done() for task in spawned) == 1
    await reader.stop()
    assert all(task.done() for task in spawned)


async def test_a_hung_broker_group_keeps_no_progress_of_another_from_being_handed_over() -> None:
    made, stored = store(), list[str]()
    other = MessageQueue("T", "broker-b", 0)
    made.update(Q0, 7)
    made.update(other, 9)
    handed_over = asyncio.Event()

    async def commit(group: str, queue: MessageQueue, offset: int, **_: object) -> None:
        if queue == Q0:
            await handed_over.wait()
        stored.append(queue.broker_name)
        handed_over.set()

    made._calls = Mock(commit_offset=commit)
    async with asyncio.timeout(10):
        await made.release([Q0, other])
    assert stored == ["broker-b", "broker-a"]


async def test_a_pull_without_a_match_counts_nothing_that_waits_before_it_as_consumed() -> None:
    offsets = Mock()
    reader = QueueReader(Mock(offsets=offsets), Q0, 5)
    reader.process_queue.put([message(5)], 6)
    await reader._apply(PullResult(PullStatus.NO_MATCHED_MSG, 9, 0, 9))
    assert not offsets.update.called
    reader.process_queue.done(reader.process_queue.take(1))
    await reader._apply(PullResult(PullStatus.NO_MATCHED_MSG, 12, 0, 12))
    offsets.update.assert_called_once_with(Q0, 12)


def test_a_queue_that_is_moved_stays_locked() -> None:
    reader = QueueReader(Mock(), Q0, 5)
    reader.process_queue.locked_until_ms = 77
    reader._replace(9)
    assert (reader.process_queue.locked_until_ms, reader.process_queue.next_offset) == (77, 9)


@pytest.mark.parametrize(
    ("code", "pause_ms"),
    [
        (ResponseCode.FLOW_CONTROL, 20),
        (ResponseCode.SYSTEM_BUSY, 5),
        (ResponseCode.SERVICE_NOT_AVAILABLE, 5),
        (ResponseCode.GO_AWAY, 5),
        (ResponseCode.SUBSCRIPTION_NOT_EXIST, 5),
        (ResponseCode.SUBSCRIPTION_NOT_LATEST, 5),
        (ResponseCode.NO_PERMISSION, 3_000),
    ],
)
def test_a_refused_pull_is_repeated_soon_where_it_may_be_served_soon(
    code: ResponseCode, pause_ms: int
) -> None:
    reader = QueueReader(Mock(), Q0, 0)
    assert reader._refused_pause_ms(ResponseError(code, "", "h:1"), 1) == pause_ms


@pytest.mark.parametrize(
    ("members", "asked", "address"),
    [
        ({0: "m", 2: "x", 3: "y"}, 2, "x"),
        ({0: "m", 3: "y", 5: "z"}, 2, "y"),
        ({0: "m", 5: "z", 7: "w"}, 2, "z"),
        ({0: "m"}, 2, None),
    ],
    ids=["it", "the next id", "any", "no slave"],
)
def test_a_pull_goes_to_the_suggested_slave_or_another_one(
    members: dict[int, str], asked: int, address: str | None
) -> None:
    assert slave_address(members, asked) == address


@pytest.mark.parametrize("kind", ["lite", "push"])
def test_a_consumer_tells_a_new_master_its_progress_in_the_queues_that_it_holds(kind: str) -> None:
    """Of Q1 it knows an offset, too: it could not take it up, or the program committed it once. The
    member that holds it has committed a higher one since."""
    unread = MessageQueue("T", "broker-a", 2)  # it knows no offset of it yet
    consumer: LitePullConsumer | PushConsumer
    if kind == "lite":
        consumer = LitePullConsumer("g", name_servers=["h:1"])
        consumer._positions = {Q0: 5, unread: 0}
    else:
        consumer = PushConsumer("g", lambda messages, context: None, name_servers=["h:1"])
        consumer._readers = {Q0: Mock(), unread: Mock()}
    for queue in (Q0, Q1):
        consumer._offsets.reset(queue, 5)
    consumer._offsets._dirty.clear()
    consumer.masters_moved({"broker-b"})
    assert not consumer._offsets._dirty
    consumer.masters_moved({"broker-a"})
    assert consumer._offsets._dirty == {Q0}


async def test_a_rebalance_that_close_meets_while_it_gives_up_a_queue_ends() -> None:
    service, plan = Mock(), Mock(give_up=[Q0], take_up=[Q1])
    consumer: Any = Mock(_service=service, _take_up_all=AsyncMock(return_value=True))

    async def give_up(*_: object) -> None:
        consumer._service = None

    consumer._give_up = give_up
    assert await PushConsumer._change(consumer, "T", plan)
    # `close` waits for this rebalance, then gives up what it took, with this service.
    consumer._take_up_all.assert_awaited_once_with([Q1], service)


async def test_a_group_that_begins_at_the_end_reads_its_retries_from_their_first_one() -> None:
    consumer: Any = Mock(_offsets=Mock(read=AsyncMock(return_value=None)))
    retries = MessageQueue("%RETRY%g", "broker-a", 0)
    assert await PushConsumer._start_offset(consumer, retries) == 0
