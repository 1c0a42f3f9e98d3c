"""Three controllers in one process over real sockets, asked by both endpoints.

Raft runs with quick times. Brokers are stubs: a session on every controller, heartbeats by hand.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import grpc.aio
import pytest
from local_log import alone

from batonmq.controller.config import ControllerConfig
from batonmq.controller.rules.commands import RULES_VERSION
from batonmq.controller.service import ControllerService
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1 import controller_pb2_grpc as pb_grpc
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.sockets import CannotListenError
from tests.shared.ports import free_ports
from tests.shared.waiting import opened, until

CLUSTER, GROUP = "DefaultCluster", "broker-a"
LIMIT_S = 10


class BrokerSession:
    """One broker's stream to one controller. `take(kind)` waits for the next message of a kind."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._sequence = 0
        self._passed_views: list[pb.RoleView] = []
        """Views that came before an answer that was waited for."""

    async def send(self, **kind: Any) -> None:
        await self._call.write(pb.BrokerMessage(**kind))

    async def beat(self, **facts: int) -> pb.HeartbeatAnswer:
        await self.say(**facts)
        answer: pb.HeartbeatAnswer = await self.take("answer")
        return answer

    async def say(self, **facts: int) -> None:
        """A heartbeat whose answer nobody waits for."""
        self._sequence += 1
        told = {"epoch": -1, "max_offset": 0, "confirm_offset": 0, "master_epoch": -1, **facts}
        heartbeat = pb.Heartbeat(sequence=self._sequence, sent_ms=77, **told)
        await self.send(heartbeat=heartbeat)

    async def live(self) -> None:
        """Heartbeats for ever: on a slow machine one alone is soon too long ago."""
        while True:
            await self.say()
            await asyncio.sleep(0.1)

    async def take(self, kind: str) -> Any:
        if kind == "view" and self._passed_views:
            return self._passed_views.pop(0)
        async with asyncio.timeout(LIMIT_S):
            while True:
                message = await self._call.read()
                assert message is not grpc.aio.EOF, f"the session ended before a {kind} came"
                if message.WhichOneof("kind") == kind:
                    return getattr(message, kind)
                if message.WhichOneof("kind") == "view":
                    self._passed_views.append(message.view)

    async def take_view(self, condition: Callable[[pb.RoleView], bool]) -> pb.RoleView:
        while True:
            view: pb.RoleView = await self.take("view")
            if condition(view):
                return view

    def die(self) -> None:
        """The stream ends without a Goodbye."""
        self._call.cancel()


