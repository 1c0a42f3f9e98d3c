"""Which stores are replicas of one broker group, and which part of the log each one confirms.

A replica must hold the bytes from its first file to its confirmOffset. The next failover may
truncate what lies above: it is read only if requested, and never called lost. Free of Spark.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from batonmq.protocol.records.codec import FIXED_SIZE_V1
from batonmq.spark.read.log_range import RECORD_BYTES_MAX, Block, LogRange, RangeReader
from batonmq.spark.read.selection import HIGH
from batonmq.spark.read.store_facts import (
    StoreFacts,
    StoreFile,
    group_names,
    read_stores,
)

_WINDOW_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ReplicaStore:
    """One store. Log offsets: it keeps [first, ...), confirms [first, confirm), and is read
    below `end`. `knows_confirm` False: the store has no confirmOffset, the end of its log is
    used instead.
    """

    name: str
    facts: StoreFacts
    files: tuple[StoreFile, ...]
    first: int
    confirm: int
    end: int
    knows_confirm: bool

    @property
    def tags_are_hashes(self) -> bool:
        """Whether units hold hashes of tags: with `consumequeue_ext` they hold places in it."""
        return not self.facts.storage.exists(f"{self.facts.path}/consumequeue_ext")

    def epoch_at(self, offset: int) -> int | None:
        """The epoch in which the byte at a log offset was written, by this replica's list."""
        epochs, missing = self.facts.epoch_of(np.array([offset], np.int64))
        return None if missing[0] else int(epochs[0])

    @property
    def rank(self) -> tuple[int, int]:
        """In a tie the greatest rank is right: last epoch, confirmOffset."""
        epochs = self.facts.epochs
        return (epochs[-1].epoch if epochs else -1, self.confirm)


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """The replicas of one broker group, in the order of their ids."""

    name: str
    replicas: tuple[ReplicaStore, ...]

    @property
    def low(self) -> int:
        """From here on all replicas keep the log."""
        return max(replica.first for replica in self.replicas)

    @property
    def high(self) -> int:
        """Up to here all replicas call it confirmed."""
        return min(replica.confirm for replica in self.replicas)

    @property
    def first(self) -> int:
        """From here on at least one replica keeps the log."""
        kept = [replica.first for replica in self.replicas if replica.files]
        return min(kept or [self.confirm])

    @property
    def confirm(self) -> int:
        """Up to here at least one replica calls the log confirmed."""
        return max(replica.confirm for replica in self.replicas)

    def confirming(self, end: int) -> list[int]:
        """Numbers of the replicas that call the log confirmed up to an offset."""
        return [at for at, replica in enumerate(self.replicas) if replica.confirm >= end]

    @property
    def brokers(self) -> frozenset[str]:
        """Names that a list of messages may call this group by."""
        stores = (replica.facts.broker for replica in self.replicas)
        return frozenset({self.name, *(broker for broker in stores if broker)})

    def names(self, which: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.replicas[index].name for index in which)

    def stretches(self) -> Iterator[tuple[int, int]]:
        """The whole log, cut where an epoch begins in one of the lists."""
        entries = (entry for replica in self.replicas for entry in replica.facts.epochs)
        return pairwise(sorted({0, HIGH, *(entry.start_offset for entry in entries)}))

    def epoch_at(self, offset: int, holders: Sequence[int] = ()) -> tuple[int | None, str]:
        """(epoch, text) of a log offset by the lists of its holders, which are numbers of replicas;
        by all lists if none of theirs has it. None if these disagree. The text has the epoch of
        each replica if they differ.
        """
        said = [replica.epoch_at(offset) for replica in self.replicas]
        every = set(said) - {None}
        values = {said[index] for index in holders} - {None} or every
        epoch = values.pop() if len(values) == 1 else None
        if len(every) < 2:
            return epoch, ""
        names = (replica.name for replica in self.replicas)
        listed = ", ".join(f"{each} by {name}" for name, each in zip(names, said, strict=True))
        return epoch, f"; its epoch is {listed}"


@dataclass(frozen=True, slots=True)
class LogFile:
    """One file of a group's log, [start, end), and where each replica has it (None: not)."""

    start: int
    end: int
    paths: tuple[str | None, ...]


