"""Sends that would only time out are refused at once (SYSTEM_BUSY); other requests are served."""

import pytest
from lone_broker import end_of, lone_broker

from batonmq.broker.config import BrokerConfig
from batonmq.broker.write.pending_acks import CLEAN_MS, FlowControl
from batonmq.protocol.errors import BrokerRefusal
from batonmq.store.config import StoreConfig


@pytest.mark.parametrize("fast_failure", [True, False])
def test_what_queued_up_behind_a_slow_write_is_refused(fast_failure):
    flow = FlowControl(BrokerConfig(broker_fast_failure_enable=fast_failure), StoreConfig())
    flow.wrote(0, 1000)
    flow.check(0, 1000)
    flow.wrote(1000, 2001)
    if fast_failure:
        with pytest.raises(BrokerRefusal, match=r"\[PCBUSY_CLEAN_QUEUE\].* took 1001 ms") as busy:
            flow.check(0, 2001 + CLEAN_MS - 1)
        assert busy.value.code == 2
    flow.check(0, 2001 + CLEAN_MS)


async def test_sends_are_refused_while_too_many_wait(tmp_path):
    """A master whose slaves stand still takes no more than it may keep waiting."""
    async with lone_broker(tmp_path, broker={"send_thread_pool_queue_capacity": 2}) as rig:
        path = rig.service.path
        assert (await rig.send()).code == 0
        for _ in range(2):
            path.acks.add_waiter(2**60, path.clock_ms(), lambda code, remark: None)
        status = rig.service.status.table()
        assert status["sendThreadPoolQueueSize"] == status["sendThreadPoolQueueCapacity"] == "2"
        refused = await rig.send()
        assert (refused.code, "[OVERLOAD]" in (refused.remark or "")) == (2, True)
        assert end_of(rig, "T") == 1
        assert (await rig.pull()).code == 0
        path.acks.fail_all(14, "over")
        assert (await rig.send()).code == 0


async def test_a_send_right_behind_a_slow_write_is_not_stored(rig):
    path = rig.service.path
    now_ms = path.clock_ms() + 60_000
    path.flow.wrote(now_ms - 1500, now_ms)
    refused = await rig.send()
    assert (refused.code, "[PCBUSY_CLEAN_QUEUE]" in (refused.remark or "")) == (2, True)
    assert rig.service.status.table()["pageCacheLockTimeMills"] == "1500"
    assert end_of(rig, "T") == 0
    text = b"osPageCacheBusyTimeOutMills=2000\nbrokerFastFailureEnable=false"
    assert (await rig.ask(25, body=text)).code == 0
    assert (await rig.send()).code == 0
