"""A master's statements of queue positions, written piece by piece (R38).

`queue_positions` says what they are for. A round begins when the log enters a new segment, but not
before the log has grown by a multiple of the last round: where segments are tiny and queues many,
statements must not feed on themselves. One call puts one piece, so no turn of the loop
looks at more than a part of the queues.
"""

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
from batonmq.store.queue_table import Queue, QueueTable

_PIECE_BYTES_MAX: Final = 16 * 1024
_QUEUE_BYTES: Final = 40  # of one entry beside the topic's name, at most
_LOOKED_AT_MAX: Final = 1000
_LOG_SHARE: Final = 8  # the log grows by so much more than a round before the next one
_NEVER: Final = 1 << 63


@dataclass(slots=True)
class _PositionRound:
    """`queues` as they were when it began; `at` is the index of the first not looked at."""

    since: int
    queues: list[Queue]
    at: int = 0
    size: int = 0


class PositionRounds:
    """`due_at` is the end of the log from which on `put_piece` has something to do."""

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
        """From the log's end on this replica states positions: at once if the newest segment
        lacks a round, for it may have been cut off with the master before."""
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
        """Where the log of the followed master begins; None: a Java master, which does not say."""
        self._master_begin = offset
        if offset is not None:
            self._queues.positions.group_begins_at(offset)

    @property
    def may_expire_below(self) -> int:
        """No segment that ends above it may go yet: the log must go on holding all positions, and
        a slave all that its master has, whatever its own disk (R27).

        A slave waits for its master's rounds only while they come: a Java master writes none.
        """
        stated = self._queues.positions.stated_from
        if self._is_master:
            return stated
        segment_size, end = self._log.segment_size, self._log.max_offset
        bound = stated if end - stated <= 3 * segment_size else end
        return bound if self._master_begin is None else min(bound, self._master_begin)

    @property
    def whole_from(self) -> int:
        """From where on this replica has what its group has, log and positions: behind its log's
        end while it does not know where every queue goes on. It must not join a group then.

        What expired here had expired at a master, so a slave may lack it: only where its log began
        anew counts, until a master is known that begins there or later.
        """
        if not self._queues.positions.are_known:
            return self._log.max_offset + 1
        return self._log.min_offset if self._is_master else self._queues.positions.began_at

    @property
    def why_not_whole(self) -> str:
        """What a slave waits for that is no member yet, in words; empty if it waits for nothing."""
        if self._is_master:
            return ""
        if not self._queues.positions.are_known:
            return "it waits until the log has stated where every queue goes on"
        began = self._queues.positions.began_at
        return f"its log was begun at {began}, and its master's begins before that" if began else ""

    def put_if_due(self) -> bool:
        """`put_piece` for a master that has no other writes."""
        return self._appender.end >= self.due_at and self.put_piece()

    def put_piece(self) -> bool:
        """Put the next piece; whether anything was put. The caller ends the turn."""
        current = self._round
        if current is None:
            current = self._round = _PositionRound(
                self._segment_start(), list(self._queues.queues.values())
            )
            self.due_at = 0
        positions, at = self._next_positions(current)
        whole = at == len(current.queues)
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
        room = min(_PIECE_BYTES_MAX, self._log.segment_size // 4, body_max)
        stop = min(len(current.queues), at + _LOOKED_AT_MAX)
        while at < stop:
            queue = current.queues[at]
            if self._needs_statement(queue, current.since):
                room -= len(queue.topic_bytes) + _QUEUE_BYTES
                if room < 0 and positions:
                    break
                positions.setdefault(queue.topic, {})[queue.queue_id] = queue.next_offset
            at += 1
        return positions, at

    def _needs_statement(self, queue: Queue, since: int) -> bool:
        return (
            queue.next_offset > 0
            and queue.handler is None
            and queue.consume_queue.last_physical_end <= since
            and queue.topic not in self._deleting
            and self._queues.get(queue.topic, queue.queue_id) is queue
        )

    def _segment_start(self) -> int:
        end = self._appender.end
        return end - end % self._log.segment_size
