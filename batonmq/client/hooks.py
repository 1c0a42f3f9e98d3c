"""Seeing sends, receptions and processing, as tracing does: `ClientOptions(hook=...)`.

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
    """One send of a producer. A hook may put other messages in the place of `messages`, with more
    properties, say; the caller's own stay as they are. The rest is set once the send is answered:
    not after an error, and not of a oneway send. `msg_id` is a comma list for a batch."""

    group: str
    messages: Sequence[Message]
    queue: MessageQueue | None = None
    msg_id: str = ""
    acknowledged: bool = False


@dataclass(frozen=True, slots=True)
class Reception:
    """Messages of one topic that a call of `poll`, `pull` or `receive` returns, at least one. It
    began at `began_ms` of the wall clock."""

    group: str
    topic: str
    messages: Sequence[MessageExt]
    began_ms: int


@dataclass(slots=True)
class ConsumeCall:
    """One call of a listener, or a block of `processing`. `succeeded` is set when the listener has
    returned SUCCESS, or the block has ended without an error."""

    group: str
    queue: MessageQueue
    messages: Sequence[MessageExt]
    succeeded: bool = False


class Hook(Protocol):
    """`received` is a notice. What the others return is entered before the step, and left after it,
    with its error if it failed: of a send after all tries. All of it runs on the loop, but for
    blocking clients, so it must be quick: what takes long or blocks belongs in a thread of its own.
    It cannot change what becomes of a step: an error that it raises is logged and passed over, one
    of the step is raised even if the hook swallows it."""

    def sending(self, call: SendCall) -> AbstractContextManager[object]: ...

    def received(self, reception: Reception) -> None: ...

    def consuming(self, call: ConsumeCall) -> AbstractContextManager[object]: ...


_Enter = Callable[[], AbstractContextManager[object]]


class HookCalls:
    """The steps of one producer or consumer under its hook, whose errors end here."""

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
    """Yields whether the hook was entered."""

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
            if raised is not error:
                self._failed(raised)
