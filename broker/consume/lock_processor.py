"""Queue locks of orderly groups: lock (LOCK_BATCH_MQ, 41) and unlock (UNLOCK_BATCH_MQ, 42).

A lock is answered when its record is on every required member (R30). Releases and expiries of locks
are records as well. Origin: `AdminBrokerProcessor.lockBatchMQ`, `RebalanceLockManager` in Java.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from batonmq.broker.request_fields import invalid
from batonmq.broker.tables.queue_locks import Queue, QueueLockManager
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import LockBatchRequestBody, LockBatchResponseBody
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.topic_name import CLIENT_ID_LENGTH_MAX, check_group, check_made_topic
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.runtime.turns import in_turns
from batonmq.store.errors import PutRefused

log = logging.getLogger(__name__)

QUEUES_MAX: Final = 10_000
QUEUES_AT_ONCE: Final = 512


class LockProcessor:
    """Runs on masters; the relay passes on requests of other members. A slave that acts for its
    master keeps locks in memory only, as Java always does."""

    def __init__(self, path: WritePath, topics: TopicService, locks: QueueLockManager) -> None:
        self._path = path
        self._topics = topics
        self._locks = locks

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.LOCK_BATCH_MQ, self.lock)
        processors.register(RequestCode.UNLOCK_BATCH_MQ, self.unlock)

    async def lock(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Locks the queues that no other client holds, for 60 s (LOCK_BATCH_MQ, 41)."""
        asked = self._asked(request)
        group, client_id, now_ms = asked.consumer_group, asked.client_id, self._path.clock_ms()
        granted: list[MessageQueue] = []
        async for queues in in_turns(_parts(asked.mq_set), 1):
            self._require_open()
            got, change = self._locks.grant(
                group, client_id, queues, now_ms, partial(self._is_known, group)
            )
            granted += [queues[queue] for queue in got]
            if change is not None:
                self._topics.put_locks(change)
        # Also for a renewal, which needs no record: a deposed master would give the queue a second
        # owner. A slave that acts for its master has no SyncStateSet to confirm a lock.
        if granted and not self._path.gate.is_acting:
            await self._path.still_master(f"queue locks of group {group}")
        body = LockBatchResponseBody(lock_ok_mq_set=granted)
        return RemotingCommand.response_to(request, body=body.encode())

    def _is_known(self, group: str, queue: Queue) -> bool:
        topic, queue_id = queue
        config = self._topics.get(topic)
        is_queue = config is not None and 0 <= queue_id < config.read_queue_nums
        return is_queue and group in self._topics.groups

    async def unlock(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Releases queues (UNLOCK_BATCH_MQ, 42)."""
        asked = self._asked(request)
        async for queues in in_turns(_parts(asked.mq_set), 1):
            self._require_open()
            self._release(asked.consumer_group, asked.client_id, queues)
        return RemotingCommand.response_to(request)

    def _release(self, group: str, client_id: str, queues: Iterable[Queue]) -> None:
        change = self._locks.release(group, client_id, queues)
        if change is not None:
            self._topics.put_locks(change)

    def tick(self, now_ms: int) -> None:
        if self._path.gate.refusal is not None:
            return
        # By records: a new master that still had such a lock would refuse the next owner.
        over: dict[tuple[str, str], list[Queue]] = {}
        for group, client_id, queue in self._locks.expired(now_ms):
            over.setdefault((group, client_id), []).append(queue)
        for (group, client_id), queues in over.items():
            try:
                self._release(group, client_id, queues)
            except PutRefused as error:  # a full disk (R45): all of them come again
                log.info("expired_locks_wait group=%s reason=%s", group, error)
                return

    def _require_open(self) -> None:
        gate = self._path.gate
        if not gate.is_acting:
            gate.require_open()

    def _asked(self, request: RemotingCommand) -> LockBatchRequestBody:
        self._require_open()
        body = LockBatchRequestBody.decode_request(request.body)
        for name, value in (("clientId", body.client_id), ("consumerGroup", body.consumer_group)):
            if not value:
                raise invalid(f"the body lacks {name}")
        check_group(body.consumer_group)
        if len(body.client_id) > CLIENT_ID_LENGTH_MAX:
            raise invalid(
                f"clientId has {len(body.client_id)} characters, allowed are {CLIENT_ID_LENGTH_MAX}"
            )
        if len(body.mq_set) > QUEUES_MAX:
            raise invalid(f"{len(body.mq_set)} queues in mqSet, at most {QUEUES_MAX} are allowed")
        for topic in {queue.topic for queue in body.mq_set}:
            check_made_topic(topic)
        return body


def _parts(queues: Sequence[MessageQueue]) -> Iterator[dict[Queue, MessageQueue]]:
    for begin in range(0, len(queues), QUEUES_AT_ONCE):
        some = queues[begin : begin + QUEUES_AT_ONCE]
        yield {(queue.topic, queue.queue_id): queue for queue in some}
