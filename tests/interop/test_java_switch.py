"""Stock Java clients, every setting at its default, through a switch, a kill -9, a hang, a restart.

They learn of a new master by their next poll, up to 30 s later. Until then the old master, a slave
now, passes their sends on and serves their pulls (`broker/relay`). A killed one is started again;
meanwhile `replicaRoutes` lead the producer's retries to the slaves.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.java import JavaProgram
from lab.mqctl import mqctl
from lab.stock_load import PROGRAM, StockLoad
from lab.up import ClusterProcess, rounds

pytestmark = pytest.mark.java

RunJava = Callable[..., JavaProgram]
TOPIC = "JavaSwitch"


@pytest.fixture
def cluster(java_classpath: str, tmp_path: Path) -> Iterator[ClusterProcess]:
    routes = {"namesrv": {"replicaRoutes": True}}
    with ClusterProcess(tmp_path / "cluster", overrides=routes, respawn=True) as running:
        yield running


def nothing_failed(load: StockLoad) -> None:
    """The consumer gets every acknowledged message, and no send failed."""
    twice = load.finish()
    print(f"{load.since(0)}, {twice} messages came more than once")
    assert load.producer.of("failed") == []


@pytest.fixture
def load(cluster: ClusterProcess, run_java: RunJava) -> Iterator[StockLoad]:
    servers = cluster.name_servers
    with ExitStack() as stack:
        # The routes that it starts with show all members.
        cluster.wait_in_sync(3)
        producer, consumer = (
            stack.enter_context(run_java(PROGRAM, *StockLoad.arguments(servers, TOPIC, role)))
            for role in ("produce", "consume")
        )
        running = StockLoad(producer, consumer)
        running.go_on()
        yield running


def test_no_send_fails_in_planned_switches(
    cluster: ClusterProcess, load: StockLoad, tmp_path: Path
) -> None:
    for _ in range(2):
        master = cluster.master()
        other = str(cluster.slaves()[0]["id"])
        where = {"CONTROLLER_ADDR": ";".join(cluster.controllers)}
        switched = mqctl("electMaster", "-bn", "broker-a", "-b", other, home=tmp_path, env=where)
        assert switched.code == 0, switched
        load.go_on()
        assert cluster.master()["address"] != master["address"]
    nothing_failed(load)


def test_no_send_fails_when_the_master_is_killed(cluster: ClusterProcess, load: StockLoad) -> None:
    for _ in range(rounds(2, soak=10)):
        cluster.kill(cluster.master())
        load.go_on(600)
        cluster.wait_in_sync(3)
    nothing_failed(load)


def test_no_send_fails_when_the_master_hangs(cluster: ClusterProcess, load: StockLoad) -> None:
    """The watchdog of `batonmq up` makes a kill of it before a send's own time-out."""
    cluster.kill(cluster.master(), signal.SIGSTOP)
    load.go_on(600)
    cluster.wait_in_sync(3)
    nothing_failed(load)


def test_no_send_fails_in_a_rolling_restart(cluster: ClusterProcess, load: StockLoad) -> None:
    for broker in list(cluster.brokers):
        cluster.kill(broker, signal.SIGTERM)
        load.go_on(600)
        cluster.wait_in_sync(3)
    nothing_failed(load)
