"""The requests of both endpoints: commands go through the log, reads are answered from its state.

Only the leader answers, while its gate is open; other nodes raise NotLeaderError with the leader's
address. If the outcome is unknown OutcomeUnknownError is raised: an endpoint must not answer with a
code that a broker would take for a refusal (R11).
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from batonmq.controller.admission import Admission, claimed
from batonmq.controller.config import ControllerConfig, Peer, RuntimeConfig
from batonmq.controller.gate import LeaderGate
from batonmq.controller.liveness.core import LivenessCore
from batonmq.controller.raft.log import Applied, LogStatus, NotApplied, ReplicatedLog
from batonmq.controller.rules.commands import (
    AlterSyncStateSet,
    AnyCommand,
    ApplyBrokerId,
    CleanBrokerData,
    CommandResult,
    ElectMaster,
    LiveBroker,
    RegisterBroker,
)
from batonmq.controller.rules.election import may_propose, members_of, with_new_epochs
from batonmq.controller.rules.groups import fill_alive
from batonmq.controller.rules.state import ControllerState
from batonmq.controller.switch import is_switch_id, with_drained
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BatonError, NotLeaderError
from batonmq.protocol.role_view import RoleView
from batonmq.runtime.clock import boot_ms, wall_ms

log = logging.getLogger(__name__)

_EPOCH_STEP_MIN: Final = 1_000
_EPOCH_STEPS: Final = 1_000_000
"""How far a new epoch is above what replicas report. Random: a replica that is away may know the
next numbers (R47)."""
_PROBLEMS_SHOWN: Final = 32
_PROBLEM_SIZE_MAX: Final = 1_000


class CommandTooLargeError(BatonError):
    """The request makes a command that is too large for the log."""

    response_code = ResponseCode.CONTROLLER_INVALID_REQUEST


class OutcomeUnknownError(BatonError):
    """The request may take effect, or already has: ask again with the same request_id.

    On gRPC it is the status UNAVAILABLE without a reply, on remoting SYSTEM_ERROR (1).
    """

    response_code = ResponseCode.SYSTEM_ERROR
    retriable = True

    def __init__(self, reason: str) -> None:
        super().__init__(f"outcome unknown: {reason}")


@dataclass(frozen=True, slots=True)
class NodeMetadata:
    """This node and its group. `leader` is a hint, None if unknown; `problems` are for
    operators."""

    group: str
    self_peer: Peer
    leader: Peer | None
    is_leader: bool
    controller_epoch: int
    log: LogStatus
    peers: tuple[Peer, ...]
    problems: tuple[str, ...] = ()


class ControllerRequests:
    """`more_problems` adds to the problems in `metadata`."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        replicated_log: ReplicatedLog,
        gate: LeaderGate,
        liveness: LivenessCore,
        more_problems: Callable[[], tuple[str, ...]],
    ) -> None:
        self._runtime = runtime
        self._more_problems = more_problems
        self._log = replicated_log
        self._gate = gate
        self._liveness = liveness
        self._admission = Admission()
        self._peers = runtime.current.peers
        self._self_peer = runtime.current.self_peer

    @property
    def config(self) -> ControllerConfig:
        return self._runtime.current

    @property
    def state(self) -> ControllerState:
        """The state applied on this node, leader or not."""
        return self._log.state

    @property
    def leading(self) -> bool:
        return self._gate.open

    @property
    def controller_epoch(self) -> int:
        return self._gate.controller_epoch

    def leader(self) -> Peer | None:
        """The leader of Raft, as far as this node knows."""
        hint = self._log.leader_hint()
        return next((peer for peer in self._peers if peer.node_id == hint), None)

    def metadata(self) -> NodeMetadata:
        status = self._log.status()
        return NodeMetadata(
            group=self.config.controller_group,
            self_peer=self._self_peer,
            leader=self.leader(),
            is_leader=self._gate.open,
            controller_epoch=self.state.controller_epoch,
            log=status,
            peers=self._peers,
            problems=(*status.problems, *self._more_problems(), *_first(self._liveness.problems())),
        )

    async def submit(self, command: AnyCommand) -> CommandResult:
        """Proposes the command with this leader's epoch, its clock and the liveness it sees.

        Raises NotLeaderError (it never takes effect), CommandTooLargeError, OutcomeUnknownError.
        """
        if not self._gate.open:
            raise self.not_leader()
        if isinstance(command, ElectMaster):
            command = await self._after_lease(self._with_origin(command))
            # The wait may have outlasted the lead.
            if not self._gate.open:
                raise self.not_leader()
        stamped = self._with_liveness(command).stamped(
            controller_epoch=self._gate.controller_epoch, now_ms=wall_ms()
        )
        # With the liveness of this moment: what the wait above was for may have changed it.
        if isinstance(stamped, ElectMaster):
            admitted = self._admitted(stamped)
            if isinstance(admitted, str):
                return self._not_proposed(stamped, admitted)
            stamped = admitted
        if isinstance(stamped, RegisterBroker):
            claim = self._claimed(stamped)
            if isinstance(claim, str):
                return self._not_proposed(stamped, claim)
            stamped = claim
        if isinstance(stamped, RegisterBroker | ApplyBrokerId):
            if why := self._admission.problem(self._log.state, stamped, self.config):
                return self._not_proposed(stamped, why)
            with self._admission.under_way(stamped):
                return await self._propose(stamped)
        return await self._propose(stamped)

    async def _propose(self, stamped: AnyCommand) -> CommandResult:
        try:
            outcome = await self._log.propose(stamped, self.config.propose_timeout_ms)
        except ValueError as error:
            raise CommandTooLargeError(str(error)) from error
        match outcome:
            # Also a refusal: all nodes came to it.
            case Applied(result):
                return result
            # It never takes effect, so the caller may ask the next leader at once.
            case NotApplied():
                raise self.not_leader()
        raise OutcomeUnknownError(outcome.reason)

    async def confirm_lead(self, timeout_ms: int) -> bool:
        """Whether a majority still accepts this node as the leader."""
        return self._gate.open and await self._log.read_barrier(timeout_ms) and self._gate.open

    async def reading(self) -> ControllerState:
        """The state to answer a read from. Raises NotLeaderError, OutcomeUnknownError.

        It may be up to raftElectionTimeoutMinMs old, since a deposed leader may not know it for as
        long. With `isProcessReadEvent` each read passes the log first, and sees every change that
        was answered before it.
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
        """The living replicas of the group, as this node itself saw."""
        return self._liveness.live(broker_name, boot_ms())

    def lives_elsewhere(self, broker_name: str) -> int:
        """The group's master, if this node does not hear it but another one does (R50); else 0."""
        group = self._log.state.group(broker_name)
        if group is None or not group.master_broker_id:
            return 0
        unheard = self._liveness.elsewhere(group, boot_ms())
        return group.master_broker_id if group.master_broker_id in unheard else 0

    def view(self, broker_name: str) -> RoleView | None:
        """The group as applied here, with `alive` as this node sees it; None if unknown."""
        view = self._log.state.role_view(broker_name)
        return None if view is None else self.with_alive(view)

    def with_alive(self, view: RoleView) -> RoleView:
        """`view` with `alive` as this node sees it. A replica that it cannot judge yet is shown as
        alive."""
        return fill_alive(view, self._liveness.presumed_alive(view.broker_name, boot_ms()))

    def not_leader(self) -> NotLeaderError:
        leader = self.leader()
        # This node may lead while its gate is closed: no caller must be sent back here at once.
        if leader is None or leader.node_id == self._self_peer.node_id:
            return NotLeaderError(None)
        return NotLeaderError(leader.remoting_address)

    async def _after_lease(self, command: ElectMaster) -> ElectMaster:
        """R7: if the election is unclean, waits until the lease of the last master is over."""
        group = self._log.state.group(command.broker_name)
        if group is None:
            return command
        # enableElectUncleanMaster allows it without --unclean, but only for a named replica (G5).
        by_setting = self.config.enable_elect_unclean_master and command.designate
        if by_setting and command.broker_id not in group.sync_state_set:
            command = replace(command, unclean=True)
        # R49: if no election is recorded, the highest epoch that a replica reported may have a
        # master.
        if command.unclean and members_of(group):
            wait_ms = self._liveness.unclean_wait_ms(command.broker_name, boot_ms())
            await asyncio.sleep(wait_ms / 1000)
        return command

    def _admitted(self, command: ElectMaster) -> ElectMaster | str:
        """The command as it may be proposed now, or why it may not (R7, R17, R19, R44, R47)."""
        name = command.broker_name
        group = self._log.state.group(name)
        if group is None:
            return command
        admitted = may_propose(group, command, self._liveness.election_facts(name, boot_ms()))
        if isinstance(admitted, str):
            return admitted
        step = _EPOCH_STEP_MIN + secrets.randbelow(_EPOCH_STEPS)
        return with_new_epochs(group, admitted, step)

    def _claimed(self, command: RegisterBroker) -> RegisterBroker | str:
        """The command as it may be proposed now, or why not: the id has another owner (R59)."""
        name = command.broker_name
        unheard_ms = self._liveness.unheard_ms(name, command.broker_id, boot_ms())
        claim = claimed(self._log.state.group(name), command, unheard_ms)
        if isinstance(claim, RegisterBroker) and claim.is_stranger:
            log.warning(
                "registered_without_proof broker_name=%s broker_id=%d incarnation=%s",
                name,
                command.broker_id,
                command.incarnation,
            )
        return claim

    def _not_proposed(
        self, command: ElectMaster | RegisterBroker | ApplyBrokerId, why: str
    ) -> CommandResult:
        code, what = ResponseCode.CONTROLLER_INVALID_REQUEST, "registration_refused"
        if isinstance(command, ElectMaster):
            code, what = ResponseCode.CONTROLLER_ELECT_MASTER_FAILED, "election_not_proposed"
        log.warning("%s broker_name=%s reason=%r", what, command.broker_name, why)
        return CommandResult(code, why, view=self.view(command.broker_name))

    def _with_origin(self, command: ElectMaster) -> ElectMaster:
        """Adds this node and a time, by default now, for the history."""
        detected_ms = command.detected_ms or wall_ms()
        return replace(command, node=self._self_peer.node_id, detected_ms=detected_ms)

    def _with_liveness(self, command: AnyCommand) -> AnyCommand:
        match command:
            case ElectMaster():
                live = self.live(command.broker_name)
                if is_switch_id(command.request_id):
                    # R43: as the log end of the chosen replica only. As a floor it would be
                    # recorded, and after a failed switch a complete member may end below it.
                    live = with_drained(live, command.broker_id, command.drained_offset)
                floor = self._liveness.confirm_floor(command.broker_name)
                return replace(command, live=live, confirm_floor=floor)
            case RegisterBroker():
                # Not the settled floor of elections: what this replica confirmed a moment before
                # it ended must be in its log, too (R17).
                return replace(
                    command,
                    live=self.live(command.broker_name),
                    confirm_floor=self._liveness.confirm_newest(command.broker_name),
                )
            case AlterSyncStateSet():
                live = self.live(command.broker_name)
                # R59: what is confirmed is in the master's log. A floor above its end, or of a
                # master whose log end is not known here (-1), is not believed.
                master_id = command.master_broker_id
                end = next((seen.max_offset for seen in live if seen.broker_id == master_id), -1)
                return replace(command, live=live, confirm_offset=min(command.confirm_offset, end))
            case CleanBrokerData():
                return replace(command, live=self.live(command.broker_name))
        return command


def _first(problems: tuple[str, ...]) -> tuple[str, ...]:
    # All problems of a thousand groups would not fit into the header of an answer.
    shown = tuple(problem[:_PROBLEM_SIZE_MAX] for problem in problems[:_PROBLEMS_SHOWN])
    left = len(problems) - len(shown)
    return (*shown, f"{left} more groups have a problem") if left else shown
