"""Epoch lists of replicas against each other: which bytes they count to different epochs."""

from collections.abc import Iterator
from itertools import combinations, pairwise

from spark.audit.findings import CRITICAL, WARNING, Finding
from spark.audit.replicas import Group, Replica


def compare_epochs(group: Group) -> list[Finding]:
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
    return found


def _epoch(epoch: int | None) -> str:
    return "no epoch" if epoch is None else f"epoch {epoch}"


def _differences(one: Replica, other: Replica) -> Iterator[tuple[int, int, int | None, int | None]]:
    """(begin, end, epoch, epoch of the other) of stretches that both keep and confirm."""
    if not one.facts.epochs or not other.facts.epochs:
        return
    low, high = max(one.first, other.first), min(one.confirm, other.confirm)
    edges = {low, high}
    for replica in (one, other):
        edges.update(e.start_offset for e in replica.facts.epochs if low < e.start_offset < high)
    held: tuple[int, int, int | None, int | None] | None = None
    for begin, end in pairwise(sorted(edges)):
        epochs = one.epoch_at(begin), other.epoch_at(begin)
        if held is not None and (held[1], held[2:]) == (begin, epochs):
            held = (held[0], end, *epochs)
            continue
        if held is not None:
            yield held
        held = (begin, end, *epochs) if epochs[0] != epochs[1] else None
    if held is not None:
        yield held


__all__ = ["compare_epochs"]
