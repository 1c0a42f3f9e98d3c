"""The link with RocketMQ's controllers: what it tells them, and what it makes of their answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeVar
from unittest.mock import AsyncMock, Mock

import pytest
from fake_controller import manager_config
from java_controller import JavaController, Record

from batonmq.protocol.bodies import EpochEntryCache
from batonmq.protocol.codes import (
    HA_ADDRESS_FIELD,
    INCARNATION_FIELD,
    LOG_ID_FIELD,
    RequestCode,
    ResponseCode,
)
from batonmq.protocol.errors import ConnectError
from batonmq.protocol.role_view import Replica, RoleView
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingServer
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager import remoting_link
from batonmq.replicas_manager.config import remoting_timings
from batonmq.replicas_manager.link import DurableFacts, LinkEvents, LogFacts
from batonmq.replicas_manager.remoting_calls import LeaderInfo, PeerNames
from batonmq.replicas_manager.remoting_link import RemotingLink
from batonmq.replicas_manager.role import CurrentView
from batonmq.replicas_manager.switch import SwitchTask
from batonmq.runtime.clock import boot_ms

OWN = "127.0.0.1:10911"
LIFE = "this-life"
E = TypeVar("E", bound=ev.Event)


class Broker:
    """A link, what it said, and who this broker is."""

    def __init__(self, controller: JavaController, *, learner: bool = False) -> None:
        self.controller = controller
        self.facts = LogFacts(1, 500, 400, 0, "log-1")
        self.events: list[ev.Event] = []
        self.switches: list[SwitchTask] = []
        self.current = CurrentView(1, LIFE, 0)
        self._changed = asyncio.Event()
        config = manager_config(
            controllers=(controller.address,),
            timings=remoting_timings(200, 5000),
            learner=learner,
            protocol="remoting",
        )
        events = LinkEvents(
            self._step, self.switches.append, lambda: controller.address, lambda: self.facts
        )
        self.link = RemotingLink(config, LIFE, events)
        self.link.begin(DurableFacts("code", (), self.current))

    def _step(self, event: ev.Event) -> None:
        self.events.append(event)
        if isinstance(event, ev.ViewReceived):
            self.current.take(event.view)
        self._changed.set()

    async def until(self, found: Callable[[], E | None]) -> E:
        async with asyncio.timeout(10):
            while (event := found()) is None:
                self._changed.clear()
                await self._changed.wait()
        return event

    async def next(self, kind: type[E]) -> E:
        """The next event of that kind from now on."""
        seen = len(self.events)
        return await self.until(
            lambda: next((e for e in self.events[seen:] if isinstance(e, kind)), None)
        )

    async def in_session(self) -> None:
        self.link.open_sessions(1)
        await self.next(ev.SessionOpened)

    async def beat(self) -> ev.AnswerReceived:
        """One heartbeat, to the controller's answer."""
        effect = ev.SendHeartbeat(self.controller.address, 1, boot_ms(), 0, 0)
        self.link.heartbeat(effect, self.facts)
        return await self.next(ev.AnswerReceived)


@contextlib.asynccontextmanager
async def new_broker(*, learner: bool = False) -> AsyncIterator[Broker]:
    controller = JavaController()
    await controller.listen()
    broker = Broker(controller, learner=learner)
    try:
        yield broker
    finally:
        await broker.link.close()
        await controller.close()


@pytest.fixture
def broker() -> contextlib.AbstractAsyncContextManager[Broker]:
    return new_broker()


def lead(controller: JavaController, master: int = 1, epoch: int = 1) -> None:
    """Replica 1, this broker, and 2, which nobody can dial."""
    controller.replicas = {1: Record(OWN, "x", alive=True), 2: Record("127.0.0.1:1", "y")}
    controller.master, controller.key, controller.members = master, (epoch, 7), [1]


