"""`mqctl migrate`: a Java broker makes way for two of ours under a stock producer and consumer.
Under `make soak` two Java brokers become two of ours, and two Java brokers again.

While two Java brokers are left the group waits: RocketMQ 5.3.3 takes up to 90 s until a former
master follows.

A stock client looks for a new master each 30 s, and under `make soak` it is waited for that before
the switch. Else the clients look each second, and what fails until then is not counted.
"""

import signal
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from lab.cluster.cluster import GROUP
from lab.cluster.mixed import MixedGroup
from lab.cluster.mqctl import Ran, mqctl
from lab.cluster.stock_load import StockLoad
from lab.cluster.up import rounds
from tests.interop.conftest import FAST_REBALANCE, RunJava

pytestmark = pytest.mark.java

TOPIC = "Migrated"
HEARTBEAT = {"haSendHeartbeatInterval": 1000}
THREADS = 4
STOPS = 6
"""Two switches and four brokers that leave."""


class Operator:
    """Who runs `mqctl migrate` and starts and stops brokers."""

    def __init__(self, group: MixedGroup, load: StockLoad, home: Path) -> None:
        self.group = group
        self.load = load
        self.home = home

    def run(self, step: str, *arguments: str) -> Ran:
        where = {"CONTROLLER_ADDR": self.group.controller, "NAMESRV_ADDR": self.group.name_server}
        ran = mqctl("migrate", step, "-bn", GROUP, *arguments, home=self.home, env=where)
        print(f"$ mqctl migrate {step} {' '.join(arguments)}\n{ran.out}{ran.err}")
        return ran

    def done(self, step: str, *arguments: str) -> None:
        ran = self.run(step, *arguments)
        assert ran.code == 0, ran

    def join(self, place: int, *, java: bool) -> None:
        if java:
            self.group.start_java(place, **HEARTBEAT)
        else:
            self.group.start_ours(place)
        self.done("join", "-b", self.group.address(place))

    def switch(self, place: int) -> None:
        self.done("switch", "-b", str(self.group.broker_id(place)))
        self.load.go_on(100)

    def leave(self, place: int) -> None:
        """The broker is told to end while the command waits for that, as soon as it may."""
        group, broker_id = self.group, str(self.group.broker_id(place))

        def stop() -> None:
            group.wait_for("two others in sync", lambda: len(group.in_sync() - {place}) > 1)
            group.signal(place, signal.SIGTERM)

        stopping = threading.Thread(target=stop)
        stopping.start()
        try:
            self.done("leave", "-b", broker_id)
        finally:
            stopping.join()
        group.kill(place)
        (group.store(place) / "brokerIdentity").unlink()
        self.load.go_on(100)


def test_a_java_group_becomes_ours_and_java_again(
    java_classpath: str, run_java: RunJava, tmp_path: Path
) -> None:
    """Nothing is lost. With routes that lead to ours, only sends that are under way fail: each of
    the four threads has one when a broker stops, or its client has not heard of the switch."""
    with ExitStack() as stack:
        group = stack.enter_context(MixedGroup(tmp_path / "g", 4, {"replicaRoutes": True}))
        whole = rounds(0, soak=1)
        places = (0, 1) if whole else (0,)
        for place in places:
            group.start_java(place, **HEARTBEAT)
        group.wait_in_sync(*places)
        start = (
            run_java if whole else partial(run_java, properties=(*FAST_REBALANCE, "poll.ms=1000"))
        )
        load = StockLoad(start, stack, group.name_server, TOPIC)
        load.go_on(100)
        operator = Operator(group, load, tmp_path)
        first, second = (0, 1) if group.master() == 0 else (1, 0)
        operator.done("plan")
        refused = operator.run("leave", "-b", str(group.broker_id(first)))
        assert refused.code == 1 and "is the master" in refused.err

        operator.join(2, java=False)
        if whole:
            load.wait_for_replica_route()  # one of ours passes sends on
            operator.switch(2)
            operator.leave(second)
            operator.join(3, java=False)
        else:
            operator.join(3, java=False)
            operator.switch(2)
        operator.leave(first)
        assert "Nothing is left to do" in operator.run("status").out
        load.go_on(100)
        if whole:
            operator.join(0, java=True)
            operator.switch(0)
            operator.leave(2)
            operator.join(1, java=True)
            operator.leave(3)
            assert operator.run("status", "--to", "java", "--json").json["steps"] == []
            load.go_on(100)
        print(len(load.acked("sync")), load.reasons(0), load.since(0))
        print(load.finish())
        if whole:
            assert len(load.failed()) <= STOPS * THREADS, load.reasons(0)
