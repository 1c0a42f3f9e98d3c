"""A thin blocking facade for scripts: each object here drives its asyncio twin.

One event loop runs in a daemon thread and is shared by all blocking objects of the process; every
call is handed to it and waited for. Errors are those of the asyncio classes. Not for use inside a
running loop: there the asyncio classes are at home.
"""

import asyncio
import atexit
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import uvloop

from batonmq.admin import Admin
from batonmq.admin_types import GroupProgress, QueueStats
from batonmq.client_instance import ClientInstance, ClientOptions
from batonmq.consume_types import ConsumeFromWhere, Listener
from batonmq.controller_admin import ControllerAdmin
from batonmq.errors import ClientError
from batonmq.producer import Producer, ProducerOptions, QueueSelector
from batonmq.pull_consumer import PullConsumer
from batonmq.pull_result import PullResult
from batonmq.push_consumer import PushConsumer
from batonmq.push_options import PushConsumerOptions
from batonmq.send_result import SendResult
from batonmq.subscription import ALL
from protocol.bodies import ClusterInfo, TopicConfig, TopicRouteData
from protocol.message import Message, MessageExt, MessageQueue

T = TypeVar("T")


class _LoopThread:
    """The one loop, started at first use and stopped when the interpreter ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises ClientError if called from the loop itself (a listener, say)."""
        loop = self._running_loop()
        if threading.current_thread() is self._thread:
            work.close()
            raise ClientError("a blocking call on the loop's own thread would wait for itself")
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = uvloop.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="batonmq-loop", daemon=True
                )
                self._thread.start()
                atexit.register(self.stop)
            return self._loop

    def stop(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=5)
            loop.close()


_loop_thread = _LoopThread()


class _Startable(Protocol):
    async def start(self) -> None: ...

    async def close(self) -> None: ...


S = TypeVar("S", bound=_Startable)


class _Blocking(Generic[S]):
    """Lifecycle of a twin; usable as `with`."""

    def __init__(self, twin: S) -> None:
        self._twin = twin

    def start(self) -> None:
        self._run(self._twin.start())

    def close(self) -> None:
        self._run(self._twin.close())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return _loop_thread.run(work)


class BlockingProducer(_Blocking[Producer]):
    """See `Producer`."""

    def __init__(
        self,
        group: str,
        *,
        name_servers: str | Sequence[str] | None = None,
        options: ProducerOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        super().__init__(
            Producer(
                group, name_servers=name_servers, options=options, client_options=client_options
            )
        )

    def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> SendResult:
        return self._run(
            self._twin.send(message, queue=queue, selector=selector, timeout_ms=timeout_ms)
        )

    def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
    ) -> SendResult:
        return self._run(self._twin.send_batch(messages, queue=queue, timeout_ms=timeout_ms))

    def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
    ) -> None:
        self._run(self._twin.send_oneway(message, queue=queue, selector=selector))

    def publish_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        return self._run(self._twin.publish_queues(topic))


class BlockingPullConsumer(_Blocking[PullConsumer]):
    """See `PullConsumer`."""

    def __init__(
        self,
        group: str,
        *,
        name_servers: str | Sequence[str] | None = None,
        client_options: ClientOptions | None = None,
        from_where: ConsumeFromWhere = ConsumeFromWhere.FIRST,
    ) -> None:
        super().__init__(
            PullConsumer(
                group,
                name_servers=name_servers,
                client_options=client_options,
                from_where=from_where,
            )
        )

    def fetch_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        return self._run(self._twin.fetch_queues(topic))

    def assign(self, queues: Sequence[MessageQueue], expression: str = ALL) -> None:
        self._run(self._twin.assign(queues, expression))

    def seek(self, queue: MessageQueue, offset: int) -> None:
        self._run(self._twin.seek(queue, offset))

    def poll(self, timeout_ms: int = 1000, *, max_messages: int = 32) -> list[MessageExt]:
        return self._run(self._twin.poll(timeout_ms, max_messages=max_messages))

    def pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int = 32,
        *,
        expression: str = ALL,
        timeout_ms: int = 3000,
        block: bool = False,
    ) -> PullResult:
        return self._run(
            self._twin.pull(
                queue,
                offset,
                max_messages,
                expression=expression,
                timeout_ms=timeout_ms,
                block=block,
            )
        )

    def commit(self, offsets: dict[MessageQueue, int] | None = None) -> None:
        self._run(self._twin.commit(offsets))

    def committed(self, queue: MessageQueue) -> int | None:
        return self._run(self._twin.committed(queue))

    def max_offset(self, queue: MessageQueue) -> int:
        return self._run(self._twin.max_offset(queue))

    def min_offset(self, queue: MessageQueue) -> int:
        return self._run(self._twin.min_offset(queue))

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        return self._run(self._twin.offset_by_time(queue, timestamp_ms))


class BlockingPushConsumer(_Blocking[PushConsumer]):
    """See `PushConsumer`. A plain listener runs in threads of its own and may block."""

    def __init__(
        self,
        group: str,
        listener: Listener,
        *,
        orderly: bool = False,
        name_servers: str | Sequence[str] | None = None,
        options: PushConsumerOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        super().__init__(
            PushConsumer(
                group,
                listener,
                orderly=orderly,
                name_servers=name_servers,
                options=options,
                client_options=client_options,
            )
        )

    def subscribe(self, topic: str, expression: str = ALL) -> None:
        async def on_loop() -> None:
            self._twin.subscribe(topic, expression)

        self._run(on_loop())


class BlockingAdmin(_Blocking[Admin]):
    """The commonest calls of `Admin`; any other: `admin.run(admin.twin.topic_list())`."""

    def __init__(
        self,
        name_servers: str | Sequence[str] | None = None,
        *,
        client: ClientInstance | None = None,
        timeout_ms: int = 5_000,
    ) -> None:
        super().__init__(Admin(name_servers, client=client, timeout_ms=timeout_ms))

    @property
    def twin(self) -> Admin:
        return self._twin

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._run(work)

    def controller(self, addresses: str | Sequence[str]) -> ControllerAdmin:
        """Its methods are coroutines: hand them to `run`."""
        return self._twin.controller(addresses)

    def cluster_info(self) -> ClusterInfo:
        return self._run(self._twin.cluster_info())

    def topic_list(self) -> list[str]:
        return self._run(self._twin.topic_list())

    def topic_route(self, topic: str) -> TopicRouteData:
        return self._run(self._twin.topic_route(topic))

    def topic_stats(self, topic: str) -> tuple[QueueStats, ...]:
        return self._run(self._twin.topic_stats(topic))

    def create_or_update_topic(
        self, config: TopicConfig, *, cluster: str | None = None, broker: str | None = None
    ) -> dict[str, str]:
        return self._run(self._twin.create_or_update_topic(config, cluster=cluster, broker=broker))

    def delete_topic(self, topic: str, cluster: str) -> dict[str, str]:
        return self._run(self._twin.delete_topic(topic, cluster))

    def message_by_id(self, msg_id: str, topic: str = "") -> MessageExt | None:
        return self._run(self._twin.message_by_id(msg_id, topic))

    def messages_by_key(self, topic: str, key: str, max_messages: int = 64) -> list[MessageExt]:
        return self._run(self._twin.messages_by_key(topic, key, max_messages=max_messages))

    def consumer_progress(self, group: str, topic: str | None = None) -> GroupProgress:
        return self._run(self._twin.consumer_progress(group, topic))
