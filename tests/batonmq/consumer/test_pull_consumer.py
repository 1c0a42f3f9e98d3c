"""Pull consumer against scripted servers."""

import asyncio
from collections.abc import Iterable

import pytest
from fake_cluster import TOPIC, FakeCluster, answer

from batonmq import (
    ClientClosedError,
    ClientError,
    ClientOptions,
    ConsumeFromWhere,
    MessageQueue,
    NoMasterError,
    PullConsumer,
    PullStatus,
    ResponseError,
)
from batonmq.protocol.codes import RequestCode
from tests.shared.waiting import until

Q0 = MessageQueue(TOPIC, "broker-a", 0)
FAST = ClientOptions(suspicion_ms=20)


def puller(cluster: FakeCluster, where: ConsumeFromWhere = ConsumeFromWhere.FIRST) -> PullConsumer:
    return PullConsumer(
        "pullers", name_servers=cluster.name_server_addresses, client_options=FAST, from_where=where
    )


async def test_pull_by_queue_and_offset(cluster: FakeCluster) -> None:
    for i in range(5):
        cluster.master().store(TOPIC, 0, b"%d" % i, f"TAGS\x01{'ab'[i % 2]}\x02")
    async with puller(cluster) as consumer:
        assert len(await consumer.fetch_queues(TOPIC)) == 4
        result = await consumer.pull(Q0, 1, 3)
        assert result.status is PullStatus.FOUND
        assert [m.body for m in result.messages] == [b"1", b"2", b"3"]
        assert (result.next_begin_offset, result.min_offset, result.max_offset) == (4, 0, 5)
        assert {m.broker_name for m in result.messages} == {"broker-a"}
        tagged = await consumer.pull(Q0, 0, 32, expression="b")
        assert [m.body for m in tagged.messages] == [b"1", b"3"]
        assert (await consumer.pull(Q0, 5)).status is PullStatus.NO_NEW_MSG
        assert (await consumer.pull(Q0, 0, expression="c")).status is PullStatus.NO_MATCHED_MSG
        moved = await consumer.pull(Q0, 99)
        assert (moved.status, moved.next_begin_offset) == (PullStatus.OFFSET_ILLEGAL, 5)


async def test_a_blocking_pull_is_woken_by_a_message(cluster: FakeCluster) -> None:
    async with puller(cluster) as consumer:
        pulling = asyncio.ensure_future(consumer.pull(Q0, 0, timeout_ms=10_000, block=True))
        await until(lambda: RequestCode.PULL_MESSAGE in cluster.master().codes())
        cluster.master().store(TOPIC, 0, b"late")
        assert [m.body for m in (await pulling).messages] == [b"late"]


async def test_a_pull_bridges_a_failover(cluster: FakeCluster) -> None:
    cluster.master().store(TOPIC, 0, b"kept")
    async with puller(cluster) as consumer:
        await consumer.fetch_queues(TOPIC)
        await cluster.kill_master()
        cluster.elect(cluster.brokers["broker-a"][1])
        assert [m.body for m in (await consumer.pull(Q0, 0)).messages] == [b"kept"]


@pytest.mark.parametrize("code", [1, 2, 14, 1500])
async def test_r24_a_pull_is_repeated_until_its_message_is_healed_or_a_master_serves(
    cluster: FakeCluster, code: int
) -> None:
    """A broker answers 1 for a damaged record. Other refusals are final."""
    cluster.master().store(TOPIC, 0, b"kept")
    async with puller(cluster) as consumer:
        cluster.master().before[RequestCode.PULL_MESSAGE] += [answer(code)] * 2
        assert [m.body for m in (await consumer.pull(Q0, 0)).messages] == [b"kept"]
        cluster.master().before[RequestCode.PULL_MESSAGE] += [answer(16)]
        with pytest.raises(ResponseError):
            await consumer.pull(Q0, 0)


