"""Two brokers of one id, and a slave that acts for its master: the core by table, and whole brokers
with a name server in this process."""

import asyncio
import contextlib
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from batonmq.broker.replication import group_watch
from batonmq.broker.replication.group_core import (
    Act,
    AskMembers,
    AskRival,
    ClassicGroupCore,
    GroupPolicy,
    GroupStage,
    Meet,
    Register,
    Rival,
    StandBack,
    TakeRole,
)
from batonmq.namesrv.config import NamesrvConfig
from batonmq.namesrv.service import NamesrvService
from batonmq.protocol.bodies import HARuntimeInfo, KVTable, TopicRouteData
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.register_body import RegisterBrokerBody
from batonmq.protocol.role_view import Role, RoleView
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Processors
from tests.broker.lone_broker import Rig, free_port, lone_broker, make_group, sections_of, until
from tests.broker.test_classic_pair import level

OWN, OTHER = "10.0.0.1:10911", "10.0.0.2:10911"


def core(broker_id: int = 0, **policy: object) -> ClassicGroupCore:
    of = GroupPolicy(broker_id=broker_id, address=OWN, started_ms=1000, **policy)
    return ClassicGroupCore(of, now_ms=0)


def online(broker_id: int = 0, **policy: object) -> ClassicGroupCore:
    made = core(broker_id, **policy)
    assert made.tick(0) == [AskMembers()]
    assert TakeRole() in made.members_known({0: [OTHER]} if broker_id else {}, 0)
    return made


class TestOneId:
    def test_alone_it_takes_its_role_at_once(self):
        assert core().members_known({}, 0) == [TakeRole()]
        assert core().members_known({0: [OWN], 1: [OTHER]}, 0) == [TakeRole()]

    def test_where_no_name_server_answers_it_takes_its_role(self):
        assert core().members_known(None, 0) == [TakeRole()]

    @pytest.mark.parametrize("broker_id", [0, 2])
    @pytest.mark.parametrize("rival", [Rival.LIVES, Rival.SILENT])
    def test_the_later_one_waits_and_says_for_whom(self, broker_id, rival):
        group = core(broker_id)
        assert group.members_known({broker_id: [OTHER]}, 0) == [AskRival(OTHER)]
        assert group.rival_known(OTHER, rival, 500, 0) == []
        assert group.stage is GroupStage.STARTING
        assert OTHER in group.problem
        assert group.members_known({}, 5000) == [AskRival(OTHER)], "until it is known to be gone"
        assert group.rival_known(OTHER, Rival.GONE, 0, 5000) == [TakeRole()]
        assert group.problem == ""

    def test_of_two_masters_that_met_late_the_one_that_started_later_stands_back(self):
        group = online()
        assert group.members_known({0: [OTHER]}, 5000) == [AskRival(OTHER)]
        effects = group.rival_known(OTHER, Rival.LIVES, 999, 5000)
        assert effects == [StandBack(group.problem)]
        assert group.stage is GroupStage.BARRED
        assert group.rival_known(OTHER, Rival.GONE, 0, 9000) == [], "what it wrote is nowhere else"

    def test_the_earlier_one_continues_and_takes_the_route_back(self):
        group = online()
        group.members_known({0: [OTHER]}, 5000)
        assert group.rival_known(OTHER, Rival.LIVES, 1001, 5000) == [Register()]
        assert "started later" in group.problem
        assert group.stage is GroupStage.ONLINE

    def test_equal_start_times_are_decided_by_address(self):
        group = online()
        group.members_known({0: [OTHER]}, 5000)
        assert group.rival_known(OTHER, Rival.LIVES, 1000, 5000) == [Register()]

    def test_one_that_waits_elsewhere_is_named_though_no_name_server_knows_it(self):
        group = online()
        group.claimed(OTHER, 100)
        assert group.wakeup_ms == 100
        assert group.members_known({0: [OWN]}, 100) == [AskRival(OTHER)]
        assert group.rival_known(OTHER, Rival.LIVES, 2000, 100) == []
        assert OTHER in group.problem
        assert group.members_known({0: [OWN]}, 5100) == [AskRival(OTHER)]
        assert group.rival_known(OTHER, Rival.GONE, 0, 5100) == []
        assert group.problem == ""


