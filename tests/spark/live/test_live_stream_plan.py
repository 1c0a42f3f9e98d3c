"""How far each batch of a stream goes, against a cluster that only says its bounds."""

import json

import pytest

from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.message import MessageQueue
from batonmq.spark.live import stream_plan
from batonmq.spark.live.cluster import ClusterError
from batonmq.spark.live.offsets import DataLossError
from batonmq.spark.live.options import TopicOptions
from batonmq.spark.live.stream_plan import StreamPlan

QUEUES = tuple(MessageQueue("T", "b", i) for i in range(3))


class Cluster:
    """`held`: queue -> [low, high) that it shows; `logged`: where its log ends, if further.

    `silent`: no master answers. `unknown`: groups that no name server names; `back`: until it was
    asked so often.
    """

    def __init__(self, held):
        self.held = held
        self.logged = {}
        self.silent = set()
        self.unknown = set()
        self.back = {}
        self.asked = 0

    def routes(self, topics, *, known=False):
        self.asked += 1
        brokers = {queue.broker_name: {0: "h:1"} for queue in self.held} | {"b": {0: "h:1"}}
        named = tuple(queue for queue in self.held if queue.broker_name not in self.unknown)
        brokers = {name: at for name, at in brokers.items() if name not in self.unknown}
        self.unknown -= {name for name, asks in self.back.items() if self.asked >= asks}
        return [TopicRoute("T", (), named, brokers, dict.fromkeys(brokers, "c"))]

    def bounds(self, queues, *, some=False, whole=False):
        if self.silent and not some:
            raise ClusterError("no master answers")
        return {queue: self.held[queue] for queue in queues if queue not in self.silent}

    def shortfall(self, queue, offset):
        low, high = self.held[queue]
        return None if offset <= self.logged.get(queue, high) else (low, high)

    def close(self):
        self.held = {}


class Read:
    """What a plan needs of a TopicRead."""

    def __init__(self, cluster, **more):
        given = {"nameServers": "h:1", "topic": "T", **more}
        self.options = TopicOptions.from_mapping(given, streaming=True)
        self._cluster = cluster

    def connect(self):
        return self._cluster

    def tasks(self, ranges, clusters):
        return [(each.queue.queue_id, each.begin, each.end) for each in ranges]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(stream_plan, "IDLE_MS", 0)
    monkeypatch.setattr(stream_plan, "ROUTE_MS", 0)
    monkeypatch.setattr(stream_plan, "AGAIN_MS", 0)


def ends(offsets):
    return {queue.queue_id: offset for queue, offset in offsets.items()}


def test_a_stream_begins_where_it_is_told():
    cluster = Cluster({QUEUES[0]: (5, 9), QUEUES[1]: (0, 0)})
    assert ends(StreamPlan(Read(cluster)).initial()) == {0: 9, 1: 0}
    early = StreamPlan(Read(cluster, startingOffsets="earliest"))
    assert ends(early.initial()) == {0: 5, 1: 0}
    for offset, says in ((4, r"available are \[5, 9\): the messages before"), (10, "ends below")):
        given = {"startingOffsets": json.dumps({"T": {"b": {"0": offset}}})}
        with pytest.raises(DataLossError, match=says):
            StreamPlan(Read(cluster, **given)).initial()
        loose = StreamPlan(Read(cluster, failOnDataLoss="false", **given))
        assert ends(loose.initial())[0] == (5 if offset == 4 else 9)


def test_batches_go_to_the_end_within_the_limit_and_take_new_queues_from_0():
    cluster = Cluster({QUEUES[0]: (0, 10), QUEUES[1]: (0, 0)})
    plan = StreamPlan(Read(cluster, startingOffsets="earliest"))
    start = plan.initial()
    end = plan.next_end(start, 4)
    assert ends(end) == {0: 4, 1: 0}
    assert plan.tasks(start, end) == [(0, 0, 4)]
    assert ends(plan.next_end(end, 0)) == {0: 10, 1: 0}
    cluster.held[QUEUES[2]] = (0, 0)
    assert plan.next_end(end, 0).keys() == set(QUEUES[:2]), "an empty one is no news"
    cluster.held[QUEUES[2]] = (0, 3)
    grown = plan.next_end(end, 0)
    assert plan.tasks(end, grown) == [(0, 4, 10), (2, 0, 3)]
    assert plan.next_end(grown, 0) == grown
    assert ends(plan.available) == {0: 10, 1: 0, 2: 3}


