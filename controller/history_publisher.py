"""Publishes the failover history to BATON_SYS_HISTORY while this node leads: the shell.

One task per leadership does what `HistoryTopic` says: it reads the history files in a thread and
asks the group's master over a connection of its own. Nothing here is waited for by anything else.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from controller.config import HISTORY_TOPIC_OFF, ControllerConfig
from controller.history_reader import HistoryReader
from controller.history_topic import (
    RECENT_MS,
    Batch,
    Create,
    HistoryTopic,
    Learn,
    Mark,
    Read,
    Send,
    Step,
    Target,
    Wait,
)
from controller.requests import monotonic_ms, wall_ms
from controller.state import ControllerState
from protocol.batch import BatchItem, encode_batch
from protocol.codes import RequestCode, ResponseCode
from protocol.errors import BatonError, ResponseError
from protocol.history_message import history_name, history_properties
from protocol.properties import encode_properties
from protocol.record import CorruptRecord, decode_records
from protocol.sysflag import PULL_SUBSCRIPTION
from protocol.topic_name import HISTORY_PRODUCER, HISTORY_TOPIC
from remoting.client import RemotingClient
from remoting.command import RemotingCommand

__all__ = ["HistoryPublisher"]

log = logging.getLogger(__name__)

TIMEOUT_MS: Final = 5_000
BATCH_SIZE_MAX: Final = 256 << 10
NEWEST_LOOKED_AT: Final = 32
"""So many messages from the end on the newest event is looked for: others may have got there."""
READER_GROUP: Final = "TOOLS_CONSUMER"
"""A consumer group that every broker has."""
BEHIND_TOLD_MS: Final = 30_000
_PASSED_OVER: Final = (ResponseCode.PULL_OFFSET_MOVED, ResponseCode.PULL_RETRY_IMMEDIATELY)
"""What was asked for has expired; the answer says where to go on."""


class HistoryPublisher:
    """`path` is the history file that grows. `lead` and `resign` follow the gate."""

    def __init__(
        self,
        path: Path,
        config: Callable[[], ControllerConfig],
        state: Callable[[], ControllerState],
    ) -> None:
        self._path = path
        self._config = config
        self._state = state
        self._client = RemotingClient(name="controller-history")
        self._core: HistoryTopic | None = None
        self._task: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._told: tuple[str, str] | None = None

    def lead(self) -> None:
        """This node leads from now on."""
        self.resign()
        self._core = HistoryTopic(self._config().history_topic_delay_ms, monotonic_ms())
        self._task = asyncio.get_running_loop().create_task(self._run(self._core))
        self.look()

    def resign(self) -> None:
        """Another node goes on; what is under way may arrive all the same, as a repeat."""
        if self._task is not None:
            self._task.cancel()
            self._leaving.add(self._task)
            self._task.add_done_callback(self._leaving.discard)
        self._task = self._core = self._told = None

    def look(self) -> None:
        """State or settings may have changed: who is the group's master by now?"""
        if self._core is None:
            return
        self._core.delay_ms = self._config().history_topic_delay_ms
        before = self._core.target
        if self._core.aimed(self._target(), monotonic_ms()):
            if before is not None:
                # Also ends a request that the old master leaves unanswered.
                self._client.close_connection(before.address)
            self._wake.set()

    def written(self) -> None:
        """The history file has new lines."""
        if self._core is not None:
            self._core.written(monotonic_ms())
            self._wake.set()

    def problems(self) -> tuple[str, ...]:
        """What keeps the history from its topic, once it has done so for a while."""
        core = self._core
        if core is None:
            return ()
        group = self._group()
        groups = self._state().groups
        if group and group not in groups:
            return (f"historyTopicGroup names {group}, which no broker registered as",)
        trouble = core.trouble
        if not trouble and group and core.target is None:
            trouble = f"{group} has no master; historyTopicGroup may name another group"
        if core.behind_since_ms is None or not trouble:
            return ()
        behind_ms = monotonic_ms() - core.behind_since_ms
        if behind_ms < BEHIND_TOLD_MS:
            return ()
        return (f"history behind in {HISTORY_TOPIC} for {behind_ms // 1000} s: {trouble}",)

    async def close(self) -> None:
        self.resign()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._client.close()

    def _group(self) -> str:
        """The configured group, else the first one by name; empty if nothing is to be published."""
        groups = self._state().groups
        wanted = self._config().history_topic_group
        if wanted == HISTORY_TOPIC_OFF or not groups:
            return ""
        return wanted or min(groups)

    def _target(self) -> Target | None:
        """The master of the group that keeps the topic."""
        group = self._state().groups.get(self._group())
        master = group.replica(group.master_broker_id) if group is not None else None
        if group is None or master is None or not master.address:
            return None
        return Target(group.broker_name, master.address, group.master_epoch)

    async def _run(self, core: HistoryTopic) -> None:
        reader = HistoryReader(self._path)
        try:
            while True:
                step = core.step(monotonic_ms())
                if isinstance(step, Wait):
                    await self._wait(step)
                else:
                    await self._do(core, reader, step)
        finally:
            reader.close()

    async def _wait(self, step: Wait) -> None:
        self._wake.clear()
        if step.until_ms is None:
            await self._wake.wait()
            return
        try:
            async with asyncio.timeout(max(0, step.until_ms - monotonic_ms()) / 1000):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _do(self, core: HistoryTopic, reader: HistoryReader, step: Step) -> None:
        assert not isinstance(step, Wait)
        target = step.target
        try:
            match step:
                case Learn():
                    mark, used = await self._newest(target)
                    core.learned(target, mark, used=used)
                case Read():
                    most = self._config().history_topic_batch
                    since_ms = wall_ms() - RECENT_MS if step.recent else 0
                    batch = await asyncio.to_thread(
                        reader.behind, step.mark, most, BATCH_SIZE_MAX, since_ms=since_ms
                    )
                    core.read(target, batch)
                case Create():
                    await self._create(target)
                    core.created(target)
                case Send():
                    reply = await self._send(target, step.batch)
                    core.answered(target, reply.code, reply.remark or "", monotonic_ms())
                    if reply.code == ResponseCode.SUCCESS:
                        self._tell(target, "")
        except (BatonError, OSError, CorruptRecord, ValueError) as error:
            core.failed(target, str(error), monotonic_ms())
        except Exception as error:
            # A bug; it must not end the publication for as long as this node leads.
            log.exception("history_publication_failed")
            core.failed(target, f"{type(error).__name__}: {error}", monotonic_ms())
        if core.trouble:
            self._tell(target, core.trouble)

    def _tell(self, target: Target, trouble: str) -> None:
        """A line when it begins to work and when it fails, not one a message."""
        if self._told == (target.broker_name, trouble):
            return
        began = self._told is None or bool(self._told[1]) or self._told[0] != target.broker_name
        self._told = (target.broker_name, trouble)
        if trouble:
            log.warning(
                "history_not_published broker_name=%s address=%s why=%r",
                target.broker_name,
                target.address,
                trouble,
            )
        elif began:
            log.info(
                "history_publishing broker_name=%s address=%s", target.broker_name, target.address
            )

    async def _newest(self, target: Target) -> tuple[Mark | None, bool]:
        """The newest event in the topic, None if none can be told; whether it ever had messages."""
        request = RemotingCommand.request(
            RequestCode.GET_MAX_OFFSET, {"topic": HISTORY_TOPIC, "queueId": 0}
        )
        reply = await self._client.invoke(target.address, request, TIMEOUT_MS)
        if reply.code == ResponseCode.TOPIC_NOT_EXIST:
            return None, False
        end = _checked(reply, target).require_int("offset")
        offset = max(0, end - NEWEST_LOOKED_AT)
        mark: Mark | None = None
        while offset < end:
            reply = await self._client.invoke(target.address, _pull(offset), TIMEOUT_MS)
            if reply.code == ResponseCode.SUCCESS:
                names = [history_name(each.properties) for each in decode_records(reply.body)]
                mark = next(filter(None, reversed(names)), mark)
            elif reply.code not in _PASSED_OVER:
                raise ResponseError(reply.code, reply.remark, target.address)
            following = reply.require_int("nextBeginOffset")
            if following <= offset:
                break
            offset = following
        return mark, end > 0

    async def _create(self, target: Target) -> None:
        request = RemotingCommand.request(
            RequestCode.UPDATE_AND_CREATE_TOPIC,
            {
                "topic": HISTORY_TOPIC,
                "defaultTopic": "",
                "readQueueNums": 1,
                "writeQueueNums": 1,
                "perm": 6,
                "topicFilterType": "SINGLE_TAG",
                "topicSysFlag": 0,
                "order": False,
            },
        )
        _checked(await self._client.invoke(target.address, request, TIMEOUT_MS), target)

    async def _send(self, target: Target, batch: Batch) -> RemotingCommand:
        items = [
            BatchItem(
                line.text,
                encode_properties(
                    history_properties(*line.mark, line.kind, line.broker_name, line.after)
                ).encode(),
            )
            for line in batch
        ]
        request = RemotingCommand.request(
            RequestCode.SEND_BATCH_MESSAGE,
            {
                "a": HISTORY_PRODUCER,
                "b": HISTORY_TOPIC,
                "c": "",
                "d": 1,
                "e": 0,
                "f": 0,
                "g": wall_ms(),
                "h": 0,
                "i": "",
                "j": 0,
                "k": False,
                "m": True,
                "n": target.broker_name,
            },
            encode_batch(items),
        )
        return await self._client.invoke(target.address, request, TIMEOUT_MS)


def _pull(offset: int) -> RemotingCommand:
    return RemotingCommand.request(
        RequestCode.PULL_MESSAGE,
        {
            "consumerGroup": READER_GROUP,
            "topic": HISTORY_TOPIC,
            "queueId": 0,
            "queueOffset": offset,
            "maxMsgNums": NEWEST_LOOKED_AT,
            "sysFlag": PULL_SUBSCRIPTION,
            "commitOffset": 0,
            "suspendTimeoutMillis": 0,
            "subscription": "*",
            "subVersion": 0,
            "expressionType": "TAG",
        },
    )


def _checked(reply: RemotingCommand, target: Target) -> RemotingCommand:
    if reply.code != ResponseCode.SUCCESS:
        raise ResponseError(reply.code, reply.remark, target.address)
    return reply
