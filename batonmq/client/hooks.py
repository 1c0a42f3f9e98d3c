"""Seeing each send and each call of a listener, as tracing does: `ClientOptions(hook=...)`.

`batonmq.otel` has a hook for OpenTelemetry. Origin: SendMessageHook, ConsumeMessageHook in Java.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from batonmq.protocol.message import Message, MessageExt, MessageQueue


@dataclass(slots=True)
class SendCall:
    """One send of a producer. A hook may put other messages in the place of `messages`, with more
    properties, say; the caller's own stay as they are. The rest is set once the send is answered:
    not after an error, and not of a oneway send. `msg_id` is a comma list for a batch."""

    group: str
    messages: Sequence[Message]
    queue: MessageQueue | None = None
    msg_id: str = ""
    acknowledged: bool = False


@dataclass(slots=True)
class ConsumeCall:
    """One call of a listener. `succeeded` is set when it has returned SUCCESS."""

    group: str
    queue: MessageQueue
    messages: Sequence[MessageExt]
    succeeded: bool = False


class Hook(Protocol):
    """What it returns is entered before the step, and left after it, with its error if it failed:
    of a send after all tries. All of it runs on the loop, so it must be quick: what takes long or
    blocks belongs in a thread of its own. It cannot change what becomes of a step: an error that it
    raises is logged and passed over, one of the step goes on though it swallows it."""

    def sending(self, call: SendCall) -> AbstractContextManager[object]: ...

    def consuming(self, call: ConsumeCall) -> AbstractContextManager[object]: ...


log = logging.getLogger(__name__)

_Enter = Callable[[], AbstractContextManager[object]]


class Watch:
    """The steps of one producer or listener under its hook, whose errors end here."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._failures = 0

    def sending(self, call: SendCall) -> "_Watched":
        return _Watched(lambda: self._hook.sending(call), self._failed)

    def consuming(self, call: ConsumeCall) -> "_Watched":
        return _Watched(lambda: self._hook.consuming(call), self._failed)

    def _failed(self) -> None:
        """A broken hook fails at each step: the first error is logged whole, then at times how
        many there were."""
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            log.error(
                "hook_failed hook=%s count=%d",
                type(self._hook).__name__,
                self._failures,
                exc_info=self._failures == 1,
            )


class _Watched:
    """Yields whether the hook was entered."""

    def __init__(self, enter: _Enter, failed: Callable[[], None]) -> None:
        self._enter = enter
        self._failed = failed
        self._entered: AbstractContextManager[object] | None = None

    def __enter__(self) -> bool:
        try:
            manager = self._enter()
            manager.__enter__()
            self._entered = manager
        except Exception:
            self._failed()
        return self._entered is not None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._entered is None:
            return
        try:
            self._entered.__exit__(kind, error, trace)
        except Exception as raised:
            if raised is not error:
                self._failed()
