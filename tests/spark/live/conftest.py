"""One cluster for the tests of live topics."""

import pytest

from lab.cluster.up import ClusterProcess


@pytest.fixture(scope="session")
def live_cluster(tmp_path_factory):
    """Three controllers and three replicas; a broker that dies is started again."""
    with ClusterProcess(tmp_path_factory.mktemp("live"), respawn=True) as running:
        running.wait_in_sync(3)
        yield running
