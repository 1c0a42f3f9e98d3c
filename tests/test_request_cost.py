"""What the largest legal request of each code costs: lines of Python in a turn of the loop, bytes
of JSON in one call, and memory (R58).

Counted, not timed. The states have 10,000 of everything (`tests.test_ten_thousand`), the messages
are as large and as many as they may be. The tables must name every code that is served.
"""

import asyncio
import base64
import inspect
import logging
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from batonmq.namesrv.endpoint import GROUPS_AT_ONCE
from batonmq.namesrv.kv_config import VALUE_SIZE_MAX
from batonmq.protocol import fastjson, json_body
from batonmq.protocol.batch import MESSAGES_MAX, BatchItem, encode_batch, split_batch
from batonmq.protocol.bodies import (
    BatchAck,
    BatchAckMessageRequestBody,
    LockBatchRequestBody,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
    TopicConfig,
    TopicConfigList,
)
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.json_body import REQUEST_SIZE_MAX
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.records import columns
from batonmq.remoting import budget
from batonmq.remoting.command import FRAME_SIZE_MAX, RemotingCommand, encode_frame
from batonmq.remoting.connection import BACKLOG_BYTES_MAX, Processors
from tests.broker.heartbeats import heartbeat
from tests.broker.lone_broker import (
    lone_broker,
    long_send_header,
    pop_header,
    pull_header,
    send_header,
    topic_header,
)
from tests.shared.turns import counted_turns
from tests.test_ten_thousand import MANY, World, _registration, runner

__all__ = ["runner"]

LINES_MAX = 5 * MANY
"""A quarter of 10 ms: 0.043 µs a line, measured once, over batches of 100 to 4000 messages."""
JSON_BYTES_MAX = REQUEST_SIZE_MAX
"""10 ms: 0.25 to 0.5 GB/s, read or written by one call into C, measured over heartbeats (34)."""
LINES_MAX_OF = dict.fromkeys((25, 103, 105, 207, 217, 318), 230_000)
"""10 ms."""
PLACED_MAX = 1024
"""Records of a batch that get their places by one call into C: 2 ms."""
JSON_BYTES_MAX_OF = {317: FRAME_SIZE_MAX, 106: 1 << 18}
"""Of 317 the pieces are JSON already: they are copied. Of 106 each broker group is one."""
MEMORY_MAX = BACKLOG_BYTES_MAX
"""What may wait for one connection."""

ASKED_TWICE = {18, 208, 222, 223, 225, 314, 317, 320}
"""They count lines and memory in a request each: both at once take five times as long. The second
request costs what the first one did."""

MESSAGE_MAX = 4 << 20
NAME = "n" * 127
Case = tuple[dict[str, str], bytes]


def _group_configs() -> bytes:
    many = [SubscriptionGroupConfig(group_name=f"new{n}") for n in range(MANY)]
    return SubscriptionGroupList(group_config_list=many).encode()


def _topic_configs() -> bytes:
    many = [TopicConfig(topic_name=f"new{n}") for n in range(MANY)]
    return TopicConfigList(topic_config_list=many).encode()


def _locks() -> bytes:
    queues = [MessageQueue("wide", "broker-a", number) for number in range(MANY)]
    return LockBatchRequestBody(client_id="c", consumer_group="g1", mq_set=queues).encode()


def _acks() -> bytes:
    bits = base64.b64encode(b"\xff" * 512).decode()
    entry = BatchAck(bit_set=bits, consumer_group="g1", topic="large", retry="0")
    return BatchAckMessageRequestBody(broker_name="broker-a", acks=[entry]).encode()


SETTINGS = b"\n".join(b"k%d=v" % number for number in range(3000))
BATCH = [BatchItem(b"x", b"UNIQ_KEY\x01%032X\x02" % n) for n in range(MESSAGES_MAX)]
POP = pop_header(consumerGroup="g1", topic="large")
PULL = pull_header(consumerGroup="g1", topic="large")
LARGE_QUEUE = {"topic": "large", "queueId": "0"}
END = {
    "producerGroup": "p", "tranStateTableOffset": "0", "commitLogOffset": "0",
    "commitOrRollback": "8", "fromTransactionCheck": "false", "msgId": "K",
}  # fmt: skip
HANDLE = {"consumerGroup": "g1", **LARGE_QUEUE, "offset": "0", "extraInfo": "0 1 60000 0 0 b 0 0"}

