"""Retries, dead letters, delays, timers, recalls and transactions of stock Java clients.

All of them run at the same time, once in peace and once through a kill -9 of the master.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
from left_out import ONLY_SOAK

from batonmq.runtime.clock import wall_ms
from lab.cluster.java import JavaProgram
from lab.cluster.up import ClusterProcess
from tests.interop.conftest import RunJava
from tests.interop.features import (
    LEVELS_MS,
    MAX_RECONSUME,
    SETTINGS,
    Line,
    Seen,
    check_commits,
    commands_of,
)
from tests.interop.python_features import PythonFeatures

pytestmark = pytest.mark.java


@pytest.fixture(scope="module")
def cluster(
    java_classpath: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterProcess]:
    """The tests share it, each with topics and a group of its own."""
    folder = tmp_path_factory.mktemp("cluster")
    with ClusterProcess(folder, controllers=1, replicas=2, settings=SETTINGS) as running:
        yield running


class Run:
    """A producer and a consumer of Java with all features, and perhaps both of Python beside them,
    in the same consumer group. `commands` are without their count."""

    def __init__(
        self,
        commands: Sequence[str],
        producer: JavaProgram,
        consumer: JavaProgram,
        python: PythonFeatures | None,
    ) -> None:
        self.commands = commands
        self.producer, self.consumer, self.python = producer, consumer, python

    def seen(self, *, failover: bool = False) -> Seen:
        own = list(self.python.lines) if self.python else []
        return Seen([*self.producer.lines, *own], [*self.consumer.lines, *own], failover)

    def members(self) -> list[list[Line]]:
        """What each member of the group reports."""
        return [self.consumer.lines, *([self.python.lines] if self.python else [])]

    def send(self, count: int) -> None:
        """`count` messages of each kind; 0: until `stop`."""
        for command in self.commands:
            self.producer.send(f"{command} {count}")
            if self.python:
                self.python.send(f"{command} {count}")

    def stop(self) -> None:
        self.producer.send("stop")
        if self.python:
            self.python.stop()
        self.producer.wait_for("the end of the sends", lambda: self.producer.of("stopped"))

    def wait_for_all(self) -> None:
        """Until everything has come that must, and what was recalled or is left open can come no
        more: a timer beyond theirs was due."""
        self.consumer.wait_for("every acknowledged message", lambda: not self.seen().missing())
        self.producer.wait_for("every check", lambda: not self.seen().unchecked())
        sent = len(self.seen().acked())
        topic = self.commands[0].split()[-1]
        self.producer.send(f"ms {max(LEVELS_MS)} {topic} 1")
        self.producer.wait_for("the last send", lambda: len(self.seen().acked()) > sent)
        self.consumer.wait_for("the last message", lambda: not self.seen().missing())


@contextmanager
def features(
    cluster: ClusterProcess, run_java: RunJava, name: str, *, python: bool = False
) -> Iterator[Run]:
    """`name` begins those of its topics and its group."""
    servers, group, topics = cluster.name_servers, f"{name}-group", [f"{name}-a", f"{name}-b"]
    cluster.wait_in_sync(2)
    consume = (servers, "consume", group, "one", str(MAX_RECONSUME), *topics)
    with ExitStack() as stack:
        consumer = stack.enter_context(run_java("Features", *consume))
        producer = stack.enter_context(run_java("Features", servers, "produce", f"{name}-p"))
        member = stack.enter_context(PythonFeatures(servers, group, topics)) if python else None
        yield Run(commands_of(name), producer, consumer, member)
        producer.finish()
        consumer.finish()


def test_features_in_peace(cluster: ClusterProcess, run_java: RunJava) -> None:
    """Nothing fails, nothing is early, each message comes as often as it must and no more."""
    with features(cluster, run_java, "Peace") as run:
        count, done = 5, len(run.commands)
        run.send(count)
        run.producer.wait_for("the sends", lambda: len(run.producer.of("produced")) == done)
        run.wait_for_all()
        assert run.producer.of("failed") == []
        assert len(run.seen().acked()) == done * count + 1
        run.seen().check_all()
        run.producer.send("sec 259201 Peace-a 1")
        (refused,) = run.producer.wait_for("a refusal", lambda: run.producer.of("failed"))
        assert "CODE: 13" in refused["why"] and "timerMaxDelaySec" in refused["why"]


@pytest.mark.parametrize("python", [True, pytest.param(False, marks=ONLY_SOAK)])
def test_features_through_a_kill(cluster: ClusterProcess, run_java: RunJava, python: bool) -> None:
    """Java and Python clients send messages of every kind while the master is killed with kill -9.

    Messages that then wait for their delay, a retry, a transaction check or a recall are handled by
    the new master.
    """
    name = "Mixed" if python else "Kill"
    with features(cluster, run_java, name, python=python) as run:
        run.send(0)
        run.consumer.wait_for("dead letters", lambda: run.consumer.of("dead"))
        for lines in run.members():
            run.consumer.wait_for("a share", lambda m=lines: any("key" in x for x in list(m)))
        killed = cluster.master()
        killed_ms = wall_ms()  # before: the next master may serve before this thread runs again
        cluster.kill(killed)
        at_kill = len(run.producer.of("acked"))
        run.producer.wait_for("acks", lambda: len(run.producer.of("acked")) >= at_kill + 400)
        run.stop()
        cluster.restart(killed)
        run.wait_for_all()
        seen = run.seen(failover=True)
        seen.check_all()
        seen.check_across(killed_ms)
        if not python:
            seen.check_before(killed_ms)
        check_commits(cluster.name_servers, f"{name}-b")
