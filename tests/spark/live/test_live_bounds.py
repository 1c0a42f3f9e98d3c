"""The bounds of queues, of which some have no master."""

import pytest

from batonmq.errors import NoMasterError
from batonmq.master_pull import PulledRecords
from batonmq.pull_result import PullStatus
from protocol.message import MessageQueue
from spark.live import cluster as module
from spark.live.cluster import ClusterError, LiveCluster

LIVING, DEAD = MessageQueue("T", "broker-a", 0), MessageQueue("T", "broker-b", 0)


class Calls:
    """Each queue holds [2, 5); a former master says 4. Those of broker-b have no master."""

    async def max_offset(self, queue, *, deadline_ms):
        return 4

    async def pull(self, client, request, *, deadline_ms):
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
    assert cluster.bounds([]) == {}
    with pytest.raises(ClusterError, match="broker-b"):
        cluster.bounds([LIVING, DEAD])


def test_some_may_be_silent_but_not_all(cluster):
    assert cluster.bounds([LIVING, DEAD], some=True) == {LIVING: (2, 5)}
    assert cluster.bounds([], some=True) == {}
    with pytest.raises(ClusterError, match="broker-b"):
        cluster.bounds([DEAD], some=True)