async def test_a_group_without_master_says_so(cluster: FakeCluster) -> None:
    async with puller(cluster) as consumer:
        await consumer.fetch_queues(TOPIC)
        await cluster.kill_master()
        with pytest.raises(NoMasterError) as error:
            await consumer.pull(Q0, 0, timeout_ms=50)
        assert "broker-a" in str(error.value)
        assert "mqctl getSyncStateSet" in str(error.value)


async def test_poll_commit_and_resume(cluster: FakeCluster) -> None:
    expected = [b"%d" % i for i in range(12)]
    for i, body in enumerate(expected):
        cluster.master().store(TOPIC, i % 4, body)
    async with puller(cluster) as consumer:
        await consumer.assign(await consumer.fetch_queues(TOPIC))
        got: list[bytes] = []
        while len(got) < 12:
            got += [m.body for m in await consumer.poll(2000, max_messages=5)]
        assert sorted(got, key=int) == expected
        assert await consumer.poll(1) == []
        await consumer.commit()
        assert await consumer.committed(Q0) == 3
        await consumer.seek(Q0, 2)
        assert [m.body for m in await consumer.poll(2000)] == [b"8"]
    cluster.master().store(TOPIC, 1, b"new")
    async with puller(cluster) as consumer:
        await consumer.assign(await consumer.fetch_queues(TOPIC))
        assert [m.body for m in await consumer.poll(2000)] == [b"new"]
        assert consumer.position(MessageQueue(TOPIC, "broker-a", 1)) == 4


async def test_a_poll_that_waits_is_woken(cluster: FakeCluster) -> None:
    async with puller(cluster, ConsumeFromWhere.LAST) as consumer:
        cluster.master().store(TOPIC, 2, b"old")
        await consumer.assign(await consumer.fetch_queues(TOPIC))
        polling = asyncio.ensure_future(consumer.poll(10_000))
        await until(lambda: cluster.master().codes().count(RequestCode.PULL_MESSAGE) >= 4)
        cluster.master().store(TOPIC, 2, b"late")
        assert [m.body for m in await polling] == [b"late"]


async def test_offsets_by_time_and_ends(cluster: FakeCluster) -> None:
    for i in range(3):
        cluster.master().store(TOPIC, 0, b"%d" % i)
    async with puller(cluster) as consumer:
        assert await consumer.min_offset(Q0) == 0
        assert await consumer.max_offset(Q0) == 3
        assert await consumer.offset_by_time(Q0, 0) == 0
        assert await consumer.offset_by_time(Q0, 1001) == 1
        assert await consumer.committed(Q0) is None
        await consumer.commit({Q0: 2})
        assert await consumer.committed(Q0) == 2


async def test_use_before_start_and_without_assignment_is_refused(cluster: FakeCluster) -> None:
    consumer = puller(cluster)
    with pytest.raises(ClientClosedError, match="call start"):
        await consumer.max_offset(Q0)
    async with consumer:
        with pytest.raises(ClientError, match="assign"):
            await consumer.poll(1)


async def test_a_queue_whose_fetch_was_given_up_keeps_its_newer_one(cluster: FakeCluster) -> None:
    """`seek` gives up a fetch that has just ended, while `poll` begins the next one."""
    async with puller(cluster) as consumer:
        await consumer.assign([Q0])
        await consumer._start_fetches(32)
        newer = consumer._fetches[Q0]
        consumer._done.append(Q0)
        await consumer._collect()
        assert consumer._fetches[Q0] is newer


async def test_r57_a_seek_in_a_queue_that_is_given_up_meanwhile_does_not_take_it_back() -> None:
    consumer = PullConsumer("g", name_servers=["h:9876"])
    consumer._begin_at([(Q0, 5)])

    async def given_up(queues: Iterable[MessageQueue]) -> None:
        consumer._positions.pop(Q0, None)

    consumer._forget = given_up  # type: ignore[method-assign]
    with pytest.raises(ClientError, match="is not assigned"):
        await consumer.seek(Q0, 3)
    assert Q0 not in consumer._positions
