"""What admin calls send and say: attributes, broker names, clients without name servers."""

import asyncio

import pytest
import uvloop
from fake_cluster import CLUSTER, FakeCluster

from batonmq import Admin, Message, Producer
from batonmq.errors import NoNameServerError
from batonmq.name_servers import name_servers_from
from protocol.bodies import TopicConfig
from protocol.codes import RequestCode

TOPIC = "T"


def test_attributes_are_worded_as_brokers_read_them() -> None:
    """`+key=value` sets; `-key` takes away and must not carry an equals sign."""

    async def main() -> None:
        async with FakeCluster() as cluster, asyncio.timeout(20):
            config = TopicConfig(topic_name=TOPIC, attributes={"+a": "b", "-c": ""})
            async with Admin(cluster.name_server_addresses) as admin:
                await admin.create_or_update_topic(config, cluster=CLUSTER)
            (request,) = (
                r
                for r in cluster.master().requests
                if r.code == RequestCode.UPDATE_AND_CREATE_TOPIC
            )
            assert request.ext["attributes"] == "+a=b,-c"

    uvloop.run(main())


def test_messages_found_by_key_name_their_broker_group() -> None:
    async def main() -> None:
        async with FakeCluster() as cluster, asyncio.timeout(20):
            cluster.add_topic(TOPIC)
            addresses = cluster.name_server_addresses
            async with Producer("g", name_servers=addresses) as producer, Admin(addresses) as admin:
                sent = await producer.send(Message.of(TOPIC, "x", keys="k"))
                (found,) = await admin.messages_by_key(TOPIC, "k")
                unique = await admin.message_by_unique_key(TOPIC, sent.msg_id)
            assert unique is not None
            assert found.broker_name == unique.broker_name == "broker-a"

    uvloop.run(main())


def test_a_client_may_be_made_without_name_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For controllers and brokers only; what needs a name server says that there is none."""
    monkeypatch.setenv("NAMESRV_ADDR", "10.0.0.1:9876")
    assert name_servers_from(()) == ()
    assert name_servers_from(None) == ("10.0.0.1:9876",)

    async def main() -> None:
        async with FakeCluster() as cluster, asyncio.timeout(20), Admin(()) as admin:
            assert await admin.broker_runtime_info(cluster.master().address)
            with pytest.raises(NoNameServerError, match="no name server given"):
                await admin.cluster_info()

    uvloop.run(main())


def test_an_address_is_said_once() -> None:
    error = NoNameServerError([("h:1", "h:1: Connection refused")])
    assert "(h:1: Connection refused)" in str(error)
