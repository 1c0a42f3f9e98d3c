"""The names of a controller's history files: one that grows, and those that were full before it.

`history-n0.jsonl` grows; when it is full it becomes `history-n0.000001.jsonl`, the next one
`history-n0.000002.jsonl`, and so on. Whoever reads `history-*.jsonl` reads all of them.
"""

import re
from collections.abc import Iterable
from typing import Final

__all__ = ["numbered", "older_first"]

SUFFIX: Final = ".jsonl"


def numbered(name: str, number: int) -> str:
    """What `name` is called once it is the full file of that number (from 1)."""
    return f"{name.removesuffix(SUFFIX)}.{number:06d}{SUFFIX}"


def older_first(name: str, names: Iterable[str]) -> list[tuple[int, str]]:
    """(number, name) of those `names` that are full files of `name`, oldest first."""
    pattern = re.compile(re.escape(name.removesuffix(SUFFIX)) + r"\.(\d{6,})" + re.escape(SUFFIX))
    found = ((pattern.fullmatch(each), each) for each in names)
    return sorted((int(match[1]), each) for match, each in found if match)
