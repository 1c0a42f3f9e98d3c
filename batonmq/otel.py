"""OpenTelemetry: spans of sends, receptions and processing, joined across processes.

    hook = OpenTelemetryHook()
    Producer("group", client_options=ClientOptions(hook=hook))

The context travels in the message's properties, by default as W3C's `traceparent`. A `process` span
is the call of a push consumer's listener, or what another consumer's program does `with
consumer.processing(message)`: of one message it is a child of its send, of several it has links to
all of them. A `receive` span is a `poll`, `pull` or `receive` that returned messages, with links to
their sends. Names and attributes follow OpenTelemetry's conventions for messaging. Needs `pip
install 'batonmq[otel]'`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from batonmq.client.hooks import ConsumeCall, Reception, SendCall
from batonmq.protocol.message import Message, MessageExt
from batonmq.runtime.extras import lacking

try:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode
except ImportError as error:
    raise ImportError(f"batonmq.otel needs {lacking('otel')}") from error


class OpenTelemetryHook:
    """For `ClientOptions(hook=...)`; one may serve all clients of a process."""

    def __init__(self, tracer_provider: trace.TracerProvider | None = None) -> None:
        """`tracer_provider`: by default the global one."""
        self._tracer = trace.get_tracer("batonmq", tracer_provider=tracer_provider)

    @contextmanager
    def sending(self, call: SendCall) -> Iterator[SendCall]:
        topic = call.messages[0].topic
        with self._tracer.start_as_current_span(
            f"send {topic}",
            kind=SpanKind.PRODUCER,
            attributes=_attributes("send", topic, call.group, call.messages),
        ) as span:
            # Within the span: it is what consumers see as their sender.
            carrier: dict[str, str] = {}
            propagate.inject(carrier)
            # Copies: the caller may send its message again, and that is another span.
            call.messages = [
                replace(message, properties=message.properties | carrier)
                for message in call.messages
            ]
            yield call
            # None for a one-way send, and for a failed one, whose exception the span has.
            if call.queue is not None:
                span.set_attribute("messaging.message.id", call.msg_id)
                span.set_attribute("messaging.destination.partition.id", str(call.queue))
                if not call.acknowledged:
                    span.set_status(Status(StatusCode.ERROR, "stored, not acknowledged"))

    def received(self, reception: Reception) -> None:
        messages, topic = reception.messages, reception.topic
        self._tracer.start_span(
            f"receive {topic}",
            kind=SpanKind.CLIENT,
            links=_links(_senders(messages)),
            attributes=_attributes("receive", topic, reception.group, messages),
            start_time=reception.began_ms * 1_000_000,
        ).end()  # it is reported after the fact: it has ended

    @contextmanager
    def consuming(self, call: ConsumeCall) -> Iterator[ConsumeCall]:
        topic = call.messages[0].topic
        senders = _senders(call.messages)
        is_one = len(senders) == 1
        attributes = _attributes("process", topic, call.group, call.messages)
        attributes["messaging.destination.partition.id"] = str(call.queue)
        attributes["messaging.message.id"] = ",".join(m.uniq_key for m in call.messages)
        with self._tracer.start_as_current_span(
            f"process {topic}",
            context=senders[0] if is_one else None,
            kind=SpanKind.CONSUMER,
            links=() if is_one else _links(senders),
            attributes=attributes,
        ) as span:
            yield call
            if not call.succeeded:
                span.set_status(Status(StatusCode.ERROR, "to be consumed again"))


def _senders(messages: Sequence[MessageExt]) -> list[Context]:
    # From an empty context: the one of this moment is of whoever polls.
    return [propagate.extract(message.properties, Context()) for message in messages]


def _links(contexts: list[Context]) -> list[Link]:
    spans = [trace.get_current_span(context).get_span_context() for context in contexts]
    # Of a message without a context, as from a client that traces nothing, the span is not valid.
    return [Link(span) for span in spans if span.is_valid]


def _attributes(
    operation: str, topic: str, group: str, messages: Sequence[Message] | Sequence[MessageExt]
) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "messaging.system": "rocketmq",
        "messaging.operation.type": operation,
        "messaging.operation.name": operation,
        "messaging.destination.name": topic,
        "messaging.rocketmq.client_group": group,
        "messaging.message.body.size": sum(len(message.body) for message in messages),
    }
    if len(messages) > 1:
        found["messaging.batch.message_count"] = len(messages)
    elif messages[0].tags:
        found["messaging.rocketmq.message.tag"] = messages[0].tags
    return found
