"""The handle by which a producer recalls a timed message: URL-safe base64 of five words.

`v1 TOPIC BROKER_NAME TIME UNIQ_KEY`, TIME being the ms at which the message is due, plus one. Pure.
Origin: Java `RecallMessageHandle.HandleV1`.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Final

VERSION: Final = "v1"
_WORDS: Final = 5


@dataclass(frozen=True, slots=True)
class RecallHandle:
    """`time_ms` is one more than when the message is due."""

    topic: str
    broker_name: str
    time_ms: int
    unique_key: str

    def encode(self) -> str:
        words = (VERSION, self.topic, self.broker_name, str(self.time_ms), self.unique_key)
        return base64.urlsafe_b64encode(" ".join(words).encode()).decode()


def decode_handle(text: str) -> RecallHandle:
    """Raises ValueError, which says what is wrong, for anything that no broker gave."""
    try:
        words = base64.b64decode(text.encode(), altchars=b"-_", validate=True).decode().split(" ")
    except (binascii.Error, ValueError):
        raise ValueError("the recall handle is not the one that a send returned") from None
    if words[0] != VERSION or len(words) < _WORDS or not words[3].isdecimal():
        raise ValueError("the recall handle is not of version v1")
    return RecallHandle(words[1], words[2], int(words[3]), words[4])


def recall_key(topic: bytes, unique_key: bytes) -> bytes:
    """What names a timed message in the property TIMER_DEL_UNIQKEY."""
    return b"%b+%b" % (topic, unique_key)
