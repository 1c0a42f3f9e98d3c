"""Replication between its parts: when it hands over, what it reports, what it leaves at the end."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from unittest.mock import AsyncMock, Mock

import pytest
from lone_broker import Rig, lone_broker, until
from msgspec import structs

from batonmq.auth.config import AuthConfig
from batonmq.auth.guard import Guard
from batonmq.broker.config import ReplicasConfig
from batonmq.broker.metrics import BrokerMetrics
from batonmq.broker.replication.controlled import FULL_MS, HAND_OVER_AGAIN_MS, ControllerReplication
from batonmq.broker.write.pending_acks import SLICE
from batonmq.ha.node_secret import Unproven
from batonmq.protocol.bodies import PROBLEMS_KEY, KVTable
from batonmq.protocol.codes import (
    HA_ADDRESS_FIELD,
    INCARNATION_FIELD,
    LOG_ID_FIELD,
    RequestCode,
    ResponseCode,
)
from batonmq.protocol.errors import DISK_FULL, BrokerRefusal, ConnectError, CorruptLogError
from batonmq.protocol.role_view import Replica, RoleView
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Processors
from batonmq.remoting.endpoint import RemotingClient
from batonmq.remoting.headers import SendReplies

NOW_MS = 1_000_000
FULL = "more than 90 % of it is used"


@contextlib.contextmanager
def managed(rig: Rig) -> Iterator[tuple[AsyncMock, ControllerReplication]]:
    """Replication of controller mode over the parts of this broker, and its ReplicasManager, which
    reaches no controller. Writes are confirmed as before."""
    service, rule = rig.service, rig.service.path.rule
    sections = dataclasses.replace(
        service.config, replicas=ReplicasConfig(controller_grpc_addr="127.0.0.1:1")
    )
    parts = service.path, service.tables, service.slave_sync, AsyncMock()
    replication = ControllerReplication(sections, *parts, Mock(), guard=None)
    manager = AsyncMock(lease_valid=lambda now_ms: True, acks_changed=Mock(), broker_id=1)
    replicas = Replica(1, "b1:1"), Replica(2, "b2:1"), Replica(3, "b3:1")
    members = frozenset({1, 2})
    manager.view = RoleView("C", "broker-a", 1, sync_state_set=members, replicas=replicas)
    replication.manager = manager
    service.path.rule = rule
    yield manager, replication


def status(**other: str) -> RemotingCommand:
    """A broker's status (28), with 89 % of its disk used unless `other` says more."""
    table = {"commitLogDiskRatio": "0.8900", "consumeQueueDiskRatio": "0.8900", **other}
    return RemotingCommand.request(0, body=KVTable(table=table).encode())


async def handed(rig: Rig, replication: ControllerReplication, now_ms: int) -> int:
    """How often it was handed over after a tick at `now_ms`."""
    path = rig.service.path
    clock_ms, path.clock_ms = path.clock_ms, lambda: now_ms
    replication.tick(now_ms)
    await until(lambda: not replication._tasks)
    path.clock_ms = clock_ms
    return replication.manager.hand_over.await_count


async def test_r45_a_hand_over_that_failed_is_tried_again_soon_and_one_that_did_not_is_not(rig):
    with managed(rig) as (manager, replication):
        rig.service.store.disk_space.set_watermark(FULL)
        replication._client.call.return_value = status()
        manager.hand_over.side_effect = [False, True, True]
        assert await handed(rig, replication, NOW_MS) == 0
        first = NOW_MS + FULL_MS
        assert await handed(rig, replication, first) == 1
        again = first + FULL_MS
        assert await handed(rig, replication, again - 1) == 1
        assert await handed(rig, replication, again) == 2
        assert await handed(rig, replication, again + HAND_OVER_AGAIN_MS - 1) == 2, "it was handed"
        assert await handed(rig, replication, again + HAND_OVER_AGAIN_MS) == 3
        assert manager.hand_over.await_args.args[1] == {2}
        rig.service.store.disk_space.set_watermark("")


