"""The open sessions of BatonMQ's brokers on this node, and the messages queued for each.

A push puts a message into the session's queue; the writer of its stream sends it. Nothing here
waits or decides: `core` does. A session that does not read its messages is cut.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1.role_view import role_view_to_pb
from batonmq.protocol.role_view import RoleView

log = logging.getLogger(__name__)

_QUEUE_MAX: Final = 1_000
"""Messages that may wait for one session: some 100 s of heartbeat answers."""


class BrokerSession:
    """One stream of one broker process. `session_id` is unique on this node; newer ones are larger.

    `cut` is set when the stream must end because the broker does not read.
    """

    def __init__(self, session_id: int, broker_name: str, broker_id: int, incarnation: str) -> None:
        self.session_id = session_id
        self.broker_name = broker_name
        self.broker_id = broker_id
        self.incarnation = incarnation
        self.cut = asyncio.Event()
        self._queue: deque[pb.ControllerMessage] = deque()
        self._wake = asyncio.Event()
        self._ended = False

    def send(self, message: pb.ControllerMessage) -> None:
        if self._ended:
            return
        if len(self._queue) >= _QUEUE_MAX:
            log.warning(
                "session_cut broker_name=%s broker_id=%d why='does not read'",
                self.broker_name,
                self.broker_id,
            )
            self._ended = True
            self.cut.set()
            return
        self._queue.append(message)
        self._wake.set()

    def end(self) -> None:
        """Sends what is queued and nothing more."""
        self._ended = True
        self._wake.set()

    async def write_all(self, write: Callable[[pb.ControllerMessage], Awaitable[object]]) -> None:
        """Writes queued messages in order until the session has ended."""
        while True:
            while self._queue:
                await write(self._queue.popleft())
            if self._ended:
                return
            self._wake.clear()
            await self._wake.wait()


class OpenSessions:
    """The open sessions, by broker group."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[int, BrokerSession]] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def add(self, broker_name: str, broker_id: int, incarnation: str) -> BrokerSession:
        session = BrokerSession(self._next_id, broker_name, broker_id, incarnation)
        self._next_id += 1
        self._groups.setdefault(broker_name, {})[session.session_id] = session
        return session

    def remove(self, session: BrokerSession) -> None:
        group = self._groups.get(session.broker_name, {})
        group.pop(session.session_id, None)
        if not group:
            self._groups.pop(session.broker_name, None)

    def of_group(self, broker_name: str) -> Iterable[BrokerSession]:
        return list(self._groups.get(broker_name, {}).values())

    def push_view(self, view: RoleView) -> None:
        """Queues the view in every session of its group; the message is built once."""
        sessions = self.of_group(view.broker_name)
        if sessions:
            message = pb.ControllerMessage(view=role_view_to_pb(view))
            for session in sessions:
                session.send(message)
