"""The listener of a push consumer: its arguments, its result, and how it is called."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from batonmq.client.consumer.member_stats import MemberStats
from batonmq.client.errors import ArgumentError
from batonmq.client.failures import Failures
from batonmq.client.hooks import ConsumeCall, Hook, HookCalls
from batonmq.protocol.message import MessageExt, MessageQueue
from batonmq.runtime.clock import boot_ms


class ConsumeStatus(Enum):
    """The result of a listener call; None means `SUCCESS`.

    Any other result, or an exception, counts as `RECONSUME_LATER`."""

    SUCCESS = "SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"


@dataclass(slots=True)
class ConsumeContext:
    """The second argument of a listener call; the listener may set its fields.

    `delay_level`: after RECONSUME_LATER: 0: the broker chooses by the number of tries; 1 to 18:
    that delay level; -1: straight to the dead-letter queue. `ack_index`: on SUCCESS, the index of
    the last consumed message of the batch; None: all (concurrent listeners only)."""

    queue: MessageQueue
    delay_level: int = 0
    ack_index: int | None = None


ListenerReply = ConsumeStatus | None
Listener = Callable[
    [Sequence[MessageExt], ConsumeContext], ListenerReply | Awaitable[ListenerReply]
]
"""`listener(messages, context)`: a coroutine function runs on the loop, a plain one in a thread."""


class ListenerCall:
    """Runs a coroutine function on the loop, a plain function in a thread."""

    def __init__(
        self,
        group: str,
        listener: Listener,
        threads: int,
        stats: MemberStats,
        hook: Hook | None = None,
    ) -> None:
        self._group = group
        self._stats = stats
        self._watch = None if hook is None else HookCalls(hook)
        self._failures = Failures("listener_failed")
        self._listener = listener
        self._callers: set[asyncio.Task[Any] | None] = set()
        call = getattr(listener, "__call__", None)  # noqa: B004 - the method, not callability
        self.on_loop = inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(call)
        self._threads = (
            None
            if self.on_loop
            else ThreadPoolExecutor(threads, thread_name_prefix=f"consume-{group}")
        )

    async def __call__(
        self, messages: Sequence[MessageExt], context: ConsumeContext
    ) -> ConsumeStatus:
        # Before the call: the listener may set any field of its context.
        began_ms, topic = boot_ms(), context.queue.topic
        caller = asyncio.current_task()
        self._callers.add(caller)
        try:
            status = await self._status(messages, context)
        finally:
            self._callers.discard(caller)
        now_ms, failed = boot_ms(), status is not ConsumeStatus.SUCCESS
        self._stats.consumed(topic, len(messages), now_ms - began_ms, now_ms, failed=failed)
        return status

    @property
    def is_called_by_this_task(self) -> bool:
        """Whether a listener call of this task is under way: it is a listener that asks."""
        return asyncio.current_task() in self._callers

    async def _status(
        self, messages: Sequence[MessageExt], context: ConsumeContext
    ) -> ConsumeStatus:
        try:
            if self._watch is None:
                return await self._called(messages, context)
            call = ConsumeCall(self._group, context.queue, messages)
            with self._watch.consuming(call):
                status = await self._called(messages, context)
                call.succeeded = status is ConsumeStatus.SUCCESS
            return status
        except BaseException as error:
            if _ends_the_task(error):
                raise
            at = messages[0].queue_offset
            self._failures.note(error, f"group={self._group} queue={context.queue} offset={at}")
            return ConsumeStatus.RECONSUME_LATER

    async def _called(
        self, messages: Sequence[MessageExt], context: ConsumeContext
    ) -> ConsumeStatus:
        # A copy: a listener may take messages out of its list, and which ones were consumed is read
        # from ours afterwards.
        given = list(messages)
        if self._threads is None:
            reply = self._listener(given, context)
        else:
            call = partial(copy_context().run, self._in_thread, given, context)
            reply = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        status = await reply if inspect.isawaitable(reply) else reply
        if status is not None and not isinstance(status, ConsumeStatus):
            statuses = "None, ConsumeStatus.SUCCESS and ConsumeStatus.RECONSUME_LATER"
            raise ArgumentError("the listener's reply", status, f"{statuses} are allowed")
        if context.ack_index is not None and not isinstance(context.ack_index, int):
            raise ArgumentError("ack_index", context.ack_index, "None and an index are allowed")
        return status or ConsumeStatus.SUCCESS

    def _in_thread(self, messages: list[MessageExt], context: ConsumeContext) -> Any:
        try:
            return self._listener(messages, context)
        except StopIteration as error:  # no future takes it: its waiter would wait without end
            raise RuntimeError("the listener raised StopIteration") from error

    def close(self) -> None:
        """Stops the threads; calls in progress end by themselves."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _ends_the_task(error: BaseException) -> bool:
    """Whether an error ends more than the listener call that raised it."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        # As in any thread of Python: beside the main one it ends no program. It would only end the
        # loop of all blocking clients, and their calls would wait without end.
        return threading.current_thread() is threading.main_thread()
    # A CancelledError may be the listener's own: it awaited a task that was cancelled.
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
