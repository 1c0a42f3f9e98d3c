"""Logs queues that grow and slaves that fall behind, and stops slow consumer groups.

Every minute it logs how many requests wait, and whether slaves or the dispatch are behind. With
`disableConsumeIfConsumerReadSlowly`, every three minutes, it disables (`consumeEnable`) each
connected group that is more than `consumerFallbehindThreshold` behind: its old data would displace
from memory what other groups read. An operator enables it again. Origin:
BrokerController.protectBroker, printWaterMark and printMasterAndSlaveDiff in Java.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from batonmq.broker.config import BrokerConfig
from batonmq.broker.consume.consumer_manager import ConsumerManager
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import HARuntimeInfo
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.layout import UNIT
from batonmq.runtime.turns import Pace
from batonmq.store.errors import PutRefused

log = logging.getLogger(__name__)

REPORT_MS: Final = 60_000
PROTECT_MS: Final = 180_000
_PHYSICAL_OFFSET: Final = UNIT.only("offset")


class Housekeeping:
    """`waiting()`: kind of request -> how many wait; `slaves()`: the HA status."""

    def __init__(
        self,
        path: WritePath,
        topics: TopicService,
        clients: ConsumerManager,
        offsets: ConsumerOffsetManager,
        config: BrokerConfig,
        waiting: Callable[[], Mapping[str, int]],
        slaves: Callable[[], HARuntimeInfo],
    ) -> None:
        self._path = path
        self._topics = topics
        self._clients = clients
        self._offsets = offsets
        self._config = config
        self.waiting = waiting
        self._slaves = slaves
        now_ms = path.clock_ms()
        self._next_report_ms = now_ms + REPORT_MS
        self._next_check_ms = now_ms + PROTECT_MS

    async def tick(self, now_ms: int) -> None:
        """At least once a second."""
        if now_ms >= self._next_report_ms:
            self._next_report_ms = now_ms + REPORT_MS
            self._report()
        if now_ms >= self._next_check_ms:
            self._next_check_ms = now_ms + PROTECT_MS
            if self._config.disable_consume_if_consumer_read_slowly:
                await self.protect_broker()

    def _report(self) -> None:
        waiting = self.waiting().items()
        log.info("water_marks %s", " ".join(f"{what}={count}" for what, count in waiting))
        store = self._path.store
        behind = store.max_phy_offset - store.confirm_offset
        if behind > 0:
            log.info("dispatch_behind bytes=%d", behind)
        for slave in self._slaves().ha_connection_info:
            if slave.diff > 0:
                log.info("slave_behind address=%s bytes=%d", slave.addr, slave.diff)

    async def protect_broker(self) -> None:
        """Disables slow groups. On a master only: slaves get the change from its log (R31)."""
        pace = Pace()
        async for name in pace.through(list(self._clients.groups)):
            group = self._topics.groups.get(name)
            known = self._clients.groups.get(name)
            if group is None or known is None or not group.consume_enable:
                continue
            for topic in list(known.subscriptions):  # a copy: heartbeats change it in other turns
                behind = await self._behind(name, topic, pace)
                # The role may have ended in one of the turns.
                if self._path.gate.refusal is not None:
                    return
                if behind > self._config.consumer_fallbehind_threshold:
                    try:
                        self._topics.put_group(msgspec.structs.replace(group, consume_enable=False))
                    except PutRefused as error:  # a full disk (R45): the next round tries again
                        log.warning("slow_group_not_cut_off group=%s reason=%s", name, error)
                        return
                    log.warning(
                        "slow_group_cut_off group=%s topic=%s behind_bytes=%d", name, topic, behind
                    )
                    break

    async def _behind(self, group: str, topic: str, pace: Pace) -> int:
        """Bytes from the group's next message in a topic to the end of the log; 0 if it has read
        all."""
        queries, log_end = self._path.store.queries, self._path.store.max_phy_offset
        most = 0
        for queue_id, offset in self._offsets.offsets_of(group, topic).items():
            await pace.step()
            first = queries.min_offset_in_queue(topic, queue_id)
            try:
                unit = queries.raw_units(topic, queue_id, max(offset, first), 1)
            except (CorruptLogError, OSError):  # the end of this task would end the process
                continue
            if unit:
                most = max(most, log_end - _PHYSICAL_OFFSET.unpack_from(unit)[0])
        return most
