"""Stock Java clients under load, every setting at its default, and what they saw of a fault.

Senders with messages of 100 bytes and consumers, of one kind or of several. Times are the wall
clock in ms, the same for the programs and for whoever starts them on this machine.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

from lab.cluster.java import JavaError, JavaProgram

PROGRAM: Final = "StockLoad"
SENDERS: Final = ("sync", "async", "batch", "transaction", "ordered")
CONSUMERS: Final = ("concurrent", "orderly", "lite")
ROLLED_BACK: Final = "rolledback"
POLL_S: Final = 31.0
"""A stock client uses a new master only after this time. A fault of that master before would hit
an address that the client does not use."""
WHOLE_S: Final = 150.0
"""A transaction whose end got lost is asked for after 6 s, then each 30 s."""

Start = Callable[..., JavaProgram]
"""Starts a Java program: its name, its arguments."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one kind of client saw from some moment on: the longest time without an acknowledged
    send, or without a message, and how many sends failed."""

    gap_ms: int
    failed: int = 0


@dataclass(frozen=True, slots=True)
class GivenTotals:
    """What a kind of consumer was given in all: messages more than once, messages of transactions
    that were rolled back, and messages of a key whose first time came after that of a later one."""

    twice: int
    rolled_back: int
    out_of_order: int


class StockLoad:
    """Running senders of one topic, and running consumers of it.

    `senders` maps a kind of SENDERS to its threads.
    """

    def __init__(
        self,
        start: Start,
        stack: ExitStack,
        name_servers: str,
        topic: str,
        *,
        senders: dict[str, int] | None = None,
        consumers: Sequence[str] = ("concurrent",),
    ) -> None:
        threads = senders or {"sync": 4}
        self.senders = tuple(threads)
        self.consumers = tuple(consumers)
        produce = [f"{kind}:{count}" for kind, count in threads.items()]
        self.producer = stack.enter_context(
            start(PROGRAM, name_servers, topic, "produce", *produce)
        )
        self.consumer = stack.enter_context(
            start(PROGRAM, name_servers, topic, "consume", *consumers)
        )

    def go_on(self, count: int = 300) -> None:
        """Waits until each sender had `count` more messages acknowledged than now, and each
        consumer was given as many."""
        for kind in self.senders:
            _wait_for_more(self.producer, f"acks of {kind}", count, partial(_is_acked, kind))
        for kind in self.consumers:
            _wait_for_more(self.consumer, f"messages for {kind}", count, partial(_is_given, kind))

    def wait_for_replica_route(self) -> None:
        """Waits for a further ack of a message that took a replica route, to a broker NAME%N: a
        producer knows such a route by its next poll, up to 30 s later."""
        what = "an ack by a replica route"
        _wait_for_more(self.producer, what, 1, lambda line: "%" in line.get("by", ""))

    def acked(self, kind: str) -> list[dict[str, Any]]:
        """The acknowledged messages of one kind of sender."""
        return _of_kind(self.producer.of("acked"), "acked", kind)

    def failed(self, kind: str = "") -> list[dict[str, Any]]:
        """The failed sends of one kind of sender, or of all."""
        return _of_kind(self.producer.of("failed"), "failed", kind)

    def reasons(self, wall_ms: int) -> Counter[str]:
        """Why sends failed from then on: the kind, and the error without its numbers."""
        failed = [line for line in self.failed() if line["at"] >= wall_ms]
        return Counter(
            f"{line['failed'].partition('-')[0]}: {re.sub(r'[0-9]+', 'N', str(line['why']))[:200]}"
            for line in failed
        )

    def given(self, kind: str) -> list[dict[str, Any]]:
        """What one kind of consumer was given."""
        return [line for line in self.consumer.of("key") if line["by"] == kind]

    def since(self, wall_ms: int) -> dict[str, Seen]:
        """What each kind of sender and consumer saw from then on."""
        seen = {
            kind: Seen(
                _longest_gap_ms(self.acked(kind), wall_ms),
                sum(line["at"] >= wall_ms for line in self.failed(kind)),
            )
            for kind in self.senders
        }
        for kind in self.consumers:
            seen[kind] = Seen(_longest_gap_ms(self.given(kind), wall_ms))
        return seen

    def finish(self) -> dict[str, GivenTotals]:
        """Ends the senders, waits until each consumer has every acknowledged message, and ends all.
        Raises JavaError for a message that never comes."""
        self.producer.send("stop")
        self.producer.wait_for("the last outcomes", lambda: self.producer.of("sent"))
        acked = {line["acked"] for line in self.producer.of("acked")}
        for kind in self.consumers:
            self._wait_for_all(kind, acked)
        self.producer.finish()
        self.consumer.finish()
        return {kind: judged(self.given(kind)) for kind in self.consumers}

    def _wait_for_all(self, kind: str, acked: set[str]) -> None:
        def missing() -> list[str]:
            return sorted(acked - {line["key"] for line in self.given(kind)})

        try:
            self.consumer.wait_for("every acknowledged message", lambda: not missing(), WHOLE_S)
        except JavaError as exc:
            lost = missing()
            raise JavaError(f"{kind} was not given {len(lost)}: {lost[:20]}\n{exc}") from None


def _is_acked(kind: str, line: dict[str, Any]) -> bool:
    return str(line.get("acked", "")).startswith(f"{kind}-")


def _is_given(kind: str, line: dict[str, Any]) -> bool:
    return line.get("by") == kind


def _wait_for_more(program: JavaProgram, what: str, count: int, fits: Callable[..., bool]) -> None:
    """Waits for so many lines that fit, each looked at once."""
    looked, found = len(program.lines), 0

    def enough() -> bool:
        nonlocal looked, found
        new = program.lines[looked:]
        looked += len(new)
        found += sum(map(fits, new))
        return found >= count

    program.wait_for(what, enough)


def _of_kind(lines: list[dict[str, Any]], field: str, kind: str) -> list[dict[str, Any]]:
    prefixes = (f"{kind}-", f"{ROLLED_BACK}-") if kind == "transaction" else (f"{kind}-",)
    return [line for line in lines if not kind or line[field].startswith(prefixes)]


def judged(lines: list[dict[str, Any]]) -> GivenTotals:
    """What one kind of consumer was given, in its order."""
    keys = Counter(line["key"] for line in lines)
    # Counter keeps the order of the first times. ordered-NUMBER-KEY: numbers grow within a key.
    newest: dict[str, int] = {}
    out_of_order = 0
    for key in keys:
        if key.startswith("ordered-"):
            _, number, by = key.split("-")
            out_of_order += int(number) < newest.get(by, -1)
            newest[by] = max(int(number), newest.get(by, -1))
    return GivenTotals(
        twice=sum(count > 1 for count in keys.values()),
        rolled_back=sum(key.startswith(ROLLED_BACK) for key in keys),
        out_of_order=out_of_order,
    )


def _longest_gap_ms(lines: list[dict[str, Any]], wall_ms: int) -> int:
    """Between two that follow each other, the later one at or after `wall_ms`."""
    times = sorted(line["at"] for line in lines)
    return max((after - before for before, after in pairwise(times) if after >= wall_ms), default=0)
