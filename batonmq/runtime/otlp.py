"""Pushes the figures of a process to an OpenTelemetry collector (`metricsExporterType: OTLP_GRPC`).

Each interval the page of `/metrics` becomes requests of at most POINTS_MAX points, a slice in each
turn of the loop; gRPC's own threads send them. A collector that fails or hangs costs log lines.
Names are those of RocketMQ's instruments, without the unit that Prometheus' text form appends; what
reads them from the collector often appends it again.
Origin: BrokerMetricsManager and BatchSplittingMetricExporter in Java; OTLP 1.x.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    HistogramDataPoint,
    Metric,
)

from batonmq.runtime.clock import wall_ms
from batonmq.runtime.turns import Pace

log = logging.getLogger(__name__)

EXPORT: Final = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
POINTS_MAX: Final = 1_000
"""The most points of one request: about 200 KB; collectors accept 4 MiB."""
POINTS_A_TURN: Final = 50
"""In one turn of the loop, so that no heartbeat waits for a page of many topics."""
_SERIES: Final = re.compile(r"(\w+)\{(.*)\} (\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")
_MS: Final = "_milliseconds"


async def push(
    page: Callable[[], Awaitable[list[bytes]]],
    resource: Mapping[str, str],
    *,
    target: str,
    headers: Iterable[tuple[str, str]],
    interval_s: float,
    timeout_s: float,
    began_ms: int,
) -> None:
    """Pushes once an interval until it is cancelled. `target`: `http://host:port` is plain, else
    TLS. `began_ms`: when this process began to count."""
    channel = _channel(target)
    export = channel.unary_unary(
        EXPORT, response_deserializer=ExportMetricsServiceResponse.FromString
    )
    failure = ""
    try:
        while True:
            await asyncio.sleep(interval_s)
            before, failure = failure, ""
            try:
                async for request in requests(await page(), resource, began_ms):
                    answer = await export(request, timeout=timeout_s, metadata=tuple(headers))
                    if rejected := answer.partial_success.rejected_data_points:
                        why = answer.partial_success.error_message
                        failure = f"{rejected} points were refused: {why}"
            except grpc.aio.AioRpcError as error:
                failure = f"{error.code().name}: {error.details()}"
            except Exception as error:
                # Figures are worth less than the broker: whatever a collector makes of them, the
                # next push tries again.
                failure = repr(error)
            # Once for each reason: a collector that is away for a day must not fill the log.
            if failure and failure != before:
                log.warning("metrics_not_pushed target=%s reason=%s", target, failure)
            elif before and not failure:
                log.info("metrics_pushed_again target=%s", target)
    finally:
        await channel.close()


def _channel(target: str) -> grpc.aio.Channel:
    scheme, _, rest = target.rpartition("://")
    address = rest.partition("/")[0]
    if scheme == "http":
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials())


async def requests(
    pieces: Iterable[bytes], resource: Mapping[str, str], began_ms: int
) -> AsyncIterator[bytes]:
    """The lines of a page, as serialized requests."""
    pace, batch = Pace(POINTS_A_TURN), _Batch(resource, began_ms)
    for piece in pieces:
        for line in piece.decode().splitlines():
            batch.take(line)
            if batch.points >= POINTS_MAX:
                yield batch.finished()
            await pace.step()
    yield batch.finished()


class _Batch:
    """The points of one request. What a name is (`# HELP`, `# TYPE`) stays for the next one."""

    def __init__(self, resource: Mapping[str, str], began_ms: int) -> None:
        self._resource, self._began_ns = resource, began_ms * 1_000_000
        self._now_ns = wall_ms() * 1_000_000
        self._name = self._help = self._kind = ""
        self._below = 0
        self._begin()

    def _begin(self) -> None:
        self.points = 0
        self._request = ExportMetricsServiceRequest()
        of_process = self._request.resource_metrics.add()
        for key, value in self._resource.items():
            of_process.resource.attributes.add(key=key).value.string_value = value
        self._scope = of_process.scope_metrics.add()
        self._scope.scope.name = "batonmq"
        # The next point must not be added to the request that was sent.
        self._metric: Metric | None = None
        self._histogram: HistogramDataPoint | None = None

    def finished(self) -> bytes:
        done = self._request.SerializeToString()
        self._begin()
        return done

    def take(self, line: str) -> None:
        """One line of a page."""
        if line.startswith("# HELP "):
            _, _, self._name, self._help = line.split(" ", 3)
            self._metric = self._histogram = None
        elif line.startswith("# TYPE "):
            self._kind = line.rpartition(" ")[2]
        elif found := _SERIES.fullmatch(line):
            name, labels, value = found.groups()
            if self._kind == "histogram":
                self._take_bucket(name, labels, float(value))
                return
            self.points += 1
            metric = self._of_name()
            points = metric.gauge if self._kind == "gauge" else metric.sum
            point = points.data_points.add(time_unix_nano=self._now_ns)
            if self._kind == "counter":
                point.start_time_unix_nano = self._began_ns
            if value.lstrip("-").isdecimal():
                point.as_int = int(value)
            else:
                point.as_double = float(value)
            self._label(point, labels)

    def _take_bucket(self, name: str, labels: str, value: float) -> None:
        if self._histogram is None:
            self.points += 1
            self._below = 0
            self._histogram = self._of_name().histogram.data_points.add(
                time_unix_nano=self._now_ns, start_time_unix_nano=self._began_ns
            )
        histogram = self._histogram
        if name.endswith("_bucket"):
            bound = dict(_LABEL.findall(labels))["le"]
            if bound != "+Inf":
                histogram.explicit_bounds.append(float(bound))
            # On the page a bucket includes the lower ones, in OTLP it counts alone.
            histogram.bucket_counts.append(int(value) - self._below)
            self._below = int(value)
        elif name.endswith("_sum"):
            histogram.sum = value
        else:
            # `_count` ends a series. Its labels, unlike those of a bucket, have no `le`.
            histogram.count = int(value)
            self._label(histogram, labels)
            self._histogram = None

    def _of_name(self) -> Metric:
        if self._metric is None:
            name, unit = self._name, ""
            # The page has Prometheus' spelling of RocketMQ's instruments; a collector appends the
            # unit once more.
            if name.startswith("rocketmq_") and name.endswith(_MS):
                name, unit = name.removesuffix(_MS), "milliseconds"
            elif name == "rocketmq_storage_size_bytes":
                name, unit = "rocketmq_storage_size", "bytes"
            self._metric = self._scope.metrics.add(name=name, unit=unit, description=self._help)
            if self._kind == "counter":
                self._metric.sum.is_monotonic = True
                self._metric.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
            elif self._kind == "histogram":
                self._metric.histogram.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
        return self._metric

    def _label(self, point: Any, labels: str) -> None:
        for key, value in _LABEL.findall(labels):
            if "\\" in value:
                value = _ESCAPED.sub(_unescaped, value)
            point.attributes.add(key=key).value.string_value = value


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]
