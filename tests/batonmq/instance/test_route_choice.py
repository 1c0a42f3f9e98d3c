"""Which name server is asked, for how long, and whose route is used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from batonmq.client.errors import NoNameServerError, NoRouteError
from batonmq.client.instance.name_servers import NameServers
from batonmq.protocol.bodies import BrokerData, TopicRouteData
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import ConnectError, RequestTimeoutError
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
        self.servers = NameServers(SERVERS, self, share_ms=500)  # type: ignore[arg-type]

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


def names(master: str) -> Answer:
    """A route with that master, "" for none."""
    addresses = {0: master} if master else {2: "slave:1"}
    data = TopicRouteData(broker_datas=[BrokerData(broker_addrs=addresses, broker_name="b")])
    return lambda request: RemotingCommand.response_to(request, body=data.encode())


def unknown(request: RemotingCommand) -> RemotingCommand:
    return RemotingCommand.response_to(request, ResponseCode.TOPIC_NOT_EXIST)


def down(request: RemotingCommand) -> RemotingCommand:
    raise ConnectError("ns", "refused")


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
    assert [address for address, _ in made.asked] == list(SERVERS)
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
    assert [address for address, _ in made.asked] == ["ns2:9876", "ns2:9876"]


@pytest.mark.parametrize(
    ("answers", "master"),
    [
        ({"ns1": names("old:1"), "ns2": names("new:1"), "ns3": down}, "new:1"),
        ({"ns1": names(""), "ns2": unknown, "ns3": names("new:1")}, "new:1"),
        ({"ns1": names("old:1"), "ns2": unknown, "ns3": down}, "old:1"),
        ({"ns1": names(""), "ns2": names(""), "ns3": names("")}, ""),
    ],
    ids=["another one is named", "none is named", "nobody knows better", "no master anywhere"],
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
    assert [address for address, _ in made.asked] == ["ns2:9876"], "it is preferred from then on"


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
