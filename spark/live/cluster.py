"""What a read needs from a running cluster: queues, their bounds, offsets by time, epochs.

`LiveCluster` is for one thread that waits for each answer (a Spark task, or the driver's planner).
Its loop runs only during a call. Free of Spark.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Self, TypeVar

import uvloop

from batonmq.client.consumer.pulling import (
    PulledRecords,
    PullRequest,
    PullStatus,
    build_subscription,
    pull_records,
)
from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.errors import NoMasterError, NoNameServerError, NoRouteError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.connections import ClientOptions
from batonmq.client.instance.failover import pause_ms
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.codes import MASTER_ID
from batonmq.protocol.errors import BatonError, ResponseError
from batonmq.protocol.message import MessageQueue
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.spark.live.offsets import DataLossError, Loss, Offsets

T = TypeVar("T")
log = logging.getLogger(__name__)

# A queue counts as ending below an offset after its master has replied so for this long: a master
# that was just replaced may still reply, and its log may be shorter than that of its successor.
LOSS_CONFIRM_MS: Final = 2_000
# How long a new master may take to show what its log holds.
SETTLE_MS: Final = 10_000
DOWN: Final = "they know no broker, or a group without a master"


class Tries:
    """Pauses between tries, ever longer ones, until `deadline_ms`."""

    def __init__(self, deadline_ms: int) -> None:
        self._deadline_ms = deadline_ms
        self._failures = 0

    async def pause(self) -> bool:
        """False, and at once, if the next try would come too late."""
        self._failures += 1
        wait_ms = pause_ms(self._failures)
        if boot_ms() + wait_ms >= self._deadline_ms:
            return False
        await asyncio.sleep(wait_ms / 1000)
        return True


class ClusterError(BatonError):
    """The cluster did not answer a request in time; the text names what, where and why."""


def lose(loss: Loss, *, fails: bool) -> None:
    """Raises DataLossError if the read is to fail by it, else logs it."""
    if fails:
        raise loss.error()
    log.warning("data_lost %s", loss)


class LiveCluster:
    """`with LiveCluster(...) as cluster`. Methods raise ClusterError after `patience_ms`."""

    def __init__(
        self,
        name_servers: Sequence[str],
        *,
        group: str,
        patience_ms: int,
        client_options: ClientOptions | None = None,
    ) -> None:
        self.group = group
        self.patience_ms = patience_ms
        # Not asyncio.Runner: its care for ctrl-C makes a text of what each run returned.
        self._loop = uvloop.new_event_loop()
        self.client = ClientInstance(list(name_servers), client_options)
        self._calls = QueueCalls(self.client)
        self.run(self.client.start())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self.run(self.client.close())
        finally:
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for it; what the client raises becomes a ClusterError."""
        began_ms = boot_ms()
        try:
            return self._loop.run_until_complete(work)
        except (ClusterError, DataLossError):
            raise
        except BatonError as error:
            at = f"cluster of name servers {', '.join(self.client.name_server_addresses)}"
            if boot_ms() - began_ms >= self.patience_ms:  # else a longer one would not help
                at += f", tried for {self.patience_ms} ms: option operationTimeout"
            raise ClusterError(f"{error} ({at})") from error

    def deadline_ms(self) -> int:
        return boot_ms() + self.patience_ms

    # -- queues and their bounds ----------------------------------------------------------------

    def routes(self, topics: Sequence[str], *, known: bool = False) -> list[TopicRoute]:
        """The routes, fetched now. `known`: the topics were there, so they are waited for."""
        deadline_ms = self.deadline_ms()
        asked = (route_of(self.client, each, deadline_ms, known=known) for each in topics)
        found = self.run(_all_of(asked))
        for route in found:
            if not route.subscribe_queues:
                raise ClusterError(
                    f"topic {route.topic} has no queue that may be read, in "
                    f"{', '.join(sorted(route.brokers)) or 'no broker group'}: its perm, see "
                    f"`mqctl topicRoute -t {route.topic}`"
                )
        return found

    def bounds(
        self, queues: Sequence[MessageQueue], *, some: bool = False, whole: bool = False
    ) -> dict[MessageQueue, tuple[int, int]]:
        """[lowest, end) of what each queue holds and shows, by its master.

        `some`: without those whose master does not answer, unless none does. `whole`: a new master
        that shows less than its log held at the time of the request is waited for.
        """
        deadline_ms = self.deadline_ms()

        async def one(queue: MessageQueue) -> tuple[int, int]:
            # A former master that holds less by now may reply to the request for the end. Only the
            # master replies to a pull at that end, and the reply has both ends.
            end = await self._calls.max_offset(queue, deadline_ms=deadline_ms)
            subscription = build_subscription(queue.topic, "*", wall_ms())
            request = PullRequest(self.group, queue, end, subscription, max_messages=1)
            answer = await pulled(self.client, request, deadline_ms)
            if not whole:
                return answer.min_offset, answer.max_offset
            shows = answer.max_offset
            end = await shown_end(self.client, self._calls, request, shows, deadline_ms)
            return answer.min_offset, end

        async def every() -> dict[MessageQueue, tuple[int, int]]:
            answers = await asyncio.gather(*map(one, queues), return_exceptions=True)
            pairs = zip(queues, answers, strict=True)
            there = {queue: ends for queue, ends in pairs if isinstance(ends, tuple)}
            for answer in answers:
                if isinstance(answer, BaseException) and not (
                    some and there and isinstance(answer, BatonError)
                ):
                    raise answer
            return there

        return self.run(every())

    def offsets_by_time(self, queues: Sequence[MessageQueue], time_ms: int) -> Offsets:
        """The first offset of each queue stored at or after a wall-clock time."""
        deadline_ms = self.deadline_ms()
        asked = (
            self._calls.offset_by_time(queue, time_ms, deadline_ms=deadline_ms) for queue in queues
        )
        return dict(zip(queues, self.run(_all_of(asked)), strict=True))

    def shortfall(self, queue: MessageQueue, offset: int) -> tuple[int, int] | None:
        """[low, high) that a queue holds if it ends below `offset`, and stays so; else None.

        A new master shows less for a moment than its log holds: that is no shortfall.
        """
        return self.run(shortfall(self.client, self.group, queue, offset, self.deadline_ms()))

    def epochs(self, queue: MessageQueue, log_end: int) -> tuple[EpochEntry, ...]:
        """The epochs of a queue's log, which are right below `log_end`; none outside controller
        mode. `log_end`: an end of bytes that consumers saw, so no master can lack them for long."""
        topic, broker = queue.topic, queue.broker_name
        deadline_ms = self.deadline_ms()

        async def fetched() -> tuple[EpochEntry, ...]:
            tries = Tries(deadline_ms)
            while cache := await self._calls.epochs(topic, broker, deadline_ms=deadline_ms):
                if cache.max_offset >= log_end:
                    return tuple(
                        EpochEntry(each.epoch, each.start_offset, each.end_offset)
                        for each in cache.epoch_list
                    )
                if not await tries.pause():
                    why = f"its log ends at {cache.max_offset}, below {log_end}"
                    raise NoMasterError(broker, why)
                # A master that was replaced answers with a log that lacks them.
                await self.client.routes.refresh(topic, deadline_ms=deadline_ms)
            return ()

        return self.run(fetched())


