"""This project's own POP consumer at a real broker, also while the master changes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from unittest.mock import Mock

import pytest
from lone_broker import Rig, run_with_broker, until

from batonmq import ClientOptions, Hook, MessageExt, PopConsumer
from batonmq.broker.write import log_features
from batonmq.client.errors import ClientError
from batonmq.protocol.bodies import BrokerData, QueueData, TopicRouteData
from batonmq.protocol.codes import RequestCode
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Processors
from batonmq.remoting.endpoint import RemotingServer


@asynccontextmanager
async def consumer_of(rig: Rig, hook: Hook | None = None) -> AsyncIterator[PopConsumer]:
    """One that finds the broker by a name server that knows nothing else."""
    route = TopicRouteData(
        broker_datas=[
            BrokerData(broker_name="broker-a", cluster="C", broker_addrs={0: rig.service.address})
        ],
        queue_datas=[QueueData(broker_name="broker-a", read_queue_nums=4, write_queue_nums=4)],
    )
    processors = Processors()
    processors.register(
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        lambda request, _: RemotingCommand.response_to(request, body=route.encode()),
    )
    server = RemotingServer(processors, name="names", idle_timeout_s=60)
    port = await server.listen("127.0.0.1", 0)
    try:
        options = ClientOptions(hook=hook)
        servers = f"127.0.0.1:{port}"
        async with PopConsumer("g", name_servers=servers, client_options=options) as consumer:
            await consumer.subscribe("T")
            yield consumer
    finally:
        await server.close()


def test_r30_received_acked_put_off_and_given_again_through_a_change_of_masters(
    tmp_path, monkeypatch
):
    now_ms = 1_800_000_000_000
    monkeypatch.setattr(log_features, "wall_ms", lambda: now_ms)
    monkeypatch.setattr(log_features, "MAX_PAUSE_MS", 1)
    monkeypatch.setattr("batonmq.client.consumer.pop_consumer.wall_ms", lambda: now_ms)

    async def play(rig: Rig) -> None:
        nonlocal now_ms
        await rig.send("T", b"0")
        async with consumer_of(rig) as consumer:
            got = {message.body: message for message in await consumer.receive("T")}
            first = asyncio.ensure_future(consumer.receive("T"))
            await until(lambda: rig.service.pop.held == 1)
            for number in range(1, 6):
                await rig.send("T", b"%d" % number, queue=number % 4)
            got |= {message.body: message for message in await first}
            while len(got) < 6:
                got |= {message.body: message for message in await consumer.receive("T")}
            for body in (b"0", b"1", b"2"):
                await consumer.ack(got[body])
            await consumer.change_invisible_time(got[b"3"], 3_600_000)
            rig.service.role_left()
            rig.service.master_opened()
            await consumer.ack(got[b"4"])
            now_ms += 60_200
            again: list[MessageExt] = await consumer.receive("T")
            (message,) = again
            assert (message.body, message.topic, message.reconsume_times) == (b"5", "T", 1)
            await consumer.ack(message)
            assert len(rig.service.features.pop.table) == 1
            await consumer.change_invisible_time(got[b"3"], 1000)
            now_ms += 1_200
            assert [message.body for message in await consumer.receive("T")] == [b"3"]
            await consumer.change_invisible_time(got[b"3"], 1000)  # no more in flight: no effect
            with pytest.raises(ClientError, match="subscribe"):
                await consumer.receive("Other")
            assert await consumer.receive("T", timeout_ms=1) == []

    run_with_broker(tmp_path, play)


async def test_a_hook_sees_what_is_received_and_what_is_done_with_it(rig):
    hook = Mock(consuming=Mock(side_effect=lambda call: nullcontext(call)))
    await rig.send("T", b"0")
    async with consumer_of(rig, hook) as consumer:
        (message,) = await consumer.receive("T")
        with consumer.processing(message):
            await consumer.ack(message)
    ((reception,),) = [each.args for each in hook.received.call_args_list]
    assert (reception.group, reception.topic, reception.messages) == ("g", "T", [message])
    ((call,),) = [each.args for each in hook.consuming.call_args_list]
    assert (str(call.queue), call.succeeded) == (f"T@broker-a:{message.queue_id}", True)
