"""The header fields of POP. Pure. A popped message has a handle (property POP_CK), which an ack or
a change of the invisible time sends back as `extraInfo`. A POP's answer lists queues and offsets as
`flag queueId ...;...`, from which clients make handles. The flag says which topic is meant. Origin:
Java `ExtraInfoUtil`, `KeyBuilder`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from batonmq.protocol.codes import LONG_MAX
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.topic_name import RETRY_PREFIX, pop_retry_topics

NORMAL: Final = "0"
RETRY_V1: Final = "1"
RETRY_V2: Final = "2"
FLAGS: Final = (NORMAL, RETRY_V1, RETRY_V2)
ORDER_QUEUE: Final = 999  # The reviveQid of messages that are popped in order.
ANY_QUEUE: Final = -1
_FIELDS: Final = 8
_INT_MAX: Final = 2**31 - 1


def real_topic(flag: str, topic: str, group: str) -> str:
    """The topic that `flag` means: the subscribed one, or POP's retry topic. Stock clients name the
    retry topic themselves and leave the flag in the handle."""
    if flag == NORMAL or topic.startswith(RETRY_PREFIX):
        return topic
    v2, v1 = pop_retry_topics(group, topic)
    return v1 if flag == RETRY_V1 else v2


class PopHandle(NamedTuple):
    """One popped message. Times are ms, `pop_time` by the broker's wall clock."""

    start_offset: int
    pop_time: int
    invisible_time: int
    revive_qid: int
    flag: str
    broker_name: str
    queue_id: int
    queue_offset: int

    def encode(self) -> str:
        return " ".join(map(str, self))

    @classmethod
    def decode(cls, text: str) -> PopHandle:
        """Raises RemoteProtocolError that says what is wrong and what is allowed."""
        parts = text.split(" ")
        # Java's proxy appends the commitLogOffset to the handles that it gives its clients.
        numbers = [*parts[:4], *parts[6:]] if len(parts) in (_FIELDS, _FIELDS + 1) else []
        if not numbers or not all(_is_long(part) for part in numbers) or parts[4] not in FLAGS:
            raise RemoteProtocolError(
                f"a handle of a popped message is {text[:128]!r}, allowed is what POP gave:"
                " 'startOffset popTime invisibleTime reviveQid flag(0|1|2) brokerName queueId"
                " queueOffset'"
            )
        start, pop_time, invisible, revive_qid, queue_id, offset = map(int, numbers[:6])
        if revive_qid > _INT_MAX or queue_id > _INT_MAX:
            raise RemoteProtocolError(f"a handle's reviveQid or queueId is too large: {text!r}")
        return cls(start, pop_time, invisible, revive_qid, parts[4], parts[5], queue_id, offset)


def _is_long(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(LONG_MAX))


class PoppedQueue(NamedTuple):
    """The messages of one queue in a POP's answer. `counts`: how often each offset was delivered
    before (orderly)."""

    flag: str
    queue_id: int
    offsets: Sequence[int]
    counts: Sequence[int] = ()


def start_offset_info(queues: Iterable[PoppedQueue]) -> str:
    return ";".join(f"{one.flag} {one.queue_id} {one.offsets[0]}" for one in queues)


def msg_offset_info(queues: Iterable[PoppedQueue]) -> str:
    return ";".join(
        f"{one.flag} {one.queue_id} {','.join(map(str, one.offsets))}" for one in queues
    )


def order_count_info(queues: Iterable[PoppedQueue]) -> str:
    """The counts above 0 by offset, and the least one of each queue."""
    parts = []
    for flag, queue_id, offsets, counts in queues:
        parts += [
            f"{flag} qo{queue_id}%{offset} {count}"
            for offset, count in zip(offsets, counts, strict=True)
            if count
        ]
        parts.append(f"{flag} {queue_id} {min(counts)}")
    return ";".join(parts)


def parse_offset_info(text: str) -> dict[tuple[str, int], list[int]]:
    """(flag, queue id) -> offsets, of either list in a POP's answer. Raises RemoteProtocolError."""
    found: dict[tuple[str, int], list[int]] = {}
    for part in text.split(";") if text else ():
        flag, _, rest = part.partition(" ")
        queue_id, _, offsets = rest.partition(" ")
        if flag not in FLAGS or not all(map(_is_long, (queue_id, *offsets.split(",")))):
            raise RemoteProtocolError(f"offsets of a POP's answer: {part[:128]!r}")
        found[flag, int(queue_id)] = [int(offset) for offset in offsets.split(",")]
    return found
