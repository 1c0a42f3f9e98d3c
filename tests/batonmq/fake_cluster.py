"""Scripted name servers and brokers on real sockets, for tests of the client.

A `FakeGroup` holds what a replicated broker group would: messages and offsets survive a change of
master. Brokers answer as RocketMQ does, unless a test puts an answer of its own before
(`broker.before[code]`). Time is not faked; everything here answers at once.
"""

import asyncio
import contextlib
import inspect
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from batonmq import (
    ClientOptions,
    ConsumeFromWhere,
    ConsumeOptions,
    Listener,
    Producer,
    PushConsumer,
    PushConsumerOptions,
)
from batonmq.protocol.batch import split_batch
from batonmq.protocol.bodies import (
    BrokerData,
    ClusterInfo,
    ConsumerOffsetSerializeWrapper,
    ConsumeStats,
    EpochCacheEntry,
    EpochEntryCache,
    GetConsumerListByGroupResponseBody,
    HARuntimeInfo,
    HeartbeatData,
    KVTable,
    LockBatchRequestBody,
    LockBatchResponseBody,
    OffsetWrapper,
    QueueData,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
    TopicOffset,
    TopicRouteData,
    TopicStatsTable,
)
from batonmq.protocol.codes import READ_REPLICA_FIELD, RequestCode, ResponseCode
from batonmq.protocol.json_body import Body
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.message_id import encode_offset_msg_id, host_bytes
from batonmq.protocol.records.codec import decode_record
from batonmq.protocol.tags import java_string_hash
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingServer
from batonmq.runtime.turns import is_set_within
from tests.records import record_of

HOST = "127.0.0.1"
CLUSTER = "DefaultCluster"
TOPIC = "T"
AUTO_CREATE = "TBW102"
FAST = ClientOptions(suspicion_ms=20)

Answer = Callable[[RemotingCommand, Connection], Awaitable[RemotingCommand | None]]
Reply = RemotingCommand | Body | dict[str, object] | None
"""A handler gives a whole reply, its body or its fields; None is success without any."""


@dataclass
class Topic:
    read_queues: int = 4
    write_queues: int = 4
    perm: int = 6


@dataclass
class FakeGroup:
    """What all replicas of one broker group share: the log, the offsets, the topics."""

    name: str
    topics: dict[str, Topic] = field(default_factory=dict)
    queues: dict[tuple[str, int], list[bytes]] = field(default_factory=lambda: defaultdict(list))
    first_offset: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    offsets: dict[tuple[str, str, int], int] = field(default_factory=dict)
    groups: dict[str, SubscriptionGroupConfig] = field(default_factory=dict)
    log_end: int = 0
    suggested_id: int = 0
    """The broker id that answers to pulls suggest."""

    def bodies(self, topic: str) -> list[bytes]:
        """Bodies of all messages of a topic, queue by queue."""
        found: list[bytes] = []
        for (name, _), records in sorted(self.queues.items()):
            if name == topic:
                found += [decode_record(r).uncompressed_body() for r in records]
        return found


class Scripted:
    """A server. `requests` is what arrived; `before`: what a test has it answer first, by code."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[RemotingCommand] = []
        self.before: dict[int, list[Answer]] = defaultdict(list)
        self._server: RemotingServer | None = None

    async def start(self) -> None:
        processors = Processors()
        processors.default(self._answer)
        self._server = RemotingServer(processors)
        self.address = f"{HOST}:{await self._server.listen(HOST, 0)}"

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.close()

    @property
    def connections(self) -> set[Connection]:
        return self._server.connections if self._server is not None else set()

    def codes(self) -> list[int]:
        return [r.code for r in self.requests]

    async def _answer(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand | None:
        self.requests.append(request)
        if self.before[request.code]:
            return await self.before[request.code].pop(0)(request, connection)
        return await self.serve(request, connection)

    async def serve(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        """The server's own answer."""
        raise NotImplementedError


