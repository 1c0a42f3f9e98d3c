"""Fixtures of the process ring. `tests/process` is put on the path for its one helper module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster_process import ClusterProcess


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcess]:
    """Three controllers, three replicas, a whole cluster."""
    with ClusterProcess(tmp_path) as running:
        yield running
