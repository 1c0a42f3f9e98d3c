"""How many groups and replicas may register, under which names, and what that costs (R46, R58)."""

import asyncio
import json
import logging
from typing import Any

import pytest
from test_remoting_endpoint import endpoint
from test_requests import NAME, Leader, clocks

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.controller_admin import GROUPS_A_PAGE
from batonmq.controller.admission import UNHEARD_MS
from batonmq.controller.liveness import events as ev
from batonmq.controller.liveness.core import LivenessCore
from batonmq.controller.raft.log import LogStatus
from batonmq.controller.rules.commands import (
    ApplyBrokerId,
    CleanBrokerData,
    LiveBroker,
    RegisterBroker,
)
from batonmq.controller.rules.groups import BrokerGroup, ReplicaRecord
from batonmq.controller.rules.state import ControllerState
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.codes import ResponseCode as Code
from tests.shared.turns import Turns, counted_turns

__all__ = ["clocks", "endpoint"]

MANY = 1_000
LINES_A_TURN = 15_000


def registration(name: str, **fields: Any) -> RegisterBroker:
    facts = {"cluster_name": "C", "incarnation": "life", "register_check_code": "code"}
    return RegisterBroker(broker_name=name, **{**facts, **fields})


def of_many(count: int = MANY) -> ControllerState:
    """As many groups as may register, each with one process that nobody hears."""
    groups = {
        f"g{number:05}": BrokerGroup(
            cluster_name="C",
            broker_name=f"g{number:05}",
            next_broker_id=2,
            replicas=(ReplicaRecord(1, "code", "h:1", incarnation="life"),),
        )
        for number in range(count)
    }
    return ControllerState(applied_index=count, groups=groups)


class TestLimits:
    def test_r58_groups_above_the_limit_are_refused_and_known_ones_never(self, clocks):
        leader = Leader(clocks, broker_groups_max=2)
        assert leader.submit(registration("a")).ok
        assert leader.submit(ApplyBrokerId(broker_name="b", broker_id=1)).ok
        for new in (registration("c"), ApplyBrokerId(broker_name="c", broker_id=1)):
            refused = leader.submit(new)
            assert refused.code is Code.CONTROLLER_INVALID_REQUEST
            assert "2 broker groups" in refused.remark and "brokerGroupsMax" in refused.remark
        assert leader.submit(registration("a", incarnation="next", broker_id=1)).ok
        assert leader.submit(registration("b", register_check_code="second")).ok  # a new replica

    def test_r58_replicas_above_the_limits_are_refused_and_known_ones_never(self, clocks):
        leader = Leader(clocks, group_replicas_max=2, broker_replicas_max=3)
        for name, code in (("a", "1"), ("a", "2"), ("b", "1")):
            assert leader.submit(registration(name, register_check_code=code)).ok
        refused = leader.submit(registration("a", register_check_code="3"))
        assert not refused.ok and "groupReplicasMax" in refused.remark
        refused = leader.submit(registration("b", register_check_code="2"))
        assert not refused.ok and "brokerReplicasMax" in refused.remark
        assert leader.submit(registration("a", register_check_code="2")).broker_id == 2

    def test_r58_registrations_under_way_count(self, clocks):
        leader = Leader(clocks, broker_groups_max=1)
        release = asyncio.Event()
        propose = leader.propose

        async def slow(command: Any, timeout_ms: int) -> Any:
            await release.wait()
            return await propose(command, timeout_ms)

        leader.propose = slow

        async def both() -> list[bool]:
            tasks = [
                asyncio.ensure_future(leader.requests.submit(registration(name))) for name in "ab"
            ]
            await asyncio.sleep(0)
            release.set()
            return [result.ok for result in await asyncio.gather(*tasks)]

        assert asyncio.run(both()) == [True, False]


BAD_NAMES = ("", "a/b", "..", ".", "a\0b", "a\nb", "a\x1b[2J", "a\u2028b", "x" * 229, "\ud800")