class FakeBroker(Scripted):
    """One replica. `master` decides what sends and pulls get."""

    def __init__(self, group: FakeGroup, broker_id: int, *, master: bool) -> None:
        super().__init__()
        self.group = group
        self.broker_id = broker_id
        self.master = master
        self.unsupported: set[int] = set()
        self.members: dict[str, dict[str, Connection]] = defaultdict(dict)
        self.locks: dict[tuple[str, str, int], str] = {}
        self.sent_back: list[RemotingCommand] = []
        self.changed = asyncio.Event()

    def wake(self) -> None:
        """Lets held pulls look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def serve(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        handler = _HANDLERS.get(request.code)
        if handler is None or request.code in self.unsupported:
            return refuse(request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "not supported")
        reply = handler(self, request, connection)
        if inspect.isawaitable(reply):
            reply = await reply
        if isinstance(reply, RemotingCommand):
            return reply
        if isinstance(reply, Body):
            return RemotingCommand.response_to(request, body=reply.encode())
        return RemotingCommand.response_to(request, ext=reply)

    # -- messages -----------------------------------------------------------------------------

    def store(
        self, topic: str, queue_id: int, body: bytes, properties: str = "", sys_flag: int = 0
    ) -> tuple[str, int]:
        """(offset message id, queue offset)"""
        group = self.group
        records = group.queues[topic, queue_id]
        queue_offset = group.first_offset[topic, queue_id] + len(records)
        host = host_bytes(HOST, int(self.address.rpartition(":")[2]))
        record = record_of(
            topic=topic.encode(),
            queue_id=queue_id,
            queue_offset=queue_offset,
            physical_offset=group.log_end,
            sys_flag=sys_flag,
            born_timestamp=1000,
            born_host=host,
            store_timestamp=1000 + group.log_end,
            store_host=host,
            body=body,
            properties=properties.encode(),
            append_prop_crc=True,
        )
        records.append(record)
        msg_id = encode_offset_msg_id(host, group.log_end)
        group.log_end += len(record)
        self.wake()
        return msg_id, queue_offset

    def send(self, request: RemotingCommand, _: Connection) -> Reply:
        if not self.master:
            return refuse(request, ResponseCode.SYSTEM_BUSY, "broker is a slave")
        ext = request.ext
        topic, queue_id = ext["b"], int(ext["e"])
        if topic not in self.group.topics:
            if AUTO_CREATE not in self.group.topics:
                return refuse(request, ResponseCode.TOPIC_NOT_EXIST, f"topic {topic} not exist")
            self.group.topics[topic] = Topic(int(ext["d"]), int(ext["d"]))
        if request.code == RequestCode.SEND_BATCH_MESSAGE:
            stored = [
                self.store(topic, queue_id, item.body, item.properties.decode())
                for item in split_batch(request.body)
            ]
        else:
            stored = [self.store(topic, queue_id, request.body, ext["i"], int(ext["f"]))]
        msg_ids = ",".join(msg_id for msg_id, _ in stored)
        return {"msgId": msg_ids, "queueId": queue_id, "queueOffset": stored[0][1]}

    async def pull(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        ext = request.ext
        suspend_s = int(ext["suspendTimeoutMillis"]) / 1000 if int(ext["sysFlag"]) & 2 else 0.0
        deadline = asyncio.get_running_loop().time() + suspend_s
        while True:
            if not self.master and READ_REPLICA_FIELD not in ext:
                return refuse(request, ResponseCode.SYSTEM_BUSY, "slave can not be read")
            changed = self.changed
            reply = self._pull_now(request)
            left_s = deadline - asyncio.get_running_loop().time()
            if reply.code != ResponseCode.PULL_NOT_FOUND or left_s <= 0:
                return reply
            await is_set_within(changed, left_s)

    def _pull_now(self, request: RemotingCommand) -> RemotingCommand:
        ext = request.ext
        key = _queue_key(request)
        if key[0] not in self.group.topics:
            return refuse(request, ResponseCode.TOPIC_NOT_EXIST, "topic not exist")
        first, end, records = self._ends(request)
        offset = int(ext["queueOffset"])
        wanted = _tag_hashes(ext["subscription"])
        body, next_offset = b"", offset
        if offset < first or offset > end:
            code, next_offset = ResponseCode.PULL_OFFSET_MOVED, first if offset < first else end
        elif offset == end:
            code = ResponseCode.PULL_NOT_FOUND
        else:
            part = records[offset - first :][: int(ext["maxMsgNums"])]
            next_offset = offset + len(part)
            found = [r for r in part if _matches(r, wanted)]
            body = b"".join(found)
            code = ResponseCode.SUCCESS if found else ResponseCode.PULL_RETRY_IMMEDIATELY
        reply_ext = {
            "suggestWhichBrokerId": self.group.suggested_id,
            "nextBeginOffset": next_offset,
            "minOffset": first,
            "maxOffset": end,
        }
        return RemotingCommand.response_to(request, code, ext=reply_ext, body=body)

    def _ends(self, request: RemotingCommand) -> tuple[int, int, list[bytes]]:
        """(first offset, end, records) of the queue that a request names."""
        key = _queue_key(request)
        first, records = self.group.first_offset[key], self.group.queues[key]
        return first, first + len(records), records

    def query(self, request: RemotingCommand, _: Connection) -> Reply:
        ext = request.ext
        found = []
        for (topic, _queue), records in self.group.queues.items():
            for record in records if topic == ext["topic"] else ():
                properties = decode_record(record).properties
                keys = [*properties.get("KEYS", "").split(), properties.get("UNIQ_KEY")]
                if ext["key"] in keys:
                    found.append(record)
        code = ResponseCode.SUCCESS if found else ResponseCode.QUERY_NOT_FOUND
        return RemotingCommand.response_to(request, code, body=b"".join(found))

    def view(self, request: RemotingCommand, _: Connection) -> Reply:
        for records in self.group.queues.values():
            for record in records:
                if decode_record(record).physical_offset == int(request.ext["offset"]):
                    return RemotingCommand.response_to(request, body=record)
        return refuse(request, ResponseCode.SYSTEM_ERROR, "can not find message by the offset")

    # -- offsets ------------------------------------------------------------------------------

    def query_offset(self, request: RemotingCommand, _: Connection) -> Reply:
        offset = self.group.offsets.get((request.ext["consumerGroup"], *_queue_key(request)))
        if offset is None:
            return refuse(request, ResponseCode.QUERY_NOT_FOUND, "Not found")
        return {"offset": offset}

    def update_offset(self, request: RemotingCommand, _: Connection) -> Reply:
        key = request.ext["consumerGroup"], *_queue_key(request)
        self.group.offsets[key] = int(request.ext["commitOffset"])
        self.wake()
        return None

    def max_offset(self, request: RemotingCommand, _: Connection) -> Reply:
        if not self.master:
            return refuse(request, ResponseCode.SYSTEM_BUSY, "slave")
        return {"offset": self._ends(request)[1]}

    def min_offset(self, request: RemotingCommand, _: Connection) -> Reply:
        return {"offset": self._ends(request)[0]}

    def by_time(self, request: RemotingCommand, _: Connection) -> Reply:
        first, _end, records = self._ends(request)
        wanted_ms = int(request.ext["timestamp"])
        earlier = sum(decode_record(r).store_timestamp < wanted_ms for r in records)
        return {"offset": first + earlier}

    def all_offsets(self, request: RemotingCommand, _: Connection) -> Reply:
        table: dict[str, dict[int, int]] = defaultdict(dict)
        for (group, topic, queue_id), offset in self.group.offsets.items():
            table[f"{topic}@{group}"][queue_id] = offset
        return ConsumerOffsetSerializeWrapper(offset_table=dict(table))

    def topic_stats(self, request: RemotingCommand, _: Connection) -> Reply:
        group, topic = self.group, request.ext["topic"]
        table = {}
        for queue_id in range(group.topics[topic].read_queues):
            least = group.first_offset[topic, queue_id]
            end = least + len(group.queues[topic, queue_id])
            queue = MessageQueue(topic, group.name, queue_id)
            table[queue] = TopicOffset(min_offset=least, max_offset=end)
        return TopicStatsTable(offset_table=table)

    def consume_stats(self, request: RemotingCommand, _: Connection) -> Reply:
        table = {}
        for (group, topic, queue_id), offset in self.group.offsets.items():
            if group == request.ext["consumerGroup"]:
                end = len(self.group.queues[topic, queue_id])
                queue = MessageQueue(topic, self.group.name, queue_id)
                table[queue] = OffsetWrapper(broker_offset=end, consumer_offset=offset)
        return ConsumeStats(offset_table=table)

    # -- members ------------------------------------------------------------------------------

    def heartbeat(self, request: RemotingCommand, connection: Connection) -> Reply:
        data = HeartbeatData.decode(request.body)
        for consumer in data.consumer_data_set:
            members = self.members[consumer.group_name]
            new = data.client_id not in members
            members[data.client_id] = connection
            connection.on_close.append(partial(self._gone, consumer.group_name))
            if new:
                self._notify(consumer.group_name)
        return None

    def unregister(self, request: RemotingCommand, _: Connection) -> Reply:
        group = request.ext.get("consumerGroup")
        if group is not None:
            self.members[group].pop(request.ext["clientID"], None)
            self._notify(group)
        return None

    def _gone(self, group: str, connection: Connection) -> None:
        members = self.members[group]
        lost = [client_id for client_id, at in members.items() if at is connection]
        for client_id in lost:
            del members[client_id]
        if lost:
            self._notify(group)

    def _notify(self, group: str) -> None:
        code = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
        for connection in self.members[group].values():
            if not connection.closed:
                connection.oneway(RemotingCommand.request(code, {"consumerGroup": group}))
        self.wake()

    def consumer_list(self, request: RemotingCommand, _: Connection) -> Reply:
        ids = list(self.members[request.ext["consumerGroup"]])
        if not ids:
            return refuse(request, ResponseCode.SYSTEM_ERROR, "no consumer for this group")
        return GetConsumerListByGroupResponseBody(consumer_id_list=ids)

    def lock(self, request: RemotingCommand, _: Connection) -> Reply:
        asked = LockBatchRequestBody.decode(request.body)
        held = []
        for queue in asked.mq_set:
            key = (asked.consumer_group, queue.topic, queue.queue_id)
            if self.locks.setdefault(key, asked.client_id) == asked.client_id:
                held.append(queue)
        return LockBatchResponseBody(lock_ok_mq_set=held)

    def unlock(self, request: RemotingCommand, _: Connection) -> Reply:
        asked = LockBatchRequestBody.decode(request.body)
        for queue in asked.mq_set:
            key = (asked.consumer_group, queue.topic, queue.queue_id)
            if self.locks.get(key) == asked.client_id:
                del self.locks[key]
        return None

    def send_back(self, request: RemotingCommand, _: Connection) -> Reply:
        self.sent_back.append(request)
        self.wake()
        return None

    # -- admin --------------------------------------------------------------------------------

    def update_topic(self, request: RemotingCommand, _: Connection) -> Reply:
        ext = request.ext
        numbers = (int(ext[name]) for name in ("readQueueNums", "writeQueueNums", "perm"))
        self.group.topics[ext["topic"]] = Topic(*numbers)
        return None

    def delete_topic(self, request: RemotingCommand, _: Connection) -> Reply:
        self.group.topics.pop(request.ext["topic"], None)
        return None

    def all_topics(self, request: RemotingCommand, _: Connection) -> Reply:
        table = {
            name: TopicConfig(
                topic_name=name, read_queue_nums=t.read_queues, write_queue_nums=t.write_queues
            )
            for name, t in self.group.topics.items()
        }
        return TopicConfigSerializeWrapper(topic_config_table=table)

    def update_group(self, request: RemotingCommand, _: Connection) -> Reply:
        config = SubscriptionGroupConfig.decode(request.body)
        self.group.groups[config.group_name] = config
        return None

    def all_groups(self, request: RemotingCommand, _: Connection) -> Reply:
        return SubscriptionGroupWrapper(subscription_group_table=self.group.groups)

    def runtime(self, request: RemotingCommand, _: Connection) -> Reply:
        return KVTable(table={"brokerVersionDesc": "FAKE"})

    def ha_status(self, request: RemotingCommand, _: Connection) -> Reply:
        return HARuntimeInfo(master=self.master, master_commit_log_max_offset=self.group.log_end)

    def epochs(self, request: RemotingCommand, _: Connection) -> Reply:
        return EpochEntryCache(epoch_list=[EpochCacheEntry(epoch=1, start_offset=0)])


_HANDLERS: dict[
    int, Callable[[FakeBroker, RemotingCommand, Connection], Reply | Awaitable[RemotingCommand]]
]
_HANDLERS = {
    RequestCode.SEND_MESSAGE_V2: FakeBroker.send,
    RequestCode.SEND_BATCH_MESSAGE: FakeBroker.send,
    RequestCode.PULL_MESSAGE: FakeBroker.pull,
    RequestCode.QUERY_MESSAGE: FakeBroker.query,
    RequestCode.VIEW_MESSAGE_BY_ID: FakeBroker.view,
    RequestCode.QUERY_CONSUMER_OFFSET: FakeBroker.query_offset,
    RequestCode.UPDATE_CONSUMER_OFFSET: FakeBroker.update_offset,
    RequestCode.GET_MAX_OFFSET: FakeBroker.max_offset,
    RequestCode.GET_MIN_OFFSET: FakeBroker.min_offset,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: FakeBroker.by_time,
    RequestCode.GET_ALL_CONSUMER_OFFSET: FakeBroker.all_offsets,
    RequestCode.GET_TOPIC_STATS_INFO: FakeBroker.topic_stats,
    RequestCode.GET_CONSUME_STATS: FakeBroker.consume_stats,
    RequestCode.HEART_BEAT: FakeBroker.heartbeat,
    RequestCode.UNREGISTER_CLIENT: FakeBroker.unregister,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: FakeBroker.consumer_list,
    RequestCode.LOCK_BATCH_MQ: FakeBroker.lock,
    RequestCode.UNLOCK_BATCH_MQ: FakeBroker.unlock,
    RequestCode.CONSUMER_SEND_MSG_BACK: FakeBroker.send_back,
    RequestCode.UPDATE_AND_CREATE_TOPIC: FakeBroker.update_topic,
    RequestCode.DELETE_TOPIC_IN_BROKER: FakeBroker.delete_topic,
    RequestCode.GET_ALL_TOPIC_CONFIG: FakeBroker.all_topics,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: FakeBroker.update_group,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: FakeBroker.all_groups,
    RequestCode.GET_BROKER_RUNTIME_INFO: FakeBroker.runtime,
    RequestCode.GET_BROKER_HA_STATUS: FakeBroker.ha_status,
    RequestCode.GET_BROKER_EPOCH_CACHE: FakeBroker.epochs,
}


class FakeNameServer(Scripted):
    """Tells what the cluster's brokers are now, or, while `stale` is set, what they were then."""

    def __init__(self, cluster: "FakeCluster") -> None:
        super().__init__()
        self._cluster = cluster
        self.stale: list[BrokerData] | None = None

    async def serve(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            return self._route(request)
        if request.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            datas = self._broker_datas()
            info = ClusterInfo(
                broker_addr_table={d.broker_name: d for d in datas},
                cluster_addr_table={CLUSTER: [d.broker_name for d in datas]},
            )
            return RemotingCommand.response_to(request, body=info.encode())
        if request.code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            names = sorted({t for g in self._cluster.groups.values() for t in g.topics})
            return RemotingCommand.response_to(request, body=TopicList(topic_list=names).encode())
        if request.code == RequestCode.DELETE_TOPIC_IN_NAMESRV:
            return RemotingCommand.response_to(request)
        return refuse(request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "not supported")

    def _broker_datas(self) -> list[BrokerData]:
        return self.stale if self.stale is not None else self._cluster.broker_datas()

    def _route(self, request: RemotingCommand) -> RemotingCommand:
        topic = request.ext["topic"]
        queues, datas = [], []
        for data in self._broker_datas():
            config = self._cluster.groups[data.broker_name].topics.get(topic)
            if config is None:
                continue
            datas.append(data)
            queues.append(
                QueueData(
                    broker_name=data.broker_name,
                    perm=config.perm,
                    read_queue_nums=config.read_queues,
                    write_queue_nums=config.write_queues,
                )
            )
        if not queues:
            return refuse(request, ResponseCode.TOPIC_NOT_EXIST, f"No topic route info for {topic}")
        route = TopicRouteData(broker_datas=datas, queue_datas=queues)
        return RemotingCommand.response_to(request, body=route.encode())


class FakeCluster:
    """It has the topic T. Replica 1 of each group is the master at first; its routes show it as id
    0."""

    def __init__(self, *, groups: int) -> None:
        names = [f"broker-{'abcdef'[i]}" for i in range(groups)]
        topics = {AUTO_CREATE: Topic(8, 8, 7), TOPIC: Topic()}
        self.groups = {name: FakeGroup(name, topics.copy()) for name in names}
        self.brokers = {
            name: [FakeBroker(self.groups[name], i + 1, master=i == 0) for i in range(2)]
            for name in names
        }
        self.name_servers = [FakeNameServer(self) for _ in range(2)]
        self.registered: set[FakeBroker] = set()

    async def __aenter__(self) -> "FakeCluster":
        for brokers in self.brokers.values():
            for broker in brokers:
                await broker.start()
                self.registered.add(broker)
        for name_server in self.name_servers:
            await name_server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for brokers in self.brokers.values():
            for broker in brokers:
                await broker.stop()
        for name_server in self.name_servers:
            await name_server.stop()

    @property
    def name_server_addresses(self) -> list[str]:
        return [n.address for n in self.name_servers]

    def add_topic(self, topic: str, queues: int = 4) -> None:
        for group in self.groups.values():
            group.topics[topic] = Topic(queues, queues)

    def broker_datas(self) -> list[BrokerData]:
        datas = []
        for name, brokers in self.brokers.items():
            addresses = {
                0 if b.master else b.broker_id: b.address for b in brokers if b in self.registered
            }
            if addresses:
                datas.append(BrokerData(broker_name=name, cluster=CLUSTER, broker_addrs=addresses))
        return datas

    def master(self, name: str = "broker-a") -> FakeBroker:
        return next(b for b in self.brokers[name] if b.master)

    async def kill_master(self, name: str = "broker-a") -> FakeBroker:
        """Kill -9: sockets close, the name servers forget it. Nobody is master then."""
        old = self.master(name)
        self.registered.discard(old)
        old.master = False
        await old.stop()
        return old

    def depose(self, name: str = "broker-a") -> FakeBroker:
        """The master becomes a slave and lives on."""
        old = self.master(name)
        old.master = False
        old.wake()
        return old

    def elect(self, broker: FakeBroker) -> None:
        for other in self.brokers[broker.group.name]:
            other.master = other is broker
        broker.wake()


@contextlib.asynccontextmanager
async def open_cluster(*, groups: int = 1) -> AsyncIterator[FakeCluster]:
    """For 20 s, the time of a test; the fixture `cluster` is one."""
    async with FakeCluster(groups=groups) as cluster, asyncio.timeout(20):
        yield cluster


@contextlib.asynccontextmanager
async def producing(**options: Any) -> AsyncIterator[tuple[FakeCluster, Producer]]:
    """A cluster and a producer of group pg. `options`: other ones than `FAST`."""
    async with open_cluster(groups=options.pop("groups", 1)) as cluster:
        names, options = cluster.name_server_addresses, {"client_options": FAST} | options
        async with Producer("pg", name_servers=names, **options) as producer:
            yield cluster, producer


def one_by_one(
    cluster: FakeCluster, listener: Listener, client_options: ClientOptions, batch: int = 1
) -> PushConsumer:
    """A consumer that begins at the first message, and has one listener call at a time."""
    consumer = PushConsumer(
        "cg",
        listener,
        name_servers=cluster.name_server_addresses,
        options=PushConsumerOptions(
            from_where=ConsumeFromWhere.FIRST, consume=ConsumeOptions(concurrency=1, batch=batch)
        ),
        client_options=client_options,
    )
    consumer.subscribe(TOPIC)
    return consumer


def refuse(request: RemotingCommand, code: int, remark: str) -> RemotingCommand:
    return RemotingCommand.response_to(request, code, remark)


def answer(code: int, remark: str = "", ext: dict[str, str] | None = None) -> Answer:
    """An answer for `before`."""

    async def give(request: RemotingCommand, connection: Connection) -> RemotingCommand:
        return RemotingCommand.response_to(request, code, remark, ext=ext)

    return give


def late(broker: FakeBroker, came: asyncio.Event, go_on: asyncio.Event) -> Answer:
    """The broker's own answer, for `before`: `came` is set at the request, `go_on` lets it out."""

    async def give(request: RemotingCommand, connection: Connection) -> RemotingCommand:
        came.set()
        await go_on.wait()
        return await broker.serve(request, connection)

    return give


async def silence(request: RemotingCommand, connection: Connection) -> None:
    """A hung process: takes the request and never answers."""
    await asyncio.Event().wait()


def _queue_key(request: RemotingCommand) -> tuple[str, int]:
    return request.ext["topic"], int(request.ext["queueId"])


def _tag_hashes(expression: str) -> frozenset[int]:
    if expression.strip() in ("", "*"):
        return frozenset()
    return frozenset(java_string_hash(tag.strip()) for tag in expression.split("||"))


def _matches(record: bytes, wanted: frozenset[int]) -> bool:
    properties = decode_record(record).properties
    return not wanted or java_string_hash(properties.get("TAGS", "")) in wanted
