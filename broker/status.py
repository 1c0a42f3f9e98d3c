"""The status of a broker for admin tools, and its registration at name servers."""

import json
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import date
from typing import Final, NamedTuple

from msgspec.structs import replace

from batonmq.broker.config import BrokerSections
from batonmq.broker.features import LogFeatures
from batonmq.broker.name_server_registrar import MasterToRegister, RouteRegistration
from batonmq.broker.relay import Relay
from batonmq.broker.replication.replication import Replication
from batonmq.broker.tables.broker_tables import BrokerTables
from batonmq.broker.write.pending_acks import WAIT_BOUNDS_MS
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import (
    PERM_READ,
    PERM_WRITE,
    PROBLEMS_KEY,
    DataVersion,
    TopicConfigAndMappingSerializeWrapper,
)
from batonmq.protocol.codes import MASTER_ID, MQ_VERSION
from batonmq.protocol.records.codec import scan_record
from batonmq.protocol.register_body import RegisterBrokerBody
from batonmq.protocol.role_view import Role
from batonmq.protocol.topic_name import OUR_TOPICS
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
"""Java's figures that do not exist here, with the values that Java shows if they are off or
empty."""
_SAMPLES = 601  # one a second: rates over 10 s, 1 min, 10 min
_PUT_TIMES: Final = {
    "<=0ms": 0,
    "0~10ms": 10,
    "10~50ms": 50,
    "50~100ms": 100,
    "100~200ms": 200,
    "200~500ms": 500,
    "500ms~1s": 1_000,
    "1~2s": 2_000,
    "2~3s": 3_000,
    "3~4s": 4_000,
    "4~5s": 5_000,
    "5~10s": 10_000,
}
"""RocketMQ's classes of put times -> upper bound in ms; the last class is `10s~`."""


def running_for(passed_ms: int) -> str:
    """A duration in Java's format."""
    seconds = passed_ms // 1000
    days, hours, minutes = seconds // 86_400, seconds // 3600 % 24, seconds // 60 % 60
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds % 60} seconds ]"


class Totals(NamedTuple):
    """Totals since the start: messages stored and read, reads that found messages, reads that found
    none. `longest_read_ms`: the longest read of a queue."""

    puts: int
    gets: int
    found: int = 0
    missed: int = 0
    longest_read_ms: int = 0


class Throughput:
    """Rates of messages stored and read. Call `tick` about once a second."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, Totals]] = deque(maxlen=_SAMPLES)

    def tick(self, now_ms: int, totals: Totals) -> None:
        self._samples.append((now_ms, totals))

    def rates(self, count: Callable[[Totals], int]) -> str:
        """Rates per second over 10 s, 1 min and 10 min, in Java's format."""
        return " ".join(f"{self._rate(seconds, count):.2f}" for seconds in (10, 60, 600))

    def _rate(self, seconds: int, count: Callable[[Totals], int]) -> float:
        if len(self._samples) < 2:
            return 0.0
        last_ms, last = self._samples[-1]
        # There is one sample per second. A younger process shows the rate since its start.
        first_ms, first = self._samples[max(0, len(self._samples) - 1 - seconds)]
        elapsed_ms = last_ms - first_ms
        return (count(last) - count(first)) * 1000 / elapsed_ms if elapsed_ms else 0.0


def put_times(waits: Sequence[int]) -> str:
    """How long sends waited for their acknowledgement, in Java's classes. `waits`: the counts of
    PendingAcks."""
    text, begin = "", 0
    for name, bound_ms in _PUT_TIMES.items():
        end = bisect_right(WAIT_BOUNDS_MS, bound_ms)  # a class contains its upper bound
        text += f"[{name}]:{sum(waits[begin:end])} "
        begin = end
    return f"{text}[10s~]:{sum(waits[begin:])} "


class DailyTotals:
    """(Messages stored, messages read) when today and yesterday began in local time; 0 before the
    start of this process. Origin: BrokerStats.record in Java."""

    def __init__(self, totals: Callable[[], Totals]) -> None:
        self._totals = totals
        self._day: date | None = None
        self.today = self.yesterday = Totals(0, 0)

    def tick(self, day: date) -> None:
        # The first tick is no new day: what was stored before this process is not known.
        if self._day is not None and day != self._day:
            self.yesterday, self.today = self.today, self._totals()
        self._day = day


