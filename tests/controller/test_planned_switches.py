"""R33 at the leading controller: a switch is asked for on the master's session, and always ends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from batonmq.controller import planned_switches
from batonmq.controller.planned_switches import PlannedSwitches
from batonmq.controller.requests import OutcomeUnknownError
from batonmq.controller.rules.commands import CommandResult, ElectMaster
from batonmq.controller.switch import OUTCOME_MS
from batonmq.controller.watch import SessionTable
from batonmq.protocol.codes import ResponseCode as Code

NAME = "broker-a"


class Scene:
    """A leader of three in sync, their sessions, and what was asked of the master."""

    def __init__(self, script: Any) -> None:
        script.three_in_sync()
        self.now_ms = 0
        self.asked: list[Any] = []
        self.elsewhere = 0
        self.noted: list[str] = []
        sessions = SessionTable()
        for broker_id in (1, 2, 3):
            session = sessions.add(NAME, broker_id, f"life-{broker_id}")
            session.send = self.asked.append
        self.submitted: list[ElectMaster] = []
        requests: Any = SimpleNamespace(
            leading=True,
            state=script.state,
            live=lambda name: script.live(),
            view=lambda _: None,
            lives_elsewhere=lambda _: self.elsewhere,
            submit=self.submit,
        )
        notes: Any = SimpleNamespace(note=lambda kind, *_, **__: self.noted.append(kind.value))
        self.switches = PlannedSwitches(requests, sessions, notes, clock_ms=lambda: self.now_ms)

    async def submit(self, command: ElectMaster) -> CommandResult:
        self.submitted.append(command)
        return CommandResult(Code.SUCCESS)

    async def begin(self) -> asyncio.Task[CommandResult]:
        command = ElectMaster(broker_name=NAME, broker_id=2, designate=True, reason="upgrade")
        task = asyncio.create_task(self.switches.elect(command))
        await asyncio.sleep(0)
        return task


async def test_r33_a_lost_lead_leaves_the_outcome_unknown(script):
    """The election may be in the log already: no answer may call it failed."""
    scene = Scene(script)
    task = await scene.begin()
    assert [message.switch.broker_id for message in scene.asked] == [2]
    scene.switches.gate_closed()
    with pytest.raises(OutcomeUnknownError):
        await task
    assert scene.noted == ["switch_requested"]


async def test_r33_a_master_that_does_not_answer_is_given_up(script, monkeypatch):
    monkeypatch.setattr(planned_switches, "OUTCOME_MS", 10)
    scene = Scene(script)
    task = await scene.begin()
    scene.now_ms += OUTCOME_MS
    async with asyncio.timeout(5):
        result = await task
    assert result.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert "did not hand over" in result.remark
    assert scene.noted == ["switch_requested", "switch_failed"]


async def test_r33_an_operator_who_goes_away_leaves_no_switch_in_the_way_of_the_next(script):
    scene = Scene(script)
    gone = await scene.begin()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    again = await scene.begin()
    assert len(scene.asked) == 2 and not again.done()
    scene.switches.gate_closed()
    await asyncio.gather(again, return_exceptions=True)


def drained(switch_id: str, **changes: Any) -> ElectMaster:
    fields: dict[str, Any] = {"broker_id": 2, "expected_master_epoch": 1} | changes
    return ElectMaster(
        broker_name=NAME, request_id=switch_id, designate=True, drained_offset=10**12, **fields
    )


async def test_r59_what_was_drained_counts_only_for_the_switch_that_this_controller_began(script):
    """Its id has 128 random bits and went to the master's session alone."""
    scene = Scene(script)
    task = await scene.begin()
    switch_id = scene.asked[0].switch.switch_id
    assert len(switch_id) >= 32
    strangers = (
        drained("switch:evil/1"),
        drained("switch:"),
        drained(switch_id, broker_id=3),
        drained(switch_id, expected_master_epoch=-1),
        drained(switch_id[:-1]),
    )
    for command in strangers:
        refused = await scene.switches.elect(command)
        assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED, command
    assert scene.submitted == []
    assert (await scene.switches.elect(drained(switch_id))).ok
    assert scene.submitted == [drained(switch_id)]
    scene.switches.gate_closed()
    await asyncio.gather(task, return_exceptions=True)
    assert not (await scene.switches.elect(drained(switch_id))).ok


@pytest.mark.parametrize("broker_id", [0, 2])
async def test_r50_a_master_that_another_controller_hears_is_not_deposed(script, broker_id):
    """The leader is cut from the brokers: it sees no session of the master. It asks its peers."""
    scene, asked = Scene(script), ElectMaster(broker_name=NAME, broker_id=broker_id)
    scene.elsewhere = 1
    result = await scene.switches.elect(asked)
    assert result.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert "does not hear broker 1, the master, but another one does" in result.remark
    assert scene.submitted == [] == scene.asked
    by_name = ElectMaster(broker_name=NAME, broker_id=2, designate=True, unclean=True)
    assert (await scene.switches.elect(by_name)).ok
    assert scene.submitted == [by_name]
