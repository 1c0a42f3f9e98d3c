"""Fixtures of the Java ring: the stock client's classpath, and one cluster for each module."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from left_out import leave_out

from lab.cluster.java import SMALL_JVM, JavaProgram, missing_tools, prepared_classpath
from lab.cluster.up import ClusterProcess

RunJava = Callable[..., JavaProgram]
FAST_REBALANCE = ("rocketmq.client.rebalance.waitInterval=2000",)
"""Properties of clients that share out queues each 2 s, not each 20, where a test would wait."""


@pytest.fixture(scope="session")
def java_classpath() -> str:
    """Skips where the machine lacks a tool, by name; with BATONMQ_CI=1 that is a failure."""
    lacks = missing_tools()
    if lacks:
        leave_out(f"this machine lacks {' and '.join(lacks)}")
    return prepared_classpath()


@pytest.fixture
def run_java(java_classpath: str, tmp_path: Path) -> RunJava:
    """`run_java(name, *arguments)` starts one of our programs in a folder of its own; `properties`
    as KEY=VALUE. A load takes a tenth of what measurements have it take: nothing is measured."""
    started = 0

    def start(
        name: str, *arguments: str, binary_headers: bool = False, properties: Sequence[str] = ()
    ) -> JavaProgram:
        nonlocal started
        started += 1
        folder = tmp_path / f"java-{started}"
        jvm = [*SMALL_JVM, *(f"-D{each}" for each in ("pause.ms=20", *properties))]
        return JavaProgram(
            java_classpath, folder, name, *arguments, binary_headers=binary_headers, jvm=jvm
        )

    return start


@pytest.fixture(scope="module")
def java_cluster(
    java_classpath: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterProcess]:
    """Three controllers, two replicas; the tests of a module share it, each with its topic."""
    with ClusterProcess(tmp_path_factory.mktemp("cluster"), replicas=2) as running:
        yield running
