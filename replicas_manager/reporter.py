"""Sends what this broker saw first-hand to the controllers' history, in order.

Nothing waits for a report: it is queued with its time and sent a little later, so that it does not
precede the commands of a failover in the controllers' log. A report without an answer is sent
again, to the leader of that moment, under the same request id, so the history has it once.
At most `KEPT_MAX` events wait; beyond that the oldest are dropped, with one line in the log. Each
is an entry in the controllers' log, so of one kind at most `OFTEN_MAX` are sent in `OFTEN_MS`; the
next one has in `notTold` how many were left out.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping

import grpc

from batonmq.process.clock import boot_ms, wall_ms
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.protocol.codes import ResponseCode
from batonmq.replicas_manager.session import ControllerChannels, is_only_the_call_cancelled

log = logging.getLogger(__name__)

KEPT_MAX = 256
OFTEN_MAX = 20
OFTEN_MS = 10_000
CALL_TIMEOUT_S = 1.0
RETRY_S = 0.25
SETTLE_S = 0.05
"""How long after it happened the first of a row of events is sent."""


class EventReporter:
    """`leader` gives the leading controller, None while none is known."""

    def __init__(
        self,
        broker_name: str,
        incarnation: str,
        channels: ControllerChannels,
        leader: Callable[[], str | None],
        clock_ms: Callable[[], int] = boot_ms,
    ) -> None:
        self._broker_name = broker_name
        self._incarnation = incarnation
        self._channels = channels
        self._leader = leader
        self._waiting: deque[pb.ReportEventRequest] = deque()
        self._count = 0
        self._clock_ms = clock_ms
        self._recent: dict[tuple[int, str], deque[int]] = {}
        self._left_out: Counter[tuple[int, str]] = Counter()
        self._task: asyncio.Task[None] | None = None

    def report(
        self, kind: str, broker_id: int, master_epoch: int, fields: Mapping[str, object]
    ) -> None:
        """Queue one event; its time is now."""
        if self._is_too_often(broker_id, kind):
            return
        left_out = self._left_out.pop((broker_id, kind), 0)
        if left_out:
            fields = {**fields, "notTold": left_out}
        self._count += 1
        if len(self._waiting) >= KEPT_MAX:
            dropped = self._waiting.popleft()
            log.warning("event_not_reported kind=%s time_ms=%d", dropped.kind, dropped.time_ms)
        self._waiting.append(
            pb.ReportEventRequest(
                broker_name=self._broker_name,
                broker_id=broker_id,
                master_epoch=master_epoch,
                kind=kind,
                time_ms=wall_ms(),
                json=json.dumps(dict(fields)),
                request_id=f"{self._incarnation}/event/{self._count}",
            )
        )
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._send_all())

    def _is_too_often(self, broker_id: int, kind: str) -> bool:
        now_ms = self._clock_ms()
        recent = self._recent.setdefault((broker_id, kind), deque(maxlen=OFTEN_MAX))
        if len(recent) == OFTEN_MAX and now_ms - recent[0] < OFTEN_MS:
            self._left_out[broker_id, kind] += 1
            log.warning("event_not_reported kind=%s why=too often", kind)
            return True
        recent.append(now_ms)
        return False

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _send_all(self) -> None:
        try:
            await asyncio.sleep(SETTLE_S)
            while self._waiting:
                request = self._waiting[0]
                if not await self._send(request):
                    await asyncio.sleep(RETRY_S)
                elif self._waiting and self._waiting[0] is request:
                    self._waiting.popleft()
        finally:
            self._task = None

    async def _send(self, request: pb.ReportEventRequest) -> bool:
        """True if the event needs no further attempt."""
        leader = self._leader()
        if leader is None:
            return False
        try:
            stub = self._channels.stub(leader)
            reply = await stub.ReportEvent(request, timeout=CALL_TIMEOUT_S)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not is_only_the_call_cancelled():
                raise
            log.debug("report_failed kind=%s why=%s", request.kind, error)
            return False
        code = reply.status.code
        if code not in (ResponseCode.SUCCESS, ResponseCode.CONTROLLER_NOT_LEADER):
            log.warning(
                "event_refused kind=%s code=%d remark=%r", request.kind, code, reply.status.remark
            )
        return bool(code != ResponseCode.CONTROLLER_NOT_LEADER)
