"""The failover history of this node: the events that it applied, in its file, and its own notes.

The history only explains, nothing is decided by it: a full disk must not stop elections.
"""

import asyncio
import json
import logging
import uuid
from pathlib import Path
from typing import Final

from batonmq.controller.raft.log import Commit
from batonmq.controller.requests import (
    CommandTooLargeError,
    ControllerRequests,
    OutcomeUnknownError,
)
from batonmq.controller.rules.commands import NO_BROKER, HistoryAppended, NoteEvent
from batonmq.controller.rules.state import ControllerState
from batonmq.history.event import HISTORY_EVENTS_MAX, EventKey, EventKind, HistoryEvent
from batonmq.history.file import HistoryFile
from batonmq.history.reader import HistoryReader, Page
from batonmq.protocol.errors import NotLeaderError
from batonmq.runtime import disk
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.tasks import Tasks

log = logging.getLogger(__name__)

REPLY_EVENTS_MAX: Final = 20_000
REPLY_SIZE_MAX: Final = 8 << 20
PAGE_EVENTS_MAX: Final = 2_000
PAGE_SIZE_MAX: Final = 1 << 20

DELAY_S: Final = 0.1
"""A note waits so long: in the log's queue it must not be before the election that it is about."""
ATTEMPTS_MAX: Final = 5
RETRY_S: Final = 0.25


class HistoryLog:
    """`path` is the growing file. Before `open` and after `close` nothing is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: HistoryFile | None = None
        self.failure = ""
        """Why the newest events are not in the file."""
        self._reader = HistoryReader(path)
        self._reading = asyncio.Lock()

    def open(self, size_max: int, files: int) -> None:
        """Raises OSError if the start must wait for disk space."""
        try:
            self._file = HistoryFile(self.path, size_max=size_max, files=files)
        except OSError as error:
            if disk.is_short(error):
                raise
            self.failure = f"{disk.described(error)}; then restart this controller"
            log.error("history_not_written reason=%r", self.failure)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            # What follows a failed sync here must happen: the folder's lock is released.
            except OSError as error:
                log.error("history_not_synced reason=%s", error)
        if not self._reading.locked():
            self._reader.close()

    def write(self, commit: Commit) -> None:
        """Appends the events of the commit. After a snapshot or a failed write it appends what the
        file lacks and the state still has, and marks a gap."""
        if self._file is None:
            return
        cut = False
        if commit.command is None or self.failure:
            events = list(commit.state.history)
            cut = len(events) >= HISTORY_EVENTS_MAX  # the state may have dropped older ones
        else:
            events = [
                effect.event for effect in commit.effects if isinstance(effect, HistoryAppended)
            ]
        # Not those of a snapshot: they were logged when they were applied.
        for event in events if commit.command is not None else ():
            if event.broker_name and event.master_epoch:
                log.info(
                    "failover_event failover=%s/%d kind=%s broker_id=%d raft_index=%d",
                    event.broker_name,
                    event.master_epoch,
                    event.kind,
                    event.broker_id,
                    event.raft_index,
                )
        try:
            self._file.append(events, cut=cut)
        except OSError as error:
            self.failure = disk.described(error)
            log.error("history_not_written reason=%r", self.failure)
            return
        self.failure = ""

    async def events(
        self, state: ControllerState, broker_name: str, after_index: int, limit: int
    ) -> list[HistoryEvent]:
        """The newest `limit` events (0: all) after `after_index`, oldest first.

        With an `after_index` above 0 only those in `state`. Else also earlier ones from the files,
        at most REPLY_EVENTS_MAX events and REPLY_SIZE_MAX bytes.
        """
        events = list(state.history)
        # Who names an index has the older ones.
        file = self._file
        if file is not None and after_index <= 0:
            earlier = any(name != state.log_name for name in file.logs)
            if earlier or len(events) >= HISTORY_EVENTS_MAX:
                try:
                    events = await asyncio.to_thread(file.newest, REPLY_EVENTS_MAX, REPLY_SIZE_MAX)
                except OSError as error:
                    log.warning("history_not_read reason=%s", error)
        events = [
            event
            for event in events
            if (after_index <= 0 or event.raft_index > after_index)
            and broker_name in ("", event.broker_name)
        ]
        return events[-limit:] if limit > 0 else events

    async def page(self, state: ControllerState, after: EventKey | None, limit: int) -> Page:
        """The oldest events behind `after` (None: from the beginning), at most `limit` of them.

        From `state` if it goes back that far, else from the files. Raises OSError.
        """
        limit = min(limit, PAGE_EVENTS_MAX) if limit > 0 else PAGE_EVENTS_MAX
        held = state.history
        # With fewer events than the limit the state has dropped none.
        whole = len(held) < HISTORY_EVENTS_MAX
        if after and after[0] == state.log_name and (whole or held[0].key <= after):
            return Page([event for event in held if event.key > after][:limit], True)
        # The reader keeps its place in a file, and is for one caller at a time.
        async with self._reading:
            page = await asyncio.to_thread(self._reader.page, after, limit, PAGE_SIZE_MAX)
            if len(page.events) < limit or self._file is None:
                self._reader.close()  # what follows is read from the state, or in a while
        return page


class HistoryNotes:
    """Records events about what this controller (`node`) did itself. Nothing waits for a note."""

    def __init__(self, requests: ControllerRequests, node: str) -> None:
        self._requests = requests
        self._node = node
        self._tasks = Tasks()

    def note(
        self,
        kind: EventKind,
        broker_name: str,
        *,
        master_epoch: int = 0,
        broker_id: int = NO_BROKER,
        reason: str = "",
        **fields: object,
    ) -> None:
        """Records an event of NOTED_KINDS with the present time. Returns at once."""
        command = NoteEvent(
            request_id=uuid.uuid4().hex,
            broker_name=broker_name,
            kind=kind,
            node=self._node,
            broker_id=broker_id,
            master_epoch=master_epoch,
            time_ms=wall_ms(),
            reason=reason,
            json=json.dumps(fields) if fields else "",
        )
        self._tasks.spawn(self._propose(command))

    async def close(self) -> None:
        await self._tasks.close()

    async def _propose(self, command: NoteEvent) -> None:
        await asyncio.sleep(DELAY_S)
        for _ in range(ATTEMPTS_MAX):
            try:
                result = await self._requests.submit(command)
            except OutcomeUnknownError:
                await asyncio.sleep(RETRY_S)
                continue
            # The next leader does not know what this one saw.
            except (NotLeaderError, CommandTooLargeError) as error:
                log.debug("note_dropped kind=%s reason=%s", command.kind, error)
                return
            if not result.ok:
                log.warning("note_refused kind=%s remark=%r", command.kind, result.remark)
            return
