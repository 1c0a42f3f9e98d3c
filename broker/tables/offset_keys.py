"""The keys of the table of consumer offsets, by topic and by group. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SEPARATOR: Final = "@"
_SORTED_AT_ONCE: Final = 512


class OffsetKeys:
    """The keys `topic@group` of a table by topic and by group, so that a look-up does not walk over
    all of them (R58). The keys of a whole table are indexed bit by bit, as look-ups come:
    a start with 20,000 keys would stop the loop."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._of_topic: dict[str, set[str]] = {}
        self._of_group: dict[str, set[str]] = {}
        self._unsorted = set(keys)

    def add_all(self, keys: Iterable[str]) -> None:
        """Adds keys that were not there."""
        self._unsorted.update(keys)

    def add(self, key: str) -> None:
        """Adds a key that was not there."""
        topic, _, group = key.partition(SEPARATOR)
        self._of_topic.setdefault(topic, set()).add(key)
        self._of_group.setdefault(group, set()).add(key)

    def remove(self, key: str) -> None:
        if key in self._unsorted:
            self._unsorted.remove(key)
            return
        topic, _, group = key.partition(SEPARATOR)
        for table, name in ((self._of_topic, topic), (self._of_group, group)):
            keys = table[name]
            keys.remove(key)
            if not keys:
                del table[name]

    def of_topic(self, topic: str) -> list[str]:
        self._sort_some()
        prefix = topic + SEPARATOR
        rest = [key for key in self._unsorted if key.startswith(prefix)]
        return sorted([*self._of_topic.get(topic, ()), *rest])

    def of_group(self, group: str) -> list[str]:
        """The keys of a group, without those of broadcast consumers (`topic@group@...`)."""
        # `add` has keys of broadcast consumers under `group@client`.
        if SEPARATOR in group:
            return []
        self._sort_some()
        suffix = SEPARATOR + group
        rest = [k for k in self._unsorted if k.endswith(suffix) and k.count(SEPARATOR) == 1]
        return sorted([*self._of_group.get(group, ()), *rest])

    def _sort_some(self) -> None:
        for _ in range(min(len(self._unsorted), _SORTED_AT_ONCE)):
            self.add(self._unsorted.pop())
