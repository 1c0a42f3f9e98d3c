"""Fixtures of the process ring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.cluster.up import ClusterProcess


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcess]:
    """Three controllers, three replicas, a whole cluster."""
    with ClusterProcess(tmp_path) as running:
        yield running
