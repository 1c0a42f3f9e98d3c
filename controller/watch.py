"""The shell around `LivenessCore`: passes events in and carries out the effects.

Each event is passed in within the loop turn in which it happens, so a master's death starts an
election without waiting for a timer. The only timer is the tick, which finds silence and lost
triggers.

`SessionTable` has the gRPC sessions of brokers on this node, `HeartbeatAnswers` grants masters
their lease (R5).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from batonmq.controller.history_log import HistoryNotes
from batonmq.controller.liveness import events as ev
from batonmq.controller.liveness.core import LivenessCore
from batonmq.controller.raft.log import ReplicatedLog
from batonmq.controller.requests import ControllerRequests, OutcomeUnknownError
from batonmq.controller.rules.commands import ElectMaster, LiveBroker
from batonmq.controller.rules.state import ControllerState
from batonmq.history.event import EventKind
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1.role_view import role_view_to_pb
from batonmq.protocol.errors import NotLeaderError
from batonmq.protocol.role_view import RoleView
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.runtime.tasks import Tasks, report_failure

log = logging.getLogger(__name__)

_QUEUE_MAX: Final = 1_000
"""Messages that may wait in one session: about 100 s of heartbeat answers."""

SESSIONS_OF_ID_MAX: Final = 4
STRANGERS_MAX: Final = 64
"""Sessions of ids that are not registered in the state applied here."""

STALL_MS: Final = 200
"""The other controllers elect a new leader after 300 ms without heartbeats, which this one sends
every 90 ms: after a stall of 200 ms it may be deposed."""

PLANNED_GOODBYES: Final = ("goodbye", "planned stop")
"""Reasons that mean a planned stop; any other one is shown in the history."""
CONFIRM_TIMEOUT_MS: Final = 300
"""Without a majority for so long the others elect, and this node learns that it is deposed."""
CONFIRM_AGAIN_MS: Final = 10
FOLLOWER_TICKS: Final = 2
"""A node that does not lead ticks half as often: it only reports and measures silence."""


class BrokerSession:
    """One stream of one broker process. `session_id` is unique on this node; newer ones are larger.

    `cut` is set when the stream must end because the broker does not read.
    """

    def __init__(self, session_id: int, broker_name: str, broker_id: int, incarnation: str) -> None:
        self.session_id = session_id
        self.broker_name = broker_name
        self.broker_id = broker_id
        self.incarnation = incarnation
        self.peer = ""
        """gRPC's name of its connection."""
        self.cut = asyncio.Event()
        self._queue: deque[pb.ControllerMessage] = deque()
        self._wake = asyncio.Event()
        self._ended = False

    def send(self, message: pb.ControllerMessage) -> None:
        if self._ended:
            return
        # A peer that does not read must not fill the memory. Its next session gets the newest view.
        if len(self._queue) >= _QUEUE_MAX:
            log.warning(
                "session_cut broker_name=%s broker_id=%d reason='does not read'",
                self.broker_name,
                self.broker_id,
            )
            self._ended = True
            self.cut.set()
            return
        self._queue.append(message)
        self._wake.set()

    def end(self) -> None:
        """What is queued is still sent, nothing more is accepted."""
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


class SessionTable:
    """The open sessions, by broker group.

    Strangers may open STRANGERS_MAX of them (R58). A registered broker always finds a place: of too
    many sessions of one id the oldest is cut, since only the newest counts.
    """

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

    def make_place(self, state: ControllerState, broker_name: str, broker_id: int) -> str:
        """Makes a place for one more session; returns why there is none, empty if there is one."""
        if state.is_registered(broker_name, broker_id):
            own = [x for x in self.of_group(broker_name) if x.broker_id == broker_id]
            for session in own[: max(0, len(own) + 1 - SESSIONS_OF_ID_MAX)]:
                session.cut.set()
            return ""
        strangers = len(self) - len(self.registered_peers(state))
        if strangers < STRANGERS_MAX:
            return ""
        return (
            f"{strangers} sessions of brokers that are not registered are open, {STRANGERS_MAX} are"
            " allowed: register first"
        )

    def registered_peers(self, state: ControllerState) -> list[str]:
        """gRPC's names of the connections with a session of a registered broker."""
        return [
            each.peer
            for name, sessions in self._groups.items()
            for each in sessions.values()
            if state.is_registered(name, each.broker_id)
        ]

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


