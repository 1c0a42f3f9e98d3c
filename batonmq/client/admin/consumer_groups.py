"""Admin calls about consumer groups: settings, members, offsets, progress.

`masters`: broker name -> address of the masters to ask. Without it a call asks all, and raises
NoMasterError if a broker group has none.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping

from batonmq.client.admin.cluster import ClusterAdmin
from batonmq.client.admin.requests import AdminRequests
from batonmq.client.admin.types import GroupProgress, QueueProgress
from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.errors import ClientError
from batonmq.client.instance.topic_route import topic_route
from batonmq.protocol import bodies
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import ResponseError
from batonmq.protocol.message import MessageQueue
from batonmq.remoting.command import RemotingCommand


class ConsumerGroupAdmin:
    def __init__(self, requests: AdminRequests, cluster: ClusterAdmin) -> None:
        self._requests = requests
        self._cluster = cluster

    async def settings(self, address: str) -> bodies.SubscriptionGroupWrapper:
        """The settings of all groups on one broker."""
        kind, code = bodies.SubscriptionGroupWrapper, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        return await self._requests.read(kind, address, code, {}, "subscription groups")

    async def update(
        self,
        config: bodies.SubscriptionGroupConfig,
        *,
        cluster: str | None = None,
        broker: str | None = None,
    ) -> dict[str, str]:
        """Creates or changes a group on all masters of a cluster, or on one broker (name or
        address); returns these."""
        targets = await self._cluster.targets(cluster, broker)
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        # One after the other: an error names the first master that lacks the change.
        for address in targets.values():
            await self._requests.ask(address, code, {}, "updating a group", body=config.encode())
        return targets

    async def delete(
        self,
        group: str,
        *,
        cluster: str | None = None,
        broker: str | None = None,
        with_offsets: bool = False,
    ) -> dict[str, str]:
        """Deletes a group from all masters of a cluster, or from one broker (name or address);
        returns these."""
        targets = await self._cluster.targets(cluster, broker)
        ext = {"groupName": group, "cleanOffset": "true" if with_offsets else "false"}
        for address in targets.values():
            code = RequestCode.DELETE_SUBSCRIPTIONGROUP
            await self._requests.ask(address, code, ext, "deleting a group")
        return targets

    async def commit(
        self, address: str, group: str, topic: str, queue_id: int, offset: int
    ) -> None:
        """Sets the offset of a group in one queue, as a consumer does."""
        ext = {
            "consumerGroup": group,
            "topic": topic,
            "queueId": str(queue_id),
            "commitOffset": str(offset),
        }
        code = RequestCode.UPDATE_CONSUMER_OFFSET
        await self._requests.ask(address, code, ext, "storing an offset")

    async def producers(
        self, group: str, masters: Mapping[str, str] | None = None
    ) -> list[bodies.ClientConnection]:
        """The connected producers of the group, without repetition."""
        found: dict[str, bodies.ClientConnection] = {}
        code, ext = RequestCode.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": group}
        unknown = ResponseCode.SYSTEM_ERROR
        async for body in self._at_each(masters, code, ext, "producers", unknown):
            for each in bodies.ProducerConnection.decode(body).connection_set:
                found.setdefault(each.client_id, each)
        return [found[name] for name in sorted(found)]

    async def progress_of_broker(self, address: str) -> dict[str, list[QueueProgress]]:
        """Group -> its queues on one broker, for all groups that have an offset there."""
        groups = sorted({key.rpartition("@")[2] for key in await self.offsets(address)})
        return {
            group: sorted(await self._progress_at(address, group, None), key=lambda q: q.queue)
            for group in groups
        }

    async def offsets(self, address: str) -> dict[str, dict[int, int]]:
        """`topic@group` -> queue id -> offset, on one broker."""
        kind, code = bodies.ConsumerOffsetSerializeWrapper, RequestCode.GET_ALL_CONSUMER_OFFSET
        return (await self._requests.read(kind, address, code, {}, "offsets")).offset_table

    async def names(self, masters: Mapping[str, str] | None = None) -> list[str]:
        """Groups that have stored offsets or settings on any master, ascending."""
        groups: set[str] = set()
        for address in (await self._to_ask(masters)).values():
            offsets, settings = await asyncio.gather(self.offsets(address), self.settings(address))
            groups.update(name.rpartition("@")[2] for name in offsets)
            groups.update(settings.subscription_group_table)
        return sorted(groups)

    async def members(
        self, group: str, masters: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        """Client ids of the members that any master knows now, ascending."""
        members: set[str] = set()
        for address in (await self._to_ask(masters)).values():
            # Not by `ask`: a broker that does not know the group refuses, and has no members of it.
            request = RemotingCommand.request(
                RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group}
            )
            remoting = self._requests.client.remoting
            reply = await remoting.invoke(address, request, self._requests.timeout_ms)
            if reply.code == ResponseCode.SUCCESS:
                body = bodies.GetConsumerListByGroupResponseBody.decode(reply.body)
                members.update(body.consumer_id_list)
        return tuple(sorted(members))

    async def progress(
        self, group: str, topic: str | None = None, masters: Mapping[str, str] | None = None
    ) -> GroupProgress:
        """The group's progress in every queue in which it has an offset."""
        masters = await self._to_ask(masters)
        parts = await asyncio.gather(
            *(self._progress_at(address, group, topic) for address in masters.values())
        )
        queues = sorted((q for part in parts for q in part), key=lambda q: q.queue)
        return GroupProgress(group, tuple(queues), await self.members(group, masters))

    async def _at_each(
        self,
        masters: Mapping[str, str] | None,
        code: RequestCode,
        ext: dict[str, str],
        what: str,
        unknown: ResponseCode,
    ) -> AsyncIterator[bytes]:
        """The bodies of all masters but those at which the group is unknown."""
        for address in (await self._to_ask(masters)).values():
            body = await self._requests.find(address, code, ext, what, unknown)
            if body is not None:
                yield body

    async def _to_ask(self, masters: Mapping[str, str] | None) -> Mapping[str, str]:
        return await self._cluster.masters() if masters is None else masters

    async def connections(
        self, group: str, masters: Mapping[str, str] | None = None
    ) -> bodies.ConsumerConnection | None:
        """The group's connected members, without repetition, and its subscriptions; None without
        members."""
        found: bodies.ConsumerConnection | None = None
        code, ext = RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": group}
        unknown = ResponseCode.CONSUMER_NOT_ONLINE
        async for body in self._at_each(masters, code, ext, "members", unknown):
            here = bodies.ConsumerConnection.decode(body)
            if found is None:
                found = here
                continue
            known = {each.client_id for each in found.connection_set}
            found.connection_set += [c for c in here.connection_set if c.client_id not in known]
            found.subscription_table = here.subscription_table | found.subscription_table
        return found

    async def preview_reset(
        self, group: str, topic: str, timestamp_ms: int, queue: tuple[str, int, int] | None = None
    ) -> dict[MessageQueue, tuple[int | None, int]]:
        """What `reset_offsets` would do, by queue, ascending: the present offset (None: none yet)
        and the new one. Raises NoRouteError, and as `reset_offsets`."""
        client, deadline_ms = self._requests.client, self._requests.deadline_ms()
        route = topic_route(topic, await client.name_servers.route(topic, deadline_ms=deadline_ms))
        calls, found = QueueCalls(client), dict[MessageQueue, tuple[int | None, int]]()
        for each in route.subscribe_queues:
            if queue is not None and (each.broker_name, each.queue_id) != queue[:2]:
                continue
            if queue is not None:
                then = queue[2]
            elif timestamp_ms < 0:
                then = await calls.max_offset(each, deadline_ms=deadline_ms)
            else:
                then = await calls.offset_by_time(each, timestamp_ms, deadline_ms=deadline_ms)
            now = await calls.committed_offset(group, each, deadline_ms=deadline_ms)
            found[each] = (now, then)
        if not found:
            raise ClientError(f"topic {topic} has no such queue to read")
        return dict(sorted(found.items()))

    async def reset_offsets(
        self, group: str, topic: str, timestamp_ms: int, queue: tuple[str, int, int] | None = None
    ) -> dict[MessageQueue, int]:
        """Resets the group in a topic to a store time (0: the beginning, -1: the end), or in one
        `queue` (broker name, queue id, offset). Returns the new offsets. Raises ClientError if no
        master has the topic."""
        masters = await self._cluster.masters(broker=queue[0] if queue else None)
        # Without force a broker that asks its members would only move the group back.
        ext = {"topic": topic, "group": group, "timestamp": str(timestamp_ms), "isForce": "true"}
        if queue is not None:
            ext |= {"queueId": str(queue[1]), "offset": str(queue[2])}
        code, offsets = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, dict[MessageQueue, int]()
        without = []
        for name, address in masters.items():
            try:
                reply = await self._requests.ask(address, code, ext, "resetting offsets")
            except ResponseError as error:
                if error.code != ResponseCode.TOPIC_NOT_EXIST:
                    raise
                # A topic need not be in every group.
                without.append(name)
                continue
            offsets |= bodies.ResetOffsetBody.decode(reply.body).offset_table
        if not offsets:
            raise ClientError(f"topic {topic} is at none of the brokers {', '.join(without)}")
        return dict(sorted(offsets.items()))

    async def _progress_at(
        self, address: str, group: str, topic: str | None
    ) -> Iterable[QueueProgress]:
        ext = {"consumerGroup": group, **({"topic": topic} if topic else {})}
        code = RequestCode.GET_CONSUME_STATS
        stats = await self._requests.read(bodies.ConsumeStats, address, code, ext, "progress")
        return [
            QueueProgress(
                queue, o.broker_offset, o.consumer_offset, o.last_timestamp, o.pull_offset
            )
            for queue, o in stats.offset_table.items()
        ]
