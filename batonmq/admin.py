"""Admin calls to name servers and brokers, typed; `controller()` gives those to the controllers.

Changes go to every master concerned, one after the other, and say at the end where they were
made; an error says where it stopped. Origin: DefaultMQAdminExtImpl.
"""

import asyncio
from collections.abc import Iterable, Sequence

from batonmq.admin_call import AdminCall
from batonmq.admin_types import GroupProgress, QueueProgress, QueueStats
from batonmq.broker_calls import QueueCalls
from batonmq.client_instance import ClientInstance, ClientOptions
from batonmq.clock import boot_ms
from batonmq.controller_admin import ControllerAdmin
from batonmq.errors import (
    ClientError,
    NoMasterError,
    UnsupportedByBrokerError,
)
from batonmq.lifecycle import Startable
from batonmq.route import MASTER_ID, TopicRoute, topic_route
from protocol import fastjson
from protocol.bodies import (
    ClusterInfo,
    ConsumeStats,
    EpochEntryCache,
    GetConsumerListByGroupResponseBody,
    HARuntimeInfo,
    KVTable,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
    TopicRouteData,
    TopicStatsTable,
)
from protocol.codes import RequestCode, ResponseCode
from protocol.errors import ResponseError
from protocol.message import MessageExt, MessageQueue
from protocol.message_id import decode_offset_msg_id
from protocol.record import decode_records
from protocol.topic_name import AUTO_CREATE_TOPIC, topic_problem
from remoting.command import RemotingCommand

LONG_MAX = (1 << 63) - 1
_NOT_FOUND = frozenset({ResponseCode.QUERY_NOT_FOUND})


