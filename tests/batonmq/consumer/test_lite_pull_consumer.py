"""Members of a group that share queues and pull, against scripted brokers."""

import asyncio
from collections.abc import Sequence

import pytest
from fake_cluster import TOPIC, FakeCluster, open_cluster

from batonmq import (
    ClientError,
    ClientOptions,
    ConsumeFromWhere,
    LitePullConsumer,
    LitePullOptions,
    MessageQueue,
)
from tests.shared.waiting import until

QUEUES = [MessageQueue(TOPIC, "broker-a", queue_id) for queue_id in range(4)]


class Seen:
    """What the callbacks of a member got."""

    def __init__(self) -> None:
        self.got: list[MessageQueue] = []
        self.lost: list[MessageQueue] = []

    def assigned(self, queues: Sequence[MessageQueue]) -> None:
        self.got += queues

    async def revoked(self, queues: Sequence[MessageQueue]) -> None:
        self.lost += queues


def member(
    cluster: FakeCluster, name: str, seen: Seen | None = None, auto_commit_ms: int | None = 10
) -> LitePullConsumer:
    seen = seen or Seen()
    consumer = LitePullConsumer(
        "lite",
        name_servers=cluster.name_server_addresses,
        options=LitePullOptions(ConsumeFromWhere.FIRST, auto_commit_ms),
        client_options=ClientOptions(suspicion_ms=20, instance_name=name),
        on_assigned=seen.assigned,
        on_revoked=seen.revoked,
    )
    consumer.subscribe(TOPIC)
    return consumer


def fill(cluster: FakeCluster, numbers: range = range(3)) -> None:
    for queue in QUEUES:
        for number in numbers:
            cluster.master().store(TOPIC, queue.queue_id, f"{queue.queue_id}-{number}".encode())


async def take(consumer: LitePullConsumer, count: int) -> list[bytes]:
    bodies = []
    async for message in consumer:
        bodies.append(message.body)
        if len(bodies) == count:
            break
    return bodies


def stored(cluster: FakeCluster) -> dict[int, int]:
    return {key[2]: offset for key, offset in cluster.master().group.offsets.items()}


async def take_all(consumer: LitePullConsumer, wanted: set[bytes]) -> None:
    seen: set[bytes] = set()
    async for message in consumer:
        seen.add(message.body)
        if wanted <= seen:
            return


async def test_two_members_share_the_queues_and_hand_over_their_progress(
    cluster: FakeCluster,
) -> None:
    """1. One has all queues, and takes one message of each. 2. A second joins: half is given away.
    3. The first leaves: the second has all queues, and gets every other message."""
    fill(cluster, range(1))
    seen = Seen()
    async with member(cluster, "one", seen) as first:
        assert list(first.assigned_queues) == seen.got == QUEUES
        assert len(await take(first, 4)) == 4
        assert await first.poll(0) == []
        async with member(cluster, "two") as second:
            await until(lambda: len(first.assigned_queues) == len(second.assigned_queues) == 2)
            assert seen.lost == list(second.assigned_queues)
            assert {*first.assigned_queues, *second.assigned_queues} == set(QUEUES)
            fill(cluster, range(1, 3))
            await first.close()
            assert set(seen.lost) == set(QUEUES)
            others = set(cluster.master().group.bodies(TOPIC)) - {b"%d-0" % q for q in range(4)}
            await take_all(second, others)
            assert len(second.assigned_queues) == 4


async def test_only_what_was_processed_is_stored(cluster: FakeCluster) -> None:
    """A message counts as processed when the next one is asked for."""
    fill(cluster)
    async with member(cluster, "one") as consumer:
        last = await take(consumer, 5)
    assert sum(stored(cluster).values()) == 4
    async with member(cluster, "one") as consumer:
        again = await take(consumer, 8)
    assert last[-1] in again and len({*last, *again}) == 12


async def test_by_hand_nothing_is_stored_before_commit(cluster: FakeCluster) -> None:
    fill(cluster)
    async with member(cluster, "one", auto_commit_ms=None) as consumer:
        await take(consumer, 5)
        assert await consumer.poll() and stored(cluster) == {}
        await consumer.commit({QUEUES[2]: 1})
    assert stored(cluster) == {2: 1}


