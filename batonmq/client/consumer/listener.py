"""The listener of a push consumer: its arguments, its result, and how it is called."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from enum import Enum
from functools import partial

from batonmq.client.consumer.member_stats import MemberStats
from batonmq.client.errors import ClientError
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


class ListenerReplyError(ClientError):
    """The listener returned, or set in its context, something that is not allowed."""

    def __init__(self, what: str, value: object, allowed: str) -> None:
        super().__init__(
            f"the listener {what} {value!r}: {allowed} are allowed; its messages come again"
        )


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
        status = await self._status(messages, context)
        now_ms, failed = boot_ms(), status is not ConsumeStatus.SUCCESS
        self._stats.consumed(topic, len(messages), now_ms - began_ms, now_ms, failed=failed)
        return status

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
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # Whatever a user's listener raises, its messages count as not consumed. So does a
            # CancelledError of its own: it awaited a task that was cancelled.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
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
            loop = asyncio.get_running_loop()
            call = partial(copy_context().run, self._listener, given, context)
            reply = await loop.run_in_executor(self._threads, call)
        status = await reply if inspect.isawaitable(reply) else reply
        if status is not None and not isinstance(status, ConsumeStatus):
            statuses = "None, ConsumeStatus.SUCCESS and ConsumeStatus.RECONSUME_LATER"
            raise ListenerReplyError("returned", status, statuses)
        if context.ack_index is not None and not isinstance(context.ack_index, int):
            raise ListenerReplyError("set ack_index to", context.ack_index, "None and an index")
        return status or ConsumeStatus.SUCCESS

    def close(self) -> None:
        """Stops the threads; calls in progress end by themselves."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