class Admin(Startable):
    """`async with Admin(name_servers="host:9876") as admin: ...`

    Methods raise NoNameServerError, NoRouteError, NoMasterError, ConnectError,
    RequestTimeoutError, UnsupportedByBrokerError, and ResponseError for other refusals.
    """

    def __init__(
        self,
        name_servers: str | Sequence[str] | None = None,
        *,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
        timeout_ms: int = 5_000,
    ) -> None:
        self._own_client = client is None
        self._client = client or ClientInstance(name_servers, client_options)
        self._timeout_ms = timeout_ms
        self._call = AdminCall(lambda: self._client.remoting, timeout_ms)
        self._calls = QueueCalls(self._client)

    @property
    def client(self) -> ClientInstance:
        return self._client

    async def start(self) -> None:
        if self._own_client:
            await self._client.start()

    async def close(self) -> None:
        if self._own_client:
            await self._client.close()

    def controller(self, addresses: str | Sequence[str]) -> ControllerAdmin:
        """Calls to the controllers whose remoting doors are given."""
        return ControllerAdmin(self._call, addresses)

    # -- cluster ------------------------------------------------------------------------------

    async def cluster_info(self) -> ClusterInfo:
        reply = await self._ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO, {})
        return ClusterInfo.decode(reply.body)

    async def name_server_states(self) -> dict[str, str | None]:
        """Address -> None if it answers, else what is wrong."""
        request = RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO)
        answers = await self._client.name_servers.invoke_each(
            request, deadline_ms=self._deadline_ms()
        )
        return {
            address: str(answer) if isinstance(answer, Exception) else None
            for address, answer in answers.items()
        }

    async def masters(
        self, cluster: str | None = None, broker: str | None = None
    ) -> dict[str, str]:
        """Broker name -> master address, of a cluster, of one group, or of all.

        `broker` may also be an address. Raises ClientError if nothing matches, NoMasterError for
        a group without a master.
        """
        if broker is not None and ":" in broker:
            return {broker: broker}
        info = await self.cluster_info()
        if cluster is not None and cluster not in info.cluster_addr_table:
            known = ", ".join(sorted(info.cluster_addr_table)) or "none"
            raise ClientError(f"no cluster {cluster}: the name server knows {known}")
        names = (
            sorted(info.cluster_addr_table[cluster])
            if cluster is not None
            else sorted(info.broker_addr_table)
        )
        if broker is not None:
            if broker not in info.broker_addr_table:
                known = ", ".join(sorted(info.broker_addr_table)) or "none"
                raise ClientError(f"no broker group {broker}: the name server knows {known}")
            names = [broker]
        found: dict[str, str] = {}
        for name in names:
            address = info.broker_addr_table[name].broker_addrs.get(MASTER_ID)
            if address is None:
                raise NoMasterError(name)
            found[name] = address
        if not found:
            raise ClientError("the name server knows no broker: start one and let it register")
        return found

    async def broker_runtime_info(self, address: str) -> dict[str, str]:
        """RocketMQ's runtime figures (brokerVersionDesc, msgPutTotalTodayNow, …) of one broker."""
        reply = await self._ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, {}, "runtime info")
        return dict(KVTable.decode(reply.body).table)

    async def broker_ha_status(self, address: str) -> HARuntimeInfo:
        reply = await self._ask(address, RequestCode.GET_BROKER_HA_STATUS, {}, "HA status")
        return HARuntimeInfo.decode(reply.body)

    async def broker_epoch(self, address: str) -> EpochEntryCache:
        """The epochs of one replica's log. Raises ResponseError outside controller mode."""
        reply = await self._ask(address, RequestCode.GET_BROKER_EPOCH_CACHE, {}, "epochs")
        return EpochEntryCache.decode(reply.body)

    async def repair_replica(self, address: str, suspect: str) -> str:
        """Has one broker trust its log again that is suspect for the reason `suspect`, as its
        runtime info tells it; what was done. Raises ResponseError if that is not what is wrong."""
        reply = await self._ask(
            address, RequestCode.BATON_REPAIR_REPLICA, {"suspect": suspect}, "repair"
        )
        return reply.remark or ""

    # -- topics -------------------------------------------------------------------------------

    async def topic_list(self) -> list[str]:
        """Ascending."""
        reply = await self._ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {})
        return sorted(TopicList.decode(reply.body).topic_list)

    async def topic_route(self, topic: str) -> TopicRouteData:
        return await self._client.name_servers.route(topic, deadline_ms=self._deadline_ms())

    async def topic_stats(self, topic: str) -> tuple[QueueStats, ...]:
        """Offsets of every queue, ascending."""
        route = topic_route(topic, await self.topic_route(topic))
        parts = await asyncio.gather(
            *(self._stats_at(route, name, address) for name, address in route.masters().items())
        )
        if not parts:
            raise NoMasterError(", ".join(sorted(route.brokers)) or topic)
        return tuple(sorted((s for part in parts for s in part), key=lambda s: s.queue))

    async def _stats_at(self, route: TopicRoute, name: str, address: str) -> list[QueueStats]:
        try:
            reply = await self._ask(
                address, RequestCode.GET_TOPIC_STATS_INFO, {"topic": route.topic}, "topic status"
            )
        except UnsupportedByBrokerError:
            queues = [q for q in route.subscribe_queues if q.broker_name == name]
            return list(await asyncio.gather(*(self._stats_of(q) for q in queues)))
        table = TopicStatsTable.decode(reply.body).offset_table
        return [
            QueueStats(queue, o.min_offset, o.max_offset, o.last_update_timestamp)
            for queue, o in table.items()
        ]

    async def _stats_of(self, queue: MessageQueue) -> QueueStats:
        low = await self._calls.min_offset(queue, deadline_ms=self._deadline_ms())
        high = await self._calls.max_offset(queue, deadline_ms=self._deadline_ms())
        return QueueStats(queue, low, high)

    async def create_or_update_topic(
        self, config: TopicConfig, *, cluster: str | None = None, broker: str | None = None
    ) -> dict[str, str]:
        """On all masters of a cluster, or on one broker (name or address); returns those."""
        problem = topic_problem(config.topic_name)
        if problem is not None:
            raise ClientError(problem)
        targets = await self._targets(cluster, broker)
        # `+key=value` sets, `-key` (no value) takes away.
        attributes = ",".join(f"{k}={v}" if v else k for k, v in (config.attributes or {}).items())
        ext = {
            "topic": config.topic_name,
            "defaultTopic": AUTO_CREATE_TOPIC,
            "readQueueNums": str(config.read_queue_nums),
            "writeQueueNums": str(config.write_queue_nums),
            "perm": str(config.perm),
            "topicFilterType": str(config.topic_filter_type),
            "topicSysFlag": str(config.topic_sys_flag),
            "order": "true" if config.order else "false",
            "attributes": attributes,
            "force": "false",
        }
        for address in targets.values():
            await self._ask(address, RequestCode.UPDATE_AND_CREATE_TOPIC, ext, "updating a topic")
        self._client.forget_route(config.topic_name)
        return targets

    async def delete_topic(self, topic: str, cluster: str) -> dict[str, str]:
        """From all masters of the cluster, then from all name servers; returns the masters.

        A name server that is down is passed over: it will learn its routes anew.
        """
        targets = await self.masters(cluster)
        for address in targets.values():
            await self._ask(
                address, RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic}, "deleting a topic"
            )
        request = RemotingCommand.request(
            RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": topic, "clusterName": cluster}
        )
        answers = await self._client.name_servers.invoke_each(
            request, deadline_ms=self._deadline_ms()
        )
        for address, answer in answers.items():
            if not isinstance(answer, Exception) and answer.code != ResponseCode.SUCCESS:
                raise ResponseError(answer.code, answer.remark, address)
        self._client.forget_route(topic)
        return targets

    async def all_topic_config(self, address: str) -> TopicConfigSerializeWrapper:
        reply = await self._ask(address, RequestCode.GET_ALL_TOPIC_CONFIG, {}, "topic settings")
        return TopicConfigSerializeWrapper.decode(reply.body)

    # -- messages -----------------------------------------------------------------------------

    async def message_by_id(self, msg_id: str, topic: str = "") -> MessageExt | None:
        """By the broker's own id, asked from the broker that the id names. None: not there.

        Raises ClientError for a text that is no such id.
        """
        try:
            address, offset = decode_offset_msg_id(msg_id)
        except ValueError as error:
            raise ClientError(
                f"{msg_id} is no offset message id ({error}): a unique key is looked up with "
                "`mqctl queryMsgByKey`"
            ) from error
        ext = {"offset": str(offset)}
        if topic:
            ext["topic"] = topic
        try:
            reply = await self._ask(
                address,
                RequestCode.VIEW_MESSAGE_BY_ID,
                ext,
                "finding a message",
                also=_NOT_FOUND,
            )
        except ResponseError as error:
            if error.code == ResponseCode.SYSTEM_ERROR:
                return None
            raise
        messages = decode_records(reply.body) if reply.code == ResponseCode.SUCCESS else []
        return messages[0] if messages else None

    async def messages_by_key(
        self,
        topic: str,
        key: str,
        *,
        max_messages: int = 64,
        begin_ms: int = 0,
        end_ms: int = LONG_MAX,
    ) -> list[MessageExt]:
        """Messages with that word in KEYS, stored in [`begin_ms`, `end_ms`] wall clock, in order
        of store time. Brokers look up by hash, so what they find is checked here."""
        found = await self._query(topic, key, max_messages, begin_ms, end_ms, unique=False)
        return [m for m in found if key in m.keys.split()][:max_messages]

    async def message_by_unique_key(self, topic: str, key: str) -> MessageExt | None:
        """The message that a producer gave this unique key (`SendResult.msg_id`); the first one if
        a bridged failover stored it twice."""
        found = await self._query(topic, key, 32, 0, LONG_MAX, unique=True)
        return next((m for m in found if m.uniq_key == key), None)

    async def _query(
        self, topic: str, key: str, max_num: int, begin_ms: int, end_ms: int, *, unique: bool
    ) -> list[MessageExt]:
        route = topic_route(topic, await self.topic_route(topic))
        ext = {
            "topic": topic,
            "key": key,
            "maxNum": str(max_num),
            "beginTimestamp": str(begin_ms),
            "endTimestamp": str(end_ms),
            "_UNIQUE_KEY_QUERY": "true" if unique else "false",
        }
        masters = route.masters()
        replies = await asyncio.gather(
            *(
                self._ask(a, RequestCode.QUERY_MESSAGE, ext, "looking up by key", also=_NOT_FOUND)
                for a in masters.values()
            )
        )
        found: list[MessageExt] = []
        for name, reply in zip(masters, replies, strict=True):
            if reply.code == ResponseCode.SUCCESS:
                found += _at_broker(decode_records(reply.body), name)
        return sorted(found, key=lambda m: (m.store_timestamp, m.physical_offset))

    # -- groups -------------------------------------------------------------------------------

    async def all_subscription_groups(self, address: str) -> SubscriptionGroupWrapper:
        reply = await self._ask(
            address, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {}, "subscription groups"
        )
        return SubscriptionGroupWrapper.decode(reply.body)

    async def update_subscription_group(
        self,
        config: SubscriptionGroupConfig,
        *,
        cluster: str | None = None,
        broker: str | None = None,
    ) -> dict[str, str]:
        """On all masters of a cluster, or on one broker (name or address); returns those."""
        targets = await self._targets(cluster, broker)
        for address in targets.values():
            await self._ask(
                address,
                RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
                {},
                "updating a group",
                body=config.encode(),
            )
        return targets

    async def all_consumer_offsets(self, address: str) -> dict[str, dict[int, int]]:
        """`topic@group` -> queue id -> offset, of one broker."""
        reply = await self._ask(address, RequestCode.GET_ALL_CONSUMER_OFFSET, {}, "offsets")
        document = fastjson.loads(reply.body)
        table = document.get("offsetTable", {}) if isinstance(document, dict) else {}
        return {
            str(name): {int(queue_id): int(offset) for queue_id, offset in queues.items()}
            for name, queues in table.items()
        }

    async def consumer_groups(self) -> list[str]:
        """Groups that have stored offsets or settings on any master, ascending."""
        groups: set[str] = set()
        for address in (await self.masters()).values():
            offsets, settings = await asyncio.gather(
                self.all_consumer_offsets(address), self.all_subscription_groups(address)
            )
            groups.update(name.rpartition("@")[2] for name in offsets)
            groups.update(settings.subscription_group_table)
        return sorted(groups)

    async def consumer_members(self, group: str) -> tuple[str, ...]:
        """Client ids that any master knows as members now, ascending."""
        members: set[str] = set()
        for address in (await self.masters()).values():
            request = RemotingCommand.request(
                RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group}
            )
            reply = await self._client.remoting.invoke(address, request, self._timeout_ms)
            if reply.code == ResponseCode.SUCCESS:
                body = GetConsumerListByGroupResponseBody.decode(reply.body)
                members.update(body.consumer_id_list)
        return tuple(sorted(members))

    async def consumer_progress(self, group: str, topic: str | None = None) -> GroupProgress:
        """How far the group is on every queue that it has an offset for."""
        masters = await self.masters()
        parts = await asyncio.gather(
            *(self._progress_at(name, a, group, topic) for name, a in masters.items())
        )
        queues = sorted((q for part in parts for q in part), key=lambda q: q.queue)
        return GroupProgress(group, tuple(queues), await self.consumer_members(group))

    async def _progress_at(
        self, name: str, address: str, group: str, topic: str | None
    ) -> Iterable[QueueProgress]:
        ext = {"consumerGroup": group, **({"topic": topic} if topic else {})}
        try:
            reply = await self._ask(address, RequestCode.GET_CONSUME_STATS, ext, "progress")
        except UnsupportedByBrokerError:
            return await self._progress_by_offsets(name, address, group, topic)
        return [
            QueueProgress(queue, o.broker_offset, o.consumer_offset, o.last_timestamp)
            for queue, o in ConsumeStats.decode(reply.body).offset_table.items()
        ]

    async def _progress_by_offsets(
        self, name: str, address: str, group: str, topic: str | None
    ) -> list[QueueProgress]:
        progress: list[QueueProgress] = []
        for key, offsets in sorted((await self.all_consumer_offsets(address)).items()):
            of_topic, _, of_group = key.rpartition("@")
            if of_group != group or (topic is not None and of_topic != topic):
                continue
            for queue_id, offset in sorted(offsets.items()):
                queue = MessageQueue(of_topic, name, queue_id)
                end = await self._max_offset_at(address, queue)
                if end is not None:
                    progress.append(QueueProgress(queue, end, offset))
        return progress

    async def _max_offset_at(self, address: str, queue: MessageQueue) -> int | None:
        """None if the topic is gone and only offsets are left of it."""
        ext = {"topic": queue.topic, "queueId": str(queue.queue_id)}
        try:
            reply = await self._ask(address, RequestCode.GET_MAX_OFFSET, ext, "offsets")
        except ResponseError as error:
            if error.code in (ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SYSTEM_ERROR):
                return None
            raise
        return int(reply.ext["offset"])

    # -- helpers ------------------------------------------------------------------------------

    async def _targets(self, cluster: str | None, broker: str | None) -> dict[str, str]:
        if cluster is None and broker is None:
            raise ClientError("say where: give a cluster (all its masters) or one broker")
        return await self.masters(cluster, broker)

    async def _ask_name_server(self, code: RequestCode, ext: dict[str, str]) -> RemotingCommand:
        request = RemotingCommand.request(code, ext)
        reply = await self._client.name_servers.invoke(request, deadline_ms=self._deadline_ms())
        if reply.code != ResponseCode.SUCCESS:
            address = self._client.name_server_addresses[0]
            raise ResponseError(reply.code, reply.remark, address)
        return reply

    async def _ask(
        self,
        address: str,
        code: RequestCode,
        ext: dict[str, str],
        what: str,
        *,
        body: bytes = b"",
        also: frozenset[int] = frozenset(),
    ) -> RemotingCommand:
        request = RemotingCommand.request(code, ext, body)
        return await self._call.ask(address, request, what, also=also)

    def _deadline_ms(self) -> int:
        return boot_ms() + self._timeout_ms


def _at_broker(messages: list[MessageExt], broker_name: str) -> list[MessageExt]:
    """Records do not say which group holds them; who was asked does."""
    for message in messages:
        message.broker_name = broker_name
    return messages
