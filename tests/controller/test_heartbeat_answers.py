"""Heartbeats are answered at once, but after a stall only by a leader that a majority confirms."""

import asyncio
from typing import Any

from baton.controller.v1 import controller_pb2 as pb
from controller.heartbeat_answers import STALL_MS, HeartbeatAnswers
from controller.state import ControllerState


class Requests:
    """A node whose gate and whose majority the test holds."""

    def __init__(self) -> None:
        self.leading = True
        self.controller_epoch = 4
        self.state = ControllerState()
        self.asked = 0
        self.majority: asyncio.Queue[bool] = asyncio.Queue()

    def leader(self) -> None:
        return None

    async def confirm_lead(self, timeout_ms: int) -> bool:
        self.asked += 1
        return await self.majority.get()


class Session:
    broker_name = "broker-a"

    def __init__(self) -> None:
        self.answers: list[tuple[int, int, bool]] = []

    def send(self, message: pb.ControllerMessage) -> None:
        answer = message.answer
        self.answers.append((answer.sequence, answer.sent_ms, answer.leader))


def play(script: Any) -> None:
    async def run() -> None:
        requests, session = Requests(), Session()
        answers = HeartbeatAnswers(requests)  # type: ignore[arg-type]

        def beat(sequence: int, now_ms: int) -> None:
            answers.turned(now_ms)
            heartbeat = pb.Heartbeat(sequence=sequence, sent_ms=now_ms)
            answers.answer(session, heartbeat)  # type: ignore[arg-type]

        answers.turned(1_000)
        await script(requests, session, beat)
        await answers.close()

    asyncio.run(run())


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_heartbeat_is_answered_in_the_same_turn() -> None:
    async def script(requests: Requests, session: Session, beat: Any) -> None:
        beat(1, 1_000 + STALL_MS - 1)
        assert session.answers == [(1, 1_249, True)]
        assert requests.asked == 0

    play(script)


def test_r5_a_woken_leader_grants_nothing_before_a_majority_confirmed_it() -> None:
    """Stopped for 5 s: heartbeats of that time lie in its sockets, another may lead by now."""

    async def script(requests: Requests, session: Session, beat: Any) -> None:
        beat(1, 6_000)
        beat(2, 6_001)
        await settled()
        assert (session.answers, requests.asked) == ([], 1)
        requests.majority.put_nowait(True)
        await settled()
        assert session.answers == [(1, 6_000, True), (2, 6_001, True)]
        beat(3, 6_100)
        assert session.answers[2:] == [(3, 6_100, True)]

    play(script)


def test_r5_a_woken_leader_that_was_deposed_never_grants() -> None:
    async def script(requests: Requests, session: Session, beat: Any) -> None:
        beat(1, 6_000)
        await settled()
        requests.leading = False
        requests.majority.put_nowait(False)
        await settled()
        beat(2, 6_100)
        assert [answer[2] for answer in session.answers] == [False, False]

    play(script)


def test_r5_a_leader_that_finds_no_majority_sends_brokers_elsewhere_and_asks_again() -> None:
    async def script(requests: Requests, session: Session, beat: Any) -> None:
        beat(1, 6_000)
        await settled()
        requests.majority.put_nowait(False)
        await settled()
        assert session.answers == [(1, 6_000, False)]
        beat(2, 6_100)
        assert len(session.answers) == 1
        requests.majority.put_nowait(True)
        await settled()
        assert session.answers[1:] == [(2, 6_100, True)]
        assert requests.asked == 2

    play(script)