@pytest.mark.parametrize(
    "answer",
    [
        ConnectError("b2:1", "no answer"),
        status(commitLogDiskRatio="0.8901"),
        status(consumeQueueDiskRatio="0.95"),
        status(commitLogDiskRatio=""),
        status(**{PROBLEMS_KEY: '["its disk is full: No space left on device"]'}),
    ],
)
async def test_r45_a_full_disk_hands_over_to_no_member_whose_disk_is_hardly_better(
    rig, answer, caplog
):
    """Members on one file system passed the mastership to and fro, for as long as it was full."""
    with managed(rig) as (_, replication):
        rig.service.store.disk_space.set_watermark(FULL)
        replication._client.call.side_effect = [answer, answer, status()]
        assert await handed(rig, replication, NOW_MS) == 0
        assert await handed(rig, replication, NOW_MS + FULL_MS) == 0
        assert (await rig.send()).remark == f"{DISK_FULL}: {FULL}"
        assert await handed(rig, replication, NOW_MS + 2 * FULL_MS) == 0
        assert caplog.text.count("no_member_has_disk_space") == 1
        assert await handed(rig, replication, NOW_MS + 3 * FULL_MS) == 1, "it has space now"
        rig.service.store.disk_space.set_watermark("")


async def test_a_replica_outside_of_the_set_is_not_ready(rig):
    """Who stops the next replica waits for that: this one may lack what is acknowledged."""
    with managed(rig) as (manager, replication):
        own, rig.service.replication = rig.service.replication, replication
        manager.broker_id, metrics = 2, BrokerMetrics(rig.service)
        rig.service.replication = own
        manager.view = RoleView("C", "broker-a", 1, sync_state_set=(1,))
        assert metrics.why_not_ready() == ["it is not in the SyncStateSet: it catches up"]
        manager.view = RoleView("C", "broker-a", 1, sync_state_set=(1, 2))
        assert metrics.why_not_ready() == []


async def test_r24_a_master_with_a_damaged_log_hands_over_before_it_is_suspect(rig):
    """Without another member it stays the master, nothing is cut, and it tries again."""
    store, seen = rig.service.store, []
    trust = store.trust
    with managed(rig) as (manager, replication):
        manager.report_event = Mock()
        manager.hand_over.side_effect = lambda reason: seen.append(trust.reason)
        error = CorruptLogError("a file", 0, "property CRC is wrong")
        end = store.max_phy_offset
        replication.on_damage_found(error)
        await until(lambda: not replication._tasks)
        assert seen == [""] and trust.must_refetch and str(error) in trust.reason
        manager.report_event.assert_called_once()
        assert await handed(rig, replication, NOW_MS) == 1
        assert await handed(rig, replication, NOW_MS + FULL_MS) == 2
        assert rig.service.path.gate.is_master and store.max_phy_offset == end
        rig.service.path.gate.follow(1, "127.0.0.1:1")
        later = NOW_MS + FULL_MS + HAND_OVER_AGAIN_MS
        assert await handed(rig, replication, later) == 2, "a slave hands nothing over"


async def test_only_a_master_hands_over(rig):
    """A slave does not, neither with a full disk (R45) nor when it stops (R33)."""
    with managed(rig) as (manager, replication):
        rig.service.path.gate.follow(1, "127.0.0.1:1")
        rig.service.store.disk_space.set_watermark(FULL)
        for now_ms in (NOW_MS, NOW_MS + FULL_MS, NOW_MS + 2 * FULL_MS):
            assert await handed(rig, replication, now_ms) == 0
        await replication.hand_over()
        assert manager.hand_over.await_count == 0
        rig.service.path.gate.open()
        await replication.hand_over()
        assert manager.hand_over.await_count == 1
        rig.service.store.disk_space.set_watermark("")


async def test_r36_a_master_that_lost_lease_and_slaves_refuses_writes_by_the_next_tick(rig):
    """Nothing comes that would say so: time passes."""
    with managed(rig) as (manager, replication):
        ha = Mock(required_set_whole=False)
        replication.ha = ha
        replication.tick(NOW_MS)
        assert (await rig.send()).code == ResponseCode.SUCCESS
        manager.lease_valid = lambda now_ms: False
        replication.tick(NOW_MS)
        assert (await rig.send()).code == ResponseCode.SERVICE_NOT_AVAILABLE
        ha.required_set_whole = True
        replication.tick(NOW_MS)
        assert (await rig.send()).code == ResponseCode.SUCCESS


async def test_r33_a_draining_switch_learns_of_each_confirmation(rig):
    with managed(rig) as (manager, replication):
        replication.on_confirm_offset(0)
        assert not manager.acks_changed.called
        rig.service.path.hold.begin()
        replication.on_confirm_offset(0)
        manager.acks_changed.assert_called_once_with()
        rig.service.path.hold.release()


