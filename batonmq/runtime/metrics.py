"""`/metrics`, `/livez` and `/readyz` of a server process, over HTTP.

A page is built in slices on the loop, one at a time and at most one a second, so neither a large
cluster nor frequent requests delay sends. Collectors read what the services keep anyway; only the
waiting time of sends is counted for them. Names are RocketMQ 5's where it has one (as in its
Prometheus exporter, with the unit), else `batonmq_…`. Origin: BrokerMetricsManager and
BatchSplittingMetricExporter in Java; Prometheus text format 0.0.4.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import resource as limits
import socket
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import ClassVar, Final, Literal, Protocol

import msgspec

from batonmq.runtime.clock import boot_s, wall_ms
from batonmq.runtime.extras import lacking
from batonmq.runtime.section import Ranges, Section
from batonmq.runtime.turns import Pace

log = logging.getLogger(__name__)

Kind = Literal["counter", "gauge", "histogram"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
CONNECTIONS_MAX: Final = 32
REQUEST_MAX: Final = 8_192
"""The largest head of a request, in bytes."""
REQUEST_S: Final = 5.0
ANSWER_S: Final = 30.0
PAGE_S: Final = 1.0
"""A page is reused for so long."""
LINES_A_TURN: Final = 250
STEPS_A_TURN: Final = 25
LAG_LOOK_S: Final = 0.25
_LAG_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class MetricsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """RocketMQ's keys. Raises ValueError for a label that is not `key:value`."""

    RANGES: ClassVar[Ranges] = {
        "prom_exporter_port": (1, 65_535),
        "cardinality_limit": (1, None),  # series of one name
        "grpc_exporter_timeout_ms": (1, None),
        "grpc_exporter_interval_ms": (100, None),
    }

    exporter_type: Literal["DISABLE", "PROM", "OTLP_GRPC"] = msgspec.field(
        default="DISABLE", name="metricsExporterType"
    )
    prom_exporter_port: int = msgspec.field(default=5557, name="metricsPromExporterPort")
    prom_exporter_host: str = msgspec.field(default="127.0.0.1", name="metricsPromExporterHost")
    label: str = msgspec.field(default="", name="metricsLabel")
    cardinality_limit: int = msgspec.field(default=50_000, name="metricsOtelCardinalityLimit")
    exporter_names: bool = msgspec.field(default=False, name="metricsExporterNames")
    grpc_exporter_target: str = msgspec.field(default="", name="metricsGrpcExporterTarget")
    grpc_exporter_header: str = msgspec.field(default="", name="metricsGrpcExporterHeader")
    # RocketMQ spells these two without the s.
    grpc_exporter_timeout_ms: int = msgspec.field(
        default=3_000, name="metricGrpcExporterTimeOutInMills"
    )
    grpc_exporter_interval_ms: int = msgspec.field(
        default=60_000, name="metricGrpcExporterIntervalInMills"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.labels, self.headers
        if self.exporter_type == "OTLP_GRPC" and not self.grpc_exporter_target:
            raise ValueError(
                "metricsGrpcExporterTarget is empty: OTLP_GRPC needs the address of a collector"
            )

    @property
    def headers(self) -> list[tuple[str, str]]:
        """What every push carries."""
        found = _pairs(self.grpc_exporter_header, lambda name: name.isascii())
        if found is None or not all(text.isprintable() for pair in found for text in pair):
            # Without the value: it may be a secret.
            raise ValueError("metricsGrpcExporterHeader: key:value,key:value is allowed")
        return [(name.strip().lower(), value.strip()) for name, value in found]

    @property
    def labels(self) -> dict[str, str]:
        """The labels of every series, in addition to those of its process."""
        found = _pairs(self.label, lambda name: name.isidentifier() and name.isascii())
        if found is None:
            raise ValueError(f"metricsLabel is {self.label!r}: key:value,key:value is allowed")
        return dict(found)


def _pairs(text: str, is_name: Callable[[str], bool]) -> list[tuple[str, str]] | None:
    """Of `key:value,key:value`; None for anything else. Empty parts are left out."""
    found = []
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, colon, value = pair.partition(":")
        if not colon or not is_name(name):
            return None
        found.append((name, value))
    return found


class Histogram:
    """Counts of observations by bucket. Bounds ascend and are inclusive."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Family:
    """The series of one name on a page. They lie together, also if several are filled by turns."""

    def __init__(self, page: MetricsPage, name: str, head: str) -> None:
        self._page, self._name = page, name
        self._left = page.series_max
        self.lines = [head]

    def add(self, value: float, **labels: str) -> None:
        """Adds one series. Beyond the limit it is only counted as dropped."""
        self.add_as(label_text(labels), value)

    def add_as(self, labels: str, value: float) -> None:
        """As `add`, with prepared label text, which several families can share."""
        if self._left <= 0:
            self._page.dropped += 1
            return
        self._left -= 1
        self.line(self._name, labels, value)

    def line(self, name: str, labels: str, value: float) -> None:
        # The plus turns a bool into a number.
        self.lines.append(f"{name}{{{self._page.constant}{labels}}} {+value}\n")


class MetricsPage:
    """The text of one scrape. `constant` labels are on every series."""

    def __init__(self, constant: Mapping[str, str], series_max: int) -> None:
        self.constant = ",".join(f'{name}="{_escaped(text)}"' for name, text in constant.items())
        self.series_max = series_max
        self.dropped = 0
        self.exporter_names = False
        """Whether to add the names of rocketmq-exporter."""
        self.families: dict[str, Family] = {}
        self.pace = Pace(STEPS_A_TURN)

    def family(self, name: str, kind: Kind, what: str) -> Family:
        """Begins the family of a name; each name once."""
        assert name not in self.families, name
        family = Family(self, name, f"# HELP {name} {what}\n# TYPE {name} {kind}\n")
        self.families[name] = family
        return family

    def gauge(self, name: str, what: str, value: float, **labels: str) -> None:
        self.family(name, "gauge", what).add(value, **labels)

    def counter(self, name: str, what: str, value: float, **labels: str) -> None:
        self.family(name, "counter", what).add(value, **labels)

    def histogram(self, name: str, what: str, histogram: Histogram) -> None:
        family, below = self.family(name, "histogram", what), 0
        for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            below += count
            family.line(f"{name}_bucket", label_text({"le": str(bound)}), below)
        family.line(f"{name}_sum", "", histogram.sum)
        family.line(f"{name}_count", "", below)

    def taken(self) -> Iterator[str]:
        """The lines in order. Each is let go at once: 140,000 are not freed in one turn."""
        for family in self.families.values():
            family.lines.reverse()
            while family.lines:
                yield family.lines.pop()


@functools.cache
def _release() -> str:
    import importlib.metadata  # takes 10 ms: not at the start

    return importlib.metadata.version("batonmq")


def label_text(labels: Mapping[str, str]) -> str:
    return "".join(f',{label}="{_escaped(text)}"' for label, text in labels.items())


def _escaped(text: str) -> str:
    # Names of topics and groups never need escapes, so most texts stay as they are.
    if "\\" in text or '"' in text or "\n" in text:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return text


class MetricsSource(Protocol):
    @property
    def labels(self) -> Mapping[str, str]: ...

    async def collect(self, page: MetricsPage) -> None:
        """Adds its families to the page. Walks over tables must step `page.pace`."""

    def why_not_ready(self) -> Iterable[str]:
        """The reasons why it cannot serve yet; none if it can."""
        ...


class Metrics:
    """The metrics of one process: its own, and those of the services added by `show`. Until then it
    is not ready."""

    def __init__(self, config: MetricsConfig, node_type: str) -> None:
        self._config = config
        self._node_type = node_type
        # Read once: a page is built each second.
        self._labels = config.labels | {"node_type": node_type}
        self._sources: list[MetricsSource] = []
        self._began_s = wall_ms() / 1000
        self._loop_lag = Histogram(_LAG_BUCKETS)
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], asyncio.WriteTransport] = {}  # oldest first
        self._page: asyncio.Task[list[bytes]] | None = None
        self._page_until_s = 0.0
        self._looks: asyncio.TimerHandle | None = None
        self._push: asyncio.Task[None] | None = None

    @property
    def connections(self) -> int:
        return len(self._open)

    def show(self, source: MetricsSource) -> None:
        """Adds a service of this process; its labels are added to every series."""
        self._labels |= source.labels
        self._sources.append(source)

    async def start(self) -> None:
        """Listens and pushes, if the configuration says so. A port that is taken is logged: a
        broker without its figures is better than none."""
        config = self._config
        if config.exporter_type == "DISABLE":
            return
        if config.exporter_type == "OTLP_GRPC":
            self._begin_to_push()
        host, port = config.prom_exporter_host, config.prom_exporter_port
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=REQUEST_MAX)
        except OSError as error:
            log.error("metrics_unavailable address=%s:%d reason=%s", host, port, error.strerror)
            return
        self._look(boot_s())
        log.info("metrics_listen address=%s:%d", host, port)

    def _begin_to_push(self) -> None:
        config = self._config
        if missing := lacking("otlp"):
            log.error("metrics_not_pushed reason=it needs %s", missing)
            return
        # Without pushes no start waits for gRPC to load.
        from batonmq.runtime.otlp import push

        name = f"{socket.gethostname()}:{config.prom_exporter_port}"
        resource = {"service.name": f"batonmq-{self._node_type}", "service.instance.id": name}
        work = push(
            self.page,
            resource,
            target=config.grpc_exporter_target,
            headers=config.headers,
            interval_s=config.grpc_exporter_interval_ms / 1000,
            timeout_s=config.grpc_exporter_timeout_ms / 1000,
            began_ms=int(self._began_s * 1000),
        )
        self._push = asyncio.create_task(work, name="metrics-push")

    async def close(self) -> None:
        if self._looks is not None:
            self._looks.cancel()
        if self._server is not None:
            self._server.close()
        tasks = [*self._open, *(task for task in (self._page, self._push) if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _look(self, due_s: float) -> None:
        """Measures how late timers of the loop, and so all answers, are."""
        now_s = boot_s()
        self._loop_lag.observe(max(0.0, now_s - due_s))
        loop = asyncio.get_running_loop()
        self._looks = loop.call_later(LAG_LOOK_S, self._look, now_s + LAG_LOOK_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._open) >= CONNECTIONS_MAX:
                self._end_oldest()
            self._open[task] = writer.transport
            await self._serve(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client sent no request in time, or did not read the answer
        except asyncio.CancelledError:
            pass  # R58: it was ended, and asyncio would log a traceback for each cancelled task
        finally:
            self._open.pop(task, None)
            writer.transport.abort()  # R58: else what a peer does not read would stay here with it

    def _end_oldest(self) -> None:
        """The newest gets in: an orchestrator restarts a process that does not answer /livez."""
        task = next(iter(self._open))
        self._open.pop(task).abort()  # also what it does not read
        task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(REQUEST_S):
            head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.partition(b" ")
        if method in (b"GET", b"HEAD"):
            status, kind, body = await self._answer(rest.split(b" ", 1)[0].split(b"?", 1)[0])
        else:
            status, kind, body = "405 Method Not Allowed", "text/plain", [b"GET is allowed\n"]
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {sum(map(len, body))}\r\nConnection: close\r\n\r\n".encode()
        )
        async with asyncio.timeout(ANSWER_S):
            for piece in body if method != b"HEAD" else ():
                writer.write(piece)
                await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def _answer(self, path: bytes) -> tuple[str, str, list[bytes]]:
        if path == b"/metrics":
            return "200 OK", CONTENT_TYPE, await self.page()
        if path == b"/livez":  # any answer shows that the loop runs
            return "200 OK", "text/plain", [b"ok\n"]
        if path == b"/readyz":
            why = [reason for source in self._sources for reason in source.why_not_ready()]
            if not self._sources:
                why = ["it is starting"]
            reasons = "".join(f"{reason}\n" for reason in why)
            status = "503 Service Unavailable" if reasons else "200 OK"
            return status, "text/plain", [(reasons or "ok\n").encode()]
        return "404 Not Found", "text/plain", [b"/metrics, /livez and /readyz are here\n"]

    async def page(self) -> list[bytes]:
        """The text of a page, in pieces. Concurrent requests share one page."""
        if self._page is None or (self._page.done() and boot_s() >= self._page_until_s):
            self._page = asyncio.create_task(self._build(), name="metrics-page")
        return await asyncio.shield(self._page)

    async def _build(self) -> list[bytes]:
        page = MetricsPage(self._labels, self._config.cardinality_limit)
        page.exporter_names = self._config.exporter_names
        failed = 0
        for collect in (self._of_process, *(source.collect for source in self._sources)):
            try:
                await collect(page)
            except Exception:
                failed += 1
                log.exception("metrics_incomplete")
        page.gauge("batonmq_metrics_failures", "parts that are missing on this page", failed)
        page.gauge("batonmq_metrics_series_dropped", "beyond the limit of a name", page.dropped)
        pieces, lines = [], page.taken()
        while piece := "".join(islice(lines, LINES_A_TURN)):
            pieces.append(piece.encode())
            await asyncio.sleep(0)
        self._page_until_s = boot_s() + PAGE_S
        return pieces

    async def _of_process(self, page: MetricsPage) -> None:
        """Metrics of the process by the names of Prometheus' clients, and the lateness of the
        loop. Raises OSError, and RuntimeError if no thread can be started."""
        times = os.times()
        page.counter("process_cpu_seconds_total", "user and system", times.user + times.system)
        page.gauge("process_start_time_seconds", "since 1970", self._began_s)
        page.gauge(
            "process_max_fds", "allowed descriptors", limits.getrlimit(limits.RLIMIT_NOFILE)[0]
        )
        collections = page.family(
            "python_gc_collections_total", "counter", "collections by generation"
        )
        for generation, stats in enumerate(gc.get_stats()):
            collections.add(stats["collections"], generation=str(generation))
        page.histogram(
            "batonmq_loop_lag_seconds", "how late a timer of the loop was", self._loop_lag
        )
        await asyncio.sleep(0)
        # Last: they need a descriptor or a thread, and the page is most needed when none is left.
        pages = int(Path("/proc/self/statm").read_text().split()[1])  # noqa: ASYNC240  it is in memory
        page.gauge("process_resident_memory_bytes", "resident", pages * limits.getpagesize())
        page.gauge("process_open_fds", "open descriptors", len(os.listdir("/proc/self/fd")))
        if not _release.cache_info().currsize:  # it reads files for 10 ms
            await asyncio.to_thread(_release)
        page.gauge("batonmq_build_info", "always 1", 1, version=_release())
