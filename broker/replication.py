"""Replication as the broker sees it: HA, ReplicasManager and role in one place, or none of them.

In controller mode this hears the HA service (confirmOffset, proposals, truncations), passes
proposals on to the ReplicasManager, and keeps the gate's knowledge of lease and required set fresh.
Outside controller mode the broker is its own master: what is written, or flushed under SYNC_FLUSH,
is confirmed. `written` is on the hot path, once a turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from broker.ack_pause import AckPause
from broker.name_server_registrar import Registration
from broker.pending_acks import PendingAcks
from broker.role_actions import RoleActions
from broker.role_gate import Role, RoleGate
from broker.send_hold import SendHold
from broker.slave_sync import SlaveSynchronize
from ha.peer_proof import PeerIdentity
from ha.service import AutoSwitchHAService
from ha.sync_state import Proposal
from protocol.bodies import (
    EpochCacheEntry,
    EpochEntryCache,
    HARuntimeInfo,
    RegisterBrokerBody,
    TopicConfigAndMappingSerializeWrapper,
)
from protocol.codes import RequestCode, ResponseCode
from protocol.role_view import RoleView
from remoting.client import RemotingClient
from remoting.command import RemotingCommand
from replicas_manager.config import ReplicasManagerConfig, grpc_addresses
from replicas_manager.service import ReplicasManager
from store.consumer_offset import ConsumerOffsetManager
from store.message_store import MessageStore
from store.topic_config import TopicConfigManager

if TYPE_CHECKING:
    from broker.service import BrokerSections

log = logging.getLogger(__name__)

STANDALONE_EPOCH = 0
PROOF_TIMEOUT_MS = 1000
NOT_REPLICATED = "stored, but not on every required replica in time"
NOT_FLUSHED = "stored, but not on this broker's disk in time"


class Replication:
    """Implements `ha.ports.HAListener`. One per broker, on its loop."""

    def __init__(
        self,
        config: BrokerSections,
        store: MessageStore,
        gate: RoleGate,
        acks: PendingAcks,
        topics: TopicConfigManager,
        offsets: ConsumerOffsetManager,
        slave_sync: SlaveSynchronize,
        client: RemotingClient,
        *,
        clock_ms: Callable[[], int],
        routes_changed: Callable[[], None],
        role_left: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._store = store
        self._gate = gate
        self._acks = acks
        self._topics = topics
        self._client = client
        self._clock_ms = clock_ms
        self._routes_changed = routes_changed
        self._on_fatal = on_fatal
        self._ha: AutoSwitchHAService | None = None
        self._manager: ReplicasManager | None = None
        self.hold = SendHold()
        self._actions: RoleActions | None = None
        self._pause: AckPause | None = None
        if config.broker.enable_controller_mode:
            self._ha = AutoSwitchHAService(
                store,
                config.ha,
                self,
                store_config=config.store,
                broker_id_of=self._broker_id,
                prove_master=self._prove_master,
                bind_host=config.broker.bind_host,
            )
            self._actions = RoleActions(
                store,
                self._ha,
                gate,
                acks,
                topics,
                offsets,
                slave_sync,
                routes_changed=routes_changed,
                role_left=role_left,
                hold=self.hold,
                end_turn=lambda: self.written(store.end_turn()),
                clock_ms=clock_ms,
            )
            self._manager = ReplicasManager(
                self._manager_config(), self._actions, on_fatal=on_fatal, switch=self._actions
            )
            self._actions.report = self._manager.report_event
            self._pause = AckPause(self._manager.lease_valid)

    def _manager_config(self) -> ReplicasManagerConfig:
        broker, replicas, root = self._config.broker, self._config.replicas, self._config.store.root
        identity = replicas.store_path_broker_identity
        return ReplicasManagerConfig(
            cluster_name=broker.broker_cluster_name,
            broker_name=broker.broker_name,
            address=broker.address,
            ha_address=f"{broker.ha_ip}:{self._config.store.ha_listen_port}",
            controllers=grpc_addresses(replicas.controller_addr, replicas.controller_grpc_addr),
            identity_path=root / "brokerIdentity" if not identity else type(root)(identity),
            role_path=root / "masterEpoch",
            election_priority=replicas.broker_election_priority,
            learner=self._config.ha.async_learner,
            timings=replicas.timings,
        )

    def _broker_id(self) -> int:
        assert self._manager is not None
        return self._manager.broker_id

    async def _prove_master(self, view: RoleView) -> PeerIdentity:
        """R21: who answers at the master's address, asked before a byte is cut."""
        request = RemotingCommand.request(RequestCode.GET_BROKER_EPOCH_CACHE)
        reply = await self._client.call(view.master_address, request, PROOF_TIMEOUT_MS)
        cache = EpochEntryCache.decode(reply.body)
        last = max((entry.epoch for entry in cache.epoch_list), default=-1)
        return PeerIdentity(cache.cluster_name, cache.broker_name, cache.broker_id, last)

    async def start(self) -> None:
        """Begins to register, or opens at once outside controller mode."""
        self._store.on_flushed(self._flushed)
        if self._ha is None or self._manager is None:
            self._acks.begin_epoch(STANDALONE_EPOCH)
            self._store.advance_confirm_offset(self._store.max_phy_offset)
            self._gate.opening(STANDALONE_EPOCH)
            self._gate.open()
            self._routes_changed()
            return
        await self._ha.start()
        await self._manager.start()

    async def close(self, reason: str) -> None:
        """`reason` is what the controllers are told, and with them the history."""
        self.hold.release()
        self._acks.fail_all(ResponseCode.SERVICE_NOT_AVAILABLE, "this broker is stopping")
        if self._manager is not None:
            await self._manager.close(reason)
        if self._ha is not None:
            await self._ha.close()

    # --- the hot path ---

    def written(self, end_offset: int) -> None:
        """Everything below `end_offset` is in the log file: ship it, or confirm it."""
        if self._ha is not None:
            self._ha.notify_append(end_offset)
        elif not self._config.store.sync_flush:
            self._confirmed(end_offset)
        if self._config.store.sync_flush:
            self._store.request_flush()

    def _flushed(self, flushed_offset: int) -> None:
        if self._ha is not None:
            self._ha.notify_flushed(flushed_offset)
        elif self._config.store.sync_flush:
            self._confirmed(flushed_offset)

    def _confirmed(self, offset: int) -> None:
        """Code 0 leaves only here, and only for the epoch that the acks were taken in (R4)."""
        paused = self._pause is not None and self._pause.holds(self._clock_ms())
        if (
            not paused
            and self._gate.role is Role.MASTER
            and self._acks.master_epoch == self._gate.master_epoch
        ):
            actions = self._actions
            if actions is not None and actions.first_ack_due:
                waited_ms = self._acks.waited_ms(self._clock_ms())
                if self._acks.confirm(offset):
                    actions.acked(waited_ms)
            else:
                self._acks.confirm(offset)
        self._store.advance_confirm_offset(offset)

    # --- HAListener ---

    def on_confirm_offset(self, offset: int) -> None:
        self._confirmed(offset)
        if self.hold.active and self._manager is not None:
            self._manager.acks_changed()

    def on_proposal(self, proposal: Proposal) -> None:
        assert self._manager is not None
        self._manager.propose(proposal)

    def on_slave_following(self, broker_id: int) -> None:
        log.info("slave_following broker_id=%d", broker_id)

    def on_truncated(self, from_offset: int, to_offset: int) -> None:
        log.warning("log_truncated from_offset=%d to_offset=%d", from_offset, to_offset)
        assert self._manager is not None
        self._manager.report_event("truncated", fromOffset=from_offset, toOffset=to_offset)

    def on_diverged(self, reason: str) -> None:
        log.error("log_diverged reason=%s", reason)
        assert self._manager is not None
        self._manager.report_event("diverged", reason=reason)

    def on_damage(self, reason: str) -> None:
        log.error("log_damaged reason=%s", reason)
        if self._manager is None:
            return  # alone: nobody to tell, and nobody else to lead
        self._manager.report_event("diverged", reason=f"its own log is damaged: {reason}")

    def on_fatal(self, exc: BaseException) -> None:
        self._on_fatal(exc)

    # --- what others ask ---

    def in_sync_count(self) -> int:
        return self._ha.in_sync_count if self._ha is not None else 1

    def ha_status(self) -> HARuntimeInfo:
        if self._ha is not None:
            return self._ha.runtime_info()
        return HARuntimeInfo(master=True, master_commit_log_max_offset=self._store.max_phy_offset)

    def epoch_cache(self) -> EpochEntryCache | None:
        if self._manager is None:
            return None
        broker = self._config.broker
        return EpochEntryCache(
            cluster_name=broker.broker_cluster_name,
            broker_name=broker.broker_name,
            broker_id=self._manager.broker_id,
            epoch_list=[
                EpochCacheEntry(
                    epoch=entry.epoch, start_offset=entry.start_offset, end_offset=entry.end_offset
                )
                for entry in self._store.epochs.entries
            ],
            max_offset=self._store.max_phy_offset,
        )

    def runtime_info(self) -> dict[str, str]:
        """Role, epochs and lease, for brokerStatus."""
        info = {
            "brokerRole": self._gate.role.value,
            "masterEpoch": str(self._gate.master_epoch),
            "brokerActive": str(self._gate.refusal is None).lower(),
            "pendingAcks": str(len(self._acks)),
            "heldSends": str(len(self.hold)),
        }
        if self._manager is not None and self._ha is not None:
            view = self._manager.view
            info |= {
                "brokerId": str(self._manager.broker_id),
                "masterLease": str(self._manager.lease_valid(self._clock_ms())).lower(),
                "requiredSet": ",".join(map(str, sorted(self._ha.required_set))),
                "syncStateSetEpoch": str(view.sync_state_set_epoch if view else 0),
                "lastEpoch": str(self._store.epochs.last_epoch),
            }
        return info

    def registration(self) -> Registration | None:
        """What the name servers are told now: id 0 for a master, its own id for a slave."""
        if self._gate.role is Role.FENCED:
            return None
        broker = self._config.broker
        role_id = 0
        if self._gate.role is Role.SLAVE:
            assert self._manager is not None
            role_id = self._manager.broker_id
        return Registration(
            broker.broker_cluster_name,
            broker.broker_name,
            role_id,
            broker.address,
            f"{broker.ha_ip}:{self._config.store.ha_listen_port}",
            RegisterBrokerBody(
                topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
                    data_version=self._topics.data_version,
                    topic_config_table=dict(self._topics.table),
                )
            ).encode(),
        )

    def role_notice(self, request: RemotingCommand) -> None:
        """1008: a hint that the role changed."""
        if self._manager is not None:
            self._manager.on_remoting_role_notice(
                int(request.ext.get("masterEpoch", "0")),
                int(request.ext.get("syncStateSetEpoch", "0")),
            )

    def tick(self, now_ms: int) -> None:
        """Lease and required set may have changed with time; acks may have waited too long."""
        if self._manager is not None and self._ha is not None:
            self._gate.standing(
                lease=self._manager.lease_valid(now_ms),
                required_set_whole=self._ha.required_set_whole,
            )
            self._confirmed(self._store.confirm_offset)  # what an ended pause kept
        self._acks.expire(now_ms, self._why_late)

    def _why_late(self, end_offset: int) -> tuple[int, str]:
        if self._config.store.sync_flush and self._store.flushed_offset < end_offset:
            return ResponseCode.FLUSH_DISK_TIMEOUT, NOT_FLUSHED
        return ResponseCode.FLUSH_SLAVE_TIMEOUT, NOT_REPLICATED
