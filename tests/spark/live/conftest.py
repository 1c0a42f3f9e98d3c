"""One cluster and one Spark session for the tests of live topics."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "process"))


@pytest.fixture(scope="session")
def live_cluster(tmp_path_factory):
    """Three controllers and three replicas; a broker that dies is started again."""
    from cluster_process import ClusterProcess

    with ClusterProcess(tmp_path_factory.mktemp("live"), respawn=True) as running:
        running.wait_in_sync(3)
        yield running


@pytest.fixture(scope="session")
def live_session():
    from tests.spark.spark_session import spark_session

    with spark_session() as made:
        yield made
