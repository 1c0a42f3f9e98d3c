"""LeaderGate and Machine on a log of one node: permission comes by command, never by role."""

import asyncio
import logging
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from local_log import LocalLog

from batonmq.controller import gate as gate_module
from batonmq.controller.gate import LeaderGate
from batonmq.controller.raft.log import Applied, Machine, Outcome, Unknown
from batonmq.controller.rules import commands
from batonmq.controller.rules.commands import ApplyBrokerId, BecomeController, encode
from batonmq.controller.rules.state import ControllerState
from batonmq.protocol.codes import ResponseCode
from tests.shared.waiting import opened


class SlowLog(LocalLog):
    """Answers Unknown as long as `reachable` is not set."""

    def __init__(self, node_id: str, machine: Machine) -> None:
        super().__init__(node_id, machine)
        self.reachable = asyncio.Event()
        self.asked = asyncio.Event()

    async def propose(self, command: commands.AnyCommand, timeout_ms: int) -> Outcome:
        self.asked.set()
        if not self.reachable.is_set():
            return Unknown("no majority")
        return await super().propose(command, timeout_ms)


async def begun(log: LocalLog, *, opens: bool = True) -> tuple[LeaderGate, list[bool]]:
    """A gate over the log, which was started, and the changes of the gate; it is open if it
    `opens`."""
    changes: list[bool] = []
    gate = LeaderGate(log, "n0", wall_ms=lambda: 1_000, timeout_ms=100, on_change=changes.append)
    await log.start()
    if opens:
        await opened(gate)
    return gate, changes


def apply_id(controller_epoch: int, number: int = 1) -> ApplyBrokerId:
    return ApplyBrokerId(
        controller_epoch=controller_epoch,
        broker_name="broker-a",
        broker_id=number,
        register_check_code=f"code-{number}",
    )


async def test_r8_it_is_open_only_while_a_majority_answers():
    """A process that was stopped may decide nothing when it wakes, before any message says so."""
    log = LocalLog("n0", Machine())
    touch = True
    log.in_touch = lambda: touch
    gate, _ = await begun(log)
    assert gate.open
    touch = False
    assert not gate.open
    touch = True
    assert gate.open
    gate.close()


async def test_leading_alone_does_not_open_it():
    log = SlowLog("n0", Machine())
    gate, changes = await begun(log, opens=False)
    await log.asked.wait()
    assert not gate.open and gate.controller_epoch == 0
    log.reachable.set()
    await opened(gate)
    assert (gate.controller_epoch, changes) == (1, [True])
    gate.close()
    assert (gate.open, changes) == (False, [True, False])


async def test_it_closes_with_the_role_and_opens_with_a_higher_epoch():
    log = LocalLog("n0", Machine())
    gate, changes = await begun(log)
    log.set_leading(False)
    assert not gate.open
    log.set_leading(True)
    await opened(gate)
    assert gate.controller_epoch == 2
    assert changes == [True, False, True]


async def test_a_gate_that_cannot_open_is_noticed():
    """Its node leads, and would decide nothing: nobody would know why."""
    reported, came = [], asyncio.Event()

    def note(_: object, context: dict[str, object]) -> None:
        reported.append(context["exception"])
        came.set()

    asyncio.get_running_loop().set_exception_handler(note)
    log = LocalLog("n0", Machine())
    log.propose = Mock(side_effect=AssertionError("a rule does not hold"))
    gate, _ = await begun(log, opens=False)
    await asyncio.wait_for(came.wait(), 10)
    assert isinstance(reported[0], AssertionError) and not gate.open
    gate.close()


async def test_r35_a_node_that_stops_decides_nothing_more_even_if_it_is_elected_again():
    """All its sessions end now, which says nothing about the brokers."""
    log = SlowLog("n0", Machine())
    log.reachable.set()
    gate, changes = await begun(log)
    gate.close()
    log.set_leading(False)
    log.asked.clear()
    log.set_leading(True)
    await asyncio.sleep(0)
    assert not log.asked.is_set() and changes == [True, False]


