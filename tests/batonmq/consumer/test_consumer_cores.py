"""A consumer's decisions without a socket: allocation, flow control, redelivery, tags."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.client.consumer.concurrent_service import redelivery_delay_ms
from batonmq.client.consumer.member_stats import MemberStats
from batonmq.client.consumer.options import MessageModel
from batonmq.client.consumer.process_queue import FlowLimits, ProcessQueue
from batonmq.client.consumer.pulling import build_subscription, wanted_only
from batonmq.client.consumer.rebalance import plan_rebalance
from batonmq.protocol.allocation import allocate_averagely
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageExt, MessageQueue
from batonmq.protocol.tags import java_string_hash
from tests.records import message

relaxed = settings(deadline=None)
QUEUES = [MessageQueue("T", "a", i) for i in range(8)]


def java_averagely(queues: list[MessageQueue], ids: list[str], own: str) -> list[MessageQueue]:
    """The arithmetic of Java's class, spelled out naively: sizes first, then the start."""
    index, mod = ids.index(own), len(queues) % len(ids)
    if len(queues) <= len(ids):
        size = 1
    elif mod > 0 and index < mod:
        size = len(queues) // len(ids) + 1
    else:
        size = len(queues) // len(ids)
    start = index * size if mod > 0 and index < mod else index * size + mod
    count = min(size, len(queues) - start)
    return [queues[(start + i) % len(queues)] for i in range(max(count, 0))]


@relaxed
@given(st.integers(0, 40), st.integers(1, 20))
def test_averagely_is_total_disjoint_balanced_and_javas(queue_count: int, members: int) -> None:
    queues = [MessageQueue("T", "a", i) for i in range(queue_count)]
    ids = [f"c{i:02d}" for i in range(members)]
    shares = [allocate_averagely(queues, ids, own) for own in ids]
    assert [q for share in shares for q in share] == queues, "total, disjoint and in order"
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert [list(s) for s in shares] == [java_averagely(queues, ids, own) for own in ids]


def test_a_stranger_gets_nothing() -> None:
    assert allocate_averagely(QUEUES, ["a", "b"], "c") == ()


@relaxed
@given(
    st.sets(st.sampled_from(QUEUES)),
    st.sets(st.sampled_from(QUEUES)),
    st.sets(st.sampled_from(["a", "b", "c"]), min_size=1),
)
def test_rebalance_moves_held_to_the_own_share(
    held: set[MessageQueue], queues: set[MessageQueue], ids: set[str]
) -> None:
    plan = plan_rebalance(held, sorted(queues), sorted(ids), "a", MessageModel.CLUSTERING)
    after = (held - set(plan.give_up)) | set(plan.take_up)
    assert after == set(allocate_averagely(sorted(queues), sorted(ids), "a"))
    assert set(plan.give_up) <= held
    assert not set(plan.take_up) & held


def test_without_a_member_list_what_is_held_stays() -> None:
    plan = plan_rebalance(QUEUES[:3], QUEUES, None, "a", MessageModel.CLUSTERING)
    assert not plan.changed


def test_broadcasting_takes_every_queue() -> None:
    plan = plan_rebalance([], QUEUES, None, "a", MessageModel.BROADCASTING)
    assert list(plan.take_up) == QUEUES


def check_invariants(queue: ProcessQueue) -> None:
    assert list(queue._cached) == sorted(queue._cached)
    assert list(queue._taken) == sorted(queue._taken)
    assert not queue._cached.keys() & queue._taken.keys()
    held = [*queue._cached.values(), *queue._taken.values()]
    assert queue.size_bytes == sum(len(m.body) for m in held)
    assert all(m.queue_offset < queue.next_offset for m in held)


@relaxed
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.lists(st.booleans(), max_size=6)),
            st.tuples(st.just("take"), st.integers(1, 4)),
            st.tuples(st.just("done"), st.integers(0, 20)),
            st.tuples(st.just("back"), st.integers(0, 3)),
        ),
        max_size=40,
    )
)
def test_commit_offset_never_falls_and_never_skips(steps: list[tuple[str, object]]) -> None:
    """Any order of pulls, consumption and retries; checked against plain sets."""
    queue = ProcessQueue(0)
    unconsumed: set[int] = set()
    taken: list[MessageExt] = []
    last_commit = 0
    for kind, argument in steps:
        if kind == "put":
            assert isinstance(argument, list)
            start = queue.next_offset
            got = [message(start + i) for i, kept in enumerate(argument) if kept]
            queue.put(got, start + len(argument))
            unconsumed |= {m.queue_offset for m in got}
        elif kind == "take":
            assert isinstance(argument, int)
            batch = queue.take(argument)
            assert [m.queue_offset for m in batch] == sorted(m.queue_offset for m in batch)
            taken += batch
        elif kind == "done" and taken:
            assert isinstance(argument, int)
            one = taken.pop(argument % len(taken))
            unconsumed.discard(one.queue_offset)
            queue.done([one])
        elif kind == "back":
            assert isinstance(argument, int)
            queue.put_back(taken[argument:])
            del taken[argument:]
        check_invariants(queue)
        assert queue.commit_offset == min(unconsumed, default=queue.next_offset)
        assert queue.commit_offset >= last_commit
        last_commit = queue.commit_offset
        assert len(queue) == len(unconsumed)


