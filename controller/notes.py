"""What this controller tells the history of its own doing, behind the things that matter.

Invariant: nothing waits for a note. Each is proposed by a task of its own, a little after what it
tells of, so that it never stands before an election in the log's queue. A note that finds no leader
here is dropped: another node decides by now, and the history explains, it decides nothing.
"""

import asyncio
import json
import logging
import uuid
from typing import Final

from controller.commands import NO_BROKER, NoteEvent
from controller.errors import CommandTooLargeError, OutcomeUnknownError
from controller.history import EventKind
from controller.requests import ControllerRequests, wall_ms
from protocol.errors import NotLeaderError

__all__ = ["HistoryNotes"]

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
        """Enters an event of NOTED_KINDS; its time is now. Returns at once."""
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
