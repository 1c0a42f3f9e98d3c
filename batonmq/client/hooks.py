"""Hooks that observe sends, receptions and processing, for tracing: `ClientOptions(hook=...)`.

`batonmq.otel` has a hook for OpenTelemetry. Origin: SendMessageHook, ConsumeMessageHook in Java.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

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


class Hook(Protocol):
    """`received` is only notified. The others return context managers: entered before the step,
    left after it (for a send: after all tries), with its error if it failed. Hooks run on the loop,
    except for blocking clients, so they must be quick and not block. They cannot change the outcome
    of a step: their own errors are logged and ignored, and an error of the step is raised even if
    the hook suppresses it."""

    def sending(self, call: SendCall) -> AbstractContextManager[object]: ...

    def received(self, reception: Reception) -> None: ...

    def consuming(self, call: ConsumeCall) -> AbstractContextManager[object]: ...


_Enter = Callable[[], AbstractContextManager[object]]


class HookCalls:
    """Calls the hook for one producer or consumer, and catches the hook's errors."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._failures = Failures("hook_failed")

    def sending(self, call: SendCall) -> "_HookedStep":
        return _HookedStep(lambda: self._hook.sending(call), self._failed)

    def received(self, group: str, messages: Sequence[MessageExt], began_ms: int) -> None:
        by_topic: dict[str, list[MessageExt]] = {}
        for message in messages:
            by_topic.setdefault(message.topic, []).append(message)
        for topic, some in by_topic.items():
            try:
                self._hook.received(Reception(group, topic, some, began_ms))
            except Exception as error:
                self._failed(error)

    def consuming(self, call: ConsumeCall) -> "_HookedStep":
        return _HookedStep(lambda: self._hook.consuming(call), self._failed)

    def _failed(self, error: Exception) -> None:
        self._failures.note(error, f"hook={type(self._hook).__name__}")


class _HookedStep:
    """A context manager that yields whether the hook was entered."""

    def __init__(self, enter: _Enter, failed: Callable[[Exception], None]) -> None:
        self._enter = enter
        self._failed = failed
        self._entered: AbstractContextManager[object] | None = None

    def __enter__(self) -> bool:
        try:
            manager = self._enter()
            manager.__enter__()
            self._entered = manager
        except Exception as error:
            self._failed(error)
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
            # The manager raises the step's own error again if it does not suppress it.
            if raised is not error:
                self._failed(raised)
