"""A group that subscribes by an SQL92 condition gets what passes, all of it, and nothing else.

Each message has properties, or lacks them, and what is to be delivered is computed here from what
was sent. A broker filters by what a member's heartbeat says, and that is in no log: a new master
knows nothing of it at first. Messages that do not pass do not hold up the offset.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from batonmq.client.consumer.listener import ConsumeContext
from batonmq.client.consumer.push_consumer import PushConsumer
from batonmq.protocol.bodies import SQL92
from batonmq.protocol.message import Message, MessageExt
from lab.sim.clients import SimConsumer
from lab.sim.features.log import Checker, FeatureLog, some
from lab.sim.messages import Messages

TOPIC = "TopicS"
GROUP = "GroupS"
_SIZES = (None, 0, 1, 2, 3, 4)
_COLOURS = (None, "red", "green", "blue")

Condition = Callable[[int | None, str | None], bool]
_CONDITIONS: Final[tuple[tuple[str, Condition], ...]] = (
    ("size > 1 AND colour = 'blue'", lambda size, colour: (size or 0) > 1 and colour == "blue"),
    (
        "size BETWEEN 1 AND 2 OR colour IS NULL",
        lambda size, colour: size in (1, 2) or colour is None,
    ),
    (
        "colour IN ('red', 'green') AND size IS NOT NULL",
        lambda size, colour: colour in ("red", "green") and size is not None,
    ),
)


class Filters(Checker):
    def __init__(self, log: FeatureLog, rng: random.Random) -> None:
        super().__init__(log)
        self.expression, self._condition = rng.choice(_CONDITIONS)
        self.passing: set[str] = set()

    def mark(self, name: str, message: Message, rng: random.Random) -> None:
        """Gives a message that is to be sent its properties."""
        size, colour = rng.choice(_SIZES), rng.choice(_COLOURS)
        if size is not None:
            message.properties["size"] = str(size)
        if colour is not None:
            message.properties["colour"] = colour
        if self._condition(size, colour):
            self.passing.add(name)

    def got(self, name: str) -> None:
        self.log.got.add((GROUP, name))
        if name not in self.passing:
            self.log.violate(f"filters: {GROUP} gets {name}, which is not {self.expression}")

    def pending(self) -> str:
        missing = [name for name in self.log.missing(GROUP, TOPIC) if name in self.passing]
        if missing:
            return f"{GROUP} has not got {some(missing)}, which are {self.expression}"
        return self.log.not_at_end(GROUP, lambda topic: topic == TOPIC)


class FilteringReader(SimConsumer):
    def __init__(self, checker: Filters, messages: Messages, number: int) -> None:
        super().__init__(checker.log.cluster, messages, number, GROUP, (TOPIC,))
        self._checker = checker

    def _subscribe(self, consumer: PushConsumer) -> None:
        consumer.subscribe(TOPIC, self._checker.expression, expression_type=SQL92)

    async def _consume(self, messages: Sequence[MessageExt], context: ConsumeContext) -> Any:
        for message in messages:
            self._checker.got(message.body.partition(b"|")[0].decode())
