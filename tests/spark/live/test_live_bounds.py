"""The bounds of queues, of which some have no master."""

import pytest

from batonmq.errors import NoMasterError
from protocol.message import MessageQueue
from spark.live.cluster import ClusterError, LiveCluster

LIVING, DEAD = MessageQueue("T", "broker-a", 0), MessageQueue("T", "broker-b", 0)


class Calls:
    """Each queue holds [2, 5), except those of broker-b."""

    async def min_offset(self, queue, *, deadline_ms):
        return 2

    async def max_offset(self, queue, *, deadline_ms):
        if queue.broker_name == "broker-b":
            raise NoMasterError(queue.broker_name, "nobody answers")
        return 5


@pytest.fixture
def cluster():
    with LiveCluster(["127.0.0.1:1"], group="readers", patience_ms=10) as made:
        made._calls = Calls()
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
