"""Reads and writes of a cluster that knows users: signed as the user that the options or the
driver's environment name, and no text shows the secret."""

import asyncio
import contextlib
import pickle
from dataclasses import replace

import pytest
import uvloop
from local_log import LocalLog

from batonmq.auth.config import AuthConfig
from batonmq.auth.given import environment_of
from batonmq.auth.signature import Credentials, Signer
from batonmq.broker.service import BrokerService
from batonmq.controller.config import ControllerConfig
from batonmq.controller.main import guard_of
from batonmq.controller.raft.log import Machine
from batonmq.controller.service import ControllerService
from batonmq.namesrv.config import NamesrvConfig
from batonmq.namesrv.service import NamesrvService
from batonmq.protocol.codes import RequestCode
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from batonmq.spark.live.cluster import ClusterError
from batonmq.spark.live.history_feed import HistoryFeed
from batonmq.spark.live.options import Access, HistoryOptions, SinkOptions, TopicOptions
from batonmq.spark.live.sink_sender import SinkSender, row_of
from batonmq.spark.live.topic_read import TopicRead
from tests.broker.lone_broker import sections_of
from tests.shared.ports import free_ports
from tests.shared.waiting import opened, until

SECRET = "hidden-secret"
ADMIN = Credentials(access_key="admin", secret_key=SECRET)
OPTIONS = {"accessKey": "admin", "secretKey": SECRET}
AUTH = AuthConfig(
    authentication_enabled=True,
    authorization_enabled=True,
    inner_client_authentication_credentials='{"accessKey":"node","secretKey":"of the nodes"}',
    init_authentication_user=f'{{"username":"admin","password":"{SECRET}"}}',
)


@contextlib.asynccontextmanager
async def running(service):
    await service.start()
    try:
        yield service
    finally:
        await service.close()


def oldest_event(**options):
    feed = HistoryFeed(HistoryOptions.from_mapping(options))
    try:
        return feed.initial()
    finally:
        feed.close()


def test_an_option_that_names_no_files_leaves_those_of_the_environment(monkeypatch):
    """Else checkHost=false alone would send requests without TLS."""
    monkeypatch.setenv("BATONMQ_TLS_TRUST", "/ca.pem")
    for name, value in (("checkHost", "false"), ("keyPassword", "p")):
        assert Access.from_mapping({name: value}).trust_cert_path == "/ca.pem"
    assert not Access.from_mapping({"tlsEnable": "false"}).trust_cert_path


def test_the_history_is_read_as_the_user_of_the_options(tmp_path):
    async def test():
        config = ControllerConfig(
            controller_peers=f"n0-127.0.0.1:{free_ports(10)}",
            bind_address="127.0.0.1",
            controller_store_path=str(tmp_path),
        )
        log = LocalLog("n0", Machine())
        service = ControllerService(config, replicated_log=log, guard=guard_of(AUTH))
        async with running(service):
            await opened(service.gate)
            address = config.self_peer.remoting_address
            client = RemotingClient(sign=Signer(ADMIN))
            names = {"clusterName": "c", "brokerName": "b", "appliedBrokerId": "1"}
            names |= {"registerCheckCode": "127.0.0.1:1;1"}
            request = RemotingCommand.request(RequestCode.CONTROLLER_APPLY_BROKER_ID, names)
            assert (await client.invoke(address, request, 5000)).code == 0
            await client.close()

            async def oldest(wait, **user):
                options = {"controllers": address, "operationTimeout": wait} | user
                return await asyncio.to_thread(oldest_event, **options)

            assert await oldest("20s", **OPTIONS) is not None
            with pytest.raises(ClusterError, match="not signed"):
                await oldest("50ms")
            with pytest.raises(ClusterError) as refused:
                await oldest("50ms", accessKey="admin", secretKey=f"{SECRET}-wrong")
            assert SECRET not in str(refused.value)

    uvloop.run(test())


def test_topics_are_written_and_read_as_the_user_of_the_environment(tmp_path, monkeypatch):
    for name, value in environment_of(ADMIN).items():
        monkeypatch.setenv(name, value)
    given = {"topic": "Orders", "operationTimeout": "20s"}

    def rows():
        read = TopicRead(TopicOptions.from_mapping(given))
        read, tasks = pickle.loads(pickle.dumps((read, read.plan())))  # as they reach an executor
        return sum(len(batch) for task in tasks for batch in read.run(task))

    async def send(acks):
        options = SinkOptions.from_mapping({"topic": "Orders", "nameServers": given["nameServers"]})
        sender = SinkSender(options, acks.extend)
        await sender.start()
        await sender.add([row_of(0, "job-0-0-", {"body": b"x"}, "Orders")])
        await sender.finish()
        await sender.close()

    async def test():
        names = NamesrvService(NamesrvConfig(listen_port=0, bind_address="127.0.0.1"), auth=AUTH)
        async with running(names):
            given["nameServers"] = f"127.0.0.1:{names.port}"
            sections = sections_of(tmp_path, broker={"namesrv_addr": given["nameServers"]})
            async with running(BrokerService(replace(sections, auth=AUTH), pytest.fail)):
                await until(lambda: names._guard.user("admin") is not None)
                acks = []
                await send(acks)
                assert len(acks) == 1
                assert await asyncio.to_thread(rows) == 1
                monkeypatch.delenv("BATONMQ_ACCESS_KEY")
                with pytest.raises(ValueError, match="accessKey and secretKey are needed") as half:
                    TopicOptions.from_mapping(given)
                assert SECRET not in str(half.value)
                monkeypatch.delenv("BATONMQ_SECRET_KEY")
                with pytest.raises(ClusterError, match="not signed"):
                    await asyncio.to_thread(rows)

    uvloop.run(test())


@pytest.mark.parametrize("kind", [HistoryOptions, TopicOptions, SinkOptions])
def test_no_text_of_the_options_shows_a_secret(kind):
    at = "controllers" if kind is HistoryOptions else "nameServers"
    given = {at: "h:1", "SECRETKEY": SECRET, "accessKey": "admin", "securityToken": SECRET}
    given |= {} if kind is HistoryOptions else {"topic": "T"}
    made = kind.from_mapping(given)
    assert made.access.secret_key == SECRET
    assert pickle.loads(pickle.dumps(made)).access.security_token == SECRET
    assert SECRET not in repr(made) + str(made) and "admin" in repr(made)
    with pytest.raises(ValueError, match="accessKey and secretKey are needed") as half:
        Access.from_mapping({"secretKey": SECRET})
    with pytest.raises(ValueError, match="unknown option x") as unknown:
        kind.from_mapping(given | {"x": "y"})
    assert SECRET not in f"{half.value} {unknown.value}"
