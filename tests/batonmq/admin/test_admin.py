"""Admin calls against scripted servers: what they send, find and report."""

import re

import pytest
from fake_cluster import CLUSTER, TOPIC, FakeCluster, answer, open_cluster, silence

from batonmq import (
    Admin,
    ClientError,
    Message,
    MessageQueue,
    NoMasterError,
    NoRouteError,
    Producer,
    TopicChanges,
    UnsupportedByBrokerError,
)
from batonmq.client.errors import NoNameServerError
from batonmq.client.instance import name_servers
from batonmq.client.instance.name_servers import name_servers_from
from batonmq.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from batonmq.protocol.codes import RequestCode, ResponseCode

Q0 = MessageQueue(TOPIC, "broker-a", 0)


async def test_topics_are_made_listed_measured_and_deleted() -> None:
    async with open_cluster(groups=2) as cluster, Admin(cluster.name_server_addresses) as admin:
        config = TopicConfig(topic_name="N", read_queue_nums=2, write_queue_nums=2)
        done = await admin.topics.create_or_update(config, cluster=CLUSTER)
        assert sorted(done) == ["broker-a", "broker-b"]
        assert "N" in await admin.topics.names()
        assert len((await admin.topics.route("N")).broker_datas) == 2
        cluster.master("broker-b").store("N", 1, b"x")
        stats = await admin.topics.stats("N")
        assert [(s.queue.broker_name, s.min_offset, s.max_offset) for s in stats] == [
            ("broker-a", 0, 0),
            ("broker-a", 0, 0),
            ("broker-b", 0, 0),
            ("broker-b", 0, 1),
        ]
        assert "N" in (await admin.topics.configs(done["broker-a"])).topic_config_table
        await admin.topics.delete("N", CLUSTER)
        with pytest.raises(NoRouteError):
            await admin.topics.route("N")
        codes = [r.code for n in cluster.name_servers for r in n.requests]
        assert codes.count(RequestCode.DELETE_TOPIC_IN_NAMESRV) == 2


async def test_what_is_not_there_is_not_deleted_and_queues_that_nobody_reads_are_not_made() -> None:
    async with open_cluster() as cluster, Admin(cluster.name_server_addresses) as admin:
        with pytest.raises(ClientError, match="no topic Nope in cluster DefaultCluster"):
            await admin.topics.delete("Nope", CLUSTER)
        changes = TopicChanges(read_queue_nums=2, write_queue_nums=4)
        with pytest.raises(ClientError, match="would not be read"):
            await admin.topics.change("N", changes, cluster=CLUSTER)
        assert await admin.topics.config(cluster.master().address, "N") is None
        await admin.topics.change("N", changes, cluster=CLUSTER, force=True)
        await admin.topics.delete("N", CLUSTER)


async def test_a_reset_is_shown_before_it_is_done() -> None:
    async with open_cluster() as cluster, Admin(cluster.name_server_addresses) as admin:
        for n in range(3):
            cluster.master().store(TOPIC, 0, b"%d" % n)
        found = await admin.consumer_groups.preview_reset("G", TOPIC, -1)
        assert (found[Q0], len(found)) == ((None, 3), 4)
        one = await admin.consumer_groups.preview_reset("G", TOPIC, 0, ("broker-a", 0, 1))
        assert one == {Q0: (None, 1)}
        with pytest.raises(ClientError, match="no such queue"):
            await admin.consumer_groups.preview_reset("G", TOPIC, 0, ("broker-a", 9, 1))


async def test_a_change_sends_the_other_settings_as_they_are() -> None:
    """Brokers need all of them; a broker that does not serve 351 is asked for its table (21)."""
    async with open_cluster() as cluster, Admin(cluster.name_server_addresses) as admin:
        config = TopicConfig(topic_name="N", read_queue_nums=16, write_queue_nums=12, perm=4)
        await admin.topics.create_or_update(config, cluster=CLUSTER)
        changes = TopicChanges(perm=6, unit=True)
        done = await admin.topics.change("N", changes, cluster=CLUSTER, force=True)
        sent = cluster.master().requests[-1]
        assert sent.code == RequestCode.UPDATE_AND_CREATE_TOPIC
        assert (sent.ext["readQueueNums"], sent.ext["writeQueueNums"]) == ("16", "12")
        assert (sent.ext["perm"], sent.ext["topicSysFlag"]) == ("6", "1")
        assert sent.ext["force"] == "true"
        assert done["broker-a"].config.read_queue_nums == 16

        made = await admin.topics.change("New", TopicChanges(), cluster=CLUSTER)
        assert made["broker-a"].config.write_queue_nums == 8
        with pytest.raises(ClientError, match="illegal"):
            await admin.topics.change("no topic", TopicChanges(), cluster=CLUSTER)


async def test_targets_that_do_not_exist_are_named() -> None:
    async with open_cluster() as cluster, Admin(cluster.name_server_addresses) as admin:
        with pytest.raises(ClientError, match=r"no cluster Nope.*DefaultCluster"):
            await admin.cluster.masters("Nope")
        with pytest.raises(ClientError, match=r"no broker group x.*broker-a"):
            await admin.cluster.masters(broker="x")
        with pytest.raises(ClientError, match="say where"):
            await admin.topics.create_or_update(TopicConfig(topic_name="N"))
        await cluster.kill_master()
        with pytest.raises(NoMasterError):
            await admin.cluster.masters(CLUSTER)
        with pytest.raises(NoMasterError):
            await admin.topics.traffic(TOPIC)


