"""The stream to one controller finds it wherever it is now."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest
from fake_controller import FakeController, view_message

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager import session
from batonmq.replicas_manager.session import ControllerChannels, ControllerSession


@contextlib.asynccontextmanager
async def session_with(
    emit: Callable[[ev.Event], None], name: str = ""
) -> AsyncIterator[tuple[FakeController, ControllerSession]]:
    """A controller, and the session that a broker keeps with it, or with `name`."""
    controller, channels = FakeController(), ControllerChannels()
    await controller.start()
    hello = pb.Hello(broker_name="broker-a", broker_id=1)
    keeper = ControllerSession(name or controller.address, hello, channels, emit)
    yield controller, keeper
    await keeper.close("done", 1.0)
    await channels.close()
    await controller.stop()


async def test_a_controller_that_came_back_elsewhere_is_looked_up_again(monkeypatch):
    """1. The name leads to a port without a listener. 2. The next channel finds the controller."""
    monkeypatch.setattr(session, "READY_S", 0.05)
    dial, opened = grpc.aio.insecure_channel, asyncio.Event()
    known: list[str] = []

    def insecure_channel(name: str, **options: Any) -> grpc.aio.Channel:
        assert name == "namesrv-1:9879"
        return dial(known.pop(0) if len(known) > 1 else known[0], **options)

    def emit(event: ev.Event) -> None:
        if isinstance(event, ev.SessionOpened):
            opened.set()

    monkeypatch.setattr(grpc.aio, "insecure_channel", insecure_channel)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with session_with(emit, "namesrv-1:9879") as (controller, _):
            known += [f"127.0.0.1:{unused.getsockname()[1]}", controller.address]
            await asyncio.wait_for(opened.wait(), 10)
            await controller.session()
    assert known == [controller.address]


@pytest.mark.parametrize("failure", [OSError("no space left on device"), AssertionError("rule")])
async def test_a_session_survives_a_consumer_of_its_events_that_fails(failure):
    """A full disk at a role change, say: the broker is not dead to that controller for ever. A
    broken rule reaches the loop's handler, which ends a server."""
    failures, told, seen = [failure], [], asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: told.append(context.get("exception"))
    )

    def emit(event: ev.Event) -> None:
        if isinstance(event, ev.ViewReceived):
            if failures:
                raise failures.pop()
            seen.set()

    async with session_with(emit) as (controller, _):
        for number in (1, 2):
            stream = await controller.session(number)
            await stream.push(view_message(1, 1, 1, [1], {1: "life"}))
        await asyncio.wait_for(seen.wait(), 10)
        assert told == [failure] * isinstance(failure, AssertionError)


async def test_a_stream_of_which_the_opening_fails_is_ended(monkeypatch):
    """Its end is reported like any other: else heartbeats would be queued for it for good."""
    monkeypatch.setattr(session, "REDIAL_FIRST_S", 0.0)
    again, events = asyncio.Event(), list[str]()

    def emit(event: ev.Event) -> None:
        events.append(type(event).__name__)
        if len(events) == 1:
            raise OSError("no space left on device")
        if events[-1] == "SessionOpened":
            again.set()

    async with session_with(emit):
        await asyncio.wait_for(again.wait(), 10)
    assert events == ["SessionOpened", "SessionClosed"] * 2


async def test_r5_what_was_answered_on_an_earlier_stream_is_no_answer_on_the_next(monkeypatch):
    """The controller counts heartbeats of a stream from 1: it would take a deaf broker for one that
    hears it."""
    monkeypatch.setattr(session, "REDIAL_FIRST_S", 0.0)
    heard = asyncio.Event()

    def emit(event: ev.Event) -> None:
        if isinstance(event, ev.AnswerReceived):
            heard.set()

    async with session_with(emit) as (controller, keeper):
        effect = ev.SendHeartbeat(controller.address, 9, 0, 0, 0)
        await controller.session()
        keeper.heartbeat(effect, pb.Heartbeat(sequence=9))
        await asyncio.wait_for(heard.wait(), 10)
        keeper.drop("a new stream")
        stream = await controller.session(2)
        keeper.heartbeat(effect, pb.Heartbeat(sequence=9))
        await controller.until(lambda: bool(stream.heartbeats))
        assert stream.heartbeats[0].answered == 0


class Unconnected(ControllerSession):
    """One whose streams end at once, `accepted` or not; `pauses`: the seconds before each dial."""

    accepted: list[bool]

    async def _connected(self) -> bool:
        return True

    async def _talk(self) -> bool:
        if not self.accepted:
            await asyncio.Event().wait()
        return self.accepted.pop(0)


def unconnected(*accepted: bool) -> Unconnected:
    made = Unconnected("c1:1", pb.Hello(), ControllerChannels(), lambda event: None)
    made.accepted = list(accepted)
    return made


async def test_a_dial_that_fails_within_is_repeated(monkeypatch):
    """Else there would be no session with that controller until the broker is started again."""
    monkeypatch.setattr(session, "REDIAL_FIRST_S", 0.0)
    monkeypatch.setattr(
        Unconnected, "_connected", AsyncMock(side_effect=[RuntimeError("no credentials"), True])
    )
    keeper = unconnected(True)
    while keeper.accepted:
        assert not keeper._task.done()
        await asyncio.sleep(0)
    await keeper.close("done", 0)


async def test_a_controller_that_refuses_is_dialled_ever_more_seldom(monkeypatch):
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    keeper = unconnected(*[False] * 6, True, False)
    while keeper.accepted:
        await asyncio.wait([keeper._task], timeout=0.001)
    await keeper.close("done", 0)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 0.05, 0.1]


async def test_a_controller_that_does_not_read_gets_the_newest_heartbeats_and_a_goodbye_first():
    keeper = unconnected()
    keeper._outbox = outbox = asyncio.Queue(session.OUTBOX_MAX)
    effect = ev.SendHeartbeat("c1:1", 0, 0, 0, 0)
    for sequence in range(1, session.OUTBOX_MAX + 2):
        keeper.heartbeat(effect, pb.Heartbeat(sequence=sequence))
    first, *_, last = (outbox.get_nowait() for _ in range(outbox.qsize()))
    assert (first.heartbeat.sequence, last.heartbeat.sequence) == (2, session.OUTBOX_MAX + 1)
    for sequence in range(session.OUTBOX_MAX):
        keeper.heartbeat(effect, pb.Heartbeat(sequence=sequence))
    await keeper.close("planned stop", 0)
    assert outbox.get_nowait().goodbye.reason == "planned stop"
    assert outbox.get_nowait() is None


def test_a_controller_that_was_started_again_is_dialled_soon():
    """It may lead in the next moment, and knows of no broker that has not dialled it (R35)."""
    assert dict(session.CHANNEL_OPTIONS)["grpc.max_reconnect_backoff_ms"] <= 200
