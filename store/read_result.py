"""What a read of a queue returns (Java: `GetMessageResult`, `GetMessageStatus`)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class GetMessageStatus(enum.Enum):
    """How the offset asked for lies to what is there."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


@dataclass(slots=True)
class GetMessageResult:
    """Queue offsets are of [min_offset, max_offset); `parts` joined are whole records in order.

    The parts are views of the log: send them, do not keep them.
    """

    status: GetMessageStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    parts: list[memoryview] = field(default_factory=list)
    message_count: int = 0
    size: int = 0
    suggest_pulling_from_slave: bool = False
