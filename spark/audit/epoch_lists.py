"""Epoch lists of replicas against each other: which bytes they count to different epochs.

Free of Spark.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, groupby, pairwise

from batonmq.spark.audit.findings import CRITICAL, WARNING, Finding
from batonmq.spark.audit.replicas import Replica, ReplicaGroup


def compare_epochs(group: ReplicaGroup) -> list[Finding]:
    """Bytes that both of two replicas keep and confirm, and that their lists give to other epochs.

    Epochs without a byte may be in one list only, and a list may have lost what expired.
    """
    found = []
    for replica in group.replicas:
        if replica.facts.epochs_from_backup:
            found.append(
                Finding(
                    group.name, WARNING, "epochs_differ",
                    f"{replica.facts.path}/epochFileCheckpoint cannot be read; its backup was",
                    (replica.name,),
                )
            )  # fmt: skip
    found += _without_lists(group)
    for one, other in combinations(group.replicas, 2):
        for begin, end, epoch, theirs in _differences(one, other):
            found.append(
                Finding(
                    group.name, CRITICAL, "epochs_differ",
                    f"the bytes from {begin} to {end} are of {_epoch(epoch)} by {one.name}, of "
                    f"{_epoch(theirs)} by {other.name}",
                    (one.name, other.name), physical_offset=begin, size=end - begin,
                )
            )  # fmt: skip
    for replica in group.replicas:
        found += _passed_over(group, replica)
    return found


def _without_lists(group: ReplicaGroup) -> Iterator[Finding]:
    """Replicas whose list cannot be read, or is gone though others have one: they have bytes."""
    listed = [replica.name for replica in group.replicas if replica.facts.epochs]
    for replica in group.replicas:
        if replica.facts.epochs_fault:
            why = f"its epochs cannot be read: {replica.facts.epochs_fault}"
        elif listed and replica.confirm and not replica.facts.epochs:
            why = f"it has no list of epochs; {', '.join(listed)} ha{_s(listed)}"
        else:
            continue
        yield Finding(
            group.name, WARNING, "epochs_differ", f"{replica.facts.path}: {why}", (replica.name,)
        )


def _s(names: Sequence[str]) -> str:
    return "s one" if len(names) == 1 else "ve one"


def _passed_over(group: ReplicaGroup, replica: Replica) -> Iterator[Finding]:
    """What others confirm in an epoch before the one that this replica gives these bytes to, and
    that it does not confirm itself: with its next message, or with the next resync, it is gone.
    """
    stretches: dict[tuple[int, int, int | None, int | None], list[str]] = {}
    for other in group.replicas:
        low, high = max(replica.confirm, other.first), other.confirm
        for begin, end, epoch, theirs in _stretches(replica, other, low, high):
            if epoch is not None and theirs is not None and theirs < epoch:
                stretches.setdefault((begin, end, epoch, theirs), []).append(other.name)
    for (begin, end, epoch, theirs), names in stretches.items():
        yield Finding(
            group.name, CRITICAL, "missing",
            f"{replica.name} does not hold the bytes from {begin} to {end}, which "
            f"{', '.join(names)} confirm{'s' * (len(names) == 1)} in {_epoch(theirs)}: it has "
            f"{_epoch(epoch)} there already",
            (replica.name,), physical_offset=begin, size=end - begin, epoch=theirs,
        )  # fmt: skip


def _epoch(epoch: int | None) -> str:
    return "no epoch" if epoch is None else f"epoch {epoch}"


def _differences(one: Replica, other: Replica) -> Iterator[tuple[int, int, int | None, int | None]]:
    """(begin, end, epoch, epoch of the other) of stretches that both keep and confirm."""
    if not one.facts.epochs or not other.facts.epochs:
        return
    low, high = max(one.first, other.first), min(one.confirm, other.confirm)
    for stretch in _stretches(one, other, low, high):
        if stretch[2] != stretch[3]:
            yield stretch


def _stretches(
    one: Replica, other: Replica, low: int, high: int
) -> Iterator[tuple[int, int, int | None, int | None]]:
    """[low, high) as stretches (begin, end, epoch, epoch of the other), as long as they can be."""
    if low >= high:
        return
    edges = {low, high}
    for replica in (one, other):
        edges.update(e.start_offset for e in replica.facts.epochs if low < e.start_offset < high)
    parts = [
        (begin, end, one.epoch_at(begin), other.epoch_at(begin))
        for begin, end in pairwise(sorted(edges))
    ]
    for epochs, same in groupby(parts, key=lambda part: part[2:]):
        run = list(same)
        yield run[0][0], run[-1][1], *epochs
