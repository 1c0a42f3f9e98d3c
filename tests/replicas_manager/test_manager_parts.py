"""What the ReplicasManager hands to its parts, and what its calls make of an answer."""

import asyncio
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from fake_controller import manager_config

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.role_view import Role, RoleView
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.config import remoting_timings
from batonmq.replicas_manager.controllers import ControllerRegistration
from batonmq.replicas_manager.link import DurableFacts, LogFacts
from batonmq.replicas_manager.role import CurrentView
from batonmq.replicas_manager.service import ReplicasManager
from batonmq.replicas_manager.session import ControllerCalls
from batonmq.replicas_manager.switch import SwitchTask

CONFIG = manager_config()


class Scene:
    """A manager of broker 1 in masterEpoch 3, set {1, 2, 3}, whose slaves acked `acks`."""

    def __init__(self, role: Role = Role.MASTER, acks: dict[int, int] | None = None) -> None:
        progress = SimpleNamespace
        actions: Any = Mock(switch_progress=lambda broker_id: progress(ack=(acks or {})[broker_id]))
        self.manager = ReplicasManager(CONFIG, actions, Mock(), incarnation="life-1")
        view = RoleView("C", "broker-a", 1, master_epoch=3, sync_state_set=frozenset({1, 2, 3}))
        current = SimpleNamespace(
            role=role, view=view, broker_id=1, key=(3, 8), highest_master_epoch=3
        )
        state = Mock(current=current, controllers=SimpleNamespace(leader="c1"))
        state.lease_valid.return_value = True
        self.manager._state = state
        self.events: list[ev.Event] = []
        self.manager._step = self.events.append


async def test_r45_a_master_hands_over_to_the_member_with_most_of_the_log():
    scene = Scene(acks={2: 700, 3: 900})
    heirs: list[tuple[str, int, int]] = []

    async def hand_over(leader: str, heir: int, master_epoch: int, reason: str) -> bool:
        heirs.append((leader, heir, master_epoch))
        return True

    scene.manager._link.hand_over = hand_over
    assert await scene.manager.hand_over("full disk")
    assert heirs == [("c1", 3, 3)]


async def test_r17_under_rocketmqs_controllers_the_log_is_looked_at_before_each_event():
    """They may elect this broker in the moment in which its log becomes suspect: `role_java.txt`
    says what it does then."""
    config = manager_config(protocol="remoting", timings=remoting_timings(200, 5_000))
    actions = Mock(log_facts=lambda: LogFacts(1, 500, 400, 0, "log-1", "rot"))
    manager = ReplicasManager(config, actions, Mock(), incarnation="life-1")
    events: list[ev.Event] = []
    manager._step = events.append
    elected = ev.ViewReceived("c1", RoleView("C", "broker-a", 1, master_epoch=3))
    manager._link._events.step(elected)
    manager._link._events.step(elected)
    assert events == [ev.SuspicionChanged("rot"), elected, elected]
    await manager.close()


def test_r18_why_the_leader_registers_nobody_is_said_until_it_does():
    registration = ControllerRegistration(1, lambda: "r1")
    registration.refused("another process with id 1 lives", 0)
    assert registration.refusal == "another process with id 1 lives"
    registration.succeeded(1_000)
    assert not registration.refusal


@pytest.mark.parametrize(("role", "epoch"), [(Role.MASTER, 3), (Role.SLAVE, None)])
def test_r33_only_a_master_has_a_mastership_to_hand_over(role, epoch):
    """A slave accepted the same masterEpoch: that makes no master of it."""
    scene = Scene(role)
    scene.manager._switch = Mock()
    task = SwitchTask("c1", "switch:n/1", 2, 3)
    scene.manager._switch_requested(task)
    scene.manager._switch.requested.assert_called_once_with(task, master_epoch=epoch, lease=True)


