"""`metricsExporterType: OTLP_GRPC`: the figures arrive at a collector as OTLP has them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from batonmq.runtime.metrics import Histogram, Metrics, MetricsConfig, MetricsPage
from batonmq.runtime.otlp import EXPORT, POINTS_MAX
from tests.shared.ports import free_ports

ODD = 'a "quoted"\\name\nof two lines'


class Collector(grpc.GenericRpcHandler):
    """Keeps what is pushed; `answers` may raise or wait instead."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[ExportMetricsServiceRequest] = asyncio.Queue()
        self.headers: dict[str, str] = {}
        self.answers: Callable[[Any], Any] = self.takes

    async def takes(self, context: Any) -> ExportMetricsServiceResponse:
        return ExportMetricsServiceResponse()

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        if details.method != EXPORT:
            return None
        self.headers = dict(details.invocation_metadata)

        async def export(request: ExportMetricsServiceRequest, context: Any) -> Any:
            self.came.put_nowait(request)
            return await self.answers(context)

        return grpc.unary_unary_rpc_method_handler(
            export,
            request_deserializer=ExportMetricsServiceRequest.FromString,
            response_serializer=ExportMetricsServiceResponse.SerializeToString,
        )


class Source:
    labels = {"cluster": "c", "node_id": "broker-a"}  # noqa: RUF012

    async def collect(self, page: MetricsPage) -> None:
        waits = Histogram((0.1, 1))
        for value in (0.05, 0.2, 5):
            waits.observe(value)
        page.histogram("batonmq_wait_seconds", "waits", waits)
        page.counter("rocketmq_messages_in_total", "messages stored", 7, topic=ODD)
        page.gauge("rocketmq_consumer_lag_latency_milliseconds", "age", 2.5, topic="T")
        many = page.family("batonmq_many", "gauge", "one for each queue")
        for number in range(POINTS_MAX + 5):
            many.add(number, queue=str(number))

    def why_not_ready(self) -> list[str]:
        return []


@asynccontextmanager
async def pushing(collector: Collector, **keys: Any) -> AsyncIterator[Metrics]:
    """A process that pushes ten times a second."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([collector])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    metrics = Metrics(
        MetricsConfig(
            exporter_type="OTLP_GRPC",
            prom_exporter_port=free_ports(1),
            grpc_exporter_target=f"http://127.0.0.1:{port}",
            grpc_exporter_interval_ms=100,
            **keys,
        ),
        "broker",
    )
    metrics.show(Source())
    await metrics.start()
    try:
        async with asyncio.timeout(30):
            yield metrics
    finally:
        await metrics.close()
        await server.stop(None)


def attributes(found: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in found.attributes}


async def test_what_a_page_has_arrives_in_several_requests() -> None:
    collector = Collector()
    async with pushing(collector, grpc_exporter_header="authorization:Bearer x:y,zone:east"):
        requests = [await collector.came.get(), await collector.came.get()]
    assert collector.headers["authorization"] == "Bearer x:y"
    assert collector.headers["zone"] == "east"
    named: dict[str, list[Any]] = {}
    for request in requests:
        (of_process,) = request.resource_metrics
        resource = attributes(of_process.resource)
        assert resource["service.name"] == "batonmq-broker" and resource["service.instance.id"]
        for metric in of_process.scope_metrics[0].metrics:
            named.setdefault(metric.name, []).append(metric)
    constant = {"node_type": "broker", "cluster": "c", "node_id": "broker-a"}
    many = [p.as_int for metric in named["batonmq_many"] for p in metric.gauge.data_points]
    assert many == list(range(POINTS_MAX + 5)) and len(named["batonmq_many"]) == 2
    (stored,) = named["rocketmq_messages_in_total"]
    (point,) = stored.sum.data_points
    assert (point.as_int, attributes(point)) == (7, constant | {"topic": ODD})
    assert stored.sum.is_monotonic and 0 < point.start_time_unix_nano < point.time_unix_nano
    (late,) = named["rocketmq_consumer_lag_latency"]
    assert late.unit == "milliseconds" and late.gauge.data_points[0].as_double == 2.5
    (waits,) = named["batonmq_wait_seconds"][0].histogram.data_points
    assert (list(waits.explicit_bounds), list(waits.bucket_counts)) == ([0.1, 1], [1, 1, 1])
    assert (waits.count, waits.sum, attributes(waits)) == (3, 5.25, constant)


async def test_a_collector_that_fails_costs_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    collector = Collector()

    async def fails(context: Any) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no quota")

    collector.answers = fails
    async with pushing(collector, grpc_exporter_timeout_ms=30_000):
        for _ in range(3):
            await collector.came.get()
        collector.answers = collector.takes
        for _ in range(4):  # a whole page, and the begin of the next one
            await collector.came.get()
    said = [r.getMessage() for r in caplog.records if "metrics_" in r.getMessage()]
    assert sum("reason=RESOURCE_EXHAUSTED: no quota" in line for line in said) == 1, said
    assert sum(line.startswith("metrics_pushed_again") for line in said) == 1, said


async def test_a_collector_that_hangs_holds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector()

    async def hangs(context: Any) -> None:
        await asyncio.Event().wait()

    collector.answers = hangs
    async with pushing(collector, grpc_exporter_timeout_ms=100) as metrics:
        for _ in range(2):  # the second comes when the first was given up
            await collector.came.get()
        assert await metrics.page()
    assert "reason=DEADLINE_EXCEEDED" in caplog.text


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({}, "metricsGrpcExporterTarget is empty: OTLP_GRPC needs the address of a collector"),
        ({"grpc_exporter_target": "c:1", "grpc_exporter_header": "s3cret"}, "key:value,key:value"),
        ({"grpc_exporter_target": "c:1", "grpc_exporter_header": "ä:s3cret"}, "key:value"),
    ],
)
def test_what_cannot_be_is_refused_without_a_secret(keys: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        MetricsConfig(exporter_type="OTLP_GRPC", **keys)  # type: ignore[arg-type]
    assert "s3cret" not in str(refused.value)