class TestNames:
    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_r46_bad_names_of_groups_and_clusters_are_refused(self, clocks, name, caplog):
        # pytest keeps log lines as they are, and its workers cannot send half of a surrogate pair.
        caplog.set_level(logging.CRITICAL, logger="batonmq")
        leader = Leader(clocks)
        assert not leader.submit(registration(name)).ok
        assert not leader.submit(ApplyBrokerId(broker_name=name, broker_id=1)).ok
        assert not name or not leader.submit(registration("a", cluster_name=name)).ok
        assert not leader.state.groups

    @pytest.mark.parametrize("name", ["broker-a", "b" * 228, "брокер", "a b", "a.b:1", "a%1"])
    def test_r46_legal_names_stay_legal(self, clocks, name):
        assert Leader(clocks).submit(registration(name)).ok

    def test_r46_a_group_with_a_bad_name_from_an_earlier_version_registers_again(self, clocks):
        leader = Leader(clocks)
        assert leader.commit(registration("a\nb", controller_epoch=1)).ok
        assert leader.submit(registration("a\nb", broker_id=1, incarnation="next")).ok

    @pytest.mark.parametrize(
        "fields",
        [
            {"address": "h:1\n2026 ERROR forged"},
            {"ha_address": "h:1\x1b[2J"},
            {"register_check_code": "\0"},
            {"incarnation": "x" * 65},
            {"log_id": "\r"},
            {"earlier_lives": ("l",) * 257},
        ],
    )
    def test_r46_texts_of_a_registration_are_short_and_printable(self, clocks, fields):
        assert not Leader(clocks).submit(registration("a", **fields)).ok


class TestOwners:
    """R59: an id belongs to the store whose secret was registered with it first."""

    @staticmethod
    def in_sync(clocks: Any) -> Leader:
        """Master 1, set {1, 2, 3}, each with an owner."""
        leader = Leader(clocks)
        for broker_id in (1, 2, 3):
            leader.register(broker_id, owner=f"owner-{broker_id}")
            leader.beat(broker_id, max_offset=0)
        assert leader.elect(1).ok
        leader.alter(1, 2, 3)
        return leader

    @classmethod
    def while_3_is_away(cls, clocks: Any, ms: int = UNHEARD_MS) -> Leader:
        """Set {1, 2}; 3 has been away for so long."""
        leader = cls.in_sync(clocks)
        leader.alter(1, 2)
        leader.closes(3)
        leader.passes(ms, 1, 2)
        return leader

    @staticmethod
    def claim(leader: Leader, life: str, owner: str = "") -> Any:
        """Another process registers as replica 3."""
        return leader.submit(
            registration(
                NAME,
                cluster_name="",
                broker_id=3,
                incarnation=life,
                owner=owner,
                register_check_code="",
            )
        )

    @pytest.mark.parametrize("owner", ["", "a stranger's"])
    def test_r59_nobody_without_proof_takes_a_members_id(self, clocks, owner):
        leader = self.in_sync(clocks)
        leader.closes(3)
        leader.passes(2 * UNHEARD_MS, 1, 2)
        refused = self.claim(leader, "stranger", owner)
        assert not refused.ok
        assert "SyncStateSet" in refused.remark and "cleanBrokerMetadata" in refused.remark
        assert self.claim(leader, "next", "owner-3").ok

    @pytest.mark.parametrize("owner", ["", "a stranger's"])
    def test_r59_nor_that_of_a_replica_that_may_be_alive(self, clocks, owner):
        leader = self.while_3_is_away(clocks, UNHEARD_MS - 100)
        assert f"{UNHEARD_MS}" in self.claim(leader, "stranger", owner).remark
        leader.core.handle(ev.GateClosed(), clocks.boot_ms)
        leader.core.handle(ev.GateOpened(), clocks.boot_ms)  # it has heard no broker yet
        leader.passes(UNHEARD_MS - 100)
        assert not self.claim(leader, "stranger", owner).ok

    @pytest.mark.parametrize("known", ["epoch", "accepted_epoch"])
    def test_r59_a_volume_of_another_cluster_does_not_stop_elections(self, clocks, known):
        """Its epochs are the highest: the controllers would seem to have forgotten (R19)."""
        leader = self.while_3_is_away(clocks)
        stray = registration(
            NAME, cluster_name="", broker_id=3, incarnation="stray", register_check_code="",
            owner="of another cluster", **{known: leader.group.master_epoch + 1},
        )  # fmt: skip
        refused = leader.submit(stray)
        assert not refused.ok and "never knew masterEpoch" in refused.remark
        leader.closes(1)
        assert leader.elect(2).ok

    @pytest.mark.parametrize("owner", ["", "a stranger's"])
    def test_r59_the_owner_takes_its_id_back_from_a_living_process_without_proof(
        self, clocks, owner
    ):
        leader = self.while_3_is_away(clocks)
        leader.register(3, "stranger", owner=owner, register_check_code="code-3")
        leader.beat(3, max_offset=0)
        assert self.claim(leader, "stranger", owner).ok, "it says it again"
        assert not self.claim(leader, "another", owner).ok, "one at a time (R18)"
        assert self.claim(leader, "next", "owner-3").ok
        record = leader.group.replica(3)
        assert record is not None and record.incarnation == "next"
        leader.beat(3, max_offset=0)
        assert not self.claim(leader, "stranger", owner).ok

    def test_r59_two_processes_of_one_store_are_told_apart_as_before(self, clocks):
        leader = self.in_sync(clocks)
        assert "lives" in self.claim(leader, "a copy of its volume", "owner-3").remark

    def test_r59_whom_an_operator_forgets_has_no_owner(self, clocks):
        leader = self.while_3_is_away(clocks, 1_000)
        assert leader.submit(CleanBrokerData(broker_name=NAME, broker_ids=(3,))).ok
        assert self.claim(leader, "stranger", "a stranger's").ok

    def test_r59_a_replica_of_an_earlier_version_is_owned_from_its_next_start_on(self, clocks):
        leader = Leader(clocks)
        for broker_id in (1, 2, 3):
            leader.register(broker_id)
            leader.closes(broker_id)
        assert self.claim(leader, "next", "owner-3").ok
        assert not self.claim(leader, "stranger").ok


