"""Settings of the `namesrv:` section, spelled as RocketMQ spells them (`NamesrvConfig`).

RocketMQ's keys for features that do not exist here (POP mappings, thread pools) are unknown keys:
the start fails, so that no operator believes that they have an effect.
"""

import os
from typing import ClassVar

from batonmq.namesrv.state import ENTRIES_MAX
from batonmq.runtime.runtime_settings import listed_keys
from batonmq.runtime.section import LogFormat, LogLevel, Ranges, Section


class NamesrvConfig(Section, frozen=True, kw_only=True, rename="camel"):
    """Times are milliseconds unless a key says otherwise. Empty paths keep nothing on disk."""

    RANGES: ClassVar[Ranges] = {
        "listen_port": (0, 65_535),
        "scan_not_active_broker_interval": (1, None),
        "route_entries_max": (1, None),
        "server_channel_max_idle_time_seconds": (1, None),
    }

    listen_port: int = 9876
    bind_address: str = "0.0.0.0"
    enable_controller_in_namesrv: bool = False
    kv_config_path: str = ""
    config_store_path: str = ""
    config_black_list: str = "configBlackList;configStorePath;kvConfigPath"
    scan_not_active_broker_interval: int = 5_000
    server_channel_max_idle_time_seconds: int = 120
    route_entries_max: int = ENTRIES_MAX
    """Topics of all groups together, and 64 for each group."""
    # These may be changed while running (UPDATE_NAMESRV_CONFIG, 318).
    order_message_enable: bool = False
    return_order_topic_config_to_broker: bool = True
    enable_all_topic_list: bool = True
    enable_topic_list: bool = True
    support_acting_master: bool = False
    notify_min_broker_id_changed: bool = False
    delete_topic_with_broker_registration: bool = False
    replica_routes: bool = False
    """Routes also show producers a way to the master through each slave."""
    log_level: LogLevel = ""
    log_format: LogFormat = "text"

    @property
    def kv_path(self) -> str:
        return os.path.expanduser(self.kv_config_path)

    @property
    def store_path(self) -> str:
        return os.path.expanduser(self.config_store_path)

    @property
    def black_list(self) -> frozenset[str]:
        """Keys that UPDATE_NAMESRV_CONFIG (318) may not touch: RocketMQ's fixed ones and the
        configured ones."""
        fixed = {"configBlackList", "configStorePath", "kvConfigPath"}
        return listed_keys(self.config_black_list) | fixed


RUNTIME_KEYS = frozenset(
    {
        "orderMessageEnable",
        "returnOrderTopicConfigToBroker",
        "enableAllTopicList",
        "enableTopicList",
        "supportActingMaster",
        "notifyMinBrokerIdChanged",
        "deleteTopicWithBrokerRegistration",
        "replicaRoutes",
        "logLevel",
    }
)
"""Keys that may be changed while running."""
