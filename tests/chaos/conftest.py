"""Fixtures of the docker ring: one cluster of containers for all tests, left out by name."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from left_out import leave_out

from lab.cluster.compose import ComposeCluster, build_image, missing_tools

LOGS = Path(os.environ.get("BATONMQ_CHAOS_LOGS", "/tmp/batonmq-chaos-logs"))


@pytest.fixture(scope="session")
def image() -> None:
    """That of this work tree."""
    lacks = missing_tools()
    if lacks:
        leave_out(f"this machine lacks {' and '.join(lacks)}")
    build_image()


@pytest.fixture(scope="module")
def containers(image: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeCluster]:
    """`docker compose up` of the image, ended with its volumes."""
    with ComposeCluster(tmp_path_factory.mktemp("chaos")) as cluster:
        yield cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    used = getattr(item, "funcargs", {}).values()
    for cluster in [one for one in used if report.failed and isinstance(one, ComposeCluster)]:
        folder = LOGS / item.name.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
        for log in cluster.logs():
            shutil.copy(log, folder)
        report.sections.append(("containers", f"their logs are in {folder}"))
    return report
