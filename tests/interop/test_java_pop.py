"""A stock Java consumer that pops, through a kill -9 of the master (G1, R30)."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from lab.up import ClusterProcess
from tests.interop.conftest import BRISK, RunJava

pytestmark = pytest.mark.java

TOPIC, GROUP = "JavaPop", "java-pop"
IN_ORDER, FIFO = "JavaPopInOrder", "java-pop-in-order"


@dataclass(frozen=True)
class Story:
    """What the programs wrote. `before`: how many messages were consumed before the kill."""

    acked: set[str]
    consumed: list[dict[str, Any]]
    failed: list[dict[str, Any]]
    before: int


def through_a_kill(
    cluster: ClusterProcess, run_java: RunJava, program: str, group: str, topic: str
) -> Story:
    """A Java producer sends and `program` pops; kill -9 of the master with messages in flight.
    Every message that got SEND_OK is consumed."""
    servers, master = cluster.name_servers, cluster.master()
    with ExitStack() as stack:
        pops = (servers, group, topic, "7", master["address"])
        consumer = stack.enter_context(run_java(program, *pops, properties=BRISK))
        consumer.wait_for("its start", lambda: consumer.of("started"))
        producer = stack.enter_context(run_java("ProduceThroughFailover", servers, topic, "2"))
        consumer.wait_for("100 messages", lambda: len(consumer.of("key")) >= 100)
        cluster.kill(master)
        at_kill = len(producer.of("acked"))
        before = len(consumer.of("key"))
        producer.wait_for("200 acks more", lambda: len(producer.of("acked")) >= at_kill + 200)
        producer.finish()
        acked = {line["acked"] for line in producer.of("acked")}

        def missing() -> set[str]:
            return acked - {line["key"] for line in consumer.of("key")}

        consumer.wait_for("every acknowledged message", lambda: not missing())
        cluster.restart(master)
        story = Story(acked, consumer.of("key"), consumer.of("failed"), before)
        consumer.finish()
    return story


def test_everything_is_consumed_and_what_failed_comes_again(
    java_cluster: ClusterProcess, run_java: RunJava
) -> None:
    """1. The Java admin sets the mode of a group to POP; its consumer asks the broker for queues.
    2. A Java producer sends; the consumer fails the first try of every tenth message.
    3. kill -9 of the master, with messages in flight and others put off.
    4. Every message that got SEND_OK is consumed. What failed before the kill came again, with a
    count, to the topic that was subscribed. What was acknowledged does not come again, but for what
    was under way in the last second before the kill.
    """
    story = through_a_kill(java_cluster, run_java, "ConsumeByPop", GROUP, TOPIC)
    lines, failed = story.consumed, {line["failed"] for line in story.failed}
    again = {line["key"] for line in lines if line["reconsumeTimes"] > 0}
    assert len(failed & story.acked) >= 20 and failed & story.acked <= again
    assert all(line["pop"] and line["topic"] == TOPIC for line in lines)
    twice = Counter(line["key"] for line in lines[: max(0, story.before - 100)])
    assert max(twice.values(), default=1) == 1


def test_each_queue_is_popped_in_order_through_a_kill(
    java_cluster: ClusterProcess, run_java: RunJava
) -> None:
    """Orderly POPs (order=true) by Java's client, one thread a queue; every tenth message fails
    once. kill -9 of the master in the middle. No message is given before the one in front of it was
    consumed, and every message that got SEND_OK comes."""
    story = through_a_kill(java_cluster, run_java, "PopInOrder", FIFO, IN_ORDER)
    assert len(story.failed) >= 10
    reached = [-1] * 4
    for line in story.consumed:
        queue, offset = line["queue"], line["offset"]
        assert offset <= reached[queue] + 1, f"queue {queue}: {offset} after {reached[queue]}"
        reached[queue] = max(reached[queue], offset)
