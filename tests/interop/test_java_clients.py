"""The stock Java client 5.3.3 against a real cluster: every way to send, push consumers, filters.

Each program prints what it saw; the tests compare that with what the queues hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from cluster_process import ClusterProcess
from java_tools import JavaProgram
from queue_check import read_topic

pytestmark = pytest.mark.java

RunJava = Callable[..., JavaProgram]
COUNT = 24


def keys_in(cluster: ClusterProcess, topic: str) -> Counter[str]:
    stored = read_topic(cluster.name_servers, topic)
    return Counter(m.properties["KEYS"] for queue in stored.values() for m in queue)


def sent_keys(*modes: str) -> set[str]:
    return {f"{mode}-{number}" for mode in modes for number in range(COUNT)}


@pytest.mark.parametrize("binary_headers", [False, True], ids=["json", "rocketmq"])
def test_every_way_to_send(
    java_cluster: ClusterProcess, run_java: RunJava, binary_headers: bool
) -> None:
    """Sync, async, oneway, batch and ordered sends of DefaultMQProducer, into a new topic.

    Every SendResult says SEND_OK and the place where the message is; the queues hold each message
    once, also the oneway ones; the ordered ones went to the queues their selector named, in order.
    With `rocketmq` the client writes binary headers.
    """
    topic = f"JavaSends{int(binary_headers)}"
    modes = ("sync", "async", "oneway", "batch", "ordered")
    arguments = (java_cluster.name_servers, topic, str(COUNT), *modes)
    with run_java("Produce", *arguments, binary_headers=binary_headers) as produce:
        lines = produce.finish()

    results = [line for line in lines if "mode" in line]
    assert [line for line in results if line.get("status") != "SEND_OK"] == []
    assert Counter(line["mode"] for line in results) == {
        "sync": COUNT, "async": COUNT, "ordered": COUNT, "batch": 1,
    }  # fmt: skip
    produce_all = sent_keys(*modes)
    assert keys_in(java_cluster, topic) == Counter(produce_all)

    stored = read_topic(java_cluster.name_servers, topic)
    for line in results:
        if line["mode"] == "batch":
            continue
        message = stored[line["queueId"]][line["queueOffset"]]
        assert (message.properties["KEYS"], message.msg_id) == (line["key"], line["offsetMsgId"])
        assert message.body == f"body of {line['key']}".encode()
    (batch,) = (line for line in results if line["mode"] == "batch")
    first = batch["queueOffset"]
    in_batch = stored[batch["queueId"]][first : first + COUNT]
    assert [m.properties["KEYS"] for m in in_batch] == [f"batch-{i}" for i in range(COUNT)]
    assert batch["offsetMsgId"] == ",".join(m.msg_id for m in in_batch)

    ordered = [line for line in results if line["mode"] == "ordered"]
    by_queue = [[line["queueOffset"] for line in ordered[lane::3]] for lane in range(3)]
    assert all(offsets == sorted(offsets) for offsets in by_queue)
    assert all(len({line["queueId"] for line in ordered[lane::3]}) == 1 for lane in range(3))


def test_two_push_consumers_share_the_queues(
    java_cluster: ClusterProcess, run_java: RunJava
) -> None:
    """Two instances of one group: each has half of the queues. One leaves: the other has all.

    What is sent in each of the three phases is consumed once by the group.
    """
    topic, group = "JavaRebalance", "java-rebalance"
    servers = java_cluster.name_servers
    with run_java("Produce", servers, topic, str(COUNT), "sync") as produce:
        produce.finish()
    with ExitStack() as stack:
        start = (servers, group, topic, "*", "CLUSTERING")
        first = stack.enter_context(run_java("Consume", *start, "one"))
        all_queues = sorted(read_topic(servers, topic))
        first.wait_for("all queues", lambda: last_queues(first) == all_queues)
        first.wait_for("the backlog", lambda: consumed(first) == sent_keys("sync"))

        second = stack.enter_context(run_java("Consume", *start, "two"))
        half = len(all_queues) // 2
        second.wait_for("half of the queues", lambda: len(last_queues(second)) == half)
        first.wait_for("the other half", lambda: len(last_queues(first)) == half)
        assert sorted(last_queues(first) + last_queues(second)) == all_queues

        with run_java("Produce", servers, topic, str(COUNT), "ordered", "async") as produce:
            produce.finish()
        wanted = sent_keys("sync", "ordered", "async")
        second.wait_for("what was sent", lambda: consumed(first) | consumed(second) == wanted)
        assert consumed(second), "the second instance took its part"

        first.finish()
        second.wait_for("all queues", lambda: last_queues(second) == all_queues)
        with run_java("Produce", servers, topic, str(COUNT), "oneway") as produce:
            produce.finish()
        second.wait_for("the last ones", lambda: sent_keys("oneway") <= consumed(second))
        second.finish()


def test_a_tag_filter(java_cluster: ClusterProcess, run_java: RunJava) -> None:
    """Messages with tags A and B in turn; a consumer subscribed to A gets all of A, none of B."""
    topic, servers = "JavaTags", java_cluster.name_servers
    with run_java("Produce", servers, topic, str(COUNT), "tags") as produce:
        produce.finish()
    with run_java("Consume", servers, "java-tags", topic, "A", "CLUSTERING", "one") as consumer:
        wanted = {f"tags-{number}" for number in range(0, COUNT, 2)}
        consumer.wait_for("every message of tag A", lambda: consumed(consumer) >= wanted)
        consumer.finish()
        assert consumed(consumer) == wanted
        assert {line["tags"] for line in consumer.of("key")} == {"A"}


def test_broadcasting_with_binary_headers(java_cluster: ClusterProcess, run_java: RunJava) -> None:
    """Two broadcasting instances, one of them with binary headers: each gets every message."""
    topic, servers = "JavaBroadcast", java_cluster.name_servers
    with run_java("Produce", servers, topic, str(COUNT), "sync") as produce:
        produce.finish()
    with ExitStack() as stack:
        start = (servers, "java-broadcast", topic, "*", "BROADCASTING")
        consumers = [
            stack.enter_context(run_java("Consume", *start, name, binary_headers=name == "two"))
            for name in ("one", "two")
        ]
        for consumer in consumers:
            consumer.wait_for("all messages", lambda c=consumer: consumed(c) == sent_keys("sync"))
        for consumer in consumers:
            consumer.finish()


def consumed(consumer: JavaProgram) -> set[str]:
    return {line["key"] for line in consumer.of("key")}


def last_queues(consumer: JavaProgram) -> list[int]:
    shares = consumer.of("queues")
    return shares[-1]["queues"] if shares else []