class TestActing:
    def test_the_lowest_id_acts_while_the_master_is_away(self):
        group = online(1, acting=True)
        assert not group.acts
        assert group.members_known({1: [OWN], 2: [OTHER]}, 1000) == [Act(True), Register()]
        assert group.members_known({1: [OWN]}, 2000) == []
        assert group.members_known({0: [OTHER], 1: [OWN]}, 3000) == [Act(False), Register()]

    def test_a_higher_id_does_not_act(self):
        group = online(2, acting=True)
        assert group.members_known({1: [OTHER], 2: [OWN]}, 1000) == []

    def test_no_slave_acts_if_it_is_off_or_the_group_unknown(self):
        assert online(1).members_known({1: [OWN]}, 1000) == []
        group = online(1, acting=True)
        assert group.members_known(None, 1000) == []

    def test_no_offsets_are_taken_for_a_master_that_may_have_fetched_them(self):
        group = online(1, acting=True)
        group.members_known({1: [OWN]}, 1000)
        assert group.takes_offsets(1000)
        group.master_announced(1000)
        assert not group.takes_offsets(15_999)
        assert group.takes_offsets(16_000), "it has not come"

    def test_a_master_meets_each_member_before_it_takes_its_role(self):
        group = core(0, acting=True, pre_online=True)
        members = {1: ["a:1"], 2: ["b:1"]}
        assert group.members_known(members, 0) == [Meet("a:1")]
        assert group.met("a:1", "", 1) == [Meet("b:1")]
        assert group.met("b:1", "its log is longer", 2) == []
        assert "b:1: its log is longer" in group.problem
        assert group.members_known(members, 1000) == [Meet("b:1")]
        assert group.members_known({1: ["a:1"]}, 2000) == [TakeRole()], "b is gone"

    def test_pre_online_waits_for_a_name_server(self):
        group = core(0, acting=True, pre_online=True)
        assert group.members_known(None, 0) == []
        assert "name server" in group.problem
        assert group.members_known({}, 1000) == [TakeRole()]


@contextlib.asynccontextmanager
async def name_server(**settings: object):
    port = free_port()
    service = NamesrvService(NamesrvConfig(listen_port=port, bind_address="127.0.0.1", **settings))
    await service.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await service.close()


@contextlib.asynccontextmanager
async def broker(folder: Path, at: str, broker_id: int, role: str, *, acting: bool = False):
    settings = {
        "broker_role": role,
        "broker_id": broker_id,
        "namesrv_addr": at,
        "enable_slave_acting_master": acting,
    }
    async with lone_broker(folder, broker=settings, ha_listen_port=free_port()) as rig:
        yield rig


async def commit(rig: Rig, offset: int) -> int:
    return (await rig.commit(offset)).code


def committed(rig: Rig, group: str = "g") -> int:
    return rig.service.tables.offsets.query(group, "T", 0)


@pytest.fixture(autouse=True)
def brisk(monkeypatch):
    monkeypatch.setattr(group_watch, "CHECK_MS", 50)
    monkeypatch.setattr(group_watch, "ACTING_CHECK_MS", 50)


async def test_the_second_master_of_one_id_takes_no_writes_until_the_first_is_gone(tmp_path):
    """Java detects nothing: the name server's last registration wins, and both write."""
    async with name_server() as at, contextlib.AsyncExitStack() as first_life:
        first = await first_life.enter_async_context(broker(tmp_path / "1", at, 0, "ASYNC_MASTER"))
        await until(lambda: all(first.service.registrar.registered.values()))
        async with broker(tmp_path / "2", at, 0, "ASYNC_MASTER") as second:
            refused = await second.send()
            assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
            assert second.service.store.max_phy_offset == 0
            assert any(first.service.address in each for each in second.service.status.problems())
            await until(lambda: first.service.status.problems() != [])
            assert second.service.address in first.service.status.problems()[0]
            assert (await first.send()).code == 0
            await first_life.aclose()
            await until(lambda: second.service.path.gate.role is Role.MASTER)
            assert (await second.send()).code == 0
            assert second.service.status.problems() == []


