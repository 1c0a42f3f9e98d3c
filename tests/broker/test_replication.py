"""Replication between its parts: when it hands over, what it tells, what it leaves at the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock

from lone_broker import Rig, run_with_broker, until

from batonmq.broker.replication.replication import FULL_MS, HAND_OVER_AGAIN_MS
from batonmq.broker.write.pending_acks import SLICE
from batonmq.protocol.codes import (
    HA_ADDRESS_FIELD,
    INCARNATION_FIELD,
    LOG_ID_FIELD,
    ResponseCode,
)
from batonmq.protocol.role_view import Replica
from batonmq.remoting.headers import SendReplies

NOW_MS = 1_000_000
FULL = "more than 90 % of it is used"


@contextlib.contextmanager
def managed(rig: Rig) -> Iterator[tuple[AsyncMock, Callable[[int], None]]]:
    """As in controller mode; the broker's own ticks are off, the second is called for one."""
    replication = rig.service.replication
    tick = replication.tick
    manager = AsyncMock(lease_valid=lambda now_ms: True, acks_changed=Mock())
    replication.manager = manager
    replication.tick = lambda now_ms: None  # type: ignore[method-assign]
    yield manager, tick
    replication.manager = None


async def handed(rig: Rig, tick: Callable[[int], None], now_ms: int) -> int:
    """How often it was handed over after a tick at `now_ms`."""
    replication, path = rig.service.replication, rig.service.path
    clock_ms, path.clock_ms = path.clock_ms, lambda: now_ms
    tick(now_ms)
    await until(lambda: not replication._tasks)
    path.clock_ms = clock_ms
    assert replication.manager is not None
    return replication.manager.hand_over.await_count  # type: ignore[attr-defined,no-any-return]


def test_r45_a_hand_over_that_failed_is_tried_again_soon_and_one_that_did_not_is_not(
    tmp_path: Path,
) -> None:
    async def play(rig: Rig) -> None:
        with managed(rig) as (manager, tick):
            rig.service.store.room.set_watermark(FULL)
            manager.hand_over.side_effect = [False, True, True]
            assert await handed(rig, tick, NOW_MS) == 0
            first = NOW_MS + FULL_MS
            assert await handed(rig, tick, first) == 1
            again = first + FULL_MS
            assert await handed(rig, tick, again - 1) == 1
            assert await handed(rig, tick, again) == 2
            assert await handed(rig, tick, again + HAND_OVER_AGAIN_MS - 1) == 2, "it was handed"
            assert await handed(rig, tick, again + HAND_OVER_AGAIN_MS) == 3
            rig.service.store.room.set_watermark("")

    run_with_broker(tmp_path, play)


def test_only_a_master_hands_over(tmp_path: Path) -> None:
    """Neither for want of room (R45) nor because it stops: it is another one's role (R33)."""

    async def play(rig: Rig) -> None:
        with managed(rig) as (manager, tick):
            rig.service.path.gate.follow(1, "127.0.0.1:1")
            rig.service.store.room.set_watermark(FULL)
            for now_ms in (NOW_MS, NOW_MS + FULL_MS, NOW_MS + 2 * FULL_MS):
                assert await handed(rig, tick, now_ms) == 0
            await rig.service.replication.hand_over()
            assert manager.hand_over.await_count == 0
            rig.service.path.gate.open()
            await rig.service.replication.hand_over()
            assert manager.hand_over.await_count == 1
            rig.service.store.room.set_watermark("")

    run_with_broker(tmp_path, play)


def test_r36_a_master_that_lost_lease_and_slaves_refuses_writes_by_the_next_tick(
    tmp_path: Path,
) -> None:
    """Nothing comes that would say so: time passes."""

    async def play(rig: Rig) -> None:
        with managed(rig) as (manager, tick):
            ha = rig.service.replication.ha = Mock(required_set_whole=False)
            tick(NOW_MS)
            assert (await rig.send()).code == ResponseCode.SUCCESS
            manager.lease_valid = lambda now_ms: False
            tick(NOW_MS)
            assert (await rig.send()).code == ResponseCode.SERVICE_NOT_AVAILABLE
            ha.required_set_whole = True
            tick(NOW_MS)
            assert (await rig.send()).code == ResponseCode.SUCCESS
            rig.service.replication.ha = None

    run_with_broker(tmp_path, play)


