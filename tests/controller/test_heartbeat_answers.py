"""Heartbeats are answered at once, but after a stall only by a leader that a majority confirms."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from batonmq.controller.rules.groups import BrokerGroup
from batonmq.controller.rules.state import ControllerState
from batonmq.controller.watch import STALL_MS, HeartbeatAnswers
from batonmq.proto.controller.v1 import controller_pb2 as pb
from tests.shared.waiting import until


class Requests:
    """A node whose gate and whose majority the test holds."""

    def __init__(self) -> None:
        self.leading = True
        self.controller_epoch = 4
        self.state = ControllerState()
        self.asked = 0
        self.now_ms = 1_000
        self.majority: asyncio.Queue[bool] = asyncio.Queue()

    def leader(self) -> None:
        return None

    async def confirm_lead(self, timeout_ms: int) -> bool:
        self.asked += 1
        return await self.majority.get()


class BrokerSession:
    broker_name, broker_id, incarnation = "broker-a", 1, "life-1"

    def __init__(self) -> None:
        self.answers: list[tuple[int, int, bool]] = []
        self.no_lease = False

    def send(self, message: pb.ControllerMessage) -> None:
        answer = message.answer
        self.answers.append((answer.sequence, answer.sent_ms, answer.leader))
        self.no_lease = answer.no_lease


Beat = Callable[[int, int], None]
Leading = tuple[Requests, BrokerSession, Beat]


@pytest.fixture
@contextlib.asynccontextmanager
async def leading() -> AsyncIterator[tuple[Requests, BrokerSession, Beat]]:
    requests, session = Requests(), BrokerSession()
    answers = HeartbeatAnswers(requests, lambda: requests.now_ms)

    def beat(sequence: int, now_ms: int) -> None:
        requests.now_ms = now_ms
        answers.note_loop_turn(now_ms)
        heartbeat = pb.Heartbeat(sequence=sequence, sent_ms=now_ms)
        answers.answer(session, heartbeat)

    answers.note_loop_turn(1_000)
    yield requests, session, beat
    requests.controller_epoch = 0
    await answers.close()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_heartbeat_is_answered_in_the_same_turn(leading):
    requests, session, beat = leading
    beat(1, 1_000 + STALL_MS - 1)
    assert session.answers == [(1, 999 + STALL_MS, True)]
    assert requests.asked == 0


@pytest.mark.parametrize(
    ("master", "no_lease"),
    [((1, "life-1"), False), ((1, "life-2"), True), ((2, "life-1"), True), ((0, ""), True)],
)
async def test_r7_only_the_master_on_record_gets_a_lease(leading, master, no_lease):
    """Controllers that lost their newest entries may give the epoch of a living master again."""
    requests, session, beat = leading
    broker_id, incarnation = master
    group = BrokerGroup("C", "broker-a", master_broker_id=broker_id, master_incarnation=incarnation)
    requests.state = ControllerState(groups={"broker-a": group})
    beat(1, 1_001)
    assert session.no_lease is no_lease


async def test_r5_a_woken_leader_grants_nothing_before_a_majority_confirmed_it(leading):
    """Stopped for 5 s: heartbeats of that time lie in its sockets, another may lead by now."""
    requests, session, beat = leading
    beat(1, 6_000)
    beat(2, 6_001)
    await settled()
    assert (session.answers, requests.asked) == ([], 1)
    requests.majority.put_nowait(True)
    await settled()
    assert session.answers == [(1, 6_000, True), (2, 6_001, True)]
    beat(3, 6_100)
    assert session.answers[2:] == [(3, 6_100, True)]


async def test_r5_a_woken_leader_that_was_deposed_never_grants(leading):
    requests, session, beat = leading
    beat(1, 6_000)
    await settled()
    requests.leading, requests.controller_epoch = False, 0
    requests.majority.put_nowait(False)
    await settled()
    beat(2, 6_100)
    await until(lambda: len(session.answers) == 2)
    assert [answer[2] for answer in session.answers] == [False, False]


async def test_r5_a_leader_that_finds_no_majority_sends_brokers_elsewhere_and_asks_again(leading):
    requests, session, beat = leading
    beat(1, 6_000)
    await settled()
    requests.majority.put_nowait(False)
    await settled()
    assert session.answers == [(1, 6_000, False)]
    beat(2, 6_100)
    assert len(session.answers) == 1
    await until(lambda: requests.asked == 2)
    requests.majority.put_nowait(True)
    await settled()
    assert session.answers[1:] == [(2, 6_100, True)]


async def test_r5_a_woken_leader_that_has_no_news_at_first_is_in_doubt_too(leading):
    """1. Right after the stall nobody has answered it: the gate is shut. 2. Answers of before the
    stall open it for a moment. 3. No lease is granted by that."""
    requests, session, beat = leading
    requests.leading = False
    beat(1, 6_000)
    await settled()
    requests.leading = True
    beat(2, 6_010)
    await settled()
    assert session.answers == []
    requests.majority.put_nowait(False)
    await settled()
    assert [answer[2] for answer in session.answers] == [False, False]


async def test_r5_the_gate_shut_for_an_instant_does_not_end_the_doubt(leading):
    requests, session, beat = leading
    beat(1, 6_000)
    await settled()
    requests.leading = False
    requests.majority.put_nowait(False)
    await until(lambda: requests.asked == 2)
    requests.leading = True
    beat(2, 6_010)
    assert session.answers == [(1, 6_000, False)]
    requests.majority.put_nowait(True)
    await settled()
    assert session.answers[1:] == [(2, 6_010, True)]


async def test_r5_a_second_stall_makes_the_majoritys_word_stale(leading):
    requests, session, beat = leading
    beat(1, 6_000)
    await settled()
    requests.now_ms = 9_000
    requests.majority.put_nowait(True)
    await settled()
    assert (session.answers, requests.asked) == ([], 2)
