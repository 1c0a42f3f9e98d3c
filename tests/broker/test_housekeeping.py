"""What a broker does by itself about who falls behind."""

import logging
from unittest.mock import AsyncMock

from heartbeats import heartbeat
from lone_broker import Rig, expire_all_but_last, lone_broker, run_with_broker

from batonmq.broker.housekeeping import PROTECT_MS, REPORT_MS
from batonmq.protocol.bodies import HAConnectionRuntimeInfo, HARuntimeInfo
from batonmq.protocol.layout import UNIT_SIZE
from tests.shared.failing_disk import failing


async def test_a_connected_group_that_is_far_behind_is_cut_off(tmp_path):
    """A group that keeps up, is not connected, or has nothing to read, may consume."""
    async with lone_broker(tmp_path, broker={"consumer_fallbehind_threshold": 8000}) as rig:
        for _ in range(8):
            await rig.send("T", bytes(1000))
        for group, offset in (("slow", 1), ("quick", 7), ("done", 8), ("away", 0)):
            if group != "away":
                await rig.ask(34, body=heartbeat(f"{group}@1", "T", group=group).encode())
            await rig.pull(group=group, commit=offset)
            await rig.commit(offset, group=group)
        await rig.service.housekeeping.protect_broker()
        groups = rig.service.tables.groups.table
        allowed = {name: groups[name].consume_enable for name in ("slow", "quick", "done", "away")}
        assert allowed == {"slow": False, "quick": True, "done": True, "away": True}
        assert (await rig.pull(group="slow", offset=1)).code == 16
        assert (await rig.pull(group="quick", offset=7)).code == 0
        end = rig.service.store.max_phy_offset
        await rig.service.housekeeping.protect_broker()
        assert rig.service.store.max_phy_offset == end, "it is cut off once"


async def test_r45_without_disk_space_no_group_is_cut_off(tmp_path):
    """Its record cannot be put, or its queue not be read without a descriptor: that is tried again,
    and does not end the process."""
    async with lone_broker(tmp_path, broker={"consumer_fallbehind_threshold": 1}) as rig:
        await rig.send("T", bytes(1000))
        await rig.send("T", bytes(1000))
        await rig.ask(34, body=heartbeat("slow@1", "T", group="slow").encode())
        await rig.commit(0, group="slow")
        groups = rig.service.tables.groups.table
        rig.service.store.appender.pause("no disk space")
        await rig.service.housekeeping.protect_broker()
        assert groups["slow"].consume_enable
        rig.service.store.appender.pause("")
        for queue in rig.service.store._files.consume_queues.queues():
            queue.write_back()
        with failing("pread * EMFILE"):
            await rig.service.housekeeping.protect_broker()
        assert groups["slow"].consume_enable, "nothing is known of a queue that cannot be read now"
        await rig.service.housekeeping.protect_broker()
        assert not groups["slow"].consume_enable


async def test_it_is_done_every_three_minutes_where_it_is_wanted(rig):
    housekeeping = rig.service.housekeeping
    housekeeping.protect_broker = look = AsyncMock()
    now_ms = rig.service.path.clock_ms()
    await housekeeping.tick(now_ms + PROTECT_MS)
    assert look.await_count == 0
    assert (await rig.ask(25, body=b"disableConsumeIfConsumerReadSlowly=true")).code == 0
    await housekeeping.tick(now_ms + 2 * PROTECT_MS - 1)
    await housekeeping.tick(now_ms + 2 * PROTECT_MS)
    await housekeeping.tick(now_ms + 2 * PROTECT_MS + 1)
    assert look.await_count == 1


def test_each_minute_it_tells_what_waits_and_who_is_behind(tmp_path, caplog):
    async def play(rig: Rig) -> None:
        slaves = [
            HAConnectionRuntimeInfo(addr="10.0.0.2:1", diff=77),
            HAConnectionRuntimeInfo(addr="10.0.0.3:1"),
        ]
        housekeeping = rig.service.housekeeping
        housekeeping._slaves = lambda: HARuntimeInfo(ha_connection_info=slaves)
        now_ms = rig.service.path.clock_ms()
        await housekeeping.tick(now_ms + REPORT_MS)
        await housekeeping.tick(now_ms + REPORT_MS + 1)

    with caplog.at_level(logging.INFO, "batonmq.broker.housekeeping"):
        run_with_broker(tmp_path, play)
    reported = [r.message for r in caplog.records if r.name == "batonmq.broker.housekeeping"]
    assert reported == [
        "water_marks sends=0 held_sends=0 held_pulls=0 held_pops=0 relayed=0",
        "slave_behind address=10.0.0.2:1 bytes=77",
    ]


async def test_r31_a_master_that_loses_its_role_meanwhile_stops_no_group(rig):
    await rig.send("T")
    await rig.ask(34, body=heartbeat("slow@1", "T", group="slow").encode())
    housekeeping = rig.service.housekeeping

    async def behind(*_: object) -> int:
        rig.service.path.gate.follow(2, "127.0.0.1:1")
        return 1 << 60

    housekeeping._behind = behind
    await housekeeping.protect_broker()
    assert rig.service.tables.groups.table["slow"].consume_enable


async def test_a_group_that_has_not_begun_is_behind_from_the_first_message_that_is_left(tmp_path):
    async with lone_broker(
        tmp_path,
        broker={"consumer_fallbehind_threshold": 500},
        mapped_file_size_consume_queue=2 * UNIT_SIZE,
    ) as rig:
        for _ in range(5):
            await rig.send("T", bytes(1000))
        expire_all_but_last(rig, "T")
        await rig.ask(34, body=heartbeat("slow@1", "T", group="slow").encode())
        rig.service.tables.offsets.commit("slow", "T", 0, 0)
        await rig.service.housekeeping.protect_broker()
        assert not rig.service.tables.groups.table["slow"].consume_enable
