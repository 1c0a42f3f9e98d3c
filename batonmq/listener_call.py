"""Calling a user's listener: on the loop if it is a coroutine function, else in a thread."""

import asyncio
import inspect
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from batonmq.consume_types import ConsumeContext, ConsumeStatus, Listener
from protocol.message import MessageExt

log = logging.getLogger(__name__)


class ListenerCall:
    """An exception out of the listener is logged and counts as RECONSUME_LATER."""

    def __init__(self, group: str, listener: Listener, threads: int) -> None:
        self._group = group
        self._listener = listener
        call = getattr(listener, "__call__", None)  # noqa: B004 - the method, not callability
        self._on_loop = inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(call)
        self._threads = (
            None
            if self._on_loop
            else ThreadPoolExecutor(threads, thread_name_prefix=f"consume-{group}")
        )

    async def __call__(
        self, messages: Sequence[MessageExt], context: ConsumeContext
    ) -> ConsumeStatus:
        try:
            if self._threads is None:
                reply = self._listener(messages, context)
            else:
                loop = asyncio.get_running_loop()
                reply = await loop.run_in_executor(self._threads, self._listener, messages, context)
            status = await reply if inspect.isawaitable(reply) else reply
        except Exception:
            # Whatever a user's listener raises means the same: these messages are not consumed.
            log.exception(
                "listener_failed group=%s queue=%s offset=%d",
                self._group,
                context.queue,
                messages[0].queue_offset,
            )
            return ConsumeStatus.RECONSUME_LATER
        return status or ConsumeStatus.SUCCESS

    def close(self) -> None:
        """Lets go of the threads; calls in progress end by themselves."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
