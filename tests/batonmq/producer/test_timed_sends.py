"""Sends with a delay or a time, and their recall, against scripted brokers."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fake_cluster import answer, producing

from batonmq import Message, MessageIllegalError, ResponseCode, ResponseError
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.message_id import RecallHandle
from batonmq.protocol.properties import decode_properties
from batonmq.remoting.command import RemotingCommand

SEND, RECALL = RequestCode.SEND_MESSAGE_V2, RequestCode.RECALL_MESSAGE
AT = datetime(2027, 1, 1, 12, 0, 0, 5000, tzinfo=UTC)


@pytest.mark.parametrize(
    ("wish", "name", "value"),
    [
        ({"delay": 1.5}, "TIMER_DELAY_MS", "1500"),
        ({"delay": timedelta(milliseconds=7)}, "TIMER_DELAY_MS", "7"),
        ({"delay": 0.0011}, "TIMER_DELAY_MS", "2"),
        ({"deliver_at": 1_800_000_000.25}, "TIMER_DELIVER_MS", "1800000000250"),
        ({"deliver_at": AT}, "TIMER_DELIVER_MS", str(round(AT.timestamp() * 1000))),
    ],
)
async def test_the_wish_is_a_property_in_ms(wish: dict[str, Any], name: str, value: str) -> None:
    async with producing() as (cluster, producer):
        message = Message.of("T", "x")
        result = await producer.send(message, **wish)
        (sent,) = (one for one in cluster.master().requests if one.code == SEND)
        assert decode_properties(sent.ext["i"])[name] == value
        assert name not in message.properties, "the caller's message is as it was"
        assert result.recall_handle == "", "this broker gave none"


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ({"delay": 1, "deliver_at": 1}, "exclude each other"),
        ({"delay": -1}, "at least 0"),
        ({"delay": "5"}, "timedelta"),
        ({"delay": True}, "timedelta"),
        ({"delay": float("inf")}, "timedelta"),
        ({"delay": AT}, "timedelta"),
        ({"deliver_at": timedelta(hours=1)}, "datetime"),
        ({"deliver_at": "tomorrow"}, "datetime"),
        ({"deliver_at": datetime(2027, 1, 1)}, "time zone"),
    ],
)
async def test_a_wish_that_is_none_is_refused_where_it_is_given(
    wish: dict[str, Any], named: str
) -> None:
    async with producing() as (cluster, producer):
        with pytest.raises(MessageIllegalError, match=named):
            await producer.send(Message.of("T", "x"), **wish)
        assert 310 not in cluster.master().codes()


async def test_a_recall_goes_to_the_broker_of_the_handle() -> None:
    async with producing() as (cluster, producer):
        master = cluster.master()
        handle = RecallHandle("T", master.group.name, 1_800_000_000_001, "K1").encode()

        async def store(request: RemotingCommand, connection: Any) -> RemotingCommand:
            reply = await master.serve(request, connection)
            reply.ext["recallHandle"] = handle
            return reply

        master.before[SEND].append(store)
        result = await producer.send(Message.of("T", "x"), delay=60)
        assert result.recall_handle == handle
        master.before[RECALL].append(answer(ResponseCode.SUCCESS, ""))
        assert await producer.recall("T", handle) == "K1"
        (asked,) = (one for one in master.requests if one.code == RECALL)
        assert asked.ext["recallHandle"] == handle and asked.ext["topic"] == "T"
        master.before[RECALL].append(answer(ResponseCode.ILLEGAL_OPERATION, "it is due already"))
        with pytest.raises(ResponseError, match="due already"):
            await producer.recall("T", handle)
        with pytest.raises(MessageIllegalError, match="recall handle"):
            await producer.recall("T", "nonsense")
