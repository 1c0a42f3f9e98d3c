"""Results of admin calls, where RocketMQ has no body for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from batonmq.protocol.bodies import TopicConfig
from batonmq.protocol.message import MessageQueue


@dataclass(frozen=True, slots=True)
class QueueStats:
    """A queue holds [`min_offset`, `max_offset`). `last_update_ms`: wall clock, 0 if unknown."""

    queue: MessageQueue
    min_offset: int
    max_offset: int
    last_update_ms: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages per second in the last minute, and messages in the last 24 h: sent to a topic, or
    received by a `group`. A broker counts from its start."""

    topic: str
    group: str | None
    tps: float
    day: int


@dataclass(frozen=True, slots=True)
class TopicChanges:
    """Changes of a topic; None leaves a setting as it is. `attributes`: {"+key": value} sets one,
    {"-key": ""} removes one. A new topic gets RocketMQ's defaults for the rest: 8 queues, perm
    6."""

    read_queue_nums: int | None = None
    write_queue_nums: int | None = None
    perm: int | None = None
    order: bool | None = None
    unit: bool | None = None
    has_unit_sub: bool | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChangedTopic:
    """A topic's settings now on the master of one broker group."""

    address: str
    config: TopicConfig


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """One queue of one group. `last_consumed_ms`: store time of the last consumed message, 0 if
    unknown; `broker_offset`: exclusive end of the queue; `pull_offset`: how far members have
    pulled, -1 where the broker does not say."""

    queue: MessageQueue
    broker_offset: int
    consumer_offset: int
    last_consumed_ms: int = 0
    pull_offset: int = -1

    @property
    def lag(self) -> int:
        """The number of messages that are not consumed yet."""
        return self.broker_offset - self.consumer_offset

    @property
    def in_flight(self) -> int:
        """The number of messages pulled but not consumed."""
        return max(0, self.pull_offset - self.consumer_offset)


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """`queues` ascending; `members`: client ids of the connected members."""

    group: str
    queues: tuple[QueueProgress, ...]
    members: tuple[str, ...]

    @property
    def lag(self) -> int:
        """The sum of all queues."""
        return sum(q.lag for q in self.queues)

    @property
    def in_flight(self) -> int:
        """The sum of all queues."""
        return sum(q.in_flight for q in self.queues)


class ControllerLogStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The Raft log of a BatonMQ controller, named as in its reply. Each index is that of the last
    such entry. `snapshot_bytes` 0: no snapshot yet. `state_digest`: of the state after entry
    `digest_index`; nodes with the same index must have the same digest; empty before the first.
    `problems`: texts for people. `rules`: of the newest entry; 0 if an earlier version proposed it.
    """

    self_id: str = ""
    controller_epoch: int = 0
    term: int = msgspec.field(default=0, name="raftTerm")
    applied_index: int = 0
    committed_index: int = 0
    journal_bytes: int = 0
    journal_entries: int = 0
    snapshot_bytes: int = 0
    snapshot_index: int = 0
    digest_index: int = 0
    state_digest: str = ""
    problems: tuple[str, ...] = ()
    rules: int = 0


@dataclass(frozen=True, slots=True)
class ControllerMetadata:
    """Reply to request 1005 from `address`. `leader_*` are empty while there is no leader; `peers`
    as the controller sends it: `id:host:port;` or `host:port;` repeated. `log` is None from a
    RocketMQ controller."""

    address: str
    group: str
    leader_id: str
    leader_address: str
    is_leader: bool
    peers: str
    log: ControllerLogStatus | None = None


@dataclass(frozen=True, slots=True)
class ElectedMaster:
    """Reply to request 1002. `already_master`: nothing changed, it was the master already (code
    2011)."""

    broker_name: str
    master_broker_id: int
    master_address: str
    master_epoch: int
    sync_state_set_epoch: int
    sync_state_set: tuple[int, ...]
    already_master: bool = False
