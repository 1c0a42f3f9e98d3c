"""The requests of the name server: fields and bodies in, routes out.

Remarks are Java's where its clients show them. A route is standard JSON for peers of version 401
(4.9.4) and newer, or if the request asks for it. For others it has fastjson's bare integer keys,
and so has a cluster info unless the request asks for standard JSON.

Origin: Java `DefaultRequestProcessor`, `ClientRequestProcessor`.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import islice
from typing import Final

from batonmq.auth.guard import Guard
from batonmq.auth.policy import UserWrapper
from batonmq.namesrv.config import NamesrvConfig
from batonmq.namesrv.kv_config import KVConfig
from batonmq.namesrv.registered_topics import drop_odd_topics, drop_what_no_route_shows, parts_of
from batonmq.namesrv.state import BrokerRegistration, MinIdChange, RegisterOutcome, RouteInfoManager
from batonmq.namesrv.topics import Parts, listed
from batonmq.protocol.bodies import (
    BrokerMemberGroup,
    ClusterInfo,
    DataVersion,
    GetBrokerMemberGroupResponseBody,
    KVTable,
    TopicList,
    TopicRouteData,
)
from batonmq.protocol.codes import (
    MQ_VERSION_STANDARD_JSON,
    PARTIAL_FIELD,
    RELAYED_FIELD,
    RELAYS_FIELD,
    LanguageCode,
    RequestCode,
    ResponseCode,
)
from batonmq.protocol.errors import BrokerRefusal, RemoteProtocolError
from batonmq.protocol.json_body import Body, encoded_pieces
from batonmq.protocol.register_body import RegisterBrokerBody, crc32_of
from batonmq.protocol.topic_name import (
    TOPIC_LENGTH_MAX,
    TOPIC_QUEUES_MAX,
    first_problem,
    odd_topics,
)
from batonmq.remoting.command import FRAME_SIZE_MAX, RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.runtime.runtime_settings import RuntimeSettings
from batonmq.runtime.turns import in_slices, in_turns, result_of, run_in_turns

log = logging.getLogger(__name__)

ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"
"""The namespace with the queues of globally ordered topics: `broker-a:4;broker-b:4`."""
SCAN_SLICE = 64
TOPIC_PIECES_AT_ONCE: Final = 8  # of a list of topics, in one turn
ROUTED_AT_ONCE: Final = 128  # groups of a topic's route, in one turn: about 4 ms
GROUPS_AT_ONCE: Final = 4096
"""Groups to which one request (REGISTER_TOPIC_IN_NAMESRV, 217) gives a topic."""
_UNIT_FLAGS: Final = {  # the bits of topicSysFlag to look at, and those of them that are set
    RequestCode.GET_UNIT_TOPIC_LIST: (1, 1),
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: (2, 2),
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: (3, 2),
}
_LARGE: Final = frozenset(
    {
        RequestCode.REGISTER_BROKER,  # 16 KiB may inflate to 16 MiB
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        RequestCode.GET_TOPICS_BY_CLUSTER,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        *_UNIT_FLAGS,
    }
)
"""Codes whose answers, or requests, may be large (`Processors.large`)."""
_ADDRESS = re.compile(rb'"(-?\d+)":"')
FAQ_LINE = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."


class NamesrvEndpoint:
    """Handlers over one RouteInfoManager. `clock_ms` is monotonic. `notify` notifies the members of
    a group that its lowest broker id has changed (notifyMinBrokerIdChanged)."""

    def __init__(
        self,
        routes: RouteInfoManager,
        kv: KVConfig,
        config: RuntimeSettings[NamesrvConfig],
        clock_ms: Callable[[], int],
        notify: Callable[[MinIdChange], None],
        guard: Guard | None = None,
    ) -> None:
        self._guard = guard
        self._notify = notify
        self._routes = routes
        self._kv = kv
        self._config = config
        self._clock_ms = clock_ms
        self._forgets = False
        self._changes_perm = asyncio.Lock()

    def install(self, processors: Processors) -> None:
        for code, handler in (
            (RequestCode.PUT_KV_CONFIG, self.put_kv),
            (RequestCode.GET_KV_CONFIG, self.get_kv),
            (RequestCode.DELETE_KV_CONFIG, self.delete_kv),
            (RequestCode.GET_KVLIST_BY_NAMESPACE, self.kv_list),
            (RequestCode.REGISTER_BROKER, self.register_broker),
            (RequestCode.UNREGISTER_BROKER, self.unregister_broker),
            (RequestCode.QUERY_DATA_VERSION, self.query_data_version),
            (RequestCode.BROKER_HEARTBEAT, self.broker_heartbeat),
            (RequestCode.GET_BROKER_MEMBER_GROUP, self.member_group),
            (RequestCode.GET_ROUTEINFO_BY_TOPIC, self.route),
            (RequestCode.GET_BROKER_CLUSTER_INFO, self.cluster_info),
            (RequestCode.WIPE_WRITE_PERM_OF_BROKER, self.change_write_perm),
            (RequestCode.ADD_WRITE_PERM_OF_BROKER, self.change_write_perm),
            (RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, self.all_topics),
            (RequestCode.GET_TOPICS_BY_CLUSTER, self.topics_by_cluster),
            (RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS, self.system_topics),
            (RequestCode.DELETE_TOPIC_IN_NAMESRV, self.delete_topic),
            (RequestCode.REGISTER_TOPIC_IN_NAMESRV, self.register_topic),
            (RequestCode.UPDATE_NAMESRV_CONFIG, self.update_config),
            (RequestCode.GET_NAMESRV_CONFIG, self.get_config),
        ):
            processors.register(code, handler)
        for code in _UNIT_FLAGS:
            processors.register(code, self.unit_topics)
        processors.large.update(_LARGE)
        if self._guard is not None:
            processors.register(RequestCode.BATON_PUT_USERS, self.put_users)
            processors.register(RequestCode.BATON_WHO_AM_I, self._guard.who_am_i)
            self._guard.stand_before(processors)

    def put_users(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        """The users of a broker group, from its master (BATON_PUT_USERS, 60007)."""
        assert self._guard is not None
        name, cluster = request.require("brokerName"), request.require("clusterName")
        if problem := first_problem({"broker name": name, "cluster name": cluster}, {}):
            raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, problem)
        wrapper = UserWrapper.decode(request.body)
        # A master that was replaced while it was stopped must not bring back a removed user.
        epoch = wrapper.data_version.state_version
        known = (self._routes.data_version(cluster, a) for a in self._routes.members(name).values())
        if any(each is not None and each.state_version > epoch for each in known):
            raise BrokerRefusal(
                ResponseCode.SYSTEM_ERROR, "a newer master of the group is registered"
            )
        self._guard.book(name, cluster).replace(wrapper.users)
        return _done(request)

    def connection_lost(self, connection: Connection) -> None:
        """Removes its brokers from the routes."""

        def some() -> bool:
            lost = self._routes.connection_lost(connection)
            for addr in lost:
                log.info("broker_unregistered broker_addr=%s reason=connection_lost", addr)
            self._after_change()
            return bool(lost)

        run_in_turns(some)

    def _after_change(self) -> None:
        self._notify_min_ids()
        if not self._forgets:
            self._forgets = True
            run_in_turns(self._forget)

    def _forget(self) -> bool:
        self._forgets = False  # if this raises, the next change begins it again
        more_perms = self._routes.set_perms()
        self._forgets = self._routes.forget() or more_perms
        return self._forgets

    def _notify_min_ids(self) -> None:
        changes = self._routes.min_id_changes.taken()
        if self._config.current.notify_min_broker_id_changed:
            for change in changes:
                self._notify(change)

    def scan(self) -> None:
        """Removes brokers that were silent for too long, SCAN_SLICE in a turn of the loop."""
        silent = self._routes.scan(self._clock_ms())

        def some() -> bool:
            removed = list(islice(silent, SCAN_SLICE))
            for addr, connection in removed:
                log.warning("broker_unregistered broker_addr=%s reason=silent", addr)
                if isinstance(connection, Connection):
                    connection.close("its broker was silent for too long")
            self._after_change()
            return len(removed) == SCAN_SLICE

        run_in_turns(some)

    def register_broker(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand | Awaitable[RemotingCommand]:
        # 0: an old broker sends none.
        crc = request.get_int("bodyCrc32", 0)
        if crc and crc != crc32_of(request.body):
            return _refused(request, ResponseCode.SYSTEM_ERROR, "crc32 not match")
        body = RegisterBrokerBody.decode_at_once(request.body)
        if body is None:
            return self._register_in_steps(request, connection)
        return self._register(request, connection, body)

    async def _register_in_steps(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        try:
            body = await result_of(RegisterBrokerBody.decode_steps(request.body, request.version))
        except RemoteProtocolError as error:
            return _refused(request, ResponseCode.SYSTEM_ERROR, str(error))
        parts = Parts(is_new=self._is_new(request, body))
        for part in parts_of(body, parts):
            if connection.closed:  # its close was handled: what is registered now would stay
                return _refused(request, ResponseCode.SYSTEM_ERROR, "the connection was closed")
            reply = self._register(request, connection, part, parts)
            if reply.code != ResponseCode.SUCCESS or not parts.under_way:
                break
            await asyncio.sleep(0)
        return reply

    def _is_new(self, request: RemotingCommand, body: RegisterBrokerBody) -> bool:
        """As `Parts.is_new`."""
        cluster, addr = request.require("clusterName"), request.require("brokerAddr")
        version = body.topic_config_serialize_wrapper.data_version
        members = self._routes.members(request.require("brokerName"))
        return (
            self._routes.is_changed(cluster, addr, version)
            or members.get(request.require_int("brokerId")) != addr
        )

    def _register(
        self,
        request: RemotingCommand,
        connection: Connection,
        body: RegisterBrokerBody,
        parts: Parts | None = None,
    ) -> RemotingCommand:
        registration = _header_of(request, connection, parts)
        drop_odd_topics(registration.broker_name, body)
        drop_what_no_route_shows(body)
        known = self._routes.members(registration.broker_name).get(registration.broker_id)
        registered = self._routes.register(registration, body, self._clock_ms())
        self._after_change()
        lost, self._routes.crowded_out = self._routes.crowded_out, []
        if lost:
            why = "above routeEntriesMax"
            log.warning("broker_groups_lost count=%d first=%s reason=%r", len(lost), lost[0], why)
        if registered.outcome not in (RegisterOutcome.TAKEN, RegisterOutcome.IGNORED):
            return _refused(request, ResponseCode.SYSTEM_ERROR, registered.outcome.value)
        # R58: the connection of a registered broker makes no place for strangers.
        connection.keep()
        if registered.outcome is RegisterOutcome.IGNORED or known != registration.broker_addr:
            log.info(
                "broker_registered broker_name=%s broker_id=%d broker_addr=%s outcome=%s",
                registration.broker_name,
                registration.broker_id,
                registration.broker_addr,
                registered.outcome.value,
            )
        ext = {"haServerAddr": registered.ha_server_addr, "masterAddr": registered.master_addr}
        reply = RemotingCommand.response_to(request, ext=ext)
        order = self._kv.namespace(ORDER_TOPIC_CONFIG)
        if order and self._config.current.return_order_topic_config_to_broker:
            reply.body = KVTable(table=order).encode()
        return reply

    def unregister_broker(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        addr = request.require("brokerAddr")
        name = request.require("brokerName")
        removed = self._routes.unregister(request.require("clusterName"), addr, name, connection)
        self._after_change()
        what = "broker_unregistered" if removed else "late_goodbye_ignored"
        log.info("%s broker_addr=%s broker_name=%s reason=asked", what, addr, name)
        return _done(request)

    def query_data_version(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        cluster, addr = request.require("clusterName"), request.require("brokerAddr")
        known = self._routes.data_version(cluster, addr)
        changed = self._routes.is_changed(cluster, addr, DataVersion.decode_request(request.body))
        # A broker whose topics did not change sends only this question, and no registration.
        self._routes.refresh(cluster, addr, self._clock_ms())
        reply = RemotingCommand.response_to(request, ext={"changed": changed})
        if known is not None:
            reply.body = known.encode()
        return reply

    def broker_heartbeat(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        self._routes.refresh(
            request.require("clusterName"), request.require("brokerAddr"), self._clock_ms()
        )
        return _done(request)

    def member_group(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        name = request.require("brokerName")
        group = BrokerMemberGroup(
            broker_addrs=self._routes.members(name),
            broker_name=name,
            cluster=request.require("clusterName"),
        )
        return _done(request, GetBrokerMemberGroupResponseBody(broker_member_group=group).encode())

    async def change_write_perm(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        """Answers with the number of topics once routes show the new permissions."""
        change, field = self._routes.add_write_perm, "addTopicCount"
        if request.code == RequestCode.WIPE_WRITE_PERM_OF_BROKER:
            change, field = self._routes.wipe_write_perm, "wipeTopicCount"
        name = request.require("brokerName")
        async with self._changes_perm:  # R58: a waiting request has no copy of the topics yet
            count = change(name)
            await in_slices(self._routes.set_perms)
        return RemotingCommand.response_to(request, ext={field: count})

    def route(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand | Awaitable[RemotingCommand]:
        topic = request.require("topic")
        groups = self._routes.groups_of(topic)
        if len(groups) > ROUTED_AT_ONCE:
            return self._wide_route(request, topic, groups)
        route = self._route(request, topic, groups)
        if route is None:
            return _no_route(request, topic)
        return _done(request, _for_peer(request, route.encode()))

    async def _wide_route(
        self, request: RemotingCommand, topic: str, groups: tuple[str, ...]
    ) -> RemotingCommand:
        """In many turns: a stranger can register thousands of groups with one topic (R58)."""
        whole = TopicRouteData()
        parts = (groups[at : at + ROUTED_AT_ONCE] for at in range(0, len(groups), ROUTED_AT_ONCE))
        async for some in in_turns(parts, 1):
            if (route := self._route(request, topic, some)) is None:
                continue
            whole.broker_datas += route.broker_datas
            whole.queue_datas += route.queue_datas
            whole.filter_server_table |= route.filter_server_table
            whole.order_topic_conf = route.order_topic_conf
        if not whole.broker_datas:
            return _no_route(request, topic)
        return await _in_pieces(request, whole, 1, partial(_for_peer, request))

    def _route(
        self, request: RemotingCommand, topic: str, groups: tuple[str, ...]
    ) -> TopicRouteData | None:
        config = self._config.current
        route = self._routes.route(
            topic,
            groups,
            support_acting_master=config.support_acting_master,
            # Our own clients find a new master without them.
            replica_routes=config.replica_routes and request.language != LanguageCode.PYTHON,
        )
        if route is not None and config.order_message_enable:
            route.order_topic_conf = self._kv.get(ORDER_TOPIC_CONFIG, topic)
        return route

    async def cluster_info(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        info = ClusterInfo()
        async for name, broker in in_turns(self._routes.brokers()):
            info.broker_addr_table[name] = broker
        info.cluster_addr_table = self._routes.clusters()
        is_standard = request.get_bool("acceptStandardJsonOnly")
        return await _in_pieces(request, info, 1, bytes if is_standard else _with_bare_ids)

    async def all_topics(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        _require_enabled(self._config.current.enable_all_topic_list)
        return await _topic_list(request, listed(self._routes.all_topics()))

    async def topics_by_cluster(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        _require_enabled(self._config.current.enable_topic_list)
        cluster = request.require("cluster")
        return await _topic_list(request, self._routes.topics_of_cluster(cluster))

    async def unit_topics(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        _require_enabled(self._config.current.enable_topic_list)
        flags = _UNIT_FLAGS[RequestCode(request.code)]
        return await _topic_list(request, self._routes.topics_with_flags(*flags))

    async def system_topics(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        """The topics that every cluster and every group has by its name, and a broker to ask for
        more (GET_SYSTEM_TOPIC_LIST_FROM_BROKER, 305)."""
        found = TopicList(topic_list=list(self._routes.clusters()))
        async for name, broker in in_turns(self._routes.brokers()):
            found.topic_list.append(name)
            if not found.broker_addr and broker.broker_addrs:
                found.broker_addr = next(iter(broker.broker_addrs.values()))
        return _done(request, found.encode())

    def delete_topic(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        cluster = request.ext.get("clusterName", "").strip()
        self._routes.delete_topic(request.require("topic"), cluster or None)
        return _done(request)

    def register_topic(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        topic = request.require("topic")
        if odd_topics([topic]):
            why = f"topic {topic[:TOPIC_LENGTH_MAX]!r}: no topic has such a name"
            return _refused(request, ResponseCode.SYSTEM_ERROR, why)
        route = TopicRouteData.decode_request(request.body) if request.body else TopicRouteData()
        queues = route.queue_datas
        if len(queues) > GROUPS_AT_ONCE:
            why = f"{len(queues)} broker groups, at most {GROUPS_AT_ONCE} are allowed"
            return _refused(request, ResponseCode.SYSTEM_ERROR, why)
        if any(max(q.read_queue_nums, q.write_queue_nums) > TOPIC_QUEUES_MAX for q in queues):
            why = f"topic {topic}: a broker group has at most {TOPIC_QUEUES_MAX} queues of a topic"
            return _refused(request, ResponseCode.SYSTEM_ERROR, why)
        if not queues:
            return _done(request)
        if not self._routes.register_topic(topic, queues):
            log.warning("topic_not_registered topic=%s reason=it names an unknown broker", topic)
        self._after_change()
        return _done(request)

    async def put_kv(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        await self._kv.put(
            request.require("namespace"), request.require("key"), request.require("value")
        )
        return _done(request)

    def get_kv(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        namespace, key = request.require("namespace"), request.require("key")
        value = self._kv.get(namespace, key)
        if value is None:
            remark = f"No config item, Namespace: {namespace} Key: {key}"
            return _refused(request, ResponseCode.QUERY_NOT_FOUND, remark)
        return RemotingCommand.response_to(request, ext={"value": value})

    async def delete_kv(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        await self._kv.delete(request.require("namespace"), request.require("key"))
        return _done(request)

    def kv_list(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        namespace = request.require("namespace")
        table = self._kv.namespace(namespace)
        if table is None:
            remark = f"No config item, Namespace: {namespace}"
            return _refused(request, ResponseCode.QUERY_NOT_FOUND, remark)
        return _done(request, KVTable(table=table).encode())

    async def update_config(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        await self._config.update(request.body)
        current = self._config.current
        self._routes.delete_topic_with_broker_registration = (
            current.delete_topic_with_broker_registration
        )
        return _done(request)

    def get_config(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        return _done(request, self._config.as_properties().encode())


def _header_of(
    request: RemotingCommand, connection: Connection, parts: Parts | None
) -> BrokerRegistration:
    """Raises BrokerRefusal for a name or address that is not allowed (R46)."""
    acting = request.ext.get("enableActingMaster")
    registration = BrokerRegistration(
        cluster_name=request.require("clusterName"),
        broker_name=request.require("brokerName"),
        broker_id=request.require_int("brokerId"),
        broker_addr=request.require("brokerAddr"),
        ha_server_addr=request.require("haServerAddr"),
        connection=connection,
        heartbeat_timeout_ms=request.get_int("heartbeatTimeoutMillis", 0) or None,
        enable_acting_master=None if acting is None else acting.lower() == "true",
        zone_name=request.ext.get("__ZONE_NAME"),
        is_partial=request.get_bool(PARTIAL_FIELD),
        relays=request.get_bool(RELAYS_FIELD),
        is_relayed=request.get_bool(RELAYED_FIELD),
        peer=connection.peer,
        parts=parts,
    )
    names = {"broker name": registration.broker_name, "cluster name": registration.cluster_name}
    texts = {"HA address": registration.ha_server_addr, "zone name": registration.zone_name}
    given = {what: text for what, text in texts.items() if text}
    if problem := first_problem(names, {"broker address": registration.broker_addr, **given}):
        raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, problem)
    return registration


def _require_enabled(enabled: bool) -> None:
    if not enabled:
        raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, "disable")


async def _topic_list(request: RemotingCommand, lots: Iterable[list[str]]) -> RemotingCommand:
    """A TopicList of all `lots`, in many turns: there may be a million topics (R58)."""
    found = TopicList()
    async for some in in_turns(lots, 1):
        found.topic_list += some
    return await _in_pieces(request, found, TOPIC_PIECES_AT_ONCE)


async def _in_pieces(
    request: RemotingCommand, body: Body, at_once: int, form: Callable[[bytes], bytes] = bytes
) -> RemotingCommand:
    """`body`, which must not change meanwhile, `at_once` pieces a turn, each through `form`."""
    pieces, left = list[bytes](), FRAME_SIZE_MAX
    async for piece in in_turns(encoded_pieces(body), at_once):
        pieces.append(form(piece))
        left -= len(pieces[-1])
        if left < 0:
            break  # R58: too large for a frame: the caller gets an error
    return _done(request, b"".join(pieces))


def _done(request: RemotingCommand, body: bytes = b"") -> RemotingCommand:
    """Success without header fields. Java then leaves extFields out of the reply."""
    reply = RemotingCommand.response_to(request, body=body)
    reply.has_ext = False
    return reply


_refused = RemotingCommand.refusal_of


def _no_route(request: RemotingCommand, topic: str) -> RemotingCommand:
    remark = f"No topic route info in name server for the topic: {topic}{FAQ_LINE}"
    return _refused(request, ResponseCode.TOPIC_NOT_EXIST, remark)


def _for_peer(request: RemotingCommand, text: bytes) -> bytes:
    if request.version >= MQ_VERSION_STANDARD_JSON or request.get_bool("acceptStandardJsonOnly"):
        return text
    return _with_bare_ids(text)


def _with_bare_ids(text: bytes) -> bytes:
    """`text` with fastjson's form of address maps: `{0:"ip:port"}`."""
    # Only these members have a number as their name and a string as their value, and quotes within
    # strings are escaped.
    return _ADDRESS.sub(rb'\1:"', text)
