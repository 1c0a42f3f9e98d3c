"""What the largest legal request of each code and gRPC method costs a controller: lines of Python
in a turn of the loop (R58).

Counted, not timed. As many groups and replicas are registered as the settings allow. The tables
must name everything that is served.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc.aio
import msgspec
import pytest
from test_odd_requests import controller_of

from batonmq.controller.endpoints.grpc_endpoint import GrpcEndpoint
from batonmq.controller.history_log import REPLY_EVENTS_MAX
from batonmq.controller.rules.commands import RegisterBroker
from batonmq.controller.service import ControllerService
from batonmq.history.event import HistoryEvent
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1.controller_pb2_grpc import ControllerServiceStub
from batonmq.protocol.incarnation import new_process_name
from batonmq.protocol.json_body import REQUEST_SIZE_MAX
from batonmq.remoting import budget
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from tests.shared.ports import free_ports
from tests.shared.turns import counted_turns
from tests.shared.waiting import opened

LINES_MAX = 50_000
"""2 ms: 0.043 µs a line."""
LINES_MAX_OF: dict[int | str, int] = {1009: 230_000}
"""10 ms, as for the settings of a broker."""
CLUSTER = "C"
LARGE = "large"
"""The group with as many replicas as a group may have."""
AT_ONCE = 64
NAME = new_process_name()
"""Of the master of LARGE."""
MANY = tuple(range(1, 200_001))
SETTINGS = b"\n".join(b"k%d=v" % number for number in range(3000))

GROUP = {"clusterName": CLUSTER, "brokerName": LARGE}
Case = tuple[dict[str, str], bytes]
CODES: dict[int, Callable[[list[str]], Case]] = {
    904: lambda _: (GROUP | {"brokerId": "1", "brokerAddr": "h:1", "epoch": "1"}, b""),
    1001: lambda _: (
        GROUP | {"masterBrokerId": "1", "masterEpoch": "1"},
        msgspec.json.encode({"syncStateSet": MANY, "syncStateSetEpoch": 1}),
    ),
    1002: lambda _: (GROUP | {"brokerId": "2", "designateElect": "true"}, b""),
    1003: lambda _: (GROUP | {"brokerId": "2", "brokerAddress": "h:2"}, b""),
    1004: lambda _: (GROUP, b""),
    1005: lambda _: ({}, b""),
    1006: lambda names: ({}, msgspec.json.encode(names)),
    1009: lambda _: ({}, SETTINGS),
    1010: lambda _: ({}, b""),
    1011: lambda _: (GROUP | {"brokerControllerIdsToClean": "9;" * 32_000}, b""),
    1012: lambda _: (GROUP, b""),
    1013: lambda _: (GROUP | {"appliedBrokerId": "9", "registerCheckCode": "h:9;9"}, b""),
    60010: lambda _: ({}, b""),
}
IDS = {"cluster_name": CLUSTER, "broker_name": LARGE}
METHODS: dict[str, Callable[[list[str]], Any]] = {
    "RegisterBroker": lambda _: pb.RegisterBrokerRequest(
        **IDS, broker_id=1, incarnation=NAME.incarnation, secret=NAME.secret,
        earlier_lives=["e" * 66] * 3_500,
    ),
    "AlterSyncStateSet": lambda _: pb.AlterSyncStateSetRequest(
        broker_name=LARGE, master_broker_id=1, master_incarnation=NAME.incarnation,
        secret=NAME.secret, new_set=[pb.Member(broker_id=number) for number in MANY[:30_000]],
    ),
    "ElectMaster": lambda _: pb.ElectMasterRequest(**IDS, broker_id=2, designate=True),
    "GetReplicaInfo": lambda _: pb.GetReplicaInfoRequest(broker_name=LARGE),
    "GetHistory": lambda _: pb.GetHistoryRequest(),
    "ReportEvent": lambda _: pb.ReportEventRequest(broker_name=LARGE, kind="opened"),
    "BrokerSession": lambda _: pb.Hello(
        **IDS, broker_id=1, incarnation=NAME.incarnation, secret=NAME.secret
    ),
}  # fmt: skip


class World:
    def __init__(self, service: ControllerService) -> None:
        self.service = service
        self.client = RemotingClient()
        self.names: list[str] = []

    async def fill(self) -> None:
        """All groups that may be registered, the last of them with all replicas of a group."""
        settings = self.service.config
        self.names = [f"group{n:04d}" for n in range(settings.broker_groups_max - 1)] + [LARGE]
        wanted = [(name, 1) for name in self.names]
        wanted += [(LARGE, n) for n in range(2, settings.group_replicas_max + 1)]
        for at in range(0, len(wanted), AT_ONCE):
            await asyncio.gather(*(self._register(*one) for one in wanted[at : at + AT_ONCE]))

    async def _register(self, name: str, broker_id: int) -> None:
        own = (name, broker_id) == (LARGE, 1)
        result = await self.service.requests.submit(
            RegisterBroker(
                cluster_name=CLUSTER,
                broker_name=name,
                broker_id=broker_id,
                address=f"10.0.0.1:{broker_id}",
                incarnation=NAME.incarnation if own else f"{name}-{broker_id}",
            )
        )
        assert result.ok, result

    async def ask(self, code: int) -> RemotingCommand:
        ext, body = CODES[code](self.names)
        assert len(body) <= REQUEST_SIZE_MAX
        address = self.service.config.self_peer.remoting_address
        return await self.client.invoke(address, RemotingCommand.request(code, ext, body), 60_000)

    async def call(self, method: str) -> Any:
        request = METHODS[method](self.names)
        address = self.service.config.self_peer.grpc_address
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = ControllerServiceStub(channel)
            if method != "BrokerSession":
                return await getattr(stub, method)(request)

            async def messages() -> AsyncIterator[Any]:
                yield pb.BrokerMessage(hello=request)
                await asyncio.Event().wait()

            return await stub.BrokerSession(messages()).read()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def world(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = None

    async def begin() -> World:
        service = controller_of(tmp_path_factory.mktemp("controller"), free_ports(10))
        await service.start()
        await opened(service.gate)
        world = World(service)
        await world.fill()
        return world

    world = runner.run(begin())
    yield world
    runner.run(world.client.close())
    runner.run(world.service.close())


def test_every_code_and_method_has_a_case(world):
    processors = world.service._remoting_endpoint._server._processors
    assert set(CODES) == set(processors.handlers)
    served = {name for name, _ in inspect.getmembers(GrpcEndpoint) if name[0].isupper()}
    assert set(METHODS) == served


def test_r58_the_longest_history_is_made_in_turns(world, runner, monkeypatch):
    """Half of what may come from the files: a client of gRPC takes 4 MiB."""
    history = world.service._grpc_endpoint._history
    (event, *_), shown = world.service.requests.state.history, []

    async def events(*_: object) -> list[HistoryEvent]:
        return [event] * (REPLY_EVENTS_MAX // 2)

    async def play() -> None:
        shown.append(await world.call("GetHistory"))

    monkeypatch.setattr(history, "events", events)
    with counted_turns() as turns:
        runner.run(play())
    assert turns.lines <= LINES_MAX, f"{turns.lines} lines in one turn"
    assert len(shown[0].events) == REPLY_EVENTS_MAX // 2


@pytest.mark.parametrize("what", [*CODES, *METHODS])
def test_r58_the_largest_request_of_a_controller_is_cheap(world, runner, what, monkeypatch):
    monkeypatch.setattr(budget, "boot_s", lambda: 0.0)  # slices are not cut short by the time

    async def play() -> None:
        await asyncio.sleep(0)
        await (world.ask(what) if isinstance(what, int) else world.call(what))

    logging.disable()
    with counted_turns() as turns:
        runner.run(play())
    logging.disable(logging.NOTSET)
    assert turns.lines <= LINES_MAX_OF.get(what, LINES_MAX), f"{turns.lines} lines in one turn"
