"""One broker group as the controllers record it, its views, and steps that change it. Pure.

Each rule of a group (`group_rules`, `election`, `registration`) returns a `GroupChange`.

Invariants (`check`): ids ascend and stay below `next_broker_id`; the SyncStateSet holds registered
replicas and no learner; a master is in the set; once a master was elected the set is not empty.

Origin: `BrokerReplicaInfo` and `SyncStateInfo` of RocketMQ's ReplicasInfoManager. Java keeps them
in two maps, and a clean of one of them leaves half a group that cannot be repaired.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from dataclasses import replace as replace_dataclass
from typing import Any, Final

import msgspec

from batonmq.controller.rules.commands import ELECTION_PRIORITY_DEFAULT, NO_BROKER, LiveBroker
from batonmq.history.event import REASON_SIZE_MAX, EventKind, HistoryEvent
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.role_view import Replica, RoleView

EPOCH_MAX: Final = 2**30
"""Epochs are int32 on the wire. A reported one above this is ignored for new epochs."""


class ReplicaRecord(msgspec.Struct, frozen=True):
    """The last registration of one replica.

    - `suspect`: it is a member whose log may lack bytes that it acked (R17), until it leaves the
      set or is elected nevertheless. `suspect_told`: only its own report says so.
    - `suspicion`: what it last reported about its log, empty if the log is sound.
    - `accepted_epoch`: the highest masterEpoch that it had accepted.
    - `earlier_lives`: the incarnations that used its folder before (R52).
    - `owner`: the hash of the secret of the data folder to which the id belongs. `is_stranger`: the
      registered process has not proven that it runs on that folder (R59).
    """

    # New fields need defaults: snapshots of earlier versions lack them.
    broker_id: int
    register_check_code: str = ""
    address: str = ""
    ha_address: str = ""
    incarnation: str = ""
    log_id: str = ""
    learner: bool = False
    epoch: int = -1
    max_offset: int = -1
    confirm_offset: int = -1
    election_priority: int = ELECTION_PRIORITY_DEFAULT
    suspect: bool = False
    suspicion: str = ""
    accepted_epoch: int = -1
    suspect_told: bool = False
    earlier_lives: tuple[str, ...] = ()
    owner: str = ""
    is_stranger: bool = False

    @property
    def endpoint(self) -> tuple[str, str, str, str, bool]:
        """The fields that other brokers see."""
        return (self.address, self.ha_address, self.incarnation, self.log_id, self.learner)


class BrokerGroup(msgspec.Struct, frozen=True):
    """The recorded state of one broker group. `master_broker_id` is NO_BROKER without a master.

    - `needs_election`: why the living master must be elected again (R3); empty if it need not.
    - `confirm_floor`: the highest confirmOffset of a set change or an election (R16).
    - `unclean_epoch`: the last masterEpoch that began with an unclean election, 0 if none.
    - `joined_ms`: the state's clock when the newest id was registered.
    """

    cluster_name: str
    broker_name: str
    next_broker_id: int = 1
    replicas: tuple[ReplicaRecord, ...] = ()
    master_broker_id: int = NO_BROKER
    master_incarnation: str = ""
    master_epoch: int = 0
    sync_state_set_epoch: int = 0
    sync_state_set: tuple[int, ...] = ()
    needs_election: str = ""
    confirm_floor: int = -1
    unclean_epoch: int = 0
    joined_ms: int = 0

    def replica(self, broker_id: int) -> ReplicaRecord | None:
        """The record of that id, or None."""
        for record in self.replicas:
            if record.broker_id == broker_id:
                return record
        return None

    @property
    def processes(self) -> list[tuple[int, str]]:
        """(id, incarnation) of the registered processes, ascending by id."""
        return [(record.broker_id, record.incarnation) for record in self.replicas]

    @property
    def is_suspect(self) -> bool:
        """Whether every member of the SyncStateSet is suspect (R17)."""
        members = [each for each in self.replicas if each.broker_id in self.sync_state_set]
        return bool(members) and all(each.suspect for each in members)

    def with_replica(self, record: ReplicaRecord) -> "BrokerGroup":
        """The group with that record replaced, or added if its id is new."""
        # Ascending ids: two nodes that applied the same commands must have equal bytes.
        others = [other for other in self.replicas if other.broker_id != record.broker_id]
        replicas = tuple(sorted([*others, record], key=lambda each: each.broker_id))
        return msgspec.structs.replace(self, replicas=replicas)

    def role_view(self, living: Collection[int], raft_index: int) -> RoleView:
        """The group as others see it; `living` are the ids shown as alive."""
        master = self.replica(self.master_broker_id)
        return RoleView(
            cluster_name=self.cluster_name,
            broker_name=self.broker_name,
            master_broker_id=self.master_broker_id or None,
            master_address=master.address if master else "",
            master_ha_address=master.ha_address if master else "",
            master_incarnation=self.master_incarnation,
            master_epoch=self.master_epoch,
            sync_state_set_epoch=self.sync_state_set_epoch,
            sync_state_set=frozenset(self.sync_state_set),
            replicas=tuple(
                Replica(
                    broker_id=record.broker_id,
                    address=record.address,
                    ha_address=record.ha_address,
                    alive=record.broker_id in living,
                    learner=record.learner,
                    incarnation=record.incarnation,
                    log_id=record.log_id,
                )
                for record in self.replicas
            ),
            raft_index=raft_index,
            unclean_epoch=self.unclean_epoch,
        )

    def highest_reported_epoch(self, live: Mapping[int, LiveBroker]) -> tuple[int, int]:
        """(epoch, broker id) of the highest epoch that any replica reported; (-1, 0) if none."""
        highest = (-1, NO_BROKER)
        for record in self.replicas:
            seen = live.get(record.broker_id)
            epochs = [record.epoch, record.accepted_epoch]
            if seen is not None:
                epochs += [seen.epoch, seen.master_epoch]
            # R47: an absurd epoch, from a damaged file say, must not use up the epoch numbers.
            highest = max([highest, *((e, record.broker_id) for e in epochs if e <= EPOCH_MAX)])
        return highest

    def newer_reported(self, live: Mapping[int, LiveBroker]) -> tuple[int, int, int] | None:
        """(masterEpoch, setEpoch, broker id) of a replica that knows newer epochs than this record,
        which is stale then (R19). None if no replica does."""
        key = (self.master_epoch, self.sync_state_set_epoch)
        epoch, broker_id = self.highest_reported_epoch(live)
        # Also a replica that is away counts: its last registration named that epoch.
        if epoch > self.master_epoch:
            seen = live.get(broker_id)
            return (epoch, seen.sync_state_set_epoch if seen else -1, broker_id)
        for seen in live.values():
            if seen.master_epoch <= EPOCH_MAX and key < seen.key:
                return (*seen.key, seen.broker_id)
        return None

    def next_master_epoch(self, live: Mapping[int, LiveBroker]) -> int:
        """The epoch after this one; above every epoch that a replica reported (R19)."""
        # R47: two masterships with one epoch number would make two logs look equal.
        return max(self.master_epoch, self.highest_reported_epoch(live)[0]) + 1

    def check(self) -> None:
        """Asserts the invariants of this module's docstring."""
        ids = [record.broker_id for record in self.replicas]
        assert ids == sorted(set(ids)) and ids, (self.broker_name, ids)
        assert ids[0] > 0 and ids[-1] < self.next_broker_id, (ids, self.next_broker_id)
        members = self.sync_state_set
        assert members == tuple(sorted(set(members))), members
        for member in members:
            record = self.replica(member)
            assert record is not None, f"member {member} is not registered"
            assert not record.learner, f"member {member} is a learner"
        assert bool(members) == (self.master_epoch > 0), (members, self.master_epoch)
        assert (self.sync_state_set_epoch > 0) == (self.master_epoch > 0)
        if self.master_broker_id != NO_BROKER:
            assert self.master_broker_id in members, (self.master_broker_id, members)
        else:
            assert not self.master_incarnation
        for record in self.replicas:
            assert not record.suspect or record.broker_id in members, record
            assert not record.suspect_told or record.suspect, record


