"""Which of the oldest log segments may go: by age, or because the disk is filling up.

Pure decision; the facade takes the segments off the log and unlinks them in a thread. The last
segment never goes. Origin: Java `CleanCommitLogService`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from store.config import StoreConfig

_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Used part of the file systems of log and consume queues, 0.0 to 1.0, the fuller one."""

    ratio: float


@dataclass(frozen=True, slots=True)
class ExpiryDecision:
    """Take the `count` oldest segments away; refuse puts while `disk_full`."""

    count: int
    disk_full: bool
    reason: str


def decide_expiry(
    config: StoreConfig,
    modified_ms: Sequence[int],
    *,
    now_ms: int,
    hour: int,
    disk: DiskUse,
    manual: bool = False,
) -> ExpiryDecision:
    """What to delete now.

    `modified_ms` holds the last write times of all segments but the last, oldest first; `hour` is
    the local hour; `manual` is an operator's order (code 329).
    """
    percent = disk.ratio * 100
    disk_full = percent > config.disk_space_warning_level_ratio
    forced = config.clean_file_forcibly_enable and (
        disk_full or percent > config.disk_space_clean_forcibly_ratio
    )
    if forced:
        count, reason = len(modified_ms), "disk"
    elif percent > config.disk_max_used_space_ratio:
        count, reason = _expired(config, modified_ms, now_ms), "disk"
    elif manual:
        count, reason = _expired(config, modified_ms, now_ms), "manual"
    elif hour in config.delete_hours:
        count, reason = _expired(config, modified_ms, now_ms), "age"
    else:
        count, reason = 0, ""
    return ExpiryDecision(min(count, config.delete_file_batch_max), disk_full, reason)


def _expired(config: StoreConfig, modified_ms: Sequence[int], now_ms: int) -> int:
    """How many of the oldest segments are past their time, up to the first that is not."""
    oldest_kept_ms = now_ms - config.file_reserved_time * _HOUR_MS
    count = 0
    for modified in modified_ms:
        if modified > oldest_kept_ms:
            break
        count += 1
    return count
