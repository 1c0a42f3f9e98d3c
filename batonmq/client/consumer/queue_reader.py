"""Pulls one queue of a push consumer in a loop, and passes the messages to the consume service.

It pauses while too much is unconsumed. After a failure it fetches the route and continues at its
offset, so a failover costs a few milliseconds once the new master is known. Origin:
DefaultMQPushConsumerImpl.pullMessage.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batonmq.client.consumer.member_stats import MemberStats
from batonmq.client.consumer.offset_store import OffsetStore
from batonmq.client.consumer.options import PullOptions
from batonmq.client.consumer.process_queue import ProcessQueue
from batonmq.client.consumer.pulling import PullRequest, PullResult, PullStatus, read_pull_reply
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.failover import pause_ms
from batonmq.protocol.bodies import SubscriptionData
from batonmq.protocol.codes import MASTER_ID, ResponseCode
from batonmq.protocol.errors import (
    BatonError,
    ConnectError,
    RemoteProtocolError,
    RequestTimeoutError,
    ResponseError,
)
from batonmq.protocol.message import MessageQueue
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.turns import is_set_within

log = logging.getLogger(__name__)

EXPIRED_MS = 120_000
"""Far more than a pull with all its retries takes."""
_REFUSED_PAUSE_MS = 3_000
_FLOW_CONTROL_PAUSE_MS = 20
_LOCK_PAUSE_MS = 200


@dataclass(frozen=True, slots=True)
class Reading:
    """What all readers of a consumer share. `subscription`: topic -> subscription, read before each
    pull; None ends the reader. `arrived`: called when the process queue has new messages.
    `commits`: pulls also carry the progress."""

    client: ClientInstance
    group: str
    subscription: Callable[[str], SubscriptionData | None]
    offsets: OffsetStore
    options: PullOptions
    arrived: Callable[["QueueReader"], None]
    orderly: bool
    commits: bool
    stats: MemberStats


class QueueReader:
    """When the broker moves the offset, `process_queue` is replaced by a new one."""

    def __init__(self, shared: Reading, queue: MessageQueue, start_offset: int) -> None:
        self.queue = queue
        self.process_queue = ProcessQueue(start_offset)
        self._shared = shared
        self._client = shared.client
        self._options = shared.options
        self._offsets = shared.offsets
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._flow_controlled = 0
        self._asked_ms: int | None = None
        """When the last pull began; None while flow control or a missing lock forbids one."""
        self._suggested_id = 0

    def start(self) -> None:
        # Two resets at a time: one of them has started it already.
        if self._task is None:
            self._task = self._client.spawn(self._run())

    def is_expired(self, now_ms: int) -> bool:
        """Whether it has stopped reading without a reason: its queue needs a new reader."""
        if self._task is not None and self._task.done():
            return True
        return self._asked_ms is not None and now_ms - self._asked_ms >= EXPIRED_MS

    async def stop(self) -> None:
        """Stops pulling; nothing more of this queue is consumed or committed."""
        self.process_queue.dropped = True
        await self.pause()

    async def pause(self) -> None:
        """Stops pulling; pulled messages may still be consumed."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def consumed(self) -> None:
        """Pulling may continue: the process queue shrank, or a lock was renewed."""
        self._wake.set()

    async def _run(self) -> None:
        failures = 0
        address: str | None = None
        while not self.process_queue.dropped:
            self._asked_ms = None
            await self._wait_until_allowed()
            subscription = self._shared.subscription(self.queue.topic)
            if subscription is None:
                return
            try:
                # Looked up before each pull: it costs nothing while the route is known.
                address = await self._client.routes.master(
                    self.queue.topic,
                    self.queue.broker_name,
                    failed_at=address if failures else None,
                )
                asked_ms = self._asked_ms = boot_ms()
                result = await self._pull(address, subscription)
            except ResponseError as error:
                failures += 1
                await asyncio.sleep(self._refused_pause_ms(error, failures) / 1000)
            except RemoteProtocolError as error:
                failures += 1
                if failures == 1:
                    log.error("pull_damaged reason=%s", error)
                # Another slave may have a good copy; `slave_address` takes any number.
                self._suggested_id = failures
                await asyncio.sleep(pause_ms(failures) / 1000)
            except BatonError as error:
                failures += 1
                if failures == 1:
                    log.info("pull_failed queue=%s reason=%s", self.queue, error)
                await asyncio.sleep(pause_ms(failures) / 1000)
            else:
                if failures:
                    log.info("pull_continues queue=%s address=%s", self.queue, address)
                failures = 0
                if result.messages:
                    now_ms, count = boot_ms(), len(result.messages)
                    self._shared.stats.pulled(self.queue.topic, count, now_ms - asked_ms, now_ms)
                await self._apply(result)

    def _refused_pause_ms(self, error: ResponseError, failures: int) -> int:
        if error.code == ResponseCode.FLOW_CONTROL:
            return _FLOW_CONTROL_PAUSE_MS
        if error.code in (
            ResponseCode.SYSTEM_BUSY,
            ResponseCode.SERVICE_NOT_AVAILABLE,
            ResponseCode.GO_AWAY,
            ResponseCode.SUBSCRIPTION_NOT_EXIST,
            ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ):
            return pause_ms(failures)
        log.warning("pull_refused queue=%s reason=%s", self.queue, error)
        return _REFUSED_PAUSE_MS

    async def _wait_until_allowed(self) -> None:
        while True:
            # Before the checks: a change between them and the wait wakes it at once.
            self._wake.clear()
            if self._shared.orderly and self.process_queue.locked_until_ms <= boot_ms():
                await is_set_within(self._wake, _LOCK_PAUSE_MS / 1000)
                continue
            reason = self.process_queue.flow_reason(
                self._options.limits, orderly=self._shared.orderly
            )
            if reason is None:
                return
            # A slow listener leads here after each of its messages.
            if self._flow_controlled % 1000 == 0:
                log.warning("flow_control queue=%s reason=%s", self.queue, reason)
            self._flow_controlled += 1
            await self._wake.wait()

    async def _pull(self, address: str, subscription: SubscriptionData) -> PullResult:
        suggested = self._suggested_id
        if suggested:
            self._suggested_id = 0  # back to the master, unless the slave suggests itself again
            result = await self._pull_at_slave(suggested, subscription)
            if result is not None:
                return result
        result = await self._pull_at_master(address, subscription)
        self._suggested_id = result.suggest_broker_id
        return result

    def _request(self, subscription: SubscriptionData, **more: Any) -> PullRequest:
        return PullRequest(
            group=self._shared.group,
            queue=self.queue,
            offset=self.process_queue.next_offset,
            subscription=subscription,
            max_messages=self._options.batch,
            **more,
        )

    async def _pull_at_slave(
        self, broker_id: int, subscription: SubscriptionData
    ) -> PullResult | None:
        """Pulls from the slave that the master suggested; None if the master must be asked."""
        route = await self._client.routes.get(self.queue.topic)
        address = slave_address(route.brokers.get(self.queue.broker_name, {}), broker_id)
        if address is None:
            return None
        request = self._request(subscription, read_replica=True)
        try:
            reply = await self._client.remoting.invoke(
                address, request.command(), self._options.timeout_ms
            )
            result = read_pull_reply(reply, request, address)
        except (ConnectError, RequestTimeoutError, RemoteProtocolError, ResponseError) as error:
            log.info("slave_not_read queue=%s address=%s reason=%s", self.queue, address, error)
            return None
        # Only the master can hold the pull, or say that the offset is wrong.
        if result.status is not PullStatus.FOUND:
            return None
        self._suggested_id = result.suggest_broker_id
        return result

    async def _pull_at_master(self, address: str, subscription: SubscriptionData) -> PullResult:
        options = self._options
        request = self._request(
            subscription,
            suspend_ms=options.suspend_ms,
            commit_offset=self._offsets.known(self.queue) if self._shared.commits else None,
        )
        reply = await self._client.masters.invoke_once(
            self.queue.topic,
            self.queue.broker_name,
            address,
            request.command(),
            options.timeout_ms,
            held_check_ms=options.held_check_ms,
        )
        return read_pull_reply(reply, request, address)

    async def _apply(self, result: PullResult) -> None:
        process_queue = self.process_queue
        if process_queue.dropped:
            return
        if result.status is PullStatus.OFFSET_ILLEGAL:
            self._move_to(result)
            return
        # The offset advances even without messages: a filter may skip a whole pull.
        process_queue.put(result.messages, result.next_begin_offset)
        if result.messages:
            self._shared.arrived(self)
        elif not len(process_queue):
            # All messages were filtered out, so they count as consumed.
            self._offsets.update(self.queue, process_queue.next_offset)

    async def restart_at(self, offset: int) -> None:
        """Continues at another offset; unconsumed messages are dropped."""
        await self.pause()
        # Meanwhile a rebalance may have given the queue up: its next owner reads it.
        if self.process_queue.dropped:
            return
        self._replace(offset)
        self.start()  # first: without disk space for the offset nothing would start it again
        await self._offsets.persist()

    def _replace(self, offset: int) -> None:
        old, self.process_queue = self.process_queue, ProcessQueue(offset)
        old.dropped = True
        # The lock is for the queue, whatever the offset.
        self.process_queue.locked_until_ms = old.locked_until_ms
        self._offsets.reset(self.queue, offset)

    def _move_to(self, result: PullResult) -> None:
        """The offset is outside the queue (expired, or above its end): continues where the broker
        says."""
        log.warning(
            "offset_moved queue=%s from=%d to=%d range=[%d,%d)",
            self.queue,
            self.process_queue.next_offset,
            result.next_begin_offset,
            result.min_offset,
            result.max_offset,
        )
        process_queue = self.process_queue
        # What comes next has expired; what was pulled before is still to be consumed.
        if len(process_queue) and process_queue.next_offset < result.min_offset:
            process_queue.put((), result.next_begin_offset)
            return
        self._replace(result.next_begin_offset)


def slave_address(members: Mapping[int, str], broker_id: int) -> str | None:
    """The address of the slave with this id, else with the next id, else of any, as in Java's
    client."""
    slaves = {number: address for number, address in members.items() if number != MASTER_ID}
    for number in (broker_id, broker_id + 1, *sorted(slaves)):
        if number in slaves:
            return slaves[number]
    return None
