"""Admin calls about topics.

A change is sent to every master concerned, one after the other, and returns these masters. An error
names the master at which it stopped.
"""

import asyncio
from collections.abc import Mapping

import msgspec

from batonmq.client.admin.cluster import ClusterAdmin
from batonmq.client.admin.requests import AdminRequests
from batonmq.client.admin.types import ChangedTopic, QueueStats, TopicChanges, Traffic
from batonmq.client.arguments import check_topic_name
from batonmq.client.errors import ClientError, NoMasterError, UnsupportedByBrokerError
from batonmq.client.instance.topic_route import topic_route
from batonmq.protocol.bodies import (
    BrokerStatsData,
    GroupList,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
    TopicRouteData,
    TopicStatsTable,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import ResponseError
from batonmq.protocol.sysflag import UNIT_SUB_TOPIC, UNIT_TOPIC
from batonmq.protocol.topic_name import AUTO_CREATE_TOPIC
from batonmq.remoting.command import RemotingCommand

_NEW_QUEUES = 8  # the default of a new topic, as in mqadmin


class TopicAdmin:
    def __init__(self, requests: AdminRequests, cluster: ClusterAdmin) -> None:
        self._requests = requests
        self._cluster = cluster

    async def names(self) -> list[str]:
        """All topics, ascending."""
        code, requests = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, self._requests
        body = await requests.client.name_servers.ask(code, deadline_ms=requests.deadline_ms())
        return sorted(TopicList.decode(body).topic_list)

    async def route(self, topic: str) -> TopicRouteData:
        """The brokers of a topic and its queues there, from a name server. Raises NoRouteError."""
        deadline_ms = self._requests.deadline_ms()
        return await self._requests.client.name_servers.route(topic, deadline_ms=deadline_ms)

    async def stats(self, topic: str) -> tuple[QueueStats, ...]:
        """Offsets of every queue, ascending."""
        masters = await self._masters(topic)
        parts = await asyncio.gather(*(self._stats_at(address, topic) for address in masters))
        return tuple(sorted((s for part in parts for s in part), key=lambda s: s.queue))

    async def _masters(self, topic: str) -> list[str]:
        """Addresses. Raises NoMasterError if no broker group with the topic has a master."""
        route = topic_route(topic, await self.route(topic))
        if not (masters := route.masters()):
            raise NoMasterError(", ".join(sorted(route.brokers)) or topic)
        return list(masters.values())

    async def traffic(self, topic: str) -> tuple[Traffic, ...]:
        """Sums over all masters: first of the topic, then of each group that reads it,
        ascending."""
        masters = await self._masters(topic)
        asks = (self._groups_at(address, topic) for address in masters)
        groups = sorted({group for found in await asyncio.gather(*asks) for group in found})
        wanted: list[tuple[str, str, str | None]] = [("TOPIC_PUT_NUMS", topic, None)]
        wanted += [("GROUP_GET_NUMS", f"{topic}@{group}", group) for group in groups]
        found = []
        for name, key, group in wanted:
            parts = await asyncio.gather(*(self._counted(a, name, key) for a in masters))
            tps = sum(part.stats_minute.tps for part in parts)
            found.append(Traffic(topic, group, tps, sum(part.stats_day.sum for part in parts)))
        return tuple(found)

    async def _groups_at(self, address: str, topic: str) -> list[str]:
        code, ext = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": topic}
        groups = await self._requests.read(GroupList, address, code, ext, "groups of a topic")
        return groups.group_list

    async def _counted(self, address: str, name: str, key: str) -> BrokerStatsData:
        """The counters; zeros if there are none yet."""
        code, ext = RequestCode.VIEW_BROKER_STATS_DATA, {"statsName": name, "statsKey": key}
        absent = ResponseCode.SYSTEM_ERROR
        body = await self._requests.find(address, code, ext, "statistics", absent)
        return BrokerStatsData() if body is None else BrokerStatsData.decode(body)

    async def configs(self, address: str) -> TopicConfigSerializeWrapper:
        """The settings of all topics on one broker."""
        kind, code = TopicConfigSerializeWrapper, RequestCode.GET_ALL_TOPIC_CONFIG
        return await self._requests.read(kind, address, code, {}, "topic settings")

    async def config(self, address: str, topic: str) -> TopicConfig | None:
        """The settings of one topic on one broker; None if it does not exist there."""
        code, absent = RequestCode.GET_TOPIC_CONFIG, ResponseCode.TOPIC_NOT_EXIST
        ext = {"topic": topic}
        try:
            body = await self._requests.find(address, code, ext, "topic settings", absent)
        except UnsupportedByBrokerError:  # older brokers only return the whole table
            return (await self.configs(address)).topic_config_table.get(topic)
        return None if body is None else TopicConfig.decode(body)

    async def change(
        self,
        topic: str,
        changes: TopicChanges,
        *,
        cluster: str | None = None,
        broker: str | None = None,
        force: bool = False,
    ) -> dict[str, ChangedTopic]:
        """Creates a topic, or changes only what is given, on the same brokers as
        `create_or_update`. Returns broker name or address -> the new settings. Unless `force`, our
        brokers refuse fewer queues than hold messages, and ClientError is raised if messages
        would go to queues that are not read."""
        check_topic_name(topic)
        targets = await self._cluster.targets(cluster, broker)
        after = {
            name: _changed(await self.config(address, topic), topic, changes)
            for name, address in targets.items()
        }
        for config in after.values():
            if config.write_queue_nums > config.read_queue_nums and not force:
                raise ClientError(
                    f"topic {topic} would have {config.write_queue_nums} queues to write and"
                    f" {config.read_queue_nums} to read: what goes to the others would not be read"
                )
        for name, address in targets.items():
            await self._put(address, after[name], changes.attributes, force=force)
        if changes.attributes:  # only the broker knows the result
            for name, address in targets.items():
                after[name] = await self.config(address, topic) or after[name]
        self._requests.client.routes.forget(topic)
        return {name: ChangedTopic(targets[name], config) for name, config in after.items()}

    async def create_or_update(
        self,
        config: TopicConfig,
        *,
        cluster: str | None = None,
        broker: str | None = None,
        force: bool = False,
    ) -> dict[str, str]:
        """Sets every setting on all masters of a cluster, or on one broker (name or address);
        returns these. Attributes are set, or with a sign changed as in `change`. To change only
        some settings, and for `force`, see `change`."""
        check_topic_name(config.topic_name)
        targets = await self._cluster.targets(cluster, broker)
        attributes = {
            key if key[:1] in ("+", "-") else f"+{key}": value
            for key, value in config.attributes.items()
        }
        for address in targets.values():
            await self._put(address, config, attributes, force=force)
        # The known route may have other queues now; the next use fetches it.
        self._requests.client.routes.forget(config.topic_name)
        return targets

    async def _put(
        self, address: str, config: TopicConfig, attributes: Mapping[str, str], *, force: bool
    ) -> None:
        ext = {
            "topic": config.topic_name,
            "defaultTopic": AUTO_CREATE_TOPIC,
            "readQueueNums": str(config.read_queue_nums),
            "writeQueueNums": str(config.write_queue_nums),
            "perm": str(config.perm),
            "topicFilterType": str(config.topic_filter_type),
            "topicSysFlag": str(config.topic_sys_flag),
            "order": "true" if config.order else "false",
            # `+key=value` sets, `-key` (no value) takes away.
            "attributes": ",".join(f"{k}={v}" if v else k for k, v in attributes.items()),
            "force": "true" if force else "false",
        }
        code = RequestCode.UPDATE_AND_CREATE_TOPIC
        await self._requests.ask(address, code, ext, "updating a topic")

    async def delete(self, topic: str, cluster: str) -> dict[str, str]:
        """Deletes a topic from all masters of the cluster, then from all name servers; returns the
        masters. A name server that is down is skipped: it gets its routes from the brokers when it
        is back. Raises ClientError if no master and no name server has the topic."""
        requests = self._requests
        targets = await self._cluster.masters(cluster)
        if topic not in await self.names():
            known = await asyncio.gather(*(self.config(a, topic) for a in targets.values()))
            if not any(known):
                raise ClientError(f"no topic {topic} in cluster {cluster}: nothing was deleted")
        # First the masters: a name server would get the topic back with a registration of theirs.
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

    async def _stats_at(self, address: str, topic: str) -> list[QueueStats]:
        code = RequestCode.GET_TOPIC_STATS_INFO
        ext = {"topic": topic}
        stats = await self._requests.read(TopicStatsTable, address, code, ext, "topic status")
        return [
            QueueStats(queue, o.min_offset, o.max_offset, o.last_update_timestamp)
            for queue, o in stats.offset_table.items()
        ]


def _changed(known: TopicConfig | None, topic: str, changes: TopicChanges) -> TopicConfig:
    """`known` with the changes, except for attributes, which the broker applies."""
    base = known or TopicConfig(
        topic_name=topic, read_queue_nums=_NEW_QUEUES, write_queue_nums=_NEW_QUEUES
    )
    given = {
        name: value
        for name in ("read_queue_nums", "write_queue_nums", "perm", "order")
        if (value := getattr(changes, name)) is not None
    }
    flags = base.topic_sys_flag
    for bit, wanted in ((UNIT_TOPIC, changes.unit), (UNIT_SUB_TOPIC, changes.has_unit_sub)):
        if wanted is not None:
            flags = flags | bit if wanted else flags & ~bit
    return msgspec.structs.replace(base, topic_sys_flag=flags, **given)
