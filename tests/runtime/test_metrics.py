"""The pages of `/metrics`, `/livez` and `/readyz`, read by Prometheus' own parser."""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from batonmq.runtime.metrics import (
    CONNECTIONS_MAX,
    Histogram,
    Metrics,
    MetricsConfig,
    MetricsPage,
    _release,
)
from tests.shared.no_threads import no_new_threads
from tests.shared.ports import free_ports

ODD = 'a "quoted"\\name\nof two lines'


class Source:
    def __init__(self) -> None:
        self.labels = {"cluster": "c"}
        self.missing: list[str] = []
        self.collects: Callable[[MetricsPage], Awaitable[None]] = self.nothing
        self.calls = 0

    async def nothing(self, page: MetricsPage) -> None:
        page.gauge("batonmq_calls", "of this source", self.calls)

    async def collect(self, page: MetricsPage) -> None:
        self.calls += 1
        await self.collects(page)

    def why_not_ready(self) -> Iterable[str]:
        return self.missing


def config(**keys: Any) -> MetricsConfig:
    return MetricsConfig(exporter_type="PROM", prom_exporter_port=free_ports(1), **keys)


@asynccontextmanager
async def serving(metrics: Metrics) -> AsyncIterator[None]:
    await metrics.start()
    try:
        yield
    finally:
        await metrics.close()


