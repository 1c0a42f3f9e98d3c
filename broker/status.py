"""What a broker reports of itself: status for admin tools, and its registration."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Collection
from datetime import date
from typing import Final

from batonmq.broker.config import BrokerSections
from batonmq.broker.name_server_registrar import RouteRegistration
from batonmq.broker.relay import Relay
from batonmq.broker.replication.replication import Replication
from batonmq.broker.tables.slave_sync import BrokerTables
from batonmq.broker.waiting import WaitingMessages
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import (
    PROBLEMS_KEY,
    EpochEntryCache,
    HARuntimeInfo,
    TopicConfigAndMappingSerializeWrapper,
)
from batonmq.protocol.codes import MQ_VERSION
from batonmq.protocol.records.codec import scan_record
from batonmq.protocol.register_body import RegisterBrokerBody
from batonmq.protocol.role_view import Role
from batonmq.runtime.clock import wall_ms
from batonmq.store.disk_health import StoreHealth

ACTING = "the group takes no writes"
NOT_HERE: Final = {
    **{
        f"{queue}ThreadPoolQueue{what}": "0"
        for queue in ("pull", "litePull", "query", "ack")
        for what in ("Size", "Capacity", "HeadWaitTimeMills")
    },
    "EndTransactionQueueSize": "0",
    "EndTransactionThreadPoolQueueCapacity": "0",
    "dispatchMaxBuffer": "0",
    "remainTransientStoreBufferNumbs": str((1 << 31) - 1),
    "startAcceptSendRequestTimeStamp": "0",
    "timerReadBehind": "0",
    "timerEnqueueTps": "0.0",
    "timerDequeueTps": "0.0",
}
"""Figures of Java that do not exist here, with Java's values where they are off or empty."""
_SAMPLES = 61  # one a second: rates over 10 s, 1 min


def running_for(passed_ms: int) -> str:
    """A duration in Java's format."""
    seconds = passed_ms // 1000
    days, hours, minutes = seconds // 86_400, seconds // 3600 % 24, seconds // 60 % 60
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds % 60} seconds ]"


class Throughput:
    """Messages stored and read over time. `tick` is called about once a second."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int, int]] = deque(maxlen=_SAMPLES)

    def tick(self, now_ms: int, puts: int, gets: int) -> None:
        self._samples.append((now_ms, puts, gets))

    def rates(self, column: int) -> str:
        """Messages a second over 10 s, 60 s and 60 s, in Java's format."""
        return " ".join(f"{self._rate(seconds, column):.2f}" for seconds in (10, 60, 60))

    def _rate(self, seconds: int, column: int) -> float:
        if len(self._samples) < 2:
            return 0.0
        last = self._samples[-1]
        first = self._samples[max(0, len(self._samples) - 1 - seconds)]
        elapsed_ms = last[0] - first[0]
        return (last[column] - first[column]) * 1000 / elapsed_ms if elapsed_ms else 0.0


class DailyTotals:
    """(Messages stored, messages read) when today and yesterday began in local time; 0 before the
    start of this process. Origin: BrokerStats.record in Java."""

    def __init__(self, totals: Callable[[], tuple[int, int]]) -> None:
        self._totals = totals
        self._day: date | None = None
        self.today = self.yesterday = (0, 0)

    def tick(self, day: date) -> None:
        if self._day is not None and day != self._day:
            self.yesterday, self.today = self.today, self._totals()
        self._day = day


