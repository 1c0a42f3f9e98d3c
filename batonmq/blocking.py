"""The client for scripts: each class here runs its asyncio twin and waits for each call.

One event loop runs in a daemon thread and is shared by all blocking objects of the process.
Parameters, results and errors are those of the asyncio classes. Not for use inside a running loop:
use the asyncio classes there.
"""

import asyncio
import atexit
import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

import uvloop

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.cluster import BrokerAdmin, ClusterAdmin
from batonmq.client.admin.consumer_groups import ConsumerGroupAdmin
from batonmq.client.admin.controller_admin import ControllerAdmin
from batonmq.client.admin.messages import MessageAdmin
from batonmq.client.admin.topics import TopicAdmin
from batonmq.client.consumer.lite_pull_consumer import LitePullConsumer
from batonmq.client.consumer.pop_consumer import PopConsumer
from batonmq.client.consumer.pull_consumer import PullConsumer
from batonmq.client.consumer.push_consumer import PushConsumer
from batonmq.client.errors import ClientError
from batonmq.client.instance.client_instance import InstanceUser
from batonmq.client.producer.producer import Producer
from batonmq.protocol.message import MessageExt, MessageQueue

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")


# A signal that comes just before a thread blocks in a lock does not wake it: Python runs the
# handler when the wait ends, so no wait is longer than this.
SIGNAL_WAIT_S: Final = 0.1


def _wait(event: threading.Event) -> None:
    """Until it is set. Raises what a signal handler raises."""
    while not event.wait(SIGNAL_WAIT_S):
        pass


class _LoopThread:
    """The one loop, started at first use and stopped when the interpreter ends."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises ClientError if called from the loop itself (a listener, say). If a signal handler
        raises meanwhile, the work is cancelled, and has ended when this raises."""
        loop = self._running_loop()
        if threading.current_thread() is self._thread:
            work.close()
            raise ClientError("a blocking call on the loop's own thread would wait for itself")
        ended = threading.Event()
        begun: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = loop.create_task(work)
            task.add_done_callback(lambda _: ended.set())
            begun.append(task)

        loop.call_soon_threadsafe(begin)
        try:
            _wait(ended)
        except BaseException:
            loop.call_soon_threadsafe(lambda: begun[0].cancel())
            _wait(ended)
            if not begun[0].cancelled():
                begun[0].exception()  # retrieved: the caller gets the error of the signal handler
            raise
        return begun[0].result()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = uvloop.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="batonmq-loop", daemon=True
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


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop until `stop`."""
    while True:
        try:
            loop.run_forever()
            return
        # Of a selector or a hook, say: its call raises it, and all other calls continue.
        except (KeyboardInterrupt, SystemExit):
            log.exception("loop_continues")


_loop_thread = _LoopThread()
# A forked process lacks its parent's threads, so a call there would never return. The child starts
# a loop of its own instead.
os.register_at_fork(after_in_child=_loop_thread.forget)


class _Blocking(Generic[S]):
    def __init__(self, twin: S) -> None:
        self._twin = twin
        self._taken: deque[list[MessageExt]] = deque()

    @property
    def twin(self) -> S:
        """The asyncio object. Its coroutines may be handed to `run`."""
        return self._twin

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the loop and waits for its result."""
        return _loop_thread.run(work)


def _blocking(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Blocking[S], P], T]:
    """The method of the twin, waited for."""

    @functools.wraps(method)
    def call(self: _Blocking[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(method(self.twin, *args, **kwargs))

    return call


def _taking(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, list[MessageExt]]],
) -> Callable[Concatenate[_Blocking[S], P], list[MessageExt]]:
    """As `_blocking`, of a method that takes messages: what a call had taken when a signal handler
    ended it, the next call returns first."""

    @functools.wraps(method)
    def call(self: _Blocking[S], /, *args: P.args, **kwargs: P.kwargs) -> list[MessageExt]:
        async def take() -> None:
            self._taken.append(await method(self.twin, *args, **kwargs))

        if not self._taken:
            self.run(take())
        return self._taken.popleft() if self._taken else []

    return call


