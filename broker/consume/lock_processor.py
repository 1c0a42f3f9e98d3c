"""Queue locks of orderly groups: 41 and 42.

A lock is answered when its record is on every required member (SAFETY R30), a renewal when this
broker has shown that it is still the master: the answer of one that was deposed, or slept, would
give a queue a second owner. What a client has given back, or let run out, is a record, too.
Origin: `AdminBrokerProcessor.lockBatchMQ`, `RebalanceLockManager` in Java.
"""

from __future__ import annotations

from typing import Final

from batonmq.broker.role_gate import GateClosedError
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import LockBatchRequestBody, LockBatchResponseBody
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.store.queue_locks import QueueLockManager

QUEUES_MAX: Final = 10_000


class LockProcessor:
    """On masters only; the relay brings what reaches another member."""

    def __init__(self, path: WritePath, topics: TopicService, locks: QueueLockManager) -> None:
        self._path = path
        self._topics = topics
        self._locks = locks

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.LOCK_BATCH_MQ, self.lock)
        processors.register(RequestCode.UNLOCK_BATCH_MQ, self.unlock)

    async def lock(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """41. The queues that the client has from now on, for 60 s; another's are left out."""
        asked = self._asked(request)
        queues = {(queue.topic, queue.queue_id): queue for queue in asked.mq_set}
        granted, change = self._locks.grant(
            asked.consumer_group, asked.client_id, queues, self._path.clock_ms()
        )
        what = f"queue locks of group {asked.consumer_group}"
        if change is not None:
            await self._path.wait_confirmed(self._topics.put_locks(change), what)
        elif granted:
            await self._path.still_master(what)
        body = LockBatchResponseBody(lock_ok_mq_set=[queues[queue] for queue in granted])
        return RemotingCommand.response_to(request, body=body.encode())

    def unlock(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """42. Others may have the queues at once."""
        asked = self._asked(request)
        queues = [(queue.topic, queue.queue_id) for queue in asked.mq_set]
        change = self._locks.release(asked.consumer_group, asked.client_id, queues)
        if change is not None:
            self._topics.put_locks(change)
        return RemotingCommand.response_to(request)

    def tick(self, now_ms: int) -> None:
        """Forgets some of the locks whose lease is over."""
        if self._path.gate.refusal is not None:
            return
        for group, client_id, queue in self._locks.over(now_ms):
            change = self._locks.release(group, client_id, [queue])
            if change is not None:
                self._topics.put_locks(change)

    def _asked(self, request: RemotingCommand) -> LockBatchRequestBody:
        if self._path.gate.refusal is not None:
            raise GateClosedError(self._path.gate.refusal)
        body = LockBatchRequestBody.decode(request.body)
        for name, value in (("clientId", body.client_id), ("consumerGroup", body.consumer_group)):
            if not value:
                raise BrokerRefusal(ResponseCode.INVALID_PARAMETER, f"the body lacks {name}")
        if len(body.mq_set) > QUEUES_MAX:
            raise BrokerRefusal(
                ResponseCode.INVALID_PARAMETER,
                f"{len(body.mq_set)} queues in mqSet, at most {QUEUES_MAX} are allowed",
            )
        return body
