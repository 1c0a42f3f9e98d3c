"""What must hold of acknowledged writes after any fault. Pure.

The log of the final master decides: it holds every acknowledged key, in the order of the
acknowledgements, and one broker sent all acks of an epoch's bytes. Independent of batonmq.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lab.cluster.acks import Ack


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of a log: bytes [start, end)."""

    number: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A broken promise. `rule` is short (`lost`, `order`, `two masters`, `late ack`, …)."""

    rule: str
    text: str


def check_lost(acks: Iterable[Ack], stored: Mapping[int, int]) -> list[BrokenPromise]:
    """`stored`: number of a write -> physical offset. An acked write that is not there is lost."""
    return [
        BrokenPromise("lost", f"acknowledged, not stored: {a}")
        for a in acks
        if a.number not in stored
    ]


def check_order(acks: Sequence[Ack], stored: Mapping[int, int]) -> list[BrokenPromise]:
    """Two orders that the log must keep.

    Of one connection: as sent. Of all: a write that was acknowledged before another was sent
    stands before it.
    """
    found: list[BrokenPromise] = []
    in_log = sorted((a for a in acks if a.number in stored), key=lambda a: stored[a.number])
    last_of_line: dict[int, Ack] = {}
    latest: Ack | None = None
    for ack in in_log:
        before = last_of_line.get(ack.line)
        if before is not None and before.number > ack.number:
            found.append(
                BrokenPromise("order", f"sent on one connection, stored reversed: {ack} {before}")
            )
        last_of_line[ack.line] = ack
        if latest is not None and ack.acked_s < latest.sent_s:
            found.append(
                BrokenPromise("order", f"{ack} was acked before {latest} was sent, stored after")
            )
        if latest is None or ack.sent_s > latest.sent_s:
            latest = ack
    return found


def epoch_at(epochs: Sequence[Epoch], offset: int) -> int:
    """The epoch of a byte; 0 if no epoch begins at or before it."""
    position = bisect_right([epoch.start for epoch in epochs], offset)
    return epochs[position - 1].number if position else 0


def ackers(
    acks: Iterable[Ack], stored: Mapping[int, int], epochs: Sequence[Epoch]
) -> dict[int, set[int]]:
    """Which brokers acknowledged bytes of which epoch (G2)."""
    found: dict[int, set[int]] = {}
    for ack in acks:
        if ack.number in stored:
            found.setdefault(epoch_at(epochs, stored[ack.number]), set()).add(ack.broker)
    return found


def check_masters(
    acked_by: Mapping[int, set[int]], winners: Mapping[int, set[int]]
) -> list[BrokenPromise]:
    """At most one broker acknowledged in an epoch, and it is the one that was elected for it.

    `winners`: epoch -> the brokers elected for it, by the controllers' history.
    """
    found: list[BrokenPromise] = []
    for epoch, brokers in sorted(acked_by.items()):
        if len(brokers) > 1:
            found.append(
                BrokenPromise("two masters", f"epoch {epoch} was acknowledged by {brokers}")
            )
        elected = winners.get(epoch)
        if elected is not None and not brokers <= elected:
            found.append(
                BrokenPromise(
                    "two masters", f"epoch {epoch}: {elected} elected, {brokers} acknowledged"
                )
            )
    for epoch, elected in sorted(winners.items()):
        if len(elected) > 1:
            found.append(
                BrokenPromise("two masters", f"epoch {epoch} has several winners: {elected}")
            )
    return found


def check_late(
    acks: Iterable[Ack],
    stored: Mapping[int, int],
    epochs: Sequence[Epoch],
    *,
    broker: int,
    sent_after_s: float,
    acked_after_s: float,
    epoch: int,
) -> list[BrokenPromise]:
    """A deposed master acknowledges nothing of its old epoch (or older) after `acked_after_s`.

    Only writes sent after `sent_after_s` count: an ack of a write that every member of the set held
    before that may arrive late, and is true.
    """
    return [
        BrokenPromise(
            "late ack", f"epoch {epoch_at(epochs, stored.get(a.number, -1))} after it was over: {a}"
        )
        for a in acks
        if a.broker == broker
        and a.sent_s > sent_after_s
        and a.acked_s > acked_after_s
        and epoch_at(epochs, stored.get(a.number, -1)) <= epoch
    ]
