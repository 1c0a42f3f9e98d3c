"""Bodies of the name server: routes, clusters, registration, key-values.

Origin: Java packages `remoting.protocol.route` and `.body`.
"""

import msgspec

from protocol.body import Body, Json


class DataVersion(msgspec.Struct, Json, frozen=True, rename="camel", kw_only=True):
    """State of a table: equal only if all three are. `state_version` is the masterEpoch."""

    counter: int = 0
    state_version: int = 0
    timestamp: int = 0

    def next(self, now_ms: int, state_version: int | None = None) -> "DataVersion":
        """The version after one change; `state_version` None keeps the present one."""
        return DataVersion(
            counter=self.counter + 1,
            state_version=self.state_version if state_version is None else state_version,
            timestamp=now_ms,
        )


class BrokerData(Body):
    """One broker group: id 0 is the master's address, others are slaves'."""

    broker_addrs: dict[int, str] = msgspec.field(default_factory=dict)
    broker_name: str = ""
    cluster: str = ""
    enable_acting_master: bool = False
    zone_name: str | None = None


class QueueData(Body):
    broker_name: str = ""
    perm: int = 6
    read_queue_nums: int = 0
    topic_sys_flag: int = 0
    write_queue_nums: int = 0


class TopicRouteData(Body):
    broker_datas: list[BrokerData] = msgspec.field(default_factory=list)
    filter_server_table: dict[str, list[str]] = msgspec.field(default_factory=dict)
    order_topic_conf: str | None = None
    queue_datas: list[QueueData] = msgspec.field(default_factory=list)


class ClusterInfo(Body):
    broker_addr_table: dict[str, BrokerData] = msgspec.field(default_factory=dict)
    cluster_addr_table: dict[str, list[str]] = msgspec.field(default_factory=dict)


class TopicList(Body):
    broker_addr: str | None = None
    topic_list: list[str] = msgspec.field(default_factory=list)


class KVTable(Body):
    table: dict[str, str] = msgspec.field(default_factory=dict)


class BrokerMemberGroup(Body):
    broker_addrs: dict[int, str] = msgspec.field(default_factory=dict)
    broker_name: str = ""
    cluster: str = ""


class GetBrokerMemberGroupResponseBody(Body):
    broker_member_group: BrokerMemberGroup = msgspec.field(default_factory=BrokerMemberGroup)


__all__ = [
    "BrokerData",
    "BrokerMemberGroup",
    "ClusterInfo",
    "DataVersion",
    "GetBrokerMemberGroupResponseBody",
    "KVTable",
    "QueueData",
    "TopicList",
    "TopicRouteData",
]
