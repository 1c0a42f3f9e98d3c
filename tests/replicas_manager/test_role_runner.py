"""Role changes one after the other: what is durable before them, what they drop, what ends them."""

import asyncio
import errno
from collections.abc import Awaitable
from typing import Any
from unittest.mock import Mock

import pytest

from batonmq.protocol.role_view import RoleView
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.role_runner import MASTER_ATTEMPTS_MAX, EpochStore, RoleRunner
from tests.shared.no_threads import no_new_threads

FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = RuntimeError("the store does not open")


def view(master_epoch: int, set_epoch: int = 1) -> RoleView:
    return RoleView(
        cluster_name="C",
        broker_name="broker-a",
        master_epoch=master_epoch,
        sync_state_set_epoch=set_epoch,
    )


class Scene:
    """A broker that writes down what it is told. `fails`: what the next changes raise, in turn;
    `holds`: a change lasts until it is set; `stores`: what storing an epoch raises, in turn."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: list[Exception] = []
        self.stores: list[Exception] = []
        self.stored: list[int] = []
        self.begun, self.holds = asyncio.Event(), asyncio.Event()
        self.holds.set()
        self.failed: list[int] = []
        self.no_room = 0
        self.fatal: list[BaseException] = []
        self.epochs = EpochStore(self.persist, 0, self.stored.append)
        broker: Any = self
        self.runner = RoleRunner(
            broker, broker, self.epochs, self.on_failed, self.on_disk_full, self.fatal.append
        )

    def on_failed(self, failed: RoleView) -> None:
        self.failed.append(failed.master_epoch)

    def on_disk_full(self) -> None:
        self.no_room += 1

    def persist(self, master_epoch: int) -> None:
        self.calls.append(("store", master_epoch))
        if self.stores:
            raise self.stores.pop(0)

    async def become_master(self, to: RoleView, durable: Awaitable[None]) -> None:
        await self._change("master", to)

    async def become_slave(self, to: RoleView) -> None:
        await self._change("slave", to)

    async def stand_down(self, to: RoleView) -> None:
        await self._change("none", to)

    async def _change(self, role: str, to: RoleView) -> None:
        self.calls.append((role, to.master_epoch))
        self.begun.set()
        await self.holds.wait()
        if self.fails:
            raise self.fails.pop(0)

    def adopt_view(self, to: RoleView) -> None:
        self.calls.append(("adopt", *to.key))

    def set_dead(self, broker_ids: frozenset[int]) -> None:
        self.calls.append(("dead", *broker_ids))

    def master_moved(self, view: RoleView) -> None:
        self.calls.append(("master at", view.master_address))

    def lease_changed(self, valid: bool) -> None:
        self.calls.append(("lease", valid))

    def proposal_refused(self, code: int, remark: str) -> None:
        self.calls.append(("refused", code))

    def proposal_unknown(self) -> None:
        self.calls.append(("unknown",))

    async def idle(self) -> None:
        while (task := self.runner._task) is not None:
            await task


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize(
    ("change", "role"),
    [(ev.BecomeMaster, "master"), (ev.BecomeSlave, "slave"), (ev.StandDown, "none")],
)
async def test_r2_an_epoch_that_could_not_be_stored_is_stored_before_the_change_is_made(
    scene, change, role
):
    """Also a master's, which is stored while it opens: until then its role change is not done."""
    scene.stores.append(FULL)
    for _ in range(2):
        scene.runner.perform(change(view(2)))
        await scene.idle()
    assert scene.failed == [2]
    assert [call for call in scene.calls if call[0] == "store"] == [("store", 2)] * 2
    scene.runner.perform(change(view(2, 2)))
    await scene.idle()
    assert scene.calls.count(("store", 2)) == 2, "it is durable now"
    if role != "master":
        assert scene.calls[:3] == [("store", 2), ("store", 2), (role, 2)]


async def test_r2_an_epoch_is_stored_while_an_earlier_role_change_is_under_way(scene):
    scene.holds.clear()
    scene.runner.perform(ev.BecomeSlave(view(2)))
    await scene.begun.wait()
    scene.runner.perform(ev.BecomeSlave(view(3)))
    await scene.epochs.stored(3)
    assert scene.stored[-1] == 3 and ("slave", 3) not in scene.calls
    scene.holds.set()
    await scene.idle()
    assert ("slave", 3) in scene.calls


async def test_r11_outcomes_of_proposals_of_an_older_role_do_not_reach_the_new_one(scene):
    """They would hit the new master's first proposal. What the leases and the dead are, still
    counts."""
    scene.holds.clear()
    scene.runner.perform(ev.BecomeMaster(view(2)))
    while ("master", 2) not in scene.calls:  # noqa: ASYNC110  the runner's task begins it
        await asyncio.sleep(0)
    for effect in (
        ev.AdoptView(view(2, 2)),
        ev.ProposalRefused(2006, "refused"),
        ev.ProposalUnknown(),
        ev.LeaseChanged(False),
        ev.SetDead(frozenset({3})),
    ):
        scene.runner.perform(effect)
    scene.runner.perform(ev.BecomeMaster(view(4)))
    scene.holds.set()
    await scene.idle()
    told = [call for call in scene.calls if call[0] != "store"]
    assert told == [("master", 2), ("lease", False), ("dead", 3), ("master", 4)]
    assert scene.runner.delivered_key == (4, 1)


async def test_r54_a_call_that_fails_behind_a_role_change_holds_back_no_later_one(scene):
    reported: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(context["exception"])
    )
    error = ValueError("no such replica")
    scene.set_dead = Mock(side_effect=error)
    scene.holds.clear()
    scene.runner.perform(ev.BecomeSlave(view(2)))
    await scene.begun.wait()
    scene.runner.perform(ev.SetDead(frozenset({3})))
    scene.runner.perform(ev.LeaseChanged(False))
    scene.holds.set()
    await scene.idle()
    assert (scene.calls[-1], reported) == (("lease", False), [error])


async def test_attempts_to_become_master_count_within_one_epoch(scene):

    async def fail(master_epoch: int) -> None:
        scene.fails.append(BROKEN)
        scene.runner.perform(ev.BecomeMaster(view(master_epoch)))
        await scene.idle()

    for _ in range(MASTER_ATTEMPTS_MAX - 1):
        await fail(2)
    for _ in range(MASTER_ATTEMPTS_MAX - 1):
        await fail(3)
    assert scene.fatal == []
    await fail(3)
    assert scene.fatal == [BROKEN]


async def test_r45_a_master_without_room_gives_way_and_never_ends(scene):
    for _ in range(2 * MASTER_ATTEMPTS_MAX):
        scene.fails.append(FULL)
        scene.runner.perform(ev.BecomeMaster(view(2)))
        await scene.idle()
    assert (scene.no_room, scene.fatal) == (2, [])
    assert scene.failed == [2] * 2 * MASTER_ATTEMPTS_MAX


async def test_r2_without_a_thread_to_store_its_epoch_a_change_fails_until_there_is_one(scene):
    with no_new_threads():
        scene.runner.perform(ev.BecomeSlave(view(2)))
        await scene.idle()
    assert scene.failed == [2] and scene.calls == []
    scene.runner.perform(ev.BecomeSlave(view(2)))
    await scene.idle()
    assert scene.calls[-1] == ("slave", 2) and scene.stored == [2]
