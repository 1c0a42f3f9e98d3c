"""Which name servers are asked, for how long, and whose route is used."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from batonmq.client.errors import NoNameServerError, NoRouteError
from batonmq.client.instance.master_calls import MasterCalls
from batonmq.client.instance.name_servers import NameServers
from batonmq.client.instance.routes import RouteTable
from batonmq.protocol.bodies import BrokerData, QueueData, TopicRouteData
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import ConnectError, RequestTimeoutError, ResponseError
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import boot_ms

SERVERS = ("ns1:9876", "ns2:9876", "ns3:9876")
Answer = Callable[[RemotingCommand], RemotingCommand]


class StandIn:
    """Name servers that answer what `answers` has for them; one that it lacks is silent for as long
    as it is asked. `asked`: the addresses in turn, with their time."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = {f"{name}:9876": answer for name, answer in answers.items()}
        self.asked: list[tuple[str, int]] = []
        self.servers = NameServers(SERVERS, self)  # type: ignore[arg-type]

    async def invoke(
        self, address: str, request: RemotingCommand, timeout_ms: int
    ) -> RemotingCommand:
        self.asked.append((address, timeout_ms))
        answer = self.answers.get(address)
        if answer is None:
            raise RequestTimeoutError(address, timeout_ms, 1)
        return answer(request)

    async def master_of(self, suspect: str = "") -> str:
        """Of the route that is used."""
        suspects = (suspect,) if suspect else ()
        data = await self.servers.route("T", deadline_ms=boot_ms() + 9_000, suspects=suspects)
        return data.broker_datas[0].broker_addrs.get(0, "")

    def addresses(self) -> list[str]:
        return [address for address, _ in self.asked]


def names(master: str, *queues: QueueData) -> Answer:
    """A route with that master, "" for none."""
    brokers = [BrokerData(broker_addrs={0: master} if master else {2: "s:1"}, broker_name="b")]
    body = TopicRouteData(broker_datas=brokers, queue_datas=list(queues)).encode()
    return lambda request: RemotingCommand.response_to(request, body=body)


def unknown(request: RemotingCommand) -> RemotingCommand:
    return RemotingCommand.response_to(request, ResponseCode.TOPIC_NOT_EXIST)


def down(request: RemotingCommand) -> RemotingCommand:
    raise ConnectError("ns", "refused")


def refusing(request: RemotingCommand) -> RemotingCommand:
    return RemotingCommand.response_to(request, ResponseCode.NO_PERMISSION, "no such user")


def garbled(request: RemotingCommand) -> RemotingCommand:
    return RemotingCommand.response_to(request, body=b"{nonsense")


@pytest.mark.parametrize("suspect", ["", "old:1"])
def test_a_server_whose_route_cannot_be_read_is_passed_over(suspect: str) -> None:
    made = StandIn(ns1=garbled, ns2=names("new:1"), ns3=down)
    assert asyncio.run(made.master_of(suspect)) == "new:1"
    with pytest.raises(NoNameServerError, match="TopicRouteData"):
        asyncio.run(StandIn(ns1=garbled, ns2=garbled, ns3=garbled).master_of(suspect))


def test_a_hung_server_costs_its_share_and_the_last_one_gets_all_that_is_left() -> None:
    made = StandIn()
    with pytest.raises(NoNameServerError) as raised:
        asyncio.run(made.master_of())
    assert made.addresses() == list(SERVERS)
    assert [timeout_ms for _, timeout_ms in made.asked[:2]] == [500, 500]
    assert 8_000 < made.asked[2][1] <= 9_000
    assert all(address in str(raised.value) for address in SERVERS)


async def test_the_server_that_replied_last_is_asked_first() -> None:
    made = StandIn(ns2=names("m:1"))
    request = RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO)
    await made.servers.invoke(request, deadline_ms=boot_ms() + 9_000)
    made.asked.clear()
    await made.servers.invoke(request, deadline_ms=boot_ms() + 9_000)
    assert await made.master_of() == "m:1"
    assert made.addresses() == ["ns2:9876", "ns2:9876"]


@pytest.mark.parametrize(
    ("answers", "master"),
    [
        ({"ns1": names("old:1"), "ns2": names("new:1"), "ns3": down}, "new:1"),
        ({"ns1": names(""), "ns2": unknown, "ns3": names("new:1")}, "new:1"),
        ({"ns1": names("old:1"), "ns2": unknown, "ns3": down}, "old:1"),
        ({"ns1": names(""), "ns2": names(""), "ns3": names("")}, ""),
    ],
    ids=["another one is named", "none is named", "no better answer", "no master anywhere"],
)
def test_a_route_without_the_suspect_goes_before_one_with_it(
    answers: dict[str, Answer], master: str
) -> None:
    assert asyncio.run(StandIn(**answers).master_of("old:1")) == master


