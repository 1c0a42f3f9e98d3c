"""What a pull came back with, typed."""

from dataclasses import dataclass
from enum import Enum

from protocol.codes import ResponseCode
from protocol.message import MessageExt


class PullStatus(Enum):
    FOUND = ResponseCode.SUCCESS
    NO_NEW_MSG = ResponseCode.PULL_NOT_FOUND
    NO_MATCHED_MSG = ResponseCode.PULL_RETRY_IMMEDIATELY
    OFFSET_ILLEGAL = ResponseCode.PULL_OFFSET_MOVED


STATUS_BY_CODE: dict[int, PullStatus] = {int(status.value): status for status in PullStatus}


@dataclass(frozen=True, slots=True)
class PullResult:
    """`next_begin_offset` is where the next pull goes on, whatever was found or filtered out.

    The queue holds [`min_offset`, `max_offset`). `messages` are decompressed and filtered by tag.
    With OFFSET_ILLEGAL the asked offset is outside the queue; go on at `next_begin_offset`.
    """

    status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    messages: tuple[MessageExt, ...] = ()
    suggest_broker_id: int = 0
