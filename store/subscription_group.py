"""The consumer groups of a broker: table, data version and `config/subscriptionGroup.json`.

Invariants and the way of changes to other replicas as in `topic_config`.
Origin: Java `SubscriptionGroupManager`.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from protocol.bodies import SubscriptionGroupConfig, SubscriptionGroupWrapper
from store.config_file import ConfigManager, wall_clock_ms

TOOLS_CONSUMER_GROUP = "TOOLS_CONSUMER"
# What a fresh Java broker owns; tools and old clients use these names.
SYSTEM_GROUPS = (
    TOOLS_CONSUMER_GROUP,
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
    "CID_RMQ_SYS_TRANS",
)
SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"

# Called with the names of the groups that were put or deleted.
GroupListener = Callable[[tuple[str, ...]], None]


def is_system_group(group: str) -> bool:
    """Whether the broker owns this group."""
    return group in SYSTEM_GROUPS or group.startswith(SYSTEM_GROUP_PREFIX)


class SubscriptionGroupManager(ConfigManager[SubscriptionGroupWrapper]):
    """Group name -> SubscriptionGroupConfig. One thread only; see `snapshot`."""

    def __init__(self, path: Path, *, clock_ms: Callable[[], int] = wall_clock_ms) -> None:
        """`path` is `config/subscriptionGroup.json`; call `load` next."""
        super().__init__(path, SubscriptionGroupWrapper, clock_ms)
        self._system = {group: SubscriptionGroupConfig(group_name=group) for group in SYSTEM_GROUPS}
        self._table: dict[str, SubscriptionGroupConfig] = dict(self._system)
        self._forbidden: dict[str, dict[str, int]] = {}
        self.on_change: list[GroupListener] = []

    def load(self) -> None:
        """Take over what is on disk. Raises CorruptLogError if nothing there can be used."""
        body = self._file.load()
        if body is None:
            return
        self._table = self._system | body.subscription_group_table
        self._forbidden = body.forbidden_table
        self.data_version = body.data_version
        self._dirty = self._table.keys() != body.subscription_group_table.keys()

    # -- reading

    def get(self, group: str) -> SubscriptionGroupConfig | None:
        return self._table.get(group)

    def __contains__(self, group: object) -> bool:
        return group in self._table

    def __len__(self) -> int:
        return len(self._table)

    @property
    def table(self) -> Mapping[str, SubscriptionGroupConfig]:
        """All groups by name; read only."""
        return self._table

    def forbidden(self, group: str, topic: str) -> int:
        """Bits of what is forbidden to a group in a topic; 0 if nothing is."""
        return self._forbidden.get(group, {}).get(topic, 0)

    def wrapper(self) -> SubscriptionGroupWrapper:
        """The whole table with its version, for slaves, tools and the file."""
        return SubscriptionGroupWrapper(
            data_version=self.data_version,
            forbidden_table=self._forbidden,
            subscription_group_table=dict(self._table),
        )

    # -- changing

    def put(self, config: SubscriptionGroupConfig) -> bool:
        """Add or replace a group; False, and no new version, if it is as it was."""
        return self.put_all((config,))

    def put_all(self, configs: Iterable[SubscriptionGroupConfig]) -> bool:
        """Add or replace several groups as one change."""
        changed = [c for c in configs if self._table.get(c.group_name) != c]
        if not changed:
            return False
        for config in changed:
            self._table[config.group_name] = config
        self._changed(tuple(config.group_name for config in changed))
        return True

    def delete(self, group: str) -> bool:
        """Remove a group with what was forbidden to it; a system group stays."""
        if group in self._system or self._table.pop(group, None) is None:
            return False
        self._forbidden.pop(group, None)
        self._changed((group,))
        return True

    def replace_all(self, wrapper: SubscriptionGroupWrapper) -> bool:
        """Become what the master has (a slave's sync); False if it was the same already.

        System groups that the master does not list stay.
        """
        before, after = self._table, self._system | wrapper.subscription_group_table
        touched = tuple(
            group
            for group in sorted(before.keys() | after.keys())
            if before.get(group) != after.get(group)
        )
        same_version = wrapper.data_version == self.data_version
        if not touched and same_version and wrapper.forbidden_table == self._forbidden:
            return False
        self._table = after
        self._forbidden = wrapper.forbidden_table
        self.data_version = wrapper.data_version
        self._dirty = True
        self._tell(touched)
        return True

    def _changed(self, groups: tuple[str, ...]) -> None:
        self._new_version()
        self._tell(groups)

    def _tell(self, groups: tuple[str, ...]) -> None:
        if groups:
            for listener in self.on_change:
                listener(groups)
