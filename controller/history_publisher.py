"""Publishes the failover history to BATON_SYS_HISTORY while this node leads: the shell.

One task per leadership carries out the steps of `HistoryTopic`: it reads the history files in a
thread and uses a connection of its own to the group's master. Nothing else waits for it.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from batonmq.controller.config import HISTORY_TOPIC_OFF, ControllerConfig
from batonmq.controller.history_topic import (
    RECENT_MS,
    Batch,
    Create,
    HistoryTopic,
    KeeperChoice,
    Learn,
    Read,
    Send,
    Step,
    Target,
    Wait,
)
from batonmq.controller.rules.state import ControllerState
from batonmq.history.event import EventKey
from batonmq.history.message import history_name, history_properties
from batonmq.history.reader import HistoryReader
from batonmq.protocol.batch import BatchItem, encode_batch
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, ResponseError
from batonmq.protocol.properties import encode_properties
from batonmq.protocol.records.codec import decode_records
from batonmq.protocol.records.faults import CorruptRecord
from batonmq.protocol.sysflag import PULL_SUBSCRIPTION
from batonmq.protocol.topic_name import HISTORY_PRODUCER, HISTORY_TOPIC
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.clock import boot_ms, wall_ms

log = logging.getLogger(__name__)

TIMEOUT_MS: Final = 5_000
BATCH_SIZE_MAX: Final = 256 << 10
NEWEST_SEARCHED: Final = 32
"""The newest event is searched in so many last messages: others may have written there, too."""
READER_GROUP: Final = "TOOLS_CONSUMER"
"""A consumer group that every broker has."""
BEHIND_REPORTED_MS: Final = 30_000
_EXPIRED: Final = (ResponseCode.PULL_OFFSET_MOVED, ResponseCode.PULL_RETRY_IMMEDIATELY)
"""The requested offset has expired; the answer names the next one."""


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
        self._keeper = KeeperChoice()
        self._core: HistoryTopic | None = None
        self._task: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._logged: tuple[str, str] | None = None

    def lead(self) -> None:
        """This node leads from now on."""
        self.resign()
        self._core = HistoryTopic(self._config().history_topic_delay_ms, boot_ms())
        self._task = asyncio.get_running_loop().create_task(self._run(self._core))
        self.poll()

    def resign(self) -> None:
        """Another node goes on; a request under way may still arrive, as a repeat."""
        if self._task is not None:
            self._task.cancel()
            self._leaving.add(self._task)
            self._task.add_done_callback(self._leaving.discard)
        self._task = self._core = self._logged = None

    def poll(self) -> None:
        """Must be called when state or settings changed: the group may have another master."""
        if self._core is None:
            return
        self._core.delay_ms = self._config().history_topic_delay_ms
        before = self._core.target
        if self._core.set_target(self._target(), boot_ms()):
            if before is not None:
                # Also ends a request that the old master leaves unanswered.
                self._client.close_connection(before.address)
            self._wake.set()

    def written(self) -> None:
        """The history file has new lines."""
        if self._core is not None:
            self._core.written(boot_ms())
            self._wake.set()

    def problems(self) -> tuple[str, ...]:
        """Why the history does not reach its topic, once that has lasted for a while."""
        core = self._core
        if core is None:
            return ()
        group = self._group()
        groups = self._state().groups
        if group and group not in groups:
            return (f"historyTopicGroup names {group}, which no broker registered as",)
        problem = core.problem
        if not problem and group and core.target is None:
            problem = f"{group} has no master; historyTopicGroup may name another group"
        if core.behind_since_ms is None or not problem:
            return ()
        behind_ms = boot_ms() - core.behind_since_ms
        if behind_ms < BEHIND_REPORTED_MS:
            return ()
        return (f"history behind in {HISTORY_TOPIC} for {behind_ms // 1000} s: {problem}",)

    async def close(self) -> None:
        self.resign()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._client.close()

    def _group(self) -> str:
        """The configured group, else the chosen one; empty if nothing is to be published."""
        groups = self._state().groups
        wanted = self._config().history_topic_group
        if wanted == HISTORY_TOPIC_OFF or not groups:
            return ""
        if wanted:
            return wanted
        with_master = [name for name, group in groups.items() if group.master_broker_id]
        return self._keeper.choose(with_master, boot_ms()) or min(groups)

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
                step = core.step(boot_ms())
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
            async with asyncio.timeout(max(0, step.until_ms - boot_ms()) / 1000):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _do(self, core: HistoryTopic, reader: HistoryReader, step: Step) -> None:
        assert not isinstance(step, Wait)
        target, failures = step.target, core.failures
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
                    core.answered(target, reply.code, reply.remark or "", boot_ms())
                    if reply.code == ResponseCode.SUCCESS:
                        self._keeper.acknowledged()
                        self._log(target, "")
        except (BatonError, OSError, CorruptRecord, ValueError) as error:
            core.failed(target, str(error), boot_ms())
        except Exception as error:
            # A bug; it must not end the publication for as long as this node leads.
            log.exception("history_publication_failed")
            core.failed(target, f"{type(error).__name__}: {error}", boot_ms())
        if core.problem:
            self._log(target, core.problem)
        if core.failures > failures:
            self._keeper.failed()
            self.poll()

    def _log(self, target: Target, problem: str) -> None:
        """Logs when publication starts to work and when it fails, not each message."""
        if self._logged == (target.broker_name, problem):
            return
        began = (
            self._logged is None or bool(self._logged[1]) or self._logged[0] != target.broker_name
        )
        self._logged = (target.broker_name, problem)
        if problem:
            log.warning(
                "history_not_published broker_name=%s address=%s why=%r",
                target.broker_name,
                target.address,
                problem,
            )
        elif began:
            log.info(
                "history_publishing broker_name=%s address=%s", target.broker_name, target.address
            )

    async def _newest(self, target: Target) -> tuple[EventKey | None, bool]:
        """The newest event in the topic, None if unknown; whether the topic ever had messages."""
        request = RemotingCommand.request(
            RequestCode.GET_MAX_OFFSET, {"topic": HISTORY_TOPIC, "queueId": 0}
        )
        reply = await self._client.invoke(target.address, request, TIMEOUT_MS)
        if reply.code == ResponseCode.TOPIC_NOT_EXIST:
            return None, False
        end = _checked(reply, target).require_int("offset")
        offset = max(0, end - NEWEST_SEARCHED)
        mark: EventKey | None = None
        while offset < end:
            reply = await self._client.invoke(target.address, _pull(offset), TIMEOUT_MS)
            if reply.code == ResponseCode.SUCCESS:
                names = [history_name(each.properties) for each in decode_records(reply.body)]
                mark = next(filter(None, reversed(names)), mark)
            elif reply.code not in _EXPIRED:
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
                encode_properties(history_properties(line)).encode(),
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
            "maxMsgNums": NEWEST_SEARCHED,
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
