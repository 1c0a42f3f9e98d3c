"""The metrics of a broker, for `/metrics`.

Names are RocketMQ's (docs of 5.x, with the suffixes of its Prometheus exporter) where it counts the
same. `batonmq_…` has the rest: the SyncStateSet, epochs, confirmOffset, lag of replicas, the lease.
Only the master publishes metrics of consumer groups, since sums over all members would count them
twice. Origin: BrokerMetricsManager and DefaultStoreMetricsManager in Java.
"""

import asyncio
import contextlib
from enum import IntEnum
from typing import Final

from batonmq.broker.exporter_names import ExporterNames
from batonmq.broker.group_lag import GroupLags, Lags
from batonmq.broker.service import BrokerService
from batonmq.broker.tables.consumer_offset import SEPARATOR
from batonmq.broker.write.pending_acks import WAIT_BOUNDS_MS
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.role_view import Role
from batonmq.protocol.topic_name import RETRY_PREFIX, is_system_group, is_system_topic
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.metrics import Histogram, MetricsPage, label_text
from batonmq.store.upkeep import disk_space

#: Name, field of `Lag`, help text.
_LAG: Final = (
    ("rocketmq_consumer_lag_messages", "waiting", "messages that the group has not consumed"),
    (
        "rocketmq_consumer_inflight_messages",
        "inflight",
        "of those, handed out and not acknowledged",
    ),
    ("rocketmq_consumer_ready_messages", "ready", "of those, not handed out yet"),
    (
        "rocketmq_consumer_lag_latency_milliseconds",
        "oldest_ms",
        "age of the oldest that is not consumed",
    ),
    (
        "rocketmq_consumer_queueing_latency_milliseconds",
        "oldest_ready_ms",
        "age of the oldest not handed out",
    ),
)