class BrokerStatus:
    def __init__(
        self,
        config: BrokerSections,
        path: WritePath,
        tables: BrokerTables,
        replication: Replication,
        totals: Callable[[], Totals],
        relay: Relay,
        features: LogFeatures,
    ) -> None:
        self._config = config
        self._path = path
        self._tables = tables
        self._replication = replication
        self._totals = totals
        self._relay = relay
        self._features = features
        self._throughput = Throughput()
        self._days = DailyTotals(totals)
        self._started_ms = wall_ms()

    def tick(self, now_ms: int) -> None:
        """Call once a second."""
        self._throughput.tick(now_ms, self._totals())
        self._days.tick(date.today())

    def registration(self, topics: Collection[str] | None = None) -> RouteRegistration | None:
        """The registration at name servers: id 0 for a master, its own id for a slave; None without
        a role. `topics`: the topics in it, by default all."""
        gate, broker = self._path.gate, self._config.broker
        # Without a role it must be in no route: it would refuse what clients send.
        if gate.role is Role.FENCED:
            return None
        return RouteRegistration(
            broker.broker_cluster_name,
            broker.broker_name,
            self._replication.broker_id() if gate.role is Role.SLAVE else MASTER_ID,
            broker.address,
            self._config.ha_address,
            self._routed(topics, self._tables.topics.data_version, broker.broker_permission),
            is_partial=topics is not None,
            relays=self._config.relays,
            silence_ms=broker.broker_not_active_timeout if self._config.may_act else None,
        )

    def registration_of_master(self, topics: Collection[str] | None = None) -> MasterToRegister:
        """The same of the master that this broker follows, by this broker's tables; None while
        there is none."""
        view, broker = self._replication.followed_master(), self._config.broker
        version = self._tables.topics.data_version
        if view is None:
            return None
        # Name servers compare versions: this table must not count as one of an earlier master.
        version = replace(version, state_version=view.master_epoch)
        registration = RouteRegistration(
            broker.broker_cluster_name,
            broker.broker_name,
            MASTER_ID,
            view.master_address,
            view.master_ha_address,
            self._routed(topics, version),
            is_partial=topics is not None,
            relays=self._config.relays,
            is_relayed=True,
        )
        return registration, version

    def _routed(
        self,
        topics: Collection[str] | None,
        version: DataVersion,
        allowed: int = PERM_READ | PERM_WRITE,
    ) -> bytes:
        """The body. `allowed`: brokerPermission, of which a slave knows only its own."""
        table = dict(self._tables.topics.table)
        if topics is not None:
            # One of them may have been deleted since it changed.
            table = {topic: table[topic] for topic in topics if topic in table}
        # No client reads those of internal records, and tools would list them beside the user's.
        for topic in OUR_TOPICS:
            table.pop(topic, None)
        # It takes a broker out of use: clients leave it with their next route.
        if not (allowed & PERM_READ and allowed & PERM_WRITE):
            table = {name: replace(one, perm=one.perm & allowed) for name, one in table.items()}
        wrapper = TopicConfigAndMappingSerializeWrapper(
            data_version=version, topic_config_table=table
        )
        return RegisterBrokerBody(topic_config_serialize_wrapper=wrapper).encode()

    def table(self) -> dict[str, str]:
        """The status as texts, for `clusterList` and `brokerStatus` (GET_BROKER_RUNTIME_INFO,
        28)."""
        path, totals, rates = self._path, self._totals(), self._throughput.rates
        transferred = rates(lambda each: each.gets)
        info = {
            "bootTimestamp": str(self._started_ms),
            "brokerVersion": str(MQ_VERSION),
            "brokerVersionDesc": "V5_3_3",
            "pid": str(os.getpid()),
            "putTps": rates(lambda each: each.puts),
            "getTransferredTps": transferred,
            "getTransferedTps": transferred,  # as 4.x spells it; rocketmq-exporter reads this one
            "getFoundTps": rates(lambda each: each.found),
            "getMissTps": rates(lambda each: each.missed),
            "getTotalTps": rates(lambda each: each.found + each.missed),
            "msgPutTotalTodayNow": str(totals.puts),
            "msgGetTotalTodayNow": str(totals.gets),
            "msgPutTotalTodayMorning": str(self._days.today.puts),
            "msgPutTotalYesterdayMorning": str(self._days.yesterday.puts),
            "msgGetTotalTodayMorning": str(self._days.today.gets),
            "msgGetTotalYesterdayMorning": str(self._days.yesterday.gets),
            "putMessageDistributeTime": put_times(path.acks.waits),
            "putMessageEntireTimeMax": str(path.acks.longest_ms),
            "getMessageEntireTimeMax": str(totals.longest_read_ms),
            "putMessageFailedTimes": str(path.acks.failed_by_code.total()),
            "sendThreadPoolQueueSize": str(len(path.acks)),
            "sendThreadPoolQueueCapacity": str(self._config.broker.send_thread_pool_queue_capacity),
            "sendThreadPoolQueueHeadWaitTimeMills": str(path.acks.waited_ms(path.clock_ms())),
            "pageCacheLockTimeMills": str(path.flow.last_write_ms),
            "runtime": running_for(wall_ms() - self._started_ms),
        }
        info |= NOT_HERE | self._features.runtime_info()
        problems = json.dumps(self.problems(), ensure_ascii=False)
        earliest = {"earliestMessageTimeStamp": str(self.earliest_stored_ms())}
        info |= path.store.runtime_info() | earliest
        return info | self._of_role() | {PROBLEMS_KEY: problems}

    def problems(self) -> list[str]:
        """The problems of this broker as texts, for `mqctl health`."""
        path, replication = self._path, self._replication
        store, gate = path.store, path.gate
        refusal = gate.refusal.remark if gate.refusal is not None else store.appender.refusal
        found = {
            # A slave refuses them by its role: that is no problem.
            "refuses writes": refusal if gate.is_master else "",
            "its disk is full": store.disk_space.reason,
            "has no index": store.health.index_failure,
            "cannot read a queue": store.health.queue_failure,
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

    def _of_role(self) -> dict[str, str]:
        path = self._path
        gate = path.gate
        return {
            "brokerRole": gate.role.value,
            "masterEpoch": str(gate.master_epoch),
            "wallClockMs": str(wall_ms()),
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
    """A text with the first few names; empty if there are none."""
    first = list(health.bad_names.items())[:3]
    shown = [f"topic {topic!r} queue {queue} at {at}" for (topic, queue), at in first]
    more = ["..."] if len(health.bad_names) > len(first) else []
    return ", ".join([*shown, *more]) + " (they are skipped)" if shown else ""