BROKER: dict[int, Callable[[], Case]] = {
    10: lambda: (long_send_header(topic="T1"), b"x" * MESSAGE_MAX),
    310: lambda: (send_header("T1", 0, {"KEYS": "k" * 30_000}), b"x" * MESSAGE_MAX),
    320: lambda: (send_header("T1", 0, {}) | {"m": "true"}, encode_batch(BATCH)),
    11: lambda: (PULL, b""),
    361: lambda: (PULL, b""),
    12: lambda: ({"topic": "large", "key": "K", "maxNum": "64", "beginTimestamp": "0",
                  "endTimestamp": str(2**62)}, b""),
    14: lambda: (LARGE_QUEUE | {"consumerGroup": "everywhere"}, b""),
    15: lambda: (LARGE_QUEUE | {"consumerGroup": "everywhere", "commitOffset": "1"}, b""),
    17: lambda: (topic_header(NAME, 1024), b""),
    18: lambda: ({}, _topic_configs()),
    21: lambda: ({}, b""),
    25: lambda: ({}, SETTINGS),
    26: lambda: ({}, b""),
    28: lambda: ({}, b""),
    29: lambda: (LARGE_QUEUE | {"timestamp": "1"}, b""),
    30: lambda: (LARGE_QUEUE, b""),
    31: lambda: (LARGE_QUEUE, b""),
    32: lambda: (LARGE_QUEUE, b""),
    33: lambda: ({"offset": "0"}, b""),
    34: lambda: ({}, heartbeat("c", *(f"T{n}" for n in range(MANY)), group="g1").encode()),
    35: lambda: ({"clientID": "c", "consumerGroup": "g1", "producerGroup": "p"}, b""),
    36: lambda: ({"offset": "0", "group": "g1", "delayLevel": "1", "originTopic": "large"}, b""),
    37: lambda: (END, b""),
    38: lambda: ({"consumerGroup": "members"}, b""),
    41: lambda: ({}, _locks()),
    42: lambda: ({}, _locks()),
    43: lambda: ({}, b""),
    45: lambda: ({}, b""),
    46: lambda: ({}, b'{"clientId":"c","group":"g1","subscriptionData":{"topic":"T1","subString":"'
                 + b" OR ".join(b"a%d=1" % n for n in range(500))
                 + b'","expressionType":"SQL92"}}'),
    60: lambda: ({}, b""),
    61: lambda: ({}, b""),
    200: lambda: ({}, SubscriptionGroupConfig(group_name="g" * 255).encode()),
    201: lambda: ({}, b""),
    202: lambda: ({"topic": "wide"}, b""),
    203: lambda: ({"consumerGroup": "members"}, b""),
    204: lambda: ({"producerGroup": "p", "topic": "T1"}, b""),
    208: lambda: ({"consumerGroup": "everywhere"}, b""),
    222: lambda: ({"topic": "wide", "group": "g1", "timestamp": "-1", "isForce": "true"}, b""),
    223: lambda: ({"topic": "T1", "group": "members"}, b""),
    225: lambda: ({}, _group_configs()),
    300: lambda: ({"topic": "T1"}, b""),
    303: lambda: ({"topic": "wide", "group": "g1"}, b""),
    305: lambda: ({}, b""),
    307: lambda: ({"consumerGroup": "members", "clientId": "c1"}, b""),
    309: lambda: ({"consumerGroup": "members", "clientId": "c1", "msgId": "0" * 32}, b""),
    314: lambda: ({"srcGroup": "everywhere", "destGroup": "copy", "topic": "", "offline": "false"},
                  b""),
    315: lambda: ({"statsName": "TOPIC_PUT_NUMS", "statsKey": "T1"}, b""),
    317: lambda: ({"isOrder": "false"}, b""),
    321: lambda: (LARGE_QUEUE | {"index": "0", "count": "1024"}, b""),
    323: lambda: ({"topic": "TRANS_CHECK_MAX_TIME_TOPIC", "msgId": "0" * 32}, b""),
    324: lambda: (long_send_header(topic="T1", bornHost="h", storeHost="h", storeTimestamp="1"),
                   b"x" * MESSAGE_MAX),
    325: lambda: (send_header("T1", 0, {}), b"x" * MESSAGE_MAX),
    328: lambda: ({}, b""),
    343: lambda: ({"group": "everywhere"}, b""),
    345: lambda: ({"group": "g1", "topic": "T1"}, b""),
    351: lambda: ({"topic": "wide"}, b""),
    352: lambda: ({"group": "g1"}, b""),
    353: lambda: ({"group": "g1", "topic": "T1", "readable": "false"}, b""),
    370: lambda: ({"topic": "T1", "recallHandle": "x" * 10_000, "producerGroup": "p"}, b""),
    400: lambda: ({}, b'{"topic":"wide","consumerGroup":"members","clientId":"c1",'
                  b'"strategyName":"AVG","messageModel":"CLUSTERING"}'),
    401: lambda: ({}, b'{"topic":"T1","consumerGroup":"g1","mode":"POP","popShareQueueNum":4}'),
    402: lambda: ({}, b""),
    905: lambda: ({"minBrokerId": "0", "minBrokerAddr": "h:1"}, b""),
    906: lambda: ({}, b""),
    907: lambda: ({}, b""),
    908: lambda: ({"masterFlushOffset": "0"}, b""),
    1007: lambda: ({}, b""),
    1008: lambda: ({"masterEpoch": "1", "masterAddress": "h:1", "syncStateSetEpoch": "1"},
                   b'{"syncStateSet":[' + b"0," * 100_000 + b'0],"syncStateSetEpoch":1}'),
    3001: lambda: ({"username": "u"}, b'{"password":"p"}'),
    3002: lambda: ({"username": "u"}, b'{"password":"p"}'),
    3003: lambda: ({"username": "u"}, b""),
    3004: lambda: ({"username": "u"}, b""),
    3005: lambda: ({}, b""),
    3006: lambda: ({"subject": "User:u"}, b"{}"),
    3007: lambda: ({"subject": "User:u"}, b"{}"),
    3008: lambda: ({"subject": "User:u"}, b""),
    3009: lambda: ({"subject": "User:u"}, b""),
    3010: lambda: ({}, b""),
    60001: lambda: ({}, b""),
    60002: lambda: ({}, b""),
    60003: lambda: ({"consumerGroup": "members"}, b""),
    60004: lambda: ({}, b""),
    60005: lambda: ({}, b""),
    60006: lambda: ({}, b""),
    60008: lambda: ({}, b""),
    60009: lambda: ({"username": "u", "step": "begin"}, b'{"password":"q"}'),
    60010: lambda: ({}, b""),
    60011: lambda: ({"nameServer": "127.0.0.1:1", "masterAddr": "127.0.0.1:2"}, b""),
    200050: lambda: (POP, b""),
    200051: lambda: (HANDLE, b""),
    200052: lambda: (POP, b""),
    200053: lambda: (HANDLE | {"invisibleTime": "1000"}, b""),
    200054: lambda: (POP, b""),
    200055: lambda: (POP, b""),
    200151: lambda: ({}, _acks()),
    329: lambda: ({}, b""),
    306: lambda: ({}, b""),
    354: lambda: ({"topic": "T1"}, b""),
    355: lambda: ({}, b""),
    2001: lambda: ({}, b"g=1\n" * 100_000),
    2002: lambda: ({}, b"g" * 100_000),
    2003: lambda: ({}, b""),
    2004: lambda: ({"READ_AHEAD_MODE": "1"}, b""),
    200056: lambda: ({}, b""),
    207: lambda: ({"groupName": "everywhere", "cleanOffset": "true"}, b""),
    215: lambda: ({"topic": "wide"}, b""),
    316: lambda: ({}, b""),
}  # fmt: skip