async def test_r11_a_proposal_is_based_on_the_view_that_the_broker_has():
    """A newer one may be on its way to it: on that the proposal knows nothing."""
    scene = Scene()
    scene.manager._runner = Mock(delivered_key=(3, 7))
    scene.manager.propose(frozenset({1, 2}), "3 is silent", confirm_offset=500)
    await asyncio.sleep(0)
    (event,) = scene.events
    assert isinstance(event, ev.ProposalRequested)
    assert (event.based_on, event.new_set) == ((3, 7), {1, 2})


class Reply:
    """A call under way, with the address that a controller which does not lead tells."""

    def __init__(self, leader: str) -> None:
        self.leader = leader

    def __await__(self) -> Generator[Any, None, pb.GetReplicaInfoReply]:
        yield from asyncio.sleep(0).__await__()
        status = pb.Status(code=ResponseCode.CONTROLLER_NOT_LEADER, remark="not the leader")
        return pb.GetReplicaInfoReply(status=status)

    async def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("leader-grpc-address", self.leader),) if self.leader else ()


class Calls:
    """Calls of a registered broker 1 to a controller with these methods. `emit`: what a consumer
    does with an event before it is in `events`."""

    def __init__(self, emit: Callable[[ev.Event], None] = lambda event: None, **methods: Any):
        self.events: list[ev.Event] = []
        self._emit = emit
        stub = SimpleNamespace(**methods)
        channels: Any = SimpleNamespace(stub=lambda target: stub, dialled=AsyncMock())
        facts = DurableFacts("", (), CurrentView(1, "life-1", 0))
        self._calls = ControllerCalls(
            CONFIG, facts, channels, lambda: LogFacts(0, 0, 0, 0, ""), self._take
        )

    def _take(self, event: ev.Event) -> None:
        self._emit(event)
        self.events.append(event)

    async def outcome_of(self, call: ev.Call) -> list[ev.Event]:
        self._calls.send(call)
        await asyncio.gather(*self._calls._tasks._running)
        return self.events


@pytest.mark.parametrize("leader", ["c2", ""])
async def test_who_does_not_lead_names_the_leader_before_its_answer_counts(leader):
    """So the next attempt goes there, and not to each controller in turn."""
    calls = Calls(GetReplicaInfo=lambda request, timeout: Reply(leader))
    hinted, answered = await calls.outcome_of(ev.FetchView("c1"))
    assert hinted == ev.LeaderHinted("c1", leader)
    assert isinstance(answered, ev.Replied)
    assert answered.code == ResponseCode.CONTROLLER_NOT_LEADER


async def test_an_empty_reply_registers_nobody():
    """As a server of something else may send it: its code counts as success."""
    calls = Calls(RegisterBroker=AsyncMock(return_value=pb.RegisterBrokerReply()))
    call = ev.SendRegister("c1", 0, "r/1", "")
    assert await calls.outcome_of(call) == [ev.Unanswered(call, "its reply names broker id 0")]


async def test_a_call_that_fails_within_has_an_outcome_all_the_same():
    """A text that no message can hold, say: the state machine asks again only after an outcome."""
    calls = Calls(GetReplicaInfo=Mock(side_effect=ValueError("no UTF-8")))
    call = ev.FetchView("c1")
    assert await calls.outcome_of(call) == [ev.Unanswered(call, "ValueError('no UTF-8')")]


@pytest.mark.parametrize("failure", [AssertionError("rule"), OSError("no space left on device")])
async def test_a_broken_rule_in_a_consumer_of_an_answer_ends_the_broker(failure):
    """The hint runs the state machine: the loop's handler hears of a rule that does not hold."""
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: told.append(context["exception"])
    )

    def emit(event: ev.Event) -> None:
        if isinstance(event, ev.LeaderHinted):
            raise failure

    calls = Calls(emit, GetReplicaInfo=lambda request, timeout: Reply("c2"))
    call = ev.FetchView("c1")
    assert await calls.outcome_of(call) == [ev.Unanswered(call, repr(failure))]
    assert told == [failure] * isinstance(failure, AssertionError)
