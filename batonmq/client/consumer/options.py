"""Options of consumers."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from batonmq.client.arguments import CheckedOptions
from batonmq.client.consumer.process_queue import FlowLimits
from batonmq.protocol import bodies


class ConsumeFromWhere(StrEnum):
    """Where a group starts on a queue that it has no offset for.

    LAST: at the end. As in Java, a broker whose queue still starts at 0 in memory answers 0, so a
    new group reads a young topic from its beginning. FIRST: at the oldest message kept.
    TIMESTAMP: at the first message stored at or after the given time."""

    LAST = bodies.FROM_LAST_OFFSET
    FIRST = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class MessageModel(StrEnum):
    """CLUSTERING: the group's members share the queues, offsets are kept by the brokers.
    BROADCASTING: each member reads every queue, offsets are kept in a local file."""

    CLUSTERING = bodies.CLUSTERING
    BROADCASTING = bodies.BROADCASTING


class ConsumeType(StrEnum):
    ACTIVELY = bodies.CONSUME_ACTIVELY
    PASSIVELY = bodies.CONSUME_PASSIVELY
    POP = bodies.CONSUME_POP


HELD_CHECK_MS = 2_000


@dataclass(frozen=True, slots=True)
class PullOptions(CheckedOptions):
    """`suspend_ms`: how long a broker may hold an empty pull; `timeout_ms`: when it must answer.
    `held_check_ms`: how often a name server is asked whether the broker that holds a pull is still
    the master, since a hung master looks the same."""

    batch: int = 32
    suspend_ms: int = 15_000
    timeout_ms: int = 30_000
    held_check_ms: int = HELD_CHECK_MS
    limits: FlowLimits = field(default_factory=FlowLimits)


@dataclass(frozen=True, slots=True)
class ConsumeOptions(CheckedOptions):
    """`concurrency`: listener calls at a time; `batch`: the most messages per call.
    `max_reconsume_times`: after so many retries a message becomes a dead letter. `close_wait_ms`:
    how long `close()` waits for listener calls in progress."""

    concurrency: int = 20
    batch: int = 1
    max_reconsume_times: int = 16
    orderly_suspend_ms: int = 1_000
    close_wait_ms: int = 5_000
    MAY_BE_ZERO: ClassVar = ("max_reconsume_times", "orderly_suspend_ms", "close_wait_ms")


def default_offset_dir() -> Path:
    try:
        home = Path.home()
    except RuntimeError:  # a container's user may have neither HOME nor an entry in passwd
        home = Path()
    return home / ".batonmq" / "offsets"


@dataclass(frozen=True, slots=True)
class PushConsumerOptions(CheckedOptions):
    """`start_timestamp_ms`: wall clock, for `ConsumeFromWhere.TIMESTAMP`.

    `offset_dir`: where a broadcasting consumer keeps its offsets."""

    model: MessageModel = MessageModel.CLUSTERING
    from_where: ConsumeFromWhere = ConsumeFromWhere.LAST
    start_timestamp_ms: int = 0
    rebalance_ms: int = 20_000
    persist_ms: int = 5_000
    offset_dir: Path = field(default_factory=default_offset_dir)
    pull: PullOptions = field(default_factory=PullOptions)
    consume: ConsumeOptions = field(default_factory=ConsumeOptions)
    MAY_BE_ZERO: ClassVar = ("start_timestamp_ms",)
