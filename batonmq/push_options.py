"""Settings of a push consumer, in groups that belong together."""

from dataclasses import dataclass, field
from pathlib import Path

from batonmq.consume_types import ConsumeFromWhere, MessageModel
from batonmq.offset_store import default_offset_dir
from batonmq.process_queue import FlowLimits

HELD_CHECK_MS = 2_000


@dataclass(frozen=True, slots=True)
class PullOptions:
    """`suspend_ms`: how long a broker may hold an empty pull; `timeout_ms`: when it must answer.

    `held_check_ms`: while pulls are held, how often a name server is asked whether their broker
    is still the master: a master that hangs holds them, too.
    """

    batch: int = 32
    suspend_ms: int = 15_000
    timeout_ms: int = 30_000
    held_check_ms: int = HELD_CHECK_MS
    limits: FlowLimits = field(default_factory=FlowLimits)


@dataclass(frozen=True, slots=True)
class ConsumeOptions:
    """`concurrency`: listener calls at a time; `batch`: messages per call at most.

    `max_reconsume_times`: tries before a broker moves the message to the dead-letter queue.
    `close_wait_ms`: how long `close()` waits for listener calls in progress.
    """

    concurrency: int = 20
    batch: int = 1
    max_reconsume_times: int = 16
    orderly_suspend_ms: int = 1_000
    close_wait_ms: int = 5_000


@dataclass(frozen=True, slots=True)
class PushConsumerOptions:
    """`start_timestamp_ms`: wall clock, for `ConsumeFromWhere.TIMESTAMP`.

    `offset_dir`: where a broadcasting consumer keeps its offsets.
    """

    model: MessageModel = MessageModel.CLUSTERING
    from_where: ConsumeFromWhere = ConsumeFromWhere.LAST
    start_timestamp_ms: int = 0
    rebalance_ms: int = 20_000
    persist_ms: int = 5_000
    offset_dir: Path = field(default_factory=default_offset_dir)
    pull: PullOptions = field(default_factory=PullOptions)
    consume: ConsumeOptions = field(default_factory=ConsumeOptions)
