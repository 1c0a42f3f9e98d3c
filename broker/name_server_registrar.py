"""Registration with every name server: at once when something changes, and every 30 s.

One task per name server, so that a dead one delays no other. The body is RegisterBrokerBody; its
DataVersion.stateVersion is the masterEpoch. A name server that has the whole table gets only the
changed topics, at most every 20 ms, since thousands of new topics must not cost thousands of whole
tables. It gets the whole table over a new connection, after a failure and every 30 s.

A name server that does not answer the master, but a slave, still gets the master (R32): the master
asks the slave to register it (BATON_REGISTER_MASTER). The slave does so by what it knows itself,
and only while it follows that master. Origin: BrokerOuterAPI.registerBrokerAll,
BrokerController.registerIncrementBrokerData in Java.
"""

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from batonmq.auth.policy import UserWrapper
from batonmq.broker.request_fields import system_error
from batonmq.protocol.bodies import DataVersion
from batonmq.protocol.codes import (
    MASTER_ID,
    PARTIAL_FIELD,
    RELAYED_FIELD,
    RELAYS_FIELD,
    RequestCode,
    ResponseCode,
)
from batonmq.protocol.errors import BatonError, RequestTimeoutError
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.tasks import Tasks

log = logging.getLogger(__name__)

RETRY_MS = 200
MASTER_WANTED_MS = 1000
RPC_TIMEOUT_MS = 3000
CHANGES_APART_S = 0.02
KNOWN_S = 0.05
"""The longest time that a send waits for name servers to know its new topic."""
UNANSWERED_S = 0.5
"""How long a master waits for a name server before it asks a slave."""
ASKS_APART_S = 1.0
ASK_TIMEOUT_MS = 1000
RELAYED_SILENCE_MS = 10_000
"""How long a name server keeps the master; the slave registers it again every 4 s."""


@dataclass(frozen=True, slots=True)
class RouteRegistration:
    """The content of one registration. `broker_id` is the role id: 0 for a master."""

    cluster_name: str
    broker_name: str
    broker_id: int
    address: str
    ha_address: str
    body: bytes
    is_partial: bool = False
    relays: bool = False
    """The broker passes requests on to its master, so producers may be routed to it."""
    is_relayed: bool = False
    """A slave registers its master."""
    silence_ms: int | None = None
    """With enableSlaveActingMaster: the broker counts as dead after this time without a heartbeat
    (BROKER_HEARTBEAT, 904)."""

    def request(self) -> RemotingCommand:
        acting = {"enableActingMaster": "true", "heartbeatTimeoutMillis": str(self.silence_ms)}
        if self.silence_ms is None:
            acting = {"heartbeatTimeoutMillis": str(RELAYED_SILENCE_MS)} if self.is_relayed else {}
        return RemotingCommand.request(
            RequestCode.REGISTER_BROKER,
            {
                "brokerName": self.broker_name,
                "brokerAddr": self.address,
                "clusterName": self.cluster_name,
                "haServerAddr": self.ha_address,
                "brokerId": str(self.broker_id),
                "compressed": "false",
                # As in Java: without the sign bit.
                "bodyCrc32": str(zlib.crc32(self.body) & 0x7FFFFFFF),
                **({PARTIAL_FIELD: "true"} if self.is_partial else {}),
                **({RELAYS_FIELD: "true"} if self.relays else {}),
                **({RELAYED_FIELD: "true"} if self.is_relayed else {}),
                **acting,
            },
            self.body,
        )

    def farewell(self) -> RemotingCommand:
        return RemotingCommand.request(
            RequestCode.UNREGISTER_BROKER,
            {
                "brokerName": self.broker_name,
                "brokerAddr": self.address,
                "clusterName": self.cluster_name,
                "brokerId": str(self.broker_id),
            },
        )


#: Makes the registration of these topics, or of all (None); returns None without a role.
Current = Callable[[Collection[str] | None], RouteRegistration | None]


#: The registration of the master that a slave follows, and the version of its topics.
MasterToRegister = tuple[RouteRegistration, DataVersion] | None