async def test_a_heartbeat_brings_the_view_and_the_answer_of_the_leader(broker):
    lead(broker.controller)
    await broker.in_session()
    broker.link.open_sessions(1)  # again: it changes nothing
    answer = await broker.beat()
    assert [type(event) for event in broker.events].count(ev.SessionOpened) == 1
    assert (answer.leader, answer.master_epoch, answer.sync_state_set_epoch) == (True, 1, 7)
    [view] = [e.view for e in broker.events if isinstance(e, ev.ViewReceived)]
    assert (view.master_broker_id, view.master_incarnation) == (1, LIFE)
    assert view.master_ha_address == "127.0.0.1:10912"
    own = view.replica(1)
    assert own is not None and (own.incarnation, own.log_id) == (LIFE, "log-1")
    await broker.controller.until(lambda: broker.controller.heartbeats)
    assert broker.controller.heartbeats[0]["maxOffset"] == "500"


async def test_r3_a_process_that_is_taken_for_the_one_before_shows_no_sign_of_life(broker):
    """Until the controllers have elected anew: they would call its earlier mastership alive."""
    broker.current = CurrentView(1, LIFE, 3)
    broker.link.begin(DurableFacts("", (), broker.current))
    lead(broker.controller, epoch=3)
    await broker.in_session()
    for _ in range(2):
        await broker.beat()
    broker.controller.master, broker.controller.key = None, (4, 7)
    await broker.beat()
    assert not broker.controller.heartbeats
    await broker.beat()
    await broker.controller.until(lambda: broker.controller.heartbeats)


async def test_r17_a_suspect_log_shows_no_sign_of_life_until_it_is_whole(broker):
    lead(broker.controller, master=2)
    broker.facts = replace(broker.facts, suspect="another boot")
    await broker.in_session()
    for _ in range(2):
        await broker.beat()
    assert not broker.controller.heartbeats
    broker.facts = replace(broker.facts, suspect="")
    await broker.beat()
    await broker.controller.until(lambda: broker.controller.heartbeats)


async def test_r17_a_master_whose_log_becomes_suspect_is_not_silent(broker):
    """They would elect nobody in its place while the set is this replica alone."""
    lead(broker.controller)
    await broker.in_session()
    await broker.beat()
    await broker.controller.until(lambda: broker.controller.heartbeats)
    broker.facts = replace(broker.facts, suspect="rot")
    broker.controller.heartbeats.clear()
    await broker.beat()
    await broker.controller.until(lambda: broker.controller.heartbeats)


async def test_a_learner_shows_no_sign_of_life():
    async with new_broker(learner=True) as broker:
        lead(broker.controller, master=2)
        await broker.in_session()
        for _ in range(2):
            await broker.beat()
        assert not broker.controller.heartbeats


async def test_r45_a_broker_that_gives_way_ends_its_connections_and_is_silent_for_a_while(broker):
    lead(broker.controller)
    await broker.in_session()
    await broker.beat()
    await broker.controller.until(lambda: broker.controller.heartbeats)
    broker.link.drop_all("no room")
    await broker.next(ev.SessionClosed)
    await broker.next(ev.SessionOpened)
    broker.controller.heartbeats.clear()
    await broker.beat()
    assert not broker.controller.heartbeats


async def test_an_id_is_applied_for_once_though_the_answer_was_lost(broker):
    broker.current.broker_id = 0
    replies = []
    for _ in range(2):  # the second as after a crash before the id was saved
        broker.link.send(ev.SendRegister(broker.controller.address, 0, "r", ""))
        replies.append(await broker.next(ev.Replied))
    assert [(reply.code, reply.broker_id) for reply in replies] == [(0, 1), (0, 1)]
    assert list(broker.controller.replicas) == [1]
    assert broker.controller.replicas[1].check_code == f"{OWN};code"


async def test_a_taken_id_is_refused_and_another_one_asked_for(broker):
    broker.current.broker_id = 0
    broker.controller.replicas[1] = Record("127.0.0.1:1", "another")
    broker.link.send(ev.SendRegister(broker.controller.address, 0, "r", ""))
    assert (await broker.next(ev.Replied)).code == ResponseCode.CONTROLLER_BROKER_ID_INVALID
    broker.controller.next_id = 2
    broker.link.send(ev.SendRegister(broker.controller.address, 0, "r", ""))
    assert (await broker.next(ev.Replied)).broker_id == 2


