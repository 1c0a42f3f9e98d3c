"""The consumer groups of a broker, and which of them consume by POP: tables and their files.

`config/subscriptionGroup.json` and `config/messageRequestMode.json`; a group that is not in the
second one pulls. Invariants and replication as in `topic_config` (R31).
Origin: Java `SubscriptionGroupManager`, `MessageRequestModeManager`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from batonmq.broker.tables.config_file import ConfigManager, NamedTable
from batonmq.protocol.bodies import (
    MessageRequestModeSerializeWrapper,
    SetMessageRequestModeRequestBody,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
)
from batonmq.protocol.topic_name import SYSTEM_GROUPS

FORBIDDEN_TO_READ: Final = 1 << 2
"""Of the bits of what a group may not do in a topic. Origin: Java `PermName.INDEX_PERM_READ`."""


class SubscriptionGroupManager(NamedTable[SubscriptionGroupWrapper, SubscriptionGroupConfig]):
    """Group name to SubscriptionGroupConfig. One thread only."""

    def __init__(self, path: Path) -> None:
        system = {group: SubscriptionGroupConfig(group_name=group) for group in SYSTEM_GROUPS}
        super().__init__(path, SubscriptionGroupWrapper, system)
        self._forbidden: dict[str, dict[str, int]] = {}

    @staticmethod
    def name_of(config: SubscriptionGroupConfig) -> str:
        return config.group_name

    def _take_loaded(self, body: SubscriptionGroupWrapper) -> None:
        self._adopt_loaded(body.subscription_group_table, body.data_version)
        self._forbidden = body.forbidden_table

    def wrapper(self) -> SubscriptionGroupWrapper:
        """The whole table with its version, for slaves, tools and the file."""
        return SubscriptionGroupWrapper(
            data_version=self.data_version,
            forbidden_table={group: dict(topics) for group, topics in self._forbidden.items()},
            subscription_group_table=dict(self._table),
        )

    def is_forbidden(self, group: str, topic: str) -> bool:
        """Whether an operator has forbidden the group to read the topic."""
        # Each pull asks, and almost always nothing is forbidden.
        return bool(self._forbidden) and bool(self.forbidden(group, topic) & FORBIDDEN_TO_READ)

    def forbidden(self, group: str, topic: str) -> int:
        """The bits of what a group may not do in a topic; 0: nothing is forbidden."""
        return self._forbidden.get(group, {}).get(topic, 0)

    @property
    def forbidden_count(self) -> int:
        return sum(map(len, self._forbidden.values()))

    def set_forbidden(self, group: str, topic: str, bits: int) -> None:
        if self.forbidden(group, topic) != bits:
            topics = self._forbidden.pop(group, {}) | {topic: bits}
            if kept := {name: some for name, some in topics.items() if some}:
                self._forbidden[group] = kept
            self._new_version()

    def delete(self, name: str) -> bool:
        """Removes a group and its forbidden topics; a system group stays."""
        was_there = super().delete(name)
        if was_there:
            self._forbidden.pop(name, None)
        return was_there

    def replace_all(self, wrapper: SubscriptionGroupWrapper) -> bool:
        """Replaces the table by the master's; False if it was the same. System groups that the
        master does not list stay."""
        changed = self._adopt(wrapper.subscription_group_table, wrapper.data_version)
        # `_adopt` compares groups and versions only.
        if wrapper.forbidden_table != self._forbidden:
            self._forbidden = wrapper.forbidden_table
            changed = self._dirty = True
        return changed


class MessageRequestModeManager(ConfigManager[MessageRequestModeSerializeWrapper]):
    """One thread only."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MessageRequestModeSerializeWrapper)
        self._table: dict[str, dict[str, SetMessageRequestModeRequestBody]] = {}
        self._dirty = False  # without such groups there is no file

    def _take_loaded(self, body: MessageRequestModeSerializeWrapper) -> None:
        self._table = body.message_request_mode_map

    def wrapper(self) -> MessageRequestModeSerializeWrapper:
        table = dict(zip(self._table, map(dict, self._table.values()), strict=True))
        return MessageRequestModeSerializeWrapper(message_request_mode_map=table)

    @property
    def count(self) -> int:
        return sum(map(len, self._table.values()))

    def get(self, topic: str, group: str) -> SetMessageRequestModeRequestBody | None:
        return self._table.get(topic, {}).get(group)

    def put_all(self, modes: Iterable[SetMessageRequestModeRequestBody]) -> None:
        for mode in modes:
            if self.get(mode.topic, mode.consumer_group) != mode:
                self._table.setdefault(mode.topic, {})[mode.consumer_group] = mode
                self._new_version()

    def replace_all(self, table: MessageRequestModeSerializeWrapper) -> None:
        if table.message_request_mode_map != self._table:
            self._table = table.message_request_mode_map
            self._new_version()
