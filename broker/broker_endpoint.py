"""The broker's endpoint. Its ports listen before the broker's code is loaded and its store
recovered.

A restarted process would refuse connections for a second or more, and a stock client tries no other
broker until its next poll. So the ports listen first. Until `open`, requests for the master and
pulls go to the master that a name server names (`relay`); all others wait, bounded in number, bytes
and time. If that address is out of date, the broker there refuses the request, or has no required
set (R1).
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

from batonmq.auth.guard import Guard, Require, allow_all
from batonmq.broker.config import BrokerSections
from batonmq.broker.relay import (
    HELD_BYTES_MAX,
    HELD_MAX,
    NOT_STORED,
    PULL_CODES,
    RELAYED_CODES,
    SENDS,
    SLICE,
    WAIT_MS,
    Relay,
    relay_asks,
)
from batonmq.broker.role_gate import RoleGate
from batonmq.protocol.bodies import GetBrokerMemberGroupResponseBody
from batonmq.protocol.codes import RELAY_FIELD, RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError
from batonmq.remoting.command import RemotingCommand, decode_frame, peek_code
from batonmq.remoting.connection import Connection, Later, Processors, Response
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.start_retry import Laps, StartRetry
from batonmq.runtime.tasks import Tasks
from batonmq.runtime.turns import in_slices, in_turns

log = logging.getLogger(__name__)

STARTING: Final = "this broker is starting: ask the name server for the master"
ASK_TIMEOUT_MS: Final = 300
ASK_PAUSE_S: Final = 0.05
TICK_S: Final = 0.1


def _guard(config: BrokerSections) -> Guard | None:
    """None if there is no access control."""
    if not config.auth.authentication_enabled:
        return None
    audit = config.store.root / "audit.log"
    return Guard(config.auth, config.broker.broker_cluster_name, audit)


@dataclass(frozen=True, slots=True)
class Early:
    """A request that waits for `open`."""

    channel: Connection
    request: RemotingCommand
    deadline_ms: int


class BrokerEndpoint:
    """Endpoint, role gate and relay of one broker. Call `listen`, `open`, `close` once each, in
    this order. `laps` measures the steps of the start."""

    def __init__(self, config: BrokerSections) -> None:
        self.gate = RoleGate()
        self.guard = _guard(config)
        guard = self.guard
        self.sign = sign = guard.signer if guard is not None else None
        self.require: Require = guard.require_also if guard is not None else allow_all
        self.relay = Relay(self.gate, boot_ms, enabled=config.relays, tls=config.tls, sign=sign)
        self.is_listening = False
        self.laps = Laps(boot_ms)
        self._config = config.broker
        self.processors = self._early_processors()
        tls = config.tls
        self.server = RemotingServer(
            self.processors, name="broker", tls=tls.for_clients if tls is not None else None
        )
        self._early: deque[Early] = deque()
        self._early_bytes = 0
        self.start_retry = StartRetry(config.store.root)
        self._client = RemotingClient(name="broker-endpoint", tls=config.tls, sign=sign)
        self._tasks = Tasks()

    def __len__(self) -> int:
        """How many requests wait for `open`."""
        return len(self._early)

    def _early_processors(self) -> Processors:
        processors = Processors()
        for code in (*SENDS, *PULL_CODES):
            processors.register_raw(code, self._frame_came)
        ends = RequestCode.BATON_CONNECTION_ENDS
        # All other requests pass the master's guard, or after the start this broker's.
        guard = self.guard
        processors.register(ends, relay_asks if guard is None else guard.before(ends, relay_asks))
        processors.default(self._came)
        return processors

    def stand_before(self, processors: Processors) -> None:
        """Puts guard and relay before the handlers: they get only allowed requests that this role
        may answer."""
        self.relay.stand_before(processors)
        if self.guard is not None:
            self.guard.stand_before(processors)

    async def listen(self) -> None:
        """Listens on the port, and on port - 2. Raises CannotListenError."""
        broker = self._config
        try:
            await self.server.listen(broker.bind_host, broker.listen_port)
            # RocketMQ's second port: Java's slaves use it.
            await self.server.listen(broker.bind_host, broker.listen_port - 2)
        except OSError:
            await self.close()
            raise
        self.is_listening = True
        self.laps.begin()
        self._tasks.keep(self._tick_forever, "endpoint-tick")
        if self.relay.enabled and broker.name_servers:
            self._tasks.keep(self._find_master, "endpoint-master")

    async def open(self, processors: Processors) -> None:
        """Lets `processors` answer, early requests first."""
        await self._tasks.close()
        self.processors.replace(processors)
        self._hand_out()

    def _hand_out(self) -> None:
        for early in islice(self._taken(), SLICE):
            early.channel.handle(early.request)
        if self._early:
            asyncio.get_running_loop().call_soon(self._hand_out)

    async def close(self) -> None:
        """Refuses early requests, and closes all connections. Idempotent."""
        await self._tasks.close()
        async for early in in_turns(self._taken()):
            self._refuse(early.channel, early.request)
        await self.relay.close()
        await self._client.close()
        await self.server.close()
        if self.guard is not None:
            self.guard.close()

    def _frame_came(self, channel: Connection, kind: int, header: bytes, body: bytes) -> None:
        """A send or a pull."""
        if not self.relay.take_raw(channel, self._frame_again, kind, header, body):
            self._refuse(channel, decode_frame(header, b"", kind))

    def _frame_again(self, channel: Connection, kind: int, header: bytes, body: bytes) -> Later:
        """A kept frame, once this broker has a role and answers by itself."""
        return self.processors.raw_handlers[peek_code(kind, header)](channel, kind, header, body)

    def _came(self, request: RemotingCommand, channel: Connection) -> Response:
        if request.code in RELAYED_CODES and self.relay.take(channel, request):
            return None
        size = request.size
        if len(self._early) >= HELD_MAX or self._early_bytes + size > HELD_BYTES_MAX:
            self._refuse(channel, request)
            return None
        self._early.append(Early(channel, request, boot_ms() + WAIT_MS))
        self._early_bytes += size
        return None

    def _refuse(self, channel: Connection, request: RemotingCommand) -> None:
        refusal = self.gate.refusal
        hint = refusal.hint if refusal is not None else {}
        if RELAY_FIELD in request.ext:
            hint = NOT_STORED
        code = ResponseCode.SERVICE_NOT_AVAILABLE
        response = RemotingCommand.response_to(request, code, self.why_starting, ext=hint)
        channel.reply(request, response)

    @property
    def why_starting(self) -> str:
        """What the start waits for, as a text."""
        missing = self.start_retry.missing
        return f"{STARTING} (it waits for disk space: {missing})" if missing else STARTING

    def _taken(self, until_ms: int | None = None) -> Iterator[Early]:
        """Takes out the requests whose deadline is before `until_ms`, or all, in order of
        arrival."""
        while self._early and (until_ms is None or self._early[0].deadline_ms <= until_ms):
            early = self._early.popleft()
            self._early_bytes -= early.request.size
            # No reply could reach this client, and it asks elsewhere.
            if not early.channel.closed:
                yield early

    def tick(self, now_ms: int) -> bool:
        """Refuses a slice of the late requests; returns whether there may be more."""
        late = list(islice(self._taken(now_ms), SLICE))
        for early in late:
            self._refuse(early.channel, early.request)
        return self.relay.tick(now_ms) or len(late) == SLICE

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            # One time for all slices: what becomes late meanwhile waits for the next tick.
            await in_slices(partial(self.tick, boot_ms()))

    async def _find_master(self) -> None:
        """Asks one name server after the other, until `open`, because the master may change."""
        broker, known = self._config, ""
        # Made for each call: a request has one id, by which its reply is found.
        request = partial(
            RemotingCommand.request,
            RequestCode.GET_BROKER_MEMBER_GROUP,
            {"clusterName": broker.broker_cluster_name, "brokerName": broker.broker_name},
        )
        while True:
            for name_server in broker.name_servers:
                with contextlib.suppress(BatonError):
                    reply = await self._client.call(name_server, request(), ASK_TIMEOUT_MS)
                    group = GetBrokerMemberGroupResponseBody.decode(reply.body)
                    master = group.broker_member_group.broker_addrs.get(0, "")
                    # A name server may still list this broker, which may have been master before
                    # this start.
                    if master not in (known, "", broker.address):
                        known = master
                        log.info("endpoint_knows_master address=%s from=%s", master, name_server)
                        # Not `follow`: it has no role yet, and only its relay needs the address.
                        self.gate.leave(self.gate.master_epoch, master)
                        break
            await asyncio.sleep(ASK_PAUSE_S)
