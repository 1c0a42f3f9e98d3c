"""History events about what this controller did itself.

Invariant: nothing waits for a note. A task of its own proposes each one a little after the event,
so it is never ahead of an election in the log's queue. If this node does not lead any more the note
is dropped: the history explains, it decides nothing.
"""

import asyncio
import json
import logging
import uuid
from typing import Final

from batonmq.controller.requests import (
    CommandTooLargeError,
    ControllerRequests,
    OutcomeUnknownError,
)
from batonmq.controller.rules.commands import NO_BROKER, NoteEvent
from batonmq.history.event import EventKind
from batonmq.process.clock import wall_ms
from batonmq.protocol.errors import NotLeaderError

log = logging.getLogger(__name__)

DELAY_S: Final = 0.1
ATTEMPTS_MAX: Final = 5
RETRY_S: Final = 0.25


class HistoryNotes:
    """`node` is this controller's id."""

    def __init__(self, requests: ControllerRequests, node: str) -> None:
        self._requests = requests
        self._node = node
        self._tasks: set[asyncio.Task[None]] = set()

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
        """Records an event of NOTED_KINDS with the time of now. Returns at once."""
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
        task = asyncio.get_running_loop().create_task(self._propose(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _propose(self, command: NoteEvent) -> None:
        await asyncio.sleep(DELAY_S)
        for _ in range(ATTEMPTS_MAX):
            try:
                result = await self._requests.submit(command)
            except OutcomeUnknownError:
                await asyncio.sleep(RETRY_S)
                continue
            except (NotLeaderError, CommandTooLargeError) as error:
                log.debug("note_dropped kind=%s why=%s", command.kind, error)
                return
            if not result.ok:
                log.warning("note_refused kind=%s remark=%r", command.kind, result.remark)
            return
