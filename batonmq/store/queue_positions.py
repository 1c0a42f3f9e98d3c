"""Where the numbering of queues continues, kept in the log itself (R38).

A queue's next offset follows from its newest message. If that has expired, or a replica's log
begins behind it, the log must say it: the master states positions in records of the metadata topic,
queue 1. A Java replica keeps them as ordinary messages.

A *round* states every queue that has had a message, in pieces. `since` is the start of a segment;
the last piece, `whole`, says that each queue has a message or a statement from there to here. Each
segment begins a round, so a log may begin at any segment; a master lets a segment expire only below
a whole round. A replica whose log begins in the middle, or that rebuilds its queues, may join once
it has dispatched a round that began there or later.

Body: JSON `{"v":1,"positions":{topic:{queueId:nextOffset}},"since":logOffset,"whole":bool}`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar, Final
from zlib import crc32

import msgspec

from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.system_record import SystemRecord
from batonmq.runtime import disk
from batonmq.runtime.durable_file import SnapshotOrder, replace_file

log = logging.getLogger(__name__)

#: The queue of the metadata topic for these records; queue 0 has changes of topics.
POSITIONS_QUEUE: Final = 1


class PositionRecord(SystemRecord, frozen=True, kw_only=True, omit_defaults=True):
    """One piece of a round. `positions`: topic -> queue id -> next offset."""

    KIND: ClassVar = "position"
    v: int  # without a default, so that it is written
    positions: dict[str, dict[int, int]]
    since: int
    whole: bool = False


def position_record(
    positions: dict[str, dict[int, int]], since: int, *, whole: bool
) -> PositionRecord:
    """A piece in today's format."""
    return PositionRecord(v=1, positions=positions, since=since, whole=whole)


def decode_positions(body: bytes) -> PositionRecord | None:
    """A record's body; None, and logged, for a version or shape that this broker cannot read."""
    try:
        return PositionRecord.decode(body)
    except RemoteProtocolError as error:
        log.error("position_record_skipped reason=%s", error)
        return None


class _Stored(msgspec.Struct, kw_only=True, rename="camel"):
    """The file. Offsets are of the log; -1: none."""

    began: int = 0  # see `began_at`
    wanted: int = -1  # a whole round is missing that begins here or later
    stated: int = -1  # where the newest whole round begins, and where its last piece ends
    stated_end: int = -1
    placing_end: int = -1  # the highest end of the records that gave the positions in `placed`
    placed: dict[str, dict[int, int]] = {}


def _decode_file(data: bytes) -> _Stored:
    """Raises ValueError or DecodeError for anything that `writes_due` did not write."""
    crc, _, body = data.rstrip(b"\n").partition(b"\n")
    if crc != b"%08x" % crc32(body):
        raise ValueError("its CRC does not fit")
    return msgspec.json.decode(body, type=_Stored)


class QueuePositions:
    """The positions that this replica knows beside its queue files, in the file `queuePositions`:
    of queues that were given one and had no message since. The file is written before each
    checkpoint, because afterwards the records do not come again."""

    def __init__(self, path: Path) -> None:
        """A damaged file is logged; `was_damaged` then says that the queues must be rebuilt from
        the log."""
        self._path = path
        self._order = SnapshotOrder()
        self._is_stored = True
        self._state = _Stored()
        self.was_damaged = False
        if path.exists():
            try:
                self._state = _decode_file(disk.read_bytes(path))
            except (ValueError, msgspec.DecodeError, OSError) as error:
                disk.check_unreadable(error)
                log.error("queue_positions_damaged file=%s offset=0 reason=%s", path, error)
                self.was_damaged = True

    # What is known.

    @property
    def are_known(self) -> bool:
        """Whether every queue's next offset is known."""
        return self._state.wanted < 0

    @property
    def stated_from(self) -> int:
        """Where the newest dispatched whole round began; 0 if none. A log that begins there or
        earlier holds every position."""
        return max(self._state.stated, 0)

    def stated_below(self, offset: int) -> int:
        """Where to begin to read a log up to `offset` that shows every queue with messages, by one
        of them or by a statement; 0: at the log's beginning."""
        return self.stated_from if self._state.stated_end <= offset else 0

    @property
    def began_at(self) -> int:
        """Where this log was started again (perhaps at its master's last segment), until a master
        begins there or later; else 0."""
        return self._state.began

    @property
    def placed(self) -> dict[str, dict[int, int]]:
        """Topic -> queue id -> position; read only."""
        return self._state.placed

    def writes_due(self) -> list[Callable[[], None]]:
        """The write of what changed since the last call, for any thread; it raises OSError."""
        if self._is_stored:
            return []
        self._is_stored = True
        body = msgspec.json.encode(self._state)
        data = b"%08x\n%b\n" % (crc32(body), body)
        return [self._order.ordered(partial(replace_file, self._path, data))]

    def _store_now(self) -> None:
        self._is_stored = False
        for write in self.writes_due():
            write()

    # What changes it.

    def note_placed(self, topic: str, queue_id: int, position: int, record_end: int) -> None:
        """A record that ends at `record_end` gave an empty queue its position."""
        state = self._state
        state.placed.setdefault(topic, {})[queue_id] = position
        state.placing_end = max(state.placing_end, record_end)
        self._is_stored = False

    def note_round(self, since: int, record_end: int) -> None:
        """A whole round, begun at `since`, was dispatched up to `record_end`."""
        state = self._state
        if since < state.stated:  # dispatched again after a start
            return
        state.stated, state.stated_end = since, record_end
        if 0 <= state.wanted <= since:
            log.info("queue_positions_known since=%d", since)
            state.wanted = -1
        self._is_stored = False

    def forget_topic(self, topic: str) -> None:
        if self._state.placed.pop(topic, None) is not None:
            self._is_stored = False

    def begin_at(self, offset: int) -> None:
        """The log starts again, empty, at `offset`. Durable on return; raises OSError."""
        self._state = _Stored(began=offset, wanted=offset if offset else -1)
        self._store_now()

    def group_begins_at(self, offset: int) -> None:
        """A master's log begins at `offset`: the group no longer has what lies before."""
        if 0 < self._state.began <= offset:
            self._state.began = 0
            self._is_stored = False

    def want_from(self, offset: int) -> None:
        """Queues are rebuilt from a log that begins at `offset`, which must hold all positions.
        Durable on return; raises OSError."""
        state = self._state
        state.stated = state.stated_end = -1
        state.wanted = offset if offset else -1  # a log from 0 on has every message
        if self.was_damaged:
            state.began = offset
        self._store_now()

    def log_ends_at(self, offset: int, log_begin: int) -> bool:
        """The log ends at `offset`, after a cut or a start. Whether positions came from behind it;
        then queues without messages must be forgotten, for their positions may be too high. Durable
        on return; raises OSError."""
        state = self._state
        misplaced = offset < state.placing_end
        if not misplaced and offset >= state.stated_end:
            return False
        if offset < state.stated_end:  # its last piece is cut, so the round is not whole
            state.stated = state.stated_end = -1
        if misplaced:
            state.placed.clear()
            state.placing_end = -1
            state.wanted = log_begin if log_begin else -1
        self._store_now()
        return misplaced

    def declare_known(self) -> None:
        """This replica leads: the group continues, and numbers on, from what is here."""
        self.group_begins_at(self._state.began)
        if not self.are_known:
            log.warning("queue_positions_unknown log_begin=%d", self._state.wanted)
            self._state.wanted = -1
            self._is_stored = False
