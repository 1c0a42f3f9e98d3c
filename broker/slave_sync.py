"""What a slave fetches from its master beside the log: consumer offsets, and whole tables at first.

Topics and groups travel in the log (`broker.metadata_log`); what lies before the slave's first byte
is fetched once after following a master, and again when its versions say that something differs.
Consumer offsets are asked for twice a second (SAFETY R31: to slaves within 1 s, with the
masterEpoch; lower epochs are ignored). Codes 21, 43 and 201 on the master's port - 2, as a Java
slave asks; our own fields ride in extFields that Java ignores.
Origin: org.apache.rocketmq.broker.slave.SlaveSynchronize.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from protocol.bodies import SubscriptionGroupWrapper, TopicConfigAndMappingSerializeWrapper
from protocol.codes import RequestCode, ResponseCode
from protocol.errors import BatonError, ResponseError
from remoting.client import RemotingClient
from remoting.command import RemotingCommand
from store.consumer_offset import ConsumerOffsetManager
from store.subscription_group import SubscriptionGroupManager
from store.topic_config import TopicConfigManager

log = logging.getLogger(__name__)

RPC_TIMEOUT_MS = 1000
EXT_MASTER_EPOCH = "batonMasterEpoch"
NO_MASTER_EPOCH = -1
"""What a broker that is no master says of its tables: nobody takes them over."""
EXT_TABLE_VERSION = "batonTableVersion"
EXT_OFFSET_VERSION = "batonOffsetVersion"


def table_version(topics: TopicConfigManager, groups: SubscriptionGroupManager) -> str:
    """One text that differs whenever the topic or the group table differs."""
    t, g = topics.data_version, groups.data_version
    return (
        f"{t.state_version}.{t.timestamp}.{t.counter}/{g.state_version}.{g.timestamp}.{g.counter}"
    )


def vip_address(address: str) -> str:
    """The same broker's port - 2, which serves the same handlers."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) - 2}"


@dataclass(frozen=True, slots=True)
class Followed:
    """The master that is followed, and in which epoch."""

    address: str
    master_epoch: int


class SlaveSynchronize:
    """One task that follows the current master. `followed` is None on a master."""

    def __init__(
        self,
        client: RemotingClient,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        interval_ms: int,
        tables_changed: Callable[[], None],
    ) -> None:
        self._client = client
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._interval_s = interval_ms / 1000
        self._tables_changed = tables_changed
        self._followed: Followed | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._table_version = ""
        self._offset_version = ""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="slave-synchronize")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def follow(self, followed: Followed | None) -> None:
        """From now on this master's tables count; None: nobody's."""
        self._followed = followed
        self._table_version = self._offset_version = ""
        self._wake.set()

    async def _run(self) -> None:
        quiet = False
        while True:
            followed = self._followed
            if followed is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._wake.clear()
            try:
                await self._synchronize(followed)
                quiet = False
            except BatonError as exc:
                if not quiet:
                    log.warning("slave_sync_failed master=%s reason=%s", followed.address, exc)
                quiet = True
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _synchronize(self, followed: Followed) -> None:
        address = vip_address(followed.address)
        reply = await self._ask(
            address,
            RequestCode.GET_ALL_CONSUMER_OFFSET,
            {EXT_OFFSET_VERSION: self._offset_version},
        )
        # A Java master says no epoch: then the one that this replica follows is meant.
        epoch = int(reply.ext.get(EXT_MASTER_EPOCH, followed.master_epoch))
        if followed is not self._followed or epoch < followed.master_epoch:
            # A later life of that process is no master: its tables may lack what the log showed us.
            return
        if reply.body:
            self._offsets.apply_from_master(epoch, reply.body)
        self._offset_version = reply.ext.get(EXT_OFFSET_VERSION, "")
        version = reply.ext.get(EXT_TABLE_VERSION, "")
        is_level = version and version == self._table_version
        if not is_level and await self._fetch_tables(address, followed):
            self._table_version = version

    async def _fetch_tables(self, address: str, followed: Followed) -> bool:
        """False if what came may be older than what is here: to be fetched again."""
        before = table_version(self._topics, self._groups)
        topics = await self._ask(address, RequestCode.GET_ALL_TOPIC_CONFIG, {})
        groups = await self._ask(address, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {})
        if followed is not self._followed or table_version(self._topics, self._groups) != before:
            # Another master, or the log has shown a change that these answers cannot know (R31).
            return False
        topic_table = TopicConfigAndMappingSerializeWrapper.decode(topics.body)
        group_table = SubscriptionGroupWrapper.decode(groups.body)
        self._topics.replace_all(topic_table.topic_config_table, topic_table.data_version)
        self._groups.replace_all(group_table)
        self._tables_changed()
        log.info(
            "tables_followed master=%s topics=%d groups=%d",
            followed.address,
            len(topic_table.topic_config_table),
            len(group_table.subscription_group_table),
        )
        return True

    async def _ask(self, address: str, code: int, ext: dict[str, str]) -> RemotingCommand:
        reply = await self._client.invoke(
            address, RemotingCommand.request(code, ext), RPC_TIMEOUT_MS
        )
        if reply.code != ResponseCode.SUCCESS:
            raise ResponseError(reply.code, reply.remark or "", address)
        return reply
