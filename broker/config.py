"""The configuration file of a broker: sections `broker:`, `replicas:`, `store:` and `ha:`.

Keys have RocketMQ's spelling. Keys that only BatonMQ has are in `replicas:`. Origin:
org.apache.rocketmq.common.BrokerConfig.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Literal

import msgspec

from batonmq.auth.config import AuthConfig
from batonmq.auth.signature import Signer
from batonmq.ha.config import HAConfig
from batonmq.protocol.message_id import host_bytes
from batonmq.protocol.topic_name import (
    TOPIC_QUEUES_MAX,
    TRACE_TOPIC,
    server_name_problem,
    topic_problem,
)
from batonmq.replicas_manager.config import (
    ELECTION_PRIORITY_LAST,
    Protocol,
    ReplicasManagerConfig,
    SessionTimings,
    controller_addresses,
    remoting_timings,
)
from batonmq.runtime.section import LogFormat, LogLevel, Ranges, Section
from batonmq.runtime.sockets import look_up_once
from batonmq.runtime.tls import Tls
from batonmq.store.config import StoreConfig


class BrokerConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Identity, addresses, and limits for clients.

    Unless `enableControllerMode` is given, it is on if controllers are named. `brokerRole` and
    `brokerId` count in classic mode only; a master always has id 0. Raises ValueError for values
    that contradict each other; the loader names file and line.
    """

    RANGES: ClassVar[Ranges] = {
        "listen_port": (3, 65_535),  # the same handlers listen on port - 2
        "broker_not_active_timeout": (1000, None),  # ms
        "register_name_server_period": (1000, None),  # ms
        "flush_consumer_offset_interval": (1, None),  # ms
        "slave_sync_interval": (1, None),  # ms
        "default_topic_queue_nums": (1, TOPIC_QUEUES_MAX),
        "broker_permission": (0, 7),
        "transaction_time_out": (0, None),  # ms
        "transaction_check_interval": (100, None),  # ms
        "transaction_check_max": (1, None),
        "send_thread_pool_queue_capacity": (1, None),  # sends
        "consumer_fallbehind_threshold": (1, None),  # bytes
        "pop_in_flight_max": (1, None),  # messages
        "topics_max": (1, None),
        "subscription_groups_max": (1, None),
    }

    broker_cluster_name: str = "DefaultCluster"
    broker_name: str = "broker-a"
    broker_ip1: str = msgspec.field(default="127.0.0.1", name="brokerIP1")
    broker_ip2: str = msgspec.field(default="", name="brokerIP2")
    bind_address: str = ""
    listen_port: int = 10911
    namesrv_addr: str = ""
    enable_controller_mode: bool | None = None
    broker_role: Literal["ASYNC_MASTER", "SYNC_MASTER", "SLAVE"] = "ASYNC_MASTER"
    broker_id: int = 0
    enable_slave_acting_master: bool = False
    skip_pre_online: bool = False
    broker_not_active_timeout: int = msgspec.field(
        default=10_000, name="brokerNotActiveTimeoutMillis"
    )
    auto_create_topic_enable: bool = True
    auto_create_subscription_group: bool = True
    default_topic_queue_nums: int = 8
    broker_permission: int = 6
    long_polling_enable: bool = True
    register_name_server_period: int = 30_000
    flush_consumer_offset_interval: int = 5_000
    slave_sync_interval: int = msgspec.field(default=500, name="slaveSyncIntervalMs")
    transaction_time_out: int = 6_000
    transaction_check_interval: int = 30_000
    transaction_check_max: int = 15
    reject_transaction_message: bool = False
    recall_message_enable: bool = False
    region_id: str = "DefaultRegion"
    enable_property_filter: bool = True
    lite_pull_message_enable: bool = True
    use_server_side_reset_offset: bool = True
    trace_topic_enable: bool = False
    msg_trace_topic_name: str = TRACE_TOPIC
    store_reply_message_enable: bool = True
    slave_read_enable: bool = False
    log_level: LogLevel = ""
    log_format: LogFormat = "text"
    enable_retry_topic_v2: bool = False
    default_message_request_mode: Literal["PULL", "POP"] = "PULL"
    default_pop_share_queue_num: int = -1
    server_load_balancer_enable: bool = True
    broker_fast_failure_enable: bool = True
    send_thread_pool_queue_capacity: int = 100_000
    disable_consume_if_consumer_read_slowly: bool = False
    consumer_fallbehind_threshold: int = 16 << 30
    pop_in_flight_max: int = 200_000
    topics_max: int = 100_000
    subscription_groups_max: int = 100_000
    enable_mixed_message_type: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, name in (
            ("brokerName", self.broker_name),
            ("brokerClusterName", self.broker_cluster_name),
        ):
            if problem := server_name_problem(name):
                raise ValueError(f"{key} is {name!r}: {problem}")
        if problem := topic_problem(self.msg_trace_topic_name):
            raise ValueError(f"msgTraceTopicName is {self.msg_trace_topic_name!r}: {problem}")

    @property
    def name_servers(self) -> tuple[str, ...]:
        """Addresses `host:port`, in the order of the file."""
        return tuple(a.strip() for a in self.namesrv_addr.split(";") if a.strip())

    @property
    def slaves_serve_pulls(self) -> bool:
        """Whether slaves serve pulls: one that acted for its master does so until the routes name
        the master again."""
        return self.slave_read_enable or self.enable_slave_acting_master

    @property
    def bind_host(self) -> str:
        """The address to listen on: `bindAddress`, else the advertised one."""
        return self.bind_address or self.broker_ip1

    @property
    def ha_ip(self) -> str:
        """The host that slaves connect to."""
        return self.broker_ip2 or self.broker_ip1

    @property
    def address(self) -> str:
        """The address that clients connect to."""
        return f"{self.broker_ip1}:{self.listen_port}"

    @property
    def store_host(self) -> bytes:
        """`address` as stored in records: ip and port. A host name is resolved once per process.
        Raises OSError if it cannot be resolved."""
        return host_bytes(look_up_once(self.broker_ip1), self.listen_port)


