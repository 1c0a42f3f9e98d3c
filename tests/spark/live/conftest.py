"""One cluster and one Spark session for the tests of live topics."""

import sys
import warnings
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
    from spark.session import open_session

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = open_session(
            "live-tests",
            master="local[2]",
            settings={
                "spark.ui.enabled": "false",
                "spark.driver.memory": "1g",
                "spark.sql.shuffle.partitions": "2",
                "spark.sql.session.timeZone": "UTC",
                # A Python process may take long to start while the machine has other work.
                "spark.python.authenticate.socketTimeout": "120s",
            },
        )
        made.sparkContext.setLogLevel("OFF")
        yield made
        made.stop()
