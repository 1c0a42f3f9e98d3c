"""Reports outlive the controller that led when they were made; a stop says nothing unusual."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_controller import FakeController

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.protocol.codes import ResponseCode
from batonmq.replicas_manager import grpc_link
from batonmq.replicas_manager.grpc_link import OFTEN_MAX, OFTEN_MS, EventReporter
from batonmq.replicas_manager.session import ControllerChannels, ControllerSession


@pytest.fixture
@contextlib.asynccontextmanager
async def controllers() -> AsyncIterator[tuple[FakeController, FakeController]]:
    controllers = FakeController(), FakeController()
    for controller in controllers:
        await controller.start()
    try:
        async with asyncio.timeout(20):
            yield controllers
    finally:
        for controller in controllers:
            await controller.stop()


def reported(controller: FakeController) -> list[tuple[str, str]]:
    return [(each.kind, each.request_id) for each in controller.asked.get("ReportEvent", [])]


async def test_a_report_that_died_with_the_leader_goes_to_the_next_one(controllers, monkeypatch):
    """The first leader gets `opened` and dies before it answers. The next one gets it under
    the same request id, so that it stands in the history once, and the later ones in their order.
    Of more than are kept, the oldest was dropped.
    """
    monkeypatch.setattr("batonmq.replicas_manager.grpc_link.KEPT_MAX", 2)
    monkeypatch.setattr("batonmq.replicas_manager.grpc_link.CALL_TIMEOUT_S", 0.05)
    monkeypatch.setattr("batonmq.replicas_manager.grpc_link.RETRY_S", 0.01)
    first, second = controllers
    leader: list[str | None] = [first.address]
    channels = ControllerChannels()
    reporter = EventReporter("broker-a", channels, lambda: leader[0])

    async def never(request: Any) -> Any:
        await asyncio.Event().wait()

    first.handlers["ReportEvent"] = never
    second.handlers["ReportEvent"] = lambda request: pb.ReportEventReply()
    reporter.report("one too many", 1, 2, {})
    reporter.report("opened", 1, 2, {"maxOffset": 5})
    reporter.report("first_ack", 1, 2, {})
    await first.until(lambda: bool(reported(first)))
    leader[0] = None
    await first.stop()
    leader[0] = second.address
    await second.until(lambda: len(reported(second)) == 2)
    assert [kind for kind, _ in reported(second)] == ["opened", "first_ack"]
    assert reported(second)[0] == reported(first)[0]
    await first.start()
    await reporter.close()
    await channels.close()


async def test_one_kind_reported_too_often_is_counted_and_does_not_hide_another(controllers):
    """A bug that repeats an event must not fill the controllers' log with it."""
    first, _second = controllers
    first.handlers["ReportEvent"] = lambda request: pb.ReportEventReply()
    channels = ControllerChannels()
    now_ms = [1_000]
    reporter = EventReporter("broker-a", channels, lambda: first.address, lambda: now_ms[0])
    for _ in range(OFTEN_MAX + 30):
        reporter.report("diverged", 1, 2, {"reason": "x"})
    reporter.report("opened", 1, 2, {})
    now_ms[0] += OFTEN_MS - 1
    reporter.report("diverged", 1, 2, {"reason": "x"})
    now_ms[0] += 1
    reporter.report("diverged", 1, 2, {"reason": "x"})
    await first.until(lambda: len(reported(first)) == OFTEN_MAX + 2)
    kinds = [kind for kind, _ in reported(first)]
    assert kinds == ["diverged"] * OFTEN_MAX + ["opened", "diverged"]
    last = first.asked["ReportEvent"][-1]
    assert json.loads(last.json) == {"reason": "x", "notTold": 31}
    await reporter.close()
    await channels.close()


async def test_a_report_waits_for_a_leader_and_is_sent_again_where_none_answered(monkeypatch):
    """1. Nobody leads. 2. A controller is asked that leads no more. 3. Its successor takes it: the
    same request, so the history has it once."""
    monkeypatch.setattr(grpc_link, "SETTLE_S", 0)
    monkeypatch.setattr(grpc_link, "RETRY_S", 0)
    leaders = [None, None, "c1", "c2"]
    asked: list[tuple[str, str]] = []

    done = asyncio.Event()

    def stub(controller: str) -> Any:
        async def report(request: pb.ReportEventRequest, timeout: float) -> pb.ReportEventReply:
            asked.append((controller, request.request_id))
            if controller == "c2":
                done.set()
                return pb.ReportEventReply()
            code = ResponseCode.CONTROLLER_NOT_LEADER
            return pb.ReportEventReply(status=pb.Status(code=code))

        return SimpleNamespace(ReportEvent=report)

    channels: Any = SimpleNamespace(stub=stub)
    reporter = EventReporter("broker-a", channels, lambda: leaders.pop(0))
    reporter.report("opened", 1, 2, {})
    await asyncio.wait_for(done.wait(), 10)
    await reporter.close()
    (first, id_then), (second, id_now) = asked
    assert (first, second) == ("c1", "c2") and id_then == id_now


def is_of_an_earlier_loop(record: logging.LogRecord) -> bool:
    """gRPC's poller, one for the whole process, wakes the closed loop of an earlier test."""
    error = record.exc_info[1] if record.exc_info else None
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


@pytest.mark.parametrize("goodbye_s", [0.0, 0.2])
async def test_the_stop_of_a_session_logs_no_warning(controllers, goodbye_s, caplog):
    """A Goodbye in time, or none: either way the stream's requests end without complaint."""
    with caplog.at_level(logging.DEBUG):
        first, second = controllers
        channels = ControllerChannels()
        hello = pb.Hello(broker_name="broker-a", broker_id=1, incarnation="life")
        sessions = [
            ControllerSession(controller.address, hello, channels, lambda event: None)
            for controller in (first, second)
        ]
        await first.session()
        await second.session()
        await asyncio.gather(*(session.close("stop", goodbye_s) for session in sessions))
        await channels.close()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record for record in warnings if not is_of_an_earlier_loop(record)] == []
