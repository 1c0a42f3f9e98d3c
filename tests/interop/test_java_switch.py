"""Stock Java clients, every setting at its default, through a planned switch and a kill -9.

They learn of a new master by their next poll, up to 30 s later. Until then the old master, a slave
now, passes their sends on and serves their pulls (`broker/relay`). A killed one is started again;
meanwhile `replicaRoutes` lead the producer's retries to the slaves.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from lab.java import JavaProgram
from lab.mqctl import mqctl
from lab.up import ClusterProcess, rounds

pytestmark = pytest.mark.java

RunJava = Callable[..., JavaProgram]
TOPIC = "JavaSwitch"


@pytest.fixture
def cluster(java_classpath: str, tmp_path: Path) -> Iterator[ClusterProcess]:
    routes = {"namesrv": {"replicaRoutes": True}}
    with ClusterProcess(tmp_path / "cluster", overrides=routes, respawn=True) as running:
        yield running


def longest_gap_ms(lines: list[dict[str, int]]) -> int:
    times = sorted(line["at"] for line in lines)
    return max(after - before for before, after in pairwise(times))


class Load:
    """A producer of four threads and a push consumer, and what they saw."""

    def __init__(self, producer: JavaProgram, consumer: JavaProgram) -> None:
        self.producer, self.consumer = producer, consumer

    def go_on(self, count: int = 300) -> None:
        """Waits until both have seen `count` more messages than now."""
        acks, seen = len(self.producer.of("acked")), len(self.consumer.of("key"))
        self.producer.wait_for("acks", lambda: len(self.producer.of("acked")) >= acks + count)
        self.consumer.wait_for("messages", lambda: len(self.consumer.of("key")) >= seen + count)

    def finish(self) -> None:
        """The consumer gets every acknowledged message, and no send failed."""
        self.producer.finish()
        acked = {line["acked"] for line in self.producer.of("acked")}
        self.consumer.wait_for(
            "every acknowledged message",
            lambda: acked <= {line["key"] for line in self.consumer.of("key")},
        )
        self.consumer.finish()
        print(
            f"longest time without an ack {longest_gap_ms(self.producer.of('acked'))} ms,"
            f" without a message {longest_gap_ms(self.consumer.of('key'))} ms"
        )
        assert self.producer.of("failed") == []


@pytest.fixture
def load(cluster: ClusterProcess, run_java: RunJava) -> Iterator[Load]:
    servers = cluster.name_servers
    with ExitStack() as stack:
        # The routes that it starts with show all members.
        cluster.wait_in_sync(3)
        producer = stack.enter_context(run_java("StockLoad", servers, TOPIC, "4", "produce"))
        consumer = stack.enter_context(run_java("StockLoad", servers, TOPIC, "0", "consume"))
        running = Load(producer, consumer)
        running.go_on()
        yield running


def test_no_send_fails_in_planned_switches(
    cluster: ClusterProcess, load: Load, tmp_path: Path
) -> None:
    for _ in range(2):
        master = cluster.master()
        other = str(cluster.slaves()[0]["id"])
        where = {"CONTROLLER_ADDR": ";".join(cluster.controllers)}
        switched = mqctl("electMaster", "-bn", "broker-a", "-b", other, home=tmp_path, env=where)
        assert switched.code == 0, switched
        load.go_on()
        assert cluster.master()["address"] != master["address"]
    load.finish()


def test_no_send_fails_when_the_master_is_killed(cluster: ClusterProcess, load: Load) -> None:
    for _ in range(rounds(2, soak=10)):
        cluster.kill(cluster.master())
        load.go_on(600)
        cluster.wait_in_sync(3)
    load.finish()


def test_no_send_fails_in_a_rolling_restart(cluster: ClusterProcess, load: Load) -> None:
    for broker in list(cluster.brokers):
        cluster.kill(broker, signal.SIGTERM)
        load.go_on(600)
        cluster.wait_in_sync(3)
    load.finish()
