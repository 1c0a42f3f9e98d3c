"""Makes `fake_cluster`, the scripted servers beside the tests, importable in importlib mode."""

import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fake_cluster


@pytest.fixture
def cluster() -> AbstractAsyncContextManager[fake_cluster.FakeCluster]:
    """Scripted servers with the topic T, open while the test runs."""
    return fake_cluster.open_cluster()
