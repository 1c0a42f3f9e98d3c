"""PendingAcks: code 0 leaves for confirmed bytes of the right epoch, and for nothing else. What a
woken master may acknowledge (R8, R36). Sends that would only time out are refused at once
(SYSTEM_BUSY); other requests are served."""

import json

import pytest
from lone_broker import end_of, lone_broker

from batonmq.broker.config import BrokerConfig
from batonmq.broker.write.pending_acks import CLEAN_MS, AckPause, FlowControl, PendingAcks
from batonmq.protocol.errors import BrokerRefusal
from batonmq.remoting.headers import SendReplies
from batonmq.store.config import StoreConfig

REPLIES = SendReplies("DefaultRegion")


class Sink:
    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def write(self, frame: bytes) -> None:
        self.frames.append(frame)

    @property
    def codes(self) -> list[int]:
        return [json.loads(frame[8:])["code"] for frame in self.frames]


def reply(opaque: int) -> bytes:
    return REPLIES.ok(opaque, b"00", 0, opaque, b"KEY")


def test_replies_leave_in_order_up_to_confirm_offset():
    acks, sink = PendingAcks(3000), Sink()
    for number, end in enumerate((100, 200, 300)):
        acks.add(end, 0, sink, reply(number))
    assert acks.confirm(99, 0) == 0
    assert acks.confirm(200, 0) == 2
    assert [json.loads(f[8:])["opaque"] for f in sink.frames] == [0, 1]
    assert len(acks) == 1


def test_r4_a_role_change_fails_what_waits_before_the_next_epoch_begins():
    """1. Two writes wait in epoch 1. 2. The role changes: both are refused. 3. In epoch 2 the
    same offsets are confirmed, with other bytes: nothing of epoch 1 is released by that."""
    acks, sink = PendingAcks(3000), Sink()
    acks.begin_epoch(1)
    acks.add(100, 0, sink, reply(1))
    acks.add(200, 0, sink, reply(2))
    with pytest.raises(AssertionError, match="R4"):
        acks.begin_epoch(2)
    assert acks.fail_all(14, "role changed") == 2
    acks.begin_epoch(2)
    acks.confirm(10_000, 0)
    assert sink.codes == [14, 14]


def test_a_late_write_is_answered_with_its_place_in_the_log():
    """12 means stored: a Java client reads the extFields of such a reply like those of code 0."""
    acks, sink = PendingAcks(3000), Sink()
    acks.add(100, 0, sink, reply(7))
    assert acks.expire(2999, lambda end: (12, "late")) == 0
    assert acks.expire(3000, lambda end: (12, f"late at {end}")) == 1
    header = json.loads(sink.frames[0][8:])
    assert (header["code"], header["opaque"], header["remark"]) == (12, 7, "late at 100")
    assert header["extFields"]["queueOffset"] == "7"


def test_waiters_get_their_outcome_once():
    acks = PendingAcks(3000)
    outcomes: list[int] = []
    acks.add_waiter(100, 0, lambda code, remark: outcomes.append(code))
    acks.add_waiter(200, 0, lambda code, remark: outcomes.append(code))
    acks.add_waiter(300, 0, lambda code, remark: outcomes.append(code))
    acks.confirm(100, 0)
    acks.expire(3000, lambda end: (12 if end == 200 else 10, ""))
    acks.fail_all(14, "")
    assert outcomes == [0, 12, 10]


def test_the_oldest_reply_shows_how_long_writes_wait():
    acks = PendingAcks(3_000)
    assert acks.waited_ms(50) == 0
    acks.add(100, 60, Sink(), b"")
    acks.add(200, 80, Sink(), b"")
    assert acks.waited_ms(90) == 30
    acks.confirm(100, 0)
    assert acks.waited_ms(90) == 10


def test_r4_a_waiter_for_a_confirmation_fails_with_the_role_change():
    """Offsets of retries, locks, topics and ends of transactions wait so."""
    acks, outcomes = PendingAcks(3000), list[tuple[int, str]]()
    acks.add_waiter(100, 0, lambda code, remark: outcomes.append((code, remark)))
    acks.confirm(99, 0)
    assert outcomes == []
    assert acks.fail_all(14, "role changed") == 1
    acks.confirm(10_000, 0)
    assert outcomes == [(14, "role changed")]


class Lease:
    until_ms = 0

    def valid(self, now_ms: int) -> bool:
        return now_ms < self.until_ms


def awake(pause: AckPause, from_ms: int, to_ms: int) -> list[int]:
    """The times, 50 ms apart, at which acks had to wait."""
    return [now_ms for now_ms in range(from_ms, to_ms, 50) if pause.holds(now_ms)]


def test_r8_a_stall_within_the_lease_costs_nothing():
    lease = Lease()
    lease.until_ms = 1_600
    pause = AckPause(lease.valid)
    assert not pause.holds(1_000)
    assert not pause.holds(1_500)


def test_r8_after_a_stall_acks_wait_for_the_lease():
    """A lease that was renewed ends the pause, even if it lapses again soon after."""
    lease = Lease()
    pause = AckPause(lease.valid)
    assert not pause.holds(1_000)
    assert pause.holds(3_000)
    lease.until_ms = 3_800
    assert not pause.holds(3_200)
    assert awake(pause, 3_250, 6_000) == []


def test_r8_a_stall_begins_at_its_limit():
    pause = AckPause(Lease().valid)
    assert [pause.holds(at_ms) for at_ms in (0, 399, 799)] == [False, False, True]


def test_r36_without_any_controller_acks_go_on_a_second_after_the_stall():
    pause = AckPause(Lease().valid)
    assert not pause.holds(1_000)
    held = awake(pause, 3_000, 6_000)
    assert (held[0], held[-1]) == (3_000, 3_950)


def test_r8_a_second_stall_begins_a_second_pause():
    pause = AckPause(Lease().valid)
    pause.holds(0)
    assert pause.holds(1_000)
    assert pause.holds(1_900)
    assert pause.holds(2_500)
    assert awake(pause, 2_550, 5_000)[-1] == 3_450


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
