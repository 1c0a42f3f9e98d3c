"""The names of rocketmq-exporter on our page, for dashboards that were made for it."""

import errno
from unittest.mock import Mock

from heartbeats import heartbeat
from lone_broker import Rig
from prometheus_client.parser import text_string_to_metric_families

from batonmq.broker.metrics import BrokerMetrics
from batonmq.protocol.bodies import KVTable
from batonmq.protocol.codes import RequestCode
from batonmq.runtime.metrics import Metrics, MetricsConfig
from batonmq.store import upkeep

#: What Grafana's dashboard 14612 (a copy of 10477, which the exporter ships) draws.
DRAWN = """
rocketmq_broker_tps rocketmq_broker_qps rocketmq_producer_tps rocketmq_producer_offset
rocketmq_producer_message_size rocketmq_consumer_tps rocketmq_consumer_offset
rocketmq_consumer_message_size rocketmq_group_get_latency_by_storetime rocketmq_group_diff
rocketmq_brokeruntime_pmdt_0ms rocketmq_brokeruntime_pmdt_10stomore
rocketmq_brokeruntime_send_threadpoolqueue_headwait_timemills
rocketmq_brokeruntime_pull_threadpoolqueue_headwait_timemills
rocketmq_brokeruntime_query_threadpoolqueue_headwait_timemills
rocketmq_brokeruntime_put_tps10 rocketmq_brokeruntime_getmiss_tps60
rocketmq_brokeruntime_gettotal_tps600 rocketmq_brokeruntime_getfound_tps10
rocketmq_brokeruntime_gettransfered_tps10 rocketmq_brokeruntime_commitlog_disk_ratio
rocketmq_brokeruntime_commitlogdir_capacity_total rocketmq_brokeruntime_commitlogdir_capacity_free
rocketmq_brokeruntime_commitlog_maxoffset rocketmq_brokeruntime_dispatch_behind_bytes
rocketmq_brokeruntime_msg_put_total_today_now rocketmq_brokeruntime_msg_gettotal_today_now
rocketmq_brokeruntime_remain_howmanydata_toflush rocketmq_brokeruntime_send_threadpool_queue_size
"""


async def page_of(rig: Rig, *, names: bool) -> dict[str, list[tuple[dict[str, str], float]]]:
    metrics = Metrics(MetricsConfig(exporter_names=names), "broker")
    metrics.show(BrokerMetrics(rig.service))
    text = b"".join(await metrics.page()).decode()
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(text)
    }


async def test_what_the_common_dashboard_draws_is_there(rig):
    for _ in range(3):
        await rig.send()
    await rig.ask(RequestCode.HEART_BEAT, body=heartbeat("c", "T").encode())
    await rig.pull(count=1)
    await rig.pull(offset=1, commit=1)
    await rig.pull(offset=1, commit=1, group="offline")
    page = await page_of(rig, names=True)
    assert page["batonmq_metrics_failures"][0][1] == 0
    assert [name for name in DRAWN.split() if not page.get(name)] == []

    def of(name: str, **labels: str) -> float:
        found = [v for at, v in page[name] if labels.items() <= at.items()]
        assert len(found) == 1, (name, page[name])
        return found[0]

    assert of("rocketmq_producer_offset", topic="T", broker="broker-a") == 3
    assert of("rocketmq_consumer_offset", topic="T", group="g") == 1
    assert of("rocketmq_group_diff", topic="T", group="g", countOfOnlineConsumers="1") == 2
    assert {at["msgModel"] for at, _ in page["rocketmq_group_diff"]} == {"1"}  # clustering
    assert of("rocketmq_group_count", group="g") == 1
    assert of("rocketmq_group_count", group="offline") == 0
    assert of("rocketmq_producer_count", group="p", broker="broker-a") == 1
    assert of("rocketmq_brokeruntime_commitlog_maxoffset") == rig.service.store.max_phy_offset
    assert of("rocketmq_brokeruntime_commitlogdir_capacity_total") > 1 << 20
    assert {at["cluster"] for at, _ in page["rocketmq_broker_tps"]} == {"DefaultCluster"}
    shown = await page_of(rig, names=False)
    assert not any(name.startswith("rocketmq_brokeruntime_") for name in shown)


async def test_a_disk_that_does_not_tell_its_space_leaves_only_that_out(rig, monkeypatch):
    await rig.send()
    whole = await page_of(rig, names=True)
    known = KVTable.decode((await rig.ask(RequestCode.GET_BROKER_RUNTIME_INFO)).body).table
    monkeypatch.setattr(upkeep.os, "statvfs", Mock(side_effect=OSError(errno.EIO, "broken")))
    page = await page_of(rig, names=True)
    assert page["batonmq_metrics_failures"][0][1] == 0
    assert {name.removeprefix("rocketmq_brokeruntime_") for name in whole.keys() - page.keys()} == {
        "rocketmq_storage_size_bytes",
        "batonmq_disk_free_bytes",
        "commitlog_disk_ratio",
        "consumequeue_disk_ratio",
        "commitlogdir_capacity_total",
        "commitlogdir_capacity_free",
    }
    left = KVTable.decode((await rig.ask(RequestCode.GET_BROKER_RUNTIME_INFO)).body).table
    folder = rig.service.store.log.folder
    assert known.keys() - left.keys() == {
        "commitLogDiskRatio",
        f"commitLogDiskRatio_{folder}",
        "consumeQueueDiskRatio",
        "commitLogDirCapacity",
    }
