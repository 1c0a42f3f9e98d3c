"""A master's statements of queue positions (R38, `queue_positions`), written piece by piece. A
round begins with a new segment, but only after the log has grown by a multiple of the last round:
with tiny segments and many queues, statements must not cause each other. One call puts one piece,
so no loop turn looks at all queues."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.topic_name import METADATA_TOPIC
from batonmq.store.appender import Appender
from batonmq.store.commit_log import CommitLog
from batonmq.store.config import StoreConfig
from batonmq.store.errors import PutRefused
from batonmq.store.queue_positions import POSITIONS_QUEUE, position_record
from batonmq.store.queue_table import QueueTable, StoredQueue

_PIECE_BYTES_MAX: Final = 16 * 1024
_QUEUE_BYTES: Final = 40  # of one entry without the topic's name, at most
_LOOKED_AT_MAX: Final = 1000
_LOG_SHARE: Final = 8  # rounds are at most a ninth of the log
_NEVER: Final = 1 << 63


@dataclass(slots=True)
class _PositionRound:
    """`queues` at the begin of the round; `at`: the first one not yet looked at."""

    since: int
    queues: list[StoredQueue]
    at: int = 0
    size: int = 0


class PositionRounds:
    """`due_at`: the log end from which `put_piece` has something to do."""

    def __init__(
        self,
        config: StoreConfig,
        log: CommitLog,
        queues: QueueTable,
        appender: Appender,
        deleting: Container[str],
    ) -> None:
        """`deleting`: topics whose deletion is in the log and not carried out yet."""
        self._log = log
        self._queues = queues
        self._appender = appender
        self._deleting = deleting
        self._config = config
        self._round: _PositionRound | None = None
        self._is_master = False
        self._master_begin: int | None = 0
        self.due_at = _NEVER

    def begin_mastership(self) -> None:
        """This replica states positions from the log's end on; at once if the newest segment lacks
        a round, which may have been cut with the former master's records."""
        self._is_master = True
        self._round = None
        self._queues.positions.declare_known()
        start = self._segment_start()
        is_stated = start <= self._queues.positions.stated_from
        self.due_at = start + self._log.segment_size if is_stated else 0

    def end_mastership(self) -> None:
        self._is_master = False
        self._round = None
        self.due_at = _NEVER

    def master_begins_at(self, offset: int | None) -> None:
        """Where the followed master's log begins; None: a Java master, which does not say."""
        self._master_begin = offset
        if offset is not None:
            self._queues.positions.group_begins_at(offset)

    @property
    def may_expire_below(self) -> int:
        """No segment that ends above this may expire: the log must keep every position (R38), and a
        slave all that its master has, whatever its own disk (R27)."""
        stated = self._queues.positions.stated_from
        if self._is_master:
            return stated
        segment_size, end = self._log.segment_size, self._log.max_offset
        # Without a round for so long the master writes none: it is a Java broker.
        bound = stated if end - stated <= 3 * segment_size else end
        return bound if self._master_begin is None else min(bound, self._master_begin)

    @property
    def whole_from(self) -> int:
        """From where on this replica has the log and the positions of its group. While it lacks a
        position: behind its log's end, so that it does not join. A log that was started again lacks
        its beginning until a master begins there or later; any other lost only what a master had
        expired."""
        if not self._queues.positions.are_known:
            return self._log.max_offset + 1
        return self._log.min_offset if self._is_master else self._queues.positions.began_at

    @property
    def why_not_whole(self) -> str:
        """What keeps a slave from joining, in words; "" if nothing."""
        if self._is_master:
            return ""
        if not self._queues.positions.are_known:
            return "it waits until the log has stated the next offset of every queue"
        began = self._queues.positions.began_at
        return f"its log was begun at {began}, and its master's begins before that" if began else ""

    def put_if_due(self) -> bool:
        """`put_piece` for a master without other writes."""
        return self._appender.end >= self.due_at and self.put_piece()

    def put_piece(self) -> bool:
        """Puts the next piece; whether anything was put. The caller ends the turn."""
        current = self._round
        if current is None:
            # A copy: a queue that is created meanwhile has its first message in this segment.
            current = self._round = _PositionRound(
                self._segment_start(), list(self._queues.queues.values())
            )
            # Each turn puts a piece until the round is whole.
            self.due_at = 0
        positions, at = self._next_positions(current)
        whole = at == len(current.queues)
        # Nothing to state among a thousand queues; the last piece is put even without any.
        if not positions and not whole:
            current.at = at
            return False
        body = position_record(positions, current.since, whole=whole).encode()
        record = NewMessage(METADATA_TOPIC, POSITIONS_QUEUE, body, b"", 0, None, None, 0, bytes(8))
        try:
            put = self._appender.put_though_full(record)
        except PutRefused:
            return False  # the same piece again next time
        current.at = at
        current.size += put.size
        if whole:
            segment_end = current.since + self._log.segment_size
            self.due_at = max(segment_end, current.since + _LOG_SHARE * current.size)
            self._round = None
        return True

    def _next_positions(self, current: _PositionRound) -> tuple[dict[str, dict[int, int]], int]:
        """Topic -> queue id -> next offset of queues that need it, and the index behind them."""
        positions: dict[str, dict[int, int]] = {}
        at = current.at
        body_max = self._config.max_message_size
        space = min(_PIECE_BYTES_MAX, self._log.segment_size // 4, body_max)
        stop = min(len(current.queues), at + _LOOKED_AT_MAX)
        while at < stop:
            queue = current.queues[at]
            if self._needs_statement(queue, current.since):
                space -= len(queue.topic_bytes) + _QUEUE_BYTES
                if space < 0 and positions:
                    break
                positions.setdefault(queue.topic, {})[queue.queue_id] = queue.next_offset
            at += 1
        return positions, at

    def _needs_statement(self, queue: StoredQueue, since: int) -> bool:
        return (
            queue.next_offset > 0
            and queue.handler is None
            and queue.consume_queue.last_physical_end <= since
            and queue.topic not in self._deleting  # a new topic of that name begins at 0
            and self._queues.get(queue.topic, queue.queue_id) is queue
        )

    def _segment_start(self) -> int:
        end = self._appender.end
        return end - end % self._log.segment_size