async def test_of_two_masters_that_started_apart_one_stands_back(tmp_path):
    """They began before either was registered."""
    async with (
        name_server() as at,
        broker(tmp_path / "1", at, 0, "ASYNC_MASTER") as first,
        contextlib.AsyncExitStack() as later,
    ):
        watch = later.enter_context(pytest.MonkeyPatch.context())
        watch.setattr(group_watch.GroupWatch, "_members", no_members)
        second = await later.enter_async_context(broker(tmp_path / "2", at, 0, "ASYNC_MASTER"))
        assert (await second.send()).code == 0
        watch.undo()
        await until(lambda: second.service.path.gate.role is Role.FENCED)
        refused = await second.send()
        assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert first.service.address in refused.remark
        assert (await first.send()).code == 0
        await until(lambda: second.service.address in str(first.service.status.problems()))


async def test_routes_show_what_brokerPermission_allows(tmp_path):
    """So an operator takes a broker out of use, as in Java: clients leave it with their next route,
    and sends that still come are taken."""
    async with name_server() as at, broker(tmp_path, at, 0, "ASYNC_MASTER") as rig:
        assert (await rig.send("Made")).code == 0
        for permission in (4, 2, 6):
            changed = await rig.ask(25, body=f"brokerPermission={permission}".encode())
            assert (changed.code, changed.remark) == (0, None)
            await rig.service.registrar.known()
            asked = RemotingCommand.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "Made"})
            route = TopicRouteData.decode((await rig.client.call(at, asked, 5000)).body)
            assert [queue.perm for queue in route.queue_datas] == [permission]
            assert (await rig.send("Made")).code == 0


async def test_a_slave_out_of_use_does_not_take_its_master_out_of_use(tmp_path, monkeypatch):
    """A slave registers its master where that does not get through: brokerPermission is its own."""
    view = RoleView("c", "b", 1, "h:1", master_epoch=1)
    async with name_server() as at, broker(tmp_path, at, 0, "ASYNC_MASTER") as rig:
        assert (await rig.send("Made")).code == 0
        assert (await rig.ask(25, body=b"brokerPermission=0")).code == 0
        monkeypatch.setattr(rig.service.replication, "followed_master", lambda: view)
        registered = rig.service.status.registration_of_master(("Made",))
        assert registered is not None
        of_master, own = registered[0], rig.service.status.registration(("Made",))
        assert [_permission("Made", each.body) for each in (of_master, own)] == [6, 0]


def _permission(topic: str, body: bytes) -> int:
    wrapper = RegisterBrokerBody.decode(body).topic_config_serialize_wrapper
    return wrapper.topic_config_table[topic].perm


async def no_members(_watch: object) -> dict[int, set[str]]:
    """The group as it was before the other one registered."""
    return {}


async def test_a_rival_whose_start_time_is_no_number_lives(tmp_path):
    """Whatever another broker says, the checks of the group continue."""
    for started in ("\u00b2", "9" * 5000, "soon"):
        reply = RemotingCommand.response_to(
            RemotingCommand.request(RequestCode.GET_BROKER_RUNTIME_INFO),
            body=KVTable(table={"bootTimestamp": started}).encode(),
        )
        client = Mock(call=AsyncMock(return_value=reply), oneway=AsyncMock())
        watch = group_watch.GroupWatch(sections_of(tmp_path), client, Mock(), lambda: 0)
        assert await watch._ask_rival(OTHER) == (Rival.LIVES, 0)


