"""What both doors ask for, without a transport: commands through the log, reads from its state.

Only the leader behind its open gate answers; others raise NotLeaderError with the leader's address.
A proposal whose end is unknown raises OutcomeUnknownError: the door must not answer it with a code
that a broker would take for a refusal (SAFETY R11).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from msgspec.structs import replace

from controller.commands import (
    AlterSyncStateSet,
    AnyCommand,
    CleanBrokerData,
    ElectMaster,
    LiveBroker,
    RegisterBroker,
)
from controller.config import ControllerConfig, Peer
from controller.errors import CommandTooLargeError, OutcomeUnknownError
from controller.gate import LeaderGate
from controller.groups import fill_alive
from controller.history import HISTORY_EVENTS_MAX, HistoryEvent
from controller.history_file import HistoryFile
from controller.log import Applied, LogStatus, NotApplied, ReplicatedLog
from controller.results import CommandResult
from controller.state import ControllerState
from controller.switch import is_switch_id, vouched
from protocol.codes import ResponseCode
from protocol.errors import NotLeaderError
from protocol.role_view import RoleView

__all__ = ["ControllerRequests", "LivenessView", "Metadata", "monotonic_ms", "wall_ms"]


log = logging.getLogger(__name__)

HISTORY_REPLY_EVENTS_MAX: Final = 20_000
HISTORY_REPLY_SIZE_MAX: Final = 8 << 20


def monotonic_ms() -> int:
    """CLOCK_BOOTTIME: goes on while the machine sleeps (SAFETY R8)."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class LivenessView(Protocol):
    """What this node knows first-hand of who is alive."""

    def live(self, broker_name: str, now_ms: int) -> tuple[LiveBroker, ...]: ...

    def confirm_floor(self, broker_name: str) -> int: ...

    def confirm_heard(self, broker_name: str) -> int: ...

    def presumed_alive(self, broker_name: str, now_ms: int) -> frozenset[int]: ...

    def unclean_wait_ms(self, broker_name: str, now_ms: int) -> int: ...

    def problems(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Metadata:
    """Who this node is and what it knows of the others. `leader` is a hint, None if unknown.

    `problems` is what is unwell here, for people.
    """

    group: str
    self_peer: Peer
    leader: Peer | None
    is_leader: bool
    controller_epoch: int
    log: LogStatus
    peers: tuple[Peer, ...]
    problems: tuple[str, ...] = ()


class ControllerRequests:
    def __init__(
        self,
        config: ControllerConfig,
        replicated_log: ReplicatedLog,
        gate: LeaderGate,
        liveness: LivenessView,
    ) -> None:
        self.config = config
        self.history_file: HistoryFile | None = None
        self.publication_problems: Callable[[], tuple[str, ...]] = tuple
        self._log = replicated_log
        self._gate = gate
        self._liveness = liveness
        self._peers = config.peers
        self._self_peer = config.self_peer

    @property
    def state(self) -> ControllerState:
        """What is applied on this node, leader or not."""
        return self._log.state

    @property
    def leading(self) -> bool:
        return self._gate.open

    @property
    def controller_epoch(self) -> int:
        return self._gate.controller_epoch

    def leader(self) -> Peer | None:
        """The leader as far as this node knows; this node only while its gate is open."""
        hint = self._log.leader_hint()
        return next((peer for peer in self._peers if peer.node_id == hint), None)

    def metadata(self) -> Metadata:
        status = self._log.status()
        return Metadata(
            group=self.config.controller_group,
            self_peer=self._self_peer,
            leader=self.leader(),
            is_leader=self._gate.open,
            controller_epoch=self.state.controller_epoch,
            log=status,
            peers=self._peers,
            problems=(
                *status.problems,
                *self._liveness.problems(),
                *self.publication_problems(),
            ),
        )

    async def submit(self, command: AnyCommand) -> CommandResult:
        """Proposes with this leadership's stamp and what is known of the group's liveness.

        Raises NotLeaderError (it never takes effect), CommandTooLargeError, OutcomeUnknownError.
        """
        if not self._gate.open:
            raise self.not_leader()
        if isinstance(command, ElectMaster) and (command.unclean or command.designate):
            command = await self._allow_unclean(command)
            if self._master_still_answers(command):
                return CommandResult(
                    ResponseCode.CONTROLLER_ELECT_MASTER_FAILED,
                    "the master still answers: an unclean election waits until its lease is over",
                    view=self.view(command.broker_name),
                )
        if not self._gate.open:
            raise self.not_leader()
        if isinstance(command, ElectMaster):
            command = self._as_seen_here(command)
        stamped = self._with_liveness(command).stamped(
            controller_epoch=self._gate.controller_epoch, now_ms=wall_ms()
        )
        try:
            outcome = await self._log.propose(stamped, self.config.propose_timeout_ms)
        except ValueError as error:
            raise CommandTooLargeError(str(error)) from error
        match outcome:
            case Applied(result):
                return result
            case NotApplied():
                raise self.not_leader()
        raise OutcomeUnknownError(outcome.reason)

    async def confirm_lead(self, timeout_ms: int) -> bool:
        """Whether a majority holds this node for the leader still."""
        return self._gate.open and await self._log.read_barrier(timeout_ms) and self._gate.open

    async def reading(self) -> ControllerState:
        """The state to answer a read from. Raises NotLeaderError, OutcomeUnknownError.

        Polled reads may be as stale as the gate; with `isProcessReadEvent` each one first passes
        the log, so that it sees all that was answered before it.
        """
        if not self._gate.open:
            raise self.not_leader()
        if self.config.is_process_read_event and not await self._log.read_barrier(
            self.config.propose_timeout_ms
        ):
            raise OutcomeUnknownError("no majority confirmed the read")
        if not self._gate.open:
            raise self.not_leader()
        return self._log.state

    def live(self, broker_name: str) -> tuple[LiveBroker, ...]:
        """Who lives, as this node saw first-hand."""
        return self._liveness.live(broker_name, monotonic_ms())

    def view(self, broker_name: str) -> RoleView | None:
        """The group as applied here, `alive` filled with what this node sees."""
        view = self._log.state.role_view(broker_name)
        return None if view is None else self.with_alive(view)

    def with_alive(self, view: RoleView) -> RoleView:
        """`view` with what this node knows first-hand: unknown is not told as dead."""
        return fill_alive(view, self._liveness.presumed_alive(view.broker_name, monotonic_ms()))

    async def history(self, broker_name: str, after_index: int, limit: int) -> list[HistoryEvent]:
        """The events after `after_index`, oldest first; the newest `limit` of them (0: all).

        As known to this node, leader or not. With `after_index` above 0 only of the log that is in
        use; else earlier logs too, and what the replicated state has no room for, from the files:
        at most HISTORY_REPLY_EVENTS_MAX events of HISTORY_REPLY_SIZE_MAX bytes.
        """
        events = list(self.state.history)
        file = self.history_file
        more = file is not None and any(event.log != self.state.log_name for event in file.recent)
        if file is not None and after_index <= 0 and (more or len(events) >= HISTORY_EVENTS_MAX):
            try:
                events = await asyncio.to_thread(
                    file.newest, HISTORY_REPLY_EVENTS_MAX, HISTORY_REPLY_SIZE_MAX
                )
            except OSError as error:
                log.warning("history_not_read error=%s", error)
        events = [
            event
            for event in events
            if (after_index <= 0 or event.raft_index > after_index)
            and broker_name in ("", event.broker_name)
        ]
        return events[-limit:] if limit > 0 else events

    def not_leader(self) -> NotLeaderError:
        leader = self.leader()
        if leader is None or leader.node_id == self._self_peer.node_id:
            return NotLeaderError(None)
        return NotLeaderError(leader.remoting_address)

    async def _allow_unclean(self, command: ElectMaster) -> ElectMaster:
        """R7: an unclean election waits until the last master's lease is over.

        Asked for by name, or, for tools that cannot ask so, with enableElectUncleanMaster set and a
        replica designated that is not in the set. A group without any election has no lease.
        """
        group = self._log.state.group(command.broker_name)
        if group is None:
            return command
        by_setting = self.config.enable_elect_unclean_master and command.designate
        if by_setting and command.broker_id not in group.sync_state_set:
            command = replace(command, unclean=True)
        if command.unclean and group.master_epoch > 0:
            wait_ms = self._liveness.unclean_wait_ms(command.broker_name, monotonic_ms())
            await asyncio.sleep(wait_ms / 1000)
        return command

    def _master_still_answers(self, command: ElectMaster) -> bool:
        group = self._log.state.group(command.broker_name)
        if not command.unclean or group is None or group.master_epoch == 0:
            return False
        return self._liveness.unclean_wait_ms(command.broker_name, monotonic_ms()) > 0

    def _as_seen_here(self, command: ElectMaster) -> ElectMaster:
        """Whoever asks, the history names this node, and a time: without another one, now."""
        detected_ms = command.detected_ms or wall_ms()
        return replace(command, node=self._self_peer.node_id, detected_ms=detected_ms)

    def _with_liveness(self, command: AnyCommand) -> AnyCommand:
        match command:
            case ElectMaster():
                floor = self._liveness.confirm_floor(command.broker_name)
                live = self.live(command.broker_name)
                if is_switch_id(command.request_id):
                    floor = max(floor, command.drained_offset)
                    live = vouched(live, command.broker_id, command.drained_offset)
                return replace(command, live=live, confirm_floor=floor)
            case RegisterBroker():
                return replace(
                    command,
                    live=self._liveness.live(command.broker_name, monotonic_ms()),
                    confirm_floor=self._liveness.confirm_heard(command.broker_name),
                )
            case AlterSyncStateSet() | CleanBrokerData():
                return replace(
                    command, live=self._liveness.live(command.broker_name, monotonic_ms())
                )
        return command