async def test_an_id_below_1_is_no_answer(broker):
    """Neither a new one, nor one at this broker's address."""
    broker.current.broker_id = 0
    controller = broker.controller
    controller.next_id = 0
    broker.link.send(ev.SendRegister(controller.address, 0, "r", ""))
    assert "broker id 0: must be at least 1" in (await broker.next(ev.Unanswered)).what
    controller.next_id = 1
    controller.replicas[0] = Record(OWN, f"{OWN};code")
    broker.link.send(ev.SendRegister(controller.address, 0, "r", ""))
    assert "broker id 0: must be at least 1" in (await broker.next(ev.Unanswered)).what


async def test_a_controller_that_does_not_lead_says_who_does(broker):
    lead(broker.controller)
    broker.controller.leads, broker.controller.leader = False, "127.0.0.1:9878"
    broker.link.send(ev.FetchView(broker.controller.address))
    reply = await broker.next(ev.Replied)
    assert (reply.code, reply.view) == (ResponseCode.CONTROLLER_NOT_LEADER, None)
    assert ev.LeaderHinted(broker.controller.address, "127.0.0.1:9878") in broker.events


async def test_an_alter_that_is_granted_brings_the_new_set(broker):
    lead(broker.controller)
    members = ((1, LIFE), (2, ""))
    alter = ev.SendAlter(broker.controller.address, "r", 1, 6, members, 400, "expand")
    broker.link.send(alter)
    reply = await broker.next(ev.Replied)
    assert reply.view is not None and reply.view.key == (1, 7)
    broker.controller.refuse[RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET] = (
        ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH
    )
    broker.link.send(alter)
    assert (await broker.next(ev.Replied)).code == 2001


async def test_an_election_that_another_won_brings_its_view(broker):
    lead(broker.controller, master=2)
    broker.controller.refuse[RequestCode.CONTROLLER_ELECT_MASTER] = (
        ResponseCode.CONTROLLER_MASTER_STILL_EXIST
    )
    broker.link.send(ev.SendElect(broker.controller.address, 0, "r", "no master is known"))
    reply = await broker.next(ev.Replied)
    assert reply.code == ResponseCode.CONTROLLER_MASTER_STILL_EXIST
    assert reply.view is not None and reply.view.master_broker_id == 2


async def test_a_call_without_an_answer_ends_as_such(broker):
    await broker.controller.close()
    broker.link.send(ev.FetchView(broker.controller.address))
    assert broker.controller.address in (await broker.next(ev.Unanswered)).what


async def test_a_call_ends_whatever_the_answer_is(broker):
    """An answer of nonsense is none, and a defect here is reported; no call is in flight for
    ever."""
    reported: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    lead(broker.controller)
    bodies = broker.controller.bodies
    bodies[RequestCode.CONTROLLER_GET_SYNC_STATE_DATA] = b'{"x":' * 100_000
    broker.link.send(ev.FetchView(broker.controller.address))
    assert "BrokerReplicasInfo" in (await broker.next(ev.Unanswered)).what
    bodies.clear()
    del broker.facts
    broker.link.send(ev.FetchView(broker.controller.address))
    assert "facts" in (await broker.next(ev.Unanswered)).what
    [error] = reported
    assert isinstance(error, AttributeError)


async def test_r33_a_master_that_hands_over_switches_by_itself(broker):
    address = broker.controller.address
    lead(broker.controller)
    broker.controller.elected = lambda request: lead(broker.controller, 2, epoch=2)
    handing = asyncio.create_task(broker.link.hand_over(address, 2, 1, "the master stops"))
    await asyncio.sleep(0)
    [task] = broker.switches
    assert (task.controller, task.broker_id, task.master_epoch) == (address, 2, 1)
    answer = await broker.link.elect(task, 500)
    assert answer is not None and answer.code == 0
    assert await handing
    assert broker.current.key == (2, 7)


