"""Which queue a send goes to, and which refusals are retried."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.client.errors import SendFailedError
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.client.producer.outgoing import Outgoing
from batonmq.client.producer.sending import (
    AVOID_MS,
    HINTS_FOLLOWED_MAX,
    QueuePicker,
    RetryDecision,
    Sending,
)
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.message import MessageQueue

relaxed = settings(deadline=None)
QUEUES = [MessageQueue("T", "a", i) for i in range(8)]


def test_round_robin_visits_every_queue() -> None:
    picker = QueuePicker()
    assert {picker.pick(QUEUES, 0) for _ in QUEUES} == set(QUEUES)


def test_a_failed_broker_is_avoided_for_a_while_if_there_is_another() -> None:
    picker = QueuePicker()
    queues = [MessageQueue("T", name, i) for name in "ab" for i in range(2)]
    picker.broker_failed("a", 0)
    assert {picker.pick(queues, AVOID_MS - 1).broker_name for _ in range(8)} == {"b"}
    assert {picker.pick(queues, AVOID_MS).broker_name for _ in range(8)} == {"a", "b"}


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


def test_r45_the_advice_for_a_full_disk_names_the_disk_and_no_missing_master() -> None:
    def advice(remark: str) -> str:
        code = ResponseCode.SERVICE_NOT_AVAILABLE
        message = Outgoing("T", b"x", 0, 0, "", "id")
        sending = Sending(message, lambda queues, last: queues[0], 0, 0, 0)
        sending.failed(None, "10.0.0.1:10911", code, remark, 0)
        return str(sending.error(0))

    full = advice("the disk is full: No space left on device")
    assert "free disk space on that broker" in full and "no master" not in full
    assert "no master answers" in advice("this broker has no role yet")


def test_a_group_that_has_a_new_master_is_avoided_no_longer() -> None:
    picker = QueuePicker()
    queues = [MessageQueue("T", name, 0) for name in "abc"]
    for name in "ab":
        picker.broker_failed(name, 0)
    picker.moved(["a"])
    assert {picker.pick(queues, 1).broker_name for _ in range(4)} == {"a", "c"}


def a_send(deadline_ms: int = 3_000) -> tuple[Sending, list[str | None]]:
    """And which group it was asked to leave out, at each choice."""
    left_out: list[str | None] = []

    def choose(queues: Sequence[MessageQueue], last: str | None) -> MessageQueue:
        left_out.append(last)
        return queues[0]

    return Sending(Outgoing("T", b"x", 0, 0, "", "id"), choose, 0, deadline_ms, 0), left_out


def test_the_next_try_leaves_out_the_group_that_failed() -> None:
    sending, left_out = a_send()
    route = TopicRoute("T", tuple(QUEUES), (), {"a": {0: "10.0.0.1:10911"}}, {"a": "C"})
    for _ in range(2):
        target = sending.target(route, 0)
        assert target is not None
        sending.failed(*target, ResponseCode.SYSTEM_BUSY, "busy", 0)
    assert left_out == [None, "a"]


def test_two_brokers_that_name_each_other_are_asked_without_a_pause_a_few_times_only() -> None:
    sending, _ = a_send()
    pauses = []
    for _ in range(HINTS_FOLLOWED_MAX + 2):
        sending.failed(QUEUES[0], "10.0.0.1:10911", ResponseCode.SYSTEM_BUSY, "no master", 0)
        sending.refused(RetryDecision.RETRY, other_master=True, now_ms=0)
        pauses.append(sending.pause_ms(0) > 0)
        sending.follow_hint = False
    assert pauses == [False] * HINTS_FOLLOWED_MAX + [True, True]


def test_a_pause_that_would_outlast_the_deadline_ends_the_send() -> None:
    sending, _ = a_send(deadline_ms=100)
    assert "0 attempts in 100 ms" in str(sending.error(100)), "its route took all the time"
    sending.failed(QUEUES[0], "10.0.0.1:10911", ResponseCode.SYSTEM_BUSY, "busy", 99)
    assert sending.pause_ms(90) > 0
    with pytest.raises(SendFailedError, match="busy"):
        sending.pause_ms(99)
