"""Admin calls about topics.

Changes go to every master concerned, one after the other, and return at the end where they were
made; an error says where it stopped.
"""

import asyncio

from batonmq.client.admin.cluster import ClusterAdmin
from batonmq.client.admin.requests import AdminRequests
from batonmq.client.admin.types import QueueStats
from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.errors import ClientError, NoMasterError, UnsupportedByBrokerError
from batonmq.client.instance.topic_route import TopicRoute, topic_route
from batonmq.protocol.bodies import (
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
    TopicRouteData,
    TopicStatsTable,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import ResponseError
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.topic_name import AUTO_CREATE_TOPIC, topic_problem
from batonmq.remoting.command import RemotingCommand


class TopicAdmin:
    def __init__(self, requests: AdminRequests, cluster: ClusterAdmin) -> None:
        self._requests = requests
        self._cluster = cluster
        self._queues = QueueCalls(requests.client)

    async def names(self) -> list[str]:
        """Ascending."""
        reply = await self._requests.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        return sorted(TopicList.decode(reply.body).topic_list)

    async def route(self, topic: str) -> TopicRouteData:
        deadline_ms = self._requests.deadline_ms()
        return await self._requests.client.name_servers.route(topic, deadline_ms=deadline_ms)

    async def stats(self, topic: str) -> tuple[QueueStats, ...]:
        """Offsets of every queue, ascending."""
        route = topic_route(topic, await self.route(topic))
        parts = await asyncio.gather(
            *(self._stats_at(route, name, address) for name, address in route.masters().items())
        )
        if not parts:
            raise NoMasterError(", ".join(sorted(route.brokers)) or topic)
        return tuple(sorted((s for part in parts for s in part), key=lambda s: s.queue))

    async def configs(self, address: str) -> TopicConfigSerializeWrapper:
        """The settings of all topics at one broker."""
        reply = await self._requests.ask(
            address, RequestCode.GET_ALL_TOPIC_CONFIG, {}, "topic settings"
        )
        return TopicConfigSerializeWrapper.decode(reply.body)

    async def create_or_update(
        self, config: TopicConfig, *, cluster: str | None = None, broker: str | None = None
    ) -> dict[str, str]:
        """On all masters of a cluster, or on one broker (name or address); returns those."""
        problem = topic_problem(config.topic_name)
        if problem is not None:
            raise ClientError(problem)
        targets = await self._cluster.targets(cluster, broker)
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
            await self._requests.ask(
                address, RequestCode.UPDATE_AND_CREATE_TOPIC, ext, "updating a topic"
            )
        self._requests.client.routes.forget(config.topic_name)
        return targets

    async def delete(self, topic: str, cluster: str) -> dict[str, str]:
        """From all masters of the cluster, then from all name servers; returns the masters.

        A name server that is down is skipped: it gets its routes from the brokers when it is back.
        """
        requests = self._requests
        targets = await self._cluster.masters(cluster)
        for address in targets.values():
            await requests.ask(
                address, RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic}, "deleting a topic"
            )
        request = RemotingCommand.request(
            RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": topic, "clusterName": cluster}
        )
        answers = await requests.client.name_servers.invoke_each(
            request, deadline_ms=requests.deadline_ms()
        )
        for address, answer in answers.items():
            if not isinstance(answer, Exception) and answer.code != ResponseCode.SUCCESS:
                raise ResponseError(answer.code, answer.remark, address)
        requests.client.routes.forget(topic)
        return targets

    async def _stats_at(self, route: TopicRoute, name: str, address: str) -> list[QueueStats]:
        try:
            reply = await self._requests.ask(
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
        deadline_ms = self._requests.deadline_ms()
        low = await self._queues.min_offset(queue, deadline_ms=deadline_ms)
        high = await self._queues.max_offset(queue, deadline_ms=deadline_ms)
        return QueueStats(queue, low, high)