async def ask(settings: MetricsConfig, request: bytes) -> tuple[bytes, bytes]:
    """The first line of the answer, and its body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", settings.prom_exporter_port)
    writer.write(request)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head.split(b"\r\n")[0], body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def samples(page: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def test_a_page_is_what_prometheus_reads() -> None:
    settings, source = config(label="zone:east, rack:7"), Source()
    metrics = Metrics(settings, "broker")
    metrics.show(source)
    waits = Histogram((0.1, 1))
    for value in (0.1, 0.2, 5):
        waits.observe(value)

    async def collects(page: MetricsPage) -> None:
        page.gauge("batonmq_flag", "a bool", True)
        page.family("batonmq_named", "gauge", "odd names").add(2, topic=ODD)
        page.histogram("batonmq_wait_seconds", "waits", waits)
        one, two = (page.family(name, "gauge", "of two") for name in ("batonmq_one", "batonmq_two"))
        for number in range(2):  # by turns: on the page the series of a name lie together
            one.add(number, at=str(number))
            two.add(number, at=str(number))

    source.collects = collects
    async with serving(metrics):
        status, body = await ask(settings, get("/metrics?x=1"))
        assert status == b"HTTP/1.1 200 OK"
        found = samples(body)
        constant = {"zone": "east", "rack": "7", "node_type": "broker", "cluster": "c"}
        assert found["batonmq_flag"] == [(constant, 1)]
        assert found["batonmq_named"] == [(constant | {"topic": ODD}, 2)]
        assert [value for _, value in found["batonmq_wait_seconds_bucket"]] == [1, 2, 3]
        assert found["batonmq_wait_seconds_count"] == [(constant, 3)]
        assert found["batonmq_metrics_failures"] == [(constant, 0)]
        assert found["process_open_fds"][0][1] > 3
        typed = list(text_string_to_metric_families(body.decode()))
        assert len(typed) == len({family.name for family in typed})


async def test_a_page_without_a_free_descriptor_lacks_only_what_needs_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(os, "listdir", Mock(side_effect=full))
    source = Source()
    metrics = Metrics(config(), "broker")
    metrics.show(source)

    async def collects(page: MetricsPage) -> None:
        page.gauge("batonmq_flag", "a bool", True)

    source.collects = collects

    found = samples(b"".join(await metrics.page()))
    assert {"batonmq_flag", "batonmq_loop_lag_seconds_count"} <= found.keys()
    assert found["batonmq_metrics_failures"][0][1] == 1
    assert "process_open_fds" not in found


async def test_a_page_of_a_process_that_can_start_no_thread_lacks_the_version_only() -> None:
    _release.cache_clear()
    metrics = Metrics(config(), "broker")

    with no_new_threads():
        found = samples(b"".join(await metrics.page()))
    assert {"process_open_fds", "batonmq_loop_lag_seconds_count"} <= found.keys()
    assert found["batonmq_metrics_failures"][0][1] == 1
    assert "batonmq_build_info" not in found


async def test_live_and_ready() -> None:
    settings, source = config(), Source()
    metrics = Metrics(settings, "broker")
    async with serving(metrics):
        assert await ask(settings, get("/livez")) == (b"HTTP/1.1 200 OK", b"ok\n")
        status, body = await ask(settings, get("/readyz"))
        assert status == b"HTTP/1.1 503 Service Unavailable" and body == b"it is starting\n"
        metrics.show(source)
        source.missing = ["no role", "no master"]
        status, body = await ask(settings, get("/readyz"))
        assert status == b"HTTP/1.1 503 Service Unavailable" and body == b"no role\nno master\n"
        source.missing = []
        assert await ask(settings, get("/readyz")) == (b"HTTP/1.1 200 OK", b"ok\n")
        assert (await ask(settings, get("/else")))[0] == b"HTTP/1.1 404 Not Found"
        post = b"POST /metrics HTTP/1.1\r\n\r\n"
        assert (await ask(settings, post))[0] == b"HTTP/1.1 405 Method Not Allowed"
        head = b"HEAD /livez HTTP/1.1\r\n\r\n"
        assert await ask(settings, head) == (b"HTTP/1.1 200 OK", b"")


async def test_r58_whoever_asks_often_gets_the_same_page() -> None:
    settings, source = config(), Source()
    metrics = Metrics(settings, "broker")
    metrics.show(source)
    async with serving(metrics):
        pages = await asyncio.gather(*(ask(settings, get("/metrics")) for _ in range(8)))
        assert len({body for _, body in pages}) == 1
        assert source.calls == 1


async def test_r58_connections_that_say_nothing_keep_no_probe_out() -> None:
    settings = config()
    metrics = Metrics(settings, "broker")
    async with serving(metrics):
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
        address = ("127.0.0.1", settings.prom_exporter_port)
        silent = [await asyncio.open_connection(*address) for _ in range(CONNECTIONS_MAX)]
        assert (await ask(settings, get("/livez")))[1] == b"ok\n"
        assert await silent[0][0].read() == b"", "the oldest made room"
        assert metrics.connections < CONNECTIONS_MAX
        too_long = b"GET /" + b"x" * 20_000
        for _, other in silent:
            other.close()
        while metrics.connections:  # noqa: ASYNC110  it sets no event
            await asyncio.sleep(0)
        assert await ask(settings, too_long) == (b"", b"")
        assert (await ask(settings, get("/livez")))[1] == b"ok\n"
        assert not errors


async def test_r58_who_does_not_read_the_page_keeps_no_socket_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = config()
    metrics = Metrics(settings, "broker")

    async def page() -> list[bytes]:
        return [b"x" * 65_536] * 200  # more than the kernel takes

    monkeypatch.setattr(metrics, "page", page)
    monkeypatch.setattr("batonmq.runtime.metrics.ANSWER_S", 0.01)
    async with serving(metrics):
        before = len(os.listdir("/proc/self/fd"))
        with socket.create_connection(("127.0.0.1", settings.prom_exporter_port)) as client:
            client.sendall(get("/metrics"))
            async with asyncio.timeout(10):
                while not metrics.connections:  # noqa: ASYNC110  it sets no event
                    await asyncio.sleep(0)
                while len(os.listdir("/proc/self/fd")) > before + 1:  # noqa: ASYNC110
                    await asyncio.sleep(0)


async def test_a_name_has_a_limited_number_of_series() -> None:
    settings, source = config(cardinality_limit=3), Source()
    metrics = Metrics(settings, "broker")
    metrics.show(source)

    async def collects(page: MetricsPage) -> None:
        family = page.family("batonmq_many", "gauge", "one for each topic")
        async for number in page.pace.through(range(5)):
            family.add(number, topic=str(number))

    source.collects = collects
    async with serving(metrics):
        found = samples(b"".join(await metrics.page()))
        assert len(found["batonmq_many"]) == 3
        assert [value for _, value in found["batonmq_metrics_series_dropped"]] == [2]


async def test_a_part_that_fails_is_missed_and_the_rest_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, fine = Source(), Source()
    metrics = Metrics(config(), "broker")
    metrics.show(broken)
    metrics.show(fine)

    async def collects(page: MetricsPage) -> None:
        raise OSError("the disk is gone")

    broken.collects = collects
    async with serving(metrics):
        found = samples(b"".join(await metrics.page()))
        assert [value for _, value in found["batonmq_metrics_failures"]] == [1]
        assert found["batonmq_calls"]
        assert "the disk is gone" in caplog.text


async def test_a_port_that_is_taken_costs_the_figures_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = config()
    with socket.create_server(("127.0.0.1", settings.prom_exporter_port)):
        metrics = Metrics(settings, "broker")
        async with serving(metrics):
            assert await metrics.page()
    assert f"metrics_unavailable address=127.0.0.1:{settings.prom_exporter_port}" in caplog.text


@pytest.mark.parametrize("label", ["zone", "zone:a,1:b", "zö:x"])
def test_a_label_that_is_none_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match=r"metricsLabel is .*key:value,key:value is allowed"):
        MetricsConfig(label=label)
