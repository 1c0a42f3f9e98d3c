"""Requests to RocketMQ's controllers, and role views decoded from their answers. Pure.

Codes, header fields and bodies are those of Java's ReplicasManager and ControllerRequestProcessor
(5.3.3). Their records lack incarnations. The brokers' own names (`PeerNames`) are filled in, so
that BatonMQ brokers know each other as with our controllers (R41).
"""

from __future__ import annotations

from dataclasses import dataclass

from batonmq.protocol.bodies import (
    BrokerReplicasInfo,
    EpochEntryCache,
    ReplicaIdentity,
    SyncStateSet,
    encode_names,
)
from batonmq.protocol.codes import (
    HA_ADDRESS_FIELD,
    INCARNATION_FIELD,
    LOG_ID_FIELD,
    RequestCode,
)
from batonmq.protocol.role_view import Replica, RoleView
from batonmq.remoting.command import RemotingCommand
from batonmq.replicas_manager.config import ReplicasManagerConfig
from batonmq.replicas_manager.link import LogFacts

Fields = dict[str, str | int | bool | None]


@dataclass(frozen=True, slots=True)
class LeaderInfo:
    """The answer to CONTROLLER_GET_METADATA_INFO (1005). `leader`: "" while none is known."""

    is_leader: bool
    leader: str

    @classmethod
    def of(cls, reply: RemotingCommand) -> LeaderInfo:
        leader = reply.ext.get("controllerLeaderAddress", "")
        return cls(reply.get_bool("isLeader"), leader)


@dataclass(frozen=True, slots=True)
class PeerName:
    """The process at a replica's address, as it names itself; all empty for a Java broker."""

    incarnation: str = ""
    log_id: str = ""
    ha_address: str = ""

    @classmethod
    def of(cls, reply: RemotingCommand, replica: Replica, group: tuple[str, str]) -> PeerName:
        """The name in an answer to GET_BROKER_EPOCH_CACHE; empty if that is another replica. Raises
        RemoteProtocolError."""
        said = EpochEntryCache.decode(reply.body)
        # Another broker may have this address now, and its acks must not count (R41).
        if (said.cluster_name, said.broker_name) != group or said.broker_id != replica.broker_id:
            return cls()
        ext = reply.ext
        return cls(
            ext.get(INCARNATION_FIELD, ""),
            ext.get(LOG_ID_FIELD, ""),
            ext.get(HA_ADDRESS_FIELD, ""),
        )


class Requests:
    """Builds the requests of one broker. `invokeTime`, by which jRaft judges who is alive, is wall
    clock ms."""

    def __init__(self, config: ReplicasManagerConfig, check_code: str) -> None:
        self._config = config
        # Java takes the part before the semicolon as the address.
        self._check_code = f"{config.address};{check_code}"
        self._names = {"clusterName": config.cluster_name, "brokerName": config.broker_name}

    def metadata(self) -> RemotingCommand:
        return RemotingCommand.request(RequestCode.CONTROLLER_GET_METADATA_INFO)

    def replicas(self) -> RemotingCommand:
        """Asks for the group: master, set, addresses, who is alive."""
        body = encode_names([self._config.broker_name])
        return RemotingCommand.request(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, body=body)

    def next_id(self) -> RemotingCommand:
        return RemotingCommand.request(RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, self._names)

    def apply_id(self, broker_id: int) -> RemotingCommand:
        """Applies for an id; with the same check code it is the same application."""
        fields: Fields = {
            **self._names,
            "appliedBrokerId": broker_id,
            "registerCheckCode": self._check_code,
        }
        return RemotingCommand.request(RequestCode.CONTROLLER_APPLY_BROKER_ID, fields)

    def register(self, broker_id: int, now_ms: int) -> RemotingCommand:
        fields: Fields = {
            **self._names,
            "brokerId": broker_id,
            "brokerAddress": self._config.address,
            "invokeTime": now_ms,
        }
        return RemotingCommand.request(RequestCode.CONTROLLER_REGISTER_BROKER, fields)

    def heartbeat(self, broker_id: int, facts: LogFacts) -> RemotingCommand:
        """A heartbeat, to be sent oneway."""
        fields: Fields = {
            **self._names,
            "brokerAddr": self._config.address,
            "brokerId": broker_id,
            "epoch": facts.epoch,
            "maxOffset": facts.max_offset,
            "confirmOffset": facts.confirm_offset,
            "heartbeatTimeoutMills": self._config.timings.session_timeout_ms,
            "electionPriority": self._config.election_priority,
        }
        return RemotingCommand.request(RequestCode.BROKER_HEARTBEAT, fields)

    def elect(self, broker_id: int, *, designate: bool, now_ms: int) -> RemotingCommand:
        fields: Fields = {
            **self._names,
            "brokerId": broker_id,
            "designateElect": designate,
            "invokeTime": now_ms,
        }
        return RemotingCommand.request(RequestCode.CONTROLLER_ELECT_MASTER, fields)

    def alter(
        self, broker_id: int, key: tuple[int, int], members: list[int], now_ms: int
    ) -> RemotingCommand:
        """`key`: the (masterEpoch, setEpoch) that it replaces; `members` ascending."""
        master_epoch, set_epoch = key
        fields: Fields = {
            "brokerName": self._config.broker_name,
            "masterBrokerId": broker_id,
            "masterEpoch": master_epoch,
            "invokeTime": now_ms,
        }
        body = SyncStateSet(sync_state_set=members, sync_state_set_epoch=set_epoch).encode()
        return RemotingCommand.request(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, fields, body)


def group_view(reply: RemotingCommand, cluster_name: str, broker_name: str) -> RoleView | None:
    """The view in an answer to CONTROLLER_GET_SYNC_STATE_DATA, without names; None if the
    controllers do not know the group. Raises RemoteProtocolError."""
    info = BrokerReplicasInfo.decode(reply.body).replicas_info_table.get(broker_name)
    if info is None:
        return None
    # Java lists members first, then the others; a view has them by id.
    known = sorted(info.replicas, key=lambda one: one.broker_id)
    return RoleView(
        cluster_name=cluster_name,
        broker_name=broker_name,
        master_broker_id=info.master_broker_id or None,
        master_address=info.master_address or "",
        master_epoch=info.master_epoch,
        sync_state_set_epoch=info.sync_state_set_epoch,
        sync_state_set=frozenset(one.broker_id for one in info.in_sync_replicas),
        replicas=tuple(_replica(one) for one in known),
    )


def _replica(one: ReplicaIdentity) -> Replica:
    return Replica(one.broker_id, one.broker_address, alive=one.alive)
