"""Answers to heartbeats: what grants masters their lease (R5).

Only the leader's answers do, and a node that stood still may have been deposed meanwhile without
having heard of it: Raft's own thread slept, too. So after a stall this node answers nobody before
a majority has confirmed its lead; what came meanwhile is answered then. The broker counts its lease
from the time at which it sent the heartbeat, so a late answer grants no more than a quick one.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from baton.controller.v1 import controller_pb2 as pb
from controller.requests import ControllerRequests, monotonic_ms
from controller.sessions import Session

__all__ = ["HeartbeatAnswers"]

log = logging.getLogger(__name__)

STALL_MS: Final = 250
"""Others elect a new leader after 300 ms without this one's heartbeats, sent every 50 ms."""
CONFIRM_TIMEOUT_MS: Final = 300
CONFIRM_AGAIN_MS: Final = 10


class HeartbeatAnswers:
    """`turned(now_ms)` is to be called whenever this loop turns, at least every tick.

    Invariant: between a stall and the first majority asked after it nobody is answered as by a
    leader, whatever the gate says meanwhile: right after a stall it may be shut for want of news,
    then open for a moment by news of before the stall.
    """

    def __init__(
        self, requests: ControllerRequests, clock_ms: Callable[[], int] = monotonic_ms
    ) -> None:
        self._requests = requests
        self._clock_ms = clock_ms
        self._turned_ms: int | None = None
        self._stalls = 0
        self._held: list[tuple[Session, pb.Heartbeat]] = []
        self._confirming: asyncio.Task[None] | None = None

    def turned(self, now_ms: int) -> None:
        """Notices a stall before anything that came during it is answered."""
        last_ms, self._turned_ms = self._turned_ms, now_ms
        stalled = last_ms is not None and now_ms - last_ms >= STALL_MS
        if not stalled:
            return
        self._stalls += 1
        if self._in_office and self._confirming is None:
            log.warning("lead_in_doubt stalled_ms=%d", now_ms - (last_ms or 0))
            self._confirming = asyncio.get_running_loop().create_task(self._confirm())

    def answer(self, session: Session, heartbeat: pb.Heartbeat) -> None:
        if self._confirming is not None:
            self._held.append((session, heartbeat))
        else:
            self._send(session, heartbeat, leading=self._requests.leading)

    async def close(self) -> None:
        if self._confirming is not None:
            self._confirming.cancel()
            await asyncio.gather(self._confirming, return_exceptions=True)

    @property
    def _in_office(self) -> bool:
        """This node was made controller, and has not heard that it is so no longer."""
        return self._requests.controller_epoch > 0

    async def _confirm(self) -> None:
        """Until a majority has confirmed the lead, or this node hears that it is deposed."""
        try:
            while self._in_office:
                stalls = self._stalls
                confirmed = await self._requests.confirm_lead(CONFIRM_TIMEOUT_MS)
                self.turned(self._clock_ms())
                if self._stalls != stalls:
                    continue  # the majority's word may be of before this stall
                self._answer_held(leading=confirmed and self._requests.leading)
                if confirmed:
                    return
                await asyncio.sleep(CONFIRM_AGAIN_MS / 1000)
        finally:
            self._confirming = None
            self._answer_held(leading=False)

    def _answer_held(self, *, leading: bool) -> None:
        held, self._held = self._held, []
        for session, heartbeat in held:
            self._send(session, heartbeat, leading=leading)

    def _send(self, session: Session, heartbeat: pb.Heartbeat, *, leading: bool) -> None:
        requests = self._requests
        leader = requests.leader()
        group = requests.state.group(session.broker_name)
        session.send(
            pb.ControllerMessage(
                answer=pb.HeartbeatAnswer(
                    sequence=heartbeat.sequence,
                    sent_ms=heartbeat.sent_ms,
                    leader=leading,
                    controller_epoch=requests.controller_epoch,
                    leader_id=leader.node_id if leader else "",
                    leader_grpc_address=leader.grpc_address if leader else "",
                    master_epoch=group.master_epoch if group else 0,
                    sync_state_set_epoch=group.sync_state_set_epoch if group else 0,
                )
            )
        )
