"""Epochs: which master wrote which part of the log, and up to where two logs are the same.

`entry` and `consistent_point` are pure; `file_cache` keeps a replica's list in memory and durably
on disk; `durable_file` is how this project replaces a small file so that no crash leaves it half
written.
"""

from epoch.entry import MAX_OFFSET, EpochEntry
from epoch.file_cache import EpochFileCache

__all__ = ["MAX_OFFSET", "EpochEntry", "EpochFileCache"]
