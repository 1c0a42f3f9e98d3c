"""Role changes and acks of a broker: what waits is answered first, by whom it may be answered, and
what a master reports of it to the history.

`Rig` has a real WritePath, gate, hold and RoleActions; HA, tables and store only note calls.
"""

import asyncio
import os
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from lone_broker import lone_broker, until

from batonmq.broker.replication.role_actions import RoleActions
from batonmq.broker.tables.slave_sync import Followed
from batonmq.broker.write.pending_acks import SLICE
from batonmq.broker.write.write_path import MembersConfirm, OwnDiskConfirms, WritePath
from batonmq.protocol.role_view import Role, RoleView
from batonmq.remoting.headers import SendReplies

OTHER = RoleView(
    cluster_name="c",
    broker_name="b",
    master_broker_id=2,
    master_address="other:10911",
    master_ha_address="other:10912",
    master_incarnation="i2",
    master_epoch=4,
    sync_state_set_epoch=1,
    sync_state_set=frozenset({1, 2}),
)


class Rig:
    """A master of epoch 3; `steps` are calls of HA, store and tables in their order."""

    def __init__(self) -> None:
        self.now_ms = 10_000
        self.steps: list[Any] = []
        self.heard: list[tuple[int, str]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lease = False
        self.sink = Mock()
        store = Mock(confirm_offset=640, max_phy_offset=900)
        store.appender.end = 900
        store.end_turn.side_effect = lambda **whole: self.note("end_turn") or 900
        store.positions.put_if_due.return_value = False
        store.stop_writes.side_effect = lambda: self.note("stop_writes")
        self.path = WritePath(
            store, ack_wait_ms=3_000, sync_flush=False, clock_ms=lambda: self.now_ms
        )
        self.ha = Mock(required_set_whole=True)
        for name in ("change_to_master", "change_to_slave", "stand_down"):
            setattr(self.ha, name, self._ha_step(name))
        self.tables, self.sync, self.hooks = Mock(), Mock(), Mock()
        self.actions = RoleActions(
            self.path, self.ha, self.tables, self.sync, self.hooks, self._report
        )
        self.path.rule = MembersConfirm(
            self.path, self.ha, lambda now_ms: self.lease, self.actions.first_acked
        )
        self.path.gate.opening(3)
        self.path.acks.begin_epoch(3)
        self.path.gate.open()

    def _report(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def lease_is(self, valid: bool, now_ms: int) -> None:
        self.now_ms = now_ms
        self.actions.lease_changed(valid)

    def note(self, step: object) -> None:
        self.steps.append(step)

    def _ha_step(self, name: str) -> Any:
        async def step(view: RoleView | None = None) -> int:
            self.note((name, list(self.heard), self.path.gate.role))
            return 900

        return step

    def wait_for(self, end_offset: int) -> None:
        self.path.acks.add_waiter(
            end_offset, self.now_ms, lambda code, remark: self.heard.append((code, remark))
        )

    async def take_role(self, change: str) -> None:
        durable = (asyncio.sleep(0),) if change == "become_master" else ()
        await getattr(self.actions, change)(OTHER, *durable)


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize("change", ["become_slave", "become_master", "stand_down"])
async def test_r4_pending_writes_fail_before_truncation(rig, change):
    """And what was put in this turn is written before: the log must not grow behind HA's back."""
    rig.wait_for(700)
    await rig.take_role(change)
    (ha_step,) = [step for step in rig.steps if isinstance(step, tuple)]
    assert [code for code, _ in ha_step[1]] == [14]
    assert ha_step[2] is not Role.MASTER, "no ack can leave meanwhile"
    assert rig.steps.index("end_turn") < rig.steps.index(ha_step)
    rig.path.confirmed(10_000)
    assert len(rig.heard) == 1


def test_r27_a_master_expires_nothing_by_itself_once_it_knows_of_the_next_one(rig):
    """Its own role change waits for the disk, or does not come at all where it is stopping."""
    rig.actions.role_will_change(OTHER, master=False)
    rig.path.store.positions.end_mastership.assert_called_once_with()


def test_r4_an_ack_of_another_epoch_is_never_released(rig):
    rig.wait_for(700)
    rig.path.gate.master_epoch = 4
    rig.path.confirmed(900)
    assert rig.heard == []


def test_r4_a_broker_that_is_no_master_any_more_acknowledges_nothing(rig):
    rig.wait_for(700)
    rig.path.gate.leave(3, "other:1")
    rig.path.confirmed(900)
    assert rig.heard == []


async def test_r2_a_master_opens_after_its_role_is_durable(rig):
    durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    opening = asyncio.ensure_future(rig.actions.become_master(OTHER, durable))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not rig.path.gate.is_master
    durable.set_result(None)
    await opening
    assert rig.path.gate.is_master and rig.path.acks.master_epoch == 4
    rig.tables.topics.set_state_version.assert_called_once_with(4)
    rig.tables.offsets.set_state_version.assert_called_once_with(4)
    rig.sync.follow.assert_called_once_with(None)


def test_r8_after_a_stall_of_its_own_a_master_without_a_lease_writes_no_ack(rig):
    """1. The process stands still for 700 ms. 2. It finds its slaves' acks in its sockets, but
    another one may be master by now. 3. The lease is renewed: the reply leaves."""
    rig.path.confirmed(640)
    rig.wait_for(700)
    rig.now_ms += 700
    rig.path.confirmed(900)
    rig.path.tick(rig.now_ms)
    assert rig.heard == []
    rig.now_ms += 50
    rig.lease = True
    rig.path.store.confirm_offset = 900
    rig.path.tick(rig.now_ms)
    assert rig.heard == [(0, "")]


def test_r36_without_a_stall_no_lease_is_needed(rig):
    rig.path.confirmed(640)
    rig.wait_for(700)
    rig.now_ms += 300
    rig.path.confirmed(900)
    assert rig.heard == [(0, "")]


@pytest.mark.parametrize("whole", [True, False])
def test_r36_a_lease_that_comes_back_is_reported_with_its_absence_and_what_became_of_writes(
    rig, whole
):
    rig.ha.required_set_whole = whole
    rig.lease_is(False, 12_000)
    assert (rig.path.gate.refusal is None) == whole
    rig.lease_is(True, 12_750)
    assert rig.events == [("lease_back", {"awayMs": 750, "writesRefused": not whole})]
    rig.ha.required_set_whole = True
    rig.lease_is(False, 13_000)
    rig.lease_is(True, 13_100)
    assert rig.events[1:] == [("lease_back", {"awayMs": 100, "writesRefused": False})]


def test_a_lease_that_begins_with_the_role_did_not_come_back(rig):
    rig.lease_is(True, 11_500)
    rig.path.gate.follow(4)
    rig.lease_is(False, 11_600)
    rig.lease_is(True, 11_700)
    assert rig.events == []


def test_the_first_ack_is_reported_once_with_how_long_its_write_waited(rig):
    rig.path.confirmed(640)
    for end_offset in (700, 800):
        rig.path.acks.add(end_offset, rig.now_ms, Mock(), b"")
        rig.now_ms += 12
        rig.path.confirmed(end_offset)
    assert rig.events == [("first_ack", {"confirmOffset": 640, "waitedMs": 12})]


def test_r38_a_replica_that_lacks_queue_positions_reports_a_log_that_begins_behind_its_end(rig):
    """Controllers add no replica whose log begins behind the master's."""
    rig.path.store.positions.whole_from = 901
    assert rig.actions.log_facts().min_offset == 901


async def test_r38_an_idle_master_states_positions_but_not_while_it_drains(tmp_path):
    async with lone_broker(tmp_path) as rig:
        assert (await rig.send()).code == 0
        store, path = rig.service.store, rig.service.path
        end = store.confirm_offset
        path.hold.begin()
        store.positions.due_at = 0
        path.tick(path.clock_ms())
        path.end_turn()
        assert store.max_phy_offset == end, "the member that takes over waits for the last byte"
        path.hold.release()
        await until(lambda: store.confirm_offset > end)
        assert store.positions.due_at == 1 << 20, "the next segment"
        assert (await rig.send()).ext["queueOffset"] == "1"


def test_a_write_that_waited_too_long_says_where_it_is_missing(rig):
    rig.wait_for(700)
    rig.now_ms += 2_999
    rig.path.store.confirm_offset = 640
    for _ in range(2):
        rig.path.tick(rig.now_ms)
        rig.path.fail_late(rig.now_ms)
    assert rig.heard == []
    rig.now_ms += 1
    rig.path.fail_late(rig.now_ms)
    assert [code for code, _ in rig.heard] == [12]


@pytest.mark.parametrize("change", ["become_slave", "become_master", "stand_down"])
async def test_r33_a_role_that_is_taken_releases_the_held_sends(rig, change):
    """Else they wait for the limit of the hold, and their clients with them."""
    rig.path.hold.release = Mock()
    rig.path.hold.begin()
    await rig.take_role(change)
    rig.path.hold.release.assert_called_once_with()


def test_becoming_slave_the_old_masters_address_is_not_given_any_more(rig):
    asyncio.run(rig.actions.become_slave(OTHER))
    gate = rig.path.gate
    assert (gate.role, gate.master_epoch) == (Role.SLAVE, 4)
    assert gate.refusal is not None and gate.refusal.master_address == "other:10911"
    (followed,) = rig.sync.follow.call_args.args
    assert (followed.address, followed.master_epoch) == ("other:10911", 4)
    rig.tables.topics.set_state_version.assert_called_once_with(4)


@pytest.mark.parametrize("change", ["become_slave", "stand_down"])
def test_who_is_no_master_any_more_takes_no_puts_and_holds_no_pulls(rig, change):
    """Before HA begins: `role_left` answers the pulls that wait."""
    rig.hooks.role_left.side_effect = lambda: rig.note("role_left")
    asyncio.run(getattr(rig.actions, change)(OTHER))
    ha_step = next(step for step in rig.steps if isinstance(step, tuple))
    before = rig.steps[: rig.steps.index(ha_step)]
    assert {"stop_writes", "role_left"} <= set(before)


async def test_a_role_that_will_change_refers_clients_at_once(rig):
    """1. The view of another master comes. 2. Its own change waits for the disk; who waits here
    is refused at once, with the address of the new master."""
    rig.wait_for(700)
    rig.actions.role_will_change(OTHER, master=False)
    assert [code for code, _ in rig.heard] == [14]
    refusal = rig.path.gate.refusal
    assert refusal is not None and refusal.master_address == "other:10911"
    rig.actions.role_will_change(OTHER, master=True)
    assert rig.path.hold.active, "early sends wait until it opens"
    rig.path.hold.release()


def test_r44_a_new_slave_takes_no_offsets_while_its_own_are_set_back(rig):
    """What it fetches from the new master meanwhile would be set back with them."""

    async def for_view(view: RoleView) -> int:
        rig.note("clamped")
        return 0

    rig.actions._clamp = Mock(for_view=for_view)
    rig.sync.follow.side_effect = rig.note
    asyncio.run(rig.actions.become_slave(OTHER))
    at = rig.steps.index("clamped")
    followed = [step for step in rig.steps[:at] if step is None or isinstance(step, Followed)]
    assert followed == [None] and isinstance(rig.steps[at + 1], Followed)


async def test_r33_the_end_that_a_switch_drains_to_has_what_this_turn_put(rig):
    store: Any = rig.path.store

    def end_turn(*, whole: bool = True) -> int:
        store.max_phy_offset = 950
        return 950

    store.end_turn.side_effect = end_turn
    assert rig.actions.hold_sends() == 950
    rig.path.hold.release()


def test_r33_who_is_only_about_to_be_added_is_no_member_to_switch_to(rig):
    """Required already, recorded not yet: the controllers would refuse to elect it."""
    rig.ha.sync_state = Mock(recorded=frozenset({1}), required_set=frozenset({1, 2}))
    assert not rig.actions.switch_progress(2).member
    rig.ha.sync_state.recorded = frozenset({1, 2})
    assert rig.actions.switch_progress(2).member


def test_r36_a_broker_that_takes_no_writes_appends_no_record_of_its_own(rig):
    """Progress of delays, queue positions: the log decides what holds."""
    rig.path.gate.update(lease=False, required_set_whole=False)
    assert rig.path.put_system_record("progress", b"{}") == 900
    rig.path.store.appender.put_message.assert_not_called()


async def test_a_master_is_shown_to_be_one_when_all_of_its_log_is_confirmed(rig):
    """The store's log ends at 900 and is confirmed up to 640."""
    shown = asyncio.ensure_future(rig.path.still_master("locks"))
    await asyncio.sleep(0)
    rig.path.confirmed(899)
    await asyncio.sleep(0)
    assert not shown.done()
    rig.path.confirmed(900)
    await shown


async def test_r30_locks_count_from_the_moment_of_the_election(rig):
    await rig.take_role("become_master")
    rig.tables.locks.renew_all.assert_called_once_with(10_000)


def sync_flush_path() -> tuple[WritePath, list[int]]:
    """A master without controllers, and what those who wait for offset 100 hear."""
    store = Mock(confirm_offset=0, max_phy_offset=100)
    store.positions.put_if_due.return_value = False
    store.log.flushed_offset = 0
    path = WritePath(store, ack_wait_ms=3_000, sync_flush=True, clock_ms=lambda: 10_000)
    path.gate.opening(0)
    path.acks.begin_epoch(0)
    path.gate.open()
    heard: list[int] = []
    path.acks.add_waiter(100, 10_000, lambda code, remark: heard.append(code))
    return path, heard


@pytest.mark.parametrize("first", ["flushed", "held_by_slaves"])
def test_a_sync_master_acknowledges_what_is_on_its_own_disk_and_on_its_slaves(first):
    path, heard = sync_flush_path()
    path.rule = rule = OwnDiskConfirms(path, Mock(), waits=True)
    second = {"flushed": "held_by_slaves", "held_by_slaves": "flushed"}[first]
    getattr(rule, first)(100)
    assert heard == []
    getattr(rule, second)(99)
    assert heard == []
    getattr(rule, second)(100)
    assert heard == [0]


def test_r15_each_turn_asks_for_the_flush_that_its_writes_wait_for():
    path, _ = sync_flush_path()
    path.end_turn()
    path.store.background.request_flush.assert_called_once_with()


@pytest.mark.parametrize("flushed, code", [(99, 10), (100, 12)])
def test_a_late_write_is_answered_with_what_it_waits_for(flushed, code):
    path, heard = sync_flush_path()
    path.store.log.flushed_offset = flushed
    path.fail_late(13_000)
    assert heard == [code]


def test_r4_all_that_failed_is_answered_by_the_ticks_that_follow(rig):
    frame, sink = SendReplies("r").ok(1, b"00", 0, 1, b"K"), Mock()
    for _ in range(3 * SLICE):
        rig.path.acks.add(700, rig.now_ms, sink, frame)
    rig.path.acks.fail_all(14, "the role changed")
    while rig.path.fail_late(rig.now_ms):
        pass
    assert sink.write.call_count == 3 * SLICE


def test_a_classic_slave_shows_what_is_whole_and_not_what_is_flushed():
    path, heard = sync_flush_path()
    path.gate.follow(0, "master:1")
    path.flushed(100)
    path.store.advance_confirm_offset.assert_not_called()
    assert heard == []


def test_r42_tables_and_requests_follow_a_master_to_another_address(rig):
    """A replica of another history held the master's id for a while. The slaves followed the log of
    the master that came back, and asked the other replica for tables without end."""
    asyncio.run(rig.actions.become_slave(OTHER))
    rig.sync.followed = Followed("other:10911", 4)
    rig.sync.follow.reset_mock()
    rig.actions.master_moved(OTHER)
    rig.sync.follow.assert_not_called()
    rig.actions.master_moved(replace(OTHER, master_address="back:10911"))
    rig.sync.follow.assert_called_once_with(Followed("back:10911", 4))
    refusal = rig.path.gate.refusal
    assert refusal is not None and refusal.master_address == "back:10911"
    rig.sync.followed = None  # a master has no master
    rig.actions.master_moved(replace(OTHER, master_address="third:10911"))
    rig.sync.follow.assert_called_once()


@pytest.mark.parametrize("named_first", [True, False])
async def test_r38_a_master_that_is_elected_again_states_positions_and_lets_segments_expire(
    tmp_path, named_first
):
    """HA changes nothing of its store then. Not `named_first`: another one was named in between."""
    async with lone_broker(tmp_path, mapped_file_size_commit_log=8192) as rig:
        store = rig.service.store
        ha = Mock(required_set_whole=True)
        ha.change_to_master = AsyncMock(side_effect=lambda view: store.max_phy_offset)
        actions = RoleActions(rig.service.path, ha, rig.service.tables, Mock(), Mock(), Mock())
        actions.role_will_change(OTHER, master=named_first)
        await actions.become_master(OTHER, asyncio.sleep(0))
        stated = store.positions.may_expire_below
        for _ in range(30):
            assert (await rig.send(body=bytes(1000))).code == 0
        assert stated < store.positions.may_expire_below
        assert store.expirer.clean_expired(manual=True) == 0, "nothing is that old"
        for segment in sorted((tmp_path / "commitlog").glob("0*"))[:2]:
            os.utime(segment, (0, 0))
        assert store.expirer.clean_expired(manual=True) == 2
