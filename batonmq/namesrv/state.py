"""Routes: which broker groups serve a topic, and which addresses a group has. Pure.

Origin: Java `RouteInfoManager`. Invariants:
- Id 0 (the master) of a group is removed only together with its address. Another address gets it
  only with a stateVersion (the masterEpoch in controller mode) not below that of any other live
  broker of the group (R32). So neither the late close of a dead master nor a late registration of a
  deposed one removes the new master.
- A broker is alive as long as the connection over which it registered last. The close of an older
  connection, or a deregistration over it, removes nothing.
- Groups without addresses and clusters without groups are removed. A topic without queues has no
  route; lists of topics show it for a few turns more (`forget`).
"""

import enum
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import not_

from msgspec.structs import replace

from batonmq.namesrv.live import BrokerLiveInfo, BrokerLiveTable, Key
from batonmq.namesrv.route_changes import add_replica_routes, relabel_acting_master
from batonmq.namesrv.topics import Parts, TopicQueueTable, listed
from batonmq.protocol.bodies import (
    PERM_READ,
    PERM_WRITE,
    BrokerData,
    DataVersion,
    QueueData,
    TopicConfig,
    TopicRouteData,
)
from batonmq.protocol.codes import MASTER_ID
from batonmq.protocol.register_body import RegisterBrokerBody
from batonmq.protocol.topic_name import SYNC_BROKER_MEMBER_PREFIX
from batonmq.runtime.eviction import Crowd

EARLIER_MOST = 4
"""Earlier connections of a broker that are remembered: a late deregistration may come over one."""
ENTRIES_MAX = 1_000_000
"""Topics of all groups together, a topic of two groups counted twice (R58)."""
GROUP_ENTRIES = 64
"""A group counts as this many topics."""
GROUP_REPLICAS_MAX = 64
FORGOTTEN_AT_ONCE = 2048
"""Topics of removed groups that are forgotten in one turn of the loop, in about 3 ms."""
PERMS_AT_ONCE = 2048
"""Topics whose permissions are changed in one turn, in about 2 ms."""
LOST_AT_ONCE = 64
"""Brokers of one closed connection that are removed in one turn."""
LIVENESS_DEFAULT_MS = 120_000
"""Java's DEFAULT_BROKER_CHANNEL_EXPIRED_TIME."""


@dataclass(frozen=True, slots=True)
class BrokerRegistration:
    """The header of one registration, which came over `connection`. `enable_acting_master` is None
    for an old broker, which does not send that field."""

    cluster_name: str
    broker_name: str
    broker_id: int
    broker_addr: str
    ha_server_addr: str
    connection: Hashable
    heartbeat_timeout_ms: int | None = None
    enable_acting_master: bool | None = None
    zone_name: str | None = None
    is_partial: bool = False
    """It names only topics that changed; the others stay as they are."""
    relays: bool = False
    """The broker passes requests on to its master; a Java broker does not."""
    is_relayed: bool = False
    """A slave registers its master, which this name server's answers do not reach (R32)."""
    peer: str = ""
    """The address of the other end of the connection, host:port."""
    parts: Parts | None = None
    """The same object for each part; None: the registration comes as a whole."""


class RegisterOutcome(enum.Enum):
    """The value is for people: all but TAKEN and IGNORED are SYSTEM_ERROR (1) with this remark."""

    TAKEN = "taken"
    IGNORED = "ignored"
    """A broker with a higher epoch has that id: the reply is success with empty fields."""
    FAILED = "register broker failed"
    """A first registration with exactly one topic."""
    OVERTAKEN = "the broker was removed, or registered again, in between"
    """Between two of its parts the broker was removed, or registered all its topics again."""
    CROWDED = "too many are registered"
    """Its group has too many members, or its host has too many entries (R58)."""


@dataclass(frozen=True, slots=True)
class Registered:
    """`master_addr` and its HA address are set for a slave whose master is live."""

    outcome: RegisterOutcome
    master_addr: str | None = None
    ha_server_addr: str | None = None