MEMBER = {"clusterName": "C", "brokerName": "b1", "brokerAddr": "127.0.0.1:1", "brokerId": "0"}
KEY = {"namespace": "n" * 255, "key": "k" * 255}
NAMES: dict[int, Callable[[], Case]] = {
    100: lambda: (KEY | {"value": "v" * VALUE_SIZE_MAX}, b""),
    101: lambda: (KEY, b""),
    102: lambda: (KEY, b""),
    219: lambda: (KEY, b""),
    103: lambda: (MEMBER | {"haServerAddr": "h:1"}, _registration(_topics()).encode()),
    322: lambda: (MEMBER, b'{"stateVersion":0,"timestamp":1,"counter":1}'),
    904: lambda: (MEMBER, b""),
    901: lambda: (MEMBER, b""),
    105: lambda: ({"topic": "T"}, b""),
    106: lambda: ({}, b""),
    205: lambda: ({"brokerName": "b1"}, b""),
    327: lambda: ({"brokerName": "b1"}, b""),
    206: lambda: ({}, b""),
    304: lambda: ({}, b""),
    224: lambda: ({"cluster": "C"}, b""),
    311: lambda: ({}, b""),
    312: lambda: ({}, b""),
    313: lambda: ({}, b""),
    217: lambda: ({"topic": "new"}, b'{"queueDatas":[' + b",".join(
        b'{"brokerName":"b%d","perm":6,"readQueueNums":4,"writeQueueNums":4}' % n
        for n in range(GROUPS_AT_ONCE)) + b"]}"),
    216: lambda: ({"topic": "T"}, b""),
    104: lambda: (MEMBER, b""),
    318: lambda: ({}, SETTINGS),
    319: lambda: ({}, b""),
}  # fmt: skip


