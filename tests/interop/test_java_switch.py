"""Stock Java clients, every setting at its default, through a planned switch.

They learn of a new master by their next poll, up to 30 s later. Until then the old master, a slave
now, passes their sends on and serves their pulls (`broker/relay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from lab.java import JavaProgram
from lab.mqctl import mqctl
from lab.up import ClusterProcess

pytestmark = pytest.mark.java

RunJava = Callable[..., JavaProgram]
TOPIC = "JavaSwitch"


@pytest.fixture
def cluster(java_classpath: str, tmp_path: Path) -> Iterator[ClusterProcess]:
    with ClusterProcess(tmp_path / "cluster") as running:
        yield running


def longest_gap_ms(lines: list[dict[str, int]]) -> int:
    times = sorted(line["at"] for line in lines)
    return max(after - before for before, after in pairwise(times))


def test_no_send_fails_and_every_message_arrives_through_two_switches(
    cluster: ClusterProcess, run_java: RunJava, tmp_path: Path
) -> None:
    servers = cluster.name_servers
    with ExitStack() as stack:
        producer = stack.enter_context(run_java("StockLoad", servers, TOPIC, "4", "produce"))
        producer.wait_for("acks", lambda: len(producer.of("acked")) >= 300)
        consumer = stack.enter_context(run_java("StockLoad", servers, TOPIC, "0", "consume"))
        consumer.wait_for("messages", lambda: len(consumer.of("key")) >= 300)
        for _ in range(2):
            master = cluster.master()
            other = str(cluster.slaves()[0]["id"])
            where = {"CONTROLLER_ADDR": ";".join(cluster.controllers)}
            switched = mqctl(
                "electMaster", "-bn", "broker-a", "-b", other, home=tmp_path, env=where
            )
            assert switched.code == 0, switched
            acks, seen = len(producer.of("acked")), len(consumer.of("key"))
            producer.wait_for("acks after it", lambda n=acks: len(producer.of("acked")) >= n + 300)
            consumer.wait_for(
                "messages after it", lambda n=seen: len(consumer.of("key")) >= n + 300
            )
            assert cluster.master()["address"] != master["address"]
        producer.finish()
        acked = {line["acked"] for line in producer.of("acked")}
        consumer.wait_for(
            "every acknowledged message",
            lambda: acked <= {line["key"] for line in consumer.of("key")},
        )
        consumer.finish()
    assert producer.of("failed") == []
    print(
        f"longest time without an ack {longest_gap_ms(producer.of('acked'))} ms,"
        f" without a message {longest_gap_ms(consumer.of('key'))} ms"
    )
