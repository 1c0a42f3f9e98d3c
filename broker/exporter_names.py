"""A broker's metrics under the names of rocketmq-exporter, for dashboards such as Grafana's 14612.

`metricsExporterNames: true` adds them to the page. Unlike the exporter, which asks once a minute,
they are current. Metrics that the exporter asks of each client (`rocketmq_client_…`) are left out.
Origin: RMQMetricsCollector, MetricsCollectTask and BrokerRuntimeStats of rocketmq-exporter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from batonmq.broker.group_lag import Lag, Lags
from batonmq.broker.tables.consumer_offset import SEPARATOR
from batonmq.protocol.topic_name import DLQ_PREFIX, RETRY_PREFIX, dlq_topic
from batonmq.runtime.metrics import label_text

if TYPE_CHECKING:
    from batonmq.broker.service import BrokerService
    from batonmq.runtime.metrics import MetricsPage

_RUNTIME: Final = "rocketmq_brokeruntime_"
#: The name after `rocketmq_brokeruntime_` -> the key in the answer to GET_BROKER_RUNTIME_INFO (28).
_NUMBERS: Final = {
    "msg_put_total_today_now": "msgPutTotalTodayNow",
    "msg_gettotal_today_now": "msgGetTotalTodayNow",
    "msg_puttotal_todaymorning": "msgPutTotalTodayMorning",
    "msg_gettotal_todaymorning": "msgGetTotalTodayMorning",
    "msg_puttotal_yesterdaymorning": "msgPutTotalYesterdayMorning",
    "msg_gettotal_yesterdaymorning": "msgGetTotalYesterdayMorning",
    "dispatch_behind_bytes": "dispatchBehindBytes",
    "dispatch_maxbuffer": "dispatchMaxBuffer",
    "put_message_size_total": "putMessageSizeTotal",
    "put_message_average_size": "putMessageAverageSize",
    "putmessage_times_total": "putMessageTimesTotal",
    "putmessage_entire_time_max": "putMessageEntireTimeMax",
    "getmessage_entire_time_max": "getMessageEntireTimeMax",
    "pagecache_lock_time_mills": "pageCacheLockTimeMills",
    "earliest_message_timestamp": "earliestMessageTimeStamp",
    "start_accept_sendrequest_time": "startAcceptSendRequestTimeStamp",
    "remain_transientstore_buffer_numbs": "remainTransientStoreBufferNumbs",
    "commitlog_maxoffset": "commitLogMaxOffset",
    "commitlog_minoffset": "commitLogMinOffset",
    "commitlog_disk_ratio": "commitLogDiskRatio",
    "consumequeue_disk_ratio": "consumeQueueDiskRatio",
    "send_threadpool_queue_size": "sendThreadPoolQueueSize",
    "send_threadpoolqueue_capacity": "sendThreadPoolQueueCapacity",
    "send_threadpoolqueue_headwait_timemills": "sendThreadPoolQueueHeadWaitTimeMills",
    "pull_threadpoolqueue_size": "pullThreadPoolQueueSize",
    "pull_threadpoolqueue_capacity": "pullThreadPoolQueueCapacity",
    "pull_threadpoolqueue_headwait_timemills": "pullThreadPoolQueueHeadWaitTimeMills",
    "query_threadpoolqueue_size": "queryThreadPoolQueueSize",
    "query_threadpool_queue_capacity": "queryThreadPoolQueueCapacity",
    "query_threadpoolqueue_headwait_timemills": "queryThreadPoolQueueHeadWaitTimeMills",
}
_RATES: Final = {
    "put_tps": "putTps",
    "getfound_tps": "getFoundTps",
    "getmiss_tps": "getMissTps",
    "gettotal_tps": "getTotalTps",
    "gettransfered_tps": "getTransferedTps",
}
_PUT_TIMES: Final = (
    "0ms", "0to10ms", "10to50ms", "50to100ms", "100to200ms", "200to500ms", "500to1s", "1to2s",
    "2to3s", "3to4s", "4to5s", "5to10s", "10stomore",
)  # fmt: skip
_SIZE: Final = re.compile(r"([\d.]+) ([KMGTPE]?)i?B")


@dataclass
class ExporterNames:
    """Adds the metrics of one broker to a page; only a master has those of topics and groups."""

    service: BrokerService
    labels: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.labels = {"broker": self.service.config.broker.broker_name}

    async def collect(self, page: MetricsPage, lags: Lags) -> None:
        """Adds dead letters to `lags`."""
        self._of_runtime(page)
        self._of_broker(page)
        if self.service.path.gate.is_master:
            await self._of_topics(page)
            await self._of_groups(page, lags)

    def _of_runtime(self, page: MetricsPage) -> None:
        found, broker = self.service.status.table(), self.service.config.broker
        labels = {
            "brokerIP": broker.address,
            "brokerHost": broker.address,
            "des": found["brokerVersionDesc"],
            "boottime": found["bootTimestamp"],
            "broker_version": found["brokerVersion"],
        }

        def gauge(name: str, value: float) -> None:
            page.gauge(f"{_RUNTIME}{name}", "as rocketmq-exporter names it", value, **labels)

        for name, key in _NUMBERS.items():
            if key in found:  # of the disk: not if its file system does not tell
                gauge(name, float(found[key]))
        for name, key in _RATES.items():
            for span, rate in zip((10, 60, 600), found[key].split(), strict=True):
                gauge(f"{name}{span}", float(rate))
        times = found["putMessageDistributeTime"].split()
        for name, time in zip(_PUT_TIMES, times, strict=True):
            gauge(f"pmdt_{name}", float(time.rpartition(":")[2]))
        capacity = map(_bytes, _SIZE.findall(found.get("commitLogDirCapacity", "")))
        for name, size in zip(("total", "free"), capacity, strict=False):
            gauge(f"commitlogdir_capacity_{name}", size)
        (behind,) = map(_bytes, _SIZE.findall(found["remainHowManyDataToFlush"]))
        gauge("remain_howmanydata_toflush", behind)

    def _of_broker(self, page: MetricsPage) -> None:
        labels = {"brokerIP": self.service.config.broker.address, **self.labels}
        for name, counted in (("tps", "BROKER_PUT_NUMS"), ("qps", "BROKER_GET_NUMS")):
            shown = self.service.path.stats.shown(counted, "")
            rate = shown.stats_minute.tps if shown is not None else 0.0
            page.gauge(f"rocketmq_broker_{name}", "messages a second", rate, **labels)

    async def _of_topics(self, page: MetricsPage) -> None:
        topics, ends = self.service.tables.topics.table, self.service.store.queries
        offsets = {
            "": page.family("rocketmq_producer_offset", "gauge", "ends of its queues, summed"),
            RETRY_PREFIX: page.family("rocketmq_topic_retry_offset", "gauge", "the same"),
            DLQ_PREFIX: page.family("rocketmq_topic_dlq_offset", "gauge", "the same"),
        }
        async for topic, config in page.pace.through(list(topics.items())):
            kind = next((p for p in (RETRY_PREFIX, DLQ_PREFIX) if topic.startswith(p)), "")
            key, name = ("topic", topic) if kind != DLQ_PREFIX else ("group", topic[len(kind) :])
            end = 0
            for queue_id in range(config.read_queue_nums):
                end += max(0, ends.max_offset_in_queue(topic, queue_id))
                await page.pace.step()
            offsets[kind].add(end, **self.labels, **{key: name})
        await self._rates(page, "rocketmq_producer_tps", "TOPIC_PUT_NUMS")
        await self._rates(page, "rocketmq_producer_message_size", "TOPIC_PUT_SIZE")

    async def _rates(self, page: MetricsPage, name: str, counted: str) -> None:
        """Key -> rate per second in the last minute."""
        stats = self.service.path.stats
        family = page.family(name, "gauge", "a second in the last minute")
        async for key, _, _ in page.pace.through(stats.totals(counted)):
            topic, by_group, group = key.partition(SEPARATOR)
            shown = stats.shown(counted, key)
            if shown is not None:
                labels = {"topic": topic, "group": group} if by_group else {"topic": topic}
                family.add(shown.stats_minute.tps, **self.labels, **labels)

    async def _of_groups(self, page: MetricsPage, lags: Lags) -> None:
        for name, counted in (
            ("rocketmq_consumer_tps", "GROUP_GET_NUMS"),
            ("rocketmq_group_consume_tps", "GROUP_GET_NUMS"),
            ("rocketmq_consumer_message_size", "GROUP_GET_SIZE"),
            ("rocketmq_send_back_nums", "SNDBCK_PUT_NUMS"),
        ):
            await self._rates(page, name, counted)
        members = page.family("rocketmq_group_count", "gauge", "connected members")
        groups, producers = self.service.consumers.groups, self.service.consumers.producers
        await self._add_dead_letters(page, lags)
        names = dict.fromkeys(groups)
        async for name, _ in page.pace.through(lags):
            names[name] = None
        async for name in page.pace.through(names):
            known = groups.get(name)
            count = len(known.members) if known else 0
            members.add(count, caddr="", localaddr="", group=name)
        made = page.family("rocketmq_producer_count", "gauge", "connected producers")
        async for name, connected in page.pace.through(list(producers.items())):
            made.add(len(connected), **self.labels, group=name)
        consumed = page.family("rocketmq_consumer_offset", "gauge", "consumed, summed")
        age = page.family("rocketmq_group_get_latency_by_storetime", "gauge", "age of the oldest")
        async for (group_name, topic), lag in page.pace.through(lags.items()):
            text = label_text({**self.labels, "topic": topic, "group": group_name})
            consumed.add_as(text, lag.consumed)
            age.add_as(text, lag.oldest_ms)
        for kind, name in (("", "diff"), (RETRY_PREFIX, "retrydiff"), (DLQ_PREFIX, "dlqdiff")):
            family = page.family(f"rocketmq_group_{name}", "gauge", "messages not consumed")
            async for (group_name, topic), lag in page.pace.through(lags.items()):
                known = groups.get(group_name)
                of_one_group = topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
                if topic.startswith(kind) if kind else not of_one_group:
                    family.add(
                        lag.behind,
                        group=group_name,
                        topic=topic,
                        countOfOnlineConsumers=str(len(known.members) if known else 0),
                        msgModel="0" if known and known.message_model == "BROADCASTING" else "1",
                    )

    async def _add_dead_letters(self, page: MetricsPage, lags: Lags) -> None:
        """A group never consumes its dead letters: all of them count as behind."""
        topics, queries = self.service.tables.topics, self.service.store.queries
        names = dict[str, None]()
        async for group, _ in page.pace.through(lags):
            names[group] = None
        async for group in page.pace.through(names):
            letters = dlq_topic(group)
            if letters in topics:
                end = max(0, queries.max_offset_in_queue(letters, 0))
                lags.setdefault((group, letters), Lag(behind=end))


def _bytes(size: tuple[str, str]) -> float:
    """`("1.5", "G")` -> bytes."""
    number, unit = size
    return float(number) * 1024.0 ** ("KMGTPE".index(unit) + 1 if unit else 0)
