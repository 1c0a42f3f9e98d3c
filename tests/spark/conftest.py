"""Every test here belongs to the ring `spark`; without its packages none is collected.

The runner (`tests.run`) says by name what a machine lacks for it.
"""

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGES = (
    "deltalake", "duckdb", "jinja2", "jpype", "moto", "numpy", "plotly", "pyarrow", "pyiceberg",
    "pyspark",
)  # fmt: skip
LACKING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
# Short queries: the JVM's optimizing compiler costs half of the processor time, for nothing.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def pytest_ignore_collect() -> bool | None:
    """For this folder and all below it, also their conftest.py."""
    return True if LACKING else None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.spark)


if not LACKING:
    from lab.cluster.up import ClusterProcess
    from tests.spark.browser import Browser, need_a_browser
    from tests.spark.log_files import LogFiles
    from tests.spark.spark_session import spark_session

    @pytest.fixture(scope="session")
    def session():
        """Of all tests: none may leave it with other settings."""
        with spark_session() as made:
            yield made

    @pytest.fixture
    def log_files(tmp_path):
        """Commit-log files made by hand, as a store folder."""
        return LogFiles(tmp_path / "store")

    @pytest.fixture(scope="session")
    def live_cluster(tmp_path_factory):
        """Three controllers and three replicas; a process that dies is started again."""
        with ClusterProcess(tmp_path_factory.mktemp("live"), respawn=True) as running:
            running.wait_in_sync(3)
            yield running

    @pytest.fixture(scope="session")
    def browser(tmp_path_factory):
        need_a_browser()
        made = Browser(tmp_path_factory.mktemp("profile"))
        yield made
        made.close()
