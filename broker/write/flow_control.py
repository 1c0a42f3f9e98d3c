"""Sends that could only wait are refused at once (2), so that their producer goes elsewhere. Pure.

Two cases: so many wait for their acknowledgement already that one more would be late anyway, and
what queued up while the disk held a write of the log. Nothing that was refused is stored.
Origin: BrokerFastFailure, and the bound of the send queue, in Java.
"""

from __future__ import annotations

from typing import Final

from batonmq.broker.config import BrokerConfig
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.store.config import StoreConfig

CLEAN_MS: Final = 50
"""How long after such a write: time enough to read what waited in the sockets."""


class FlowControl:
    """Times are ms of one monotonic clock."""

    def __init__(self, broker: BrokerConfig, store: StoreConfig) -> None:
        self._broker = broker
        self._store = store
        self._clean_until_ms = 0
        self.last_write_ms = 0
        """How long the log's last write took."""

    def wrote(self, began_ms: int, now_ms: int) -> None:
        """A write of the log is over."""
        self.last_write_ms = now_ms - began_ms
        if self.last_write_ms > self._store.os_page_cache_busy_timeout_ms:
            self._clean_until_ms = now_ms + CLEAN_MS

    def check(self, waiting: int, now_ms: int) -> None:
        """A send has come; so many are `waiting` for their answers. Raises BrokerRefusal."""
        broker = self._broker
        if waiting >= broker.send_thread_pool_queue_capacity:
            raise BrokerRefusal(
                ResponseCode.SYSTEM_BUSY,
                f"[OVERLOAD]system busy, start flow control for a while: {waiting} sends wait for"
                " their acknowledgement (sendThreadPoolQueueCapacity)",
            )
        if now_ms < self._clean_until_ms and broker.broker_fast_failure_enable:
            raise BrokerRefusal(
                ResponseCode.SYSTEM_BUSY,
                "[PCBUSY_CLEAN_QUEUE]broker busy, start flow control for a while: the last write of"
                f" the log took {self.last_write_ms} ms (osPageCacheBusyTimeOutMills)",
            )
