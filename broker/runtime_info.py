"""What `brokerStatus` and `clusterList` read of a broker (code 28): texts under Java's keys."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from protocol.codes import MQ_VERSION

_SAMPLES = 61  # one a second: rates over 10 s, 1 min


class Throughput:
    """Puts and gets over time. `tick` is called about once a second."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int, int]] = deque(maxlen=_SAMPLES)

    def tick(self, now_ms: int, puts: int, gets: int) -> None:
        self._samples.append((now_ms, puts, gets))

    def rates(self, column: int) -> str:
        """Messages a second over the last 10 s, 60 s and the whole minute, as Java prints them."""
        return " ".join(f"{self._rate(seconds, column):.2f}" for seconds in (10, 60, 60))

    def _rate(self, seconds: int, column: int) -> float:
        if len(self._samples) < 2:
            return 0.0
        last = self._samples[-1]
        first = self._samples[max(0, len(self._samples) - 1 - seconds)]
        elapsed_ms = last[0] - first[0]
        return (last[column] - first[column]) * 1000 / elapsed_ms if elapsed_ms else 0.0


class RuntimeInfo:
    """Collects the table. `store_info` and `role_info` give the texts of their parts."""

    def __init__(
        self,
        throughput: Throughput,
        store_info: Callable[[], dict[str, str]],
        role_info: Callable[[], dict[str, str]],
        totals: Callable[[], tuple[int, int]],
    ) -> None:
        self._throughput = throughput
        self._store_info = store_info
        self._role_info = role_info
        self._totals = totals
        self._boot_ms = int(time.time() * 1000)

    def table(self) -> dict[str, str]:
        puts, gets = self._totals()
        info = {
            "bootTimestamp": str(self._boot_ms),
            "brokerVersion": str(MQ_VERSION),
            "brokerVersionDesc": "V5_3_3",
            "pid": str(os.getpid()),
            "putTps": self._throughput.rates(1),
            "getTransferredTps": self._throughput.rates(2),
            "getFoundTps": self._throughput.rates(2),
            "getTotalTps": self._throughput.rates(2),
            "msgPutTotalTodayNow": str(puts),
            "msgGetTotalTodayNow": str(gets),
            "msgPutTotalTodayMorning": "0",
            "msgPutTotalYesterdayMorning": "0",
            "msgGetTotalTodayMorning": "0",
            "msgGetTotalYesterdayMorning": "0",
            "sendThreadPoolQueueSize": "0",
            "pullThreadPoolQueueSize": "0",
            "ackThreadPoolQueueSize": "0",
            "sendThreadPoolQueueHeadWaitTimeMills": "0",
            "pullThreadPoolQueueHeadWaitTimeMills": "0",
            "ackThreadPoolQueueHeadWaitTimeMills": "0",
            "pageCacheLockTimeMills": "0",
            "timerReadBehind": "0",
            "timerOffsetBehind": "0",
            "timerCongestNum": "0",
            "timerEnqueueTps": "0.0",
            "timerDequeueTps": "0.0",
        }
        return info | self._store_info() | self._role_info()