@pytest.mark.parametrize(
    ("address", "rivals"),
    [
        ("127.0.0.1:9", ["127.0.0.1:9"]),
        ("localhost:9", ["localhost:9"]),
        ("[::ffff:127.0.0.1]:9", ["[::ffff:127.0.0.1]:9"]),
        (OTHER, []),
        ("127.0.0.1:70000", []),
        ("127.0.0.1:\u00b2", []),
        ("127.0.0.1", []),
        (":9", []),
        ("\u00e4" * 300 + ":9", []),
        ("a\0b:9", []),
    ],
)
async def test_a_stranger_cannot_choose_which_host_is_dialled(tmp_path, address, rivals):
    """A broker that no name server knows says itself where it is: at its own host, or nowhere."""
    watch = group_watch.GroupWatch(sections_of(tmp_path), Mock(), Mock(), lambda: 0)
    reported = RemotingCommand.request(RequestCode.BATON_SAME_BROKER_ID, {"brokerAddr": address})
    processors = Processors()
    watch.register(processors)
    await processors.handlers[reported.code](reported, Mock(peer="127.0.0.1:50000"))
    asked = watch.core.members_known({}, 0)
    assert [each.address for each in asked if isinstance(each, AskRival)] == rivals


async def test_a_broker_that_no_longer_watches_its_group_ends(tmp_path):
    actions = Mock()
    watch = group_watch.GroupWatch(sections_of(tmp_path), Mock(), actions, lambda: 0)
    defect = RuntimeError("a defect")
    watch._check = AsyncMock(side_effect=[None, defect])
    await watch.start()
    watch.hint()
    await until(lambda: actions.on_fatal.called)
    actions.on_fatal.assert_called_once_with(defect)
    await watch.close()


async def test_the_second_slave_of_one_id_stays_out_of_the_group(tmp_path):
    async with (
        name_server() as at,
        broker(tmp_path / "m", at, 0, "ASYNC_MASTER") as m,
        broker(tmp_path / "1", at, 1, "SLAVE") as first,
    ):
        assert (await m.send()).code == 0
        await level(first, m)
        async with broker(tmp_path / "2", at, 1, "SLAVE") as second:
            assert any(first.service.address in each for each in second.service.status.problems())
            await until(lambda: second.service.address in str(first.service.status.problems()))
            assert second.service.store.max_phy_offset == 0
            assert not any(second.service.registrar.registered.values())


async def test_a_slave_acts_for_its_master_and_gives_the_offsets_back(tmp_path):
    """Reads and progress continue; writes are refused. The master that comes back has what was
    committed meanwhile before it takes a write."""
    async with (
        name_server(support_acting_master=True) as at,
        broker(tmp_path / "s", at, 1, "SLAVE", acting=True) as s,
    ):
        async with broker(tmp_path / "m", at, 0, "SYNC_MASTER", acting=True) as m:
            await until(lambda: m.service.replication.in_sync_count() == 2)
            for n in range(5):
                assert (await m.send(body=b"%d" % n)).code == 0
            await make_group(m)
            assert await commit(m, 2) == 0
            await until(lambda: committed(s) == 2)
            assert await commit(s, 3) != 0, "the master keeps progress"
        gate = s.service.path.gate
        await until(lambda: gate.is_acting)
        assert (await s.pull(offset=2)).code == 0
        assert (await s.pull(offset=9)).code == ResponseCode.PULL_NOT_FOUND
        assert await commit(s, 4) == 0
        refused = await s.send()
        assert refused.code != 0
        assert any("acts for its master" in each for each in s.service.status.problems())
        async with broker(tmp_path / "m", at, 0, "SYNC_MASTER", acting=True) as m:
            await until(lambda: m.service.path.gate.role is Role.MASTER)
            assert committed(m) == 4
            assert (await m.send()).code == 0, "the slave follows before it takes writes"
            await until(lambda: not gate.is_acting)
            assert await commit(s, 5) != 0


