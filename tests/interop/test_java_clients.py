"""The stock Java client 5.3.3 against a real cluster: every way to send, and push consumers.

Each program prints what it saw; the tests compare that with what the queues hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lab.cluster.java import JavaProgram
from lab.cluster.queues import read_topic, stored_keys
from lab.cluster.up import ClusterProcess
from tests.interop.conftest import RunJava

pytestmark = pytest.mark.java

COUNT = 24


def sent_keys(*modes: str) -> set[str]:
    return {f"{mode}-{number}" for mode in modes for number in range(COUNT)}


class JavaProducer:
    """One running Produce; `produce` sends and gives the lines of its results."""

    def __init__(self, program: JavaProgram) -> None:
        self._program = program

    def produce(self, topic: str, *modes: str) -> list[dict[str, Any]]:
        program = self._program
        before, orders = len(program.lines), len(program.of("produced"))
        program.send(" ".join((topic, str(COUNT), *modes)))
        program.wait_for(f"{modes}", lambda: len(program.of("produced")) > orders)
        return [line for line in program.lines[before:] if "mode" in line]


@pytest.fixture(scope="module")
def producers(
    java_cluster: ClusterProcess, java_classpath: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, JavaProducer]]:
    """A producer with JSON headers and one with binary headers, for the whole module."""
    folder, servers = tmp_path_factory.mktemp("producers"), java_cluster.name_servers
    with ExitStack() as stack:
        programs = {
            name: stack.enter_context(
                JavaProgram(
                    java_classpath, folder / name, "Produce", servers, binary_headers=is_binary
                )
            )
            for name, is_binary in (("json", False), ("rocketmq", True))
        }
        yield {name: JavaProducer(program) for name, program in programs.items()}
        for program in programs.values():
            program.finish()


@pytest.fixture
def producer(producers: dict[str, JavaProducer]) -> JavaProducer:
    return producers["json"]


@pytest.mark.parametrize("headers", ["json", "rocketmq"])
def test_every_way_to_send(
    java_cluster: ClusterProcess, producers: dict[str, JavaProducer], headers: str
) -> None:
    """Sync, async, oneway, batch and ordered sends of DefaultMQProducer, into a new topic.

    Every SendResult has SEND_OK and the place of the message; the queues hold each message
    once, also the oneway ones; the ordered ones went to the queues their selector named, in order.
    With `rocketmq` the client writes binary headers.
    """
    topic = f"JavaSends-{headers}"
    modes = ("sync", "async", "oneway", "batch", "ordered")
    results = producers[headers].produce(topic, *modes)

    assert [line for line in results if line.get("status") != "SEND_OK"] == []
    counts = {"sync": COUNT, "async": COUNT, "ordered": COUNT, "batch": 1}
    assert Counter(line["mode"] for line in results) == counts
    assert stored_keys(java_cluster.name_servers, topic) == Counter(sent_keys(*modes))

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
    java_cluster: ClusterProcess, producer: JavaProducer, run_java: RunJava
) -> None:
    """Two instances of one group: each has half of the queues. One leaves: the other has all.

    What is sent in each of the three phases is consumed once by the group.
    """
    topic, group = "JavaRebalance", "java-rebalance"
    servers = java_cluster.name_servers
    producer.produce(topic, "sync")
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

        producer.produce(topic, "ordered", "async")
        wanted = sent_keys("sync", "ordered", "async")
        second.wait_for("what was sent", lambda: consumed(first) | consumed(second) == wanted)
        assert consumed(second), "the second instance took its part"

        first.finish()
        second.wait_for("all queues", lambda: last_queues(second) == all_queues)
        producer.produce(topic, "oneway")
        second.wait_for("the last ones", lambda: sent_keys("oneway") <= consumed(second))
        second.finish()


def test_broadcasting_with_binary_headers(
    java_cluster: ClusterProcess, producer: JavaProducer, run_java: RunJava
) -> None:
    """Two broadcasting instances, one of them with binary headers: each gets every message."""
    topic, servers = "JavaBroadcast", java_cluster.name_servers
    producer.produce(topic, "sync")
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