def living_replicas(group: BrokerGroup, live: Collection[LiveBroker]) -> dict[int, LiveBroker]:
    """The registered replicas in `live` whose registered process it is, by id."""
    living: dict[int, LiveBroker] = {}
    for seen in live:
        record = group.replica(seen.broker_id)
        # R3: another process of this id may have lost what the registered one acked.
        if record is None or record.incarnation != seen.incarnation:
            continue
        # Until its first heartbeat the offsets are those of the registration.
        if seen.max_offset < 0:
            seen = msgspec.structs.replace(
                seen,
                epoch=record.epoch,
                max_offset=record.max_offset,
                confirm_offset=record.confirm_offset,
                election_priority=record.election_priority,
            )
        living[seen.broker_id] = seen
    return living


def fill_alive(view: RoleView, living: Collection[int]) -> RoleView:
    """`view` with `alive` of its replicas set by `living`."""
    replicas = tuple(
        replace_dataclass(replica, alive=replica.broker_id in living) for replica in view.replicas
    )
    return replace_dataclass(view, replicas=replicas)


@dataclass(frozen=True, slots=True)
class GroupChange:
    """The outcome of a command. `group` is the group after it, None if it does not exist.

    `ControllerState` fills in log, index and part of `events`, and the time where it is 0.
    """

    group: BrokerGroup | None
    code: ResponseCode = ResponseCode.SUCCESS
    remark: str = ""
    broker_id: int = NO_BROKER
    events: tuple[HistoryEvent, ...] = ()