def find_groups(
    patterns: Sequence[str], *, group: str | None, unconfirmed: bool, with_tails: bool
) -> list[ReplicaGroup]:
    """The stores of the patterns as groups, by name.

    `group`: all stores are replicas of this one, whatever their brokerIdentity is, if they have
    one. `unconfirmed`: stores without a confirmOffset are compared to the end of their log.
    `with_tails`: logs are read to their ends. Raises ValueError, StoreError, OSError.
    """
    members: dict[tuple[str, str], list[StoreFacts]] = {}
    for facts in read_stores(patterns):
        key = (facts.cluster or "", facts.broker or "")
        if group is not None:
            key = ("", group)
        elif facts.broker is None:
            raise ValueError(
                f"{facts.path} has no brokerIdentity, so its group is not known: name it with "
                "--group; then all stores of this call are its replicas"
            )
        members.setdefault(key, []).append(facts)
    groups = []
    for key, name in sorted(group_names(members).items()):
        stores = members[key]
        if len(stores) > 62:  # each is one bit of a signed number of 64
            raise ValueError(f"{name}: {len(stores)} replicas; at most 62 can be compared")
        stores.sort(key=lambda each: (each.broker_id is None, each.broker_id or 0))
        replicas = [
            _replica(label, facts, unconfirmed=unconfirmed, with_tails=with_tails)
            for label, facts in zip(_names(key[1], stores), stores, strict=True)
        ]
        if unconfirmed and not any(replica.confirm for replica in replicas):
            replicas = [replace(each, confirm=each.end, knows_confirm=False) for each in replicas]
        groups.append(ReplicaGroup(name, tuple(replicas)))
    return groups


def _names(broker: str, stores: Sequence[StoreFacts]) -> list[str]:
    """broker#id of each; with its folder where that is not one of its own."""
    plain = [
        f"{broker}#{number if facts.broker_id is None else facts.broker_id}"
        for number, facts in enumerate(stores, 1)
    ]
    return [
        name if plain.count(name) == 1 else f"{name} ({facts.path})"
        for name, facts in zip(plain, stores, strict=True)
    ]


def _replica(name: str, facts: StoreFacts, *, unconfirmed: bool, with_tails: bool) -> ReplicaStore:
    every = facts.log_files(with_empty=True)
    files = tuple(file for file in every if file.size)
    if files and not unconfirmed:
        facts.confirmed_end()  # that there is one
    knows, confirm = facts.keeps_confirm, facts.confirm_offset or 0
    end = confirm
    if unconfirmed or with_tails or not knows:
        end = max(confirm, log_end(facts, files, confirm))
    if not knows:
        confirm = end
    # A file that was emptied is there: it has not expired.
    first = every[0].start if files else confirm
    return ReplicaStore(name, facts, files, first, confirm, end, knows)


def log_end(facts: StoreFacts, files: Sequence[StoreFile], confirm: int) -> int:
    """Behind the last whole record of a log, or what was one; files are walked from the last."""
    for file in reversed(files):
        with facts.storage.open(file.path) as opened:
            if not any(opened.read_at(0, FIXED_SIZE_V1)):
                continue
            end = file.start
            wanted = LogRange(file.path, end, file.end, end, file.end, file.end, True, confirm)
            for item in RangeReader(opened, wanted, _WINDOW_BYTES, RECORD_BYTES_MAX).blocks():
                if isinstance(item, Block):
                    end = int(item.ends[-1])
                elif item.offset < confirm:
                    end = min(item.offset + item.size, confirm)
            return end
    return files[0].start if files else 0


def log_files(group: ReplicaGroup) -> list[LogFile]:
    """The files of a group's log by their starts. Raises ValueError if they do not fit together."""
    count = len(group.replicas)
    paths: dict[int, list[str | None]] = {}
    ends: dict[int, int] = {}
    for index, replica in enumerate(group.replicas):
        for file in replica.files:
            paths.setdefault(file.start, [None] * count)[index] = file.path
            ends[file.start] = max(ends.get(file.start, 0), file.end)
    starts = sorted(paths)
    for start, following in pairwise(starts):
        if ends[start] > following:
            one, other = _some(paths[start]), _some(paths[following])
            raise ValueError(
                f"{one} reaches to {ends[start]}, behind the start of {other}: logs of a group "
                "have files of one size (mappedFileSizeCommitLog)"
            )
    return [LogFile(start, ends[start], tuple(paths[start])) for start in starts]


def _some(paths: Sequence[str | None]) -> str:
    return next(path for path in paths if path is not None)
