"""Questions and their answers: each asker gets the answer to its own question, or none.

A consumer gets SUCCESS for its answer only once the asker has it. Questions may be lost on the way,
as their time runs out; once the faults are over they are answered again.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from batonmq.client.consumer.listener import ConsumeContext
from batonmq.client.producer.producer import Producer
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import Message, MessageExt
from lab.sim.clients import Client, SimConsumer, producer_of
from lab.sim.features.log import Checker, FeatureLog
from lab.sim.messages import Messages

TOPIC = "TopicQ"
GROUP = "GroupQ"
_ANSWER_MS = 2_000


class AnswerChecker(Checker):
    def __init__(self, log: FeatureLog) -> None:
        super().__init__(log)
        self.waiting: set[str] = set()
        self._given: set[str] = set()
        self._is_answered = False  # one that was asked once the faults were over

    def gives(self, name: str) -> bytes:
        """The answer to that question, which a consumer is about to give."""
        self._given.add(name)
        return f"answer|{name}".encode()

    def given(self, name: str) -> None:
        """The consumer got SUCCESS: the asker has it."""
        if name in self.waiting:
            self.log.violate(f"questions: the answer to {name} is taken, and who asked still waits")

    def answered(self, name: str, body: bytes) -> None:
        if body != f"answer|{name}".encode() or name not in self._given:
            self.log.violate(f"questions: {name} gets {body!r} for an answer")
        self._is_answered |= self.log.stopping

    def pending(self) -> str:
        return "" if self._is_answered else "no question is answered since the faults are over"


class Asker(Client):
    def __init__(self, checker: AnswerChecker, messages: Messages, number: int) -> None:
        super().__init__(checker.log.cluster, messages, "asker", number)
        self._checker = checker

    def _ended(self) -> None:
        super()._ended()
        self._checker.waiting.clear()

    async def run(self) -> None:
        log = self._checker.log
        async with producer_of("Askers") as producer:
            while not log.stopping or self._checker.pending():
                await asyncio.sleep(self.rng.uniform(0.05, 0.4))
                try:
                    await self._ask(producer)
                except BatonError as error:
                    self.world.tell(self.name, f"no answer: {error}")

    async def _ask(self, producer: Producer) -> None:
        checker, name = self._checker, self.new_name()
        message = Message.of(TOPIC, f"{name}|?", keys=name)
        checker.waiting.add(name)
        try:
            answer = await producer.request(message, timeout_ms=_ANSWER_MS)
        finally:
            checker.waiting.discard(name)
        checker.answered(name, answer.body)


class Replier(SimConsumer):
    def __init__(self, checker: AnswerChecker, messages: Messages, number: int) -> None:
        super().__init__(checker.log.cluster, messages, number, GROUP, (TOPIC,))
        self._checker = checker
        self._producer: Producer

    async def run(self) -> None:
        async with producer_of("Repliers") as self._producer:
            await super().run()

    async def _consume(self, messages: Sequence[MessageExt], context: ConsumeContext) -> Any:
        for message in messages:
            name = message.body.partition(b"|")[0].decode()
            try:
                answer = self._checker.gives(name)
                await self._producer.reply(message, answer, timeout_ms=_ANSWER_MS)
            except BatonError as error:
                self.world.tell(self.name, f"{name} is not answered: {error}")
            else:
                self._checker.given(name)
