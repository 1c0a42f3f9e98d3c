"""Managers against our own controller (one node, applied in place): registration to failover.

Each story twice: over gRPC, and over remoting, as under RocketMQ's controllers."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import grpc
import pytest
from fake_controller import RecordingBroker, manager_config
from local_log import LocalLog, alone

from batonmq.controller.raft.log import Machine
from batonmq.controller.service import ControllerService
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1 import controller_pb2_grpc
from batonmq.protocol.incarnation import new_process_name
from batonmq.protocol.role_view import Role, RoleView
from batonmq.replicas_manager.config import Protocol, SessionTimings, controller_addresses
from batonmq.replicas_manager.grpc_link import GrpcLink
from batonmq.replicas_manager.link import LogFacts
from batonmq.replicas_manager.service import ReplicasManager
from batonmq.replicas_manager.switch import SwitchProgress
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.sockets import descriptors_allowed
from tests.shared.ports import free_ports
from tests.shared.waiting import until

PATIENT = SessionTimings(session_timeout_ms=4_000, master_lease_ms=3_000)
"""A busy machine stalls this process; only a session that ends may cause an election here."""


class Replica(RecordingBroker):
    """A broker without a log: takes each role at once and writes it down."""

    def __init__(self, folder: Path, number: int, controller: str, protocol: Protocol) -> None:
        super().__init__()
        self._log_id = f"log-{number}"
        self.manager = ReplicasManager(
            manager_config(
                address=f"127.0.0.1:{20000 + number}",
                ha_address=f"127.0.0.1:{21000 + number}",
                controllers=controller_addresses(controller, protocol=protocol),
                identity_path=folder / f"brokerIdentity-{number}",
                role_path=folder / f"role-{number}",
                timings=PATIENT,
                protocol=protocol,
            ),
            self,
            self,
        )

    def log_facts(self) -> LogFacts:
        return LogFacts(-1, 0, 0, 0, self._log_id)

    def hold_sends(self) -> int:
        self._note("held")
        return 0

    def release_sends(self) -> None:
        self._note("released")

    def switch_progress(self, broker_id: int) -> SwitchProgress:
        """Every other replica has all there is."""
        return SwitchProgress(0, 0, 0, boot_ms(), True)

    async def become_master(self, view: RoleView, role_durable: Awaitable[None]) -> None:
        self._note("master", view.master_epoch, view.sync_state_set)

    async def become_slave(self, view: RoleView) -> None:
        self._note("slave", view.master_epoch, view.master_broker_id)

    def adopt_view(self, view: RoleView) -> None:
        self._note("set", view.sync_state_set)

    async def proposes(self, *wanted: int) -> None:
        """Proposes until it is so: a member that the controller has not heard yet is refused."""
        new_set = frozenset(wanted)
        async with asyncio.timeout(10):
            while ("set", new_set) not in self.calls:
                self._changed.clear()
                answers = self.answered()
                self.manager.propose(new_set, "expand", 0)
                while self.answered() == answers and ("set", new_set) not in self.calls:
                    await self._changed.wait()
                    self._changed.clear()

    def answered(self) -> int:
        return sum(what in ("refused", "unknown") for what, *_ in self.calls)

    async def die(self) -> None:
        """As kill -9 looks to a controller: the sessions end without Goodbye, which remoting does
        not know at all."""
        link = self.manager._link
        if isinstance(link, GrpcLink):
            tasks = [session._task for session in link._sessions.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            link._sessions.clear()
        await self.manager.close()


class Group:
    """One controller and the replicas of one group."""

    def __init__(self, folder: Path, protocol: Protocol) -> None:
        config = alone(
            folder / "controller",
            free_ports(2),
            broker_session_timeout_ms=PATIENT.session_timeout_ms,
            master_lease_ms=PATIENT.master_lease_ms,
        )
        self.controller = ControllerService(config, replicated_log=LocalLog("n0", Machine()))
        self.folder = folder
        self.address = config.self_peer.remoting_address
        self.protocol = protocol
        self.replicas: list[Replica] = []

    async def join(self, number: int) -> Replica:
        replica = Replica(self.folder, number, self.address, self.protocol)
        self.replicas.append(replica)
        await replica.manager.start()
        async with asyncio.timeout(10):
            manager = replica.manager
            await until(lambda: manager.registered)
        return replica

    async def in_sync(self) -> tuple[Replica, Replica]:
        """Replica 1 is master of epoch 1, replica 2 is in its set."""
        first = await self.join(1)
        await first.until("lease", True)
        second = await self.join(2)
        await second.until("slave", 1, 1)
        await first.proposes(1, 2)
        await second.until("set", frozenset({1, 2}))
        assert (first.manager.role, second.manager.role) == (Role.MASTER, Role.SLAVE)
        assert [first.manager.broker_id, second.manager.broker_id] == [1, 2]
        return first, second


@pytest.fixture(params=["grpc", "remoting"])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    chosen: Protocol = request.param
    return chosen


@contextlib.asynccontextmanager
async def new_group(folder: Path, protocol: Protocol) -> AsyncIterator[Group]:
    group = Group(folder, protocol)
    await group.controller.start()
    try:
        yield group
    finally:
        for replica in group.replicas:
            await replica.manager.close()
        await group.controller.close()


def peers_by_descriptor() -> list[tuple[int, int]]:
    """(descriptor, port of the other end) of the sockets of this process that are connected."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                found.append((int(name), copy.getpeername()[1]))
    return found


