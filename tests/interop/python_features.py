"""What `java/Features.java` does, with the client of this project: the same modes, the same lines.

A producer and consumers on a loop of their own, in a thread of the test's process.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, Final, Self, TypeVar

from batonmq import (
    BatonError,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeOptions,
    ConsumeStatus,
    Message,
    MessageExt,
    PushConsumer,
    PushConsumerOptions,
    TransactionProducer,
    TransactionState,
)
from batonmq.runtime.clock import wall_ms
from tests.interop.features import MAX_RECONSUME, Line

WAIT_S: Final = 60.0
T = TypeVar("T")


class PythonFeatures:
    """A context manager. `lines` grows while it runs."""

    def __init__(self, name_servers: str, group: str, topics: Sequence[str]) -> None:
        self.lines: list[Line] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="python-features")
        self._numbers = itertools.count()
        self._producer = TransactionProducer(
            "python-producers", self._check, name_servers=name_servers
        )
        self._consumer = PushConsumer(
            group,
            self._consume,
            name_servers=name_servers,
            options=PushConsumerOptions(
                from_where=ConsumeFromWhere.FIRST,
                persist_ms=500,
                consume=ConsumeOptions(max_reconsume_times=MAX_RECONSUME),
            ),
        )
        for topic in topics:
            self._consumer.subscribe(topic)
        self._sending: list[asyncio.Future[None]] = []
        self._stopped = False

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *exc: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def send(self, command: str) -> None:
        """As a line for the Java program, in a task of its own."""

        async def begin() -> None:
            self._sending.append(asyncio.ensure_future(self._send_all(*command.split(" "))))

        self._run(begin())

    def stop(self) -> None:
        """Ends the sends without a count, and returns when all have ended."""

        async def end() -> None:
            self._stopped = True
            await asyncio.gather(*self._sending)

        self._run(end())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    async def _start(self) -> None:
        await self._producer.start()
        await self._consumer.start()

    async def _close(self) -> None:
        await self._consumer.close()
        await self._producer.close()

    async def _send_all(self, mode: str, value: str, topic: str, count: str) -> None:
        for sent in itertools.count():
            if sent >= int(count) if int(count) else self._stopped:
                return
            key = f"{mode}-{value}-python-{next(self._numbers)}"
            try:
                await self._send_one(key, mode, value, topic)
            except BatonError as error:
                self.lines.append({"failed": key, "why": str(error), "at": wall_ms()})
            await asyncio.sleep(0.02)

    async def _send_one(self, key: str, mode: str, value: str, topic: str) -> None:
        message = Message.of(topic, f"body of {key}", keys=key)
        sent_ms = wall_ms()
        handle = ""
        if mode == "transaction":
            message.properties["outcome"] = value
            done = await self._producer.send_in_transaction(message, _executed(value))
            acknowledged = done.send.acknowledged
        else:
            wishes = _wish(message, mode, int(value), sent_ms)
            result = await self._producer.send(message, **wishes)
            acknowledged, handle = result.acknowledged, result.recall_handle
        if not acknowledged:
            self.lines.append({"failed": key, "why": "not confirmed", "at": wall_ms()})
            return
        line = {"acked": key, "mode": mode, "value": value, "topic": topic}
        self.lines.append({**line, "sent": sent_ms, "at": wall_ms()})
        if mode == "recall":
            await self._producer.recall(topic, handle)
            self.lines.append({"recalled": key})

    def _check(self, message: MessageExt) -> TransactionState:
        self.lines.append({"checked": message.properties["KEYS"], "at": wall_ms()})
        return _state(message.properties["outcome"])

    async def _consume(
        self, messages: Sequence[MessageExt], _: ConsumeContext
    ) -> ConsumeStatus | None:
        (message,) = messages
        times = message.reconsume_times
        is_failed = times < int(message.properties.get("fails", "0"))
        line = {"key": message.properties["KEYS"], "topic": message.topic, "times": times}
        self.lines.append({**line, "fails": is_failed, "at": wall_ms()})
        return ConsumeStatus.RECONSUME_LATER if is_failed else ConsumeStatus.SUCCESS


def _wish(message: Message, mode: str, value: int, sent_ms: int) -> dict[str, Any]:
    """Sets properties of the message, and gives arguments of the send."""
    if mode == "fails":
        message.properties["fails"] = str(value)
    elif mode == "level":
        message.delay_level = value
    elif mode == "at":
        return {"deliver_at": (sent_ms + value) / 1000}
    elif mode == "sec":
        return {"delay": timedelta(seconds=value)}
    else:
        return {"delay": value / 1000}
    return {}


def _executed(outcome: str) -> Callable[[Message], TransactionState]:
    state = TransactionState.UNKNOWN if outcome.startswith("later-") else _state(outcome)
    return lambda _message: state


def _state(outcome: str) -> TransactionState:
    commits = outcome.endswith("commit")
    return TransactionState.COMMIT if commits else TransactionState.ROLLBACK
