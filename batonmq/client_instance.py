"""What producers and consumers share: connections, routes, heartbeats, and the watch on silence.

Routes are polled, and fetched at once when a caller met a lost connection or a "not the master"
reply. A request that a master does not answer is watched: after `suspicion_ms` the name servers
are asked, and if they name another master, the old connection is closed, which fails its requests
over to the new one at once. So a hung master costs its election, not a request timeout.
Origin: MQClientInstance.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from batonmq.client_id import local_ip, new_client_id
from batonmq.clock import boot_ms
from batonmq.errors import ClientClosedError, NoMasterError, NoNameServerError, NoRouteError
from batonmq.master_hints import MasterHints
from batonmq.name_servers import NameServers, name_servers_from
from batonmq.retry import pause_ms
from batonmq.route import TopicRoute, moved_masters, route_for_new_topic, topic_route
from batonmq.silence_watch import Silence, SilenceWatch
from protocol.bodies import ConsumerData, HeartbeatData, ProducerData
from protocol.codes import RequestCode, ResponseCode
from protocol.errors import BatonError, ConnectError, RequestTimeoutError
from remoting.client import RemotingClient
from remoting.command import RemotingCommand
from remoting.connection import Connection
from remoting.processors import Processors

log = logging.getLogger(__name__)

# Replies that say: this broker cannot serve it now, its group's master (perhaps another) will.
_ASK_NEXT_MASTER = frozenset(
    {ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.GO_AWAY}
)
_RECHECK_MS = 100


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Times in ms. The defaults are Java's, except `suspicion_ms`, which Java does not have.

    `route_poll_ms`: how often routes are fetched without a reason. `suspicion_ms`: how long a
    master may stay silent before the name servers are asked whether there is a new one.
    `instance_name`: gives the client a stable id (broadcasting consumers' offset files);
    without it each client object is unique.
    """

    route_poll_ms: int = 30_000
    heartbeat_ms: int = 30_000
    request_timeout_ms: int = 3_000
    connect_timeout_ms: int = 3_000
    suspicion_ms: int = 300
    instance_name: str | None = None


class ClientMember:
    """What a client instance asks of its producers and consumers, and tells them."""

    def producer_group(self) -> str | None:
        return None

    def consumer_data(self) -> ConsumerData | None:
        return None

    def topics(self) -> Collection[str]:
        """Topics whose routes must be kept fresh."""
        return ()

    def route_changed(self, route: TopicRoute, moved: frozenset[str]) -> None:
        """A route differs from the last one; `moved`: groups whose master has a new address."""

    def members_changed(self, group: str) -> None:
        """A broker says that a consumer group gained or lost a member."""