def test_messages_put_back_behind_taken_ones_hold_the_offset_when_taken_again() -> None:
    queue = ProcessQueue(0)
    queue.put([message(i) for i in range(4)], 4)
    earlier, later = queue.take(2), queue.take(1)
    queue.put_back(earlier)
    assert [m.queue_offset for m in queue.take(1)] == [0]
    assert queue.commit_offset == queue.done(later) == 0


def test_flow_control_by_count_size_and_span() -> None:
    queue = ProcessQueue(0)
    queue.put([message(0), message(2001)], 2002)
    assert queue.flow_reason(FlowLimits()) is not None
    assert "span 2001" in str(queue.flow_reason(FlowLimits()))
    assert queue.flow_reason(FlowLimits(), orderly=True) is None
    assert "2 messages" in str(queue.flow_reason(FlowLimits(messages=1), orderly=True))
    assert "20 bytes" in str(queue.flow_reason(FlowLimits(size_bytes=19), orderly=True))
    queue.done(queue.take(1))
    assert queue.flow_reason(FlowLimits()) is None


def test_put_back_keeps_raised_try_counts_and_order() -> None:
    queue = ProcessQueue(0)
    queue.put([message(i) for i in range(3)], 3)
    batch = queue.take(2)
    queue.replace_taken(replace(batch[0], reconsume_times=1))
    queue.put_back(batch)
    assert [(m.queue_offset, m.reconsume_times) for m in queue.take(3)] == [(0, 1), (1, 0), (2, 0)]


def test_redelivery_delays_double_from_one_second_to_a_minute() -> None:
    assert [redelivery_delay_ms(n) for n in (1, 2, 3, 7, 1000)] == [1000, 2000, 4000, 60000, 60000]


def test_a_member_tells_of_its_last_minute_and_of_failures_of_an_hour() -> None:
    stats = MemberStats()
    stats.pulled("T", 90, 10, 1_000)
    stats.pulled("T", 30, 30, 55_000)
    stats.consumed("T", 60, 100, 55_000, failed=False)
    stats.consumed("T", 6, 200, 59_999, failed=True)
    assert stats.shown(59_999) == {
        "T": {
            "consumeFailedMsgs": 6,
            "consumeFailedTPS": 0.1,
            "consumeOKTPS": 1.0,
            "consumeRT": 150.0,
            "pullRT": 20.0,
            "pullTPS": 2.0,
        }
    }
    later = stats.shown(3_599_999)["T"]
    assert (later["consumeFailedMsgs"], later["pullTPS"]) == (6, 0.0)
    assert stats.shown(3_700_000)["T"]["consumeFailedMsgs"] == 0


def test_subscription_carries_sorted_tags_and_java_hashes() -> None:
    data = build_subscription("T", " TagB||TagA ", 7)
    assert data.tags_set == ["TagA", "TagB"]
    assert data.code_set == [java_string_hash("TagA"), java_string_hash("TagB")]
    assert build_subscription("T", "", 7).sub_string == "*"
    with pytest.raises(BatonError, match="names no tag"):
        build_subscription("T", "||", 7)


def test_hash_collisions_are_filtered_by_the_tag_itself() -> None:
    """`Aa` and `BB` have one Java hash; the broker lets both through."""
    assert java_string_hash("Aa") == java_string_hash("BB")
    data = build_subscription("T", "Aa", 7)
    kept = wanted_only([message(0, TAGS="Aa"), message(1, TAGS="BB"), message(2)], data)
    assert [m.queue_offset for m in kept] == [0]


def test_a_listener_that_empties_bodies_does_not_use_up_the_limit_of_its_queue() -> None:
    queue = ProcessQueue(0)
    for offset in range(3):
        queue.put([message(offset)], offset + 1)
        for taken in queue.take(1):
            taken.body = b""
            queue.done([taken])
    assert queue.size_bytes == 0


def test_a_member_that_two_brokers_report_has_one_share() -> None:
    plans = [
        plan_rebalance((), QUEUES, ids, "a", MessageModel.CLUSTERING)
        for ids in (["a", "b"], ["a", "b", "a"])
    ]
    assert plans[0] == plans[1] and len(plans[0].take_up) == 4
