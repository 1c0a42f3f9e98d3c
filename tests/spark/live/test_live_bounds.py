"""What is asked of a cluster: bounds of queues, some without a master; routes of topics."""

import asyncio
from types import SimpleNamespace

import pytest

from batonmq.client.consumer.pulling import (
    PulledRecords,
    PullRequest,
    PullStatus,
    build_subscription,
)
from batonmq.client.errors import NoMasterError, NoNameServerError, NoRouteError
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.bodies import BrokerData, ClusterInfo
from batonmq.protocol.message import MessageQueue
from batonmq.runtime.clock import boot_ms
from batonmq.spark.live import cluster as module
from batonmq.spark.live.cluster import ClusterError, LiveCluster, route_of, shown_end

LIVING, DEAD = MessageQueue("T", "broker-a", 0), MessageQueue("T", "broker-b", 0)


class Calls:
    """Each queue holds [2, 5); a former master says 4. Those of broker-b have no master."""

    async def max_offset(self, queue, *, deadline_ms):
        return 4

    forgotten = 0  # so often no name server knows the topic

    async def pull(self, client, request, *, deadline_ms):
        if self.forgotten:
            self.forgotten -= 1
            raise NoRouteError("T", ["ns:1"])
        if request.queue.broker_name == "broker-b":
            raise NoMasterError(request.queue.broker_name, "nobody answers")
        assert (request.offset, request.max_messages, request.group) == (4, 1, "readers")
        return PulledRecords(PullStatus.FOUND, 5, 2, 5, b"...")


@pytest.fixture
def cluster(monkeypatch):
    with LiveCluster(["127.0.0.1:1"], group="readers", patience_ms=10) as made:
        made._calls = Calls()
        monkeypatch.setattr(module, "pull_records", made._calls.pull)
        yield made


def test_all_are_asked_and_all_must_answer(cluster):
    assert cluster.bounds([LIVING]) == {LIVING: (2, 5)}
    cluster.patience_ms, cluster._calls.forgotten = 60_000, 2
    assert cluster.bounds([LIVING]) == {LIVING: (2, 5)}, "all of its brokers are starting"
    assert cluster.bounds([]) == {}
    with pytest.raises(ClusterError, match="broker-b"):
        cluster.bounds([LIVING, DEAD])


def test_some_may_be_silent_but_not_all(cluster):
    assert cluster.bounds([LIVING, DEAD], some=True) == {LIVING: (2, 5)}
    assert cluster.bounds([], some=True) == {}
    with pytest.raises(ClusterError, match="broker-b"):
        cluster.bounds([DEAD], some=True)


class Client:
    """`answers`: what asking for the route gives, one after the other; errors are raised.

    `groups`: the id of each broker group's one broker; None: no name server answers.
    """

    name_server_addresses = ("ns:1",)

    def __init__(self, *answers, groups):
        self.answers = list(answers)
        self.groups = groups
        self.name_servers = SimpleNamespace(cluster_info=self.cluster_info)
        self.routes = SimpleNamespace(refresh=self.refresh)

    async def refresh(self, topic, *, deadline_ms):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def cluster_info(self, *, deadline_ms):
        if self.groups is None:
            raise NoNameServerError([("ns:1", "refused")])
        table = {
            name: BrokerData(broker_name=name, broker_addrs={self.groups[name]: "h:1"})
            for name in self.groups
        }
        return ClusterInfo(broker_addr_table=table)


ROUTE = TopicRoute("T", (), (LIVING,), {"broker-a": {0: "h:1"}}, {"broker-a": "c"})
UNKNOWN = NoRouteError("T", ["ns:1"])


def route(client, *, known=False, patience_ms=60_000):
    return asyncio.run(route_of(client, "T", boot_ms() + patience_ms, known=known))


def test_an_unknown_topic_is_told_at_once_unless_it_was_there_or_the_cluster_begins():
    with pytest.raises(NoRouteError, match="create it with"):
        route(Client(UNKNOWN, groups={"broker-b": 0}))
    assert route(Client(UNKNOWN, ROUTE, groups={"broker-b": 0})) == ROUTE, "it came in between"
    assert route(Client(UNKNOWN, UNKNOWN, ROUTE, groups={"broker-b": 0}), known=True) == ROUTE
    for starting in ({}, {"broker-a": 2, "broker-b": 0}):
        assert route(Client(UNKNOWN, UNKNOWN, UNKNOWN, ROUTE, groups=starting)) == ROUTE
    assert route(Client(UNKNOWN, NoNameServerError([]), ROUTE, groups=None)) == ROUTE
    with pytest.raises(NoRouteError, match=r"topic T at ns:1: they know no broker, or a group"):
        route(Client(UNKNOWN, groups={}), patience_ms=20)


def test_a_topic_that_may_not_be_read_is_not_an_empty_one(cluster, monkeypatch):
    closed = TopicRoute("T", (), (), {"broker-a": {0: "h:1"}}, {"broker-a": "c"})
    for client, found in ((Client(ROUTE, groups={}), [ROUTE]), (Client(closed, groups={}), None)):
        monkeypatch.setattr(cluster.client, "routes", client.routes)
        if found is not None:
            assert cluster.routes(["T"]) == found
            continue
        with pytest.raises(
            ClusterError, match=r"topic T has no queue that may be read, in broker-a"
        ):
            cluster.routes(["T"])


class NewMaster:
    """Shows `shown` messages of `held` until it was asked `settles` times; then it has `then`."""

    def __init__(self, shown, held, *, settles=10**9, then=None):
        self.shown, self.held, self.settles = shown, held, settles
        self.then = held if then is None else then
        self.asked = 0

    async def max_offset(self, queue, *, deadline_ms, committed):
        assert queue == LIVING and not committed
        return self.held

    async def pull(self, client, request, *, deadline_ms):
        self.asked += 1
        if self.asked >= self.settles:
            self.shown = self.held = self.then
        if request.offset > self.held:
            status = PullStatus.OFFSET_ILLEGAL
        else:
            status = PullStatus.FOUND if request.offset < self.shown else PullStatus.NO_NEW_MSG
        return PulledRecords(status, request.offset, 0, self.shown, b"")


@pytest.mark.parametrize("hidden", [0, 1, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("then", [0, -1, 50])
def test_what_a_new_master_does_not_show_yet_is_waited_for(monkeypatch, hidden, then):
    """It may have been acknowledged by the master before. With `then` -1 it never was, and goes."""
    master = NewMaster(40, 40 + hidden, settles=30, then=max(40, 40 + hidden + then))
    monkeypatch.setattr(module, "pull_records", master.pull)
    monkeypatch.setattr(module, "pause_ms", lambda failures: 0)
    request = PullRequest("g", LIVING, 40, build_subscription("T", "*", 0), max_messages=1)
    end = asyncio.run(shown_end(None, master, request, 40, boot_ms() + 60_000))
    assert end == (master.then if hidden else 40)
    assert hidden or master.asked == 0, "no pull where nothing is hidden"


def test_what_nobody_confirms_is_not_waited_for_for_ever(monkeypatch, caplog):
    master = NewMaster(40, 43)
    monkeypatch.setattr(module, "pull_records", master.pull)
    monkeypatch.setattr(module, "SETTLE_MS", 30)
    request = PullRequest("g", LIVING, 40, build_subscription("T", "*", 0), max_messages=1)
    assert asyncio.run(shown_end(None, master, request, 40, boot_ms() + 60_000)) == 40
    assert "not_confirmed queue=T@broker-a:0 from=40 to=43" in caplog.text