def _on_loop(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[_Blocking[S], P], T]:
    """The plain method of the twin, called on the loop, as it is not thread safe."""

    @functools.wraps(method)
    def call(self: _Blocking[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        async def work() -> T:
            return method(self.twin, *args, **kwargs)

        return self.run(work())

    return call


def _here(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[_Blocking[S], P], T]:
    """The plain method of the twin, called in the caller's thread."""

    @functools.wraps(method)
    def call(self: _Blocking[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self.twin, *args, **kwargs)

    return call


def _parameters_of(
    twin_class: Callable[P, S],
) -> Callable[[Callable[..., None]], Callable[Concatenate[_Blocking[S], P], None]]:
    """Makes an `__init__` that takes what the twin's takes."""

    def make(declared: Callable[..., None]) -> Callable[Concatenate[_Blocking[S], P], None]:
        def init(self: _Blocking[S], /, *args: P.args, **kwargs: P.kwargs) -> None:
            _Blocking.__init__(self, twin_class(*args, **kwargs))

        # `help` and `inspect.signature` show the twin's parameters.
        return functools.update_wrapper(init, twin_class.__init__)

    return make


R = TypeVar("R", bound=InstanceUser)


class _BlockingStartable(_Blocking[R]):
    """Usable as `with`."""

    def start(self) -> None:
        self.run(self._twin.start())

    def close(self) -> None:
        self.run(self._twin.close())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class BlockingProducer(_BlockingStartable[Producer]):
    """See `Producer`."""

    @_parameters_of(Producer)
    def __init__(self) -> None: ...

    send = _blocking(Producer.send)
    send_batch = _blocking(Producer.send_batch)
    send_oneway = _blocking(Producer.send_oneway)
    recall = _blocking(Producer.recall)
    request = _blocking(Producer.request)
    reply = _blocking(Producer.reply)
    publish_queues = _blocking(Producer.publish_queues)


class BlockingPopConsumer(_BlockingStartable[PopConsumer]):
    """See `PopConsumer`."""

    @_parameters_of(PopConsumer)
    def __init__(self) -> None: ...

    subscribe = _blocking(PopConsumer.subscribe)
    receive = _taking(PopConsumer.receive)
    ack = _blocking(PopConsumer.ack)
    change_invisible_time = _blocking(PopConsumer.change_invisible_time)
    processing = _here(PopConsumer.processing)


class BlockingPullConsumer(_BlockingStartable[PullConsumer]):
    """See `PullConsumer`."""

    @_parameters_of(PullConsumer)
    def __init__(self) -> None: ...

    fetch_queues = _blocking(PullConsumer.fetch_queues)
    assign = _blocking(PullConsumer.assign)
    position = _on_loop(PullConsumer.position)
    seek = _blocking(PullConsumer.seek)
    pause = _on_loop(PullConsumer.pause)
    resume = _on_loop(PullConsumer.resume)
    poll = _taking(PullConsumer.poll)
    pull = _blocking(PullConsumer.pull)
    commit = _blocking(PullConsumer.commit)
    committed = _blocking(PullConsumer.committed)
    max_offset = _blocking(PullConsumer.max_offset)
    min_offset = _blocking(PullConsumer.min_offset)
    offset_by_time = _blocking(PullConsumer.offset_by_time)
    processing = _here(PullConsumer.processing)


class BlockingLitePullConsumer(_BlockingStartable[LitePullConsumer]):
    """See `LitePullConsumer`. Callbacks run on the loop: they must not block."""

    @_parameters_of(LitePullConsumer)
    def __init__(self) -> None: ...

    @property
    def assigned_queues(self) -> tuple[MessageQueue, ...]:
        return self.twin.assigned_queues

    subscribe = _on_loop(LitePullConsumer.subscribe)
    fetch_queues = _blocking(LitePullConsumer.fetch_queues)
    assign = _blocking(LitePullConsumer.assign)
    position = _on_loop(LitePullConsumer.position)
    seek = _blocking(LitePullConsumer.seek)
    pause = _on_loop(LitePullConsumer.pause)
    resume = _on_loop(LitePullConsumer.resume)
    poll = _taking(LitePullConsumer.poll)
    commit = _blocking(LitePullConsumer.commit)
    committed = _blocking(LitePullConsumer.committed)
    processing = _here(LitePullConsumer.processing)

    def __iter__(self) -> Iterator[MessageExt]:
        """Every message, one by one: one counts as processed when the next is asked for."""
        while True:
            yield from self.poll(max_messages=1)


class BlockingPushConsumer(_BlockingStartable[PushConsumer]):
    """See `PushConsumer`. A plain listener runs in threads of its own and may block."""

    @_parameters_of(PushConsumer)
    def __init__(self) -> None: ...

    subscribe = _on_loop(PushConsumer.subscribe)
    unsubscribe = _on_loop(PushConsumer.unsubscribe)


class BlockingAdmin(_BlockingStartable[Admin]):
    """See `Admin`: `admin.topics.names()`."""

    @_parameters_of(Admin)
    def __init__(self) -> None: ...

    @property
    def cluster(self) -> "_Cluster":
        return _Cluster(self.twin.cluster)

    @property
    def brokers(self) -> "_Brokers":
        return _Brokers(self.twin.brokers)

    @property
    def topics(self) -> "_Topics":
        return _Topics(self.twin.topics)

    @property
    def messages(self) -> "_Messages":
        return _Messages(self.twin.messages)

    @property
    def consumer_groups(self) -> "_ConsumerGroups":
        return _ConsumerGroups(self.twin.consumer_groups)

    def controller(self, addresses: str | Sequence[str]) -> "_Controllers":
        return _Controllers(self.twin.controller(addresses))


class _Cluster(_Blocking[ClusterAdmin]):
    info = _blocking(ClusterAdmin.info)
    name_server_states = _blocking(ClusterAdmin.name_server_states)
    masters = _blocking(ClusterAdmin.masters)


class _Brokers(_Blocking[BrokerAdmin]):
    runtime_info = _blocking(BrokerAdmin.runtime_info)
    config = _blocking(BrokerAdmin.config)
    update_config = _blocking(BrokerAdmin.update_config)
    ha_status = _blocking(BrokerAdmin.ha_status)
    epochs = _blocking(BrokerAdmin.epochs)
    repair = _blocking(BrokerAdmin.repair)


class _Topics(_Blocking[TopicAdmin]):
    names = _blocking(TopicAdmin.names)
    route = _blocking(TopicAdmin.route)
    stats = _blocking(TopicAdmin.stats)
    config = _blocking(TopicAdmin.config)
    configs = _blocking(TopicAdmin.configs)
    change = _blocking(TopicAdmin.change)
    create_or_update = _blocking(TopicAdmin.create_or_update)
    delete = _blocking(TopicAdmin.delete)


class _Messages(_Blocking[MessageAdmin]):
    by_id = _blocking(MessageAdmin.by_id)
    by_key = _blocking(MessageAdmin.by_key)
    by_unique_key = _blocking(MessageAdmin.by_unique_key)


class _ConsumerGroups(_Blocking[ConsumerGroupAdmin]):
    settings = _blocking(ConsumerGroupAdmin.settings)
    update = _blocking(ConsumerGroupAdmin.update)
    offsets = _blocking(ConsumerGroupAdmin.offsets)
    names = _blocking(ConsumerGroupAdmin.names)
    members = _blocking(ConsumerGroupAdmin.members)
    progress = _blocking(ConsumerGroupAdmin.progress)


class _Controllers(_Blocking[ControllerAdmin]):
    metadata = _blocking(ControllerAdmin.metadata)
    all_metadata = _blocking(ControllerAdmin.all_metadata)
    sync_state_data = _blocking(ControllerAdmin.sync_state_data)
    elect_master = _blocking(ControllerAdmin.elect_master)
    clean_broker_data = _blocking(ControllerAdmin.clean_broker_data)
    config = _blocking(ControllerAdmin.config)
    update_config = _blocking(ControllerAdmin.update_config)
    history = _blocking(ControllerAdmin.history)
