"""The shell around `group_core`: the other brokers of the group, in classic mode.

It asks name servers for the members of the group and a broker of the same id for its status, sends
heartbeats if slaves may act for the master, and takes the notices of others.
Origin: BrokerController, BrokerPreOnlineService, AdminBrokerProcessor.
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from batonmq.broker.config import BrokerSections
from batonmq.broker.replication.group_core import (
    Act,
    AskMembers,
    AskRival,
    ClassicGroupCore,
    GroupEffect,
    GroupPolicy,
    GroupStage,
    Meet,
    Members,
    Register,
    Rival,
    StandBack,
    TakeRole,
)
from batonmq.broker.request_fields import text
from batonmq.protocol.bodies import GetBrokerMemberGroupResponseBody, KVTable
from batonmq.protocol.codes import MASTER_ID, RequestCode
from batonmq.protocol.errors import BatonError, ConnectError
from batonmq.protocol.numbers import whole_number
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.sockets import plain_address

log = logging.getLogger(__name__)

ASK_MS: Final = 1000
CHECK_MS: Final = 5000
"""Between two checks of the group."""
ACTING_CHECK_MS: Final = 1000
"""The same if a slave may act: Java's syncBrokerMemberGroupPeriod."""


class GroupActions(Protocol):
    """Carries out the effects of `group_core`."""

    def take_role(self) -> None: ...

    def act(self, on: bool) -> None: ...

    def register_again(self) -> None: ...

    def stand_back(self, reason: str) -> None: ...

    async def meet(self, address: str) -> str:
        """Pre-online with that slave: why this broker may not take its role, "" if it may. Raises
        BatonError, OSError or ValueError."""

    def on_fatal(self, exc: BaseException) -> None: ...


