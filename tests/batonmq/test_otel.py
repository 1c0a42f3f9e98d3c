"""Spans of sends and of listener calls, joined by what travels in the message."""

import asyncio
import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest
from fake_cluster import TOPIC, FakeCluster, answer, one_by_one
from left_out import leave_out

from batonmq import (
    ClientOptions,
    ConsumeContext,
    ConsumeStatus,
    Message,
    MessageExt,
    MessageQueue,
    Producer,
    PullConsumer,
    SendFailedError,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.records.codec import decode_record

Q0 = MessageQueue(TOPIC, "broker-a", 0)


class Spans:
    """A hook whose spans stay here, in the order of their ends."""

    def __init__(self) -> None:
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        from batonmq.otel import OpenTelemetryHook

        self.exporter = InMemorySpanExporter()
        provider = sdk.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")
        self.client_options = ClientOptions(suspicion_ms=20, hook=OpenTelemetryHook(provider))

    def ended(self, name: str) -> list[Any]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def spans() -> Spans:
    """Skips where the package is not installed; with BATONMQ_CI=1 that is a failure."""
    if importlib.util.find_spec("opentelemetry") is None:
        leave_out("opentelemetry-sdk is not installed: make setup installs it")
    return Spans()


def producer_of(cluster: FakeCluster, spans: Spans) -> Producer:
    return Producer(
        "pg", name_servers=cluster.name_server_addresses, client_options=spans.client_options
    )


class Listener:
    """A plain function's worth: it runs in a thread, within the span."""

    def __init__(self, spans: Spans, count: int, replies: Sequence[ConsumeStatus] = ()) -> None:
        self.spans, self.count, self.replies = spans, count, list(replies)
        self.loop, self.done = asyncio.get_running_loop(), asyncio.Event()

    def __call__(self, messages: Sequence[MessageExt], _: ConsumeContext) -> ConsumeStatus:
        with self.spans.tracer.start_as_current_span("within"):
            self.count -= len(messages)
        if self.count <= 0:
            self.loop.call_soon_threadsafe(self.done.set)
        return self.replies.pop(0) if self.replies else ConsumeStatus.SUCCESS


async def consume(cluster: FakeCluster, spans: Spans, listener: Listener, batch: int = 1) -> None:
    async with one_by_one(cluster, listener, spans.client_options, batch=batch):
        await listener.done.wait()


async def test_a_message_is_one_trace_from_the_caller_to_the_listener(
    cluster: FakeCluster, spans: Spans
) -> None:
    message = Message.of(TOPIC, "hello", tags="A")
    async with producer_of(cluster, spans) as producer:
        with spans.tracer.start_as_current_span("caller"):
            sent = await producer.send(message, queue=Q0)
    assert message.properties == {"TAGS": "A"}, "the user's object stays as it was"
    stored = decode_record(cluster.groups["broker-a"].queues[TOPIC, 0][0])
    await consume(cluster, spans, Listener(spans, 1))
    (caller,), (send,) = spans.ended("caller"), spans.ended(f"send {TOPIC}")
    (process,), (within,) = spans.ended(f"process {TOPIC}"), spans.ended("within")
    trace_id = f"{caller.context.trace_id:032x}"
    joined = f"00-{trace_id}-{send.context.span_id:016x}-"
    assert stored.properties["traceparent"].startswith(joined)
    for parent, child in ((caller, send), (send, process), (process, within)):
        assert child.parent.span_id == parent.context.span_id
        assert child.context.trace_id == caller.context.trace_id
    for span, operation, group in ((send, "send", "pg"), (process, "process", "cg")):
        reported = {
            "messaging.system": "rocketmq",
            "messaging.operation.type": operation,
            "messaging.destination.name": TOPIC,
            "messaging.rocketmq.client_group": group,
            "messaging.rocketmq.message.tag": "A",
            "messaging.message.id": sent.msg_id,
            "messaging.destination.partition.id": str(Q0),
        }
        assert reported.items() <= span.attributes.items()
    assert (send.kind.name, process.kind.name) == ("PRODUCER", "CONSUMER")
    assert {send.status.status_code.name, process.status.status_code.name} == {"UNSET"}


async def test_a_batch_has_links_and_what_fails_is_an_error(
    cluster: FakeCluster, spans: Spans
) -> None:
    async with producer_of(cluster, spans) as producer:
        await producer.send_batch([Message(TOPIC, b"1"), Message(TOPIC, b"2")], queue=Q0)
        refused = answer(ResponseCode.MESSAGE_ILLEGAL, "no")
        cluster.master().before[RequestCode.SEND_MESSAGE_V2].append(refused)
        with pytest.raises(SendFailedError):
            await producer.send(Message(TOPIC, b"3"), queue=Q0)
        await producer.send_oneway(Message(TOPIC, b"4"), queue=Q0)
    batch, failed, oneway = spans.ended(f"send {TOPIC}")
    assert batch.attributes["messaging.batch.message_count"] == 2
    assert failed.status.status_code.name == "ERROR" and failed.events[0].name == "exception"
    assert "messaging.message.id" not in oneway.attributes
    later = [ConsumeStatus.RECONSUME_LATER]
    await consume(cluster, spans, Listener(spans, 3, later), batch=8)
    first = spans.ended(f"process {TOPIC}")[0]
    assert {link.context.span_id for link in first.links} <= {
        span.context.span_id for span in (batch, oneway)
    }
    assert len(first.links) == first.attributes["messaging.batch.message_count"] >= 2
    assert first.status.status_code.name == "ERROR" and first.parent is None


async def test_what_is_polled_is_received_and_processed_in_the_senders_trace(
    cluster: FakeCluster, spans: Spans
) -> None:
    async with producer_of(cluster, spans) as producer:
        for body in (b"1", b"2"):
            await producer.send(Message(TOPIC, body), queue=Q0)
    consumer = PullConsumer(
        "cg", name_servers=cluster.name_server_addresses, client_options=spans.client_options
    )
    async with consumer:
        await consumer.assign([Q0])
        polled = await consumer.poll()
        with consumer.processing(polled[0]), spans.tracer.start_as_current_span("within"):
            pass
        with pytest.raises(ValueError, match="no"), consumer.processing(polled[1]):
            raise ValueError("no")
    sends, (receive,) = spans.ended(f"send {TOPIC}"), spans.ended(f"receive {TOPIC}")
    first, second = spans.ended(f"process {TOPIC}")
    (within,) = spans.ended("within")
    assert [link.context.span_id for link in receive.links] == [
        send.context.span_id for send in sends
    ]
    assert (receive.kind.name, receive.parent) == ("CLIENT", None)
    assert receive.attributes["messaging.operation.type"] == "receive"
    assert receive.attributes["messaging.batch.message_count"] == 2
    assert receive.start_time <= receive.end_time
    for parent, child in ((sends[0], first), (sends[1], second), (first, within)):
        assert child.parent.span_id == parent.context.span_id
    assert first.status.status_code.name == "UNSET"
    assert second.status.status_code.name == "ERROR"
