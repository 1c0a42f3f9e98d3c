"""The failover history of a running cluster, as its controllers give it: what each batch holds.

A place in the stream is the key of the last event that was read: (log, Raft index, part). All
controllers apply the same log, so events have the same keys and the same order at each of them, and
what lies between two places never changes, whichever controller leads or answers. One that is
behind gives fewer events. One whose files lack some says so, and the others are asked for these.
Free of Spark.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa
import uvloop

from batonmq.client.admin.admin import Admin
from batonmq.history.event import EventKey, HistoryEvent
from batonmq.history.merge import in_order
from batonmq.history.reader import Page
from batonmq.protocol.codes import LONG_MAX
from batonmq.protocol.errors import BatonError
from batonmq.runtime.clock import boot_ms
from batonmq.spark.live.cluster import ClusterError
from batonmq.spark.live.offsets import DataLossError
from batonmq.spark.live.options import HistoryOptions
from batonmq.spark.read.columns import table_schema
from batonmq.spark.read.history_table import event_rows

T = TypeVar("T")
log = logging.getLogger(__name__)

VERSION: Final = 2
"""Of the form in a checkpoint; version 1 had offsets of a topic."""
# All are asked beside each other, so a hung controller delays their answers by this much.
ANSWER_MS: Final = 2_000
PAUSE_MS: Final = 200
# Spark polls again 10 ms after there was nothing; the controllers get requests this often at most.
IDLE_MS: Final = 500
_EVENTS_A_TASK: Final = 2_000


def to_checkpoint(place: EventKey | None) -> dict[str, Any]:
    """The form in which a checkpoint keeps a place; None is before the first event of all."""
    name, index, part = place or ("", 0, 0)
    return {"version": VERSION, "log": name, "raftIndex": index, "part": part}


def from_checkpoint(raw: Mapping[str, Any]) -> EventKey | None:
    """What `to_checkpoint` made. Raises ValueError for anything else."""
    try:
        place = msgspec.convert(
            (raw["log"], raw["raftIndex"], raw["part"]), tuple[str, int, int], strict=True
        )
        if raw["version"] != VERSION or max(place[1:]) > LONG_MAX or min(place[1:]) < -1:
            raise ValueError(place)
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"the checkpoint's offset {dict(raw)!r} is no place in the history (version {VERSION}):"
            " it belongs to another source or version; begin with a new checkpoint"
        ) from None
    return place if place[0] else None


@dataclass(frozen=True, slots=True)
class HistoryRead:
    """A stream of the history. The driver reads the events and gives them to the tasks, which only
    make rows of them: they are few."""

    options: HistoryOptions

    @property
    def schema(self) -> pa.Schema:
        """The columns of table `history`. Raises ValueError for an unknown one."""
        return table_schema("history", self.options.columns, with_corrupt=False)

    @property
    def most(self) -> int:
        """Events of one batch."""
        return self.options.events_per_trigger_max

    to_checkpoint = staticmethod(to_checkpoint)
    from_checkpoint = staticmethod(from_checkpoint)

    def stream(self) -> HistoryFeed:
        return HistoryFeed(self.options)

    def run(self, events: Sequence[HistoryEvent]) -> Iterator[pa.RecordBatch]:
        """Rows of the events of one task; what names a place in a file is null."""
        yield event_rows(self.schema, events)


class HistoryFeed:
    """The driver's side of a stream; waits for each answer. Methods raise ClusterError if no
    controller answers for `operationTimeout`, and DataLossError."""

    available = None
    """How many are left is not known."""

    def __init__(self, options: HistoryOptions) -> None:
        self._options = options
        self._loop = uvloop.new_event_loop()
        admin = Admin((), client_options=options.access.client_options(), timeout_ms=ANSWER_MS)
        self._controllers = admin.controller(options.controllers)
        self._current = options.controllers[0]
        self._target: dict[str, EventKey] | None = None
        self._idle_until_ms = 0
        self._planned: tuple[EventKey | None, EventKey | None] | None = None
        self._events: Sequence[HistoryEvent] = ()

    def close(self) -> None:
        self._loop.close()

    def initial(self) -> EventKey | None:
        """The place before the oldest event that a controller which answers keeps; None: there is
        no event yet."""
        pages, _ = self._ask_all(
            lambda at: self._controllers.history_page(None, limit=1, address=at)
        )
        events = in_order(event for page in pages.values() for event in page.events)
        # A place is that of an event which was read, and this one is still to come.
        return (events[0].log, events[0].raft_index, events[0].part - 1) if events else None

    def aim(self) -> None:
        """From now on no event is offered that no controller which answers has now."""
        answers, _ = self._ask_all(lambda at: self._controllers.history(limit=1, address=at))
        self._target = {}
        for event in (event for events in answers.values() for event in events):
            self._target[event.log] = max(event.key, self._target.get(event.log, event.key))

    def next_end(self, start: EventKey | None, most: int) -> EventKey | None:
        """Where the batch behind `start` ends, of `most` events; `start` if there is nothing.

        `most` 0 is the trigger `once`, which knows no limit: the option's still holds, since
        the driver holds the events of a batch.
        """
        if self._is_reached(start):
            return start
        most = most or self._options.events_per_trigger_max
        time.sleep(max(0, self._idle_until_ms - boot_ms()) / 1000)
        events = self._next(start, most)
        while events and len(events) < most:
            last = events[-1].key
            page = self._page(self._current, last, most - len(events))
            if page is None or not _continues(page, last):
                break  # the next batch asks all of them
            events += page.events
        events = [event for event in events if not self._is_beyond(event.key)]
        self._idle_until_ms = 0 if events else boot_ms() + IDLE_MS
        if not events:
            return start
        end = events[-1].key
        self._planned, self._events = (start, end), events
        return end

    def between(self, start: EventKey | None, end: EventKey | None) -> Sequence[HistoryEvent]:
        """The events behind `start` up to `end`: the same, in the same order, at each call."""
        if end is None or start == end:
            return ()
        # Mostly Spark reads what it has just planned. A batch that another process planned, before
        # a restart, is fetched again.
        if self._planned == (start, end):
            return self._events
        events: list[HistoryEvent] = []
        deadline_ms = boot_ms() + self._options.operation_timeout_ms
        place = start
        while place != end:
            page = self._next(place, 0)
            if not page:
                if boot_ms() >= deadline_ms:
                    raise ClusterError(
                        f"no controller that answers has event {_event_text(end)} of the"
                        " checkpoint: "
                        f"{', '.join(self._options.controllers)} (tried for "
                        f"{self._options.operation_timeout_ms} ms: option operationTimeout)"
                    )
                time.sleep(PAUSE_MS / 1000)
                continue
            within = [each for each in page if each.log != end[0] or each.key <= end]
            events += within
            place = page[-1].key if len(within) == len(page) else end
        return events

    def tasks(self, start: EventKey | None, end: EventKey | None) -> list[Sequence[HistoryEvent]]:
        """The events of a batch, a piece for each task."""
        events = self.between(start, end)
        pieces = range(0, len(events), _EVENTS_A_TASK)
        return [events[at : at + _EVENTS_A_TASK] for at in pieces]

    def _is_beyond(self, place: EventKey) -> bool:
        return place > (self._target or {}).get(place[0], place)

    def _is_reached(self, place: EventKey | None) -> bool:
        """Whether all that the stream is to end with has been read."""
        if self._target is None:
            return False
        # Without a target there was no event at all.
        return not self._target or (place is not None and self._target.get(place[0]) == place)

    # -- the controllers ------------------------------------------------------------------------

    def _next(self, after: EventKey | None, most: int) -> list[HistoryEvent]:
        """The next events, all of one log; none if there are none yet."""
        # One request, to the one that answered last; all are asked only where that gives nothing.
        page = self._page(self._current, after, most)
        if page is not None and _continues(page, after):
            return page.events
        deadline_ms = boot_ms() + self._options.operation_timeout_ms
        while True:
            pages, silent = self._ask_all(
                lambda at: self._controllers.history_page(after, limit=most, address=at)
            )
            for address, page in pages.items():
                if _continues(page, after):
                    self._current = address
                    return page.events
            found = [page for page in pages.values() if page.events]
            if not found or any(page.follows and not page.events for page in pages.values()):
                return []  # a controller that lacks none up to here has no newer event yet
            if not silent or boot_ms() >= deadline_ms:
                break
            time.sleep(PAUSE_MS / 1000)  # what these lack, the silent ones may have
        assert after is not None
        best = _least_lacking(found, after)
        self._check(best, after)
        return best.events

    def _check(self, page: Page, after: EventKey) -> None:
        """Raises DataLossError for events that no controller keeps, or logs it."""
        first = page.events[0]
        if page.follows:
            log.warning("history_log_changed from=%s to=%s", after[0], first.log)
            return
        lost = (
            f"events of the history behind {_event_text(after)} may be lost: no controller that"
            f" answers keeps any between it and {_event_text(first.key)}"
        )
        if self._options.fail_on_data_loss:
            raise DataLossError(
                f"{lost}; set failOnDataLoss=false to continue with what there is, or begin with a "
                "new checkpoint"
            )
        log.warning("data_lost %s", lost)

    def _page(self, address: str, after: EventKey | None, most: int) -> Page | None:
        """The answer of one controller, None if it gives none."""
        try:
            return self._loop.run_until_complete(
                self._controllers.history_page(after, limit=most, address=address)
            )
        except BatonError:
            return None

    def _ask_all(
        self, request: Callable[[str], Coroutine[Any, Any, T]]
    ) -> tuple[dict[str, T], dict[str, BatonError]]:
        """Address -> answer, and address -> why there is none. Waits until one answers."""

        async def each(at: str) -> T | BatonError:
            try:
                return await request(at)
            except BatonError as error:
                return error

        async def every() -> list[T | BatonError]:
            return await asyncio.gather(*map(each, self._options.controllers))

        deadline_ms = boot_ms() + self._options.operation_timeout_ms
        while True:
            answers = self._loop.run_until_complete(every())
            pairs = list(zip(self._options.controllers, answers, strict=True))
            silent = {at: answer for at, answer in pairs if isinstance(answer, BatonError)}
            given = {at: answer for at, answer in pairs if not isinstance(answer, BatonError)}
            if given:
                return given, silent
            if boot_ms() >= deadline_ms:
                why = "; ".join(f"{at}: {error}" for at, error in silent.items())
                raise ClusterError(
                    f"no controller answers (tried for {self._options.operation_timeout_ms} ms: "
                    f"option operationTimeout): {why}"
                )
            time.sleep(PAUSE_MS / 1000)


def _continues(page: Page, after: EventKey | None) -> bool:
    """Whether its events are for sure the next ones."""
    return bool(page.events) and (
        after is None or (page.follows and page.events[0].log == after[0])
    )


def _least_lacking(pages: Sequence[Page], after: EventKey) -> Page:
    """Of pages that may all leave out some: of the same log if there is one, else one that is
    complete up to `after`; of these the oldest."""
    of_log = [page for page in pages if page.events[0].log == after[0]]
    best = of_log or [page for page in pages if page.follows] or pages
    oldest = in_order(page.events[0] for page in best)[0]
    return next(page for page in best if page.events[0].key == oldest.key)


def _event_text(place: EventKey) -> str:
    return f"(log {place[0]}, Raft index {place[1]}, part {place[2]})"