RUNTIME_KEYS: Final = frozenset(
    {
        # broker:
        "autoCreateTopicEnable",
        "autoCreateSubscriptionGroup",
        "brokerFastFailureEnable",
        "brokerPermission",
        "consumerFallbehindThreshold",
        "defaultMessageRequestMode",
        "defaultPopShareQueueNum",
        "disableConsumeIfConsumerReadSlowly",
        "enableMixedMessageType",
        "enablePropertyFilter",
        "flushConsumerOffsetInterval",
        "litePullMessageEnable",
        "logLevel",
        "longPollingEnable",
        "popInFlightMax",
        "recallMessageEnable",
        "rejectTransactionMessage",
        "serverLoadBalancerEnable",
        "sendThreadPoolQueueCapacity",
        "slaveReadEnable",
        "storeReplyMessageEnable",
        "transactionCheckInterval",
        "transactionCheckMax",
        "transactionTimeOut",
        "useServerSideResetOffset",
        # store:
        "accessMessageInMemoryMaxRatio",
        "cleanFileForciblyEnable",
        "deleteFileBatchMax",
        "deleteWhen",
        "diskMaxUsedSpaceRatio",
        "diskSpaceCleanForciblyRatio",
        "diskSpaceWarningLevelRatio",
        "fileReservedTime",
        "maxMessageSize",
        "maxMsgsNumBatch",
        "maxTransferBytesOnMessageInDisk",
        "maxTransferBytesOnMessageInMemory",
        "maxTransferCountOnMessageInDisk",
        "maxTransferCountOnMessageInMemory",
        "osPageCacheBusyTimeOutMills",
        "timerMaxDelaySec",
        "timerWheelEnable",
        "truncatedLogMaxBytes",
        "truncatedLogMaxSets",
    }
)
"""Keys that may change while running (UPDATE_BROKER_CONFIG, 25): the code reads them at each
use."""


