"""The `broker:` section of a broker's configuration file, keys spelled as RocketMQ spells them.

Origin: org.apache.rocketmq.common.BrokerConfig. Keys with `baton`-only meaning stand in the
ReplicasManager's own section; the store's keys in `store:`, the HA keys in `ha:`.
"""

from __future__ import annotations

import msgspec

from replicas_manager.config import ELECTION_PRIORITY_LAST, SessionTimings, grpc_addresses


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who this broker is, where it listens, and how it treats clients.

    Raises ValueError for values that contradict each other; the loader names file and line.
    """

    broker_cluster_name: str = msgspec.field(default="DefaultCluster", name="brokerClusterName")
    broker_name: str = msgspec.field(default="broker-a", name="brokerName")
    broker_ip1: str = msgspec.field(default="127.0.0.1", name="brokerIP1")
    broker_ip2: str = msgspec.field(default="", name="brokerIP2")
    bind_address: str = msgspec.field(default="", name="bindAddress")
    listen_port: int = msgspec.field(default=10911, name="listenPort")
    namesrv_addr: str = msgspec.field(default="", name="namesrvAddr")
    enable_controller_mode: bool = msgspec.field(default=True, name="enableControllerMode")
    auto_create_topic_enable: bool = msgspec.field(default=True, name="autoCreateTopicEnable")
    auto_create_subscription_group: bool = msgspec.field(
        default=True, name="autoCreateSubscriptionGroup"
    )
    default_topic_queue_nums: int = msgspec.field(default=8, name="defaultTopicQueueNums")
    long_polling_enable: bool = msgspec.field(default=True, name="longPollingEnable")
    register_name_server_period: int = msgspec.field(
        default=30_000, name="registerNameServerPeriod"
    )
    flush_consumer_offset_interval: int = msgspec.field(
        default=5_000, name="flushConsumerOffsetInterval"
    )
    slave_sync_interval: int = msgspec.field(default=500, name="slaveSyncIntervalMs")
    region_id: str = msgspec.field(default="DefaultRegion", name="regionId")

    def __post_init__(self) -> None:
        for key, port in (("listenPort", self.listen_port),):
            if not 3 <= port <= 65535:
                raise ValueError(
                    f"{key} is {port}, allowed are 3 to 65535: the same handlers listen on port - 2"
                )
        for key, name in (
            ("brokerName", self.broker_name),
            ("brokerClusterName", self.broker_cluster_name),
        ):
            if not name or "#" in name:
                raise ValueError(f"{key} is {name!r}: it must be non-empty and hold no '#'")
        if self.register_name_server_period < 1000:
            raise ValueError("registerNameServerPeriod is in ms, at least 1000")

    @property
    def name_servers(self) -> tuple[str, ...]:
        """Addresses `host:port`, in the order of the file."""
        return tuple(a.strip() for a in self.namesrv_addr.split(";") if a.strip())

    @property
    def bind_host(self) -> str:
        """The address to listen on; the advertised one unless `bindAddress` says otherwise."""
        return self.bind_address or self.broker_ip1

    @property
    def ha_ip(self) -> str:
        """The host that slaves dial."""
        return self.broker_ip2 or self.broker_ip1

    @property
    def address(self) -> str:
        """What clients dial, and what the records carry as their store host."""
        return f"{self.broker_ip1}:{self.listen_port}"


class ReplicasConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `replicas:` section: controllers, sessions and the lease. Times in ms.

    `controllerAddr` names the controllers' remoting doors as RocketMQ does; the gRPC doors are one
    port above, unless `controllerGrpcAddr` names them.
    """

    controller_addr: str = msgspec.field(default="", name="controllerAddr")
    controller_grpc_addr: str = msgspec.field(default="", name="controllerGrpcAddr")
    broker_session_heartbeat_ms: int = msgspec.field(default=100, name="brokerSessionHeartbeatMs")
    broker_session_follower_heartbeat_ms: int = msgspec.field(
        default=500, name="brokerSessionFollowerHeartbeatMs"
    )
    broker_session_timeout_ms: int = msgspec.field(default=800, name="brokerSessionTimeoutMs")
    master_lease_ms: int = msgspec.field(default=600, name="masterLeaseMs")
    broker_election_priority: int = msgspec.field(
        default=ELECTION_PRIORITY_LAST, name="brokerElectionPriority"
    )
    store_path_broker_identity: str = msgspec.field(default="", name="storePathBrokerIdentity")

    def __post_init__(self) -> None:
        self.timings.check()
        if self.controller_addr or self.controller_grpc_addr:
            grpc_addresses(self.controller_addr, self.controller_grpc_addr)

    @property
    def timings(self) -> SessionTimings:
        return SessionTimings(
            heartbeat_ms=self.broker_session_heartbeat_ms,
            follower_heartbeat_ms=self.broker_session_follower_heartbeat_ms,
            session_timeout_ms=self.broker_session_timeout_ms,
            master_lease_ms=self.master_lease_ms,
        )
