"""The shell around `LivenessCore`: tells it what happens, and does what it decides.

Events come from the doors, the gate and the log; each is handed over in the turn in which it
happens, so that a master's death becomes an election without waiting for any timer. The one timer
here is the tick, for silences and for what was lost. Elections run as tasks of their own.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Final

from baton.controller.v1 import controller_pb2 as pb
from controller.commands import ElectMaster
from controller.errors import OutcomeUnknownError
from controller.heartbeat_answers import HeartbeatAnswers
from controller.history import EventKind
from controller.liveness import LivenessCore
from controller.liveness_events import (
    AliveChanged,
    ElectionBlocked,
    ElectionEnded,
    GateClosed,
    GateOpened,
    HeartbeatFacts,
    LivenessEvent,
    ProposeElect,
    RefuseSession,
    RemotingChannelClosed,
    RemotingHeartbeat,
    SessionClosed,
    SessionHeartbeat,
    SessionHello,
    StateApplied,
    Tick,
)
from controller.notes import HistoryNotes
from controller.remoting_door import BrokerHeartbeat
from controller.requests import ControllerRequests, monotonic_ms, wall_ms
from controller.sessions import Session, SessionBook
from controller.state import ControllerState
from protocol.errors import NotLeaderError
from remoting.connection import Connection

__all__ = ["BrokerWatch"]

log = logging.getLogger(__name__)

PLANNED_GOODBYES: Final = ("goodbye", "planned stop")
"""What a broker says that just stops; anything else is why it must."""
FOLLOWER_TICKS: Final = 2
"""A node that decides nothing looks less often."""


class BrokerWatch:
    """`push(broker_name)` sends the group's view to its sessions on this node.

    `ticked()` is called with every look at the deadlines.
    """

    def __init__(
        self,
        core: LivenessCore,
        requests: ControllerRequests,
        sessions: SessionBook,
        notes: HistoryNotes,
        *,
        tick_ms: int,
        push: Callable[[str], None],
        ticked: Callable[[], None],
    ) -> None:
        self._core = core
        self._requests = requests
        self._sessions = sessions
        self._tick_ms = tick_ms
        self._notes = notes
        self._push = push
        self._after_tick = ticked
        self._answers = HeartbeatAnswers(requests)
        self._timer: asyncio.TimerHandle | None = None
        self._elections: set[asyncio.Task[None]] = set()
        self._refusals: dict[int, str] = {}
        self._channel_ids = itertools.count(1)

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

    # What happens.

    def gate_changed(self, is_open: bool) -> None:
        self._tell(GateOpened() if is_open else GateClosed())

    def state_applied(self, state: ControllerState) -> None:
        self._tell(StateApplied(state))

    def session_opened(self, session: Session, hello: pb.Hello) -> str:
        """Empty if the session is welcome, else why it is refused."""
        self._tell(
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

    def session_heartbeat(self, session: Session, heartbeat: pb.Heartbeat) -> None:
        """Answers at once: the broker counts its lease from the time it sent this."""
        self._answers.turned(monotonic_ms())
        self._answers.answer(session, heartbeat)
        self._tell(
            SessionHeartbeat(
                session.broker_name,
                session.broker_id,
                session.session_id,
                HeartbeatFacts(
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

    def session_closed(self, session: Session, goodbye: str | None) -> None:
        log.info(
            "session_closed broker_name=%s broker_id=%d goodbye=%r",
            session.broker_name,
            session.broker_id,
            goodbye,
        )
        self._tell(
            SessionClosed(
                session.broker_name,
                session.broker_id,
                session.session_id,
                goodbye=goodbye is not None,
                why=goodbye if goodbye and goodbye not in PLANNED_GOODBYES else "",
            )
        )

    def remoting_heartbeat(self, connection: Connection, heartbeat: BrokerHeartbeat) -> None:
        channel_id = connection.attachments.setdefault("channel_id", next(self._channel_ids))
        assert isinstance(channel_id, int)
        self._tell(
            RemotingHeartbeat(
                heartbeat.broker_name,
                heartbeat.broker_id,
                channel_id,
                heartbeat.timeout_ms,
                HeartbeatFacts(
                    epoch=heartbeat.epoch,
                    max_offset=heartbeat.max_offset,
                    confirm_offset=heartbeat.confirm_offset,
                    election_priority=heartbeat.election_priority,
                ),
            )
        )

    def remoting_disconnected(self, connection: Connection) -> None:
        channel_id = connection.attachments.get("channel_id")
        if isinstance(channel_id, int):
            self._tell(RemotingChannelClosed(channel_id))

    # What is decided.

    def _tell(self, event: LivenessEvent) -> None:
        for effect in self._core.handle(event, monotonic_ms()):
            match effect:
                case ProposeElect():
                    self._elect(effect)
                case AliveChanged(broker_name):
                    self._push(broker_name)
                case RefuseSession(session_id, _, remark):
                    self._refusals[session_id] = remark
                case ElectionBlocked(broker_name, reason, operator):
                    self._blocked(broker_name, reason, operator)

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
            detected_ms=wall_ms() - (monotonic_ms() - effect.detected_ms),
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
        self._tell(ElectionEnded(effect.broker_name, effect.expected_master_epoch))

    def _schedule_tick(self) -> None:
        ticks = 1 if self._requests.leading else FOLLOWER_TICKS
        self._timer = asyncio.get_running_loop().call_later(
            ticks * self._tick_ms / 1000, self._ticked
        )

    def _ticked(self) -> None:
        self._schedule_tick()
        self._answers.turned(monotonic_ms())
        self._after_tick()
        self._tell(Tick())
