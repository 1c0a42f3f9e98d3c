"""Progress of groups where acknowledged messages were cut, and where a commit would not last."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from lone_broker import Rig, free_port, lone_broker, make_group, until

from batonmq.broker.config import BrokerConfig, BrokerSections, ReplicasConfig
from batonmq.broker.replication.role_actions import RoleActions
from batonmq.broker.service import BrokerService
from batonmq.broker.tables import offset_clamp
from batonmq.broker.tables.offset_clamp import OffsetClamp, PositionReport, commit_refusal
from batonmq.ha.config import HAConfig
from batonmq.protocol.codes import ResponseCode as Code
from batonmq.protocol.role_view import RoleView
from batonmq.protocol.topic_name import TRANS_GROUP, TRANS_HALF_TOPIC
from batonmq.runtime.turns import AT_ONCE
from batonmq.store.config import StoreConfig
from batonmq.store.store_files import abort_path
from batonmq.store.suspicion import RunMark

AFTER_UNCLEAN = RoleView("C", "broker-a", 2, master_epoch=5, unclean_epoch=5)


async def five_messages(rig: Rig) -> None:
    """Queue 0 of T ends at 5. g had consumed 1,000 of it, h 3, and k 10 of a topic unknown here."""
    for _ in range(5):
        assert (await rig.send()).code == 0
    offsets = rig.service.tables.offsets
    offsets.commit("g", "T", 0, 1_000)
    offsets.commit("g", "T", 1, 7)
    offsets.commit("h", "T", 0, 3)
    offsets.commit("k", "Gone", 2, 10)
    offsets.set_state_version(4)


async def test_r44_offsets_above_the_end_of_their_queue_go_back_to_it_once(rig, caplog):
    await five_messages(rig)
    offsets = rig.service.tables.offsets
    clamp = OffsetClamp(rig.service.tables, rig.service.store)
    before, changes = offsets.table["T@g"], offsets.change_count
    rig.service.tables.delays.set_all({1: 9})
    assert before == {0: 1_000, 1: 7}
    assert await clamp.for_view(RoleView("C", "broker-a", 2, master_epoch=9)) == 0
    caplog.clear()
    assert await clamp.for_view(AFTER_UNCLEAN) == offsets.lowered == 3
    of_clients = {key: at for key, at in offsets.table.items() if "RMQ_SYS" not in key}
    assert of_clients == {"T@g": {0: 5, 1: 0}, "T@h": {0: 3}, "Gone@k": {2: 0}}
    assert offsets.change_count > changes, "slaves fetch it again"
    assert rig.service.tables.delays.table == {1: 0}, "no delayed message waits there"
    assert offsets.writes_due(), "it is stored"
    logged = [record.getMessage() for record in caplog.records]
    assert "consumer_offsets_clamped group=g topic=T queues=2 messages=1002" in logged
    # Offsets that the table takes in that epoch are within its queues: none is checked again.
    offsets.set_state_version(5)
    offsets.commit("h", "T", 0, 77)
    assert await clamp.for_view(AFTER_UNCLEAN) == 0
    assert offsets.query("h", "T", 0) == 77


@pytest.mark.parametrize("is_clean", [True, False])
async def test_r44_offsets_above_a_log_that_a_power_failure_shortened_go_back_to_its_end(
    tmp_path, is_clean
):
    """Tables are synced by themselves, so they may have the effects of messages that the log lost.
    New messages get these offsets: a group that is away meanwhile would skip them."""
    async with lone_broker(tmp_path) as rig:
        await five_messages(rig)
        rig.service.tables.delays.set_all({1: 9})
    if not is_clean:
        RunMark("of the boot before", acks_flushed=False).write(abort_path(tmp_path))
    async with lone_broker(tmp_path) as rig:
        tables = rig.service.tables
        assert tables.offsets.query("g", "T", 0) == (1_000 if is_clean else 5)
        assert tables.offsets.query("h", "T", 0) == 3
        assert tables.delays.table == {1: 9 if is_clean else 0}
        assert tables.offsets.lowered == (0 if is_clean else 3)


async def test_r44_the_half_of_one_ended_transaction_is_read_again(rig, monkeypatch):
    monkeypatch.setattr(offset_clamp, "queue_end", lambda *_: 9)
    offsets = rig.service.tables.offsets
    offsets.commit(TRANS_GROUP, TRANS_HALF_TOPIC, 0, 1)
    await OffsetClamp(rig.service.tables, rig.service.store).for_view(AFTER_UNCLEAN)
    assert offsets.query(TRANS_GROUP, TRANS_HALF_TOPIC, 0) == 0


async def test_r44_a_large_table_does_not_hold_up_the_loop(rig):
    offsets = rig.service.tables.offsets
    known = len(offsets.table)  # the broker's own progress comes first
    for number in range(3 * AT_ONCE):
        offsets.commit(f"g{number}", "T", 0, 9)
    clamp = OffsetClamp(rig.service.tables, rig.service.store)
    task = asyncio.get_running_loop().create_task(clamp.run())
    await asyncio.sleep(0)
    lowered = sum(offsets.table[f"T@g{n}"][0] == 0 for n in range(3 * AT_ONCE))
    assert lowered == AT_ONCE - known
    assert await task == 3 * AT_ONCE


def actions_of(rig: Rig, report: Any, change_to_master: Any) -> RoleActions:
    service = rig.service
    ha = Mock(required_set_whole=True, change_to_master=change_to_master)
    ha.change_to_slave = AsyncMock()
    return RoleActions(service.path, ha, service.tables, Mock(), Mock(), report)


async def test_r44_a_master_elected_uncleanly_lowers_them_before_it_opens_and_tells_it(rig):
    await five_messages(rig)
    service = rig.service
    offsets, gate = service.tables.offsets, service.path.gate
    reports: list[tuple[str, dict[str, Any]]] = []

    async def change_to_master(view: RoleView) -> int:
        if view == AFTER_UNCLEAN:  # only after this it is known where the queues end
            assert offsets.query("g", "T", 0) == 1_000
        return service.store.max_phy_offset

    async def durable() -> None:
        assert (offsets.query("g", "T", 0), gate.is_master) == (5, False)
        assert offsets.master_epoch == 4, "a crash here leaves the rest to the next start"

    actions = actions_of(rig, lambda kind, **f: reports.append((kind, f)), change_to_master)
    await actions.become_master(AFTER_UNCLEAN, durable())
    assert gate.is_master and gate.after_unclean and offsets.master_epoch == 5
    assert (reports[-1][0], reports[-1][1]["offsetsClamped"]) == ("opened", 3)
    assert offsets.lowered == 3
    # A consumer that ran on may commit what it held of then when the next master has opened.
    later = RoleView("C", "broker-a", 2, master_epoch=6, unclean_epoch=5)
    await actions.become_master(later, asyncio.sleep(0))
    assert gate.is_master and gate.after_unclean
    above, at_the_end = PositionReport("g", "T", 0, 6), PositionReport("g", "T", 0, 5)
    assert commit_refusal(gate, service.store, offsets, above) is not None
    assert commit_refusal(gate, service.store, offsets, at_the_end) is None
    assert "offsetsClamped" not in reports[-1][1]


async def test_r44_a_slave_lowers_its_own_before_it_follows_such_a_master(rig):
    """What the new master does not know of stays in its table: it may be elected some day."""
    await five_messages(rig)
    actions = actions_of(rig, Mock(), AsyncMock())
    await actions.become_slave(AFTER_UNCLEAN)
    assert rig.service.tables.offsets.query("g", "T", 0) == 5


async def test_r44_a_replica_that_cuts_its_log_lowers_what_it_had_of_it(rig):
    await five_messages(rig)
    actions = actions_of(rig, Mock(), AsyncMock())
    await actions.log_truncated()
    assert rig.service.tables.offsets.query("g", "T", 0) == 5
    assert actions._slave_sync.fetch_offsets_again.called


async def test_r44_a_cut_of_the_log_reaches_the_offsets(tmp_path):
    sections = BrokerSections(
        BrokerConfig(listen_port=free_port()),
        StoreConfig(store_path_root_dir=str(tmp_path)),
        HAConfig(),
        ReplicasConfig(controller_grpc_addr="127.0.0.1:1"),
    )
    service = BrokerService(sections, Mock())
    service.store.open()
    offsets = service.tables.offsets
    offsets.commit("g", "T", 0, 1_000)
    service.replication.on_truncated(900, 500)
    await until(lambda: offsets.query("g", "T", 0) == 0)
    assert service.status.table()["consumerOffsetsClamped"] == "1"
    await service.close()


async def test_r44_a_position_above_the_end_is_neither_committed_nor_skipped_from(rig):
    """A consumer that lived through the election is at 1,000. 1. Its group is set back to 5. 2. Two
    new messages come. 3. It must not commit 1,000, and continues at 5, not behind the new ones."""
    await five_messages(rig)
    offsets, gate = rig.service.tables.offsets, rig.service.path.gate
    await OffsetClamp(rig.service.tables, rig.service.store).for_view(AFTER_UNCLEAN)
    for _ in range(2):
        assert (await rig.send()).code == 0
    # In an epoch like any other it is taken as RocketMQ takes it.
    moved = await rig.pull(offset=1_000)
    assert (moved.code, moved.ext["nextBeginOffset"]) == (Code.PULL_OFFSET_MOVED, "7")
    gate.after_unclean = True
    await make_group(rig, "h")
    offsets.commit("h", "T", 0, 0)
    for group, at in (("g", "5"), ("h", "0")):
        moved = await rig.pull(offset=1_000, group=group)
        assert (moved.code, moved.ext["nextBeginOffset"]) == (Code.PULL_OFFSET_MOVED, at)
    refused = await rig.commit(1_000)
    assert refused.code == Code.INVALID_PARAMETER
    assert "offset 1000 of T queue 0 is above its end, 7" in (refused.remark or "")
    await rig.pull(offset=5, commit=1_000)
    assert offsets.query("g", "T", 0) == 5
    assert (await rig.commit(7)).code == 0
    assert offsets.query("g", "T", 0) == 7


async def test_r31_r36_a_master_that_is_cut_off_commits_nothing_but_serves_what_is_confirmed(rig):
    """No slave fetches such a commit, and the offsets of its successor replace it."""
    await five_messages(rig)
    offsets, gate = rig.service.tables.offsets, rig.service.path.gate
    await make_group(rig, "h")
    gate.update(lease=False, required_set_whole=False)
    refused = await rig.commit(4, group="h")
    assert refused.code == Code.SERVICE_NOT_AVAILABLE
    assert "holds no lease" in (refused.remark or "")
    found = await rig.pull(offset=0, commit=4, group="h")
    assert found.code == 0 and found.body
    assert offsets.query("h", "T", 0) == 3
    # Without a lease, but with its whole set, it takes writes (R36).
    gate.update(lease=False, required_set_whole=True)
    assert (await rig.commit(4, group="h")).code == 0
    await rig.pull(offset=0, commit=5, group="h")
    assert offsets.query("h", "T", 0) == 5
