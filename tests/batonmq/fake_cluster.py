"""Scripted name servers and brokers on real sockets, for tests of the client.

A `FakeGroup` holds what a replicated broker group would: messages and offsets survive a change of
master. Brokers answer as RocketMQ does, unless a test puts an answer of its own before
(`broker.before[code]`). Time is not faked; everything here answers at once.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import uvloop

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
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.message_id import encode_offset_msg_id, host_bytes
from batonmq.protocol.records.codec import decode_record
from batonmq.protocol.tags import java_string_hash
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingServer
from tests.records import record_of as encode_record

HOST = "127.0.0.1"
CLUSTER = "DefaultCluster"
TOPIC = "T"
AUTO_CREATE = "TBW102"

Answer = Callable[[RemotingCommand, Connection], Awaitable[RemotingCommand | None]]


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


class FakeBroker:
    """One replica. `role` decides what sends and pulls get; `requests` is what arrived."""

    def __init__(self, group: FakeGroup, broker_id: int, *, master: bool) -> None:
        self.group = group
        self.broker_id = broker_id
        self.master = master
        self.address = ""
        self.before: dict[int, list[Answer]] = defaultdict(list)
        self.unsupported: set[int] = {
            RequestCode.LOCK_BATCH_MQ,
            RequestCode.UNLOCK_BATCH_MQ,
            RequestCode.CONSUMER_SEND_MSG_BACK,
        }
        self.requests: list[RemotingCommand] = []
        self.members: dict[str, dict[str, Connection]] = defaultdict(dict)
        self.locks: dict[tuple[str, str, int], str] = {}
        self.sent_back: list[RemotingCommand] = []
        self.changed = asyncio.Event()
        self._server: RemotingServer | None = None

    async def start(self, port: int = 0) -> None:
        processors = Processors()
        processors.default(self._answer)
        self._server = RemotingServer(processors, name=f"fake-{self.group.name}")
        bound = await self._server.listen(HOST, port)
        self.address = f"{HOST}:{bound}"

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.close()

    @property
    def connections(self) -> set[Connection]:
        return self._server.connections if self._server is not None else set()

    def codes(self) -> list[int]:
        return [r.code for r in self.requests]

    def wake(self) -> None:
        """Lets held pulls look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def _answer(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand | None:
        self.requests.append(request)
        if self.before[request.code]:
            return await self.before[request.code].pop(0)(request, connection)
        handler = _HANDLERS.get(request.code)
        if handler is None or request.code in self.unsupported:
            return refuse(request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "not supported")
        return await handler(self, request, connection)

    # -- messages -----------------------------------------------------------------------------

    def store(
        self, topic: str, queue_id: int, body: bytes, properties: str = "", sys_flag: int = 0
    ) -> tuple[str, int]:
        """(offset message id, queue offset)"""
        group = self.group
        records = group.queues[topic, queue_id]
        queue_offset = group.first_offset[topic, queue_id] + len(records)
        host = host_bytes(HOST, int(self.address.rpartition(":")[2]))
        record = encode_record(
            topic=topic.encode(),
            queue_id=queue_id,
            queue_offset=queue_offset,
            physical_offset=group.log_end,
            flag=0,
            sys_flag=sys_flag,
            born_timestamp=1000,
            born_host=host,
            store_timestamp=1000 + group.log_end,
            store_host=host,
            reconsume_times=0,
            prepared_transaction_offset=0,
            body=body,
            properties=properties.encode(),
            append_prop_crc=True,
        )
        records.append(record)
        msg_id = encode_offset_msg_id(host, group.log_end)
        group.log_end += len(record)
        self.wake()
        return msg_id, queue_offset

    async def send(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
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
        reply_ext = {
            "msgId": ",".join(msg_id for msg_id, _ in stored),
            "queueId": str(queue_id),
            "queueOffset": str(stored[0][1]),
        }
        return RemotingCommand.response_to(request, ext=reply_ext)

    async def pull(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
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
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                continue

    def _pull_now(self, request: RemotingCommand) -> RemotingCommand:
        ext = request.ext
        key = (ext["topic"], int(ext["queueId"]))
        if key[0] not in self.group.topics:
            return refuse(request, ResponseCode.TOPIC_NOT_EXIST, "topic not exist")
        first, records = self.group.first_offset[key], self.group.queues[key]
        offset, end = int(ext["queueOffset"]), first + len(records)
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
            "suggestWhichBrokerId": str(self.group.suggested_id),
            "nextBeginOffset": str(next_offset),
            "minOffset": str(first),
            "maxOffset": str(end),
        }
        return RemotingCommand.response_to(request, code, ext=reply_ext, body=body)

    async def query(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        ext = request.ext
        found = []
        for (topic, _), records in self.group.queues.items():
            for record in records if topic == ext["topic"] else ():
                properties = decode_record(record).properties
                keys = [*properties.get("KEYS", "").split(), properties.get("UNIQ_KEY")]
                if ext["key"] in keys:
                    found.append(record)
        code = ResponseCode.SUCCESS if found else ResponseCode.QUERY_NOT_FOUND
        return RemotingCommand.response_to(request, code, body=b"".join(found))

    async def view(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        for records in self.group.queues.values():
            for record in records:
                if decode_record(record).physical_offset == int(request.ext["offset"]):
                    return RemotingCommand.response_to(request, body=record)
        return refuse(request, ResponseCode.SYSTEM_ERROR, "can not find message by the offset")

    # -- offsets ------------------------------------------------------------------------------

    async def query_offset(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        offset = self.group.offsets.get(_offset_key(request))
        if offset is None:
            return refuse(request, ResponseCode.QUERY_NOT_FOUND, "Not found")
        return RemotingCommand.response_to(request, ext={"offset": offset})

    async def update_offset(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        self.group.offsets[_offset_key(request)] = int(request.ext["commitOffset"])
        self.wake()
        return RemotingCommand.response_to(request)

    async def max_offset(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        if not self.master:
            return refuse(request, ResponseCode.SYSTEM_BUSY, "slave")
        key = (request.ext["topic"], int(request.ext["queueId"]))
        end = self.group.first_offset[key] + len(self.group.queues[key])
        return RemotingCommand.response_to(request, ext={"offset": end})

    async def min_offset(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        key = (request.ext["topic"], int(request.ext["queueId"]))
        return RemotingCommand.response_to(request, ext={"offset": self.group.first_offset[key]})

    async def by_time(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        key = (request.ext["topic"], int(request.ext["queueId"]))
        first = self.group.first_offset[key]
        wanted_ms = int(request.ext["timestamp"])
        records = self.group.queues[key]
        earlier = sum(decode_record(r).store_timestamp < wanted_ms for r in records)
        return RemotingCommand.response_to(request, ext={"offset": first + earlier})

    async def all_offsets(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        table: dict[str, dict[int, int]] = defaultdict(dict)
        for (group, topic, queue_id), offset in self.group.offsets.items():
            table[f"{topic}@{group}"][queue_id] = offset
        body = ConsumerOffsetSerializeWrapper(offset_table=dict(table)).encode()
        return RemotingCommand.response_to(request, body=body)

    async def topic_stats(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        group, topic = self.group, request.ext["topic"]
        table = {}
        for queue_id in range(group.topics[topic].read_queues):
            least = group.first_offset[topic, queue_id]
            end = least + len(group.queues[topic, queue_id])
            queue = MessageQueue(topic, group.name, queue_id)
            table[queue] = TopicOffset(min_offset=least, max_offset=end)
        body = TopicStatsTable(offset_table=table).encode()
        return RemotingCommand.response_to(request, body=body)

    async def consume_stats(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        table = {}
        for (group, topic, queue_id), offset in self.group.offsets.items():
            if group == request.ext["consumerGroup"]:
                end = len(self.group.queues[topic, queue_id])
                queue = MessageQueue(topic, self.group.name, queue_id)
                table[queue] = OffsetWrapper(broker_offset=end, consumer_offset=offset)
        body = ConsumeStats(offset_table=table).encode()
        return RemotingCommand.response_to(request, body=body)

    # -- members ------------------------------------------------------------------------------

    async def heartbeat(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        data = HeartbeatData.decode(request.body)
        for consumer in data.consumer_data_set:
            members = self.members[consumer.group_name]
            new = data.client_id not in members
            members[data.client_id] = connection
            connection.on_close.append(partial(self._gone, consumer.group_name))
            if new:
                self._notify(consumer.group_name)
        return RemotingCommand.response_to(request)

    async def unregister(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        group = request.ext.get("consumerGroup")
        if group is not None:
            self.members[group].pop(request.ext["clientID"], None)
            self._notify(group)
        return RemotingCommand.response_to(request)

    def _gone(self, group: str, connection: Connection) -> None:
        members = self.members[group]
        lost = [client_id for client_id, at in members.items() if at is connection]
        for client_id in lost:
            del members[client_id]
        if lost:
            self._notify(group)

    def _notify(self, group: str) -> None:
        for connection in self.members[group].values():
            if not connection.closed:
                connection.oneway(
                    RemotingCommand.request(
                        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group}
                    )
                )
        self.wake()

    async def consumer_list(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        ids = list(self.members[request.ext["consumerGroup"]])
        if not ids:
            return refuse(request, ResponseCode.SYSTEM_ERROR, "no consumer for this group")
        body = GetConsumerListByGroupResponseBody(consumer_id_list=ids).encode()
        return RemotingCommand.response_to(request, body=body)

    async def lock(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        asked = LockBatchRequestBody.decode(request.body)
        held = []
        for queue in asked.mq_set:
            key = (asked.consumer_group, queue.topic, queue.queue_id)
            if self.locks.setdefault(key, asked.client_id) == asked.client_id:
                held.append(queue)
        body = LockBatchResponseBody(lock_ok_mq_set=held).encode()
        return RemotingCommand.response_to(request, body=body)

    async def unlock(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        asked = LockBatchRequestBody.decode(request.body)
        for queue in asked.mq_set:
            key = (asked.consumer_group, queue.topic, queue.queue_id)
            if self.locks.get(key) == asked.client_id:
                del self.locks[key]
        return RemotingCommand.response_to(request)

    async def send_back(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        self.sent_back.append(request)
        self.wake()
        return RemotingCommand.response_to(request)

    # -- admin --------------------------------------------------------------------------------

    async def update_topic(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        ext = request.ext
        self.group.topics[ext["topic"]] = Topic(
            int(ext["readQueueNums"]), int(ext["writeQueueNums"]), int(ext["perm"])
        )
        return RemotingCommand.response_to(request)

    async def delete_topic(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        self.group.topics.pop(request.ext["topic"], None)
        return RemotingCommand.response_to(request)

    async def all_topics(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        table = {
            name: TopicConfig(
                topic_name=name, read_queue_nums=t.read_queues, write_queue_nums=t.write_queues
            )
            for name, t in self.group.topics.items()
        }
        body = TopicConfigSerializeWrapper(topic_config_table=table).encode()
        return RemotingCommand.response_to(request, body=body)

    async def update_group(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        config = SubscriptionGroupConfig.decode(request.body)
        self.group.groups[config.group_name] = config
        return RemotingCommand.response_to(request)

    async def all_groups(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        body = SubscriptionGroupWrapper(subscription_group_table=self.group.groups).encode()
        return RemotingCommand.response_to(request, body=body)

    async def runtime(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        body = KVTable(table={"brokerVersionDesc": "FAKE"}).encode()
        return RemotingCommand.response_to(request, body=body)

    async def ha_status(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        body = HARuntimeInfo(
            master=self.master, master_commit_log_max_offset=self.group.log_end
        ).encode()
        return RemotingCommand.response_to(request, body=body)

    async def epochs(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        body = EpochEntryCache(
            broker_id=self.broker_id,
            broker_name=self.group.name,
            cluster_name=CLUSTER,
            epoch_list=[EpochCacheEntry(epoch=1, start_offset=0)],
            max_offset=self.group.log_end,
        ).encode()
        return RemotingCommand.response_to(request, body=body)


_HANDLERS: dict[
    int, Callable[[FakeBroker, RemotingCommand, Connection], Awaitable[RemotingCommand]]
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


class FakeNameServer:
    """Tells what the cluster's brokers are now, or, while `stale` is set, what they were then."""

    def __init__(self, cluster: "FakeCluster") -> None:
        self._cluster = cluster
        self.address = ""
        self.requests: list[RemotingCommand] = []
        self.before: dict[int, list[Answer]] = defaultdict(list)
        self.stale: list[BrokerData] | None = None
        self._server: RemotingServer | None = None

    async def start(self) -> None:
        processors = Processors()
        processors.default(self._answer)
        self._server = RemotingServer(processors, name="fake-namesrv")
        self.address = f"{HOST}:{await self._server.listen(HOST, 0)}"

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.close()

    async def _answer(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand | None:
        self.requests.append(request)
        if self.before[request.code]:
            return await self.before[request.code].pop(0)(request, connection)
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
    """`async with FakeCluster(groups=1, replicas=2) as cluster: ...`

    Replica 1 of each group is the master at first; its routes show it as id 0.
    """

    def __init__(self, *, groups: int = 1, replicas: int = 2, name_servers: int = 2) -> None:
        names = [f"broker-{'abcdef'[i]}" for i in range(groups)]
        self.groups = {name: FakeGroup(name, {AUTO_CREATE: Topic(8, 8, 7)}) for name in names}
        self.brokers = {
            name: [FakeBroker(self.groups[name], i + 1, master=i == 0) for i in range(replicas)]
            for name in names
        }
        self.name_servers = [FakeNameServer(self) for _ in range(name_servers)]
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
async def cluster_with_topic(*, groups: int = 1) -> AsyncIterator[FakeCluster]:
    """It has the topic T."""
    async with FakeCluster(groups=groups) as cluster, asyncio.timeout(20):
        cluster.add_topic(TOPIC)
        yield cluster


def run(story: Callable[[FakeCluster], Awaitable[None]]) -> None:
    """Plays it on a cluster that has the topic T."""

    async def main() -> None:
        async with cluster_with_topic() as cluster:
            await story(cluster)

    uvloop.run(main())


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a fact on either side that no event tells of; the test's timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - see above
        await asyncio.sleep(0.001)


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
        return await _HANDLERS[request.code](broker, request, connection)

    return give


async def silence(request: RemotingCommand, connection: Connection) -> None:
    """A hung process: takes the request and never answers."""
    await asyncio.Event().wait()


def _offset_key(request: RemotingCommand) -> tuple[str, str, int]:
    ext = request.ext
    return ext["consumerGroup"], ext["topic"], int(ext["queueId"])


def _tag_hashes(expression: str) -> frozenset[int]:
    if expression.strip() in ("", "*"):
        return frozenset()
    return frozenset(java_string_hash(tag.strip()) for tag in expression.split("||"))


def _matches(record: bytes, wanted: frozenset[int]) -> bool:
    properties = decode_record(record).properties
    return not wanted or java_string_hash(properties.get("TAGS", "")) in wanted
