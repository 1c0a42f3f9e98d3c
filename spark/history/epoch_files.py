"""Epoch files of brokers: replicas against each other, and all against the histories.

An epoch's start is one offset for all replicas that have the epoch. A replica that was down lacks
the newest epochs, and one whose old bytes expired the oldest: neither is wrong. A Java broker drops
an epoch without bytes, so only one with bytes may not be missing in between.

Groups of one name in several clusters are compared with themselves only. Histories do not name
their cluster, so such a group is not compared with any, nor one that is in several logs.
Free of Spark.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from batonmq.epoch.entry import MAX_OFFSET
from batonmq.history.story import Story
from batonmq.spark.history.history_findings import HistoryFinding, finding
from batonmq.spark.read.store_facts import EPOCH_FILE, StoreFacts
from batonmq.spark.severity import CRITICAL, INFO, WARNING

_CLUSTERS_SHOWN: Final = 20
_UNTOLD: Final = {
    "group_untold": "of a group that is in no history",
    "epochs_older_than_history": "from before the histories begin",
    "epoch_untold": "that are in no history",
}


def by_group(stores: Iterable[StoreFacts]) -> dict[str, GroupFiles]:
    """The readable lists of each broker group; stores without brokerIdentity are in none."""
    groups: dict[str, list[StoreFacts]] = {}
    for facts in stores:
        if facts.epochs and facts.broker is not None:
            groups.setdefault(facts.broker, []).append(facts)
    return {name: GroupFiles(name, its) for name, its in groups.items()}


def of_bare_stores(stores: Iterable[StoreFacts], known: Container[str]) -> Iterator[HistoryFinding]:
    """Stores of which nothing could be compared; `known`: groups with a list or an election."""
    for facts in stores:
        path, group = facts.path, facts.broker or ""
        if facts.epochs_fault:
            yield finding(
                WARNING, "epoch_file_unreadable", group, None,
                f"The epoch list of {path} cannot be read: {facts.epochs_fault}.", path,
                file=f"{path}/{EPOCH_FILE}", reason=facts.epochs_fault,
            )  # fmt: skip
        elif not facts.epochs:
            # No news where no replica has a list, as outside of the controllers' care.
            severity = WARNING if facts.broker in known else INFO
            yield finding(
                severity, "epoch_file_missing", group, None, f"{path} has no epoch list.", path,
                store=path,
            )  # fmt: skip
        elif facts.broker is None:
            yield finding(
                WARNING, "store_without_identity", "", None,
                f"The epoch list of {path} is compared with none: without brokerIdentity its "
                "broker is unknown.", path, store=path,
            )  # fmt: skip


@dataclass(slots=True)
class _Served:
    """Epochs of masters that served and are in no file."""

    epochs: int = 0
    low: int = 0
    high: int = 0
    at_ms: int | None = None


@dataclass(slots=True)
class GroupFiles:
    """The epoch lists of one group. Tell it all changes of master, then ask for the findings."""

    group: str
    stores: list[StoreFacts]
    compares: bool = True
    """False: histories that have the group may be of another cluster."""
    _starts: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Epoch -> its lowest start, and the store that has it."""
    _span: tuple[int, int] = (0, 0)
    """The oldest and the newest epoch: looking for them at each story would cost seconds."""
    _unrecorded: set[int] = field(default_factory=set)
    _first_recorded: int | None = None
    _unlisted: dict[bool, _Served] = field(default_factory=dict)
    _found: list[HistoryFinding] = field(default_factory=list)

    def __post_init__(self) -> None:
        for facts in self.stores:
            for entry in facts.epochs:
                start = (entry.start_offset, facts.path)
                self._starts[entry.epoch] = min(start, self._starts.get(entry.epoch, start))
        self._unrecorded, self._span = set(self._starts), (min(self._starts), max(self._starts))

    @property
    def _clusters(self) -> list[str]:
        return sorted({facts.cluster or "" for facts in self.stores})

    def changed_master(self, story: Story, confirm_offset: int | None) -> None:
        """A change of master; `confirm_offset`: what was confirmed when it was elected."""
        if not self.compares or len(self._clusters) > 1:
            return
        epoch, (low, high) = story.master_epoch, self._span
        self._unrecorded.discard(epoch)
        if self._first_recorded is None or epoch < self._first_recorded:
            self._first_recorded = epoch
        if epoch in self._starts:
            self._start(story, self._starts[epoch], confirm_offset)
        elif story.first_ack_ms and epoch > low:
            served = self._unlisted.setdefault(epoch > high, _Served(0, epoch, epoch))
            served.epochs += 1
            served.low, served.high = min(served.low, epoch), max(served.high, epoch)
            if story.elected_ms:
                served.at_ms = min(served.at_ms or story.elected_ms, story.elected_ms)

    def _start(self, story: Story, low: tuple[int, str], confirmed: int | None) -> None:
        """Where a file begins an epoch, against what was confirmed and where its master opened."""
        (start, store), epoch = low, story.master_epoch
        opened = story.opened_offset if story.opened_offset >= 0 else None
        below = not story.unclean and confirmed is not None and start < confirmed
        if not below and (opened is None or start == opened):
            return
        text = (
            f", where {confirmed} was confirmed before."
            if below
            else f"; its master reported that it opened at {opened}."
        )
        self._found.append(finding(
            CRITICAL if below else WARNING,
            "start_below_confirmed" if below else "start_not_as_told", self.group,
            story.elected_ms or None, f"Epoch {epoch} begins at {start} in {store}{text}",
            f"epoch {epoch}", masterEpoch=epoch, store=store, start=start, confirmed=confirmed,
            openedAt=opened,
        ))  # fmt: skip

    def findings(self) -> Iterator[HistoryFinding]:
        yield from self._found
        clusters = self._clusters
        for cluster in dict.fromkeys(facts.cluster for facts in self.stores):
            yield from _of_cluster([each for each in self.stores if each.cluster == cluster])
        for facts in self.stores:
            if facts.epochs_from_backup:
                yield finding(
                    INFO, "epoch_file_from_backup", self.group, None,
                    f"The epoch list of {facts.path} could only be read from its backup.",
                    facts.path, store=facts.path,
                )  # fmt: skip
        if len(clusters) > 1:
            yield finding(
                WARNING, "group_in_several_clusters", self.group, None,
                f"The stores of group {self.group} are of {len(clusters)} clusters: "
                f"{', '.join(clusters[:5])}. Their epoch files are not compared with the "
                "histories.", self.group, clusters=clusters[:_CLUSTERS_SHOWN],
            )  # fmt: skip
        elif self.compares:
            yield from self._unrecorded_findings()
            yield from self._unlisted_findings()

    def _unrecorded_findings(self) -> Iterator[HistoryFinding]:
        first = self._first_recorded
        found: dict[str, list[int]] = {}
        for epoch in self._unrecorded:
            older = first is not None and epoch < first
            kind = "epochs_older_than_history" if older else "epoch_untold"
            found.setdefault("group_untold" if first is None else kind, []).append(epoch)
        for kind, epochs in found.items():
            low, high = min(epochs), max(epochs)
            yield finding(
                WARNING if kind == "epoch_untold" else INFO, kind, self.group, None,
                f"Epoch files have {len(epochs)} epochs from {low} to {high} {_UNTOLD[kind]}.",
                self.group, epochs=len(epochs), first=low, last=high,
            )  # fmt: skip

    def _unlisted_findings(self) -> Iterator[HistoryFinding]:
        """A master served in an epoch that no replica has, though some have older ones."""
        for newer, served in self._unlisted.items():
            yield finding(
                INFO if newer else WARNING,
                "files_older_than_history" if newer else "epoch_not_in_files", self.group,
                served.at_ms, f"{served.epochs} epochs from {served.low} to {served.high} had a "
                "master that acknowledged, and no epoch file has them"
                f"{': the files are older' if newer else ''}.", self.group, epochs=served.epochs,
                first=served.low, last=served.high,
            )  # fmt: skip


