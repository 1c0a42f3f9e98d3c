"""The stream to one controller finds it wherever it is now."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest
from fake_controller import FakeController, view_message

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.replicas_manager import session
from batonmq.replicas_manager.events import Event, SessionOpened, ViewReceived
from batonmq.replicas_manager.session import ControllerChannels, ControllerSession


def test_a_controller_that_came_back_elsewhere_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. The name leads where nobody listens. 2. The next channel finds the controller."""
    monkeypatch.setattr(session, "READY_S", 0.05)
    dial = grpc.aio.insecure_channel

    async def scenario() -> None:
        controller, opened = FakeController(), asyncio.Event()
        await controller.start()
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            known = [f"127.0.0.1:{nobody.getsockname()[1]}", controller.address]

            def insecure_channel(name: str, **options: Any) -> grpc.aio.Channel:
                assert name == "namesrv-1:9879"
                return dial(known.pop(0) if len(known) > 1 else known[0], **options)

            def emit(event: Event) -> None:
                if isinstance(event, SessionOpened):
                    opened.set()

            monkeypatch.setattr(grpc.aio, "insecure_channel", insecure_channel)
            channels = ControllerChannels()
            keeper = ControllerSession(
                "namesrv-1:9879", pb.Hello(broker_name="broker-a", broker_id=1), channels, emit
            )
            await asyncio.wait_for(opened.wait(), 10)
            await controller.session()
            await keeper.close("done", 1.0)
            await channels.close()
        await controller.stop()
        assert known == [controller.address]

    asyncio.run(scenario())


@pytest.mark.parametrize("failure", [OSError("no space left on device"), AssertionError("rule")])
def test_a_session_survives_a_consumer_of_its_events_that_fails(failure: Exception) -> None:
    """A full disk at a role change, say: the broker is not dead to that controller for ever. A
    broken rule reaches the loop's handler, which ends a server."""

    async def scenario() -> None:
        controller, seen = FakeController(), asyncio.Event()
        await controller.start()
        failures, told = [failure], []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: told.append(context.get("exception"))
        )

        def emit(event: Event) -> None:
            if isinstance(event, ViewReceived):
                if failures:
                    raise failures.pop()
                seen.set()

        channels = ControllerChannels()
        hello = pb.Hello(broker_name="broker-a", broker_id=1)
        keeper = ControllerSession(controller.address, hello, channels, emit)
        first = await controller.session()
        await first.push(view_message(1, 1, 1, [1], {1: "life"}))
        second = await controller.session(2)
        await second.push(view_message(1, 1, 1, [1], {1: "life"}))
        await asyncio.wait_for(seen.wait(), 10)
        assert told == [failure] * isinstance(failure, AssertionError)
        await keeper.close("done", 1.0)
        await channels.close()
        await controller.stop()

    asyncio.run(scenario())


def test_a_controller_that_was_started_again_is_dialled_soon() -> None:
    """It may lead in the next moment, and knows of no broker that has not dialled it (R35)."""
    assert dict(session.CHANNEL_OPTIONS)["grpc.max_reconnect_backoff_ms"] <= 200