@dataclass(frozen=True, slots=True)
class MinIdChange:
    """For NOTIFY_MIN_BROKER_ID_CHANGE (905) to the addresses `to`: either the broker at
    `offline_addr` had the lowest id and is gone, or the one with `ha_addr` has it now."""

    broker_name: str
    min_id: int
    min_addr: str
    to: tuple[str, ...]
    offline_addr: str | None = None
    ha_addr: str | None = None


@dataclass(slots=True)
class _Group:
    cluster_name: str
    addrs: dict[int, str] = field(default_factory=dict)
    enable_acting_master: bool = False
    zone_name: str | None = None
    most_addrs: int = 0
    """The most members at one time, so that the number stays while a member is away for a while."""


class MinIdChanges:
    """The changes since the last call of `taken`, of groups whose slaves may act as master."""

    def __init__(self) -> None:
        self._changes: list[MinIdChange] = []

    def joined(self, group: _Group, lower: BrokerRegistration) -> None:
        """`lower` has the lowest id from now on; `group` does not have it yet."""
        name, least, addr = lower.broker_name, lower.broker_id, lower.broker_addr
        to, ha_addr = tuple(group.addrs.values()), lower.ha_server_addr
        self._add(group, MinIdChange(name, least, addr, to, ha_addr=ha_addr))

    def left(self, group: _Group, broker_name: str, offline_addr: str) -> None:
        """The member with the lowest id has left; `group` does not have it any more."""
        least, to = min(group.addrs), tuple(group.addrs.values())
        change = MinIdChange(broker_name, least, group.addrs[least], to, offline_addr=offline_addr)
        self._add(group, change)

    def _add(self, group: _Group, change: MinIdChange) -> None:
        if group.enable_acting_master:
            self._changes.append(change)

    def taken(self) -> list[MinIdChange]:
        changes, self._changes = self._changes, []
        return changes


