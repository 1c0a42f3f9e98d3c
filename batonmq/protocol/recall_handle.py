"""The handle by which a producer recalls a timed message: URL-safe base64 of `v1 TOPIC BROKER_NAME
TIME UNIQ_KEY`, with TIME one ms after the due time. Pure. Origin: Java
`RecallMessageHandle.HandleV1`."""

import base64
import binascii
from dataclasses import dataclass
from typing import Final

from batonmq.protocol.numbers import natural_number
from batonmq.protocol.properties import TIMER_DEL_UNIQKEY, name_value_problem

VERSION: Final = "v1"
_WORDS: Final = 5


@dataclass(frozen=True, slots=True)
class RecallHandle:
    """`time_ms`: one more than the due time."""

    topic: str
    broker_name: str
    time_ms: int
    unique_key: str

    def encode(self) -> str:
        words = (VERSION, self.topic, self.broker_name, str(self.time_ms), self.unique_key)
        return base64.urlsafe_b64encode(" ".join(words).encode()).decode()


def decode_handle(text: str) -> RecallHandle:
    """Raises ValueError that says what is wrong."""
    try:
        words = base64.b64decode(text.encode(), altchars=b"-_", validate=True).decode().split(" ")
    except (binascii.Error, ValueError):
        raise ValueError("the recall handle is not the one that a send returned") from None
    if words[0] != VERSION or len(words) < _WORDS or natural_number(words[3]) is None:
        raise ValueError("the recall handle is not of version v1")
    problem = name_value_problem(TIMER_DEL_UNIQKEY, words[4])
    if problem is not None:
        raise ValueError(f"the recall handle names no message: {problem}")
    return RecallHandle(words[1], words[2], int(words[3]), words[4])


def recall_key(topic: bytes, unique_key: bytes) -> bytes:
    """The name of a timed message in the property TIMER_DEL_UNIQKEY."""
    return b"%b+%b" % (topic, unique_key)