class HeartbeatAnswers:
    """Answers heartbeats; the answers of the leader renew the lease of a master.

    A node that stood still may have been deposed without knowing it, since Raft's thread stood
    still as well. So after a stall the answers are held until a majority has confirmed the lead. A
    late answer is safe: the broker counts its lease from when it sent the heartbeat.

    `note_loop_turn(now_ms)` must be called whenever this loop turns, at least every tick.

    Invariant: between a stall and the majority that is asked after it, no answer renews a lease,
    even if the gate is open: messages from before the stall may open it for a moment.
    """

    def __init__(self, requests: ControllerRequests, clock_ms: Callable[[], int] = boot_ms) -> None:
        self._requests = requests
        self._clock_ms = clock_ms
        self._last_turn_ms: int | None = None
        self._stalls = 0
        self._held: list[tuple[BrokerSession, pb.Heartbeat]] = []
        self._confirming: asyncio.Task[None] | None = None

    def note_loop_turn(self, now_ms: int) -> None:
        """Detects a stall. Called before anything that arrived during it is answered."""
        last_ms, self._last_turn_ms = self._last_turn_ms, now_ms
        stalled = last_ms is not None and now_ms - last_ms >= STALL_MS
        if not stalled:
            return
        # Counted also while a confirmation runs: its majority may have answered before this stall.
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
        """Whether this node opened its gate and knows of no later leader."""
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
            # Also after an error: else the brokers whose heartbeats are held would wait for
            # nothing.
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
        on_record = (group.master_broker_id, group.master_incarnation) if group else None
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
                    # R7: controllers that forgot its mastership may have given its epoch to
                    # another.
                    no_lease=on_record != (session.broker_id, session.incarnation),
                )
            )
        )


