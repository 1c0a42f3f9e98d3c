"""The `ha:` section: the ha* keys of Java's MessageStoreConfig, and our own. Keys that the store
needs, too (flushDiskType, haSyncFlush, minInSyncReplicas, haListenPort), are in `store:`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from batonmq.ha.follower import SyncPolicy
from batonmq.ha.slave_policy import SlavePolicy
from batonmq.protocol.numbers import host_and_port
from batonmq.runtime.section import Ranges, Section

if TYPE_CHECKING:
    from batonmq.ha.master_core import MasterPolicy


class HAConfig(Section, frozen=True, kw_only=True, rename="camel"):
    """Times in ms, sizes in bytes. Raises ValueError for values that contradict each other."""

    RANGES: ClassVar[Ranges] = {
        "ha_send_heartbeat_interval": (1, None),
        "ha_transfer_batch_size": (1, None),
        "ha_slave_silent_time": (1, None),
        "ha_reconnect_interval": (1, None),
        "ha_max_gap_not_in_sync": (1, None),
        "ha_slave_fallbehind_max": (1, None),
        "in_sync_replicas": (1, None),  # the master is one of them
    }

    ha_send_heartbeat_interval: int | None = None  # the same on all replicas
    ha_housekeeping_interval: int = 20_000
    ha_transfer_batch_size: int = 1 << 20
    ha_max_time_slave_not_catchup: int = 15_000  # for slaves that do not answer heartbeats
    ha_flow_control_enable: bool = False
    max_ha_transfer_byte_in_second: int = 100 << 20
    ha_master_address: str = ""  # classic mode; "": ask a name server
    ha_max_gap_not_in_sync: int = 256 << 20
    ha_slave_fallbehind_max: int | None = None  # the same, as RocketMQ 4 called it
    in_sync_replicas: int = 2  # SYNC_MASTER waits for one less; 1: no wait
    sync_from_last_file: bool = False
    async_learner: bool = False

    ha_transfer_window_size: int = 8 << 20  # sent and not yet acked, per slave
    ha_slave_silent_time: int = 600  # R14: oldest unacked byte or ping
    ha_join_time: int = 200  # R13
    ha_join_lag_size: int = 16 << 20
    ha_confirm_beat_interval: int = 20
    ha_reconnect_interval: int = 20
    ha_reconnect_interval_max: int = 1_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ha_master_address and host_and_port(self.ha_master_address) is None:
            raise ValueError(f"haMasterAddress is {self.ha_master_address!r}: host:port is allowed")
        if self.ha_transfer_window_size < self.ha_transfer_batch_size:
            raise ValueError("haTransferWindowSize must hold one haTransferBatchSize")

    def check_with_controllers(self) -> None:
        """Raises ValueError for times that contradict each other with controllers."""
        heartbeat_ms = self.heartbeat_ms
        if self.ha_slave_silent_time < 3 * heartbeat_ms:
            raise ValueError(
                f"haSlaveSilentTime is {self.ha_slave_silent_time} ms: it must be at least three"
                f" times haSendHeartbeatInterval, which is {heartbeat_ms} ms: a slave answers each"
                " heartbeat, and one may be late"
            )
        self._check_housekeeping(heartbeat_ms)

    def check_classic(self) -> None:
        """Raises ValueError for times that contradict each other in classic mode."""
        self._check_housekeeping(self.classic_heartbeat_ms)

    def _check_housekeeping(self, heartbeat_ms: int) -> None:
        if self.ha_housekeeping_interval <= 2 * heartbeat_ms:
            raise ValueError(
                f"haHousekeepingInterval is {self.ha_housekeeping_interval} ms: it must exceed two"
                f" haSendHeartbeatInterval, which is {heartbeat_ms} ms"
            )

    @property
    def heartbeat_ms(self) -> int:
        """How often a master with controllers sends a heartbeat."""
        given = self.ha_send_heartbeat_interval
        return 200 if given is None else given

    @property
    def classic_heartbeat_ms(self) -> int:
        """How often a classic master sends a heartbeat; RocketMQ's default is longer there."""
        given = self.ha_send_heartbeat_interval
        return 5_000 if given is None else given

    @property
    def gap_bytes(self) -> int:
        """A classic slave further behind than this does not count."""
        if self.ha_slave_fallbehind_max is not None:
            return self.ha_slave_fallbehind_max
        return self.ha_max_gap_not_in_sync

    @property
    def flow_bytes_per_s(self) -> int | None:
        """The flow limit for one slave; None: no limit."""
        return self.max_ha_transfer_byte_in_second if self.ha_flow_control_enable else None

    def sync_policy(self, *, min_in_sync_replicas: int, sync_flush: bool) -> SyncPolicy:
        return SyncPolicy(
            min_in_sync_replicas=min_in_sync_replicas,
            sync_flush=sync_flush,
            slave_silent_ms=self.ha_slave_silent_time,
            quiet_slave_ms=self.ha_max_time_slave_not_catchup,
            join_ms=self.ha_join_time,
            join_lag_bytes_max=self.ha_join_lag_size,
        )

    def master_policy(self, *, segment_size: int) -> MasterPolicy:
        # Imported here, because settings are read before the broker listens, and the core loads
        # after.
        from batonmq.ha.master_core import MasterPolicy

        return MasterPolicy(
            segment_size=segment_size,
            batch_bytes=self.ha_transfer_batch_size,
            window_bytes=self.ha_transfer_window_size,
            heartbeat_ms=self.heartbeat_ms,
            confirm_beat_ms=self.ha_confirm_beat_interval,
            housekeeping_ms=self.ha_housekeeping_interval,
            flow_bytes_per_s=self.flow_bytes_per_s,
        )

    def slave_policy(self, *, ha_sync_flush: bool, segment_size: int) -> SlavePolicy:
        return SlavePolicy(
            segment_size=segment_size,
            sync_flush=ha_sync_flush,
            sync_from_last_file=self.sync_from_last_file,
            async_learner=self.async_learner,
            retry_ms=self.ha_reconnect_interval,
            retry_ms_max=self.ha_reconnect_interval_max,
            keepalive_ms=max(1_000, self.heartbeat_ms),
            housekeeping_ms=self.ha_housekeeping_interval,
            silence_limit_ms=max(2_000, 5 * self.heartbeat_ms),
        )