class Cluster:
    def __init__(self, base_port: int, folder: Path) -> None:
        ports = [base_port + 3 * number for number in range(3)]
        self.peers = ";".join(f"n{i}-127.0.0.1:{port}" for i, port in enumerate(ports))
        self.folder = folder
        self.services: dict[str, ControllerService] = {}
        self.channels: dict[str, grpc.aio.Channel] = {}
        self.remoting = RemotingClient()

    def config(self, node_id: str) -> ControllerConfig:
        return ControllerConfig(
            controller_peers=self.peers,
            controller_self_id=node_id,
            bind_address="127.0.0.1",
            controller_store_path=str(self.folder / node_id),
            raft_heartbeat_ms=30,
            raft_tick_ms=20,
            propose_timeout_ms=1_000,
        )

    async def start(self, node_id: str) -> None:
        service = ControllerService(self.config(node_id))
        await service.start()
        self.services[node_id] = service
        self.channels[node_id] = grpc.aio.insecure_channel(service.config.self_peer.grpc_address)

    async def stop(self, node_id: str) -> None:
        await self.channels.pop(node_id).close()
        await self.services.pop(node_id).close()

    async def close(self) -> None:
        await self.remoting.close()
        for node_id in list(self.services):
            await self.stop(node_id)

    async def leader(self) -> str:
        """The node whose gate is open, once there is one."""
        waits = {
            asyncio.create_task(opened(service.gate)): node_id
            for node_id, service in self.services.items()
        }
        done, late = await asyncio.wait(waits, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in late:
            wait.cancel()
        assert done, "no gate opened"
        return waits[done.pop()]

    async def at_leader(self, request: Callable[[str], Awaitable[Any]]) -> Any:
        """The reply of whoever leads. A busy machine may cost a leader its lead at any moment; then
        the request goes to the next one."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    reply = await request(await self.leader())
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    continue
                code = reply.code if isinstance(reply, RemotingCommand) else reply.status.code
                if code != ResponseCode.CONTROLLER_NOT_LEADER:
                    return reply

    async def while_one_leads(self, check: Callable[[str], Awaitable[None]]) -> None:
        """Runs `check(leader)`, and again if the lead moved meanwhile: then it shows nothing."""
        while True:
            leader = await self.leader()
            gate = self.services[leader].gate
            epoch = gate.controller_epoch
            try:
                return await check(leader)
            except (AssertionError, KeyError):
                if gate.controller_epoch == epoch:
                    raise

    def stub(self, node_id: str) -> Any:
        return pb_grpc.ControllerServiceStub(self.channels[node_id])

    async def ask(self, code: int, **ext: Any) -> RemotingCommand:
        reply: RemotingCommand = await self.at_leader(lambda node: self.ask_at(node, code, **ext))
        return reply

    async def ask_at(self, node_id: str, code: int, **ext: Any) -> RemotingCommand:
        address = self.services[node_id].config.self_peer.remoting_address
        return await self.remoting.invoke(address, RemotingCommand.request(code, ext))

    async def register(self, broker_id: int, **fields: Any) -> Any:
        request = {
            "cluster_name": CLUSTER,
            "broker_name": GROUP,
            "register_check_code": f"code-{broker_id}",
            "address": f"10.0.0.{broker_id}:10911",
            "ha_address": f"10.0.0.{broker_id}:10912",
            "incarnation": f"life-{broker_id}",
            "log_id": f"log-{broker_id}",
            "epoch": -1,
            "request_id": f"register-{broker_id}",
        }
        message = pb.RegisterBrokerRequest(**{**request, **fields})
        return await self.at_leader(lambda node: self.stub(node).RegisterBroker(message))

    async def alter(self, view: pb.RoleView, *members: int) -> Any:
        request = pb.AlterSyncStateSetRequest(
            broker_name=GROUP,
            master_broker_id=view.master_broker_id,
            master_incarnation=view.master_incarnation,
            master_epoch=view.master_epoch,
            sync_state_set_epoch=view.sync_state_set_epoch,
            new_set=[pb.Member(broker_id=each, incarnation=f"life-{each}") for each in members],
            request_id=f"alter-{view.sync_state_set_epoch}-{members}",
            confirm_offset=0,
            reason="expand",
        )
        return await self.at_leader(lambda node: self.stub(node).AlterSyncStateSet(request))

    async def elect(self, broker_id: int = 0, **fields: Any) -> Any:
        return await self.at_leader(lambda node: self.elect_at(node, broker_id, **fields))

    async def elect_at(self, node_id: str, broker_id: int = 0, **fields: Any) -> Any:
        fields.setdefault("expected_master_epoch", -1)
        request = pb.ElectMasterRequest(
            cluster_name=CLUSTER, broker_name=GROUP, broker_id=broker_id, **fields
        )
        return await self.stub(node_id).ElectMaster(request)

    @asynccontextmanager
    async def session(
        self, node_id: str, broker_id: int, incarnation: str = ""
    ) -> AsyncIterator[BrokerSession]:
        call = self.stub(node_id).BrokerSession()
        session = BrokerSession(call)
        hello = pb.Hello(
            cluster_name=CLUSTER,
            broker_name=GROUP,
            broker_id=broker_id,
            incarnation=incarnation or f"life-{broker_id}",
            log_id=f"log-{broker_id}",
        )
        await session.send(hello=hello)
        try:
            yield session
        finally:
            call.cancel()

    @asynccontextmanager
    async def brokers(
        self, *broker_ids: int
    ) -> AsyncIterator[dict[tuple[int, str], BrokerSession]]:
        """Registered brokers with a session on every node, the first one master, all in the set."""
        async with AsyncExitStack() as stack:
            sessions = {}
            for broker_id in broker_ids:
                reply = await self.register(broker_id)
                assert (reply.status.code, reply.broker_id) == (0, broker_id), reply.status.remark
                for node_id in self.services:
                    session = await stack.enter_async_context(self.session(node_id, broker_id))
                    sessions[broker_id, node_id] = session
                    await session.beat()
            reply = await self.elect(broker_ids[0])
            assert reply.view.master_broker_id == broker_ids[0], reply.status.remark
            if len(broker_ids) > 1:
                reply = await self.alter(reply.view, *broker_ids)
                assert reply.status.code == 0, reply.status.remark
            yield sessions


@pytest.fixture
@contextlib.asynccontextmanager
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(free_ports(9), tmp_path)
    try:
        for node_id in ("n0", "n1", "n2"):
            await cluster.start(node_id)
        yield cluster
    finally:
        await cluster.close()


async def test_r20_both_endpoints_answer_and_every_node_pushes_what_was_applied(cluster):
    async with cluster.brokers(1, 2) as sessions:
        info = await cluster.ask(1004, brokerName=GROUP)
        assert info.ext["masterAddress"] == "10.0.0.1:10911"
        body = json.loads(info.body)
        assert body == {"syncStateSet": [1, 2], "syncStateSetEpoch": 2}
        request = pb.GetReplicaInfoRequest(broker_name=GROUP)
        reply = await cluster.at_leader(lambda node: cluster.stub(node).GetReplicaInfo(request))
        view = reply.view
        assert (view.master_broker_id, list(view.sync_state_set)) == (1, [1, 2])
        assert [replica.alive for replica in view.replicas] == [True, True]
        for session in sessions.values():
            view = await session.take_view(lambda view: view.sync_state_set_epoch == 2)
            assert (view.master_broker_id, view.master_epoch) == (1, 1)
            assert view.master_ha_address == "10.0.0.1:10912"
            assert view.raft_index > 0


async def test_only_the_leader_answers_and_grants_the_lease_and_all_nodes_name_it(cluster):
    async with cluster.brokers(1) as sessions:
        for session in sessions.values():
            await session.take_view(lambda view: view.sync_state_set_epoch == 1)

        async def check(leader: str) -> None:
            for (_, node_id), session in sessions.items():
                answer = await session.beat()
                assert answer.leader == (node_id == leader)
                assert answer.leader_id == leader
                assert answer.sent_ms == 77
                assert (answer.master_epoch, answer.sync_state_set_epoch) == (1, 1)
                if node_id == leader:
                    continue
                call = cluster.stub(node_id).GetReplicaInfo(
                    pb.GetReplicaInfoRequest(broker_name=GROUP)
                )
                assert (await call).status.code == ResponseCode.CONTROLLER_NOT_LEADER
                trailing = {str(key): value for key, value in await call.trailing_metadata()}
                grpc_address = cluster.services[leader].config.self_peer.grpc_address
                assert trailing["leader-id"] == leader
                assert trailing["leader-grpc-address"] == grpc_address

        await cluster.while_one_leads(check)


async def test_r35_a_controller_that_no_broker_has_dialled_gives_the_lead_to_one_that_knows_them(
    cluster,
):
    """1. A follower is started again. 2. Before any broker has dialled it, the leader dies: it is
    the first heir. 3. The third one leads in the end."""
    first = await cluster.leader()
    async with cluster.brokers(1, 2) as sessions:
        blind, knows = (node_id for node_id in sorted(cluster.services) if node_id != first)
        await cluster.stop(blind)
        await cluster.start(blind)
        restarted = cluster.services[blind]
        async with asyncio.timeout(LIMIT_S):
            while not restarted.gate.had_followed or not restarted.state.groups:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        staying = [s for (_, node_id), s in sessions.items() if node_id == knows]
        beating = [asyncio.create_task(session.live()) for session in staying]
        cluster.services[first]._log.hand_over = AsyncMock()
        await cluster.stop(first)
        async with asyncio.timeout(LIMIT_S):
            await opened(cluster.services[knows].gate)
        for task in beating:
            task.cancel()
        await asyncio.gather(*beating, return_exceptions=True)


async def test_a_goodbye_hands_over_while_its_stream_is_open(cluster):
    async with cluster.brokers(1, 2) as sessions:
        for (broker_id, _), session in sessions.items():
            if broker_id == 1:
                await session.send(goodbye=pb.Goodbye(reason="stopping"))
        node_id = next(node_id for broker_id, node_id in sessions if broker_id == 2)
        view = await sessions[2, node_id].take_view(lambda view: view.master_epoch == 2)
        assert view.master_broker_id == 2
        history = cluster.services[node_id].state.history
        assert [event.reason for event in history if event.kind == "elected"][
            -1
        ] == "goodbye: stopping"


async def test_r18_a_second_life_of_an_id_is_refused(cluster):
    leader = await cluster.leader()
    async with cluster.brokers(1), cluster.session(leader, 1, "clone") as clone:
        refused = await clone.take("refused")
        assert refused.status.code == ResponseCode.CONTROLLER_BROKER_ID_INVALID
        assert "another process with id 1" in refused.status.remark


async def test_a_session_must_begin_with_a_whole_hello(cluster):
    leader = await cluster.leader()
    for first in (
        pb.BrokerMessage(heartbeat=pb.Heartbeat(sequence=1)),
        pb.BrokerMessage(hello=pb.Hello(broker_name=GROUP, broker_id=1)),
        pb.BrokerMessage(hello=pb.Hello(broker_name=GROUP, incarnation="x")),
    ):
        call = cluster.stub(leader).BrokerSession()
        await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_change_controller_leader(cluster):
    """DLedgerControllerTest.testChangeControllerLeader: the state survives its leader, and the new
    one decides: it saw the master's session end itself. The other members keep the set (R9)."""
    async with cluster.brokers(1, 2, 3) as sessions:
        old = await cluster.leader()
        await cluster.stop(old)
        new = await cluster.leader()
        assert new != old
        assert cluster.services[new].requests.controller_epoch >= 2
        info = await cluster.ask(1004, brokerName=GROUP)
        assert json.loads(info.body) == {"syncStateSet": [1, 2, 3], "syncStateSetEpoch": 2}
        left = {key: session for key, session in sessions.items() if key[1] != old}
        for (broker_id, _), session in left.items():
            if broker_id == 1:
                session.die()
            else:
                await session.say()
        for (broker_id, _), session in left.items():
            if broker_id != 1:
                view = await session.take_view(lambda view: view.master_epoch == 2)
                assert (view.master_broker_id, set(view.sync_state_set)) == (2, {2, 3})
        await cluster.start(old)
        cluster.services[old].requests.metadata()
        async with cluster.session(old, 2) as session:
            view = await session.take_view(lambda view: view.master_epoch == 2)
            assert view.master_broker_id == 2


async def test_rules_rise_to_those_that_all_know_and_fall_to_the_setting(cluster):
    """Without any request of a broker; the setting also counts for a leader that comes later."""

    async def settled(rules: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            await until(lambda: {each.state.rules for each in cluster.services.values()} == {rules})

    await settled(RULES_VERSION)
    for node_id in cluster.services:
        body = f"controllerRulesMax={RULES_VERSION - 1}".encode()
        request = RemotingCommand.request(RequestCode.UPDATE_CONTROLLER_CONFIG, body=body)
        address = cluster.services[node_id].config.self_peer.remoting_address
        assert (await cluster.remoting.invoke(address, request)).code == 0
    await settled(RULES_VERSION - 1)
    metadata = await cluster.ask(RequestCode.CONTROLLER_GET_METADATA_INFO)
    assert metadata.ext["rules"] == str(RULES_VERSION - 1)
    old = await cluster.leader()
    await cluster.stop(old)
    await cluster.leader()
    await cluster.start(old)
    await settled(RULES_VERSION - 1)


async def test_a_minority_answers_nothing(cluster):
    """R36: what needs a decision waits and says so; a refusal or UNAVAILABLE, never success."""
    async with cluster.brokers(1, 2):
        leader = await cluster.leader()
        for node_id in [each for each in cluster.services if each != leader]:
            await cluster.stop(node_id)
        try:
            reply = await cluster.elect_at(leader, 2, designate=True)
            assert reply.status.code == ResponseCode.CONTROLLER_NOT_LEADER
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        reply = await cluster.elect_at(leader, 2, designate=True)
        assert reply.status.code == ResponseCode.CONTROLLER_NOT_LEADER
        view = await cluster.ask_at(leader, 1004, brokerName=GROUP)
        assert view.code == ResponseCode.CONTROLLER_NOT_LEADER
        state = cluster.services[leader].state
        assert state.groups[GROUP].master_epoch == 1
        async with cluster.session(leader, 1) as session:
            assert not (await session.beat()).leader


ANY_TIME = ("pushed", "controller_leader_changed")
"""Events that come when they come; on a busy machine controllers may elect a leader again."""


async def test_history_is_served_and_kept_by_every_node(cluster):
    async with cluster.brokers(1, 2) as sessions:
        for session in sessions.values():
            await session.take_view(lambda view: view.sync_state_set_epoch == 2)
        report = pb.ReportEventRequest(
            broker_name=GROUP,
            broker_id=1,
            master_epoch=1,
            kind="first_ack",
            time_ms=5,
            json='{"offset":7}',
            request_id="report-1",
        )
        for _ in range(2):
            reply = await cluster.at_leader(lambda node: cluster.stub(node).ReportEvent(report))
            assert reply.status.code == 0
        leader = await cluster.leader()
        request = pb.GetHistoryRequest(broker_name=GROUP)
        events = (await cluster.stub(leader).GetHistory(request)).events
        events = [event for event in events if event.kind not in ANY_TIME]
        kinds = [event.kind for event in events]
        assert kinds == ["broker_registered"] * 2 + ["elected", "set_altered", "first_ack"]
        assert json.loads(events[-1].json)["json"] == '{"offset":7}'
        newest = pb.GetHistoryRequest(broker_name=GROUP, limit=1)
        assert len((await cluster.stub(leader).GetHistory(newest)).events) == 1
        later = pb.GetHistoryRequest(after_raft_index=events[-1].raft_index)
        for event in (await cluster.stub(leader).GetHistory(later)).events:
            assert event.kind == "pushed"
        for node_id in cluster.services:
            while not (await cluster.stub(node_id).GetHistory(newest)).events:
                pass  # a follower answers too, once it has applied as much
            assert await _in_pages(cluster.stub(node_id), json.loads(events[-1].json)) >= 3
    path = cluster.folder / leader / f"history-{leader}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [line["kind"] for line in lines if line["kind"] not in ANY_TIME]
    # The sessions have ended: an election may follow.
    assert kept[: len(kinds)] == kinds


async def _in_pages(stub: Any, last: dict[str, Any]) -> int:
    """Reads the history in pages of two up to the event `last`; returns how many they were."""
    place, pages = pb.HistoryPlace(), 0
    while (place.raft_index, place.part) < (last["raft_index"], last.get("part", 0)):
        reply = await stub.GetHistory(pb.GetHistoryRequest(after=place, limit=2))
        assert reply.continuation == pb.GetHistoryReply.FOLLOWS and len(reply.events) <= 2
        for event in map(json.loads, (event.json for event in reply.events)):
            assert (event["raft_index"], event.get("part", 0)) > (place.raft_index, place.part)
            place = pb.HistoryPlace(
                log=event["log"], raft_index=event["raft_index"], part=event.get("part", 0)
            )
        pages += bool(reply.events)  # a follower may not have applied it yet
    return pages


async def test_an_election_that_is_asked_for_is_told_with_who_saw_it_when_and_who_pushed_it(
    cluster,
):
    """Nobody died, so nothing was detected: the time of the request stands for that."""
    leader = await cluster.leader()
    async with cluster.brokers(1, 2) as sessions:
        for session in sessions.values():
            await session.take_view(lambda view: view.sync_state_set_epoch == 2)
        told: dict[str, dict[str, Any]] = {}
        while "pushed" not in told:
            reply = await cluster.stub(leader).GetHistory(pb.GetHistoryRequest())
            told = {event.kind: json.loads(event.json) for event in reply.events}
        elected, pushed = told["elected"], told["pushed"]
        assert elected["node"] == pushed["node"] == leader
        assert 0 < elected["detected_ms"] <= elected["proposed_ms"]
        applied_ms = json.loads(pushed["json"])["appliedMs"]
        assert elected["proposed_ms"] <= applied_ms <= pushed["time_ms"]
        leads = told["controller_leader_changed"]
        assert (leads["node"], leads["started_ms"] > 0) == (leader, True)


async def test_g7_all_controllers_restart_and_go_on(cluster, monkeypatch):
    """1. Two brokers, an election, a full set. 2. All controllers stop and start. 3. Applying the
    log again tells nobody of old elections and writes no event twice. 4. R3: the brokers register
    their next lives, which opens an election; epochs go on."""
    notices: list[int] = []
    monkeypatch.setattr(
        "batonmq.controller.endpoints.remoting_endpoint.RoleNotices.send",
        lambda _, view: notices.append(view.master_epoch),
    )
    async with cluster.brokers(1, 2) as sessions:
        for session in sessions.values():
            await session.take_view(lambda view: view.sync_state_set_epoch == 2)
        assert notices == [1]
        before = cluster.services[await cluster.leader()].state
    history = {
        node_id: cluster.folder / node_id / f"history-{node_id}.jsonl"
        for node_id in cluster.services
    }
    for node_id in history:
        await cluster.stop(node_id)
    lines = {node_id: path.read_text().splitlines() for node_id, path in history.items()}
    notices.clear()

    for node_id in history:
        await cluster.start(node_id)
    after = cluster.services[await cluster.leader()].state
    assert notices == []
    assert after.controller_epoch > before.controller_epoch
    old, new = before.groups[GROUP], after.groups[GROUP]
    assert new.replicas == old.replicas
    assert new.master_epoch >= old.master_epoch

    async with AsyncExitStack() as stack:
        for broker_id in (1, 2):
            life = f"next-life-{broker_id}"
            reply = await cluster.register(broker_id, incarnation=life, request_id=life)
            assert reply.status.code == 0, reply.status.remark
            for node_id in cluster.services:
                session = await stack.enter_async_context(cluster.session(node_id, broker_id, life))
                await session.beat()
                living = asyncio.create_task(session.live())
                stack.callback(living.cancel)
        view = await session.take_view(
            lambda view: view.master_epoch > old.master_epoch and view.master_broker_id > 0
        )
        assert view.master_incarnation.startswith("next-life")
    for node_id, path in history.items():
        now = path.read_text().splitlines()
        assert now[: len(lines[node_id])] == lines[node_id]
        assert len(set(now)) == len(now)


@pytest.mark.parametrize("offset", [0, 1, 2])
async def test_a_taken_port_is_named_and_nothing_stays_open(offset, tmp_path):
    base = free_ports(3)
    config = alone(tmp_path, base)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", base + offset))
        taken.listen()
        with pytest.raises(CannotListenError, match=f"port {base + offset}: it is taken"):
            await ControllerService(config).start()
    service = ControllerService(config)
    await service.start()
    await opened(service.gate)
    await service.close()