class ClientInstance:
    """Start it inside a running loop; several producers and consumers may share one."""

    def __init__(
        self,
        name_servers: str | Sequence[str] | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        """`name_servers`: `host:port;host:port` or a list; default: NAMESRV_ADDR."""
        self.options = options or ClientOptions()
        self.ip = local_ip()
        self.client_id = new_client_id(self.ip, self.options.instance_name)
        self._addresses = name_servers_from(name_servers)
        self._remoting: RemotingClient | None = None
        self._name_servers: NameServers | None = None
        self._members: list[ClientMember] = []
        self._routes: dict[str, TopicRoute] = {}
        self._hints = MasterHints()
        self._flights: dict[str, asyncio.Task[TopicRoute]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watch = SilenceWatch()
        self._watch_timer: asyncio.TimerHandle | None = None
        self._watch_timer_ms = 0
        self._suspected: set[str] = set()

    # -- life ---------------------------------------------------------------------------------

    @property
    def name_server_addresses(self) -> tuple[str, ...]:
        return self._addresses

    @property
    def running(self) -> bool:
        return self._remoting is not None

    @property
    def remoting(self) -> RemotingClient:
        if self._remoting is None:
            raise ClientClosedError("the client")
        return self._remoting

    @property
    def name_servers(self) -> NameServers:
        if self._name_servers is None:
            raise ClientClosedError("the client")
        return self._name_servers

    async def start(self) -> None:
        if self._remoting is not None:
            return
        processors = Processors()
        processors.register(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, self._on_members_changed)
        self._remoting = RemotingClient(
            processors, connect_timeout_ms=self.options.connect_timeout_ms
        )
        self._name_servers = NameServers(self._addresses, self._remoting)
        self.spawn(self._poll_routes())
        self.spawn(self._beat())

    async def close(self) -> None:
        """Ends the tasks and closes the connections. Members must have said good-bye before."""
        remoting, self._remoting, self._name_servers = self._remoting, None, None
        if self._watch_timer is not None:
            self._watch_timer.cancel()
            self._watch_timer = None
        tasks = [*self._tasks, *self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if remoting is not None:
            await remoting.close()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs a background task that ends with this client; a failure is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("client_task_failed client_id=%s", self.client_id, exc_info=error)

    # -- members and heartbeats ---------------------------------------------------------------

    def add_member(self, member: ClientMember) -> None:
        self._members.append(member)

    async def remove_member(self, member: ClientMember) -> None:
        """Forgets it and tells the brokers, so that the others of its group need not wait."""
        if member not in self._members:
            return
        self._members.remove(member)
        consumer = member.consumer_data()
        group = consumer.group_name if consumer is not None else None
        await self._unregister(member.producer_group(), group)

    async def send_heartbeats(self, addresses: Iterable[str] | None = None) -> None:
        """To all known brokers (slaves only if there is a consumer), or to those given.

        A slave that knows the consumers has the groups complete when it becomes master.
        """
        data = self._heartbeat_data()
        if not data.producer_data_set and not data.consumer_data_set:
            return
        targets = set(addresses if addresses is not None else self._broker_addresses(data))
        body = data.encode()
        await asyncio.gather(*(self._heartbeat(address, body) for address in sorted(targets)))

    async def _heartbeat(self, address: str, body: bytes) -> None:
        request = RemotingCommand.request(RequestCode.HEART_BEAT, {}, body)
        try:
            reply = await self.remoting.invoke(address, request, self.options.request_timeout_ms)
        except (ConnectError, RequestTimeoutError) as error:
            log.info("heartbeat_failed address=%s why=%s", address, error)
            return
        if reply.code != ResponseCode.SUCCESS:
            log.warning(
                "heartbeat_refused address=%s code=%d remark=%s", address, reply.code, reply.remark
            )

    def _heartbeat_data(self) -> HeartbeatData:
        producers = {g for m in self._members if (g := m.producer_group()) is not None}
        consumers = [d for m in self._members if (d := m.consumer_data()) is not None]
        return HeartbeatData(
            client_id=self.client_id,
            producer_data_set=[ProducerData(group_name=g) for g in sorted(producers)],
            consumer_data_set=consumers,
        )

    def _broker_addresses(self, data: HeartbeatData) -> set[str]:
        found: set[str] = set()
        for route in self._routes.values():
            if data.consumer_data_set:
                for addresses in route.brokers.values():
                    found.update(addresses.values())
            else:
                found.update(route.masters().values())
        return found

    async def _unregister(self, producer_group: str | None, consumer_group: str | None) -> None:
        ext = {"clientID": self.client_id}
        if producer_group is not None:
            ext["producerGroup"] = producer_group
        if consumer_group is not None:
            ext["consumerGroup"] = consumer_group
        if len(ext) == 1:
            return
        masters = {a for route in self._routes.values() for a in route.masters().values()}

        async def tell(address: str) -> None:
            request = RemotingCommand.request(RequestCode.UNREGISTER_CLIENT, ext)
            with contextlib.suppress(ConnectError, RequestTimeoutError):
                await self.remoting.invoke(address, request, 1000)

        await asyncio.gather(*(tell(address) for address in sorted(masters)))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.options.heartbeat_ms / 1000)
            await self.send_heartbeats()

    def _on_members_changed(self, request: RemotingCommand, connection: Connection) -> None:
        group = request.ext.get("consumerGroup", "")
        for member in self._members:
            member.members_changed(group)

    # -- routes -------------------------------------------------------------------------------

    def cached_route(self, topic: str) -> TopicRoute | None:
        return self._routes.get(topic)

    async def route(self, topic: str, *, deadline_ms: int | None = None) -> TopicRoute:
        """The known route, fetched if there is none. Raises NoRouteError, NoNameServerError."""
        route = self._routes.get(topic)
        return route or await self.refresh_route(topic, deadline_ms=deadline_ms)

    async def refresh_route(
        self, topic: str, *, deadline_ms: int | None = None, suspects: Collection[str] = ()
    ) -> TopicRoute:
        """Fetches the route from the name servers; concurrent callers share one fetch.

        `suspects`: addresses that just failed as masters; a name server that names others wins.
        """
        flight = self._flights.get(topic)
        if flight is None:
            flight = asyncio.get_running_loop().create_task(self._fetch(topic, frozenset(suspects)))
            self._flights[topic] = flight
            flight.add_done_callback(lambda done: self._flight_done(topic, done))
        now_ms = boot_ms()
        left_ms = self.options.request_timeout_ms if deadline_ms is None else deadline_ms - now_ms
        try:
            async with asyncio.timeout(max(left_ms, 1) / 1000):
                return await asyncio.shield(flight)
        except TimeoutError:
            asked = [(address, "no answer in time") for address in self._addresses]
            raise NoNameServerError(asked) from None

    async def route_or_template(
        self, topic: str, template_topic: str, queue_nums: int, *, deadline_ms: int
    ) -> TopicRoute:
        """The route; for an unknown topic the one that the first send will create."""
        try:
            return await self.route(topic, deadline_ms=deadline_ms)
        except NoRouteError as unknown:
            try:
                data = await self.name_servers.route(template_topic, deadline_ms=deadline_ms)
            except NoRouteError:
                raise unknown from None
            return route_for_new_topic(topic, data, queue_nums)

    def hinted_master(self, broker_name: str, reply: RemotingCommand) -> str | None:
        """The master that a refusal names, which every known route now names too; else None."""
        now_ms = boot_ms()
        address = self._hints.heard(broker_name, reply.ext, now_ms)
        if address is not None:
            for route in list(self._routes.values()):
                self._adopt(self._hints.over(route, now_ms))
        return address

    def master_unreachable(self, address: str) -> None:
        """Nobody is reached there, or no master by its own word: hints to it count no more."""
        self._hints.unreachable(address)

    def forget_route(self, topic: str) -> None:
        self._routes.pop(topic, None)

    async def _fetch(self, topic: str, suspects: frozenset[str]) -> TopicRoute:
        deadline_ms = boot_ms() + self.options.request_timeout_ms
        data = await self.name_servers.route(topic, deadline_ms=deadline_ms, suspects=suspects)
        route = self._hints.over(topic_route(topic, data), boot_ms())
        self._adopt(route)
        return route

    def _flight_done(self, topic: str, flight: asyncio.Task[TopicRoute]) -> None:
        self._flights.pop(topic, None)
        if not flight.cancelled():
            flight.exception()  # each waiter has got it; without waiters nobody needs it

    def _adopt(self, route: TopicRoute) -> None:
        old = self._routes.get(route.topic)
        if old == route:
            return
        self._routes[route.topic] = route
        moved = moved_masters(old, route)
        if moved:
            log.info(
                "masters_moved topic=%s masters=%s",
                route.topic,
                {name: route.master_address(name) for name in sorted(moved)},
            )
            masters = route.masters()
            if old is not None:
                self.spawn(self.send_heartbeats([masters[name] for name in moved]))
                self._retire(old.masters()[n] for n in moved if n in old.masters())
        for member in list(self._members):
            member.route_changed(route, moved)

    def _retire(self, addresses: Iterable[str]) -> None:
        """Closes connections to former masters, once their last answers had time to arrive.

        A deposed master answers what is pending at once; what is unanswered then (a held pull at
        a hung process) never will be.
        """
        loop = asyncio.get_running_loop()
        for address in set(addresses):
            loop.call_later(self.options.suspicion_ms / 1000, self._close_if_no_master, address)

    def _close_if_no_master(self, address: str) -> None:
        if self._remoting is None:
            return
        if not any(address in route.masters().values() for route in self._routes.values()):
            self._remoting.close_connection(address)

    async def _poll_routes(self) -> None:
        while True:
            await asyncio.sleep(self.options.route_poll_ms / 1000)
            for topic in self._topics():
                try:
                    await self.refresh_route(topic)
                except BatonError as error:
                    log.info("route_poll_failed topic=%s why=%s", topic, error)

    def _topics(self) -> list[str]:
        topics = {topic for member in self._members for topic in member.topics()}
        return sorted(topics | self._routes.keys())

    # -- requests -----------------------------------------------------------------------------

    async def invoke_master(
        self,
        topic: str,
        broker_name: str,
        address: str,
        request: RemotingCommand,
        timeout_ms: int,
        *,
        held_check_ms: int | None = None,
    ) -> RemotingCommand:
        """One request to a master, under watch. Raises ConnectError, RequestTimeoutError.

        `held_check_ms`: set for a request that the broker may hold; how often to make sure that
        it is held by a master.
        """
        patience_ms = self.options.suspicion_ms if held_check_ms is None else held_check_ms
        recheck_ms = _RECHECK_MS if held_check_ms is None else held_check_ms
        now_ms = boot_ms()
        silence = Silence(topic, broker_name, address)
        serial = self._watch.begin(silence, now_ms, patience_ms, recheck_ms)
        if self._watch_timer is None or now_ms + patience_ms < self._watch_timer_ms:
            self._arm_watch(now_ms)
        try:
            return await self.remoting.invoke(address, request, timeout_ms)
        finally:
            self._watch.end(serial)

    async def invoke_at_master(
        self,
        topic: str,
        broker_name: str,
        make_request: Callable[[], RemotingCommand],
        *,
        deadline_ms: int,
    ) -> RemotingCommand:
        """The master's reply, bridging a failover: retries until the deadline.

        For requests that may be asked twice. Raises NoMasterError with the last reason.
        """
        failures = 0
        why = "no master in the route"
        address: str | None = None
        while True:
            try:
                if failures:
                    suspects = () if address is None else (address,)
                    route = await self.refresh_route(
                        topic, deadline_ms=deadline_ms, suspects=suspects
                    )
                else:
                    route = await self.route(topic, deadline_ms=deadline_ms)
                address = route.master_address(broker_name)
                if address is not None:
                    left_ms = max(deadline_ms - boot_ms(), 1)
                    reply = await self.invoke_master(
                        topic, broker_name, address, make_request(), left_ms
                    )
                    if reply.code not in _ASK_NEXT_MASTER:
                        return reply
                    why = f"{address} answers {reply.code} {reply.remark or ''}"
            except (ConnectError, RequestTimeoutError, NoNameServerError, NoRouteError) as error:
                why = str(error)
            failures += 1
            pause = pause_ms(failures)
            if boot_ms() + pause >= deadline_ms:
                raise NoMasterError(broker_name, why)
            await asyncio.sleep(pause / 1000)

    def _arm_watch(self, now_ms: int) -> None:
        if self._watch_timer is not None:
            self._watch_timer.cancel()
            self._watch_timer = None
        next_ms = self._watch.next_ms()
        if next_ms is not None and self._remoting is not None:
            loop = asyncio.get_running_loop()
            delay_ms = max(next_ms - now_ms, 1)
            self._watch_timer_ms = next_ms
            self._watch_timer = loop.call_later(delay_ms / 1000, self._look_into_silence)

    def _look_into_silence(self) -> None:
        now_ms = boot_ms()
        for silence in self._watch.due(now_ms):
            if silence.address not in self._suspected:
                self._suspected.add(silence.address)
                self.spawn(self._look_for_new_master(silence))
        self._watch_timer = None
        self._arm_watch(now_ms)

    async def _look_for_new_master(self, silence: Silence) -> None:
        try:
            route = await self.refresh_route(silence.topic, suspects=(silence.address,))
        except BatonError as error:
            log.info("suspicion_unresolved address=%s why=%s", silence.address, error)
            return
        finally:
            self._suspected.discard(silence.address)
        now_master = route.master_address(silence.broker_name)
        if now_master not in (None, silence.address):
            log.info(
                "master_silent broker_name=%s address=%s new_master=%s",
                silence.broker_name,
                silence.address,
                now_master,
            )
            self.remoting.close_connection(silence.address)
