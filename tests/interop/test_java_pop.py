"""A stock Java consumer that pops, through a kill -9 of the master (G1, R30)."""

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from left_out import ONLY_SOAK

from batonmq import Message
from batonmq.blocking import BlockingProducer
from lab.cluster.mqctl import mqctl
from lab.cluster.up import ClusterProcess
from tests.interop.conftest import FAST_REBALANCE, RunJava

pytestmark = pytest.mark.java

TOPIC, GROUP = "JavaPop", "java-pop"
IN_ORDER, FIFO = "JavaPopInOrder", "java-pop-in-order"


@dataclass(frozen=True)
class Story:
    """What the programs wrote. `before`: how many messages were consumed before the kill;
    `attempts`: those of an orderly program that were repeated; `errors`: of its requests."""

    acked: set[str]
    consumed: list[dict[str, Any]]
    failed: list[dict[str, Any]]
    before: int
    attempts: list[dict[str, Any]]
    errors: list[str]


def through_a_kill(
    cluster: ClusterProcess, run_java: RunJava, program: str, group: str, topic: str
) -> Story:
    """A Java producer sends and `program` pops; kill -9 of the master with messages in flight.
    Every message that got SEND_OK is consumed."""
    cluster.wait_in_sync(2)
    servers, master = cluster.name_servers, cluster.master()
    with ExitStack() as stack:
        pops = (servers, group, topic, "7", master["address"])
        consumer = stack.enter_context(run_java(program, *pops, properties=FAST_REBALANCE))
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
        consumed, failed = consumer.of("key"), consumer.of("failed")
        errors = [line["refused"] for line in consumer.of("refused")]
        story = Story(acked, consumed, failed, before, consumer.of("attempt"), errors)
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


def send_to(topic: str, cluster: ClusterProcess, keys: Iterable[str]) -> None:
    with BlockingProducer("java-pop-sends", name_servers=cluster.name_servers) as producer:
        for key in keys:
            assert producer.send(Message.of(topic, key.encode(), keys=key)).acknowledged


def progress(cluster: ClusterProcess, group: str) -> str:
    """Of the group in each of its topics, retry topics too, and the cluster's log."""
    servers = ("-n", cluster.name_servers)
    return mqctl("consumerProgress", "-g", group, *servers, home="/").out + cluster.diagnostics()


@pytest.mark.parametrize(
    ("group", "topic"),
    [
        ("java_switching", "Pop_Retried"),
        pytest.param("java-pop-switching", "JavaPopRetried", marks=ONLY_SOAK),
    ],
)
def test_a_retried_message_ends_with_its_success_and_the_group_goes_on_by_pull(
    java_cluster: ClusterProcess, run_java: RunJava, group: str, topic: str
) -> None:
    """Every tenth message fails once, is acknowledged when it comes again, and does not come a
    third time: the fence fails twice, and its last try comes longer after those acks than a popped
    message is invisible. Its second failure changes the invisible time of a message of the retry
    topic, which has another name where group or topic has an underscore. Then the mode of
    the group becomes PULL while messages are put off: the same consumer gets those and the new ones
    by pulling, and nothing again that was acknowledged before."""
    pops = (java_cluster.name_servers, group, topic, "7", java_cluster.master()["address"])
    send = partial(send_to, topic)
    with run_java("ConsumeByPop", *pops, "1", "12", properties=FAST_REBALANCE) as consumer:
        consumer.wait_for("its start", lambda: consumer.of("started"))
        first = [f"first-{i}" for i in range(40)]
        send(java_cluster, [*first, "fence"])
        fence = consumer.wait_for(
            "the fence", lambda: [x for x in consumer.of("key") if x["key"] == "fence"]
        )
        assert Counter(x["failed"] for x in consumer.of("failed")) == {
            **{key: 1 for key in first if key.endswith("7")},
            "fence": 2,
        }
        assert sorted(x["key"] for x in consumer.of("key")) == sorted([*first, "fence"])
        counts = {x["key"]: x["reconsumeTimes"] for x in consumer.of("key")}
        assert {key for key, count in counts.items() if count == 1} == {
            key for key in first if key.endswith("7")
        }
        assert fence[0]["reconsumeTimes"] == 2
        send(java_cluster, ["put-off-7"])
        consumer.wait_for(
            "a failure", lambda: any(x["failed"] == "put-off-7" for x in consumer.of("failed"))
        )
        consumer.send("pull")
        consumer.wait_for("PULL", lambda: consumer.of("did"))
        later: list[str] = []

        def pulled() -> bool:
            later.append(f"later-{len(later)}")
            send(java_cluster, later[-1:])
            return any(not x["pop"] and x["key"] in later for x in consumer.of("key"))

        consumer.wait_for("a message that was pulled", pulled)
        by_pull = [f"by-pull-{i}" for i in range(20)]
        send(java_cluster, by_pull)
        wanted = {*later, *by_pull, "put-off-7"}
        consumer.wait_for(
            "all by pulling",
            lambda: wanted <= {x["key"] for x in consumer.of("key")},
            diagnostics=lambda: (
                f"{wanted - {x['key'] for x in consumer.of('key')}}, "
                + progress(java_cluster, group)
            ),
        )
        consumer.finish()
    times = Counter(x["key"] for x in consumer.of("key"))
    # One whose POP was under way at the switch may come twice.
    assert {key: times[key] for key in (*first, "fence", *by_pull) if times[key] != 1} == {}


def test_each_queue_is_popped_in_order_through_a_kill(
    java_cluster: ClusterProcess, run_java: RunJava
) -> None:
    """Orderly POPs (order=true) by Java's client, one thread a queue; every tenth message fails
    once. kill -9 of the master in the middle. No message is given before the one in front of it was
    consumed, and every message that got SEND_OK comes. An attempt that is repeated with its
    attemptId gets the same messages with the same counts. A POP that finds nothing is no error."""
    story = through_a_kill(java_cluster, run_java, "PopInOrder", FIFO, IN_ORDER)
    assert not [error for error in story.errors if "custom field" in error]
    assert len(story.failed) >= 10
    assert len(story.attempts) >= 20
    for attempt in story.attempts:
        assert attempt["again"][: len(attempt["first"])] == attempt["first"], attempt
    assert any(not count.endswith(":0") for x in story.attempts for count in x["first"])
    reached = [-1] * 4
    for line in story.consumed:
        queue, offset = line["queue"], line["offset"]
        assert offset <= reached[queue] + 1, f"queue {queue}: {offset} after {reached[queue]}"
        reached[queue] = max(reached[queue], offset)
