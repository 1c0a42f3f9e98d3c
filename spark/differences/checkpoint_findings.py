"""What checkpoints and epoch lists say before a log is read: which part of it each replica keeps
and confirms, and which bytes their lists give to different epochs. Free of Spark.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations, groupby

from batonmq.spark.differences.log_findings import LogFinding
from batonmq.spark.differences.replica_groups import LogFile, ReplicaGroup, ReplicaStore, log_end
from batonmq.spark.read.selection import HIGH
from batonmq.spark.severity import CRITICAL, INFO, WARNING

_Stretch = tuple[int, int, int | None, int | None]


def checkpoint_findings(
    group: ReplicaGroup, files: Sequence[LogFile], *, unconfirmed: bool = False
) -> Iterator[LogFinding]:
    """What not all replicas hold: kept longer, lag, files that none has; and epochs that differ.

    A broker always keeps its newest file, so a confirmed log without any file is gone.
    `unconfirmed`: also how far logs reach above what is confirmed. Raises OSError.
    """
    if unconfirmed:
        yield from _shorter(group)
    for replica in group.replicas:
        yield from _incomplete(group, replica)
    if not group.confirm:
        yield from _nothing_confirmed(group)
    at = group.first
    for start, end in [*((file.start, file.end) for file in files), (HIGH, HIGH)]:
        stop = min(start, group.confirm)
        if at < stop:
            holders = (r.name for r in group.replicas if r.first <= at < r.confirm)
            what = f"no replica has a file that holds the log from {at} to {stop}"
            yield _span(group, CRITICAL, "missing", what, holders, at, stop, group.epoch_at(at)[0])
        at = max(at, end)
    yield from _epochs(group)


def _span(
    group: ReplicaGroup,
    severity: str,
    kind: str,
    detail: str,
    replicas: Iterable[str],
    begin: int,
    end: int,
    epoch: int | None = None,
) -> LogFinding:
    """A finding about [begin, end) of the log."""
    return LogFinding(
        group.name, severity, kind, detail, tuple(replicas), physical_offset=begin,
        size=end - begin, epoch=epoch,
    )  # fmt: skip


def _incomplete(group: ReplicaGroup, replica: ReplicaStore) -> Iterator[LogFinding]:
    """What one replica lacks at the beginning or at the end of its log."""
    say = partial(_span, group, replicas=(replica.name,))
    confirm, longest = replica.confirm, group.confirm
    if not replica.files and confirm:
        begin = group.first if group.first < confirm else 0
        what = (
            f"{replica.facts.path}/commitlog has no file, and its checkpoint confirms the log up "
            f"to {confirm}"
        )
        epoch = group.epoch_at(begin)[0]
        yield say(CRITICAL, "missing", what, begin=begin, end=confirm, epoch=epoch)
    elif replica.first > group.first and replica.files:
        what = f"{replica.name} keeps the log from {replica.first} on, another one from "
        what += f"{group.first}"
        yield say(INFO, "expired", what, begin=group.first, end=replica.first)
    if confirm < longest:
        what = f"{replica.name} is confirmed up to {confirm}, another one up to {longest}"
        epoch = group.epoch_at(confirm, group.confirming(longest))[0]
        yield say(INFO, "lagging", what, begin=confirm, end=longest, epoch=epoch)


def _shorter(group: ReplicaGroup) -> Iterator[LogFinding]:
    """Replicas whose logs end before another one's, which has more that is not confirmed."""
    longest = max(group.replicas, key=lambda replica: replica.end)
    for each in group.replicas:
        if each.end < longest.end and longest.end > longest.confirm:
            what = (
                f"the log of {each.name} ends at {each.end}, that of {longest.name} at "
                f"{longest.end}, not confirmed from {longest.confirm} on"
            )
            epoch = longest.epoch_at(each.end)
            yield _span(group, INFO, "lagging", what, (each.name,), each.end, longest.end, epoch)


