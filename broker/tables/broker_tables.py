"""The tables of a broker that are files beside the log."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batonmq.broker.tables.config_file import ConfigManager
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.delay_offset import DelayOffsetManager
from batonmq.broker.tables.queue_locks import QueueLockManager
from batonmq.broker.tables.subscription_group import (
    MessageRequestModeManager,
    SubscriptionGroupManager,
)
from batonmq.broker.tables.topic_config import TopicConfigManager
from batonmq.broker.tables.users import UserTable


@dataclass(frozen=True, slots=True)
class BrokerTables:
    topics: TopicConfigManager
    groups: SubscriptionGroupManager
    offsets: ConsumerOffsetManager
    delays: DelayOffsetManager
    locks: QueueLockManager
    request_modes: MessageRequestModeManager
    users: UserTable

    @property
    def _in_the_log(self) -> tuple[ConfigManager[Any], ...]:
        """Those whose every change is a record of the log."""
        topics_and_groups = self.topics, self.groups, self.request_modes
        return (*topics_and_groups, self.delays, self.locks, self.users)

    def load(self) -> None:
        for table in (*self._in_the_log, self.offsets):
            table.load()

    def shown_by_the_log(self) -> list[Callable[[], None]]:
        """The due writes of tables that records of the log change; of offsets only if a deletion or
        a reset changed them."""
        # Before a checkpoint: the log below it is not read again (R30, R31, R39, R56).
        writes = [write for table in self._in_the_log for write in table.writes_due()]
        return [*writes, *self.offsets.deletions_due()]

    def writes_due(self) -> list[Callable[[], None]]:
        return [*self.shown_by_the_log(), *self.offsets.writes_due()]

    @property
    def version(self) -> str:
        """A text that changes whenever the table of topics, of groups or of users changes."""
        tables = (self.topics, self.groups, self.users)
        versions = (table.data_version for table in tables)
        return "/".join(f"{v.state_version}.{v.timestamp}.{v.counter}" for v in versions)