class RouteInfoManager:
    """All routes of one name server. Times are milliseconds of the caller's monotonic clock."""

    def __init__(
        self, *, delete_topic_with_broker_registration: bool = False, entries_max: int = ENTRIES_MAX
    ) -> None:
        self.delete_topic_with_broker_registration = delete_topic_with_broker_registration
        self._topics = TopicQueueTable()
        self._groups: dict[str, _Group] = {}
        self._clusters: dict[str, dict[str, None]] = {}
        self._live = BrokerLiveTable()
        self._filter_servers: dict[Key, list[str]] = {}
        self.min_id_changes = MinIdChanges()
        self._entries: Crowd[str] = Crowd(entries_max)  # of groups
        self.crowded_out: list[str] = []
        """Groups that were removed because there were too many. The caller logs and empties it."""

    def check_invariants(self) -> None:
        self._topics.check_invariants()
        assert all(group.addrs for group in self._groups.values()), "a group without addresses"
        assert all(self._clusters.values()), "a cluster without groups"
        named = {name for names in self._clusters.values() for name in names}
        assert named == set(self._groups), "clusters and groups disagree"
        assert self._topics.groups() <= self._groups.keys(), "queues of an unknown group"

    def register(
        self, registration: BrokerRegistration, body: RegisterBrokerBody, now_ms: int
    ) -> Registered:
        wrapper = body.topic_config_serialize_wrapper
        # R58: repeated registrations must not leave topics behind faster than they are forgotten.
        self._topics.forget(len(wrapper.topic_config_table))
        if registration.parts is not None and not self._continues(registration):
            return Registered(RegisterOutcome.OVERTAKEN)
        group = self._groups.get(registration.broker_name)
        topics = wrapper.topic_config_table
        fresh_id = group is None or registration.broker_id not in _without(
            group.addrs, registration.broker_addr, registration.broker_id
        )
        if group is not None and self._outranked(registration, wrapper.data_version):
            return Registered(RegisterOutcome.IGNORED)
        if registration.is_relayed and (
            answer := self._registered_itself(registration, wrapper.data_version, now_ms)
        ):
            return answer
        # As in Java: one topic is a change, and who never registered has none.
        if fresh_id and len(topics) == 1:
            return Registered(RegisterOutcome.FAILED)
        # R58: any host may register members under the name of a group.
        if fresh_id and group is not None and len(group.addrs) >= GROUP_REPLICAS_MAX:
            return Registered(RegisterOutcome.CROWDED)
        # From here on nothing refuses: a group without addresses must not stay behind.
        if group is None:
            group = self._groups[registration.broker_name] = _Group(registration.cluster_name)
        self._join_cluster(registration, group)
        group.enable_acting_master = bool(registration.enable_acting_master)
        group.zone_name = registration.zone_name
        group.addrs = _without(group.addrs, registration.broker_addr, registration.broker_id)
        first = registration.broker_id not in group.addrs
        if group.addrs and registration.broker_id < min(group.addrs):
            self.min_id_changes.joined(group, registration)
        group.addrs[registration.broker_id] = registration.broker_addr
        group.most_addrs = max(group.most_addrs, len(group.addrs))
        if _sets_topics(registration, group):
            self._take_topics(registration, group, topics, wrapper.data_version, first)
        self._remember(registration, wrapper.data_version, body.filter_server_list, now_ms)
        self._limit_entries(registration.broker_name, registration.peer)
        if registration.broker_name not in self._groups:
            return Registered(RegisterOutcome.CROWDED)
        return _registered(registration, group, self._live)

    def _continues(self, registration: BrokerRegistration) -> bool:
        """Whether this is the first part, or the last one is still the newest registration."""
        parts = registration.parts
        assert parts is not None
        was_under_way, parts.under_way = parts.under_way, False
        live = self._live.get((registration.cluster_name, registration.broker_addr))
        return not was_under_way or (live is not None and live.parts is parts)

    def _limit_entries(self, broker_name: str, peer: str) -> None:
        # R58: any host can register groups and topics. If there are too many, the oldest groups of
        # the host with the most entries go.
        entries = GROUP_ENTRIES + self._topics.count(broker_name)
        self._entries.hold(broker_name, peer, entries)
        while self._entries.taken > self._entries.places:
            loser = self._entries.take_one()
            assert loser is not None
            self.crowded_out.append(loser)
            for addr in list(self._groups[loser].addrs.values()):
                self.unregister(self._groups[loser].cluster_name, addr, loser)

    def _outranked(self, registration: BrokerRegistration, version: DataVersion) -> bool:
        """R32: whether a live broker with a higher epoch has that id (as in Java), or, if that is
        id 0, any id of the group."""
        group = self._groups[registration.broker_name]
        for (cluster, addr), live in self._live.of_group(registration.broker_name):
            # The same broker may come back with an older epoch, after its store was emptied.
            if addr == registration.broker_addr or cluster != group.cluster_name:
                continue
            rival = registration.broker_id in (MASTER_ID, live.broker_id)
            if rival and live.data_version.state_version > version.state_version:
                return True
        return False

    def _registered_itself(
        self, registration: BrokerRegistration, version: DataVersion, now_ms: int
    ) -> Registered | None:
        """R32: the answer to a slave that registers its master, if that master registered itself,
        in this epoch or a later one; None if it did not."""
        live = self._live.get((registration.cluster_name, registration.broker_addr))
        if live is None or live.is_relayed:
            return None
        if live.data_version.state_version > version.state_version:
            return Registered(RegisterOutcome.IGNORED)
        if live.broker_id != MASTER_ID or live.data_version.state_version < version.state_version:
            return None
        # Its connection may be open while nothing arrives on it: the slave shows that it is alive.
        live.deadline_ms = max(live.deadline_ms, now_ms + (registration.heartbeat_timeout_ms or 0))
        return Registered(RegisterOutcome.TAKEN)

    def _join_cluster(self, registration: BrokerRegistration, group: _Group) -> None:
        if group.cluster_name != registration.cluster_name:
            self._leave_cluster(group.cluster_name, registration.broker_name)
            group.cluster_name = registration.cluster_name
        names = self._clusters.setdefault(registration.cluster_name, {})
        names[registration.broker_name] = None

    def _take_topics(
        self,
        registration: BrokerRegistration,
        group: _Group,
        topics: Mapping[str, TopicConfig],
        version: DataVersion,
        first: bool,
    ) -> None:
        name = registration.broker_name
        parts = registration.parts
        if parts is not None:
            changed = parts.is_new
        else:
            changed = self.is_changed(registration.cluster_name, registration.broker_addr, version)
        if not registration.is_partial and (parts is None or not parts.topics):
            self._topics.collect(name, parts)
        if not first and not changed:
            topics = self._topics.missing(name, topics)
        if registration.broker_id != MASTER_ID and group.enable_acting_master:
            topics = {
                topic: replace(config, perm=config.perm & ~PERM_WRITE)
                for topic, config in topics.items()
            }
        self._topics.put(name, topics)
        if changed and self._deletes(registration):
            if parts is None:
                self._topics.keep_only(name, dict(topics))
            elif parts.ends:
                self._topics.keep_collected(name, parts)

    def _deletes(self, registration: BrokerRegistration) -> bool:
        """Whether topics that the registration does not name are deleted."""
        return self.delete_topic_with_broker_registration and not registration.is_partial

    def _remember(
        self,
        registration: BrokerRegistration,
        version: DataVersion,
        filter_servers: list[str],
        now_ms: int,
    ) -> None:
        key = (registration.cluster_name, registration.broker_addr)
        timeout_ms = registration.heartbeat_timeout_ms or LIVENESS_DEFAULT_MS
        live = BrokerLiveInfo(
            broker_name=registration.broker_name,
            broker_id=registration.broker_id,
            timeout_ms=timeout_ms,
            deadline_ms=now_ms + timeout_ms,
            data_version=version,
            connection=registration.connection,
            ha_server_addr=registration.ha_server_addr,
            relays=registration.relays,
            is_relayed=registration.is_relayed,
        )
        parts = registration.parts
        if parts is not None:
            parts.under_way = True
            live.parts = None if parts.ends else parts
        known = self._live.get(key)
        if known is not None:
            before = (*known.earlier, known.connection)
            live.earlier = tuple(x for x in before if x != live.connection)[-EARLIER_MOST:]
            # A Java broker that creates a topic sends only that one, and does not say so: it must
            # not end a registration in parts.
            if parts is None and not self._deletes(registration):
                live.parts = known.parts
        self._live.put(key, live)
        if filter_servers:
            self._filter_servers[key] = filter_servers
        else:
            self._filter_servers.pop(key, None)

    def unregister(
        self, cluster_name: str, broker_addr: str, broker_name: str, asked_on: Hashable = None
    ) -> bool:
        """Removes one address of a group, whatever id it had (R32). False if the request came on
        the connection `asked_on`, and the broker has registered over a later one since."""
        live = self._live.get((cluster_name, broker_addr))
        # The next process of that broker has registered already: the late deregistration of the
        # last one must not remove it.
        if live is not None and asked_on in live.earlier:
            return False
        self._live.remove((cluster_name, broker_addr))
        self._filter_servers.pop((cluster_name, broker_addr), None)
        group = self._groups.get(broker_name)
        if group is None or group.cluster_name != cluster_name:
            return True
        lost_lowest = group.addrs[min(group.addrs)] == broker_addr
        lost_master = group.addrs.get(MASTER_ID) == broker_addr
        group.addrs = {id_: addr for id_, addr in group.addrs.items() if addr != broker_addr}
        if group.addrs:
            if lost_lowest:
                self.min_id_changes.left(group, broker_name, broker_addr)
            # A slave acts as master from now on, and takes no new messages.
            if lost_master and group.enable_acting_master:
                self.wipe_write_perm(broker_name)
            return True
        del self._groups[broker_name]
        self._entries.remove(broker_name)
        self._leave_cluster(cluster_name, broker_name)
        self._topics.remove_group(broker_name)
        return True

    def connection_lost(self, connection: Hashable) -> list[str]:
        """Removes brokers whose newest registration used it, at most LOST_AT_ONCE; returns their
        addresses."""
        lost = self._live.of_connection(connection, LOST_AT_ONCE)
        for (cluster, addr), live in lost:
            self.unregister(cluster, addr, live.broker_name)
        return [addr for (_, addr), _ in lost]

    def forget(self) -> bool:
        """Forgets some topics of removed groups; returns whether more are left. Call it once in
        each turn of the loop after a change. Routes do not show these topics any more."""
        return self._topics.forget(FORGOTTEN_AT_ONCE)

    def set_perms(self) -> bool:
        """Changes some permissions; returns whether more are left. Call it like `forget`."""
        return self._topics.set_perms(PERMS_AT_ONCE)

    def scan(self, now_ms: int) -> Iterator[tuple[str, Hashable]]:
        """Removes brokers that were silent too long, one in each step; yields (address,
        connection)."""
        for (cluster, addr), live in self._live.silent(now_ms):
            # It may have sent a heartbeat, or registered again, between two steps.
            if self._live.get((cluster, addr)) is live and live.deadline_ms < now_ms:
                self.unregister(cluster, addr, live.broker_name)
                # A relayed one came over the connection of a slave, which lives.
                yield addr, None if live.is_relayed else live.connection

    def refresh(self, cluster_name: str, broker_addr: str, now_ms: int) -> None:
        """The broker at that address sent BROKER_HEARTBEAT (904) or QUERY_DATA_VERSION (322)."""
        live = self._live.get((cluster_name, broker_addr))
        if live is not None and not live.is_relayed:
            live.deadline_ms = now_ms + live.timeout_ms

    def data_version(self, cluster_name: str, broker_addr: str) -> DataVersion | None:
        """The version of the topics that this address itself registered last, None if unknown."""
        live = self._live.get((cluster_name, broker_addr))
        return live.data_version if live is not None and not live.is_relayed else None

    def is_changed(self, cluster_name: str, broker_addr: str, version: DataVersion) -> bool:
        """Whether `version` differs from that of the last registration."""
        return self.data_version(cluster_name, broker_addr) != version

    def groups_of(self, topic: str) -> tuple[str, ...]:
        """The groups that have the topic, and maybe some that were removed."""
        return self._topics.groups_of.get(topic, ())

    def route(
        self,
        topic: str,
        among: Iterable[str] | None = None,
        *,
        support_acting_master: bool = False,
        replica_routes: bool = False,
    ) -> TopicRouteData | None:
        """The route of a topic, to groups in `among` only if given; None if none has it. A copy:
        the caller may change it."""
        queues = self._topics.queues(topic, self.groups_of(topic) if among is None else among)
        if not queues:
            return None
        route = TopicRouteData(
            broker_datas=[self._broker_data(queue.broker_name) for queue in queues],
            queue_datas=queues,
        )
        # Hardly any broker has filter servers: then a route costs no look at each address.
        for data in route.broker_datas if self._filter_servers else ():
            for addr in data.broker_addrs.values():
                servers = self._filter_servers.get((data.cluster, addr))
                if servers:
                    route.filter_server_table[addr] = list(servers)
        if support_acting_master and not topic.startswith(SYNC_BROKER_MEMBER_PREFIX):
            for data, queue in zip(route.broker_datas, route.queue_datas, strict=True):
                relabel_acting_master(data, queue)
        if replica_routes:
            add_replica_routes(route, lambda name: self._groups[name].most_addrs, self._live)
        return route

    def all_topics(self) -> list[str]:
        return list(self._topics.groups_of)

    def topics_of_cluster(self, cluster_name: str) -> Iterator[list[str]]:
        """The topics in parts. Topics may be added or removed between two steps."""
        names = self._clusters.get(cluster_name, {}).keys()
        for some in listed(self.all_topics()):
            groups = map(self._topics.groups_of.get, some, repeat(()))
            shared = map(names.isdisjoint, groups)
            yield list(compress(some, map(not_, shared)))

    def topics_with_flags(self, mask: int, flags: int) -> Iterator[list[str]]:
        """The topics with topicSysFlag & `mask` == `flags`, in parts as `topics_of_cluster`."""
        for some in listed(self.all_topics()):
            yield self._topics.with_flags(some, mask, flags)

    def register_topic(self, topic: str, queues: Iterable[QueueData]) -> bool:
        """Adds a topic (REGISTER_TOPIC_IN_NAMESRV, 217); does nothing if a group is unknown."""
        # First a look at all: a topic must not be registered in half of its groups.
        wanted = list(queues)
        if any(queue.broker_name not in self._groups for queue in wanted):
            return False
        for queue in wanted:
            config = TopicConfig(
                topic_name=topic,
                perm=queue.perm,
                read_queue_nums=queue.read_queue_nums,
                topic_sys_flag=queue.topic_sys_flag,
                write_queue_nums=queue.write_queue_nums,
            )
            self._topics.put(queue.broker_name, {topic: config})
        for name in {queue.broker_name for queue in wanted}:
            # It may have gone as one too many while the limit was kept for another name.
            if name in self._groups:
                self._limit_entries(name, "")
        return True

    def delete_topic(self, topic: str, cluster_name: str | None = None) -> None:
        """Removes a topic, in one cluster or (None) everywhere."""
        self._topics.remove(
            topic, self._groups if cluster_name is None else self._clusters.get(cluster_name, {})
        )

    def wipe_write_perm(self, broker_name: str) -> int:
        """Takes the write bit from a group's topics, if many in later turns; returns how many."""
        return self._topics.set_perm(broker_name, lambda perm: perm & ~PERM_WRITE)

    def add_write_perm(self, broker_name: str) -> int:
        """As `wipe_write_perm`, but sets the permissions to read and write."""
        return self._topics.set_perm(broker_name, lambda perm: PERM_READ | PERM_WRITE)

    def brokers(self) -> Iterator[tuple[str, BrokerData]]:
        """All groups by name; copies. Groups may be added or removed between two steps."""
        for name in list(self._groups):
            if name in self._groups:
                yield name, self._broker_data(name)

    def clusters(self) -> dict[str, list[str]]:
        return {cluster: list(names) for cluster, names in self._clusters.items()}

    def members(self, broker_name: str) -> dict[int, str]:
        """The addresses of a group by broker id (0: the master); empty if it is unknown."""
        group = self._groups.get(broker_name)
        return dict(sorted(group.addrs.items())) if group is not None else {}

    def _broker_data(self, broker_name: str) -> BrokerData:
        group = self._groups[broker_name]
        return BrokerData(
            broker_addrs=dict(sorted(group.addrs.items())),
            broker_name=broker_name,
            cluster=group.cluster_name,
            enable_acting_master=group.enable_acting_master,
            zone_name=group.zone_name,
        )

    def _leave_cluster(self, cluster_name: str, broker_name: str) -> None:
        names = self._clusters.get(cluster_name)
        if names is not None:
            names.pop(broker_name, None)
            if not names:
                del self._clusters[cluster_name]


def _registered(
    registration: BrokerRegistration, group: _Group, live: BrokerLiveTable
) -> Registered:
    if registration.broker_id != MASTER_ID and MASTER_ID in group.addrs:
        addr = group.addrs[MASTER_ID]
        master = live.get((registration.cluster_name, addr))
        if master is not None:
            return Registered(RegisterOutcome.TAKEN, addr, master.ha_server_addr)
    return Registered(RegisterOutcome.TAKEN)


def _sets_topics(registration: BrokerRegistration, group: _Group) -> bool:
    """Whether its topics become those of the group: of the master, or of the acting master."""
    if registration.broker_id == MASTER_ID:
        return True
    return registration.enable_acting_master is not None and (
        registration.broker_id == min(group.addrs)
    )


def _without(addrs: Mapping[int, str], addr: str, broker_id: int) -> dict[int, str]:
    """`addrs` without `addr` under another id, which was an earlier role of the same broker."""
    return {id_: held for id_, held in addrs.items() if held != addr or id_ == broker_id}
