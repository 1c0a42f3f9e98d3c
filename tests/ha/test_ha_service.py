"""Three real stores and services over loopback, role changes by hand.

The scenarios of Java's AutoSwitchHATest, and the promises they leave out.
"""

import pytest

from protocol.errors import FencedError


def test_all_ack_in_sync_state_set(run_group, wait_until):
    """A slave catches up, is proposed, enters the set; messages are then on both (G1)."""

    async def scenario(group):
        one, two = await group.add(1), await group.add(2)
        await group.elect(one)
        one.put(10)
        assert one.ha.confirm_offset == one.store.max_phy_offset
        await wait_until(lambda: one.ha.in_sync_count == 2)
        one.put(10)
        await group.level(one, two)
        assert one.readable == two.readable == 20
        assert one.epochs == two.epochs == [(1, 0)]

    run_group(scenario)