class Refused(Exception):
    """A command that changes nothing."""

    def __init__(self, code: ResponseCode, remark: str) -> None:
        super().__init__(remark)
        self.code = code


def check_cluster(group: BrokerGroup, cluster_name: str) -> None:
    """Raises Refused for a command that names another cluster than the group's; empty is
    accepted."""
    if cluster_name and group.cluster_name and group.cluster_name != cluster_name:
        raise Refused(
            ResponseCode.CONTROLLER_BROKER_ID_INVALID,
            f"broker set {group.broker_name} belongs to cluster {group.cluster_name}, "
            f"not to {cluster_name}",
        )


def event_of(kind: EventKind, group: BrokerGroup, **fields: Any) -> HistoryEvent:
    """An event about `group`, which is the group after the change."""
    return HistoryEvent(
        log="",
        raft_index=0,
        time_ms=fields.pop("time_ms", 0),
        kind=kind,
        broker_name=group.broker_name,
        master_epoch=fields.pop("master_epoch", group.master_epoch),
        sync_state_set_epoch=group.sync_state_set_epoch,
        sync_state_set=group.sync_state_set,
        reason=str(fields.pop("reason", ""))[:REASON_SIZE_MAX],
        **fields,
    )


def altered_event(
    before: BrokerGroup, after: BrokerGroup, broker_id: int, reason: str, **fields: Any
) -> HistoryEvent:
    return event_of(
        EventKind.SET_ALTERED,
        after,
        broker_id=broker_id,
        set_before=before.sync_state_set,
        reason=reason,
        **fields,
    )


def is_healthy(group: BrokerGroup, broker_id: int) -> bool:
    record = group.replica(broker_id)
    return record is not None and not record.suspect


def without_members(group: BrokerGroup, leaving: Collection[int]) -> BrokerGroup:
    """The group whose set has lost `leaving`; a master among them is deposed."""
    kept = tuple(member for member in group.sync_state_set if member not in leaving)
    # An empty set has no clean winner: nothing but an unclean election would be left.
    assert kept, "the set would be empty"
    group = msgspec.structs.replace(
        group, sync_state_set=kept, sync_state_set_epoch=group.sync_state_set_epoch + 1
    )
    group = without_stale_marks(group)
    # A master outside the set could acknowledge what no election looks at.
    if group.master_broker_id in leaving:
        group = deposed(group)
    return group


def without_stale_marks(group: BrokerGroup) -> BrokerGroup:
    # The mark says that a member may lack what it acked. A replica outside the set must catch up
    # with the master before it is added again.
    replicas = tuple(
        msgspec.structs.replace(record, suspect=False, suspect_told=False)
        if record.suspect and record.broker_id not in group.sync_state_set
        else record
        for record in group.replicas
    )
    return msgspec.structs.replace(group, replicas=replicas)


def deposed(group: BrokerGroup) -> BrokerGroup:
    """No master, in a new epoch; the set stays so that a returning member can win."""
    return msgspec.structs.replace(
        group,
        master_broker_id=NO_BROKER,
        master_incarnation="",
        # A new epoch though there is no master: the deposed master must see that its own is over
        # (R2).
        master_epoch=group.master_epoch + 1,
        needs_election="",
    )