async def test_r50_a_name_server_that_is_cut_off_from_the_master_is_not_the_last_word() -> None:
    """One direction of its network is lost: it takes the master for gone, and lives."""
    made = StandIn(ns1=names(""), ns2=names("m:1"), ns3=names("m:1"))
    assert await made.master_of() == "m:1"
    made.asked.clear()
    assert await made.master_of() == "m:1"
    assert made.addresses() == ["ns2:9876"], "it is preferred from then on"


async def test_a_server_that_replied_is_preferred_though_no_master_is_anywhere() -> None:
    made = StandIn(ns2=names(""), ns3=names(""))
    assert await made.master_of() == ""
    made.asked.clear()
    assert await made.master_of() == ""
    assert made.asked[0][0] == "ns2:9876", "not the silent one"


def test_a_topic_is_unknown_only_where_a_server_that_replies_says_so() -> None:
    with pytest.raises(NoRouteError):
        asyncio.run(StandIn(ns1=unknown, ns2=down, ns3=unknown).master_of())
    with pytest.raises(NoNameServerError):
        asyncio.run(StandIn(ns1=down, ns2=down, ns3=down).master_of("old:1"))
    assert asyncio.run(StandIn(ns1=unknown, ns2=names("m:1")).master_of()) == "m:1"


async def test_a_route_of_a_billion_queues_is_not_used() -> None:
    """Each would become an object. A name server believes what brokers register."""
    many = names("m:1", QueueData(broker_name="b", write_queue_nums=1 << 30))
    with pytest.raises(NoNameServerError, match="route has 1073741824 queues"):
        await StandIn(ns1=many, ns2=many, ns3=many).master_of()


async def test_a_look_asks_one_name_server_and_the_next_look_another_one() -> None:
    made = StandIn(ns1=names("m:1"), ns2=names("m:1"), ns3=names("m:1"))
    for look in range(4):
        if look == 3:
            made.answers["ns2:9876"] = down
        await made.servers.route("T", deadline_ms=boot_ms() + 1000, by_turns=True)
    assert made.addresses() == [f"ns{number}:9876" for number in (2, 3, 1, 2, 3)]


def test_only_a_silence_that_is_not_meant_has_all_name_servers_asked() -> None:
    async def asked(held_check_ms: int | None) -> str:
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def never(*_: object) -> RemotingCommand:
            await asyncio.Event().wait()
            raise AssertionError

        def look(_: str, *, by_turns: bool = False, **__: object) -> None:
            if not found.done():
                found.set_result("one" if by_turns else "all")

        routes = Mock(refresh=AsyncMock(side_effect=look))
        connections = Mock(running=True, spawn=asyncio.ensure_future)
        connections.options.suspicion_ms = 1
        connections.remoting.invoke = never
        calls = MasterCalls(connections, routes)
        call = asyncio.ensure_future(
            calls.invoke_once("T", "b", "h:9", Mock(), 9, held_check_ms=held_check_ms)
        )
        which = await found
        calls.close()
        call.cancel()
        return which

    assert asyncio.run(asked(1)) == "one"
    assert asyncio.run(asked(None)) == "all"


async def test_a_refusal_is_final_unless_another_server_answers_or_the_route_is_known() -> None:
    def spawn(work: Coroutine[Any, Any, Any], **_: object) -> asyncio.Task[Any]:
        return asyncio.ensure_future(work)

    made = StandIn(ns1=down, ns2=refusing, ns3=names("m:1"))
    assert await made.master_of() == "m:1"
    made.answers["ns3:9876"] = refusing
    made.asked.clear()
    options = Mock(request_timeout_ms=60_000)
    routes = RouteTable(Mock(name_servers=made.servers, options=options, spawn=spawn), Mock())
    with pytest.raises(ResponseError, match="no such user"):
        await routes.refresh("T")
    assert sorted(made.addresses()) == list(SERVERS), "each once"
    made.answers["ns3:9876"] = names("m:1")
    route = await routes.refresh("T")
    made.answers["ns3:9876"] = refusing
    with pytest.raises(NoNameServerError, match="NO_PERMISSION"):
        await routes.refresh("T")
    assert await routes.get("T") == route