async def test_clients_have_lower_descriptors_than_the_sessions(tmp_path, held_descriptors):
    """Of a killed broker the kernel closes the highest first: by the end of its sessions the
    controllers notice the kill, however many clients it had."""
    async with new_group(tmp_path, "grpc") as group:
        await group.in_sync()
        grpc_port = group.controller.config.self_peer.grpc_port
        sessions = [fd for fd, peer in peers_by_descriptor() if peer == grpc_port]
        assert len(sessions) == 2
        assert min(sessions) > min(held_descriptors, descriptors_allowed() // 2)


async def test_the_master_dies_and_its_slave_takes_over(tmp_path, protocol):
    async with new_group(tmp_path, protocol) as group:
        first, second = await group.in_sync()
        await first.die()
        await second.until("master", 2, frozenset({2}))
        await second.until("lease", True)
        assert ("dead", frozenset({1})) in second.calls


async def test_a_planned_stop_of_the_master_elects_at_once(tmp_path, protocol):
    async with new_group(tmp_path, protocol) as group:
        first, second = await group.in_sync()
        await first.manager.close()
        await second.until("master", 2, frozenset({2}))


async def test_r33_a_master_that_is_told_to_end_hands_over_and_the_set_stays_whole(
    tmp_path, protocol
):
    async with new_group(tmp_path, protocol) as group:
        first, second = await group.in_sync()
        assert await first.manager.hand_over("a test")
        await second.until("master", 2, frozenset({1, 2}))
        await first.until("slave", 2, 2)
        assert not await first.manager.hand_over("a test"), "it is no master any more"
        assert ("held",) in first.calls


async def test_a_master_alone_has_nobody_to_hand_over_to(tmp_path, protocol):
    async with new_group(tmp_path, protocol) as group:
        first = await group.join(1)
        await first.until("lease", True)
        assert not await first.manager.hand_over("a test")
        assert first.manager.role is Role.MASTER


class Stranger:
    """Knows all that is public of the master of `group`, and sends it to the controller."""

    def __init__(self, group: Group, channel: grpc.aio.Channel) -> None:
        self.stub = controller_pb2_grpc.ControllerServiceStub(channel)
        view = group.controller.requests.view("broker-a")
        assert view is not None
        master = view.replica(view.master_broker_id)
        assert master is not None
        self.view, self.master = view, master

    async def opens(self, incarnation: str, secret: str) -> pb.ControllerMessage:
        """The first answer to a session with that name."""
        hello = pb.Hello(
            cluster_name="C",
            broker_name="broker-a",
            broker_id=self.master.broker_id,
            incarnation=incarnation,
            log_id=self.master.log_id,
            secret=secret,
        )
        call = self.stub.BrokerSession(iter([pb.BrokerMessage(hello=hello)]))
        async for message in call:
            return message
        raise AssertionError("no answer")

    async def registers(self, incarnation: str, secret: str, broker_id: int = 0) -> int:
        request = pb.RegisterBrokerRequest(
            cluster_name="C",
            broker_name="broker-a",
            broker_id=broker_id or self.master.broker_id,
            address="127.0.0.1:1",
            incarnation=incarnation,
            log_id=self.master.log_id,
            max_offset=10**12,
            earlier_lives=[self.master.incarnation],
            secret=secret,
        )
        return int((await self.stub.RegisterBroker(request)).status.code)

    async def alters(self, incarnation: str, secret: str) -> int:
        request = pb.AlterSyncStateSetRequest(
            broker_name="broker-a",
            master_broker_id=self.master.broker_id,
            master_incarnation=incarnation,
            master_epoch=self.view.master_epoch,
            sync_state_set_epoch=self.view.sync_state_set_epoch,
            new_set=[pb.Member(broker_id=1, incarnation=self.master.incarnation)],
            secret=secret,
        )
        return int((await self.stub.AlterSyncStateSet(request)).status.code)


async def test_r59_a_stranger_that_knows_all_that_is_public_speaks_for_no_process(tmp_path):
    async with new_group(tmp_path, "grpc") as group:
        first, _ = await group.in_sync()
        address = group.controller.config.self_peer.grpc_address
        async with grpc.aio.insecure_channel(address) as channel:
            stranger = Stranger(group, channel)
            public, own = stranger.master.incarnation, new_process_name()
            for incarnation, secret in (
                (public, ""),
                (public, public),
                (public, own.secret),
                (own.incarnation, own.secret),
                ("of an earlier version", ""),
            ):
                for _ in range(2):
                    answer = await stranger.opens(incarnation, secret)
                    assert answer.refused.status.code != 0, (incarnation, secret)
                assert await stranger.registers(incarnation, secret) != 0
                assert await stranger.alters(incarnation, secret) != 0
        view = group.controller.requests.view("broker-a")
        assert view is not None and view.key == stranger.view.key
        assert view.replica(1) == stranger.master
        assert first.manager.role is Role.MASTER and first.manager.lease_valid(boot_ms())
        assert ("lease", False) not in first.calls


async def test_r59_a_stranger_has_the_id_of_no_member_that_is_away(tmp_path):
    async with new_group(tmp_path, "grpc") as group:
        _, second = await group.in_sync()
        address = group.controller.config.self_peer.grpc_address
        await second.die()
        async with grpc.aio.insecure_channel(address) as channel:
            stranger, own = Stranger(group, channel), new_process_name()
            for incarnation, secret in (
                (own.incarnation, own.secret),
                ("of an earlier version", ""),
            ):
                assert await stranger.registers(incarnation, secret, broker_id=2) != 0
        again = await group.join(2)
        await again.until("slave", 1, 1)
        assert again.manager.broker_id == 2


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


async def test_r59_a_secret_is_in_no_state_file_or_log_line(tmp_path, caplog):
    caplog.set_level("DEBUG")

    async with new_group(tmp_path, "grpc") as group:
        first, _ = await group.in_sync()
        name = first.manager._name
        told = repr(group.controller.requests.state) + caplog.text + repr(name)
        assert name.incarnation in told
        folder_secret = first.manager._identity.secret_path.read_text()
        assert name.secret not in told and folder_secret not in told
    stored = contents(tmp_path)
    assert stored and not any(name.secret.encode() in each for each in stored)