class ReplicasConfig(
    Section, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """The `replicas:` section: controllers, sessions and the lease. Times in ms.

    `controllerAddr` has the controllers' remoting endpoints, as in RocketMQ; gRPC is one port above
    unless `controllerGrpcAddr` is given. `controllerProtocol: remoting` is for RocketMQ's
    controllers, with the two times below it; ours use the `brokerSession…` times and
    `masterLeaseMs`. `relayToMaster`: a slave passes on requests that only the master may handle,
    and serves pulls below its confirmOffset.
    """

    RANGES: ClassVar[Ranges] = {
        "broker_heartbeat_interval": (1, None),  # ms
        "controller_heartbeat_timeout": (1, None),  # ms
    }

    controller_addr: str = ""
    controller_protocol: Protocol = "grpc"
    broker_heartbeat_interval: int = 1000
    controller_heartbeat_timeout: int = msgspec.field(
        default=5000, name="controllerHeartBeatTimeoutMills"
    )
    controller_grpc_addr: str = ""
    broker_session_heartbeat_ms: int = 100
    broker_session_follower_heartbeat_ms: int = 500
    broker_session_timeout_ms: int = 800
    master_lease_ms: int = 600
    broker_election_priority: int = ELECTION_PRIORITY_LAST
    relay_to_master: bool = True
    store_path_broker_identity: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.timings.check()
        if self.controller_addr or self.controller_grpc_addr:
            self.controllers()

    def controllers(self) -> tuple[str, ...]:
        """Addresses of the controllers, for `controllerProtocol`."""
        return controller_addresses(
            self.controller_addr, self.controller_grpc_addr, self.controller_protocol
        )

    @property
    def timings(self) -> SessionTimings:
        if self.controller_protocol == "remoting":
            return remoting_timings(
                self.broker_heartbeat_interval, self.controller_heartbeat_timeout
            )
        return SessionTimings(
            heartbeat_ms=self.broker_session_heartbeat_ms,
            follower_heartbeat_ms=self.broker_session_follower_heartbeat_ms,
            session_timeout_ms=self.broker_session_timeout_ms,
            master_lease_ms=self.master_lease_ms,
        )


@dataclass(frozen=True, slots=True)
class BrokerSections:
    broker: BrokerConfig
    store: StoreConfig
    ha: HAConfig
    replicas: ReplicasConfig
    tls: Tls | None = None
    """The certificates of this process."""
    auth: AuthConfig = field(default_factory=AuthConfig)

    @property
    def ha_address(self) -> str:
        """The address that slaves connect to."""
        return f"{self.broker.ha_ip}:{self.store.ha_listen_port}"

    def __post_init__(self) -> None:
        check = self.ha.check_with_controllers if self.controller_mode else self.ha.check_classic
        check()
        if self.is_classic_slave and self.broker.broker_id < 1:
            raise ValueError(
                f"brokerId is {self.broker.broker_id}: a broker with brokerRole SLAVE needs one"
                " above 0; 0 is its master's"
            )

    @property
    def controller_mode(self) -> bool:
        """Whether controllers give this broker its role."""
        if self.broker.enable_controller_mode is not None:
            return self.broker.enable_controller_mode
        return bool(self.replicas.controller_addr or self.replicas.controller_grpc_addr)

    @property
    def is_classic_slave(self) -> bool:
        return not self.controller_mode and self.broker.broker_role == "SLAVE"

    @property
    def may_act(self) -> bool:
        """Whether slaves of this group act for an absent master (classic mode only)."""
        return not self.controller_mode and self.broker.enable_slave_acting_master

    @property
    def needed_slaves(self) -> int:
        """How many slaves must have a write before it is acknowledged (classic mode)."""
        waits = self.broker.broker_role == "SYNC_MASTER"
        return self.ha.in_sync_replicas - 1 if waits else 0

    @property
    def relays(self) -> bool:
        """Whether a slave passes requests on to its master (controller mode only)."""
        return self.controller_mode and self.replicas.relay_to_master

    def replicas_manager(self, sign: Signer | None) -> ReplicasManagerConfig:
        """The configuration of the ReplicasManager. `sign`: the guard's, which follows a new secret
        of the nodes."""
        root, replicas = self.store.root, self.replicas
        identity = replicas.store_path_broker_identity
        return ReplicasManagerConfig(
            cluster_name=self.broker.broker_cluster_name,
            broker_name=self.broker.broker_name,
            address=self.broker.address,
            ha_address=self.ha_address,
            controllers=replicas.controllers(),
            identity_path=Path(identity) if identity else root / "brokerIdentity",
            role_path=root / "masterEpoch",
            election_priority=replicas.broker_election_priority,
            learner=self.ha.async_learner,
            timings=replicas.timings,
            protocol=replicas.controller_protocol,
            tls=self.tls,
            sign=sign,
        )