class TestAnswers:
    @pytest.mark.counts_turns
    async def test_r58_the_state_of_many_groups_comes_in_pages_and_turns(self, endpoint):
        names = [f"g{number}" for number in range(2 * GROUPS_A_PAGE + 1)]
        for name in names:
            assert (await endpoint.service.requests.submit(registration(name))).ok
        with counted_turns() as turns:
            whole = await endpoint.ask(
                RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, body=json.dumps(names * 2).encode()
            )
        assert len(json.loads(whole.body)["replicasInfoTable"]) == len(names)
        assert turns.lines < LINES_A_TURN
        async with Admin("127.0.0.1:1") as admin:
            controller = admin.controller(endpoint.address)
            found = await controller.sync_state_data(names)
            assert set(found.replicas_info_table) == set(names)
            with counted_turns() as turns:
                found = await controller.sync_state_data([names[0], "unknown"], every=True)
        assert set(found.replicas_info_table) == set(names)
        assert turns.lines < LINES_A_TURN

    async def test_r58_an_answer_that_is_too_large_says_so(self, endpoint, monkeypatch):
        monkeypatch.setattr("batonmq.controller.endpoints.remoting_endpoint._ANSWER_SIZE_MAX", 200)
        for name in ("a", "b"):
            assert (await endpoint.service.requests.submit(registration(name))).ok
        code = RequestCode.CONTROLLER_GET_SYNC_STATE_DATA
        refused = await endpoint.ask(code, body=b'["a","b"]')
        assert refused.code == Code.SYSTEM_ERROR
        assert "ask for fewer groups" in (refused.remark or "")
        assert (await endpoint.ask(code, body=b'["a"]')).code == 0

    def test_r58_the_problems_of_many_groups_do_not_hide_the_leader(self, clocks, monkeypatch):
        leader = Leader(clocks)
        texts = tuple(f"g{number}: {'x' * 5000}" for number in range(MANY))
        monkeypatch.setattr(leader.core, "problems", lambda: texts)
        leader.status = lambda: LogStatus(0, 0, 0)
        problems = leader.requests.metadata().problems
        assert sum(map(len, problems)) < 64 * 1024
        assert problems[-1] == f"{MANY - 32} more groups have a problem"


class TestLiveness:
    def test_r58_as_many_groups_as_may_register_cost_no_long_turn(self):
        for leads in (True, False):
            core, turns, now_ms = LivenessCore(), Turns(), 100_000
            turns.run(core.handle, ev.StateApplied(of_many()), now_ms)
            if leads:
                turns.run(core.handle, ev.GateOpened(), now_ms)
            turns = Turns()
            for _ in range(40):
                now_ms += 50
                turns.run(core.handle, ev.Tick(), now_ms)
            turns.stop()
            assert turns.lines < 3 * LINES_A_TURN, leads

    def test_r58_names_that_nobody_registered_leave_nothing_behind(self):
        core = LivenessCore()
        core.handle(ev.GateOpened(), 0)
        for number in range(MANY):
            name = f"g{number}"
            core.handle(ev.RemotingHeartbeat(name, number, 10_000, LiveBroker(1)), 1)
            core.handle(ev.RemotingChannelClosed(number), 1)
            core.handle(ev.SessionHello(name, 2, "life", number), 1)
            core.handle(ev.SessionEnded(name, 2, number, goodbye=False, why=""), 1)
            core.confirm_floor(name)
        assert not core._watches and not core._sessions._brokers
