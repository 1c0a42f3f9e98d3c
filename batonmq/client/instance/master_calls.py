"""Requests to the current master of a broker group.

If a master leaves a request unanswered for `suspicion_ms`, the name servers are asked. If they name
another master, the old connection is closed, so that its requests are retried at the new one. So a
hung master costs an election, not a request timeout. For a request that a master may hold, silence
means little: only one name server is asked, another one each time.
"""

import asyncio
import logging
from collections.abc import Callable

from batonmq.client.errors import NoMasterError, NoNameServerError, NoRouteError
from batonmq.client.instance.connections import Connections
from batonmq.client.instance.failover import NOT_SERVING, Silence, SilenceWatch, pause_ms
from batonmq.client.instance.routes import RouteTable
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BatonError, ConnectError, RequestTimeoutError, ResponseError
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import boot_ms

log = logging.getLogger(__name__)

_RECHECK_MS = 100


class MasterCalls:
    def __init__(self, connections: Connections, routes: RouteTable) -> None:
        self._connections = connections
        self._routes = routes
        self._watch = SilenceWatch()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0
        self._suspected: set[str] = set()

    async def invoke(
        self,
        topic: str,
        broker_name: str,
        make_request: Callable[[int], RemotingCommand],
        *,
        deadline_ms: int,
        retry_codes: frozenset[int] = NOT_SERVING,
        held_check_ms: int | None = None,
        wait_for_topic: bool = True,
    ) -> tuple[RemotingCommand, str]:
        """Returns the master's reply and address. Retries until the deadline, so it survives a
        failover.

        Only for requests that may be sent twice. `make_request` gets the ms left. `held_check_ms`:
        as in `invoke_once`. Raises NoMasterError with the last reason; NoRouteError without
        `wait_for_topic`."""
        failures = 0
        failed_at: str | None = None
        while True:
            try:
                address = await self._routes.master(
                    topic, broker_name, deadline_ms=deadline_ms, failed_at=failed_at
                )
                # Whatever comes of this call: if there is a next one, this address did not serve.
                failed_at = address
                left_ms = max(deadline_ms - boot_ms(), 1)
                request = make_request(left_ms)
                reply = await self.invoke_once(
                    topic, broker_name, address, request, left_ms, held_check_ms=held_check_ms
                )
                if reply.code not in retry_codes:
                    return reply, address
                why = f"{address} answers {reply.code} {reply.remark or ''}"
            except NoRouteError as error:
                if not wait_for_topic:
                    raise
                why = str(error)
            except (ConnectError, RequestTimeoutError, NoMasterError, NoNameServerError) as error:
                why = str(error)
            failures += 1
            pause = pause_ms(failures)
            # Now, not after the pause: there would be no time left for another try.
            if boot_ms() + pause >= deadline_ms:
                raise NoMasterError(broker_name, why)
            await asyncio.sleep(pause / 1000)

    async def call(
        self, topic: str, broker_name: str, request: RemotingCommand, *, deadline_ms: int
    ) -> RemotingCommand:
        """As `invoke`, for a reply with code 0. Raises ResponseError for others."""
        reply, address = await self.invoke(
            topic, broker_name, lambda left_ms: request, deadline_ms=deadline_ms
        )
        if reply.code != ResponseCode.SUCCESS:
            raise ResponseError(reply.code, reply.remark, address)
        return reply

    async def invoke_once(
        self,
        topic: str,
        broker_name: str,
        address: str,
        request: RemotingCommand,
        timeout_ms: int,
        *,
        held_check_ms: int | None = None,
    ) -> RemotingCommand:
        """Sends one request to a master and watches its silence. Raises ConnectError,
        RequestTimeoutError.

        `held_check_ms`: for a request that the broker may hold: how often to check that the broker
        is still master."""
        patience_ms = self._connections.options.suspicion_ms
        recheck_ms = _RECHECK_MS
        remoting = self._connections.remoting  # before the timer: it raises in another loop
        if held_check_ms is not None:
            patience_ms = recheck_ms = held_check_ms
        now_ms = boot_ms()
        silence = Silence(topic, broker_name, address, is_held=held_check_ms is not None)
        serial = self._watch.begin(silence, now_ms, patience_ms, recheck_ms)
        # One timer for all requests, since nearly all end before they are due.
        if self._timer is None or now_ms + patience_ms < self._timer_ms:
            self._arm_timer(now_ms)
        try:
            return await remoting.invoke(address, request, timeout_ms)
        finally:
            self._watch.end(serial)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm_timer(self, now_ms: int) -> None:
        self.close()
        next_ms = self._watch.next_ms()
        if next_ms is not None and self._connections.running:
            delay_ms = max(next_ms - now_ms, 1)
            self._timer_ms = next_ms
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_ms / 1000, self._check_silence)

    def _check_silence(self) -> None:
        now_ms = boot_ms()
        for silence in self._watch.due(now_ms):
            # One question at a time about an address, however many requests wait there.
            if silence.address not in self._suspected:
                self._suspected.add(silence.address)
                self._connections.spawn(self._find_new_master(silence))
        self._arm_timer(now_ms)

    async def _find_new_master(self, silence: Silence) -> None:
        try:
            if silence.is_held:
                route = await self._routes.refresh(silence.topic, by_turns=True)
            else:
                route = await self._routes.refresh(silence.topic, suspects=(silence.address,))
        except BatonError as error:
            log.info("suspicion_unresolved address=%s reason=%s", silence.address, error)
            return
        finally:
            self._suspected.discard(silence.address)
        now_master = route.master_address(silence.broker_name)
        # Without a new master there is nowhere to go: the requests keep waiting for this one.
        if now_master not in (None, silence.address):
            log.info(
                "master_silent broker_name=%s address=%s new_master=%s",
                silence.broker_name,
                silence.address,
                now_master,
            )
            self._connections.remoting.close_connection(silence.address)