class LeadOffers:
    """Hands the lead to the controller that hears more brokers (R50), and passes on the reports.
    `timeout_ms`: how long an offer is valid. After that this node may judge by itself (R35)."""

    def __init__(self, replicated_log: ReplicatedLog, timeout_ms: int) -> None:
        self._log = replicated_log
        self._timeout_ms = timeout_ms
        self._tasks = Tasks()
        self._offer: asyncio.Task[bool] | None = None
        self._stepped_aside = False

    def step_aside(self, unseen: tuple[str, ...]) -> None:
        """Offers the lead, once, if a broker of the groups `unseen` never connected to this
        process."""
        # Another controller saw that broker, and knows now whether it is alive; this one would have
        # to wait for a whole timeout. Once: controllers that all started just now would otherwise
        # hand the lead around.
        if unseen and not self._stepped_aside:
            self._stepped_aside = True
            self.offer("", f"a broker of {', '.join(unseen)} was never seen here")

    def offer(self, node: str, why: str) -> None:
        """To `node`, or to any other one if that is empty."""
        log.warning("lead_offered node=%s reason=%r", node or "any", why)
        if self._offer is not None:
            self._offer.cancel()
        self._offer = self._tasks.spawn(self._log.hand_over(self._timeout_ms, node), "lead-offer")

    def report(self, hearing: ev.ReportHearing) -> None:
        """Sends a report of this follower to its leader."""
        self._log.reports.send(hearing.index, hearing.unheard, hearing.changed)

    def on_report(self, callback: Callable[[ev.PeerReported], None]) -> None:
        """`callback` gets the reports of the other nodes while this one leads."""
        self._log.reports.on_report = lambda *report: callback(ev.PeerReported(*report))

    async def close(self) -> None:
        await self._tasks.close()


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
        lead: LeadOffers,
    ) -> None:
        self._core = core
        self._requests = requests
        self._tick_ms = tick_ms
        self._notes = notes
        self._push = push
        self._after_tick = ticked
        self._lead = lead
        lead.on_report(self.handle)
        self._answers = HeartbeatAnswers(requests)
        self._timer: asyncio.TimerHandle | None = None
        self._elections = Tasks()
        self._refusals: dict[int, ev.RefuseSession] = {}

    def start(self) -> None:
        self._schedule_tick()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._elections.close()
        await self._answers.close()

    # Events.

    def session_opened(self, session: BrokerSession) -> ev.RefuseSession | None:
        """The refusal of the session (R18, R59), None if it is accepted."""
        self.handle(
            ev.SessionHello(
                session.broker_name, session.broker_id, session.incarnation, session.session_id
            )
        )
        # `handle` returns nothing: most of its callers have no use for effects.
        refusal = self._refusals.pop(session.session_id, None)
        if refusal is None:
            log.info(
                "session_opened broker_name=%s broker_id=%d incarnation=%s",
                session.broker_name,
                session.broker_id,
                session.incarnation,
            )
            # A broker that connects late has missed the earlier pushes.
            self._push(session.broker_name)
        return refusal

    def session_heartbeat(self, session: BrokerSession, heartbeat: pb.Heartbeat) -> None:
        """Answers at once: the broker counts its lease from the time it sent this."""
        # R8: before the answer, or a node that just woke would renew a lease that may be over.
        self._answers.note_loop_turn(boot_ms())
        self._answers.answer(session, heartbeat)
        self.handle(
            ev.SessionHeartbeat(
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
            ev.SessionEnded(
                session.broker_name,
                session.broker_id,
                session.session_id,
                goodbye=goodbye is not None,
                why=goodbye if goodbye and goodbye not in PLANNED_GOODBYES else "",
            )
        )

    def handle(self, event: ev.LivenessEvent) -> None:
        """Passes the event in and carries out the effects."""
        try:
            for effect in self._core.handle(event, boot_ms()):
                self._perform(effect)
        except Exception as error:
            # If a gRPC call caused it, only that call would end, without a line in the log.
            report_failure("an event of a broker could not be handled", error)
            raise

    # Effects.

    def _perform(self, effect: ev.LivenessEffect) -> None:
        match effect:
            case ev.ProposeElect():
                self._elect(effect)
            case ev.AliveChanged(broker_name):
                self._push(broker_name)
            case ev.RefuseSession():
                self._refusals[effect.session_id] = effect
            case ev.ElectionBlocked(broker_name, reason, operator):
                self._blocked(broker_name, reason, operator)
            case ev.ReportHearing():
                self._lead.report(effect)
            case ev.OfferLead(node, why):
                self._lead.offer(node, why)
            case ev.ContinueChecks():
                asyncio.get_running_loop().call_soon(self.handle, effect)

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

    def _elect(self, effect: ev.ProposeElect) -> None:
        log.info(
            "election_proposed failover=%s/%d reason=%s",
            effect.broker_name,
            effect.expected_master_epoch + 1,  # the mastership that it makes
            effect.reason,
        )
        self._elections.spawn(self._run_election(effect))

    async def _run_election(self, effect: ev.ProposeElect) -> None:
        command = ElectMaster(
            broker_name=effect.broker_name,
            expected_master_epoch=effect.expected_master_epoch,
            reason=effect.reason,
            # The history shows wall time; the core's clock is one that does not jump (R8).
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
            log.warning("election_ended broker_name=%s reason=%s", effect.broker_name, error)
        # Also without an outcome: the core looks again, and proposes again if it has to.
        self.handle(ev.ElectionEnded(effect.broker_name, effect.expected_master_epoch))

    def _schedule_tick(self) -> None:
        ticks = 1 if self._requests.leading else FOLLOWER_TICKS
        self._timer = asyncio.get_running_loop().call_later(
            ticks * self._tick_ms / 1000, self._ticked
        )

    def _ticked(self) -> None:
        # First, so that an exception below cannot end the ticks.
        self._schedule_tick()
        self._answers.note_loop_turn(boot_ms())
        self._after_tick()
        self.handle(ev.Tick())
