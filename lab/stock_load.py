"""Stock Java clients under load, every setting at its default, and what they saw of a fault.

A producer of four threads with messages of 100 bytes, and a push consumer. Times are the wall clock
in ms, the same for the programs and for whoever starts them on this machine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from lab.java import JavaProgram
from lab.processes import ROOT

SOURCES: Final = ROOT / "tests" / "interop" / "java"
PROGRAM: Final = "StockLoad"
THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Seen:
    """The longest times without an acknowledged send and without a message, and the failed sends,
    from some moment on."""

    ack_gap_ms: int
    message_gap_ms: int
    failed: int


class StockLoad:
    """A running producer and a running consumer of one topic."""

    def __init__(self, producer: JavaProgram, consumer: JavaProgram) -> None:
        self.producer, self.consumer = producer, consumer

    @staticmethod
    def arguments(name_servers: str, topic: str, role: str) -> tuple[str, ...]:
        """Of PROGRAM; `role` is produce or consume."""
        return (name_servers, topic, str(THREADS), role)

    def go_on(self, count: int = 300) -> None:
        """Waits until both have seen `count` more messages than now."""
        acks, seen = len(self.producer.of("acked")), len(self.consumer.of("key"))
        self.producer.wait_for("acks", lambda: len(self.producer.of("acked")) >= acks + count)
        self.consumer.wait_for("messages", lambda: len(self.consumer.of("key")) >= seen + count)

    def since(self, wall_ms: int) -> Seen:
        return Seen(
            _longest_gap_ms(self.producer.of("acked"), wall_ms),
            _longest_gap_ms(self.consumer.of("key"), wall_ms),
            sum(line["at"] >= wall_ms for line in self.producer.of("failed")),
        )

    def finish(self) -> int:
        """Ends the producer, waits until the consumer has every acknowledged message, and ends it:
        how many messages it got more than once. Raises JavaError for one that never comes."""
        self.producer.finish()
        acked = {line["acked"] for line in self.producer.of("acked")}
        self.consumer.wait_for(
            "every acknowledged message",
            lambda: acked <= {line["key"] for line in self.consumer.of("key")},
        )
        self.consumer.finish()
        times = Counter(line["key"] for line in self.consumer.of("key"))
        return sum(count > 1 for count in times.values())


def _longest_gap_ms(lines: list[dict[str, int]], wall_ms: int) -> int:
    """Between two that follow each other, the later one at or after `wall_ms`."""
    times = sorted(line["at"] for line in lines)
    return max((after - before for before, after in pairwise(times) if after >= wall_ms), default=0)


def program_folder(folder: Path, role: str) -> Path:
    return folder / f"java-{role}"
