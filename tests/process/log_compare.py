"""The logs of stopped replicas of a `ClusterProcess`, compared byte by byte (G3)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from faults import log_compare
from faults.log_compare import ReplicaLog, read_log, record_ends

__all__ = ["ReplicaLog", "check_logs_equal", "read_log", "record_ends"]


def check_logs_equal(brokers: Iterable[dict[str, Any]]) -> int:
    """As `faults.log_compare.check_logs_equal`, for entries of cluster.json."""
    return log_compare.check_logs_equal(Path(broker["dataDir"]) for broker in brokers)
