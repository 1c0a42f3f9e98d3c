"""The stock Java producer and consumer through a kill -9 of the master (G1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.cluster.java import JavaProgram
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.java

RunJava = Callable[..., JavaProgram]
TOPIC = "JavaFailover"


@pytest.fixture
def cluster(java_classpath: str, tmp_path: Path) -> Iterator[ClusterProcess]:
    with ClusterProcess(tmp_path / "cluster") as running:
        yield running


def test_producer_goes_on_and_nothing_acknowledged_is_missing(
    cluster: ClusterProcess, run_java: RunJava
) -> None:
    """1. A Java producer sends with four threads, a Java consumer reads.
    2. kill -9 of the master; the producer goes on by its own retries and route polls.
    3. The dead replica is started again by its argv.
    4. The consumer holds every message that got SEND_OK: before, during and after.
    """
    servers = cluster.name_servers
    consume = (servers, "java-failover", TOPIC, "*", "CLUSTERING", "one")
    with ExitStack() as stack:
        producer = stack.enter_context(run_java("ProduceThroughFailover", servers, TOPIC, "4"))
        producer.wait_for("200 acks", lambda: len(producer.of("acked")) >= 200)
        consumer = stack.enter_context(run_java("Consume", *consume))
        consumer.wait_for("messages", lambda: consumer.of("key"))
        master = cluster.master()
        cluster.kill(master)
        at_kill = len(producer.of("acked"))
        producer.wait_for("500 acks more", lambda: len(producer.of("acked")) >= at_kill + 500)
        cluster.restart(master)
        producer.finish()
        acked = {line["acked"] for line in producer.of("acked")}
        assert len(acked) >= 700

        def missing() -> set[str]:
            return acked - {line["key"] for line in consumer.of("key")}

        consumer.wait_for("every acknowledged message", lambda: not missing())
        consumer.finish()
    assert cluster.master()["address"] != master["address"]
