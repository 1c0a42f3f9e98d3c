"""Which stores are read: one per broker group, so that no message is counted once per replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batonmq.spark.read.storage import Storage, found
from batonmq.spark.read.store_facts import StoreFacts, group_names, read_facts, segments


@dataclass(frozen=True, slots=True)
class Chosen:
    """One group's store that is read, and how many of its replicas are left aside.

    `broker` is the group's name: where clusters have one of the same name, `cluster#name`; the path
    of a store that has no identity. `uri`: the store as a path of the data source. `log_bytes`: how
    much of its log is read, or less.
    """

    store: str
    uri: str
    broker: str
    broker_id: int | None
    confirm_offset: int | None
    others: int
    log_bytes: int


@dataclass(frozen=True, slots=True)
class Sources:
    """All stores that were named, and those that are read."""

    patterns: list[str]
    chosen: list[Chosen]

    @property
    def log_bytes(self) -> int:
        """How much of all logs is read, or less."""
        return sum(each.log_bytes for each in self.chosen)


def one_per_group(patterns: Sequence[str], *, unconfirmed: bool = False) -> Sources:
    """Of the replicas of each group the one whose confirmed log is longest, then the lowest id.

    A store without an identity is a group of its own. `unconfirmed`: one without a confirmOffset
    may be among them. Raises FileNotFoundError, which names the pattern, if nothing
    matches one; StoreError for what is no store, or cannot be parsed.
    """
    groups: dict[tuple[str, str], dict[str, StoreFacts]] = {}
    stores: dict[str, tuple[Storage, StoreFacts]] = {}
    for storage, path in found(patterns):
        facts = read_facts(storage, path)
        facts.check_confirmed(segments(storage, f"{path}/commitlog"), unconfirmed=unconfirmed)
        group = (facts.cluster or "", facts.broker) if facts.broker else ("", path)
        groups.setdefault(group, {})[path] = facts
        stores[path] = storage, facts
    chosen = []
    for group, name in sorted(group_names(groups).items()):
        members = groups[group]
        best = min(members.values(), key=_rank)
        others, size = len(members) - 1, _log_bytes(*stores[best.path], unconfirmed=unconfirmed)
        uri = stores[best.path][0].uri(best.path)
        chosen.append(
            Chosen(best.path, uri, name, best.broker_id, best.confirm_offset, others, size)
        )
    return Sources(list(patterns), chosen)


def _log_bytes(storage: Storage, facts: StoreFacts, *, unconfirmed: bool) -> int:
    """What is confirmed of a log; `unconfirmed`: its files, though they may be nearly empty."""
    files = segments(storage, f"{facts.path}/commitlog")
    if unconfirmed or not files:
        return sum(file.size for file in files)
    return max(0, (facts.confirm_offset or 0) - files[0].start)


def _rank(facts: StoreFacts) -> tuple[int, int]:
    confirmed = -1 if facts.confirm_offset is None else facts.confirm_offset
    return -confirmed, facts.broker_id if facts.broker_id is not None else 1 << 62