def _of_cluster(stores: Sequence[StoreFacts]) -> Iterator[HistoryFinding]:
    """Lists of one cluster's replicas of a group against each other."""
    group = stores[0].broker or ""
    starts: dict[int, list[tuple[int, str]]] = {}
    held: set[int] = set()
    for facts in stores:
        for entry in facts.epochs:
            starts.setdefault(entry.epoch, []).append((entry.start_offset, facts.path))
            # Java drops an epoch without bytes, and the newest one has no end yet.
            if entry.start_offset < entry.end_offset < MAX_OFFSET:
                held.add(entry.epoch)
    for epoch, places in starts.items():
        low, high = min(places), max(places)
        if low[0] != high[0]:
            yield finding(
                CRITICAL, "epoch_starts_differ", group, None,
                f"Epoch {epoch} begins at {low[0]} in {low[1]} and at {high[0]} in {high[1]}.",
                f"epoch {epoch}", masterEpoch=epoch, replicas=len(places),
                stores=[{"start_offset": at, "store": store} for at, store in (low, high)],
            )  # fmt: skip
    newest = max(starts)
    for facts in stores:
        listed = {entry.epoch for entry in facts.epochs}
        top, path = max(listed), facts.path
        lacks = [epoch for epoch in held - listed if min(listed) < epoch < top]
        if lacks:
            yield finding(
                WARNING, "epoch_gap", group, None,
                f"{path} lacks {len(lacks)} epochs with bytes that other replicas have, the first "
                f"is {min(lacks)}.", path, store=path, epochs=len(lacks), first=min(lacks),
                last=max(lacks),
            )  # fmt: skip
        if top < newest:
            yield finding(
                INFO, "replica_behind", group, None,
                f"{path} has epochs up to {top}, the newest is {newest}.", path, store=path,
                epoch=top, newest=newest,
            )  # fmt: skip