def _topics() -> dict[str, TopicConfig]:
    return {f"T{number}": TopicConfig(topic_name=f"T{number}") for number in range(MANY)}


@dataclass
class Meter:
    """What the turns of one request cost."""

    json_bytes: int = 0
    placed: int = 0

    def count(self, patch: pytest.MonkeyPatch) -> None:
        place = columns.put_places

        def put_places(data: bytearray, bounds: list[int], **named: Any) -> None:
            self.placed = max(self.placed, len(bounds) - 1)
            place(data, bounds, **named)

        patch.setattr(columns, "put_places", put_places)
        for module, name in (
            (json_body, "_encode"),
            (json_body, "_encode_lines"),
            (fastjson, "_decode"),
            (json_body, "decode_json"),
        ):
            patch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **named: Any) -> Any:
            result = call(*args, **named)
            for each in (*args, result):
                if isinstance(each, bytes | str):
                    self.json_bytes = max(self.json_bytes, len(each))
            return result

        return counting


@pytest.fixture(scope="module")
def world(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    life = lone_broker(
        tmp_path_factory.mktemp("broker"),
        mapped_file_size_commit_log=32 << 20,
        max_index_num=100_000,
    )
    world = World(runner.run(life.__aenter__()))
    world.build()

    async def fill() -> None:
        for _ in range(6):
            assert (await world.rig.send("large", b"x" * MESSAGE_MAX, KEYS="K")).code == 0

    runner.run(fill())
    yield world
    runner.run(life.__aexit__(None, None, None))


SERVERS = [("broker", code) for code in BROKER] + [("names", code) for code in NAMES]


def _name_server(world: World) -> Processors:
    processors = Processors()
    world.names.install(processors)
    return processors


def test_every_code_has_a_case(world: World) -> None:
    broker = world.service.endpoint.processors
    assert set(BROKER) == {*broker.handlers, *broker.raw_handlers}
    assert set(NAMES) == set(_name_server(world).handlers)


def test_r58_few_requests_with_large_answers_are_handled_at_a_time(world: World) -> None:
    broker = world.service.endpoint.processors
    tables, positions = {21, 43, 45, 201, 402, 60002}, {202, 208, 222, 300, 303, 314, 317, 343}
    assert broker.large == tables | positions | {203, 204, 328, 400, 60003}
    assert _name_server(world).large == {103, 105, 106, 206, 224, 304, 311, 312, 313}


@pytest.mark.parametrize("server, code", SERVERS)
def test_r58_the_largest_request_of_each_code_is_cheap(
    world: World, runner: asyncio.Runner, server: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ext, body = (BROKER if server == "broker" else NAMES)[code]()
    request = RemotingCommand.request(code, ext, body)
    monkeypatch.setattr(budget, "boot_s", lambda: 0.0)  # slices are not cut short by the time

    async def play() -> RemotingCommand:
        await asyncio.sleep(0)
        if server == "broker":
            return await world.rig.client.invoke(world.service.address, request, 60_000)
        reply = _name_server(world).handlers[code](request, world.channel)  # type: ignore[arg-type]
        reply = await reply if inspect.isawaitable(reply) else reply
        assert reply is not None
        encode_frame(reply)
        return reply

    meter = Meter()
    meter.count(monkeypatch)
    logging.disable()
    with counted_turns() as turns:
        if code not in ASKED_TWICE:
            tracemalloc.start()
        reply = runner.run(play())
    if code in ASKED_TWICE:
        tracemalloc.start()
        runner.run(play())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    logging.disable(logging.NOTSET)
    assert turns.lines <= LINES_MAX_OF.get(code, LINES_MAX), f"{turns.lines} lines in one turn"
    assert meter.placed <= PLACED_MAX
    assert meter.json_bytes <= JSON_BYTES_MAX_OF.get(code, JSON_BYTES_MAX)
    assert peak <= MEMORY_MAX
    assert "the reply cannot be sent" not in (reply.remark or "")


def test_r58_a_batch_of_more_messages_is_refused() -> None:
    items = [BatchItem(b"x", b"")] * (MESSAGES_MAX + 1)
    assert len(list(split_batch(encode_batch(items[1:])))) == MESSAGES_MAX
    with pytest.raises(BrokerRefusal, match=f"at most {MESSAGES_MAX} messages"):
        list(split_batch(encode_batch(items)))


def test_r58_messages_of_a_key_come_as_many_as_fit_into_an_answer(
    world: World, runner: asyncio.Runner
) -> None:
    reply = runner.run(world.rig.ask(12, *BROKER[12]()))
    assert reply.code == 0 and 3 * MESSAGE_MAX < len(reply.body) < FRAME_SIZE_MAX
