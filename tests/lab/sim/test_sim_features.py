"""The checkers of features, on logs that are made here: what they allow, and what they find.

`make defects` shows that they find what is planted in the broker."""

import json
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from batonmq.protocol.message import Message
from batonmq.protocol.records.codec import NewMessage, encode_record
from batonmq.protocol.topic_name import (
    POP_TOPIC,
    PROGRESS_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
)
from lab.sim.features import delays, filters, pops, questions, retries, transactions
from lab.sim.features.log import FeatureLog

HOST = bytes([10, 0, 0, 1, 0, 0, 0, 80])
NOW = 1_767_600_000_000


class Log(FeatureLog):
    """A confirmed log of one replica. `epochs`: where each begins."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.epochs = [0]
        self.passed_s = 0.0
        expiry, clocks = SimpleNamespace(begin=0), SimpleNamespace(farthest_s=0.0)
        promises = SimpleNamespace(truth=bytearray(), expiry=expiry)
        cluster: Any = SimpleNamespace(
            brokers={},
            promises=promises,
            clocks=clocks,
            violate=self.found.append,
            tell=lambda *told: None,
        )
        super().__init__(cluster)

    def now_s(self) -> float:
        return self.passed_s

    def put(self, topic: str, body: str, at: int = 0, **more: Any) -> int:
        """Its offset. `at`: queue offset. `after_ms`: by the broker's clock; `passed_ms`: by a
        steady one, if that differs."""
        truth, after_ms = self.cluster.promises.truth, more.pop("after_ms", 0)
        stored_ms = NOW + after_ms
        self.passed_s = max(self.passed_s, more.pop("passed_ms", after_ms) / 1000)
        prepared, count = more.pop("prepared", 0), more.pop("count", 0)
        properties = "".join(f"{key}\x01{value}\x02" for key, value in more.items()).encode()
        message = NewMessage(
            topic, 0, body.encode(), properties, 0, None, None, NOW, HOST, reconsume_times=count
        )
        message.prepared_transaction_offset = prepared
        offset = len(truth)
        truth += encode_record(message, topic.encode(), at, offset, stored_ms, HOST, False)
        self.read()
        return offset

    def epoch_at(self, offset: int) -> int:
        return sum(begin <= offset for begin in self.epochs)

    def elect(self) -> None:
        self.epochs.append(len(self.cluster.promises.truth))


def waiting(topic: str, due: int = NOW + 1000) -> dict[str, Any]:
    wish = {"DELAY": 1} if topic == SCHEDULE_TOPIC else {"TIMER_OUT_MS": due}
    return {"REAL_TOPIC": delays.TOPIC, "REAL_QID": 0} | wish


IN_1_S = delays.Wishes(defaultdict(lambda: delays.Wish(1000)))


def progress(log: Log, topic: str) -> None:
    if topic == SCHEDULE_TOPIC:
        log.put(PROGRESS_TOPIC, '{"delays":{"1":1},"timer":null}')
        return
    timer = {"doneMs": NOW + 1000, "doneOffset": 0, "nextOffset": 1, "fromOffset": 1}
    log.put(PROGRESS_TOPIC, json.dumps({"delays": {}, "timer": timer}))


@pytest.mark.parametrize("topic", [SCHEDULE_TOPIC, TIMER_TOPIC])
def test_what_waits_is_delivered_in_time_and_once_an_epoch_until_it_counts(topic: str) -> None:
    log = Log()
    checker = delays.Delays(log, "g", IN_1_S)
    log.put(topic, "m|", **waiting(topic))
    assert "m" in checker.pending()
    log.put(delays.TOPIC, "m|", after_ms=1000, **waiting(topic))
    log.elect()
    log.put(delays.TOPIC, "m|", after_ms=1200, **waiting(topic))
    assert not log.found
    log.put(delays.TOPIC, "m|", after_ms=1200, **waiting(topic))
    assert "twice in epoch 2" in log.found.pop()
    progress(log, topic)
    assert not checker.pending()
    log.put(delays.TOPIC, "m|", after_ms=1300, **waiting(topic))
    assert "after it was done" in log.found.pop()


def test_early_is_by_the_clock_of_the_broker_that_delivers() -> None:
    log = Log()
    delays.Delays(log, "g", IN_1_S)
    # The clock of the third is set back; the fourth has not waited for its delay by any clock.
    for n, (after_ms, passed_ms) in enumerate(((999, 999), (1000, 2000), (-5, 2500), (-5, 2900))):
        log.put(SCHEDULE_TOPIC, f"m{n}|", n, **waiting(SCHEDULE_TOPIC))
        clocks = {"after_ms": after_ms, "passed_ms": passed_ms}
        log.put(delays.TOPIC, f"m{n}|", **clocks, **waiting(SCHEDULE_TOPIC))
    assert log.found == ["delay: m0 comes 1 ms early", "delay: m3 comes 1005 ms early"]


def test_of_two_copies_at_one_level_the_first_of_its_queue_is_delivered_first() -> None:
    """The second was stored by a clock that is behind: it is due earlier, and not early."""
    log = Log()
    delays.Delays(log, "g", IN_1_S)
    for offset, after_ms in enumerate((0, -500_000)):
        log.put(SCHEDULE_TOPIC, "m|", offset, after_ms=after_ms, **waiting(SCHEDULE_TOPIC))
    for end, after_ms in ((1, -499_500), (2, -499_000)):
        clocks = {"after_ms": after_ms, "passed_ms": 1000 * end}
        log.put(delays.TOPIC, "m|", **clocks, **waiting(SCHEDULE_TOPIC))
        log.put(PROGRESS_TOPIC, json.dumps({"delays": {1: end}, "timer": None}))
    assert not log.found


def test_progress_ahead_of_the_delivery() -> None:
    log = Log()
    delays.Delays(log, "g", IN_1_S)
    log.put(SCHEDULE_TOPIC, "m|", **waiting(SCHEDULE_TOPIC))
    progress(log, SCHEDULE_TOPIC)
    assert "the log has it not yet" in log.found.pop()


def test_what_was_recalled_comes_no_more_behind_the_answer() -> None:
    log = Log()
    wishes = delays.Wishes(IN_1_S.of)
    checker = delays.Delays(log, "g", wishes)
    wishes.recalls |= {"asked": None, "late": 1 << 20, "m": None}
    for n, name in enumerate(("asked", "late", "m")):
        log.put(TIMER_TOPIC, f"{name}|", n, **waiting(TIMER_TOPIC))
        log.acked.add(name)
        log.sent[name] = delays.TOPIC
    log.put(TIMER_TOPIC, "0", 3, **waiting(TIMER_TOPIC), TIMER_DEL_UNIQKEY="K")
    log.put(delays.TOPIC, "late|", after_ms=1000, **waiting(TIMER_TOPIC))
    assert not log.found
    wishes.recalls["m"] = len(log.cluster.promises.truth)
    log.put(delays.TOPIC, "m|", after_ms=1000, **waiting(TIMER_TOPIC))
    assert "m comes at" in log.found.pop()
    timer = {"doneMs": NOW + 1000, "doneOffset": 2, "nextOffset": 3, "fromOffset": 3}
    log.put(PROGRESS_TOPIC, json.dumps({"delays": {}, "timer": timer}))
    assert not log.found and not checker.pending()


def test_what_is_to_wait_waits_and_as_long_as_was_wished() -> None:
    log = Log()
    at = delays.Wish(NOW + 1000, is_time=True)
    wishes = {"level": delays.Wish(1000), "delay": delays.Wish(1000), "at": at, "late": at}
    delays.Delays(log, "g", delays.Wishes(wishes))
    log.put(SCHEDULE_TOPIC, "level|", after_ms=7, **waiting(SCHEDULE_TOPIC))
    log.put(TIMER_TOPIC, "delay|", after_ms=7, **waiting(TIMER_TOPIC, NOW + 1007))
    log.put(TIMER_TOPIC, "at|", 1, after_ms=7, **waiting(TIMER_TOPIC))
    log.put(delays.TOPIC, "late|", after_ms=1000)
    log.put(SCHEDULE_TOPIC, "x|", REAL_TOPIC="%RETRY%g", DELAY=3)
    assert not log.found
    for name, due in (("delay", NOW + 1006), ("at", NOW + 100)):
        log.put(TIMER_TOPIC, f"{name}|", 2, after_ms=7, **waiting(TIMER_TOPIC, due))
        assert f"{name} is due at {due}, and wished at" in log.found.pop()
    wishes["level"] = delays.Wish(2000)
    log.put(SCHEDULE_TOPIC, "level|", 1, **waiting(SCHEDULE_TOPIC))
    assert "level is due at" in log.found.pop()
    for name in ("level", "delay", "late"):
        log.put(delays.TOPIC, f"{name}|", after_ms=999)
        assert f"{name} is in TopicD, and has not waited" in log.found.pop()
    log.put("%RETRY%g", "x|", count=1)
    assert "has not waited" in log.found.pop()
    assert not log.found


def test_a_count_falls_only_where_the_earlier_message_was_given_back_again() -> None:
    log = Log()
    checker = retries.Retries(log, "g")
    first = log.put(retries.TOPIC, "m|")
    again = {"REAL_TOPIC": "%RETRY%g", "DELAY": 3}

    def give_back(offset: int, count: int, topic: str = SCHEDULE_TOPIC) -> int:
        tried = checker.sends_back(offset)
        made = log.put(topic, "m|", count=count, **again)
        assert tried is not None
        checker.sent_back(tried)
        return made

    second = give_back(first, 1)
    third = give_back(second, 2)
    give_back(first, 1)
    assert not log.found
    give_back(third, 3, "%DLQ%g")
    assert not log.found
    log.put(SCHEDULE_TOPIC, "m|", count=1, **again)
    assert "was given back with 0 2 times only" in log.found.pop()
    give_back(first, 1, "%DLQ%g")
    assert any("a dead letter: True" in one for one in log.found)
    log.found.clear()
    tried = checker.sends_back(second)
    assert tried is not None
    checker.sent_back(tried)
    checker.sent_back(tried)
    assert "not in the log" in log.found.pop()


def test_a_half_is_visible_if_it_was_committed_and_once() -> None:
    log = Log()
    checker = transactions.Transactions(log, "g")
    half = log.put(TRANS_HALF_TOPIC, "m|")
    log.put(transactions.TOPIC, "m|", prepared=half)
    assert "not committed" in log.found.pop()
    checker.decisions["m"] = transactions.COMMIT
    log.put(TRANS_HALF_TOPIC, "m|", 1, TRANSACTION_CHECK_TIMES=1)
    log.put(transactions.TOPIC, "m|", prepared=half)
    assert "committed again" in log.found.pop()
    assert "open" in checker.pending()
    checker.ended("m", 0, transactions.COMMIT)
    assert "no op of it" in log.found.pop()
    log.put(TRANS_OP_HALF_TOPIC, "0,1,")
    checker.ended("m", 0, transactions.COMMIT)
    assert not log.found and not checker.pending()
    log.put(TRANS_HALF_TOPIC, "m|", 2, TRANSACTION_CHECK_TIMES=2)
    assert "checked back after its end" in log.found.pop()


def of_pop(what: str, **fields: Any) -> str:
    return json.dumps({what: [{"key": [pops.GROUP, pops.TOPIC, 0], "pop_time": NOW} | fields]})


def popped(offsets: list[int], next_: int = -1, **more: Any) -> str:
    return of_pop("popped", **{"due": NOW + 500, "offsets": offsets, "next": next_} | more)


def acked(offsets: list[int], pop_time: int = NOW) -> str:
    return of_pop("acked", offsets=offsets, pop_time=pop_time)


def popped_in_order(count: int) -> tuple[Log, pops.Pops]:
    """A queue with so many messages, all of which a member means to acknowledge."""
    log = Log()
    checker = pops.Pops(log, in_order=True)
    for n in range(count):
        log.put(pops.TOPIC, f"m{n}|", n)
        checker.acks((pops.TOPIC, 0, n))
    return log, checker


def test_nothing_is_checked_once_a_segment_has_expired() -> None:
    log = Log()
    checker = delays.Delays(log, "g", IN_1_S)
    log.cluster.promises.expiry.begin = 4096  # type: ignore[misc]
    log.put(delays.TOPIC, "m|")
    checker.log.violate("anything")
    assert not log.found


def test_what_is_popped_is_acknowledged_or_comes_back() -> None:
    log = Log()
    checker, retry = pops.Pops(log, in_order=False), f"%RETRY%{pops.GROUP}_{pops.TOPIC}"
    for n in range(3):
        log.put(pops.TOPIC, f"m{n}|", n)
    log.put(POP_TOPIC, popped([0, 1], 2))
    place = pops.TOPIC, 0, 0
    checker.got(place)
    checker.acks(place)
    assert not log.found
    checker.acked(place, NOW)
    assert "not in the log" in log.found.pop()
    log.put(POP_TOPIC, acked([0]))
    checker.acked(place, NOW)
    assert not log.found
    log.put(retry, "m0|", count=1, after_ms=600)
    assert "not in flight" in log.found.pop()
    log.put(retry, "m1|", 1, count=1, after_ms=499)
    assert "before its time" in log.found.pop()
    log.put(POP_TOPIC, acked([1]))
    assert not log.found
    log.put(POP_TOPIC, popped([1, 2], 3))
    assert ["next is 2" in one or "done already" in one for one in log.found] == [True, True]
    log.found.clear()
    log.put(POP_TOPIC, acked([2]))
    assert "neither acknowledged nor back" in log.found.pop()


def test_in_order_a_queue_goes_on_behind_what_is_acknowledged() -> None:
    log, _ = popped_in_order(4)
    again = {"pop_time": NOW + 500, "due": NOW + 900}
    log.put(POP_TOPIC, popped([0, 1]))
    log.put(POP_TOPIC, acked([0]))
    log.put(POP_TOPIC, popped([1, 2], **again), after_ms=500)
    assert not log.found
    log.put(POP_TOPIC, acked([1], NOW + 500))
    log.put(POP_TOPIC, popped([3]), after_ms=900)
    assert "next is 2" in log.found.pop()
    log.put(POP_TOPIC, popped([1, 2]), after_ms=1000)
    assert "next is 2" in log.found.pop()
    assert not log.found


def test_in_order_what_is_in_flight_is_not_popped_but_by_the_same_attempt() -> None:
    log, _ = popped_in_order(3)
    first = popped([0, 1], attempt="a")
    log.put(POP_TOPIC, first)
    log.put(POP_TOPIC, first, after_ms=1)
    assert not log.found
    for attempt in ("b", ""):
        log.put(POP_TOPIC, popped([0, 1], attempt=attempt), after_ms=499)
        assert "['m0', 'm1'] (2) are in flight" in log.found.pop()
    log.put(POP_TOPIC, popped([0, 1]), after_ms=499)
    assert "are in flight" in log.found.pop()  # no attempt is not the same attempt
    log.put(POP_TOPIC, acked([0]))
    log.put(POP_TOPIC, of_pop("put_off", offset=1, visible=NOW + 800))
    log.put(POP_TOPIC, popped([1, 2]), after_ms=799)
    assert "['m1'] (1) are in flight" in log.found.pop()
    log.put(POP_TOPIC, of_pop("put_off", offset=1, visible=NOW + 300))
    log.put(POP_TOPIC, of_pop("put_off", offset=2, visible=NOW + 300))
    log.put(POP_TOPIC, popped([1, 2]), after_ms=300)
    log.put(POP_TOPIC, acked([1, 2]))
    assert not log.found


@pytest.mark.parametrize("again", [[0, 1], [0]])
def test_in_order_what_is_done_behind_an_open_one_comes_again(again: list[int]) -> None:
    """With it or, if fewer are asked for, with the next pop."""
    log, checker = popped_in_order(3)
    log.put(POP_TOPIC, popped([0, 1]))
    log.put(POP_TOPIC, acked([1]))
    log.put(POP_TOPIC, popped(again), after_ms=500)
    log.put(POP_TOPIC, acked([0]))
    log.put(POP_TOPIC, popped([1, 2]), after_ms=1000)
    log.put(POP_TOPIC, acked([1, 2]))
    assert not log.found and not checker.pending()


def test_of_a_condition_all_that_passes_is_delivered_and_nothing_else() -> None:
    log = Log()
    log.not_at_end = lambda *_: ""  # type: ignore[method-assign]
    rng = random.Random(1)
    checker = filters.Filters(log, rng)
    for n in range(100):
        log.sent[f"m{n}"] = filters.TOPIC
        log.acked.add(f"m{n}")
        checker.mark(f"m{n}", Message.of(filters.TOPIC, "m"), rng)
    passing, others = sorted(checker.passing), sorted(log.acked - checker.passing)
    assert passing and others
    for name in passing[1:]:
        checker.got(name)
    assert passing[0] in checker.pending() and not log.found
    checker.got(passing[0])
    assert not checker.pending()
    checker.got(others[0])
    assert f"gets {others[0]}, which is not {checker.expression}" in log.found.pop()


def test_a_question_gets_its_own_answer_and_who_answers_is_told_no_sooner() -> None:
    log = Log()
    checker = questions.AnswerChecker(log)
    checker.waiting.add("a")
    answer = checker.gives("a")
    checker.given("a")
    assert "who asked still waits" in log.found.pop()
    checker.waiting.clear()
    checker.given("a")
    checker.answered("a", answer)
    assert not log.found and checker.pending(), "it was asked while there were faults"
    checker.answered("b", answer)
    assert "b gets b'answer|a'" in log.found.pop()
    log.stopping = True
    checker.answered("a", answer)
    assert not checker.pending() and not log.found