async def test_a_broker_that_stops_answers_all_that_waits_and_all_that_is_held(rig):
    """More than a turn answers; what was held has not been stored, or waits like the others."""
    await rig.send()
    path, heard = rig.service.path, []
    path.hold.begin()
    held = asyncio.ensure_future(rig.send())
    await until(lambda: len(path.hold) == 1)
    frame, sink = (SendReplies("r").ok(1, b"00", 0, 1, b"K"), Mock(write=heard.append))
    for _ in range(2 * SLICE + 1):
        path.acks.add(1 << 60, path.clock_ms(), sink, frame)
    await rig.service.replication.close("test")
    assert len(heard) == 2 * SLICE + 1 and len(path.hold) == 0
    await held


async def test_r41_1007_tells_which_process_this_is_and_where_its_ha_listens(rig):
    """A slave whose controllers do not know the HA address finds it here."""
    with managed(rig) as (manager, replication):
        manager.broker_id, manager.incarnation = 3, "i3"
        cache, fields = replication.epoch_cache()
        assert cache.broker_id == 3
        assert fields == {
            INCARNATION_FIELD: "i3",
            LOG_ID_FIELD: rig.service.store.log.log_id,
            HA_ADDRESS_FIELD: rig.service.config.ha_address,
        }


async def test_the_other_members_are_those_with_an_address_and_another_id(rig):
    with managed(rig) as (manager, replication):
        own, other = Replica(3, address="h3:1"), Replica(1, address="h1:1")
        manager.broker_id = 3
        manager.view = Mock(replicas=(own, other, Replica(2)))
        assert replication.other_members() == ["h1:1"]


async def test_r44_a_good_bye_comes_after_the_end_of_what_replicates(rig):
    """Controllers judge by what a process reported before it said that it ends."""
    calls = Mock()
    with managed(rig) as (manager, replication):
        replication.ha = ha = AsyncMock()
        calls.attach_mock(ha.close, "ha_closed")
        calls.attach_mock(manager.end, "takes_no_view")
        calls.attach_mock(manager.close, "good_bye")
        await replication.close("planned stop")
    names = [name for name, _, _ in calls.mock_calls]
    assert names == ["takes_no_view", "ha_closed", "good_bye"]


async def test_r46_a_role_notice_with_what_is_no_number_is_refused_by_name(rig):
    with managed(rig) as (_, replication):
        replication.register(processors := Processors())
        handler = processors.handlers[RequestCode.NOTIFY_BROKER_ROLE_CHANGED]
        notice = RemotingCommand.request(1008, {"masterEpoch": "x"})
        with pytest.raises(BrokerRefusal, match="masterEpoch"):
            handler(notice, Mock())


async def test_an_ha_peer_without_a_proof_is_in_the_audit_log_and_in_the_status(tmp_path):
    async with lone_broker(tmp_path) as rig:
        service = rig.service
        sections = dataclasses.replace(
            service.config, replicas=ReplicasConfig(controller_grpc_addr="127.0.0.1:1")
        )
        auth = AuthConfig(
            authentication_enabled=True,
            inner_client_authentication_credentials='{"accessKey":"node","secretKey":"s3cret"}',
        )
        for allowed in (False, True):
            guard = Guard(
                structs.replace(auth, ha_allow_unproven=allowed), "C", tmp_path / f"{allowed}.log"
            )
            parts = service.path, service.tables, service.slave_sync, RemotingClient()
            replication = ControllerReplication(sections, *parts, Mock(), guard=guard)
            peer = Unproven("10.0.0.7:5", "its proof is wrong", passes=allowed)
            replication.on_unproven(peer)
            assert replication.proof_state() == {
                "ha_proof": "optional" if allowed else "required",
                "ha_unproven": 1,
                "ha_unproven_last": "10.0.0.7:5: its proof is wrong",
            }
            guard.close()
            (line,) = (tmp_path / f"{allowed}.log").read_text().splitlines()
            assert (json.loads(line)["request"], json.loads(line)["peer"]) == ("HA", "10.0.0.7:5")
            assert (
                json.loads(line)["result"] == "would be " * allowed + "refused: its proof is wrong"
            )
            assert "s3cret" not in line
