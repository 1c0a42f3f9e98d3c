"""Decisions of the client without a socket: sharing out, flow control, retries, routes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.allocate import allocate_averagely
from batonmq.consume_types import MessageModel
from batonmq.process_queue import FlowLimits, ProcessQueue
from batonmq.queue_choice import QueuePicker
from batonmq.rebalance import plan_rebalance
from batonmq.redelivery import redelivery_delay_ms
from batonmq.retry import Verdict, judge_send_reply, means_not_master, pause_ms
from batonmq.route import moved_masters, route_for_new_topic, topic_route
from batonmq.silence_watch import Silence, SilenceWatch
from batonmq.subscription import build_subscription, wanted_only
from protocol.bodies import BrokerData, QueueData, TopicRouteData
from protocol.errors import BatonError
from protocol.message import MessageExt, MessageQueue
from protocol.tags import java_string_hash

relaxed = settings(deadline=None)
QUEUES = [MessageQueue("T", "a", i) for i in range(8)]


def message(offset: int, body: bytes = b"x" * 10, **properties: str) -> MessageExt:
    return MessageExt(
        topic="T",
        queue_id=0,
        queue_offset=offset,
        physical_offset=offset * 100,
        store_size=100,
        msg_id=f"id{offset}",
        body=body,
        body_crc=0,
        flag=0,
        sys_flag=0,
        born_timestamp=0,
        born_host="h:1",
        store_timestamp=0,
        store_host="h:1",
        reconsume_times=0,
        prepared_transaction_offset=0,
        properties=properties,
    )


# -- AllocateMessageQueueAveragely ------------------------------------------------------------


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


# -- rebalance --------------------------------------------------------------------------------


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


# -- process queue and flow control -----------------------------------------------------------


def test_commit_offset_stops_at_the_first_unconsumed_message() -> None:
    queue = ProcessQueue(10)
    queue.put([message(i) for i in range(10, 15)], 15)
    first, second = queue.take(2), queue.take(3)
    assert queue.done(second) == 10
    assert queue.done(first[1:]) == 10
    assert queue.done(first[:1]) == 15
    assert len(queue) == queue.size_bytes == 0


@relaxed
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.lists(st.booleans(), max_size=6)),
            st.tuples(st.just("take"), st.integers(1, 4)),
            st.tuples(st.just("done"), st.integers(0, 20)),
            st.tuples(st.just("back"), st.just(0)),
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
            queue.put_back(taken)
            taken = []
        queue.check_invariants()
        assert queue.commit_offset == min(unconsumed, default=queue.next_offset)
        assert queue.commit_offset >= last_commit
        last_commit = queue.commit_offset
        assert len(queue) == len(unconsumed)


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


def test_default_limits_are_javas() -> None:
    assert FlowLimits() == FlowLimits(messages=1000, size_bytes=100 << 20, span=2000)


def test_put_back_keeps_raised_try_counts_and_order() -> None:
    queue = ProcessQueue(0)
    queue.put([message(i) for i in range(3)], 3)
    batch = queue.take(2)
    queue.replace_taken(replace(batch[0], reconsume_times=1))
    queue.put_back(batch)
    assert [(m.queue_offset, m.reconsume_times) for m in queue.take(3)] == [(0, 1), (1, 0), (2, 0)]


# -- queue choice -----------------------------------------------------------------------------


def test_round_robin_visits_every_queue() -> None:
    picker = QueuePicker()
    assert {picker.pick(QUEUES, 0) for _ in QUEUES} == set(QUEUES)


def test_a_failed_broker_is_avoided_for_a_while_if_there_is_another() -> None:
    picker = QueuePicker()
    queues = [MessageQueue("T", name, i) for name in "ab" for i in range(2)]
    picker.broker_failed("a", 0, avoid_ms=100)
    assert {picker.pick(queues, 99).broker_name for _ in range(8)} == {"b"}
    assert {picker.pick(queues, 100).broker_name for _ in range(8)} == {"a", "b"}


def test_when_all_failed_the_round_goes_on() -> None:
    picker = QueuePicker()
    picker.broker_failed("a", 0)
    assert {picker.pick(QUEUES, 1, last_broker="a") for _ in QUEUES} == set(QUEUES)


def test_an_answer_ends_the_avoidance() -> None:
    picker = QueuePicker()
    queues = [MessageQueue("T", "a", 0), MessageQueue("T", "b", 0)]
    picker.broker_failed("a", 0)
    picker.broker_answered("a")
    assert {picker.pick(queues, 1).broker_name for _ in range(2)} == {"a", "b"}


@relaxed
@given(
    st.sets(st.sampled_from("abc"), min_size=1),
    st.sets(st.sampled_from("abc")),
    st.sampled_from(["a", "b", "c", None]),
)
def test_avoided_brokers_are_picked_only_if_all_are(
    brokers: set[str], failed: set[str], last: str | None
) -> None:
    picker = QueuePicker()
    for name in failed:
        picker.broker_failed(name, 0)
    queues = [MessageQueue("T", name, 0) for name in sorted(brokers)]
    picked = {picker.pick(queues, 1, last_broker=last).broker_name for _ in range(6)}
    good = brokers - failed
    if good:
        assert picked <= good
        if good - {last}:
            assert picked <= good - {last}


# -- retries ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (0, Verdict.STORED),
        (10, Verdict.STORED),
        (11, Verdict.STORED),
        (12, Verdict.STORED),
        (1, Verdict.RETRY),
        (2, Verdict.RETRY),
        (14, Verdict.RETRY),
        (215, Verdict.RETRY),
        (1500, Verdict.RETRY),
        (16, Verdict.ELSEWHERE),
        (17, Verdict.ELSEWHERE),
        (204, Verdict.ELSEWHERE),
        (205, Verdict.ELSEWHERE),
        (3, Verdict.FINAL),
        (13, Verdict.FINAL),
        (29, Verdict.FINAL),
    ],
)
def test_verdicts(code: int, verdict: Verdict) -> None:
    assert judge_send_reply(code) is verdict


def test_pauses_start_small_grow_and_are_bounded() -> None:
    pauses = [pause_ms(n) for n in range(1, 100)]
    assert pauses[:9] == [5, 8, 11, 17, 25, 38, 57, 85, 100]
    assert pauses == sorted(pauses)
    assert max(pauses) == 100
    assert sum(pauses[:6]) < 110, "an election is noticed soon after it ended"


def test_role_change_codes() -> None:
    assert [c for c in range(2000) if means_not_master(c)] == [1, 2, 14, 1500]


def test_redelivery_delays_double_from_one_second_to_a_minute() -> None:
    assert [redelivery_delay_ms(n) for n in (1, 2, 3, 7, 1000)] == [1000, 2000, 4000, 60000, 60000]


def test_silence_is_suspicious_after_its_patience_and_again_later() -> None:
    watch = SilenceWatch()
    assert watch.next_ms() is None
    send = watch.begin(Silence("T", "a", "h:1"), 0, 300, 100)
    held = watch.begin(Silence("T", "a", "h:1"), 0, 2000, 2000)
    other = watch.begin(Silence("T", "b", "h:2"), 100, 300, 100)
    assert watch.next_ms() == 300
    assert watch.due(299) == []
    assert [s.address for s in watch.due(300)] == ["h:1"]
    assert [s.address for s in watch.due(400)] == ["h:1", "h:2"]
    watch.end(send)
    watch.end(other)
    assert watch.next_ms() == 2000
    assert len(watch.due(2000)) == 1
    assert watch.next_ms() == 4000
    watch.end(held)
    assert watch.next_ms() is None


def test_an_address_is_looked_into_once_for_all_its_requests() -> None:
    watch = SilenceWatch()
    for _ in range(5):
        watch.begin(Silence("T", "a", "h:1"), 0, 300, 100)
    assert len(watch.due(300)) == 1
    assert watch.due(300) == []


# -- routes and subscriptions -----------------------------------------------------------------


def route_data(addresses: dict[int, str], perm: int = 6) -> TopicRouteData:
    return TopicRouteData(
        broker_datas=[BrokerData(broker_name="a", cluster="C", broker_addrs=addresses)],
        queue_datas=[QueueData(broker_name="a", perm=perm, read_queue_nums=4, write_queue_nums=2)],
    )


def test_without_a_master_nothing_is_published_but_reading_stays_assigned() -> None:
    route = topic_route("T", route_data({2: "h:2"}))
    assert route.publish_queues == ()
    assert len(route.subscribe_queues) == 4
    assert route.master_address("a") is None
    assert route.address_of("a", 2) == "h:2"


@pytest.mark.parametrize(("perm", "publish", "subscribe"), [(6, 2, 4), (4, 0, 4), (2, 2, 0)])
def test_permissions_decide_the_queues(perm: int, publish: int, subscribe: int) -> None:
    route = topic_route("T", route_data({0: "h:1"}, perm))
    assert (len(route.publish_queues), len(route.subscribe_queues)) == (publish, subscribe)


def test_a_new_topic_gets_the_smaller_number_of_queues() -> None:
    route = route_for_new_topic("N", route_data({0: "h:1"}), 1)
    assert route.publish_queues == (MessageQueue("N", "a", 0),)


def test_moved_masters_are_those_with_a_new_address() -> None:
    old = topic_route("T", route_data({0: "h:1", 2: "h:2"}))
    new = topic_route("T", route_data({0: "h:2"}))
    assert moved_masters(None, old) == {"a"}
    assert moved_masters(old, old) == frozenset()
    assert moved_masters(old, new) == {"a"}
    assert moved_masters(old, topic_route("T", route_data({2: "h:2"}))) == frozenset()


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
