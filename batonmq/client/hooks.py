"""Hooks that observe sends, receptions and processing, for tracing: `ClientOptions(hook=...)`.

`batonmq.otel` has a hook for OpenTelemetry. Origin: SendMessageHook, ConsumeMessageHook in Java.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from batonmq.client.failures import Failures
from batonmq.protocol.message import Message, MessageExt, MessageQueue


@dataclass(slots=True)
class SendCall:
    """One send of a producer. A hook may replace `messages`, to add properties, say; the caller's
    own objects do not change. The other fields are set once the send is answered: not after an
    error, nor for a oneway send. `msg_id` is a comma list for a batch."""

    group: str
    messages: Sequence[Message]
    queue: MessageQueue | None = None
    msg_id: str = ""
    acknowledged: bool = False


@dataclass(frozen=True, slots=True)
class Reception:
    """At least one message of one topic that a call of `poll`, `pull` or `receive` returns. The
    call began at `began_ms` (wall clock)."""

    group: str
    topic: str
    messages: Sequence[MessageExt]
    began_ms: int


@dataclass(slots=True)
class ConsumeCall:
    """One listener call, or one block of `processing`. `succeeded` is set if the listener returned
    SUCCESS or the block ended without an error."""

    group: str
    queue: MessageQueue
    messages: Sequence[MessageExt]
    succeeded: bool = False


@runtime_checkable
class Hook(Protocol):
    """Hooks run on the loop, except for blocking clients, so they must be quick and not block. They
    cannot change the outcome of a step: their own errors are logged and ignored, and an error of
    the step is raised even if the hook suppresses it."""

    def sending(self, call: SendCall) -> AbstractContextManager[object]:
        """Entered before the first try, left after the last one, with its error if all failed."""

    def received(self, reception: Reception) -> None:
        """Called before the messages are returned."""

    def consuming(self, call: ConsumeCall) -> AbstractContextManager[object]:
        """Entered before the listener call or the block of `processing`, left after it, with its
        error if it failed."""


class HookCalls:
    """Calls the hook for one producer or consumer, and catches the hook's errors."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._failures = Failures("hook_failed")

    def sending(self, call: SendCall) -> AbstractContextManager[bool]:
        return self._step(lambda: self._hook.sending(call))

    def received(self, group: str, messages: Sequence[MessageExt], began_ms: int) -> None:
        by_topic: dict[str, list[MessageExt]] = {}
        for message in messages:
            by_topic.setdefault(message.topic, []).append(message)
        for topic, some in by_topic.items():
            try:
                self._hook.received(Reception(group, topic, some, began_ms))
            except Exception as error:
                self._failed(error)

    def consuming(self, call: ConsumeCall) -> AbstractContextManager[bool]:
        return self._step(lambda: self._hook.consuming(call))

    @contextmanager
    def _step(self, enter: Callable[[], AbstractContextManager[object]]) -> Iterator[bool]:
        """Yields whether the hook was entered."""
        manager: AbstractContextManager[object] | None = None
        try:
            entering = enter()
            entering.__enter__()
            manager = entering  # only now: what was not entered must not be left
        except Exception as error:
            self._failed(error)
        try:
            yield manager is not None
        except BaseException as error:
            self._leave(manager, error)
            raise  # also if the hook suppresses it
        self._leave(manager, None)

    def _leave(
        self, manager: AbstractContextManager[object] | None, error: BaseException | None
    ) -> None:
        if manager is None:
            return
        trace = None if error is None else error.__traceback__
        try:
            manager.__exit__(None if error is None else type(error), error, trace)
        except Exception as raised:
            # A manager raises the step's own error again if it does not suppress it.
            if raised is not error:
                self._failed(raised)

    def _failed(self, error: Exception) -> None:
        self._failures.note(error, f"hook={type(self._hook).__name__}")
