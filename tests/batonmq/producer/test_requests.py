"""Questions and answers of a producer, against scripted brokers."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable

import pytest
from fake_cluster import FakeCluster, producing

from batonmq import Message, MessageExt, MessageIllegalError, NoReplyError
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.properties import decode_properties, encode_properties
from batonmq.protocol.sysflag import COMPRESSED, COMPRESSION_ZLIB
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection

BEAT, SEND = RequestCode.HEART_BEAT, RequestCode.SEND_MESSAGE_V2
STORED = {"msgId": "0", "queueId": "0", "queueOffset": "0"}
ASKING = ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL")


def pushing(
    pushes: list[int], body: bytes, flag: int = 0
) -> Callable[[RemotingCommand, Connection], Awaitable[RemotingCommand]]:
    """A broker that pushes an answer, twice, before it takes the send. `pushes`: the codes of what
    the client said to it."""

    async def push(request: RemotingCommand, connection: Connection) -> RemotingCommand:
        asked = decode_properties(request.ext["i"])
        properties = encode_properties({name: asked[name] for name in ASKING})
        ext = {"topic": "R", "properties": properties, "sysFlag": str(flag), "flag": "x"}
        for _ in range(2):
            pushed = RemotingCommand.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, ext, body)
            pushes.append((await connection.invoke(pushed, 5000)).code)
        return RemotingCommand.response_to(request, ext=STORED)

    return push


def asked_by_another(cluster: FakeCluster, **properties: str) -> MessageExt:
    return MessageExt(
        "T", 0, 0, 0, 100, "id", b"how late?", 0, 0, 0, 0, "", 0, "", 0, 0, properties,
        broker_name=cluster.master().group.name,
    )  # fmt: skip


async def test_a_question_is_answered_by_what_the_broker_pushes() -> None:
    """The broker knows the asker before the question comes; the first answer counts."""
    async with producing() as (cluster, producer):
        master = cluster.master()
        for body, flag in ((b"noon", 0), (zlib.compress(b"noon"), COMPRESSED | COMPRESSION_ZLIB)):
            pushes: list[int] = []
            master.before[SEND].append(pushing(pushes, body, flag))
            answer = await producer.request(Message.of("T", b"how late?", keys="k"))
            assert (answer.body, answer.topic, pushes[0]) == (b"noon", "R", 0)
        codes = [code for code in master.codes() if code in (BEAT, SEND)]
        assert codes[0] == BEAT and codes[-2:] == [SEND, SEND]
        sent = next(one for one in master.requests if one.code == SEND)
        properties = decode_properties(sent.ext["i"])
        assert properties["REPLY_TO_CLIENT"] == producer.client.client_id
        assert (properties["TTL"], properties["KEYS"]) == ("3000", "k")


async def test_a_bad_question_is_refused_before_anything_is_sent() -> None:
    async with producing() as (cluster, producer):
        before = cluster.master().codes()
        with pytest.raises(MessageIllegalError, match="body is empty"):
            await producer.request(Message("T", b""))
        assert cluster.master().codes() == before


async def test_an_answer_counts_before_the_question_is_acknowledged() -> None:
    """The broker that has it, and gave it to a consumer, ends before it acknowledges it."""
    async with producing() as (cluster, producer):
        master = cluster.master()
        pushes: list[int] = []
        push = pushing(pushes, b"noon", 0)
        unanswered = asyncio.Event()

        async def answered_first(
            request: RemotingCommand, connection: Connection
        ) -> RemotingCommand | None:
            await push(request, connection)
            await unanswered.wait()
            return None

        master.before[SEND].append(answered_first)
        answer = await producer.request(Message.of("T", b"how late?"), timeout_ms=60_000)
        assert answer.body == b"noon"
        unanswered.set()


async def test_nobody_answers_in_time_and_the_late_answer_is_refused() -> None:
    async with producing() as (cluster, producer):
        master = cluster.master()
        connections: list[Connection] = []

        async def keep(request: RemotingCommand, connection: Connection) -> RemotingCommand:
            connections.append(connection)
            return RemotingCommand.response_to(request, ext=STORED)

        master.before[SEND].append(keep)
        with pytest.raises(NoReplyError, match="no answer to a question in T within 50 ms"):
            await producer.request(Message.of("T", b"x"), timeout_ms=50)
        (connection,) = connections
        late = RemotingCommand.request(
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
            {"properties": encode_properties({"CORRELATION_ID": "gone"})},
        )
        assert (await connection.invoke(late, 5000)).code == 1
        cancelled = asyncio.ensure_future(producer.request(Message.of("T", b"x")))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert producer._questions._waiting == {}


async def test_an_answer_goes_to_the_broker_of_the_question() -> None:
    async with producing() as (cluster, producer):
        cluster.add_topic("DefaultCluster_REPLY_TOPIC")
        asks = dict.fromkeys(ASKING, "7") | {"CLUSTER": "DefaultCluster"}
        reported: list[RemotingCommand] = []

        async def take(request: RemotingCommand, _: Connection) -> RemotingCommand:
            reported.append(request)
            return RemotingCommand.response_to(request, ext=STORED)

        cluster.master().before[RequestCode.SEND_REPLY_MESSAGE_V2].append(take)
        result = await producer.reply(asked_by_another(cluster, **asks), b"noon")
        assert result.acknowledged
        (sent,) = reported
        properties = decode_properties(sent.ext["i"])
        assert (sent.body, sent.ext["b"]) == (b"noon", "DefaultCluster_REPLY_TOPIC")
        assert properties["MSG_TYPE"] == "reply"
        assert {name: properties[name] for name in ASKING} == dict.fromkeys(ASKING, "7")
        with pytest.raises(MessageIllegalError, match="asks for no answer: it lacks CLUSTER"):
            await producer.reply(asked_by_another(cluster), b"noon")