async def _all_of(asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    return list(await asyncio.gather(*asked))


async def route_of(
    client: ClientInstance, topic: str, deadline_ms: int, *, known: bool = False
) -> TopicRoute:
    """The route, fetched now. Raises NoRouteError, NoNameServerError.

    A topic that is not there is waited for if it is `known`, or if its brokers may be starting.
    """
    tries, unknown = Tries(deadline_ms), 0
    while True:
        try:
            return await client.routes.refresh(topic, deadline_ms=deadline_ms)
        except (NoRouteError, NoNameServerError) as error:
            missing = isinstance(error, NoRouteError)
            down = missing and await is_down(client, deadline_ms)
            # Two requests: its brokers may have registered between them.
            unknown = unknown + 1 if missing and not down else 0
            hopeless = not known and unknown > 1
            if hopeless or not await tries.pause():
                if down:
                    hint = f"{DOWN}, see `mqctl health`"
                    raise NoRouteError(topic, client.name_server_addresses, hint) from error
                raise


async def is_down(client: ClientInstance, deadline_ms: int) -> bool:
    """Whether some broker group has no master, or none is known at all, as while all of its
    brokers start: an unknown topic is then no proof that there is none."""
    try:
        info = await client.name_servers.cluster_info(deadline_ms=deadline_ms)
    except NoNameServerError:
        return True
    except ResponseError:
        return False
    groups = info.broker_addr_table
    return not groups or any(MASTER_ID not in group.broker_addrs for group in groups.values())


async def pulled(client: ClientInstance, request: PullRequest, deadline_ms: int) -> PulledRecords:
    """As `pull_records`; the topic was there, so it is waited for if no name server has it."""
    tries = Tries(deadline_ms)
    while True:
        try:
            return await pull_records(client, request, deadline_ms=deadline_ms)
        except NoRouteError:
            if not await tries.pause():
                raise


async def shown_end(
    client: ClientInstance, calls: QueueCalls, request: PullRequest, end: int, deadline_ms: int
) -> int:
    """The end of a queue once it shows what its master's log holds now. `end`: what it shows now.

    A new master shows less for a moment, and what it does not show may have been acknowledged. This
    waits SETTLE_MS at most: consumers may not have what no replica confirms.
    """
    tries = Tries(min(boot_ms() + SETTLE_MS, deadline_ms))
    low = await calls.max_offset(request.queue, committed=False, deadline_ms=deadline_ms)
    if low <= end:
        return end
    while True:
        answer = await pulled(client, replace(request, offset=low), deadline_ms)
        if answer.max_offset >= low:
            return answer.max_offset
        if answer.status is PullStatus.OFFSET_ILLEGAL:  # another master never had them
            low = answer.max_offset
            continue
        if not await tries.pause():
            log.warning("not_confirmed queue=%s from=%d to=%d", request.queue, end, low)
            return answer.max_offset


async def shortfall(
    client: ClientInstance, group: str, queue: MessageQueue, offset: int, deadline_ms: int
) -> tuple[int, int] | None:
    """See `LiveCluster.shortfall`. Raises what a pull raises."""
    subscription = build_subscription(queue.topic, "*", wall_ms())
    request = PullRequest(group, queue, offset, subscription, max_messages=1)
    believed_ms = boot_ms() + LOSS_CONFIRM_MS
    tries = 0
    while True:
        answer = await pulled(client, request, deadline_ms)
        if answer.status is not PullStatus.OFFSET_ILLEGAL or offset <= answer.max_offset:
            return None
        if boot_ms() >= min(believed_ms, deadline_ms):
            return answer.min_offset, answer.max_offset
        tries += 1
        await asyncio.sleep(pause_ms(tries) / 1000)
        await client.routes.refresh(queue.topic, deadline_ms=deadline_ms)
