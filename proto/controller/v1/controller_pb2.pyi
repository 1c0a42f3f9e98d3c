from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Status(_message.Message):
    __slots__ = ("code", "remark")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REMARK_FIELD_NUMBER: _ClassVar[int]
    code: int
    remark: str
    def __init__(self, code: _Optional[int] = ..., remark: _Optional[str] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("broker_id", "address", "ha_address", "alive", "learner", "incarnation", "log_id")
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    broker_id: int
    address: str
    ha_address: str
    alive: bool
    learner: bool
    incarnation: str
    log_id: str
    def __init__(self, broker_id: _Optional[int] = ..., address: _Optional[str] = ..., ha_address: _Optional[str] = ..., alive: _Optional[bool] = ..., learner: _Optional[bool] = ..., incarnation: _Optional[str] = ..., log_id: _Optional[str] = ...) -> None: ...

class RoleView(_message.Message):
    __slots__ = ("cluster_name", "broker_name", "master_broker_id", "master_address", "master_ha_address", "master_incarnation", "master_epoch", "sync_state_set_epoch", "sync_state_set", "replicas", "raft_index", "unclean_epoch")
    CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
    BROKER_NAME_FIELD_NUMBER: _ClassVar[int]
    MASTER_BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MASTER_HA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MASTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SYNC_STATE_SET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SYNC_STATE_SET_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    RAFT_INDEX_FIELD_NUMBER: _ClassVar[int]
    UNCLEAN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    cluster_name: str
    broker_name: str
    master_broker_id: int
    master_address: str
    master_ha_address: str
    master_incarnation: str
    master_epoch: int
    sync_state_set_epoch: int
    sync_state_set: _containers.RepeatedScalarFieldContainer[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    raft_index: int
    unclean_epoch: int
    def __init__(self, cluster_name: _Optional[str] = ..., broker_name: _Optional[str] = ..., master_broker_id: _Optional[int] = ..., master_address: _Optional[str] = ..., master_ha_address: _Optional[str] = ..., master_incarnation: _Optional[str] = ..., master_epoch: _Optional[int] = ..., sync_state_set_epoch: _Optional[int] = ..., sync_state_set: _Optional[_Iterable[int]] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., raft_index: _Optional[int] = ..., unclean_epoch: _Optional[int] = ...) -> None: ...

class RegisterBrokerRequest(_message.Message):
    __slots__ = ("cluster_name", "broker_name", "broker_id", "register_check_code", "address", "ha_address", "incarnation", "log_id", "learner", "epoch", "max_offset", "confirm_offset", "election_priority", "request_id", "suspect", "accepted_epoch", "earlier_lives", "secret", "owner", "owner_secret")
    CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
    BROKER_NAME_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTER_CHECK_CODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_OFFSET_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ELECTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EARLIER_LIVES_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OWNER_SECRET_FIELD_NUMBER: _ClassVar[int]
    cluster_name: str
    broker_name: str
    broker_id: int
    register_check_code: str
    address: str
    ha_address: str
    incarnation: str
    log_id: str
    learner: bool
    epoch: int
    max_offset: int
    confirm_offset: int
    election_priority: int
    request_id: str
    suspect: str
    accepted_epoch: int
    earlier_lives: _containers.RepeatedScalarFieldContainer[str]
    secret: str
    owner: str
    owner_secret: str
    def __init__(self, cluster_name: _Optional[str] = ..., broker_name: _Optional[str] = ..., broker_id: _Optional[int] = ..., register_check_code: _Optional[str] = ..., address: _Optional[str] = ..., ha_address: _Optional[str] = ..., incarnation: _Optional[str] = ..., log_id: _Optional[str] = ..., learner: _Optional[bool] = ..., epoch: _Optional[int] = ..., max_offset: _Optional[int] = ..., confirm_offset: _Optional[int] = ..., election_priority: _Optional[int] = ..., request_id: _Optional[str] = ..., suspect: _Optional[str] = ..., accepted_epoch: _Optional[int] = ..., earlier_lives: _Optional[_Iterable[str]] = ..., secret: _Optional[str] = ..., owner: _Optional[str] = ..., owner_secret: _Optional[str] = ...) -> None: ...

class RegisterBrokerReply(_message.Message):
    __slots__ = ("status", "broker_id", "view")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    status: Status
    broker_id: int
    view: RoleView
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., broker_id: _Optional[int] = ..., view: _Optional[_Union[RoleView, _Mapping]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("broker_id", "incarnation")
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    broker_id: int
    incarnation: str
    def __init__(self, broker_id: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class AlterSyncStateSetRequest(_message.Message):
    __slots__ = ("broker_name", "master_broker_id", "master_incarnation", "master_epoch", "sync_state_set_epoch", "new_set", "request_id", "confirm_offset", "reason", "secret")
    BROKER_NAME_FIELD_NUMBER: _ClassVar[int]
    MASTER_BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    MASTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SYNC_STATE_SET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEW_SET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_OFFSET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    broker_name: str
    master_broker_id: int
    master_incarnation: str
    master_epoch: int
    sync_state_set_epoch: int
    new_set: _containers.RepeatedCompositeFieldContainer[Member]
    request_id: str
    confirm_offset: int
    reason: str
    secret: str
    def __init__(self, broker_name: _Optional[str] = ..., master_broker_id: _Optional[int] = ..., master_incarnation: _Optional[str] = ..., master_epoch: _Optional[int] = ..., sync_state_set_epoch: _Optional[int] = ..., new_set: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., request_id: _Optional[str] = ..., confirm_offset: _Optional[int] = ..., reason: _Optional[str] = ..., secret: _Optional[str] = ...) -> None: ...

class AlterSyncStateSetReply(_message.Message):
    __slots__ = ("status", "view")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    status: Status
    view: RoleView
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., view: _Optional[_Union[RoleView, _Mapping]] = ...) -> None: ...

class ElectMasterRequest(_message.Message):
    __slots__ = ("cluster_name", "broker_name", "broker_id", "designate", "expected_master_epoch", "request_id", "reason", "unclean", "drained_offset", "cut_later_acks")
    CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
    BROKER_NAME_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    DESIGNATE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UNCLEAN_FIELD_NUMBER: _ClassVar[int]
    DRAINED_OFFSET_FIELD_NUMBER: _ClassVar[int]
    CUT_LATER_ACKS_FIELD_NUMBER: _ClassVar[int]
    cluster_name: str
    broker_name: str
    broker_id: int
    designate: bool
    expected_master_epoch: int
    request_id: str
    reason: str
    unclean: bool
    drained_offset: int
    cut_later_acks: bool
    def __init__(self, cluster_name: _Optional[str] = ..., broker_name: _Optional[str] = ..., broker_id: _Optional[int] = ..., designate: _Optional[bool] = ..., expected_master_epoch: _Optional[int] = ..., request_id: _Optional[str] = ..., reason: _Optional[str] = ..., unclean: _Optional[bool] = ..., drained_offset: _Optional[int] = ..., cut_later_acks: _Optional[bool] = ...) -> None: ...

class ElectMasterReply(_message.Message):
    __slots__ = ("status", "view")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    status: Status
    view: RoleView
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., view: _Optional[_Union[RoleView, _Mapping]] = ...) -> None: ...

class GetReplicaInfoRequest(_message.Message):
    __slots__ = ("broker_name",)
    BROKER_NAME_FIELD_NUMBER: _ClassVar[int]
    broker_name: str
    def __init__(self, broker_name: _Optional[str] = ...) -> None: ...

class GetReplicaInfoReply(_message.Message):
    __slots__ = ("status", "view")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    status: Status
    view: RoleView
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., view: _Optional[_Union[RoleView, _Mapping]] = ...) -> None: ...

class HistoryEvent(_message.Message):
    __slots__ = ("raft_index", "time_ms", "kind", "broker_name", "broker_id", "master_epoch", "sync_state_set_epoch", "json")
    RAFT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BROKER_NAME_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SYNC_STATE_SET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    raft_index: int
    time_ms: int
    kind: str
    broker_name: str
    broker_id: int
    master_epoch: int
    sync_state_set_epoch: int
    json: str
    def __init__(self, raft_index: _Optional[int] = ..., time_ms: _Optional[int] = ..., kind: _Optional[str] = ..., broker_name: _Optional[str] = ..., broker_id: _Optional[int] = ..., master_epoch: _Optional[int] = ..., sync_state_set_epoch: _Optional[int] = ..., json: _Optional[str] = ...) -> None: ...

class GetHistoryRequest(_message.Message):
    __slots__ = ("broker_name", "after_raft_index", "limit", "after")
    BROKER_NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_RAFT_INDEX_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    broker_name: str
    after_raft_index: int
    limit: int
    after: HistoryPlace
    def __init__(self, broker_name: _Optional[str] = ..., after_raft_index: _Optional[int] = ..., limit: _Optional[int] = ..., after: _Optional[_Union[HistoryPlace, _Mapping]] = ...) -> None: ...

class HistoryPlace(_message.Message):
    __slots__ = ("log", "raft_index", "part")
    LOG_FIELD_NUMBER: _ClassVar[int]
    RAFT_INDEX_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    log: str
    raft_index: int
    part: int
    def __init__(self, log: _Optional[str] = ..., raft_index: _Optional[int] = ..., part: _Optional[int] = ...) -> None: ...

class GetHistoryReply(_message.Message):
    __slots__ = ("status", "events", "continuation")
    class Continuation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[GetHistoryReply.Continuation]
        FOLLOWS: _ClassVar[GetHistoryReply.Continuation]
        GAP: _ClassVar[GetHistoryReply.Continuation]
    UNSPECIFIED: GetHistoryReply.Continuation
    FOLLOWS: GetHistoryReply.Continuation
    GAP: GetHistoryReply.Continuation
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    status: Status
    events: _containers.RepeatedCompositeFieldContainer[HistoryEvent]
    continuation: GetHistoryReply.Continuation
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., events: _Optional[_Iterable[_Union[HistoryEvent, _Mapping]]] = ..., continuation: _Optional[_Union[GetHistoryReply.Continuation, str]] = ...) -> None: ...

