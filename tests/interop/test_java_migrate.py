"""`mqctl migrate`: two Java brokers become two of ours under a stock producer and consumer, and two
Java brokers again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.java import JavaProgram
from lab.mixed import GROUP, MixedGroup
from lab.mqctl import Ran, mqctl
from lab.stock_load import StockLoad

pytestmark = pytest.mark.java

RunJava = Callable[..., JavaProgram]
TOPIC = "Migrated"
HEARTBEAT = {"haSendHeartbeatInterval": 1000}


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
        self.load.go_on()

    def leave(self, place: int) -> None:
        """The broker is stopped while the command waits for that, as soon as it may be."""
        group, broker_id = self.group, str(self.group.broker_id(place))

        def stop() -> None:
            group.wait_for("two others in sync", lambda: len(group.in_sync() - {place}) > 1)
            group.kill(place)

        stopping = threading.Thread(target=stop)
        stopping.start()
        try:
            self.done("leave", "-b", broker_id)
        finally:
            stopping.join()
        (group.store(place) / "brokerIdentity").unlink()
        self.load.go_on()


def test_a_java_group_becomes_ours_and_java_again(
    java_classpath: str, run_java: RunJava, tmp_path: Path
) -> None:
    """No send fails, since the name server shows every replica to producers; nothing is lost."""
    with ExitStack() as stack:
        group = stack.enter_context(MixedGroup(tmp_path / "g", 4, {"replicaRoutes": True}))
        for place in (0, 1):
            group.start_java(place, **HEARTBEAT)
        group.wait_in_sync(0, 1)
        load = StockLoad(run_java, stack, group.name_server, TOPIC)
        load.go_on()
        operator = Operator(group, load, tmp_path)
        if group.master() == 1:
            operator.switch(0)
        operator.done("plan")
        refused = operator.run("leave", "-b", str(group.broker_id(0)))
        assert refused.code == 1 and "is the master" in refused.err

        operator.join(2, java=False)
        operator.switch(2)
        operator.leave(1)
        operator.join(3, java=False)
        operator.leave(0)
        assert "Nothing is left to do" in operator.run("status").out
        load.go_on()

        operator.join(0, java=True)
        operator.switch(0)
        operator.leave(2)
        operator.join(1, java=True)
        operator.leave(3)
        assert operator.run("status", "--to", "java", "--json").json["steps"] == []
        load.go_on()
        print(load.reasons(0), load.since(0))
        print(load.finish())
        assert load.failed() == []
