"""The shell around `LivenessCore`: passes events in and carries out the effects.

Events come from the endpoints, the gate and the log; each is passed in within the loop turn in
which it happens, so that a master's death becomes an election without waiting for a timer. The only
timer here is the tick, for silences and for what was lost. Elections run as tasks of their own.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from batonmq.controller.liveness.core import LivenessCore
from batonmq.controller.liveness.events import (
    AliveChanged,
    ElectionBlocked,
    ElectionEnded,
    LivenessEvent,
    ProposeElect,
    RefuseSession,
    SessionClosed,
    SessionHeartbeat,
    SessionHello,
    Tick,
)
from batonmq.controller.liveness.heartbeat_answers import HeartbeatAnswers
from batonmq.controller.liveness.streams import BrokerSession
from batonmq.controller.notes import HistoryNotes
from batonmq.controller.requests import ControllerRequests, OutcomeUnknownError
from batonmq.controller.rules.commands import ElectMaster, LiveBroker
from batonmq.history.event import EventKind
from batonmq.process.clock import boot_ms, wall_ms
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.protocol.errors import NotLeaderError

log = logging.getLogger(__name__)

PLANNED_GOODBYES: Final = ("goodbye", "planned stop")
"""The reasons of a planned stop; any other one is shown in the history."""
FOLLOWER_TICKS: Final = 2
"""A node that decides nothing ticks less often."""


class BrokerWatch:
    """`push(broker_name)` sends the group's view to its sessions on this node.

    `ticked()` is called at every tick.
    """

    def __init__(
        self,
        core: LivenessCore,
        requests: ControllerRequests,
        notes: HistoryNotes,
        *,
        tick_ms: int,
        push: Callable[[str], None],
        ticked: Callable[[], None],
    ) -> None:
        self._core = core
        self._requests = requests
        self._tick_ms = tick_ms
        self._notes = notes
        self._push = push
        self._after_tick = ticked
        self._answers = HeartbeatAnswers(requests)
        self._timer: asyncio.TimerHandle | None = None
        self._elections: set[asyncio.Task[None]] = set()
        self._refusals: dict[int, str] = {}

    def start(self) -> None:
        self._schedule_tick()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for election in list(self._elections):
            election.cancel()
        await asyncio.gather(*self._elections, return_exceptions=True)
        await self._answers.close()

    # Events.

    def session_opened(self, session: BrokerSession) -> str:
        """Why the session is refused (R18), empty if it is accepted."""
        self.handle(
            SessionHello(
                session.broker_name, session.broker_id, session.incarnation, session.session_id
            )
        )
        refusal = self._refusals.pop(session.session_id, "")
        if not refusal:
            log.info(
                "session_opened broker_name=%s broker_id=%d incarnation=%s",
                session.broker_name,
                session.broker_id,
                session.incarnation,
            )
            self._push(session.broker_name)
        return refusal

    def session_heartbeat(self, session: BrokerSession, heartbeat: pb.Heartbeat) -> None:
        """Answers at once: the broker counts its lease from the time it sent this."""
        self._answers.note_loop_turn(boot_ms())
        self._answers.answer(session, heartbeat)
        self.handle(
            SessionHeartbeat(
                session.broker_name,
                session.session_id,
                LiveBroker(
                    broker_id=session.broker_id,
                    epoch=heartbeat.epoch,
                    max_offset=heartbeat.max_offset,
                    confirm_offset=heartbeat.confirm_offset,
                    election_priority=heartbeat.election_priority,
                    min_offset=heartbeat.min_offset,
                    master_epoch=heartbeat.master_epoch,
                    sync_state_set_epoch=heartbeat.sync_state_set_epoch,
                ),
                heartbeat.sequence,
                heartbeat.answered,
            )
        )

    def session_closed(self, session: BrokerSession, goodbye: str | None) -> None:
        """`goodbye` is the reason of an announced end, None if the stream just ended."""
        log.info(
            "session_closed broker_name=%s broker_id=%d goodbye=%r",
            session.broker_name,
            session.broker_id,
            goodbye,
        )
        self.handle(
            SessionClosed(
                session.broker_name,
                session.broker_id,
                session.session_id,
                goodbye=goodbye is not None,
                why=goodbye if goodbye and goodbye not in PLANNED_GOODBYES else "",
            )
        )

    def handle(self, event: LivenessEvent) -> None:
        """Passes the event in and carries out the effects."""
        for effect in self._core.handle(event, boot_ms()):
            match effect:
                case ProposeElect():
                    self._elect(effect)
                case AliveChanged(broker_name):
                    self._push(broker_name)
                case RefuseSession(session_id, _, remark):
                    self._refusals[session_id] = remark
                case ElectionBlocked(broker_name, reason, operator):
                    self._blocked(broker_name, reason, operator)

    # Effects.

    def _blocked(self, broker_name: str, reason: str, operator: bool) -> None:
        level = logging.ERROR if operator else logging.WARNING
        log.log(level, "election_blocked broker_name=%s reason=%r", broker_name, reason)
        group = self._requests.state.group(broker_name)
        self._notes.note(
            EventKind.ELECTION_BLOCKED,
            broker_name,
            master_epoch=group.master_epoch if group else 0,
            reason=reason,
            operator=operator,
        )

    def _elect(self, effect: ProposeElect) -> None:
        log.info(
            "election_proposed broker_name=%s master_epoch=%d reason=%s",
            effect.broker_name,
            effect.expected_master_epoch,
            effect.reason,
        )
        task = asyncio.get_running_loop().create_task(self._run_election(effect))
        self._elections.add(task)
        task.add_done_callback(self._elections.discard)

    async def _run_election(self, effect: ProposeElect) -> None:
        command = ElectMaster(
            broker_name=effect.broker_name,
            expected_master_epoch=effect.expected_master_epoch,
            reason=effect.reason,
            detected_ms=wall_ms() - (boot_ms() - effect.detected_ms),
            silent_ms=effect.silent_ms,
        )
        try:
            result = await self._requests.submit(command)
            log.info(
                "election_ended broker_name=%s code=%d remark=%r",
                effect.broker_name,
                result.code,
                result.remark,
            )
        except (NotLeaderError, OutcomeUnknownError) as error:
            log.warning("election_ended broker_name=%s error=%s", effect.broker_name, error)
        self.handle(ElectionEnded(effect.broker_name, effect.expected_master_epoch))

    def _schedule_tick(self) -> None:
        ticks = 1 if self._requests.leading else FOLLOWER_TICKS
        self._timer = asyncio.get_running_loop().call_later(
            ticks * self._tick_ms / 1000, self._ticked
        )

    def _ticked(self) -> None:
        self._schedule_tick()
        self._answers.note_loop_turn(boot_ms())
        self._after_tick()
        self.handle(Tick())
