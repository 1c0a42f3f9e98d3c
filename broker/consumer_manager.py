"""Which clients are connected, as producers or as members of which consumer group.

Pure: heartbeats and closed channels in, the members to notify out. A client is known by its
channel; it leaves with it, or after 120 s of silence. Origin: ConsumerManager, ProducerManager and
ConsumerGroupInfo in Java.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final

from batonmq.protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData

CLIENT_EXPIRED_MS: Final = 120_000


@dataclass(slots=True)
class ClientChannel:
    """One client as one group knows it."""

    channel: Hashable
    client_id: str
    language: int
    version: int
    last_heartbeat_ms: int


@dataclass(slots=True)
class ConsumerGroup:
    """The members of a group and what they subscribe to."""

    name: str
    consume_type: str
    message_model: str
    consume_from_where: str
    members: dict[Hashable, ClientChannel] = field(default_factory=dict)
    subscriptions: dict[str, SubscriptionData] = field(default_factory=dict)

    @property
    def client_ids(self) -> list[str]:
        return sorted({member.client_id for member in self.members.values()})


@dataclass(frozen=True, slots=True)
class GroupChanged:
    """The members of `group` changed: each of `channels` gets a notice (code 40)."""

    group: str
    channels: tuple[Hashable, ...]


class ConsumerManager:
    """Tables of consumer groups and producer groups. Times are ms of one monotonic clock."""

    def __init__(self) -> None:
        self.groups: dict[str, ConsumerGroup] = {}
        self.producers: dict[str, dict[Hashable, ClientChannel]] = {}

    def heartbeat(
        self, data: HeartbeatData, channel: Hashable, language: int, version: int, now_ms: int
    ) -> list[GroupChanged]:
        """Takes a heartbeat; returns the groups whose membership or subscription changed by it."""

        def client() -> ClientChannel:
            return ClientChannel(channel, data.client_id, language, version, now_ms)

        for producer in data.producer_data_set:
            self.producers.setdefault(producer.group_name, {})[channel] = client()
        changed = []
        for consumer in data.consumer_data_set:
            if self._consumer(consumer, client(), without_subscription=data.without_sub):
                group = self.groups[consumer.group_name]
                changed.append(GroupChanged(group.name, tuple(group.members)))
        return changed

    def _consumer(
        self, data: ConsumerData, client: ClientChannel, *, without_subscription: bool
    ) -> bool:
        group = self.groups.get(data.group_name)
        if group is None:
            group = self.groups[data.group_name] = ConsumerGroup(
                data.group_name, data.consume_type, data.message_model, data.consume_from_where
            )
        group.consume_type = data.consume_type
        group.message_model = data.message_model
        group.consume_from_where = data.consume_from_where
        known = group.members.get(client.channel)
        changed = known is None or known.client_id != client.client_id
        group.members[client.channel] = client
        if without_subscription:
            return changed
        wanted = {sub.topic: sub for sub in data.subscription_data_set}
        for topic, sub in wanted.items():
            before = group.subscriptions.get(topic)
            if before is None:
                changed = True
            if before is None or sub.sub_version > before.sub_version:
                group.subscriptions[topic] = sub
        for topic in [topic for topic in group.subscriptions if topic not in wanted]:
            del group.subscriptions[topic]
            changed = True
        return changed

    def unregister(
        self, channel: Hashable, producer_group: str | None, consumer_group: str | None
    ) -> list[GroupChanged]:
        """A client leaves the named groups."""
        if producer_group:
            self._leave_producer(producer_group, channel)
        return self._leave_consumers([consumer_group] if consumer_group else [], channel)

    def channel_closed(self, channel: Hashable) -> list[GroupChanged]:
        """A client's connection is gone; so is the client, from all its groups."""
        for group in list(self.producers):
            self._leave_producer(group, channel)
        return self._leave_consumers(list(self.groups), channel)

    def expire(self, now_ms: int) -> list[GroupChanged]:
        """Drops clients whose last heartbeat is older than 120 s."""
        oldest = now_ms - CLIENT_EXPIRED_MS
        silent = {
            client.channel
            for table in (*self.producers.values(), *(g.members for g in self.groups.values()))
            for client in table.values()
            if client.last_heartbeat_ms < oldest
        }
        return [change for channel in silent for change in self.channel_closed(channel)]

    def client_ids(self, group: str) -> list[str]:
        """The members' ids, sorted; empty if there are none."""
        known = self.groups.get(group)
        return known.client_ids if known else []

    def subscription(self, group: str, topic: str) -> SubscriptionData | None:
        known = self.groups.get(group)
        return known.subscriptions.get(topic) if known else None

    def _leave_producer(self, group: str, channel: Hashable) -> None:
        members = self.producers.get(group)
        if members and members.pop(channel, None) is not None and not members:
            del self.producers[group]

    def _leave_consumers(self, names: Iterable[str], channel: Hashable) -> list[GroupChanged]:
        changed = []
        for name in names:
            group = self.groups.get(name)
            if group is None or group.members.pop(channel, None) is None:
                continue
            if not group.members:
                del self.groups[name]
            else:
                changed.append(GroupChanged(name, tuple(group.members)))
        return changed
