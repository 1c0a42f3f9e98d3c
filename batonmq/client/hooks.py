"""Seeing each send and each call of a listener, as tracing does: `ClientOptions(hook=...)`.

`batonmq.otel` has a hook for OpenTelemetry. Origin: SendMessageHook, ConsumeMessageHook in Java.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
    of a send after all tries. What a hook itself raises counts as an error of the step."""

    def sending(self, call: SendCall) -> AbstractContextManager[object]: ...

    def consuming(self, call: ConsumeCall) -> AbstractContextManager[object]: ...