def _nothing_confirmed(group: ReplicaGroup) -> Iterator[LogFinding]:
    """A warning for each log that holds something though no replica confirms anything."""
    for each in group.replicas:
        end = log_end(each.facts, each.files, 0)
        if each.files and end > each.first:
            what = (
                f"no replica confirms anything, so the log of {each.name} up to {end} is not "
                "compared; --unconfirmed compares it"
            )
            yield _span(group, WARNING, "unchecked", what, (each.name,), each.first, end)


def _epochs(group: ReplicaGroup) -> Iterator[LogFinding]:
    """Bytes that both of two replicas keep and confirm, and that their lists give to other epochs.

    Epochs without a byte may be in one list only, and a list may have lost what expired.
    """
    yield from _without_lists(group)
    for one, other in combinations(group.replicas, 2):
        if not one.facts.epochs or not other.facts.epochs:
            continue
        low, high = max(one.first, other.first), min(one.confirm, other.confirm)
        for begin, end, epoch, theirs in _stretches(group, one, other, low, high):
            what = (
                f"the bytes from {begin} to {end} are of {_epoch(epoch)} by {one.name}, of "
                f"{_epoch(theirs)} by {other.name}"
            )
            if epoch != theirs:
                names = (one.name, other.name)
                yield _span(group, CRITICAL, "epochs_differ", what, names, begin, end)
    for replica in group.replicas:
        yield from _passed_over(group, replica)


def _without_lists(group: ReplicaGroup) -> Iterator[LogFinding]:
    """Replicas that confirm bytes and have no epoch list of their own: it was read from its backup,
    cannot be read, or is missing while others have one.
    """
    listed = [replica.name for replica in group.replicas if replica.facts.epochs]
    have = "has one" if len(listed) == 1 else "have one"
    for replica in group.replicas:
        facts = replica.facts
        if facts.epochs_from_backup:
            what = f"{facts.path}/epochFileCheckpoint cannot be read; its backup was"
            yield LogFinding(group.name, WARNING, "epochs_differ", what, (replica.name,))
        if facts.epochs_fault:
            why = f"its epochs cannot be read: {facts.epochs_fault}"
        elif listed and replica.confirm and not facts.epochs:
            why = f"it has no list of epochs; {', '.join(listed)} {have}"
        else:
            continue
        what = f"{facts.path}: {why}"
        yield LogFinding(group.name, WARNING, "epochs_differ", what, (replica.name,))


def _passed_over(group: ReplicaGroup, replica: ReplicaStore) -> Iterator[LogFinding]:
    """Bytes that others confirm and this replica does not, where its list has a later epoch than
    theirs: its next message, or the next resync, would replace them.
    """
    stretches: dict[_Stretch, list[str]] = {}
    for other in group.replicas:
        low, high = max(replica.confirm, other.first), other.confirm
        for stretch in _stretches(group, replica, other, low, high):
            _, _, epoch, theirs = stretch
            if epoch is not None and theirs is not None and theirs < epoch:
                stretches.setdefault(stretch, []).append(other.name)
    for (begin, end, epoch, theirs), names in stretches.items():
        what = (
            f"{replica.name} does not hold the bytes from {begin} to {end}, which "
            f"{', '.join(names)} confirm{'s' * (len(names) == 1)} in {_epoch(theirs)}: it has "
            f"{_epoch(epoch)} there already"
        )
        yield _span(group, CRITICAL, "missing", what, (replica.name,), begin, end, theirs)


def _epoch(epoch: int | None) -> str:
    return "no epoch" if epoch is None else f"epoch {epoch}"


def _stretches(
    group: ReplicaGroup, one: ReplicaStore, other: ReplicaStore, low: int, high: int
) -> Iterator[_Stretch]:
    """[low, high) as stretches (begin, end, epoch, epoch of the other), as long as they can be."""
    spans = ((max(begin, low), min(end, high)) for begin, end in group.stretches())
    parts = ((at, end, one.epoch_at(at), other.epoch_at(at)) for at, end in spans if at < end)
    for epochs, same in groupby(parts, key=lambda part: part[2:]):
        run = list(same)
        yield run[0][0], run[-1][1], *epochs