async def test_messages_are_found_by_id_key_and_unique_key(cluster: FakeCluster) -> None:
    addresses = cluster.name_server_addresses
    async with Producer("pg", name_servers=addresses) as producer, Admin(addresses) as admin:
        sent = await producer.send(Message.of(TOPIC, "hello", keys="k1 k2"))
        by_id = await admin.messages.by_id(sent.offset_msg_id)
        by_unique = await admin.messages.by_unique_key(TOPIC, sent.msg_id)
        by_key = await admin.messages.by_key(TOPIC, "k2")
        assert by_id is not None and by_unique is not None
        assert by_id.body == by_unique.body == by_key[0].body == b"hello"
        assert by_unique.broker_name == by_key[0].broker_name == "broker-a"
        assert await admin.messages.by_key(TOPIC, "k") == []
        gone = sent.offset_msg_id[:-2] + "77"
        assert await admin.messages.by_id(gone) is None
        with pytest.raises(ClientError, match="no offset message id"):
            await admin.messages.by_id("xyz")


async def test_the_progress_of_a_group_is_that_of_all_its_queues(cluster: FakeCluster) -> None:
    for i in range(5):
        cluster.master().store(TOPIC, 0, b"%d" % i)
    offsets = cluster.groups["broker-a"].offsets
    offsets["g", TOPIC, 0] = 2
    offsets["other", TOPIC, 0] = 1
    async with Admin(cluster.name_server_addresses) as admin:
        progress = await admin.consumer_groups.progress("g")
        assert [(q.queue, q.broker_offset, q.consumer_offset) for q in progress.queues] == [
            (Q0, 5, 2)
        ]
        assert progress.lag == 3
        assert progress.members == ()
        assert await admin.consumer_groups.names() == ["g", "other"]


async def test_the_other_masters_can_be_asked_while_a_group_has_none() -> None:
    async with open_cluster(groups=2) as cluster, Admin(cluster.name_server_addresses) as admin:
        cluster.master("broker-b").store(TOPIC, 0, b"x")
        cluster.groups["broker-b"].offsets["g", TOPIC, 0] = 0
        await cluster.kill_master("broker-a")
        left = {"broker-b": cluster.master("broker-b").address}
        with pytest.raises(NoMasterError):
            await admin.consumer_groups.progress("g")
        assert await admin.consumer_groups.names(left) == ["g"]
        assert (await admin.consumer_groups.progress("g", masters=left)).lag == 1


async def test_broker_facts(cluster: FakeCluster) -> None:
    address = cluster.master().address
    async with Admin(cluster.name_server_addresses) as admin:
        info = await admin.cluster.info()
        assert info.broker_addr_table["broker-a"].broker_addrs[0] == address
        assert (await admin.brokers.runtime_info(address))["brokerVersionDesc"] == "FAKE"
        assert (await admin.brokers.ha_status(address)).master
        assert (await admin.brokers.epochs(address)).epoch_list[0].epoch == 1
        group = SubscriptionGroupConfig(group_name="g", retry_max_times=3)
        await admin.consumer_groups.update(group, broker="broker-a")
        table = (await admin.consumer_groups.settings(address)).subscription_group_table
        assert table["g"].retry_max_times == 3
        states = await admin.cluster.name_server_states()
        assert states == dict.fromkeys(cluster.name_server_addresses)
        cluster.master().before[RequestCode.GET_BROKER_RUNTIME_INFO].append(
            answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        )
        with pytest.raises(UnsupportedByBrokerError, match="GET_BROKER_RUNTIME_INFO"):
            await admin.brokers.runtime_info(address)


async def test_every_name_server_has_the_whole_time_to_answer(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first never answers; the last is asked meanwhile, and not with what was left."""
    monkeypatch.setattr(name_servers, "SHARE_MS", 100)
    first, *others = cluster.name_server_addresses
    cluster.name_servers[0].before[RequestCode.GET_BROKER_CLUSTER_INFO] += [silence] * 10
    async with Admin(cluster.name_server_addresses, timeout_ms=300) as admin:
        states = await admin.cluster.name_server_states()
    assert others and states == {first: states[first], **dict.fromkeys(others)}
    waited = re.search(r"no answer .* within (\d+) ms", states[first] or "")
    assert waited and int(waited[1]) > 100


async def test_attributes_are_worded_as_brokers_read_them() -> None:
    """`+key=value` sets, also what `config` has returned; `-key` takes away, without a value."""
    async with open_cluster() as cluster:
        config = TopicConfig(topic_name=TOPIC, attributes={"+a": "b", "-c": "", "d": "e"})
        async with Admin(cluster.name_server_addresses) as admin:
            await admin.topics.create_or_update(config, cluster=CLUSTER)
        (request,) = (
            r for r in cluster.master().requests if r.code == RequestCode.UPDATE_AND_CREATE_TOPIC
        )
        assert request.ext["attributes"] == "+a=b,-c,+d=e"


async def test_a_client_may_be_made_without_name_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For controllers and brokers only; what needs a name server says that there is none."""
    monkeypatch.setenv("NAMESRV_ADDR", "10.0.0.1:9876")
    assert name_servers_from(()) == ()
    assert name_servers_from(None) == ("10.0.0.1:9876",)
    async with open_cluster() as cluster, Admin(()) as admin:
        assert await admin.brokers.runtime_info(cluster.master().address)
        with pytest.raises(NoNameServerError, match="no name server given"):
            await admin.cluster.info()


def test_an_address_is_said_once() -> None:
    error = NoNameServerError([("h:1", "h:1: Connection refused")])
    assert "(h:1: Connection refused)" in str(error)
