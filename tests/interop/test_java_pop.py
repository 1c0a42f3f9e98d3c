"""A stock Java consumer that pops, through a kill -9 of the master (G1, R30)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from lab.java import JavaProgram
from lab.up import ClusterProcess

pytestmark = pytest.mark.java

RunJava = Callable[..., JavaProgram]
TOPIC, GROUP = "JavaPop", "java-pop"
IN_ORDER, FIFO = "JavaPopInOrder", "java-pop-in-order"


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
    cluster = java_cluster
    servers, master = cluster.name_servers, cluster.master()
    pops = (servers, GROUP, TOPIC, "7", master["address"])
    with ExitStack() as stack:
        consumer = stack.enter_context(run_java("ConsumeByPop", *pops))
        consumer.wait_for("its start", lambda: consumer.of("started"))
        producer = stack.enter_context(run_java("ProduceThroughFailover", servers, TOPIC, "2"))
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
        lines, failed = consumer.of("key"), {line["failed"] for line in consumer.of("failed")}
        consumer.finish()
    again = {line["key"] for line in lines if line["reconsumeTimes"] > 0}
    assert len(failed & acked) >= 20 and failed & acked <= again
    assert all(line["pop"] and line["topic"] == TOPIC for line in lines)
    twice = Counter(line["key"] for line in lines[: max(0, before - 100)])
    assert max(twice.values(), default=1) == 1


def test_each_queue_is_popped_in_order_through_a_kill(
    java_cluster: ClusterProcess, run_java: RunJava
) -> None:
    """Orderly POPs (order=true) by Java's client, one thread a queue; every tenth message fails
    once. kill -9 of the master in the middle. No message is given before the one in front of it was
    consumed, and every message that got SEND_OK comes."""
    cluster = java_cluster
    servers, master = cluster.name_servers, cluster.master()
    with ExitStack() as stack:
        pops = (servers, FIFO, IN_ORDER, "7", master["address"])
        consumer = stack.enter_context(run_java("PopInOrder", *pops))
        consumer.wait_for("its start", lambda: consumer.of("started"))
        producer = stack.enter_context(run_java("ProduceThroughFailover", servers, IN_ORDER, "2"))
        consumer.wait_for("100 messages", lambda: len(consumer.of("key")) >= 100)
        cluster.kill(master)
        at_kill = len(producer.of("acked"))
        producer.wait_for("50 acks more", lambda: len(producer.of("acked")) >= at_kill + 50)
        producer.finish()
        acked = {line["acked"] for line in producer.of("acked")}

        def missing() -> set[str]:
            return acked - {line["key"] for line in consumer.of("key")}

        consumer.wait_for("every acknowledged message", lambda: not missing())
        cluster.restart(master)
        lines, failed = consumer.of("key"), consumer.of("failed")
        consumer.finish()
    assert len(failed) >= 10
    reached = [-1] * 4
    for line in lines:
        queue, offset = line["queue"], line["offset"]
        assert offset <= reached[queue] + 1, f"queue {queue}: {offset} after {reached[queue]}"
        reached[queue] = max(reached[queue], offset)
