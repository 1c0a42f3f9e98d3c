"""A topic's route as the client uses it, and the newer masters that refusals name. Pure.

Publish queues are the writable queues of broker groups with a master (id 0). Subscribe queues are
all readable ones, even without a master, so that consumers keep their queues during a failover.
Origin: MQClientInstance.topicRouteData2TopicPublishInfo and topicRouteData2TopicSubscribeInfo.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from batonmq.protocol.bodies import PERM_READ, PERM_WRITE, TopicRouteData
from batonmq.protocol.codes import MASTER_ADDRESS_HINT, MASTER_EPOCH_HINT, MASTER_ID
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.numbers import natural_number


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """Queues ascend by (topic, broker name, queue id); `brokers` maps name -> id -> address."""

    topic: str
    publish_queues: tuple[MessageQueue, ...]
    subscribe_queues: tuple[MessageQueue, ...]
    brokers: Mapping[str, Mapping[int, str]]
    clusters: Mapping[str, str]

    def master_address(self, broker_name: str) -> str | None:
        return self.brokers.get(broker_name, {}).get(MASTER_ID)

    def masters(self) -> dict[str, str]:
        """Broker name -> address, of the groups that have a master."""
        return {
            name: addresses[MASTER_ID]
            for name, addresses in self.brokers.items()
            if MASTER_ID in addresses
        }


def topic_route(topic: str, data: TopicRouteData) -> TopicRoute:
    brokers = {b.broker_name: dict(b.broker_addrs) for b in data.broker_datas}
    publish: list[MessageQueue] = []
    subscribe: list[MessageQueue] = []
    for queue_data in data.queue_datas:
        name = queue_data.broker_name
        if queue_data.perm & PERM_WRITE and MASTER_ID in brokers.get(name, {}):
            publish += [MessageQueue(topic, name, i) for i in range(queue_data.write_queue_nums)]
        if queue_data.perm & PERM_READ and name in brokers:
            subscribe += [MessageQueue(topic, name, i) for i in range(queue_data.read_queue_nums)]
    return TopicRoute(
        topic=topic,
        publish_queues=tuple(sorted(publish)),
        subscribe_queues=tuple(sorted(subscribe)),
        brokers=brokers,
        clusters={b.broker_name: b.cluster for b in data.broker_datas},
    )


def route_for_new_topic(topic: str, template: TopicRouteData, queue_nums: int) -> TopicRoute:
    """The route that a topic will have once a broker creates it from the template topic (TBW102).

    Each broker creates min(`queue_nums`, the template's queues) queues."""
    route = topic_route(topic, template)
    return replace(
        route,
        publish_queues=tuple(q for q in route.publish_queues if q.queue_id < queue_nums),
        subscribe_queues=tuple(q for q in route.subscribe_queues if q.queue_id < queue_nums),
    )


def moved_masters(known: Mapping[str, str | None], new: TopicRoute) -> dict[str, str]:
    """The masters in `new` (broker name -> address) that differ from `known`."""
    return {name: at for name, at in new.masters().items() if known.get(name) != at}


HINT_MS = 5_000


@dataclass(frozen=True, slots=True)
class _Hint:
    address: str
    master_epoch: int
    until_ms: int


class MasterHints:
    """New masters that refusals name (`batonMasterAddress`, `batonMasterEpoch`), by broker group.
    Times are boot_ms.

    A deposed master names the new one in each refusal. A name server may learn of it later, so for
    `HINT_MS` a hint takes precedence over fetched routes. A wrong hint does no harm: that broker
    refuses, too, and a hint to an unreachable broker is dropped."""

    def __init__(self) -> None:
        self._hints: dict[str, _Hint] = {}

    def note(self, broker_name: str, ext: Mapping[str, str], now_ms: int) -> str | None:
        """Notes and returns the address that a refusal names; None without one, or of an older
        masterEpoch."""
        address = ext.get(MASTER_ADDRESS_HINT, "")
        epoch = natural_number(ext.get(MASTER_EPOCH_HINT, ""))
        if not address or epoch is None:
            return None
        known = self._hints.get(broker_name)
        if known is not None and epoch < known.master_epoch:
            return None
        self._hints[broker_name] = _Hint(address, epoch, now_ms + HINT_MS)
        return address

    def unreachable(self, address: str) -> None:
        """The address does not reply: drops its hints."""
        for name, hint in list(self._hints.items()):
            if hint.address == address:
                # Its epoch stays, so that an older hint cannot take its place.
                self._hints[name] = replace(hint, until_ms=0)

    def applied_to(self, route: TopicRoute, now_ms: int) -> TopicRoute:
        """The route with its masters replaced by the hinted ones."""
        changed = {}
        for name, addresses in route.brokers.items():
            hint = self._hints.get(name)
            if hint is None or now_ms >= hint.until_ms:
                continue
            # Without a master the route lists no queues to send to, and a hint cannot add them.
            if MASTER_ID in addresses and addresses[MASTER_ID] != hint.address:
                # The route still has it as a slave, under its own id.
                kept = {i: at for i, at in addresses.items() if at != hint.address}
                changed[name] = {**kept, MASTER_ID: hint.address}
        return replace(route, brokers={**route.brokers, **changed}) if changed else route
