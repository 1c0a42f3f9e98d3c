"""Answers to heartbeats, which grant masters their lease (R5).

Only the leader's answers do. A node that stood still may have been deposed in the meantime without
knowing it, since Raft's thread stood still, too. So after a stall this node answers nobody until a
majority has confirmed its lead; heartbeats that arrived in between are answered then. The broker
counts its lease from the time at which it sent the heartbeat, so a late answer grants no longer
lease than a quick one.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from batonmq.controller.liveness.streams import BrokerSession
from batonmq.controller.requests import ControllerRequests
from batonmq.process.clock import boot_ms
from batonmq.proto.controller.v1 import controller_pb2 as pb

log = logging.getLogger(__name__)

STALL_MS: Final = 200
"""Others elect a new leader after 300 ms without this one's heartbeats, sent every 90 ms."""
CONFIRM_TIMEOUT_MS: Final = 300
CONFIRM_AGAIN_MS: Final = 10


class HeartbeatAnswers:
    """`note_loop_turn(now_ms)` must be called whenever this loop turns, at least every tick.

    Invariant: between a stall and the first majority asked after it no answer is a leader's,
    whatever the gate says: right after a stall it may be closed because no messages were read yet,
    then open for a moment because of messages from before the stall.
    """

    def __init__(self, requests: ControllerRequests, clock_ms: Callable[[], int] = boot_ms) -> None:
        self._requests = requests
        self._clock_ms = clock_ms
        self._last_turn_ms: int | None = None
        self._stalls = 0
        self._held: list[tuple[BrokerSession, pb.Heartbeat]] = []
        self._confirming: asyncio.Task[None] | None = None

    def note_loop_turn(self, now_ms: int) -> None:
        """Detects a stall before anything that arrived during it is answered."""
        last_ms, self._last_turn_ms = self._last_turn_ms, now_ms
        stalled = last_ms is not None and now_ms - last_ms >= STALL_MS
        if not stalled:
            return
        self._stalls += 1
        if self._is_controller and self._confirming is None:
            log.warning("lead_in_doubt stalled_ms=%d", now_ms - (last_ms or 0))
            self._confirming = asyncio.get_running_loop().create_task(self._confirm())

    def answer(self, session: BrokerSession, heartbeat: pb.Heartbeat) -> None:
        if self._confirming is not None:
            self._held.append((session, heartbeat))
        else:
            self._send(session, heartbeat, leading=self._requests.leading)

    async def close(self) -> None:
        if self._confirming is not None:
            self._confirming.cancel()
            await asyncio.gather(self._confirming, return_exceptions=True)

    @property
    def _is_controller(self) -> bool:
        """This node became controller, and does not know of a later one."""
        return self._requests.controller_epoch > 0

    async def _confirm(self) -> None:
        """Runs until a majority has confirmed the lead, or this node learns that it is deposed."""
        try:
            while self._is_controller:
                stalls = self._stalls
                confirmed = await self._requests.confirm_lead(CONFIRM_TIMEOUT_MS)
                self.note_loop_turn(self._clock_ms())
                if self._stalls != stalls:
                    continue  # the majority may have answered before this stall
                self._answer_held(leading=confirmed)
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

    def _send(self, session: BrokerSession, heartbeat: pb.Heartbeat, *, leading: bool) -> None:
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