async def test_the_history_is_told_when_this_leader_last_had_a_majority_not_when_another_led():
    """It knew of another leader at 100, led until 900, and leads again at 1 000."""
    now_ms = 100
    log = LocalLog("n0", Machine())
    gate = LeaderGate(
        log, "n0", wall_ms=lambda: now_ms, timeout_ms=100, on_change=lambda is_open: None
    )
    log.leader_hint = lambda: "n1"
    gate.note_leader_seen()
    log.leader_hint = lambda: "n0"
    now_ms = 500
    await log.start()
    await opened(gate)
    now_ms = 900
    gate.note_leader_seen()
    log.set_leading(False)
    now_ms = 1_000
    gate.note_leader_seen()
    log.set_leading(True)
    await opened(gate)
    seen = [
        event.leader_seen_ms
        for event in log.state.history
        if event.kind == "controller_leader_changed"
    ]
    assert seen == [100, 900]


async def test_a_lead_that_is_lost_before_the_gate_opened_leaves_no_attempt_behind(monkeypatch):
    """Else two would follow one another: the gate would open twice, the brokers' leases with it."""
    monkeypatch.setattr(gate_module, "RETRY_S", 0)
    log = SlowLog("n0", Machine())
    gate, changes = await begun(log, opens=False)
    await log.asked.wait()
    log.set_leading(False)
    log.set_leading(True)
    log.reachable.set()
    await opened(gate)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (changes, log.state.controller_epoch, gate.controller_epoch) == ([True], 1, 1)
    gate.close()


async def test_it_closes_when_another_controller_is_applied_here():
    """A late command of a node that led before: fenced here until this node says so again."""
    log = LocalLog("n0", Machine())
    gate, changes = await begun(log)
    assert isinstance(await log.propose(BecomeController(node="n1", nonce="x"), 100), Applied)
    assert changes == [True, False]
    await opened(gate)
    assert (gate.controller_epoch, log.state.controller_node) == (3, "n0")


async def test_a_controller_applied_while_it_opens_is_overtaken():
    """Between this node's command and the opening, another one is applied: it proposes again."""

    class Interleaved(LocalLog):
        first = True

        async def propose(self, command: commands.AnyCommand, timeout_ms: int) -> Outcome:
            outcome = await super().propose(command, timeout_ms)
            if self.first:
                self.first = False
                await super().propose(BecomeController(node="n1", nonce="late"), timeout_ms)
            return outcome

    log = Interleaved("n0", Machine())
    gate, _ = await begun(log)
    assert (gate.controller_epoch, log.state.controller_node) == (3, "n0")


def test_a_bug_in_apply_keeps_the_state_and_is_answered(monkeypatch, caplog):
    machine = Machine()
    machine.commit(encode(BecomeController(node="n0", nonce="x")), 1)
    before = machine.state
    monkeypatch.setattr(ControllerState, "apply", raising(KeyError("bug")))
    with caplog.at_level(logging.ERROR):
        commit = machine.commit(encode(apply_id(1)), 2)
    assert commit.result.code == ResponseCode.SYSTEM_ERROR
    assert machine.state is before
    assert "command_failed" in caplog.text


@pytest.mark.parametrize("error", [MemoryError(), RecursionError(), OSError()])
def test_what_may_strike_one_node_alone_is_raised(error, monkeypatch):
    machine = Machine()
    monkeypatch.setattr(ControllerState, "apply", raising(error))
    with pytest.raises(type(error)):
        machine.commit(encode(apply_id(1)), 1)


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise error

    return fail


async def test_r10_each_attempt_to_open_it_is_the_same_command():
    """Each may be applied late: then it is answered from the table, and fences nobody."""
    log = SlowLog("n0", Machine())
    proposed: list[commands.AnyCommand] = []
    propose = log.propose

    async def note(command: commands.AnyCommand, timeout_ms: int) -> Outcome:
        proposed.append(command)
        if len(proposed) == 3:
            log.reachable.set()
        return await propose(command, timeout_ms)

    log.propose = note
    gate, _ = await begun(log)
    assert len(proposed) == 3 and len({command.request_id for command in proposed}) == 1
    assert log.state.controller_epoch == gate.controller_epoch == 1
    gate.close()
