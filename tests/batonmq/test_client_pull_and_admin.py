"""Pull consumer, admin and the blocking facade against scripted servers."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from fake_cluster import CLUSTER, FakeCluster, answer, refuse, silence, until

from batonmq import (
    Admin,
    ClientClosedError,
    ClientError,
    ClientOptions,
    ConsumeFromWhere,
    Message,
    MessageQueue,
    NoMasterError,
    NoRouteError,
    Producer,
    PullConsumer,
    PullStatus,
    UnsupportedByBrokerError,
)
from batonmq.blocking import BlockingAdmin, BlockingProducer, BlockingPullConsumer
from batonmq.controller_admin import NoControllerLeaderError, grpc_address, properties_from_text
from protocol.bodies import (
    BrokerReplicasInfo,
    ElectMasterResponseBody,
    ReplicaIdentity,
    ReplicasInfo,
    SubscriptionGroupConfig,
    TopicConfig,
)
from protocol.codes import RequestCode, ResponseCode
from protocol.errors import ConnectError, ResponseError
from remoting.command import RemotingCommand
from remoting.connection import Connection
from remoting.processors import Processors
from remoting.server import RemotingServer

TOPIC = "T"
Q0 = MessageQueue(TOPIC, "broker-a", 0)
FAST = ClientOptions(suspicion_ms=20)


def run(story: Callable[[FakeCluster], Awaitable[None]], *, groups: int = 1) -> None:
    async def main() -> None:
        async with FakeCluster(groups=groups) as cluster, asyncio.timeout(20):
            cluster.add_topic(TOPIC)
            await story(cluster)

    uvloop.run(main())


def puller(cluster: FakeCluster, where: ConsumeFromWhere = ConsumeFromWhere.FIRST) -> PullConsumer:
    return PullConsumer(
        "pullers",
        name_servers=cluster.name_server_addresses,
        client_options=FAST,
        from_where=where,
    )


# -- pull consumer ----------------------------------------------------------------------------


def test_pull_by_queue_and_offset() -> None:
    async def story(cluster: FakeCluster) -> None:
        for i in range(5):
            cluster.master().store(TOPIC, 0, b"%d" % i, f"TAGS\x01{'ab'[i % 2]}\x02")
        async with puller(cluster) as consumer:
            assert len(await consumer.fetch_queues(TOPIC)) == 4
            result = await consumer.pull(Q0, 1, 3)
            assert result.status is PullStatus.FOUND
            assert [m.body for m in result.messages] == [b"1", b"2", b"3"]
            assert (result.next_begin_offset, result.min_offset, result.max_offset) == (4, 0, 5)
            assert {m.broker_name for m in result.messages} == {"broker-a"}
            tagged = await consumer.pull(Q0, 0, 32, expression="b")
            assert [m.body for m in tagged.messages] == [b"1", b"3"]
            assert (await consumer.pull(Q0, 5)).status is PullStatus.NO_NEW_MSG
            assert (await consumer.pull(Q0, 0, expression="c")).status is PullStatus.NO_MATCHED_MSG
            moved = await consumer.pull(Q0, 99)
            assert (moved.status, moved.next_begin_offset) == (PullStatus.OFFSET_ILLEGAL, 5)

    run(story)


def test_a_blocking_pull_is_woken_by_a_message() -> None:
    async def story(cluster: FakeCluster) -> None:
        async with puller(cluster) as consumer:
            pulling = asyncio.ensure_future(consumer.pull(Q0, 0, timeout_ms=10_000, block=True))
            await until(lambda: RequestCode.PULL_MESSAGE in cluster.master().codes())
            cluster.master().store(TOPIC, 0, b"late")
            assert [m.body for m in (await pulling).messages] == [b"late"]

    run(story)


def test_a_pull_bridges_a_failover() -> None:
    async def story(cluster: FakeCluster) -> None:
        cluster.master().store(TOPIC, 0, b"kept")
        async with puller(cluster) as consumer:
            await consumer.fetch_queues(TOPIC)
            await cluster.kill_master()
            cluster.elect(cluster.brokers["broker-a"][1])
            assert [m.body for m in (await consumer.pull(Q0, 0)).messages] == [b"kept"]

    run(story)


def test_a_group_without_master_says_so() -> None:
    async def story(cluster: FakeCluster) -> None:
        async with puller(cluster) as consumer:
            await consumer.fetch_queues(TOPIC)
            await cluster.kill_master()
            with pytest.raises(NoMasterError) as error:
                await consumer.pull(Q0, 0, timeout_ms=50)
            assert "broker-a" in str(error.value)
            assert "mqctl getSyncStateSet" in str(error.value)

    run(story)


def test_poll_commit_and_resume() -> None:
    async def story(cluster: FakeCluster) -> None:
        expected = [b"%d" % i for i in range(12)]
        for i, body in enumerate(expected):
            cluster.master().store(TOPIC, i % 4, body)
        async with puller(cluster) as consumer:
            await consumer.assign(await consumer.fetch_queues(TOPIC))
            got: list[bytes] = []
            while len(got) < 12:
                got += [m.body for m in await consumer.poll(2000, max_messages=5)]
            assert sorted(got, key=int) == expected
            assert await consumer.poll(1) == []
            await consumer.commit()
            assert await consumer.committed(Q0) == 3
            await consumer.seek(Q0, 2)
            assert [m.body for m in await consumer.poll(2000)] == [b"8"]
        cluster.master().store(TOPIC, 1, b"new")
        async with puller(cluster) as consumer:
            await consumer.assign(await consumer.fetch_queues(TOPIC))
            assert [m.body for m in await consumer.poll(2000)] == [b"new"]
            assert consumer.position(MessageQueue(TOPIC, "broker-a", 1)) == 4

    run(story)


def test_a_poll_that_waits_is_woken() -> None:
    async def story(cluster: FakeCluster) -> None:
        async with puller(cluster, ConsumeFromWhere.LAST) as consumer:
            cluster.master().store(TOPIC, 2, b"old")
            await consumer.assign(await consumer.fetch_queues(TOPIC))
            polling = asyncio.ensure_future(consumer.poll(10_000))
            await until(lambda: cluster.master().codes().count(RequestCode.PULL_MESSAGE) >= 4)
            cluster.master().store(TOPIC, 2, b"late")
            assert [m.body for m in await polling] == [b"late"]

    run(story)


def test_offsets_by_time_and_ends() -> None:
    async def story(cluster: FakeCluster) -> None:
        for i in range(3):
            cluster.master().store(TOPIC, 0, b"%d" % i)
        async with puller(cluster) as consumer:
            assert await consumer.min_offset(Q0) == 0
            assert await consumer.max_offset(Q0) == 3
            assert await consumer.offset_by_time(Q0, 0) == 0
            assert await consumer.offset_by_time(Q0, 1001) == 1
            assert await consumer.committed(Q0) is None
            await consumer.commit({Q0: 2})
            assert await consumer.committed(Q0) == 2

    run(story)


def test_use_before_start_and_without_assignment_is_refused() -> None:
    async def story(cluster: FakeCluster) -> None:
        consumer = puller(cluster)
        with pytest.raises(ClientClosedError, match="call start"):
            await consumer.max_offset(Q0)
        async with consumer:
            with pytest.raises(ClientError, match="assign"):
                await consumer.poll(1)

    run(story)


# -- admin ------------------------------------------------------------------------------------


def test_topics_are_made_listed_measured_and_deleted() -> None:
    async def story(cluster: FakeCluster) -> None:
        async with Admin(cluster.name_server_addresses) as admin:
            config = TopicConfig(topic_name="N", read_queue_nums=2, write_queue_nums=2)
            done = await admin.create_or_update_topic(config, cluster=CLUSTER)
            assert sorted(done) == ["broker-a", "broker-b"]
            assert "N" in await admin.topic_list()
            assert len((await admin.topic_route("N")).broker_datas) == 2
            cluster.master("broker-b").store("N", 1, b"x")
            stats = await admin.topic_stats("N")
            assert [(s.queue.broker_name, s.min_offset, s.max_offset) for s in stats] == [
                ("broker-a", 0, 0),
                ("broker-a", 0, 0),
                ("broker-b", 0, 0),
                ("broker-b", 0, 1),
            ]
            assert "N" in (await admin.all_topic_config(done["broker-a"])).topic_config_table
            await admin.delete_topic("N", CLUSTER)
            with pytest.raises(NoRouteError):
                await admin.topic_route("N")
            codes = [r.code for n in cluster.name_servers for r in n.requests]
            assert codes.count(RequestCode.DELETE_TOPIC_IN_NAMESRV) == 2

    run(story, groups=2)


def test_targets_that_do_not_exist_are_named() -> None:
    async def story(cluster: FakeCluster) -> None:
        async with Admin(cluster.name_server_addresses) as admin:
            with pytest.raises(ClientError, match=r"no cluster Nope.*DefaultCluster"):
                await admin.masters("Nope")
            with pytest.raises(ClientError, match=r"no broker group x.*broker-a"):
                await admin.masters(broker="x")
            with pytest.raises(ClientError, match="say where"):
                await admin.create_or_update_topic(TopicConfig(topic_name="N"))
            await cluster.kill_master()
            with pytest.raises(NoMasterError):
                await admin.masters(CLUSTER)

    run(story)


def test_messages_are_found_by_id_key_and_unique_key() -> None:
    async def story(cluster: FakeCluster) -> None:
        addresses = cluster.name_server_addresses
        async with Producer("pg", name_servers=addresses) as producer, Admin(addresses) as admin:
            sent = await producer.send(Message.of(TOPIC, "hello", keys="k1 k2"))
            by_id = await admin.message_by_id(sent.offset_msg_id)
            by_unique = await admin.message_by_unique_key(TOPIC, sent.msg_id)
            by_key = await admin.messages_by_key(TOPIC, "k2")
            assert by_id is not None and by_unique is not None
            assert by_id.body == by_unique.body == by_key[0].body == b"hello"
            assert await admin.messages_by_key(TOPIC, "k") == []
            gone = sent.offset_msg_id[:-2] + "77"
            assert await admin.message_by_id(gone) is None
            with pytest.raises(ClientError, match="no offset message id"):
                await admin.message_by_id("xyz")

    run(story)


def test_progress_is_worked_out_where_the_broker_does_not_serve_it() -> None:
    """Code 208 answered with 3: offsets (43) and queue ends (30) say the same."""

    async def story(cluster: FakeCluster) -> None:
        for i in range(5):
            cluster.master().store(TOPIC, 0, b"%d" % i)
        offsets = cluster.groups["broker-a"].offsets
        offsets["g", TOPIC, 0] = 2
        offsets["other", TOPIC, 0] = 1
        async with Admin(cluster.name_server_addresses) as admin:
            progress = await admin.consumer_progress("g")
            assert [(q.queue, q.broker_offset, q.consumer_offset) for q in progress.queues] == [
                (Q0, 5, 2)
            ]
            assert progress.lag == 3
            assert progress.members == ()
            assert await admin.consumer_groups() == ["g", "other"]

    run(story)


def test_broker_facts() -> None:
    async def story(cluster: FakeCluster) -> None:
        address = cluster.master().address
        async with Admin(cluster.name_server_addresses) as admin:
            info = await admin.cluster_info()
            assert info.broker_addr_table["broker-a"].broker_addrs[0] == address
            assert (await admin.broker_runtime_info(address))["brokerVersionDesc"] == "FAKE"
            assert (await admin.broker_ha_status(address)).master
            assert (await admin.broker_epoch(address)).epoch_list[0].epoch == 1
            group = SubscriptionGroupConfig(group_name="g", retry_max_times=3)
            await admin.update_subscription_group(group, broker="broker-a")
            table = (await admin.all_subscription_groups(address)).subscription_group_table
            assert table["g"].retry_max_times == 3
            states = await admin.name_server_states()
            assert states == dict.fromkeys(cluster.name_server_addresses)
            cluster.master().before[28].append(answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED))
            with pytest.raises(UnsupportedByBrokerError, match="code 28"):
                await admin.broker_runtime_info(address)

    run(story)


def test_every_name_server_has_the_whole_time_to_answer() -> None:
    """The first never answers; the last is asked meanwhile, and not with what was left."""

    async def story(cluster: FakeCluster) -> None:
        first, *others = cluster.name_server_addresses
        cluster.name_servers[0].before[106] += [silence] * 10
        async with Admin(cluster.name_server_addresses, timeout_ms=300) as admin:
            states = await admin.name_server_states()
        assert others and states == {first: states[first], **dict.fromkeys(others)}
        waited = re.search(r"no answer .* within (\d+) ms", states[first] or "")
        assert waited and int(waited[1]) > 300 / 2, "a share of the time is at most its half"

    run(story)


# -- controllers ------------------------------------------------------------------------------


class FakeController:
    """Answers 1005 with the leader it is told; state calls only if it is the leader."""

    def __init__(self) -> None:
        self.address = ""
        self.leader: FakeController | None = None
        self.requests: list[RemotingCommand] = []
        self._server: RemotingServer | None = None

    async def start(self) -> None:
        processors = Processors()
        processors.default(self._answer)
        self._server = RemotingServer(processors)
        self.address = f"127.0.0.1:{await self._server.listen('127.0.0.1', 0)}"

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.close()

    def _answer(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        self.requests.append(request)
        leader = self.leader
        if request.code == RequestCode.CONTROLLER_GET_METADATA_INFO:
            ext = {"group": "g1", "isLeader": "true" if leader is self else "false", "peers": ""}
            if leader is not None:
                ext |= {"controllerLeaderId": "n1", "controllerLeaderAddress": leader.address}
            return RemotingCommand.response_to(request, ext=ext)
        if request.code in (
            RequestCode.GET_CONTROLLER_CONFIG,
            RequestCode.UPDATE_CONTROLLER_CONFIG,
        ):
            return RemotingCommand.response_to(request, body=b"a=1\n# c\nb = x=y\n")
        if leader is not self:
            return refuse(request, ResponseCode.CONTROLLER_NOT_LEADER, "not leader")
        if request.code == RequestCode.CONTROLLER_GET_SYNC_STATE_DATA:
            info = ReplicasInfo(
                in_sync_replicas=[ReplicaIdentity(broker_id=1, broker_address="h:1", alive=True)],
                master_broker_id=1,
                master_epoch=4,
            )
            table = dict.fromkeys(json.loads(request.body), info)
            body = BrokerReplicasInfo(replicas_info_table=table).encode()
            return RemotingCommand.response_to(request, body=body)
        if request.code == RequestCode.CONTROLLER_ELECT_MASTER:
            designated = request.ext["brokerId"] != "-1"
            ext = {
                "masterBrokerId": request.ext["brokerId"] if designated else "1",
                "masterAddress": "h:2",
                "masterEpoch": "5",
                "syncStateSetEpoch": "9",
            }
            code = 0 if designated else ResponseCode.CONTROLLER_MASTER_STILL_EXIST
            body = ElectMasterResponseBody(sync_state_set=[2, 1]).encode()
            return RemotingCommand.response_to(request, code, ext=ext, body=body)
        if request.code == RequestCode.CLEAN_BROKER_DATA:
            code = ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
            return refuse(request, code, "broker 1 is alive")
        return refuse(request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "?")


def with_controllers(
    story: Callable[[list[FakeController], Admin], Awaitable[None]], timeout_ms: int = 5000
) -> None:
    async def main() -> None:
        controllers = [FakeController() for _ in range(3)]
        for controller in controllers:
            await controller.start()
        async with Admin(["127.0.0.1:1"], timeout_ms=timeout_ms) as admin:
            await story(controllers, admin)
        for controller in controllers:
            await controller.stop()

    uvloop.run(main())


def test_state_calls_find_the_leader() -> None:
    async def story(controllers: list[FakeController], admin: Admin) -> None:
        for controller in controllers:
            controller.leader = controllers[1]
        calls = admin.controller([controllers[0].address])
        info = await calls.sync_state_data(["broker-a"])
        assert info.replicas_info_table["broker-a"].master_epoch == 4
        elected = await calls.elect_master(CLUSTER, "broker-a", 2)
        assert (elected.master_broker_id, elected.master_epoch) == (2, 5)
        assert elected.sync_state_set == (1, 2)
        assert not elected.already_master
        assert (await calls.elect_master(CLUSTER, "broker-a")).already_master
        with pytest.raises(ResponseError, match="alive"):
            await calls.clean_broker_data(CLUSTER, "broker-a", [1])
        request = controllers[1].requests[-1]
        assert request.ext["brokerControllerIdsToClean"] == "1"
        assert {r.code for r in controllers[0].requests} == {1005}

    with_controllers(story)


def test_metadata_of_every_controller_the_dead_ones_too() -> None:
    async def story(controllers: list[FakeController], admin: Admin) -> None:
        for controller in controllers:
            controller.leader = controllers[0]
        await controllers[2].stop()
        answers = await admin.controller([c.address for c in controllers]).all_metadata()
        first, _, last = answers.values()
        assert not isinstance(first, Exception) and first.is_leader
        assert isinstance(last, ConnectError)

    with_controllers(story)


def test_without_a_leader_it_says_so_after_the_timeout() -> None:
    async def story(controllers: list[FakeController], admin: Admin) -> None:
        with pytest.raises(NoControllerLeaderError, match="majority"):
            await admin.controller(controllers[0].address).sync_state_data(["broker-a"])

    with_controllers(story, timeout_ms=60)


def test_without_a_leader_every_controller_is_named_with_what_it_said() -> None:
    async def story(controllers: list[FakeController], admin: Admin) -> None:
        await controllers[0].stop()
        addresses = [controller.address for controller in controllers]
        with pytest.raises(NoControllerLeaderError) as raised:
            await admin.controller(addresses).sync_state_data(["broker-a"])
        assert [address for address, _ in raised.value.asked] == addresses
        assert f"{addresses[1]}: answers, but knows of no leader" in str(raised.value)

    with_controllers(story, timeout_ms=60)


def test_a_leader_elected_meanwhile_is_waited_for() -> None:
    async def story(controllers: list[FakeController], admin: Admin) -> None:
        asking = asyncio.ensure_future(
            admin.controller([c.address for c in controllers]).sync_state_data(["broker-a"])
        )
        await until(lambda: bool(controllers[2].requests))
        for controller in controllers:
            controller.leader = controllers[2]
        assert (await asking).replicas_info_table.keys() == {"broker-a"}

    with_controllers(story)


def test_settings_are_read_and_changed_at_every_controller() -> None:
    async def story(controllers: list[FakeController], admin: Admin) -> None:
        calls = admin.controller(";".join(c.address for c in controllers))
        assert await calls.config() == {"a": "1", "b": "x=y"}
        done = await calls.update_config({"k": "v"})
        assert done == tuple(c.address for c in controllers)
        assert {c.requests[-1].body for c in controllers} == {b"k=v\n"}

    with_controllers(story)


def test_native_door_without_a_server_is_a_connect_error() -> None:
    async def story(controllers: list[FakeController], admin: Admin) -> None:
        with pytest.raises(ConnectError):
            await admin.controller("127.0.0.1:1").history()

    with_controllers(story, timeout_ms=500)


def test_grpc_door_is_one_port_above() -> None:
    assert grpc_address("10.0.0.1:9878") == "10.0.0.1:9879"
    assert grpc_address("[::1]:9878") == "[::1]:9879"
    assert properties_from_text("#x\n a = b \nc\n") == {"a": "b"}


# -- blocking facade and imports --------------------------------------------------------------


def test_blocking_facade_sends_pulls_and_asks() -> None:
    """The servers run in a loop of another thread; this thread only blocks."""
    ready, stop = threading.Event(), asyncio.Event()
    shared: dict[str, object] = {}

    async def serve() -> None:
        async with FakeCluster() as cluster:
            cluster.add_topic(TOPIC)
            shared.update(addresses=cluster.name_server_addresses, loop=asyncio.get_running_loop())
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    try:
        assert ready.wait(5)
        addresses = shared["addresses"]
        assert isinstance(addresses, list)
        with (
            BlockingProducer("pg", name_servers=addresses) as producer,
            BlockingPullConsumer("cg", name_servers=addresses) as consumer,
            BlockingAdmin(addresses) as admin,
        ):
            assert producer.send(Message(TOPIC, b"hi"), queue=Q0).acknowledged
            consumer.assign(consumer.fetch_queues(TOPIC))
            assert [m.body for m in consumer.poll(2000)] == [b"hi"]
            assert TOPIC in admin.topic_list()
            assert admin.run(admin.twin.topic_list()) == admin.topic_list()
            with pytest.raises(NoRouteError):
                admin.topic_route("Nowhere")
    finally:
        loop = shared["loop"]
        assert isinstance(loop, asyncio.AbstractEventLoop)
        loop.call_soon_threadsafe(stop.set)
        thread.join(5)


def test_importing_the_package_loads_next_to_nothing() -> None:
    code = (
        "import batonmq, sys; print([m for m in ('asyncio','msgspec','grpc') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "[]"


def test_every_exported_name_loads() -> None:
    import batonmq

    assert all(getattr(batonmq, name) is not None for name in batonmq.__all__)
    with pytest.raises(AttributeError):
        batonmq.nonsense  # noqa: B018
