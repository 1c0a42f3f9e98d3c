"""A load through the project's own client: tasks of one Producer that send without pause."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from batonmq import ClientError, Message, MessageQueue, Producer
from batonmq.protocol.errors import BatonError
from lab.cluster.frames import BROKER_NAME

QUEUES = 4
UNTIL_S = 20.0


class ClientLoad:
    """Task i sends `i:0`, `i:1`, … into queue i (modulo 4), each after the one before was answered.

    `numbers`: how many sends of each task were acknowledged. `acks`: (CLOCK_MONOTONIC s, address of
    the broker). `failures`: the errors of all other sends.
    """

    def __init__(self, producer: Producer, topic: str, *, tasks: int, size: int = 0) -> None:
        self.topic = topic
        self.numbers = [0] * tasks
        self.acks: list[tuple[float, str]] = []
        self.failures: list[str] = []
        self._acked = asyncio.Event()
        self._producer = producer
        self._size = size
        self._stopped = False

    async def run(self) -> None:
        """Sends until `stop`."""
        async with asyncio.TaskGroup() as running:
            for task in range(len(self.numbers)):
                running.create_task(self._send(task))

    async def _send(self, task: int) -> None:
        queue = MessageQueue(self.topic, BROKER_NAME, task % QUEUES)
        while not self._stopped:
            body = (b"%d:%d" % (task, self.numbers[task])).ljust(self._size, b" ")
            try:
                result = await self._producer.send(Message(self.topic, body), queue=queue)
            except (BatonError, ClientError) as error:
                self.failures.append(str(error))
                continue
            if not result.acknowledged:
                self.failures.append(result.status.name)
                continue
            self.numbers[task] += 1
            self.acks.append((time.monotonic(), result.address))
            self._acked.set()

    def stop(self) -> None:
        self._stopped = True

    async def until(self, count: int, address: str | None = None) -> None:
        """Returns after `count` acks from now, of that broker if one is named. Raises
        TimeoutError after 20 s."""
        seen = len(self.acks)
        async with asyncio.timeout(UNTIL_S):
            while sum(address in (None, one) for _, one in self.acks[seen:]) < count:
                self._acked.clear()
                await self._acked.wait()

    def pause_ms(self, since: float) -> float:
        """The longest time without an ack."""
        times = [since, *(at for at, _ in self.acks if at >= since)]
        return max((after - before) * 1000 for before, after in pairwise(times))