class BrokerStatus:
    """`totals` gives the messages stored and the messages read since the start."""

    def __init__(
        self,
        config: BrokerSections,
        path: WritePath,
        tables: BrokerTables,
        replication: Replication,
        totals: Callable[[], tuple[int, int]],
        relay: Relay,
        waiting: WaitingMessages,
    ) -> None:
        self._config = config
        self._path = path
        self._tables = tables
        self._replication = replication
        self._totals = totals
        self._relay = relay
        self._waiting = waiting
        self._throughput = Throughput()
        self._days = DailyTotals(totals)
        self._started_ms = wall_ms()

    def tick(self, now_ms: int) -> None:
        """Once a second."""
        self._throughput.tick(now_ms, *self._totals())
        self._days.tick(date.today())

    def epoch_cache(self) -> tuple[EpochEntryCache, dict[str, str]] | None:
        """Epoch list and identity (request 1007): body and extFields; None in classic mode."""
        return self._replication.epoch_cache()

    def ha(self) -> HARuntimeInfo:
        """HA status (request 907)."""
        return self._replication.service.runtime_info()

    def registration(self, topics: Collection[str] | None = None) -> RouteRegistration | None:
        """The registration at name servers: id 0 for a master, its own id for a slave; None without
        a role. `topics`: the topics in it, by default all."""
        gate, broker = self._path.gate, self._config.broker
        if gate.role is Role.FENCED:
            return None
        table = self._tables.topics.table
        if topics is not None:
            table = {topic: table[topic] for topic in topics if topic in table}
        return RouteRegistration(
            broker.broker_cluster_name,
            broker.broker_name,
            self._replication.broker_id() if gate.role is Role.SLAVE else 0,
            broker.address,
            self._config.ha_address,
            RegisterBrokerBody(
                topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
                    data_version=self._tables.topics.data_version,
                    topic_config_table=dict(table),
                )
            ).encode(),
            is_partial=topics is not None,
            relays=self._config.relays,
            silence_ms=broker.broker_not_active_timeout if self._config.may_act else None,
        )

    def table(self) -> dict[str, str]:
        """Texts under the keys that `clusterList` and `brokerStatus` read (request 28)."""
        path, (puts, gets) = self._path, self._totals()
        info = {
            "bootTimestamp": str(self._started_ms),
            "brokerVersion": str(MQ_VERSION),
            "brokerVersionDesc": "V5_3_3",
            "pid": str(os.getpid()),
            "putTps": self._throughput.rates(1),
            "getTransferredTps": self._throughput.rates(2),
            "getFoundTps": self._throughput.rates(2),
            "getTotalTps": self._throughput.rates(2),
            "msgPutTotalTodayNow": str(puts),
            "msgGetTotalTodayNow": str(gets),
            "msgPutTotalTodayMorning": str(self._days.today[0]),
            "msgPutTotalYesterdayMorning": str(self._days.yesterday[0]),
            "msgGetTotalTodayMorning": str(self._days.today[1]),
            "msgGetTotalYesterdayMorning": str(self._days.yesterday[1]),
            "sendThreadPoolQueueSize": str(len(path.acks)),
            "sendThreadPoolQueueCapacity": str(self._config.broker.send_thread_pool_queue_capacity),
            "sendThreadPoolQueueHeadWaitTimeMills": str(path.acks.waited_ms(path.clock_ms())),
            "pageCacheLockTimeMills": str(path.flow.last_write_ms),
            "runtime": running_for(wall_ms() - self._started_ms),
        }
        info |= NOT_HERE | self._waiting.runtime_info()
        problems = json.dumps(self.problems(), ensure_ascii=False)
        return info | self._of_store() | self._of_role() | {PROBLEMS_KEY: problems}

    def problems(self) -> list[str]:
        """What is wrong with this broker, in words, for `mqctl health`."""
        path, replication = self._path, self._replication
        store, gate = path.store, path.gate
        refusal = gate.refusal.remark if gate.refusal is not None else store.appender.refusal
        found = {
            "refuses writes": refusal if gate.is_master else "",
            "its disk is full": store.disk_space.reason,
            "has set messages aside": path.aside.problem,
            "its log is suspect": store.trust.reason,
            "its log holds records for queues that cannot be": _bad_names(store.health),
            "acts for its master, which is away": ACTING if gate.is_acting else "",
            **replication.problems(),
        }
        return [f"{what}: {why}" for what, why in found.items() if why]

    def earliest_stored_ms(self) -> int:
        """When the oldest message was stored, -1 if there is none."""
        store = self._path.store
        first = store.queries.look_message_by_offset(store.min_phy_offset)
        head = scan_record(first) if first is not None else None
        return head.store_timestamp if head is not None else -1

    def _of_store(self) -> dict[str, str]:
        earliest = {"earliestMessageTimeStamp": str(self.earliest_stored_ms())}
        return self._path.store.runtime_info() | earliest

    def _of_role(self) -> dict[str, str]:
        path = self._path
        gate = path.gate
        return {
            "brokerRole": gate.role.value,
            "masterEpoch": str(gate.master_epoch),
            "brokerActive": str(gate.refusal is None).lower(),
            "actingMaster": str(gate.is_acting).lower(),
            "pendingAcks": str(len(path.acks)),
            "heldSends": str(len(path.hold)),
            "relayWaiting": str(len(self._relay)),
            "relayedTotal": str(self._relay.passed_on),
            "relayRefusedTotal": str(self._relay.refused),
            **self._replication.status(),
        }


def _bad_names(health: StoreHealth) -> str:
    """The first few, in words; empty if there is none."""
    first = list(health.bad_names.items())[:3]
    shown = [f"topic {topic!r} queue {queue} at {at}" for (topic, queue), at in first]
    more = ["..."] if len(health.bad_names) > len(first) else []
    return ", ".join([*shown, *more]) + " (they are skipped)" if shown else ""