async def test_pause_resume_and_seek(cluster: FakeCluster) -> None:
    fill(cluster)
    async with member(cluster, "one") as consumer:
        consumer.pause(QUEUES[:3])
        assert await take(consumer, 3) == [b"3-0", b"3-1", b"3-2"]
        waiting = asyncio.ensure_future(consumer.poll(10_000))
        await asyncio.sleep(0)
        consumer.resume(QUEUES[1:2])
        assert [message.body for message in await waiting] == [b"1-0", b"1-1", b"1-2"]
        await consumer.seek(QUEUES[3], 1)
        assert await take(consumer, 2) == [b"3-1", b"3-2"]
        with pytest.raises(ClientError, match=r"not assigned.*shares its queues out"):
            consumer.pause([MessageQueue("Other", "broker-a", 0)])


async def test_progress_goes_on_at_a_new_master(cluster: FakeCluster) -> None:
    fill(cluster)
    async with member(cluster, "one") as consumer:
        bodies = await take(consumer, 6)
        slave = next(one for one in cluster.brokers["broker-a"] if not one.master)
        await cluster.kill_master()
        cluster.elect(slave)
        bodies += await take(consumer, 6)
        assert len(set(bodies)) == 12
        await consumer.poll(0)
        # What the old master alone had is sent again once the client knows the new one.
        await until(lambda: stored(cluster) == {0: 3, 1: 3, 2: 3, 3: 3})


async def test_what_cannot_be_mixed() -> None:
    async with open_cluster() as cluster, member(cluster, "one") as consumer:
        with pytest.raises(ClientError, match="has subscribed"):
            await consumer.assign(QUEUES)
        with pytest.raises(ClientError, match="before start"):
            consumer.subscribe("Other")


@pytest.mark.parametrize("auto_commit_ms", [10, None])
async def test_r57_a_group_that_begins_at_the_end_has_its_place_stored(
    cluster: FakeCluster, auto_commit_ms: int | None
) -> None:
    for queue in range(4):
        cluster.groups["broker-a"].first_offset[TOPIC, queue] = 1000
    consumer = LitePullConsumer(
        "lite",
        name_servers=cluster.name_server_addresses,
        options=LitePullOptions(ConsumeFromWhere.LAST, auto_commit_ms),
    )
    consumer.subscribe(TOPIC)
    async with consumer:
        assert stored(cluster) == dict.fromkeys(range(4), 1000)


async def test_what_the_program_committed_is_not_lowered_at_the_end(cluster: FakeCluster) -> None:
    """It commits the message that it got last, too, and does not ask for another one."""
    fill(cluster)
    async with member(cluster, "one", auto_commit_ms=60_000) as consumer:
        await take(consumer, 12)
        await consumer.commit()
    assert stored(cluster) == {0: 3, 1: 3, 2: 3, 3: 3}


async def test_a_commit_while_queues_are_given_up_is_not_lowered(cluster: FakeCluster) -> None:
    fill(cluster)
    consumer = member(cluster, "one", auto_commit_ms=60_000)

    async def revoked(queues: Sequence[MessageQueue]) -> None:
        await consumer.commit()

    consumer._on_revoked = revoked
    async with consumer:
        await take(consumer, 12)
    assert stored(cluster) == {0: 3, 1: 3, 2: 3, 3: 3}


async def test_other_queues_are_assigned_with_the_progress_of_the_former_stored(
    cluster: FakeCluster,
) -> None:
    fill(cluster)
    options = LitePullOptions(ConsumeFromWhere.FIRST, auto_commit_ms=60_000)
    consumer = LitePullConsumer("lite", name_servers=cluster.name_server_addresses, options=options)
    async with consumer:
        with pytest.raises(ClientError, match=r"call assign\(\), or subscribe\(\) before start"):
            await consumer.poll()
        await consumer.assign(QUEUES[:1])
        assert len(await consumer.poll()) == 3 and await consumer.poll(0) == []
        await consumer.assign(QUEUES[1:2])
        assert stored(cluster) == {0: 3}


async def test_a_close_within_the_callback_of_closing_does_not_wait_for_itself(
    cluster: FakeCluster,
) -> None:
    consumer = member(cluster, "one")

    async def revoked(queues: Sequence[MessageQueue]) -> None:
        await consumer.close()

    consumer._on_revoked = revoked
    async with asyncio.timeout(10), consumer:
        assert consumer.assigned_queues
    assert not consumer.client.running
    with pytest.raises(ClientError):
        await consumer.poll()
