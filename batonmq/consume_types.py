"""The vocabulary between a consumer and its listener."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from protocol.message import MessageExt, MessageQueue


class ConsumeStatus(Enum):
    """What a listener says about the messages it was given; returning None means `SUCCESS`.

    An exception out of the listener counts as `RECONSUME_LATER`.
    """

    SUCCESS = "SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"


class ConsumeFromWhere(StrEnum):
    """Where a group starts on a queue that it has no offset for.

    LAST: at the end. As in Java, a broker whose queue still starts at 0 in memory answers 0, so a
    new group reads a young topic from its beginning. FIRST: at the oldest message kept.
    TIMESTAMP: at the first message stored at or after the given time.
    """

    LAST = "CONSUME_FROM_LAST_OFFSET"
    FIRST = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class MessageModel(StrEnum):
    """CLUSTERING: the group's members share the queues, offsets are kept by the brokers.
    BROADCASTING: each member reads every queue, offsets are kept in a local file."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class ConsumeType(StrEnum):
    ACTIVELY = "CONSUME_ACTIVELY"
    PASSIVELY = "CONSUME_PASSIVELY"


@dataclass(slots=True)
class ConsumeContext:
    """Handed to the listener with each call; it may set the fields before it returns.

    `delay_level`: after RECONSUME_LATER, 0 lets the broker choose by the number of tries, 1..18
    asks for that level, -1 sends straight to the dead-letter queue.
    `ack_index`: index of the last message of the batch that is done (concurrent listeners only);
    None means all on SUCCESS.
    """

    queue: MessageQueue
    delay_level: int = 0
    ack_index: int | None = None


ListenerReply = ConsumeStatus | None
Listener = Callable[
    [Sequence[MessageExt], ConsumeContext], ListenerReply | Awaitable[ListenerReply]
]
"""`listener(messages, context)`: a coroutine function runs on the loop, a plain one in a thread."""