class ReportEventRequest(_message.Message):
    __slots__ = ("broker_name", "broker_id", "master_epoch", "kind", "time_ms", "json", "request_id")
    BROKER_NAME_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    broker_name: str
    broker_id: int
    master_epoch: int
    kind: str
    time_ms: int
    json: str
    request_id: str
    def __init__(self, broker_name: _Optional[str] = ..., broker_id: _Optional[int] = ..., master_epoch: _Optional[int] = ..., kind: _Optional[str] = ..., time_ms: _Optional[int] = ..., json: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ReportEventReply(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: Status
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("cluster_name", "broker_name", "broker_id", "incarnation", "log_id", "secret")
    CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
    BROKER_NAME_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    cluster_name: str
    broker_name: str
    broker_id: int
    incarnation: str
    log_id: str
    secret: str
    def __init__(self, cluster_name: _Optional[str] = ..., broker_name: _Optional[str] = ..., broker_id: _Optional[int] = ..., incarnation: _Optional[str] = ..., log_id: _Optional[str] = ..., secret: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "sent_ms", "epoch", "max_offset", "confirm_offset", "election_priority", "master_epoch", "sync_state_set_epoch", "min_offset", "answered")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SENT_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_OFFSET_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ELECTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SYNC_STATE_SET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MIN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    sent_ms: int
    epoch: int
    max_offset: int
    confirm_offset: int
    election_priority: int
    master_epoch: int
    sync_state_set_epoch: int
    min_offset: int
    answered: int
    def __init__(self, sequence: _Optional[int] = ..., sent_ms: _Optional[int] = ..., epoch: _Optional[int] = ..., max_offset: _Optional[int] = ..., confirm_offset: _Optional[int] = ..., election_priority: _Optional[int] = ..., master_epoch: _Optional[int] = ..., sync_state_set_epoch: _Optional[int] = ..., min_offset: _Optional[int] = ..., answered: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class SwitchFailed(_message.Message):
    __slots__ = ("switch_id", "reason")
    SWITCH_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    switch_id: str
    reason: str
    def __init__(self, switch_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class BrokerMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "goodbye", "switch_failed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FAILED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    goodbye: Goodbye
    switch_failed: SwitchFailed
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., switch_failed: _Optional[_Union[SwitchFailed, _Mapping]] = ...) -> None: ...

class HeartbeatAnswer(_message.Message):
    __slots__ = ("sequence", "sent_ms", "leader", "controller_epoch", "leader_id", "leader_grpc_address", "master_epoch", "sync_state_set_epoch", "no_lease")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SENT_MS_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SYNC_STATE_SET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NO_LEASE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    sent_ms: int
    leader: bool
    controller_epoch: int
    leader_id: str
    leader_grpc_address: str
    master_epoch: int
    sync_state_set_epoch: int
    no_lease: bool
    def __init__(self, sequence: _Optional[int] = ..., sent_ms: _Optional[int] = ..., leader: _Optional[bool] = ..., controller_epoch: _Optional[int] = ..., leader_id: _Optional[str] = ..., leader_grpc_address: _Optional[str] = ..., master_epoch: _Optional[int] = ..., sync_state_set_epoch: _Optional[int] = ..., no_lease: _Optional[bool] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: Status
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class SwitchRequest(_message.Message):
    __slots__ = ("switch_id", "broker_id", "master_epoch", "timeout_ms", "reason")
    SWITCH_ID_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    switch_id: str
    broker_id: int
    master_epoch: int
    timeout_ms: int
    reason: str
    def __init__(self, switch_id: _Optional[str] = ..., broker_id: _Optional[int] = ..., master_epoch: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ControllerMessage(_message.Message):
    __slots__ = ("answer", "view", "refused", "switch")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    answer: HeartbeatAnswer
    view: RoleView
    refused: Refused
    switch: SwitchRequest
    def __init__(self, answer: _Optional[_Union[HeartbeatAnswer, _Mapping]] = ..., view: _Optional[_Union[RoleView, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., switch: _Optional[_Union[SwitchRequest, _Mapping]] = ...) -> None: ...