class BrokerMetrics:
    """The metrics of one broker (a `batonmq.runtime.metrics.MetricsSource`)."""

    def __init__(self, service: BrokerService) -> None:
        self._service = service
        self._config = service.config
        self._path = service.path
        self._tables = service.tables
        self._features = service.features
        self._status = service.status
        self._replication = service.replication
        self._lags = GroupLags(service)

    @property
    def labels(self) -> dict[str, str]:
        broker = self._config.broker
        return {"cluster": broker.broker_cluster_name, "node_id": broker.broker_name}

    def why_not_ready(self) -> list[str]:
        """Reasons as texts. None once this broker is master, or a slave in the set: only then may
        the next replica be stopped."""
        gate, store = self._path.gate, self._path.store
        if not store.is_open:
            return [self._service.endpoint.why_starting]
        if gate.role is not Role.FENCED and not store.health.has_failed:
            return list(filter(None, [self._replication.why_not_in_sync]))
        problems = self._status.problems()
        return problems or ["it has no role yet: it waits for the controllers"]

    async def collect(self, page: MetricsPage) -> None:
        if not self._path.store.is_open:
            return  # its parts do not exist yet; a start may wait long for disk space (R45)
        for collect_part in (self._of_role, self._of_store, self._of_work):
            collect_part(page)
            await asyncio.sleep(0)
        await self._of_traffic(page)
        await self._of_clients(page)
        lags: Lags = {}
        if self._path.gate.is_master:
            lags = await self._lags.measured(page.pace)
            await self._of_groups(page, lags)
        if page.exporter_names:
            await ExporterNames(self._service).collect(page, lags)
        while lags:  # freed in slices, as in `_of_groups`
            lags.popitem()
            await page.pace.step()

    def _of_role(self, page: MetricsPage) -> None:
        gate, replication = self._path.gate, self._replication
        roles = page.family("batonmq_broker_role", "gauge", "1 for the role that it has")
        for role in Role:
            roles.add(int(gate.role is role), role=role.value.lower())
        own_id = replication.broker_id()
        page.gauge("batonmq_broker_id", "its id in the group, 0 for a classic master", own_id)
        takes = gate.refusal is None and not self._path.store.appender.refusal
        page.gauge("batonmq_takes_writes", "1 if a send would be taken", takes)
        page.gauge("batonmq_master_epoch", "of the mastership it serves", gate.master_epoch)
        problems = page.family("batonmq_problem", "gauge", "1 for each, as in mqctl health")
        for problem in self._status.problems():
            problems.add(1, problem=problem.partition(":")[0])
        replication.collect(page)
        if gate.is_master:
            behind = page.family("batonmq_replica_lag_bytes", "gauge", "a connected slave lacks it")
            in_sync = page.family("batonmq_replica_in_sync", "gauge", "1 if it is in the set")
            for peer, lag, is_member in replication.slaves():
                behind.add(lag, peer=peer)
                in_sync.add(is_member, peer=peer)

    def _of_store(self, page: MetricsPage) -> None:
        store = self._path.store
        log = store.log
        page.gauge("batonmq_max_offset_bytes", "end of the log", log.max_offset)
        page.gauge("batonmq_min_offset_bytes", "begin of the log", log.min_offset)
        confirmed = store.confirm_offset
        page.gauge("batonmq_confirm_offset_bytes", "every member has all below it", confirmed)
        flush_behind = log.max_offset - log.flushed_offset
        page.gauge("rocketmq_storage_flush_behind_bytes", "written, not synced", flush_behind)
        page.gauge(
            "rocketmq_storage_dispatch_behind_bytes",
            "not in a consume queue yet",
            log.max_offset - confirmed,
        )
        with contextlib.suppress(OSError):  # the rest of the page matters more then
            used, free = disk_space(self._config.store.root)
            page.gauge("rocketmq_storage_size_bytes", "used of the file system", used)
            page.gauge("batonmq_disk_free_bytes", "free on the file system", free)
        oldest_ms = self._status.earliest_stored_ms()
        if oldest_ms > 0:
            page.gauge(
                "rocketmq_storage_message_reserve_time_milliseconds",
                "age of the oldest message",
                max(0, wall_ms() - oldest_ms),
            )
        suspect = bool(store.trust.reason)
        page.gauge("batonmq_log_suspect", "1 if the log cannot be trusted", suspect)
        scrub = store.scrub
        page.counter("batonmq_scrubbed_bytes_total", "checked in the background", scrub.bytes_total)
        page.counter("batonmq_scrub_damages_total", "found in the background", scrub.found_total)
        passed_s = scrub.passed_at_ms / 1000
        page.gauge("batonmq_scrub_passed_timestamp_seconds", "last whole pass", passed_s)
        skipped = len(store.health.bad_names)
        page.gauge("batonmq_records_skipped", "queues whose records cannot be shown", skipped)

    def _of_work(self, page: MetricsPage) -> None:
        path, broker = self._path, self._config.broker
        page.gauge("rocketmq_topic_number", "topics", len(self._tables.topics.table))
        groups = len(self._tables.groups.table)
        page.gauge("rocketmq_consumer_group_number", "consumer groups", groups)
        mark = page.family("rocketmq_processor_watermark", "gauge", "requests that wait")
        mark.add(len(path.acks) + len(path.hold), processor="send")
        page.gauge(
            "batonmq_send_capacity", "sends that may wait", broker.send_thread_pool_queue_capacity
        )
        wait = Histogram([bound / 1000 for bound in WAIT_BOUNDS_MS])
        wait.counts, wait.sum = path.acks.waits, path.acks.waited_ms_total / 1000
        page.histogram("batonmq_ack_wait_seconds", "from a write to its acknowledgement", wait)
        failed = page.family("batonmq_writes_failed_total", "counter", "written, never confirmed")
        for code, count in path.acks.failed_by_code.items():
            failed.add(count, code=_name(ResponseCode, code))
        refused = page.family("batonmq_refused_requests_total", "counter", "answered by an error")
        for (request, code), count in self._service.endpoint.server.refused.items():
            names = {"request": _name(RequestCode, request), "code": _name(ResponseCode, code)}
            refused.add(count, **names)
        held = page.family("batonmq_held_requests", "gauge", "requests that are held, by kind")
        for kind, count in self._service.housekeeping.waiting().items():
            held.add(count, kind=kind)
        oldest_s = path.acks.waited_ms(path.clock_ms()) / 1000
        page.gauge("batonmq_oldest_pending_ack_seconds", "the send that waits longest", oldest_s)
        waiting, unread = self._features.timers.backlog()
        page.gauge("rocketmq_timer_enqueue_lag", "timed messages not read yet", unread)
        page.gauge("rocketmq_timer_dequeue_lag", "timed messages that wait", waiting)
        popped = len(self._features.pop.table)
        page.gauge("batonmq_pop_in_flight_messages", "popped, not acknowledged", popped)

    async def _of_traffic(self, page: MetricsPage) -> None:
        stats, pace = self._path.stats, page.pace
        for name, counted, sizes, what in (
            ("rocketmq_messages_in_total", "TOPIC_PUT_NUMS", False, "messages stored"),
            ("rocketmq_throughput_in_total", "TOPIC_PUT_SIZE", True, "bytes stored"),
            ("rocketmq_messages_out_total", "GROUP_GET_NUMS", False, "messages read"),
            ("rocketmq_throughput_out_total", "GROUP_GET_SIZE", True, "bytes read"),
            (
                "batonmq_sent_back_total",
                "SNDBCK_PUT_NUMS",
                False,
                "messages that a group gave back",
            ),
        ):
            family = page.family(name, "counter", what)
            await asyncio.sleep(0)  # the copy of 10,000 keys gets a turn of its own
            async for key, messages, size in pace.through(stats.totals(counted)):
                topic, by_group, group = key.partition(SEPARATOR)
                labels = {"topic": topic, "is_system": _flag(is_system_topic(topic))}
                if by_group:
                    labels = _group_labels(topic, group)
                family.add(size if sizes else messages, **labels)

    async def _of_clients(self, page: MetricsPage) -> None:
        connections = page.family("rocketmq_consumer_connections", "gauge", "members of a group")
        async for name, group in page.pace.through(list(self._service.consumers.groups.items())):
            connections.add(
                len(group.members),
                consumer_group=name,
                consume_mode=group.consume_type.lower(),
                is_system=_flag(is_system_group(name)),
            )

    async def _of_groups(self, page: MetricsPage, lags: Lags) -> None:
        texts: dict[tuple[str, str], str] = {}
        async for group, topic in page.pace.through(lags):
            texts[group, topic] = label_text(_group_labels(topic, group))
        for name, field, what in _LAG:
            family = page.family(name, "gauge", what)
            async for place, lag in page.pace.through(lags.items()):
                family.add_as(texts[place], getattr(lag, field))
        while texts:  # freed in slices: to free them all at once takes a millisecond
            texts.popitem()
            await page.pace.step()


def _name(codes: type[IntEnum], code: int) -> str:
    return codes(code).name.lower() if code in set(codes) else str(code)


def _group_labels(topic: str, group: str) -> dict[str, str]:
    return {
        "topic": topic,
        "consumer_group": group,
        "is_retry": _flag(topic.startswith(RETRY_PREFIX)),
        "is_system": _flag(is_system_group(group)),
    }


def _flag(value: bool) -> str:
    return "true" if value else "false"
