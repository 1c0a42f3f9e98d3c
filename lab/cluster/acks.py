"""What the probe reports of each acknowledged write, and the keys of its writes.

Independent of batonmq.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ack:
    """One acknowledged write. Times of CLOCK_MONOTONIC, which all processes of a machine share.

    `line` numbers the connections; on one connection `number` grows in the order of sending.
    """

    number: int
    line: int
    broker: int
    sent_s: float
    acked_s: float

    def text(self) -> str:
        return f"{self.number} {self.line} {self.broker} {self.sent_s:.6f} {self.acked_s:.6f}\n"

    @classmethod
    def read(cls, text: str) -> Ack:
        number, line, broker, sent, acked = text.split()
        return cls(int(number), int(line), int(broker), float(sent), float(acked))


def key_of(prefix: str, number: int) -> str:
    """The unique key of a write by the probe of that prefix (at most 16 characters)."""
    return f"{padded(prefix)}{number:016X}"


def padded(prefix: str) -> str:
    """A prefix as it is in a key."""
    return f"{prefix:-<16.16}"


def parts_of(key: str) -> tuple[str, int]:
    """(padded prefix, number) of a key that `key_of` made."""
    return key[:16], int(key[16:], 16)