def test_r33_a_switch_hears_of_each_confirmation_while_it_drains(tmp_path: Path) -> None:
    async def play(rig: Rig) -> None:
        with managed(rig) as (manager, _):
            rig.service.replication.on_confirm_offset(0)
            assert not manager.acks_changed.called
            rig.service.path.hold.begin()
            rig.service.replication.on_confirm_offset(0)
            manager.acks_changed.assert_called_once_with()
            rig.service.path.hold.release()

    run_with_broker(tmp_path, play)


def test_a_broker_that_stops_answers_all_that_waits_and_all_that_is_held(tmp_path: Path) -> None:
    """More than a turn answers; what was held has not been stored, or waits like the others."""

    async def play(rig: Rig) -> None:
        await rig.send()
        path, heard = rig.service.path, []
        path.hold.begin()
        held = asyncio.ensure_future(rig.send())
        await until(lambda: len(path.hold) == 1)
        frame, sink = SendReplies("r").ok(1, b"00", 0, 1, b"K"), Mock(write=heard.append)
        for _ in range(2 * SLICE + 1):
            path.acks.add(1 << 60, path.clock_ms(), sink, frame)
        replication = rig.service.replication
        replication.classic, classic = None, replication.classic
        await replication.close("test")
        assert len(heard) == 2 * SLICE + 1 and len(path.hold) == 0
        replication.classic = classic
        await held

    run_with_broker(tmp_path, play)


def test_r41_1007_tells_which_process_this_is_and_where_its_ha_listens(tmp_path: Path) -> None:
    """A slave whose controllers do not know the HA address finds it here."""

    async def play(rig: Rig) -> None:
        with managed(rig) as (manager, _):
            manager.broker_id, manager.incarnation = 3, "i3"
            told = rig.service.replication.epoch_cache()
            assert told is not None and told[0].broker_id == 3
            assert told[1] == {
                INCARNATION_FIELD: "i3",
                LOG_ID_FIELD: rig.service.store.log.log_id,
                HA_ADDRESS_FIELD: rig.service.config.ha_address,
            }

    run_with_broker(tmp_path, play)


def test_the_other_members_are_those_with_an_address_and_another_id(tmp_path: Path) -> None:
    async def play(rig: Rig) -> None:
        replication = rig.service.replication
        classic, replication.classic = replication.classic, None
        with managed(rig) as (manager, _):
            own, other = Replica(3, address="h3:1"), Replica(1, address="h1:1")
            manager.broker_id = 3
            manager.view = Mock(replicas=(own, other, Replica(2)))
            assert replication.other_members() == ["h1:1"]
        replication.classic = classic

    run_with_broker(tmp_path, play)


def test_r44_a_good_bye_comes_after_the_end_of_what_replicates(tmp_path: Path) -> None:
    """Controllers judge by what a process reported before it said that it ends."""

    async def play(rig: Rig) -> None:
        replication, calls = rig.service.replication, Mock()
        ha, manager = replication.ha, replication.manager
        replication.ha, replication.manager = AsyncMock(), AsyncMock()
        calls.attach_mock(replication.ha.close, "ha_closed")
        calls.attach_mock(replication.manager.end, "takes_no_view")
        calls.attach_mock(replication.manager.close, "good_bye")
        await replication.close("planned stop")
        replication.ha, replication.manager = ha, manager
        names = [name for name, _, _ in calls.mock_calls]
        assert names == ["takes_no_view", "ha_closed", "good_bye"]

    run_with_broker(tmp_path, play)
