"""The members of a consumer group (38), also from a broker that has not heard of all of them yet.

Stock clients send a heartbeat each 30 s. So for SIGHTING_MS after a start, and after it became
master, a broker asks the other members of its broker group (60003) before it answers 38: a list
that is too short gives a queue two readers, and a client that misses itself lets go of all its
queues. One question a group at a time; who comes while it runs waits for the next one, so no answer
is older than its request. Who does not answer in ASK_MS is left out. After a start the others are
also asked for all that they know, once each: they may be started again, too, before the next
heartbeat.

60003 is answered from what this member itself knows, so no question makes another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from batonmq.broker.consume.consumer_manager import ConsumerManager
from batonmq.broker.consume.consumer_sightings import PIECE, SIGHTING_MS, ConsumerSightings
from batonmq.broker.request_fields import text
from batonmq.protocol.bodies import ConsumerSightingsBody, GetConsumerListByGroupResponseBody
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, BrokerRefusal, ResponseError
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors, Response
from batonmq.remoting.endpoint import RemotingClient

log = logging.getLogger(__name__)

ASK_MS: Final = 300
PIECES_A_TURN: Final = 20
COPY_MS: Final = 3000
COPY_AGAIN_MS: Final = 1000


@dataclass(slots=True)
class _Questions:
    """About one consumer group: how many were begun, and the answer of the last one."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: int = 0
    client_ids: list[str] = field(default_factory=list)


class ConsumerLists:
    """`others` gives the addresses of the other members of the broker group."""

    def __init__(
        self,
        clients: ConsumerManager,
        sightings: ConsumerSightings,
        client: RemotingClient,
        others: Callable[[], list[str]],
        clock_ms: Callable[[], int],
    ) -> None:
        self._clients = clients
        self._sightings = sightings
        self._client = client
        self._others = others
        self._clock_ms = clock_ms
        self._unsure_until_ms = 0
        self._copies_until_ms = 0
        self._questions: dict[str, _Questions] = {}
        # Address -> when it is asked for all again; None once it has told all.
        self._copy_at_ms: dict[str, int | None] = {}
        self._copies: set[asyncio.Task[None]] = set()

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.GET_CONSUMER_LIST_BY_GROUP, self.consumer_list)
        processors.register(RequestCode.BATON_GET_CONSUMER_SIGHTINGS, self.tell)

    def started(self) -> None:
        """Consumers have not been heard yet."""
        self._unsure_until_ms = self._copies_until_ms = self._clock_ms() + SIGHTING_MS

    def became_master(self) -> None:
        """Some consumers may have been heard by the master before only."""
        self._unsure_until_ms = self._clock_ms() + SIGHTING_MS
        self._sightings.became_master()

    def role_left(self) -> None:
        self._sightings.role_left(self._clock_ms())

    def consumer_list(
        self, request: RemotingCommand, _: Connection
    ) -> RemotingCommand | Awaitable[RemotingCommand]:
        """38, the base of every rebalance; code 1 if there are no members."""
        group = text(request, "consumerGroup")
        if self._clock_ms() < self._unsure_until_ms:
            return self._asked_list(request, group)
        return _list_reply(request, group, self._clients.client_ids(group))

    async def client_ids(self, group: str) -> list[str]:
        """The members of a group, for who shares its queues among them."""
        if self._clock_ms() < self._unsure_until_ms:
            return await self._asked(group)
        return self._clients.client_ids(group)

    async def _asked_list(self, request: RemotingCommand, group: str) -> RemotingCommand:
        return _list_reply(request, group, await self._asked(group))

    async def tell(self, request: RemotingCommand, _: Connection) -> Response:
        """60003, our own: what this member knows of a group, or of all. One JSON a line."""
        lines = []
        sent = 0
        pieces = self._sightings.pieces(request.ext.get("consumerGroup", ""), self._clock_ms())
        for piece in pieces:
            lines.append(piece.encode())
            sent += len(piece.seen) + len(piece.left)
            if sent >= PIECE or len(lines) % PIECES_A_TURN == 0:
                sent = 0
                await asyncio.sleep(0)
        return RemotingCommand.response_to(request, body=b"\n".join(lines))

    def tick(self, now_ms: int) -> bool:
        """Asks for all whom it has not asked yet, and forgets; whether there may be more."""
        if now_ms < self._copies_until_ms:
            for address in self._others():
                again_ms = self._copy_at_ms.get(address, 0)
                if again_ms is not None and again_ms <= now_ms:
                    self._copy_at_ms[address] = now_ms + COPY_MS + COPY_AGAIN_MS
                    copy = asyncio.create_task(self._copy(address), name="consumer-sightings")
                    self._copies.add(copy)
                    copy.add_done_callback(self._copies.discard)
        elif now_ms >= self._unsure_until_ms and self._questions:
            self._questions = {}
        return self._sightings.forget(now_ms)

    async def close(self) -> None:
        """Ends what it asks."""
        for copy in self._copies:
            copy.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)

    async def _asked(self, group: str) -> list[str]:
        """The answer of a question that began after this call."""
        questions = self._questions.setdefault(group, _Questions())
        wanted = questions.begun + 1
        async with questions.lock:
            if questions.begun < wanted:
                questions.begun += 1
                asks = (self._ask(address, group, ASK_MS) for address in self._others())
                await asyncio.gather(*asks)
                questions.client_ids = self._sightings.client_ids(group, self._clock_ms())
            return questions.client_ids

    async def _copy(self, address: str) -> None:
        if await self._ask(address, "", COPY_MS):
            self._copy_at_ms[address] = None
        else:
            self._copy_at_ms[address] = self._clock_ms() + COPY_AGAIN_MS

    async def _ask(self, address: str, group: str, timeout_ms: int) -> bool:
        """Whether that member has said all that it ever will of a group, or of all for ""."""
        code = RequestCode.BATON_GET_CONSUMER_SIGHTINGS
        request = RemotingCommand.request(code, {"consumerGroup": group})
        try:
            reply = await self._client.call(address, request, timeout_ms)
            for line in reply.body.splitlines():
                self._sightings.learn(ConsumerSightingsBody.decode(line), self._clock_ms())
                await asyncio.sleep(0)
        except ResponseError as error:
            log.info("consumers_not_told address=%s group=%s why=%s", address, group, error)
            return error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED  # a Java broker never will
        except BatonError as error:
            log.info("consumers_not_told address=%s group=%s why=%s", address, group, error)
            return False
        return True


def _list_reply(request: RemotingCommand, group: str, ids: list[str]) -> RemotingCommand:
    if not ids:
        raise BrokerRefusal(
            ResponseCode.SYSTEM_ERROR, f"no consumer of group {group} is connected here"
        )
    body = GetConsumerListByGroupResponseBody(consumer_id_list=ids).encode()
    return RemotingCommand.response_to(request, body=body)