class GroupWatch:
    """One for a broker, on its loop."""

    def __init__(
        self,
        config: BrokerSections,
        client: RemotingClient,
        actions: GroupActions,
        clock_ms: Callable[[], int],
    ) -> None:
        broker = config.broker
        self._broker = broker
        self._beat_s = config.replicas.broker_heartbeat_interval / 1000
        self._client = client
        self._actions = actions
        self._clock_ms = clock_ms
        # Who is in the group, only name servers know: without them no slave acts.
        acting = broker.enable_slave_acting_master and bool(broker.name_servers)
        self._policy = GroupPolicy(
            broker_id=broker.broker_id if config.is_classic_slave else MASTER_ID,
            address=broker.address,
            started_ms=wall_ms(),
            acting=acting,
            pre_online=acting and not broker.skip_pre_online,
            check_ms=ACTING_CHECK_MS if acting else CHECK_MS,
        )
        self.core = ClassicGroupCore(self._policy, clock_ms())
        self._hinted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._logged_problem = ""

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE, self._min_id_changed)
        processors.register(RequestCode.BATON_SAME_BROKER_ID, self._claimed)

    async def start(self) -> None:
        """Checks the group once before it returns: a broker that is alone has its role then."""
        await self._check()
        self._tasks = [asyncio.create_task(self._check_when_due(), name="group-watch")]
        if self._policy.acting:
            self._tasks.append(asyncio.create_task(self._send_heartbeats(), name="group-heartbeat"))
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        # A slave would not see its master come back, and acknowledge offsets beside it.
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("group_task_failed task=%s", task.get_name(), exc_info=error)
            self._actions.on_fatal(error)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hint(self) -> None:
        """Something changed in the group: check it now."""
        self.core.hinted(self._clock_ms())
        self._hinted.set()

    def master_announced(self) -> None:
        self.core.master_announced(self._clock_ms())

    def takes_offsets(self) -> bool:
        return self.core.takes_offsets(self._clock_ms())

    def _min_id_changed(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """A hint (NOTIFY_MIN_BROKER_ID_CHANGE, 905). The check that follows asks every name server,
        this one too."""
        log.info("min_broker_id_changed to=%s", request.ext.get("minBrokerId"))
        self.hint()
        return RemotingCommand.response_to(request)

    async def _claimed(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        """A broker has found that this one has the same id (BATON_SAME_BROKER_ID, 60004)."""
        address = text(request, "brokerAddr")
        # No name server may know this address, but the check dials it and names it in the status.
        # So a stranger must not choose the host.
        if await _is_at(connection.peer, address):
            self.core.claimed(address, self._clock_ms())
        else:
            log.warning("same_broker_id_unproven peer=%s address=%.100r", connection.peer, address)
        self.hint()
        return RemotingCommand.response_to(request)

    async def _check_when_due(self) -> None:
        while True:
            wait_ms = self.core.wakeup_ms - self._clock_ms()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0, wait_ms) / 1000):
                    await self._hinted.wait()
            # Before the check: a hint that comes during it leads to another one.
            self._hinted.clear()
            await self._check()

    async def _check(self) -> None:
        effects = deque(self.core.tick(self._clock_ms()))
        while effects:
            effects += await self._perform(effects.popleft())
        problem = self.core.problem
        if problem != self._logged_problem:
            self._logged_problem = problem
            if problem:
                log.error(
                    "classic_group_problem stage=%s reason=%s", self.core.stage.value, problem
                )
            else:
                log.info("classic_group_well stage=%s", self.core.stage.value)

    async def _perform(self, effect: GroupEffect) -> Iterable[GroupEffect]:
        core, actions = self.core, self._actions
        match effect:
            case AskMembers():
                members = await self._members()
                return core.members_known(members, self._clock_ms())
            case AskRival(address):
                rival, started_ms = await self._ask_rival(address)
                return core.rival_known(address, rival, started_ms, self._clock_ms())
            case Meet(address):
                try:
                    problem = await actions.meet(address)
                except (BatonError, OSError, ValueError) as error:
                    problem = repr(error)
                return core.met(address, problem, self._clock_ms())
            case TakeRole():
                actions.take_role()
            case Act(on):
                actions.act(on)
            case Register():
                actions.register_again()
            case StandBack(reason):
                actions.stand_back(reason)
        return ()

    async def _members(self) -> Members | None:
        """The members according to all name servers that answer; None if none answers."""
        name_servers = self._broker.name_servers
        answers = await asyncio.gather(*map(self._members_at, name_servers), return_exceptions=True)
        members: dict[int, set[str]] = {}
        known = not name_servers
        for answer in answers:
            if isinstance(answer, GetBrokerMemberGroupResponseBody):
                known = True
                for broker_id, address in answer.broker_member_group.broker_addrs.items():
                    # Name servers may differ while one of two brokers has replaced the other's
                    # address.
                    members.setdefault(broker_id, set()).add(address)
            elif not isinstance(answer, BatonError):
                raise answer
        return members if known else None

    async def _members_at(self, name_server: str) -> GetBrokerMemberGroupResponseBody:
        broker = self._broker
        names = {"clusterName": broker.broker_cluster_name, "brokerName": broker.broker_name}
        request = RemotingCommand.request(RequestCode.GET_BROKER_MEMBER_GROUP, names)
        reply = await self._client.call(name_server, request, ASK_MS)
        return GetBrokerMemberGroupResponseBody.decode(reply.body)

    async def _ask_rival(self, address: str) -> tuple[Rival, int]:
        """Whether it lives, and since when. A broker of ours learns of this one, too."""
        claim = {"brokerAddr": self._broker.address}
        try:
            request = RemotingCommand.request(RequestCode.GET_BROKER_RUNTIME_INFO)
            reply = await self._client.call(address, request, ASK_MS)
            started = KVTable.decode(reply.body).table.get("bootTimestamp", "")
            request = RemotingCommand.request(RequestCode.BATON_SAME_BROKER_ID, claim)
            # It may not see this broker: its name servers may be others, or list one address of the
            # id.
            await self._client.oneway(address, request)
        except ConnectError as error:
            # Only a refusal proves that nothing listens there; a time-out may be a cut link.
            refused = isinstance(error.__cause__, ConnectionRefusedError)
            return (Rival.GONE if refused else Rival.SILENT), 0
        except BatonError:
            return Rival.SILENT, 0
        return Rival.LIVES, whole_number(started) or 0

    async def _send_heartbeats(self) -> None:
        """Name servers take a broker that is silent for brokerNotActiveTimeoutMillis away
        (BROKER_HEARTBEAT, 904)."""
        broker = self._broker
        while True:
            await asyncio.sleep(self._beat_s)
            if self.core.stage is not GroupStage.ONLINE:
                continue
            for name_server in broker.name_servers:
                connection = self._client.live_connection(name_server)
                if connection is not None:  # else the registrar dials and registers again
                    connection.oneway(
                        RemotingCommand.request(
                            RequestCode.BROKER_HEARTBEAT,
                            {
                                "clusterName": broker.broker_cluster_name,
                                "brokerName": broker.broker_name,
                                "brokerAddr": broker.address,
                                "brokerId": str(self._policy.broker_id),
                            },
                        )
                    )


async def _is_at(peer: str, address: str) -> bool:
    """Whether host:port `address` is at the host of a connection's `peer`."""
    host, _, port = address.rpartition(":")
    number = whole_number(port)
    if not host or number is None or not 0 < number < 1 << 16:
        return False
    try:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host.strip("[]"), number, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # an unknown name, or a text that cannot be one
        return False
    own = plain_address(peer.rpartition(":")[0], number)
    return any(plain_address(str(each[4][0]), number) == own for each in found)
