"""Requests to the name servers, one after the other, beginning with the one that replied last.

A name server may be down or hang, may be cut off from a master, or may have the route from before a
failover. So each gets only a part of the time. A route that lacks a master, or names one that the
caller suspects (a call just failed there), is used only if no name server has a better one.
"""

import asyncio
import logging
import os
from collections.abc import Collection, Sequence

from batonmq.client.arguments import check_address, check_text
from batonmq.client.errors import ArgumentError, NoNameServerError, NoRouteError
from batonmq.protocol.bodies import ClusterInfo, TopicRouteData
from batonmq.protocol.codes import MASTER_ID, RequestCode, ResponseCode
from batonmq.protocol.errors import (
    ConnectError,
    RemoteProtocolError,
    RequestTimeoutError,
    ResponseError,
)
from batonmq.protocol.message import route_problem
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.clock import boot_ms

log = logging.getLogger(__name__)

NAMESRV_ADDR_VARIABLE = "NAMESRV_ADDR"

SHARE_MS = 500
"""The longest wait for one server while there are others to try."""
# How long to wait for other replies after a first one that names a suspect.
_SECOND_OPINION_S = 0.05


def parse_addresses(text: str | Sequence[str] | None) -> tuple[str, ...]:
    """The `host:port` addresses in a list, or in a text separated by `;` or `,`. Raises
    ArgumentError for an invalid address."""
    if text is None:
        return ()
    parts = text.replace(",", ";").split(";") if isinstance(text, str) else text
    if not isinstance(parts, list | tuple):
        raise ArgumentError("name_servers", text, "'host:port;host:port' or a list is allowed")
    for part in parts:
        check_text("an address", part)
    addresses = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    for address in addresses:
        check_address(address)
    return addresses