async def test_a_master_that_lost_what_its_slave_holds_does_not_come_back_over_it(tmp_path):
    """Java opens, and writes another history at the same offsets."""
    async with (
        name_server(support_acting_master=True) as at,
        broker(tmp_path / "s", at, 1, "SLAVE", acting=True) as s,
    ):
        async with broker(tmp_path / "m", at, 0, "SYNC_MASTER", acting=True) as m:
            await until(lambda: m.service.replication.in_sync_count() == 2)
            assert (await m.send()).code == 0
        await until(lambda: s.service.path.gate.is_acting)
        async with broker(tmp_path / "empty", at, 0, "SYNC_MASTER", acting=True) as m:
            assert "it holds what this master has lost" in m.service.status.problems()[0]
            assert (await m.send()).code == ResponseCode.SERVICE_NOT_AVAILABLE
            assert (await s.pull(offset=0)).code == 0


async def test_queues_are_locked_at_an_acting_master(tmp_path):
    async with (
        name_server(support_acting_master=True) as at,
        broker(tmp_path / "s", at, 1, "SLAVE", acting=True) as s,
    ):
        await until(lambda: s.service.path.gate.is_acting)
        assert await commit(s, 0) != 26, "it keeps progress of groups that it cannot make"
        body = (
            b'{"clientId":"c","consumerGroup":"g","mqSet":'
            b'[{"brokerName":"broker-a","queueId":0,"topic":"T"}]}'
        )
        reply = await s.ask(RequestCode.LOCK_BATCH_MQ, body=body)
        assert reply.code == 0
        assert b'"queueId":0' in reply.body
        assert s.service.store.max_phy_offset == 0


async def test_906_and_908_are_answered_as_java_does(tmp_path):
    async with (
        name_server() as at,
        broker(tmp_path / "m", at, 0, "ASYNC_MASTER") as m,
        broker(tmp_path / "s", at, 1, "SLAVE") as s,
    ):
        reported = (await m.ask(RequestCode.EXCHANGE_BROKER_HA_INFO)).ext
        assert reported["masterAddress"] == m.service.address
        assert reported["masterHaAddress"] == m.service.config.ha_address
        assert reported["masterFlushOffset"] == "0"
        assert "masterAddress" not in (await s.ask(RequestCode.EXCHANGE_BROKER_HA_INFO)).ext
        fields = {"masterFlushOffset": "77"}
        assert (await s.ask(RequestCode.RESET_MASTER_FLUSH_OFFSET, fields)).code == 0
        info = HARuntimeInfo.decode((await s.ask(RequestCode.GET_BROKER_HA_STATUS)).body)
        assert info.ha_client_runtime_info.master_flush_offset == 77


async def test_905_makes_it_look_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(group_watch, "ACTING_CHECK_MS", 3_600_000)
    async with name_server() as at, broker(tmp_path / "s", at, 1, "SLAVE", acting=True) as s:
        gate = s.service.path.gate
        await until(lambda: gate.is_acting)
        core = s.service.replication.group.core
        looked = asyncio.Event()
        reported = core.members_known
        monkeypatch.setattr(core, "members_known", lambda *args: (looked.set(), reported(*args))[1])
        fields = {"minBrokerId": "0", "brokerName": "broker-a", "minBrokerAddr": OTHER}
        assert (await s.ask(RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE, fields)).code == 0
        await looked.wait()


async def test_our_name_server_tells_of_another_lowest_id(tmp_path, monkeypatch):
    reported = []
    taken = group_watch.GroupWatch._min_id_changed

    def noted(watch, request, connection):
        reported.append(dict(request.ext))
        return taken(watch, request, connection)

    monkeypatch.setattr(group_watch.GroupWatch, "_min_id_changed", noted)
    async with (
        name_server(notify_min_broker_id_changed=True) as at,
        broker(tmp_path / "s", at, 1, "SLAVE", acting=True) as s,
    ):
        async with broker(tmp_path / "m", at, 0, "ASYNC_MASTER", acting=True) as m:
            await until(lambda: len(reported) == 1)
            assert reported[0]["minBrokerId"] == "0"
            assert reported[0]["haBrokerAddr"] == m.service.config.ha_address
        await until(lambda: len(reported) == 2)
        assert reported[1]["minBrokerAddr"] == s.service.address
        assert reported[1]["offlineBrokerAddr"] == m.service.address
