"""A controller that was just started, and leads at once, knows only the brokers that dialled it."""

import asyncio
from pathlib import Path

import pytest
from local_log import LocalLog

from batonmq.controller.config import ControllerConfig
from batonmq.controller.liveness.events import SessionHello, StateApplied
from batonmq.controller.raft.log import Machine
from batonmq.controller.rules.state import ControllerState
from batonmq.controller.service import ControllerService
from tests.shared.waiting import opened


class Log(LocalLog):
    """A log with a leader before this node; it counts how often the lead was offered."""

    def __init__(self, state: ControllerState) -> None:
        super().__init__("n0", Machine(state))
        self.hint = "n1"
        self.offers = 0

    def leader_hint(self) -> str:
        return self.hint

    async def hand_over(self, timeout_ms: int, node_id: str = "") -> bool:
        self.offers += 1
        return False


def offers(
    folder: Path, state: ControllerState, *, followed: bool = True, seen: tuple[int, ...] = ()
) -> int:
    """How often this node, whose gate opens twice, offers its lead to another one."""

    async def run() -> int:
        log = Log(state)
        service = ControllerService(
            ControllerConfig(
                controller_peers="n0-h0:9878;n1-h1:9878;n2-h2:9878",
                controller_self_id="n0",
                controller_store_path=str(folder),
            ),
            replicated_log=log,
        )
        service._watch.handle(StateApplied(state))
        for broker_id in seen:
            hello = SessionHello("broker-a", broker_id, f"life-{broker_id}", broker_id)
            service._watch.handle(hello)
        if followed:
            service.gate.note_leader_seen()
        log.hint = "n0"
        await log.start()
        await opened(service.gate)
        await asyncio.sleep(0)
        offered = log.offers
        log.set_leading(False)
        log.set_leading(True)
        await opened(service.gate)
        await asyncio.sleep(0)
        assert log.offers <= max(offered, 1), "once is enough: the others may know no more"
        return offered

    return asyncio.run(run())


def test_r5_r35_a_leader_that_never_saw_a_member_offers_the_lead_once(trio, tmp_path):
    """1. A controller is started again, and follows. 2. Before broker 1, the master, dials it,
    master and leader are killed: it leads. 3. To it the master is unknown, not dead, for a whole
    session time-out; the third controller saw its session close."""
    assert offers(tmp_path / "blind", trio.state, seen=(2, 3)) == 1
    assert offers(tmp_path / "sees", trio.state, seen=(1, 2, 3)) == 0


def test_r35_after_a_restart_of_all_controllers_none_offers_the_lead(trio, tmp_path):
    assert offers(tmp_path, trio.state, followed=False) == 0


@pytest.mark.parametrize("left", [(1,), (1, 2)])
def test_r35_who_left_the_set_need_not_have_been_seen(left, trio, tmp_path):
    trio.alter(*left)
    assert offers(tmp_path, trio.state, seen=left) == 0