async def test_r33_a_hand_over_that_fails_is_told(monkeypatch):
    """At once: a master without room asks another member then."""
    monkeypatch.setattr(remoting_link, "HAND_OVER_S", 60.0)
    async with new_broker() as broker:
        handing = asyncio.create_task(
            broker.link.hand_over(broker.controller.address, 2, 1, "the master stops")
        )
        await asyncio.sleep(0)
        broker.link.switch_failed(broker.switches[0], "it is behind")
        async with asyncio.timeout(10):
            assert not await handing


class Answers:
    """The calls to a controller that leads, without sockets; `fails`: how often it does not
    answer first."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.asked = 0

    async def metadata(self, address: str, timeout_ms: int) -> LeaderInfo:
        self.asked += 1
        if self.asked <= self.fails:
            raise ConnectError(address, "refused")
        return LeaderInfo(is_leader=True, leader=address)

    async def view(self, address: str, timeout_ms: int) -> None:
        return None


async def test_r5_the_lease_counts_from_the_heartbeat_and_each_one_polls_anew(broker):
    """1. A poll fails. 2. The next heartbeat polls again. 3. Its answer comes with the time at
    which that heartbeat was sent, however late it is."""
    link, answers = broker.link, Answers(fails=1)
    link._calls = answers
    connection = Mock(closed=True)
    link._client = Mock(live_connection=lambda _: connection, close=AsyncMock())
    for sent_ms in (1_000, 2_000):
        link.heartbeat(ev.SendHeartbeat("c", 1, sent_ms, 0, 0), broker.facts)
        await asyncio.gather(*link._tasks._running)
    (answer,) = [event for event in broker.events if isinstance(event, ev.AnswerReceived)]
    assert (answers.asked, answer.sent_ms, answer.leader) == (2, 2_000, True)


async def test_r41_a_replica_that_did_not_answer_is_asked_for_its_name_again():
    async with new_broker():
        asked: list[str] = []

        async def call(address: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
            asked.append(address)
            raise ConnectError(address, "refused")

        tasks: list[asyncio.Task[None]] = []
        names = PeerNames(
            Mock(call=call), lambda work: tasks.append(asyncio.create_task(work)), Mock()
        )
        view = RoleView("C", "broker-a", replicas=(Replica(1, OWN), Replica(2, "h2:1")))
        for _ in range(2):
            names.ask(view, 1)
            names.ask(view, 1)
            await asyncio.gather(*tasks)
        assert asked == ["h2:1", "h2:1"], "one question at a time, to others"


@pytest.mark.parametrize("made_anew", [False, True])
async def test_r41_brokers_of_ours_are_named_as_soon_as_they_answer(broker, made_anew):
    """The view comes without the name first: nothing waits for a broker that may be dead. Where a
    replica was made anew, the controllers know its former id at the same address, too."""
    living = 3 if made_anew else 2

    def named(request: RemotingCommand, _: Connection) -> RemotingCommand:
        said = EpochEntryCache(broker_id=living, broker_name="broker-a", cluster_name="C")
        ext = {INCARNATION_FIELD: "life-2", LOG_ID_FIELD: "log-2", HA_ADDRESS_FIELD: "h:2"}
        return RemotingCommand.response_to(request, ext=ext, body=said.encode())

    processors = Processors()
    processors.register(RequestCode.GET_BROKER_EPOCH_CACHE, named)
    peer = RemotingServer(processors)
    lead(broker.controller, master=2)
    port = await peer.listen("127.0.0.1", 0)
    for broker_id in {2, living}:
        broker.controller.replicas[broker_id] = Record(f"127.0.0.1:{port}", "y")
    broker.controller.master = living
    try:
        await broker.in_session()
        await broker.beat()
        view = await broker.until(
            lambda: next(
                (
                    event
                    for event in broker.events
                    if isinstance(event, ev.ViewReceived) and event.view.master_incarnation
                ),
                None,
            )
        )
        assert view.view.master_incarnation == "life-2"
        assert view.view.master_ha_address == "h:2"
        earlier = [e.view.raft_index for e in broker.events if isinstance(e, ev.ViewReceived)]
        assert earlier == sorted(set(earlier))
    finally:
        await peer.close()