def name_servers_from(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The addresses given, else those of NAMESRV_ADDR. Raises NoNameServerError if there are none,
    ArgumentError for an invalid address.

    An empty list is valid, for a client that uses only controllers or brokers; a call that needs a
    name server then raises NoNameServerError."""
    addresses = parse_addresses(given)
    if not addresses and isinstance(given, list | tuple):
        return ()
    addresses = addresses or parse_addresses(os.environ.get(NAMESRV_ADDR_VARIABLE))
    if not addresses:
        raise NoNameServerError(())
    return addresses


class NameServers:
    def __init__(self, addresses: Sequence[str], remoting: RemotingClient) -> None:
        self.addresses = tuple(addresses)
        self._remoting = remoting
        self._preferred = 0
        self._turn = 0

    async def invoke(self, request: RemotingCommand, *, deadline_ms: int) -> RemotingCommand:
        """The first reply, whatever its code. Raises NoNameServerError."""
        failures: list[tuple[str, str]] = []
        order = self._in_turn()
        for n, index in enumerate(order):
            try:
                reply = await self._ask(index, request, deadline_ms, last=n == len(order) - 1)
            except (ConnectError, RequestTimeoutError) as error:
                failures.append((self.addresses[index], str(error)))
                continue
            self._preferred = index
            return reply
        raise NoNameServerError(failures)

    async def ask(self, code: RequestCode, *, deadline_ms: int) -> bytes:
        """The body of the first reply. Raises NoNameServerError, ResponseError for a refusal."""
        reply = await self.invoke(RemotingCommand.request(code), deadline_ms=deadline_ms)
        if reply.code != ResponseCode.SUCCESS:
            raise ResponseError(reply.code, reply.remark, self.addresses[self._preferred])
        return reply.body

    async def cluster_info(self, *, deadline_ms: int) -> ClusterInfo:
        """Raises as `ask`."""
        code = RequestCode.GET_BROKER_CLUSTER_INFO
        return ClusterInfo.decode(await self.ask(code, deadline_ms=deadline_ms))

    async def route(
        self,
        topic: str,
        *,
        deadline_ms: int,
        suspects: Collection[str] = (),
        by_turns: bool = False,
    ) -> TopicRouteData:
        """The route of a topic. Raises NoRouteError if no server that replies has it, ResponseError
        if this user may not see it, else NoNameServerError.

        `suspects`: addresses that are probably no longer master. A reply that names one, or lacks
        the topic or a master, is used only if no server has a better one. `by_turns`: begins with
        another server each time and uses the first route."""
        answers = _RouteAnswers(topic, frozenset(suspects), takes_any=by_turns)
        # Only after a failure: else the first answer is good enough.
        if suspects:
            await self._ask_all_for_route(answers, deadline_ms)
        else:
            if by_turns:
                self._turn += 1
            order = self._from(self._turn) if by_turns else self._in_turn()
            for n, index in enumerate(order):
                await self._ask_for_route(index, answers, deadline_ms, last=n == len(order) - 1)
                if answers.best is not None:
                    break
        return answers.decide()

    async def _ask_all_for_route(self, answers: "_RouteAnswers", deadline_ms: int) -> None:
        """Asks all at once, so that a hung server does not delay a failover. Ends with the first
        reply without suspects, or a little after the first reply."""
        asking = {
            asyncio.ensure_future(self._ask_for_route(index, answers, deadline_ms, last=False))
            for index in self._in_turn()
        }
        try:
            while asking and answers.best is None:
                patience_s = _SECOND_OPINION_S if answers.has_some else None
                done, asking = await asyncio.wait(
                    asking, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    return
        finally:
            for task in asking:
                task.cancel()

    async def _ask_for_route(
        self, index: int, answers: "_RouteAnswers", deadline_ms: int, *, last: bool
    ) -> None:
        address = self.addresses[index]
        request = RemotingCommand.request(
            RequestCode.GET_ROUTEINFO_BY_TOPIC,
            {"topic": answers.topic, "acceptStandardJsonOnly": "true"},
        )
        try:
            reply = await self._ask(index, request, deadline_ms, last=last)
        except (ConnectError, RequestTimeoutError) as error:
            answers.failures.append((address, str(error)))
            return
        if reply.code == ResponseCode.TOPIC_NOT_EXIST:
            answers.unknown_at.append(address)
        # Not final: another server may have newer rights.
        elif reply.code == ResponseCode.NO_PERMISSION:
            answers.refusal = ResponseError(reply.code, reply.remark, address)
        elif reply.code != ResponseCode.SUCCESS:
            answers.failures.append((address, f"code {reply.code} {reply.remark or ''}"))
        else:
            try:
                data = TopicRouteData.decode(reply.body)
            except RemoteProtocolError as error:  # another server may have a good one
                answers.failures.append((address, str(error)))
                return
            numbers = (max(q.read_queue_nums, q.write_queue_nums) for q in data.queue_datas)
            if problem := route_problem(numbers):
                answers.failures.append((address, problem))
            elif answers.take(data):
                self._preferred = index

    async def invoke_each(
        self, request: RemotingCommand, *, deadline_ms: int
    ) -> dict[str, RemotingCommand | Exception]:
        """Sends the request to every name server at once; returns address -> reply or error."""

        async def one(index: int) -> RemotingCommand | Exception:
            # One for each server: a request has one id, by which its reply is found.
            own = RemotingCommand.request(request.code, request.ext, request.body)
            try:
                return await self._ask(index, own, deadline_ms, last=True)
            except (ConnectError, RequestTimeoutError, ResponseError) as error:
                return error

        answers = await asyncio.gather(*map(one, range(len(self.addresses))))
        return dict(zip(self.addresses, answers, strict=True))

    def _in_turn(self) -> list[int]:
        return self._from(self._preferred)

    def _from(self, first: int) -> list[int]:
        count = len(self.addresses)
        return [(first + i) % count for i in range(count)]

    async def _ask(
        self, index: int, request: RemotingCommand, deadline_ms: int, *, last: bool
    ) -> RemotingCommand:
        left_ms = max(deadline_ms - boot_ms(), 1)
        # A silent server leaves time to ask the others.
        timeout_ms = left_ms if last else min(left_ms, SHARE_MS)
        return await self._remoting.invoke(self.addresses[index], request, timeout_ms)


class _RouteAnswers:
    """The name servers' replies about one topic so far, and the best of them."""

    def __init__(self, topic: str, suspects: frozenset[str], *, takes_any: bool) -> None:
        self.topic = topic
        self._suspects = suspects
        self._takes_any = takes_any
        self.best: TopicRouteData | None = None
        self._second_best: TopicRouteData | None = None
        self.unknown_at: list[str] = []
        self.refusal: ResponseError | None = None
        self.failures: list[tuple[str, str]] = []

    @property
    def has_some(self) -> bool:
        return bool(self._second_best or self.unknown_at)

    def take(self, data: TopicRouteData) -> bool:
        """Adds a reply. Returns whether it is the first, or no better one is needed."""
        if not self._takes_any and _doubtful(data, self._suspects):
            is_first = self.best is None and self._second_best is None
            self._second_best = self._second_best or data
            return is_first
        self.best = self.best or data
        return True

    def decide(self) -> TopicRouteData:
        data = self.best or self._second_best
        if data is not None:
            return data
        if self.unknown_at:
            raise NoRouteError(self.topic, self.unknown_at)
        if self.refusal is not None:
            raise self.refusal
        raise NoNameServerError(self.failures)


def _doubtful(data: TopicRouteData, suspects: Collection[str]) -> bool:
    """Whether some broker group's master is missing or suspect: another server may know the new
    one."""
    masters = [b.broker_addrs.get(MASTER_ID) for b in data.broker_datas]
    return not masters or any(address is None or address in suspects for address in masters)
