"""A group that locks its queues: one owner at any moment, one call at a time, nothing skipped.

A member owns a queue while it believes that it has the lock: by its own clock, for half a lease
after its request. Two members never own the same queue, also over failovers: a lock is a record of
the log, and a new master counts it as renewed. A member gets the next message of its queue, or one
that was consumed before: a failed message blocks those after it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from batonmq.client.consumer.listener import ConsumeContext, ConsumeStatus
from batonmq.client.consumer.options import ConsumeOptions
from batonmq.client.consumer.orderly_service import OrderlyService
from batonmq.client.consumer.push_consumer import PushConsumer
from batonmq.protocol.message import MessageExt
from batonmq.runtime.clock import boot_ms
from lab.sim.clients import SimConsumer
from lab.sim.features.log import Checker, FeatureLog, some
from lab.sim.messages import Messages

TOPIC = "TopicO"
GROUP = "GroupO"


class Locks(Checker):
    def __init__(self, log: FeatureLog) -> None:
        super().__init__(log)
        self.members: list[OrderlyReader] = []
        self._busy: dict[int, str] = {}
        self._next: dict[int, int] = defaultdict(int)
        self._consumed: set[str] = set()

    def begin(self, member: str, queue_id: int, offset: int) -> None:
        """A member is given the message at `offset`."""
        if queue_id in self._busy:
            self.log.violate(
                f"locks: {member} consumes {TOPIC} {queue_id} beside {self._busy[queue_id]}"
            )
        self._busy[queue_id] = member
        if offset > self._next[queue_id]:
            self.log.violate(
                f"order: {member} gets {TOPIC} {queue_id} {offset}, next is {self._next[queue_id]}"
            )

    def end(self, member: str, queue_id: int) -> None:
        if self._busy.get(queue_id) == member:
            del self._busy[queue_id]

    def consumed(self, name: str, queue_id: int, offset: int) -> None:
        self._consumed.add(name)
        self._next[queue_id] = max(self._next[queue_id], offset + 1)

    def killed(self, member: str) -> None:
        self._busy = {queue: name for queue, name in self._busy.items() if name != member}

    def check(self) -> None:
        owners: dict[int, str] = {}
        for member in self.members:
            if member.process is None:
                continue
            for queue_id in member.process.run(member.owned):
                other = owners.setdefault(queue_id, member.name)
                if other != member.name:
                    self.log.violate(f"locks: {other} and {member.name} own {TOPIC} {queue_id}")

    def pending(self) -> str:
        sent = self.log.sent
        missing = [n for n in self.log.acked if sent[n] == TOPIC and n not in self._consumed]
        if missing:
            return f"{GROUP} has not consumed {some(missing)}"
        return self.log.not_at_end(GROUP, lambda topic: topic == TOPIC)


class OrderlyReader(SimConsumer):
    def __init__(self, checker: Locks, messages: Messages, number: int) -> None:
        super().__init__(checker.log.cluster, messages, number, GROUP, (TOPIC,))
        self._checker = checker
        self._member: PushConsumer | None = None
        checker.members.append(self)

    def start(self) -> None:
        is_new = self.process is None
        super().start()
        if is_new and self.process is not None:
            self.process.on_kill.append(self._killed)

    def _killed(self) -> None:
        self._member = None
        self._checker.killed(self.name)

    def _consumer(self, *_: object, **__: object) -> PushConsumer:
        options = ConsumeOptions(orderly_suspend_ms=100, close_wait_ms=2_000)
        self._member = super()._consumer(options, orderly=True)
        return self._member

    def owned(self) -> list[int]:
        """The queues whose lock it believes to have. To be called in its process."""
        service = self._member._service if self._member is not None else None
        if not isinstance(service, OrderlyService):
            return []
        now_ms = boot_ms()
        return [
            reader.queue.queue_id
            for reader in service._readers
            if reader.queue.topic == TOPIC
            and reader.process_queue.locked_until_ms > now_ms
            and not reader.process_queue.dropped
        ]

    async def _consume(self, messages: Sequence[MessageExt], context: ConsumeContext) -> Any:
        (message,) = messages
        name, fails, _ = message.body.split(b"|", 2)
        queue_id, offset = message.queue_id, message.queue_offset
        self._checker.begin(self.name, queue_id, offset)
        try:
            if self.rng.random() < 0.2:
                await asyncio.sleep(self.rng.uniform(0.01, 0.2))
            if message.reconsume_times < int(fails):
                return ConsumeStatus.RECONSUME_LATER
            self._checker.consumed(name.decode(), queue_id, offset)
            return ConsumeStatus.SUCCESS
        finally:
            self._checker.end(self.name, queue_id)
