"""R37 between replicas: a cut that met a full disk is finished before anything else is confirmed.

Each of these scenarios lost what both replicas, or the new master alone, had confirmed.
"""

import asyncio
import os
import re
from contextlib import suppress

import pytest
from failing_disk import failing

from batonmq.replicas_manager.events import BecomeMaster
from batonmq.replicas_manager.role_runner import MASTER_ATTEMPTS_MAX, EpochStore, RoleRunner
from batonmq.store.errors import StoreFailedError
from tests.ha.conftest import until

pytestmark = pytest.mark.usefixtures("disk_without_waits")


async def crash(node):
    """The process ends as one does whose store failed; nothing more is written."""
    node.up = False
    node.fatal.clear()
    await node.ha.close()
    node.store.close()


async def diverged_pair(group, tail):
    """1 led epoch 1 and has `tail` messages that no one confirmed; 2 has not heard of them."""
    one, two = await group.add(1), await group.add(2)
    await group.elect(one, 1, 2)
    one.put(3)
    await group.caught_up(one, two)
    await two.ha.stand_down()
    end = one.put(tail)
    await until(lambda: one.store.log.flushed_offset == end)  # or the thread meets the full disk
    return one, two, end


async def test_r37_a_full_disk_refuses_the_cut_before_anything_is_changed(group):
    """1. 2 leads; 1 cannot keep its tail aside, the disk is full: it follows no one. 2. 2 dies, 1
    is elected, a member with all that is confirmed, its tail included. 3. 400 messages are
    confirmed. 4. 1 is killed and started: they are all there."""
    one, two, tail_end = await diverged_pair(group, 300)
    with failing("pwrite *.tail* ENOSPC"):
        await group.elect(two, 1, 2)
        await until(lambda: one.diverged)
    assert "the disk is full" in one.diverged[0]
    assert not one.fatal and not (one.root / "truncation.intent").exists()
    assert not list((one.root / "truncated").iterdir())
    assert one.store.max_phy_offset == tail_end and two.confirm_offset < tail_end
    await two.stop()
    await group.elect(one, 1, others=False)
    end = one.put(400)
    await until(lambda: one.store.confirm_offset >= end)
    await one.ha.close()
    one.store.abandon()
    await one.start()
    await group.elect(one, 1, others=False)
    await until(lambda: one.store.confirm_offset == end)
    assert one.readable == 703


@pytest.mark.parametrize("n", range(0, 40, 2))
async def test_r37_a_replica_whose_cut_failed_follows_nobody_and_leads_nothing(group, n):
    """1. 2 leads; the cut of 1 fails at its n-th change behind the copy. 2. 1 acks nothing to 2, so
    2 confirms nothing. 3. 2 dies, 1 is elected, and does not lead. 4. 1 ends and starts: the cut
    is done, 1 follows, and what both confirm is there after one more restart."""
    one, two, _ = await diverged_pair(group, 300)
    common = two.store.max_phy_offset
    with failing(f"changes *b1/* ENOSPC after {n} once") as struck:
        await group.elect(two, 1, 2)
        await until(lambda: one.fatal or one.diverged or one.is_following)
    assert one.is_following or struck
    if one.fatal:
        end = two.put(5)
        for view in (group.view, group.view):
            with pytest.raises(StoreFailedError):
                await one.ha.change_to_slave(view)
        with pytest.raises(StoreFailedError):
            await group.elect(one, 1, 2, others=False)
        for _ in range(20):
            await asyncio.sleep(0)
        assert two.store.confirm_offset == common
        await crash(one)
        await one.start()
        await group.elect(two, 1, 2)
    else:
        one.ha.dial_now()
        end = two.put(5)
    await until(lambda: one.store.confirm_offset == end == two.store.confirm_offset)
    await group.restart(one)
    assert (one.store.max_phy_offset, one.readable) == (end, 8)
    assert one.log_bytes() == two.log_bytes()


@pytest.mark.parametrize("n", range(0, 40, 2))
async def test_r37_becoming_master_is_not_tried_again_over_an_unfinished_cut(group, n):
    """1. The master dies in the middle of a frame. 2. 1 is elected; its cut of the half record
    fails at the n-th change, and it is told again and again to become master. 3. Either nothing had
    changed and it leads, or its process ends: what it confirms then is there after a restart."""
    two, one = await group.add(2), await group.add(1)
    await group.elect(two, 1, 2)
    two.put(4)
    await group.caught_up(two, one)
    half = two.store.max_phy_offset
    await one.ha.stand_down()
    end = two.put(1)
    one.store.slave_log.append_replicated(half, bytes(two.store.log.view(half, 100)))
    await two.stop()
    failed = []
    runner = RoleRunner(
        Actions(one), None, EpochStore(print, 9, print), failed.append, one.fatal.append
    )
    view = group.next_view(one, 1)
    with failing(f"changes *b1/* ENOSPC after {n} once"):
        for _ in range(MASTER_ATTEMPTS_MAX):
            runner.perform(BecomeMaster(view))
            assert runner._task is not None
            await runner._task
    if one.ha.sync_state is None:
        assert one.fatal and failed
        await crash(one)
        await one.start()
        await group.elect(one, 1, others=False)
    end = one.put(50)
    await until(lambda: one.store.confirm_offset == end)
    await group.restart(one)
    assert (one.store.max_phy_offset, one.readable) == (end, 54)


class Actions:
    """The HA side of `RoleActions`."""

    def __init__(self, node):
        self._node = node

    async def become_master(self, view, durable):
        await self._node.ha.change_to_master(view)
        await durable


REPORTED = re.compile(
    r"cannot follow the master, the disk is full: \[Errno 28\] No space left on device: '\S+'"
)


@pytest.mark.parametrize("n", range(0, 63, 3))
async def test_r27_a_new_beginning_that_fails_anywhere_is_made_good(group, n):
    """1. 2 was away until its place in the log expired. 2. Its new beginning fails at the n-th
    change of its disk. 3. It tries again, or its process ends and starts: it catches up."""
    group.segment_size = 4096
    one, two = await group.add(1), await group.add(2)
    await group.elect(one, 1)
    await group.follow(two)
    one.put(5)
    await group.caught_up(one, two)
    await two.stop()
    one.ha.set_dead(frozenset({2}))
    await until(lambda: one.ha.required_set == {1})
    while one.store.max_phy_offset <= 8192:
        one.put(1)
    os.utime(one.root / "commitlog" / f"{0:020d}", (0, 0))
    assert one.store.expirer.clean_expired(manual=True) == 1
    one.ha.set_dead(frozenset())
    await two.start()
    with failing(f"changes *b2/* {'EIO' if n % 2 else 'ENOSPC'} after {n} once"):
        with suppress(OSError, StoreFailedError):
            await group.follow(two)
        await until(lambda: two.fatal or two.store.confirm_offset == one.store.max_phy_offset)
    if two.fatal:
        await crash(two)
        await two.start()
        await group.follow(two)
    await group.caught_up(one, two)
    await group.restart(two)
    assert two.store.min_phy_offset == 4096
    assert all(map(REPORTED.match, two.diverged)), two.diverged