def test_a_stream_that_ends_now_takes_nothing_that_came_after_its_aim():
    cluster = Cluster({QUEUES[0]: (0, 3)})
    plan = StreamPlan(Read(cluster, startingOffsets="earliest"))
    start = plan.initial()
    plan.aim()
    cluster.held[QUEUES[0]] = (0, 99)
    assert ends(plan.next_end(start, 0)) == {0: 3}


def test_a_new_master_that_shows_less_is_waited_for_and_a_remade_topic_is_not():
    cluster = Cluster({QUEUES[0]: (0, 10)})
    plan = StreamPlan(Read(cluster))
    start = plan.initial()
    cluster.held[QUEUES[0]], cluster.logged = (0, 7), {QUEUES[0]: 10}
    assert plan.next_end(start, 0) == start
    cluster.logged = {}
    with pytest.raises(DataLossError, match=r"\[10, 10\), available are \[0, 7\): the queue ends"):
        plan.next_end(start, 0)
    loose = StreamPlan(Read(cluster, failOnDataLoss="false"))
    end = loose.next_end(start, 5)
    assert ends(end) == {0: 5}
    assert loose.tasks(start, end) == [(0, 0, 5)]
    assert loose.tasks(end, loose.next_end(end, 5)) == [(0, 5, 7)]
    cluster.held = {QUEUES[1]: (0, 0)}
    with pytest.raises(DataLossError, match="the topic has this queue no more"):
        plan.next_end(start, 0)
    cluster.held = {QUEUES[0]: (12, 20)}
    with pytest.raises(DataLossError, match=r"requested offsets \[10, 20\), available are \[12,"):
        plan.next_end(start, 0)


def test_a_new_queue_whose_first_messages_have_expired_is_a_loss_that_says_so(caplog):
    """They may have been stored while the stream was down: nobody can tell, so it is not silent."""
    cluster = Cluster({QUEUES[0]: (0, 10)})
    start = StreamPlan(Read(cluster)).initial()
    cluster.held[QUEUES[1]] = (4, 9)
    says = r"queue 1: requested offsets \[0, 9\), available are \[4, 9\): .* not seen this queue"
    with pytest.raises(DataLossError, match=says):
        StreamPlan(Read(cluster)).next_end(start, 0)
    loose = StreamPlan(Read(cluster, failOnDataLoss="false"))
    assert ends(loose.next_end(start, 0)) == {0: 10, 1: 9}
    loose.next_end(start, 0)
    assert caplog.text.count("data_lost") == 1


def test_silent_groups_are_passed_over_if_wanted_and_come_again(caplog):
    cluster = Cluster({QUEUES[0]: (0, 5), QUEUES[1]: (0, 7)})
    plan = StreamPlan(Read(cluster, startingOffsets="earliest", passOverSilentGroups="true"))
    start = {QUEUES[0]: 2, QUEUES[1]: 3}
    cluster.silent = {QUEUES[1]}
    for _ in range(2):
        assert ends(plan.next_end(start, 0)) == {0: 5, 1: 3}
    assert caplog.text.count("group_silent broker_name=b") == 1
    assert ends(plan.next_end({QUEUES[0]: 5}, 0)) == {0: 5}
    cluster.silent = set()
    assert ends(plan.next_end(start, 0)) == {0: 5, 1: 7}
    strict = StreamPlan(Read(cluster, startingOffsets="earliest"))
    cluster.silent = {QUEUES[1]}
    with pytest.raises(ClusterError):
        strict.next_end(start, 0)


