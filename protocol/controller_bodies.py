"""Bodies of the controller's remoting door and of a broker's replication state.

Origin: Java `remoting.protocol.body.SyncStateSet`, `BrokerReplicasInfo`, `EpochEntryCache`,
`HARuntimeInfo`, `ElectMasterResponseBody`.
"""

from typing import Final

import msgspec

from protocol.body import Body, decode_json, encode_json
from protocol.errors import RemoteProtocolError
from protocol.fastjson import FastjsonError
from protocol.route_bodies import BrokerMemberGroup

# The end of an epoch that is still being written.
OPEN_END: Final = 9_223_372_036_854_775_807


class SyncStateSet(Body):
    sync_state_set: list[int] = msgspec.field(default_factory=list)
    sync_state_set_epoch: int = 0


class EpochCacheEntry(Body):
    """One epoch; `end_offset` is exclusive, `OPEN_END` for the last."""

    end_offset: int = OPEN_END
    epoch: int = 0
    start_offset: int = 0


class EpochEntryCache(Body):
    broker_id: int = 0
    broker_name: str = ""
    cluster_name: str = ""
    epoch_list: list[EpochCacheEntry] = msgspec.field(default_factory=list)
    max_offset: int = 0


class ReplicaIdentity(Body):
    alive: bool = False
    broker_address: str = ""
    broker_id: int = 0
    broker_name: str = ""


class ReplicasInfo(Body):
    in_sync_replicas: list[ReplicaIdentity] = msgspec.field(default_factory=list)
    master_address: str | None = None
    master_broker_id: int | None = None
    master_epoch: int = 0
    not_in_sync_replicas: list[ReplicaIdentity] = msgspec.field(default_factory=list)
    sync_state_set_epoch: int = 0


class BrokerReplicasInfo(Body):
    replicas_info_table: dict[str, ReplicasInfo] = msgspec.field(default_factory=dict)


class ElectMasterResponseBody(Body):
    """Body of 1002. The members of the group stand at the top level too, because `mqadmin`
    reads the body as a bare BrokerMemberGroup."""

    broker_addrs: dict[int, str] | None = None
    broker_member_group: BrokerMemberGroup | None = None
    broker_name: str | None = None
    cluster: str | None = None
    sync_state_set: list[int] = msgspec.field(default_factory=list)

    @classmethod
    def of(
        cls, group: BrokerMemberGroup | None, sync_state_set: list[int]
    ) -> "ElectMasterResponseBody":
        """The body that satisfies both readers."""
        if group is None:
            return cls(sync_state_set=sync_state_set)
        return cls(
            broker_addrs=group.broker_addrs,
            broker_member_group=group,
            broker_name=group.broker_name,
            cluster=group.cluster,
            sync_state_set=sync_state_set,
        )


class HAClientRuntimeInfo(Body):
    last_read_timestamp: int = 0
    last_write_timestamp: int = 0
    master_addr: str | None = None
    master_flush_offset: int = 0
    max_offset: int = 0
    transferred_byte_in_second: int = 0


class HAConnectionRuntimeInfo(Body):
    """`diff`: bytes that the slave lacks."""

    addr: str = ""
    diff: int = 0
    in_sync: bool = False
    slave_ack_offset: int = 0
    transfer_from_where: int = 0
    transferred_byte_in_second: int = 0


class HARuntimeInfo(Body):
    ha_client_runtime_info: HAClientRuntimeInfo = msgspec.field(default_factory=HAClientRuntimeInfo)
    ha_connection_info: list[HAConnectionRuntimeInfo] = msgspec.field(default_factory=list)
    in_sync_slave_nums: int = 0
    master: bool = False
    master_commit_log_max_offset: int = 0


def encode_names(names: list[str]) -> bytes:
    """Body of 1006: broker names as a JSON array."""
    return encode_json(names)


def decode_names(data: bytes) -> list[str]:
    """Reads a body of 1006. Raises RemoteProtocolError."""
    try:
        return decode_json(list[str], data)
    except (FastjsonError, msgspec.ValidationError) as error:
        raise RemoteProtocolError(f"a list of names: {error}") from error


__all__ = [
    "OPEN_END",
    "BrokerReplicasInfo",
    "ElectMasterResponseBody",
    "EpochCacheEntry",
    "EpochEntryCache",
    "HAClientRuntimeInfo",
    "HAConnectionRuntimeInfo",
    "HARuntimeInfo",
    "ReplicaIdentity",
    "ReplicasInfo",
    "SyncStateSet",
    "decode_names",
    "encode_names",
]
