"""The slave core's table of transitions: complete, kept to, and drawn in the docs as it is."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from batonmq.ha.received_log import LocalLog
from batonmq.ha.slave_core import TRANSITIONS, InvalidTransition, SlaveCore, SlavePhase, SlaveStep
from batonmq.ha.slave_policy import SlavePolicy
from batonmq.protocol.role_view import RoleView
from tests.ha.cores import identity

DOCS = Path(__file__).parents[2] / "docs"


def diagram() -> str:
    """The table as a Mermaid state diagram, without the two steps that every phase has."""
    lines = ["stateDiagram-v2", f"    [*] --> {SlavePhase.READY.name}"]
    for phase, steps in TRANSITIONS.items():
        lines += [
            f"    {phase.name} --> {to.name}: {step.value}"
            for step, to in steps.items()
            if step not in (SlaveStep.HANG_UP, SlaveStep.STOP)
        ]
    return "\n".join(lines)


def core() -> SlaveCore:
    view = RoleView("C", "b", master_broker_id=1, master_ha_address="master:1", master_epoch=1)
    return SlaveCore(identity(2), view, LocalLog(0, 0, 0, ()), SlavePolicy(), 1_000)


def test_each_phase_but_the_last_can_be_left_reached_and_stopped():
    assert TRANSITIONS.keys() == set(SlavePhase)
    reached = {to for steps in TRANSITIONS.values() for to in steps.values()}
    assert reached == set(SlavePhase)
    for phase, steps in TRANSITIONS.items():
        if phase is SlavePhase.STOPPED:
            assert not steps
        else:
            assert steps[SlaveStep.STOP] is SlavePhase.STOPPED
            assert steps[SlaveStep.HANG_UP] is SlavePhase.READY


def test_a_step_that_the_table_does_not_have_shows_the_recent_events():
    slave = core()
    slave.tick(1_000)
    slave.disconnected(1_010)
    with pytest.raises(InvalidTransition, match="connected in phase ready") as caught:
        slave.connected(LocalLog(0, 0, 0, ()), 1_020)
    (note,) = caught.value.__notes__
    events = [line.strip() for line in note.splitlines()[1:]]
    assert events[:2] == ["now_ms=1000 tick()", "now_ms=1010 disconnected()"]
    assert events[2].startswith("now_ms=1020 connected(log=LocalLog(min_offset=0, max_offset=0,")


def test_nothing_leads_out_of_a_stopped_slave():
    slave = core()
    slave.tick(1_000)
    slave.stop()
    assert slave.tick(9_000) == slave.disconnected(9_000) == slave.turn_ended(0, 9_000) == []
    with pytest.raises(InvalidTransition, match="hang up in phase stopped"):
        slave.follow(replace(slave.view, master_epoch=2, master_ha_address="other:1"), 9_001)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_the_docs_show_the_table(page):
    for block in re.findall(r"```mermaid\n(stateDiagram-v2\n.*?)\n```", page.read_text(), re.S):
        assert block == diagram(), "docs and TRANSITIONS differ; the table is right"


if __name__ == "__main__":
    print(diagram())
