"""Which stores are read: one per broker group, so that no message is counted once per replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spark.storage import locate
from spark.store_facts import StoreFacts, read_facts


@dataclass(frozen=True, slots=True)
class Chosen:
    """One group's store that is read, and how many of its replicas are left aside."""

    store: str
    broker: str
    broker_id: int | None
    confirm_offset: int | None
    others: int


@dataclass(frozen=True, slots=True)
class Sources:
    """All stores that were named, and those that are read."""

    patterns: list[str]
    chosen: list[Chosen]


def one_per_group(patterns: Sequence[str]) -> Sources:
    """Of the replicas of each group the one whose confirmed log is longest, then the lowest id.

    A store without an identity is a group of its own. Raises FileNotFoundError, which names the
    pattern, if nothing matches one; StoreError for a store that cannot be understood.
    """
    groups: dict[tuple[str, str], dict[str, StoreFacts]] = {}
    for pattern in patterns:
        storage, place = locate(pattern)
        found = storage.glob(place)
        if not found:
            raise FileNotFoundError(f"{pattern}: nothing matches")
        for path in found:
            facts = read_facts(storage, path)
            group = (facts.cluster or "", facts.broker) if facts.broker else ("", path)
            groups.setdefault(group, {})[path] = facts
    chosen = []
    for (_, name), members in sorted(groups.items()):
        best = min(members.values(), key=_rank)
        chosen.append(
            Chosen(best.path, name, best.broker_id, best.confirm_offset, len(members) - 1)
        )
    return Sources(list(patterns), chosen)


def _rank(facts: StoreFacts) -> tuple[int, int]:
    confirmed = -1 if facts.confirm_offset is None else facts.confirm_offset
    return -confirmed, facts.broker_id if facts.broker_id is not None else 1 << 62


__all__ = ["Chosen", "Sources", "one_per_group"]