class RegistrationByMembers:
    """Registers a master at name servers that do not answer it.

    `members`: addresses of the other replicas; none without controllers. `of_master`: what a slave
    registers.
    """

    def __init__(
        self,
        client: RemotingClient,
        members: Callable[[], list[str]],
        of_master: Callable[[Collection[str] | None], MasterToRegister],
    ) -> None:
        self._client = client
        self._members = members
        self._of_master = of_master
        self._turn = 0
        self._asked_s: dict[str, float] = {}

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.BATON_REGISTER_MASTER, self._register_master)

    async def ask(self, name_server: str, registration: RouteRegistration) -> None:
        """A master asks one member after the other until one has done it, at most once in
        ASKS_APART_S."""
        members, now_s = self._members(), asyncio.get_running_loop().time()
        asked_s = self._asked_s.get(name_server)
        if registration.broker_id != MASTER_ID:
            return
        if asked_s is not None and now_s < asked_s + ASKS_APART_S:
            return
        self._asked_s[name_server] = now_s
        fields = {"nameServer": name_server, "masterAddr": registration.address}
        request = RemotingCommand.request(RequestCode.BATON_REGISTER_MASTER, fields)
        for _ in members:
            member = members[self._turn % len(members)]
            try:
                await self._client.call(member, request, ASK_TIMEOUT_MS)
                return
            except BatonError as error:
                self._turn += 1  # the next call begins with another member, too
                log.debug("master_not_registered name_server=%s reason=%s", name_server, error)

    async def _register_master(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """A master that a name server does not answer asks this member to register it there. The
        registration is made from this member's own role view, not from the request, so anyone may
        ask."""
        address, name_server = request.require("masterAddr"), request.require("nameServer")
        connection = self._client.live_connection(name_server)
        if connection is None or "registrar" not in connection.attachments:
            raise system_error("this broker is not registered there")
        known = self._of_master(())
        if known is None or known[0].address != address:
            raise system_error("this broker follows no such master")
        registration, version = known
        if connection.attachments.get("master") != (address, version):
            registration, version = self._of_master(None) or known
        reply = await connection.invoke(registration.request(), RPC_TIMEOUT_MS)
        if reply.code == ResponseCode.SUCCESS:
            connection.attachments["master"] = (address, version)
        return RemotingCommand.response_to(request, reply.code, reply.remark)


@dataclass(slots=True)
class _Unsent:
    """What one name server does not know yet. Every change sets `something`; a change of other
    things than `topics` sets `everything`."""

    something: asyncio.Event = field(default_factory=asyncio.Event)
    everything: asyncio.Event = field(default_factory=asyncio.Event)
    topics: dict[str, None] = field(default_factory=dict)

    def take(self) -> Collection[str] | None:
        """Returns the topics that changed since the last call; None: register everything."""
        topics = None if self.everything.is_set() or not self.topics else self.topics
        self.something.clear()
        self.everything.clear()
        self.topics = {}
        return topics


class NameServerRegistrar:
    """Keeps this broker registered.

    `master_named` gets the master's address and HA address from each reply, "" if unknown; while it
    returns False, this broker registers again every second.
    """

    def __init__(
        self,
        client: RemotingClient,
        name_servers: tuple[str, ...],
        period_ms: int,
        current: Current,
        master_named: Callable[[str, str], bool] = lambda address, ha_address: True,
        users: Callable[[], UserWrapper] | None = None,
        by_members: RegistrationByMembers | None = None,
    ) -> None:
        """`users`: returns the table of users, which a master gives to name servers; None: this
        broker does not check users."""
        self._users = users
        self._by_members = by_members
        self._client = client
        self._name_servers = name_servers
        self._period_s = period_ms / 1000
        self._current = current
        self._master_named = master_named
        self._knows_master = True
        self._due = {address: _Unsent() for address in name_servers}
        self._tasks = Tasks()
        self.registered: dict[str, bool] = dict.fromkeys(name_servers, False)
        self._changes = 0
        self._known = dict.fromkeys(name_servers, 0)  # last change it knows
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def start(self) -> None:
        for address in self._name_servers:
            self._tasks.keep(partial(self._keep, address), f"register-{address}")

    def changed(self) -> None:
        """Sends the whole registration now."""
        self._changes += 1
        for due in self._due.values():
            due.everything.set()
            due.something.set()

    def topics_changed(self, topics: Collection[str]) -> None:
        """Sends these topics, which changed or are new."""
        self._changes += 1
        for due in self._due.values():
            due.topics.update(dict.fromkeys(topics))
            due.something.set()

    def when_known(self, then: Callable[[], None]) -> None:
        """Calls `then` once every name server that has this broker knows all changes up to now, at
        the latest after KNOWN_S. So a client that created a topic finds its route. In Java the
        thread that creates the topic waits (registerBrokerAll)."""
        self._waiting.append((self._changes, then))
        self._release()
        if self._waiting:
            changes = self._changes
            asyncio.get_running_loop().call_later(KNOWN_S, self._release_to, changes)

    async def known(self) -> None:
        """`when_known` for a coroutine."""
        done = asyncio.Event()
        self.when_known(done.set)
        await done.wait()

    def _release(self) -> None:
        # A name server that is down must not delay each send that creates a topic.
        registered = (self._known[each] for each, has_it in self.registered.items() if has_it)
        self._release_to(min(registered, default=self._changes))

    def _release_to(self, changes: int) -> None:
        while self._waiting and self._waiting[0][0] <= changes:
            self._waiting.popleft()[1]()

    async def close(self) -> None:
        """Stops registering, unregisters at the name servers that have this broker, and calls what
        waits in `when_known`."""
        await self._tasks.close()
        registration = self._current(())
        if registration is not None:
            await asyncio.gather(
                *(
                    self._client.invoke(address, registration.farewell(), 500)
                    for address, known in self.registered.items()
                    if known
                ),
                return_exceptions=True,
            )
        self._release_to(self._changes)

    async def _keep(self, address: str) -> None:
        due = self._due[address]
        # After a failure, too: what it had taken from `due` must be sent again.
        self.registered[address] = quiet = False
        while True:
            # Before the request: later changes belong to the next one.
            topics, changes = due.take(), self._changes
            # It may have dropped this broker: after a partial registration it would lack the other
            # topics.
            if not self.registered[address]:
                topics = None
            wait_s = self._period_s
            if (registration := self._current(topics)) is not None:
                problem = await self._register_or_ask(address, registration)
                self.registered[address] = problem is None
                if problem is None:
                    self._known[address] = changes
                self._release()
                if problem is not None:
                    wait_s = RETRY_MS / 1000
                    if not quiet:
                        log.warning("register_failed name_server=%s reason=%s", address, problem)
                elif not self._knows_master:
                    wait_s = MASTER_WANTED_MS / 1000
                quiet = problem is not None
            await _until(due.everything, CHANGES_APART_S)
            await _until(due.something, wait_s)

    async def _register_or_ask(self, address: str, registration: RouteRegistration) -> str | None:
        """As `_register`, but if the name server does not answer in time, members register this
        master."""
        attempt = asyncio.ensure_future(self._register(address, registration))
        try:
            await asyncio.wait((attempt,), timeout=UNANSWERED_S)
            if self._by_members is not None and not attempt.done():
                await self._by_members.ask(address, registration)
            problem = await attempt
            if self._by_members is not None and problem is not None:
                await self._by_members.ask(address, registration)
            return problem
        finally:
            attempt.cancel()

    async def _register(self, address: str, registration: RouteRegistration) -> str | None:
        try:
            connection = await self._client.connection(address)
            if "registrar" not in connection.attachments:
                connection.attachments["registrar"] = self
                connection.on_close.append(lambda _: self._lost(address))
                # After a power loss it comes back without routes, and no byte would show that
                # before the next registration.
                connection.probe_when_idle()
                # When the earlier connection closed, the name server dropped what it knew of this
                # broker.
                if registration.is_partial:
                    registration = self._current(None) or registration
            reply = await connection.invoke(registration.request(), RPC_TIMEOUT_MS)
        except RequestTimeoutError as exc:
            # The host may have come back with another address: dial again.
            self._client.close_connection(address, "no answer to a registration")
            return str(exc)
        except BatonError as exc:
            return str(exc)
        if reply.code != ResponseCode.SUCCESS:
            return f"code {reply.code}: {reply.remark}"
        if self._users is not None and registration.broker_id == MASTER_ID:
            problem = await self._give_users(connection, registration)
            if problem is not None:
                return problem
        self._knows_master = self._master_named(
            reply.ext.get("masterAddr") or "", reply.ext.get("haServerAddr") or ""
        )
        return None

    async def _give_users(
        self, connection: Connection, registration: RouteRegistration
    ) -> str | None:
        """Sends the users; returns what is wrong, None if the name server has them."""
        assert self._users is not None
        table = self._users()
        version = table.data_version
        if connection.attachments.get("users") == version:
            return None
        names = {"brokerName": registration.broker_name, "clusterName": registration.cluster_name}
        request = RemotingCommand.request(RequestCode.BATON_PUT_USERS, names, table.encode())
        try:
            reply = await connection.invoke(request, RPC_TIMEOUT_MS)
        except BatonError as exc:
            return str(exc)
        # A name server that does not check users refuses them.
        if reply.code in (ResponseCode.SUCCESS, ResponseCode.REQUEST_CODE_NOT_SUPPORTED):
            connection.attachments["users"] = version
            return None
        return f"users are not taken, code {reply.code}: {reply.remark}"

    def _lost(self, address: str) -> None:
        """The connection closed, so the name server drops this broker: register again."""
        self.registered[address] = False
        self._due[address].everything.set()
        self._due[address].something.set()


async def _until(event: asyncio.Event, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        pass
