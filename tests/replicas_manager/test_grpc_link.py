"""What goes to controllers of ours: facts of heartbeats, and the election that ends a switch."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from fake_controller import manager_config, view_message

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.protocol.codes import ResponseCode
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager import grpc_link
from batonmq.replicas_manager.grpc_link import GrpcLink
from batonmq.replicas_manager.link import ElectAnswer, LinkEvents, LogFacts
from batonmq.replicas_manager.switch import SwitchTask

FACTS = LogFacts(4, 900, 800, 100, "log-1")
TASK = SwitchTask("c1", "switch:n/1", 2, 3)


class Scene:
    """A link whose controllers reply `reply` to ElectMaster, or are silent without one. `asked`:
    (controller, request); `leader` is the one that is known to lead."""

    def __init__(self, reply: pb.ElectMasterReply | None = None, leader: str | None = None) -> None:
        self.asked: list[tuple[str, pb.ElectMasterRequest]] = []
        self.events: list[ev.Event] = []
        self.reply = reply
        config = manager_config(controllers=("c1", "c2"), election_priority=7)
        events = LinkEvents(
            step=self.events.append,
            switch_requested=lambda task: None,
            leader=lambda: leader,
            log_facts=lambda: FACTS,
        )
        self.link = GrpcLink(config, "life-1", events)
        self.link._channels = SimpleNamespace(stub=self.stub)

    def stub(self, controller: str) -> Any:
        async def elect(request: pb.ElectMasterRequest, timeout: float) -> Any:
            self.asked.append((controller, request))
            if self.reply is None:
                status = grpc.StatusCode.DEADLINE_EXCEEDED
                raise grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata())
            return self.reply

        return SimpleNamespace(ElectMaster=elect)


def reply(code: ResponseCode, view: pb.RoleView | None = None) -> pb.ElectMasterReply:
    return pb.ElectMasterReply(status=pb.Status(code=code, remark="a remark"), view=view)


def test_the_log_says_once_that_no_controller_has_answered_for_a_while(monkeypatch, caplog):
    link, call = Scene().link, ev.SendRegister("c1", 0, "r1", "")
    not_leader = ev.Replied(call, ResponseCode.CONTROLLER_NOT_LEADER, "")
    unanswered = ev.Unanswered(call, "refused")

    def at(now_ms: int, event: ev.Event) -> list[str]:
        monkeypatch.setattr(grpc_link, "boot_ms", lambda: now_ms)
        link._outcome(event)
        return [record.message.split()[0] for record in caplog.records]

    assert at(1_000, unanswered) == at(3_900, unanswered) == []
    assert at(3_950, not_leader) == at(4_000, unanswered) == at(6_990, unanswered) == []
    assert at(7_000, unanswered) == at(60_000, unanswered) == ["no_controller_answers"]


async def test_a_heartbeat_tells_the_log_and_what_was_accepted():
    scene, sent = Scene(), []
    session = SimpleNamespace(heartbeat=lambda effect, message: sent.append(message))
    scene.link._sessions["c1"] = session
    scene.link.heartbeat(ev.SendHeartbeat("c1", 5, 1_234, 3, 9), FACTS)
    scene.link.heartbeat(ev.SendHeartbeat("c2", 5, 1_234, 3, 9), FACTS)
    assert sent == [
        pb.Heartbeat(
            sequence=5,
            sent_ms=1_234,
            epoch=4,
            max_offset=900,
            confirm_offset=800,
            min_offset=100,
            election_priority=7,
            master_epoch=3,
            sync_state_set_epoch=9,
        )
    ]


@pytest.mark.parametrize(("leader", "asked"), [(None, "c1"), ("c2", "c2")])
async def test_r33_the_election_names_epoch_and_drained_offset_at_who_leads_now(leader, asked):
    """Each attempt is the same request. The view that it comes with is taken first: the old master
    must not go on for a moment after it was told."""
    view = view_message(2, 4, 1, [2], {1: "life-1", 2: "life-2"})
    scene = Scene(reply(ResponseCode.SUCCESS, view), leader)
    for _ in range(2):
        assert await scene.link.elect(TASK, 777) == ElectAnswer(0, "a remark")
    wanted = pb.ElectMasterRequest(
        cluster_name="C",
        broker_name="broker-a",
        broker_id=2,
        designate=True,
        expected_master_epoch=3,
        request_id="switch:n/1",
        reason="planned switch",
        drained_offset=777,
    )
    assert scene.asked == [(asked, wanted)] * 2
    for event in scene.events:
        assert isinstance(event, ev.ViewReceived)
        assert (event.view.key, event.pushed) == ((4, 1), False)
    assert len(scene.events) == 2


async def test_r33_without_an_answer_the_outcome_is_unknown():
    scene = Scene()
    assert await scene.link.elect(TASK, 777) is None
    assert not await scene.link.hand_over("c2", 2, 3, "full disk")
    assert scene.events == []


@pytest.mark.parametrize("code", [ResponseCode.SUCCESS, ResponseCode.CONTROLLER_NOT_LEADER])
async def test_r45_a_hand_over_is_done_only_where_the_controllers_say_so(code):
    """A refusal keeps the master at work: it tries again later, at another member."""
    scene = Scene(reply(code), leader="c1")
    done = await scene.link.hand_over("c2", 2, 3, "full disk")
    assert done is (code is ResponseCode.SUCCESS)
    ((controller, request),) = scene.asked
    assert (controller, request.broker_id, request.expected_master_epoch) == ("c2", 2, 3)
    assert request.designate and request.reason == "full disk"
