"""The shell around `PendingSwitches`: asks the master on its session and waits for the outcome."""

import asyncio
import logging
import secrets
from collections.abc import Callable

from batonmq.controller.history_log import HistoryNotes
from batonmq.controller.requests import ControllerRequests, OutcomeUnknownError
from batonmq.controller.rules.commands import CommandResult, ElectMaster
from batonmq.controller.rules.state import ControllerState
from batonmq.controller.switch import (
    HOLD_MS,
    OUTCOME_MS,
    AskMaster,
    OrdinaryElection,
    PendingSwitches,
    SwitchOutcome,
    is_switch_id,
    plan,
)
from batonmq.controller.watch import BrokerSession, SessionTable
from batonmq.history.event import REASON_SIZE_MAX, EventKind
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.protocol.codes import ResponseCode
from batonmq.runtime.clock import boot_ms

log = logging.getLogger(__name__)


class PlannedSwitches:
    """Takes every ElectMaster of the endpoints; one of an operator becomes a switch if possible."""

    def __init__(
        self,
        requests: ControllerRequests,
        sessions: SessionTable,
        notes: HistoryNotes,
        *,
        clock_ms: Callable[[], int] = boot_ms,
    ) -> None:
        self._requests = requests
        self._sessions = sessions
        self._clock_ms = clock_ms
        self._pending = PendingSwitches()
        self._waiting: dict[str, asyncio.Future[SwitchOutcome]] = {}
        self._notes = notes

    async def elect(self, command: ElectMaster) -> CommandResult:
        """Raises NotLeaderError, OutcomeUnknownError, CommandTooLargeError as `submit` does."""
        requests = self._requests
        if not requests.leading:
            raise requests.not_leader()
        # R59: only the master that was asked to switch knows this id.
        if is_switch_id(command.request_id):
            if self._pending.is_open(command):
                return await requests.submit(command)
            return self._result(
                command.broker_name,
                ResponseCode.CONTROLLER_ELECT_MASTER_FAILED,
                f"this controller asked no master for the switch {command.request_id} to broker "
                f"{command.broker_id} in masterEpoch {command.expected_master_epoch}",
            )
        master_id = 0 if command.unclean else requests.lives_elsewhere(command.broker_name)
        if master_id:
            # R50: this controller may be cut off. An election would depose a healthy master.
            return self._result(
                command.broker_name,
                ResponseCode.CONTROLLER_ELECT_MASTER_FAILED,
                f"this controller does not hear broker {master_id}, the master, but another one "
                "does: no other master is elected. Ask again in a second, when a controller leads "
                "that hears it; or check the network between this one and the brokers",
            )
        sessions = {
            (session.broker_id, session.incarnation): session
            for session in self._sessions.of_group(command.broker_name)
        }
        group = requests.state.group(command.broker_name)
        decision = plan(group, command, requests.live(command.broker_name), sessions.keys())
        match decision:
            case OrdinaryElection():
                return await requests.submit(command)
            case AskMaster(master_id, incarnation):
                session = sessions[(master_id, incarnation)]
                return await self._switch(command, decision, session)

    # Events.

    def failed(self, session: BrokerSession, message: pb.SwitchFailed) -> None:
        """The master reported that it cannot switch."""
        self._end(self._pending.failed(session.broker_name, message.switch_id, message.reason))

    def state_applied(self, state: ControllerState) -> None:
        for name in self._pending.names():
            if (group := state.group(name)) is not None:
                self._end(self._pending.applied(group))

    def gate_closed(self) -> None:
        self._end(self._pending.gate_closed())

    # The switch.

    async def _switch(
        self, command: ElectMaster, asked: AskMaster, session: BrokerSession
    ) -> CommandResult:
        name = command.broker_name
        began = self._pending.begin(name, asked, secrets.token_hex(16), self._clock_ms())
        if isinstance(began, SwitchOutcome):
            return self._result(name, began.code, began.reason)
        log.info(
            "switch_requested broker_name=%s from=%d to=%d switch_id=%s",
            name,
            asked.master_id,
            asked.broker_id,
            began,
        )
        outcome: asyncio.Future[SwitchOutcome] = asyncio.get_running_loop().create_future()
        self._waiting[began] = outcome
        self._note(EventKind.SWITCH_REQUESTED, name, asked, command.reason)
        session.send(
            pb.ControllerMessage(
                switch=pb.SwitchRequest(
                    switch_id=began,
                    broker_id=asked.broker_id,
                    master_epoch=asked.master_epoch,
                    timeout_ms=HOLD_MS,
                    reason=command.reason,
                )
            )
        )
        timer = asyncio.get_running_loop().call_later(OUTCOME_MS / 1000, self._timed_out, name)
        try:
            ended = await outcome
        finally:
            timer.cancel()
            del self._waiting[began]
            # If the caller was cancelled: else the group could have no other switch.
            self._pending.failed(name, began, "")
        if ended.code is ResponseCode.CONTROLLER_NOT_LEADER:
            raise OutcomeUnknownError("this controller lost its lead during the switch")
        if ended.code is not ResponseCode.SUCCESS:
            log.warning("switch_failed broker_name=%s reason=%r", name, ended.reason)
            self._note(EventKind.SWITCH_FAILED, name, asked, ended.reason)
        return self._result(name, ended.code, ended.reason)

    def _timed_out(self, broker_name: str) -> None:
        # The timer's clock and this one may differ by a millisecond of rounding.
        self._end(self._pending.expired(broker_name, self._clock_ms() + 1))

    def _end(self, outcomes: list[SwitchOutcome]) -> None:
        for outcome in outcomes:
            waiting = self._waiting.get(outcome.switch_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(outcome)

    def _result(self, broker_name: str, code: ResponseCode, reason: str) -> CommandResult:
        return CommandResult(code, reason, self._requests.view(broker_name))

    def _note(self, kind: EventKind, broker_name: str, asked: AskMaster, reason: str) -> None:
        self._notes.note(
            kind,
            broker_name,
            master_epoch=asked.master_epoch,
            broker_id=asked.broker_id,
            reason=reason[:REASON_SIZE_MAX],
            master=asked.master_id,
        )