def test_a_stream_that_ends_now_does_not_end_without_a_silent_group():
    cluster = Cluster({QUEUES[0]: (0, 5), QUEUES[1]: (0, 7)})
    plan = StreamPlan(Read(cluster, startingOffsets="earliest", passOverSilentGroups="true"))
    plan.aim()
    cluster.silent = {QUEUES[1]}
    with pytest.raises(ClusterError):
        plan.next_end({QUEUES[0]: 2, QUEUES[1]: 3}, 0)


OTHER = MessageQueue("T", "c", 0)


def two_groups(**more):
    cluster = Cluster({QUEUES[0]: (0, 5), OTHER: (0, 7)})
    start = StreamPlan(Read(cluster, startingOffsets="earliest")).initial()
    cluster.unknown = {"c"}
    return cluster, start, StreamPlan(Read(cluster, **more))


def test_a_group_of_the_checkpoint_that_no_name_server_names_is_waited_for():
    """All of its brokers are down, or a name server has just begun: it must not be left out."""
    cluster, start, plan = two_groups()
    cluster.back = {"c": cluster.asked + 5}
    assert plan.next_end(start, 0) == {QUEUES[0]: 5, OTHER: 7}
    cluster, start, plan = two_groups(operationTimeout="1ms")
    says = "broker group c: the checkpoint has offsets of it, and no name server has it"
    with pytest.raises(ClusterError, match=says):
        plan.next_end(start, 0)


def test_such_a_group_is_passed_over_if_that_is_wanted(caplog):
    for more in ({"passOverSilentGroups": "true"}, {"failOnDataLoss": "false"}):
        caplog.clear()
        cluster, start, plan = two_groups(**more)
        for _ in range(2):
            assert plan.next_end(start, 0) == {QUEUES[0]: 5, OTHER: 0}
        assert caplog.text.count("group_silent broker_name=c") == 1
        cluster.unknown = set()
        assert plan.next_end(start, 0) == {QUEUES[0]: 5, OTHER: 7}


def test_a_stream_that_ends_now_does_not_end_without_such_a_group():
    cluster, start, plan = two_groups(passOverSilentGroups="true")
    plan.aim()
    cluster.back = {"c": cluster.asked + 5}
    assert plan.next_end(start, 0) == {QUEUES[0]: 5, OTHER: 7}
    cluster.held |= {QUEUES[0]: (0, 50), OTHER: (0, 70)}
    assert plan.next_end(start, 0) == {QUEUES[0]: 5, OTHER: 7}, "behind the aim"
    cluster, start, plan = two_groups(passOverSilentGroups="true", operationTimeout="1ms")
    plan.aim()
    with pytest.raises(ClusterError, match="broker group c"):
        plan.next_end(start, 0)


def test_a_batch_waits_for_enough_offsets_but_not_past_the_delay(monkeypatch):
    now = [1_000_000]
    monkeypatch.setattr(stream_plan, "boot_ms", lambda: now[0])
    cluster = Cluster({QUEUES[0]: (0, 3)})
    plan = StreamPlan(Read(cluster, minOffsetsPerTrigger="5", maxTriggerDelay="10s"))
    first = plan.next_end({QUEUES[0]: 0}, 0)
    assert ends(first) == {0: 3}  # the first batch of a run does not wait
    cluster.held[QUEUES[0]] = (0, 7)
    assert plan.next_end(first, 0) == first
    now[0] += 9_999
    assert plan.next_end(first, 0) == first
    now[0] += 1
    late = plan.next_end(first, 0)
    assert ends(late) == {0: 7}
    cluster.held[QUEUES[0]] = (0, 12)
    enough = plan.next_end(late, 0)
    assert ends(enough) == {0: 12}
    cluster.held[QUEUES[0]] = (0, 13)
    plan.aim()  # what is there now, and no more: the last few belong to it
    assert ends(plan.next_end(enough, 0)) == {0: 13}


def test_a_least_batch_above_the_largest_is_refused():
    with pytest.raises(ValueError, match="minOffsetsPerTrigger=9 is above maxOffsetsPerTrigger=8"):
        Read(None, minOffsetsPerTrigger="9", maxOffsetsPerTrigger="8")
