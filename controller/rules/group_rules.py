"""The effect of each command on one broker group, except elections (`election`). Pure.

Origin: the methods of RocketMQ's ReplicasInfoManager. Its codes and its order of checks are kept.
Four of its faults are corrected (tests call them quirks): (a) applying id N moves the next offered
id past N; (b) a partial clean never leaves half a group; (c) only added members must be alive, not
those that a shrink keeps; (d) a deposed master gets FENCED_MASTER_EPOCH (2000) or INVALID_MASTER
(2002), also if it names the recorded set.
"""

import sys
from typing import Final

import msgspec

from batonmq.controller.rules.commands import (
    NO_BROKER,
    AlterSyncStateSet,
    ApplyBrokerId,
    CleanBrokerData,
    ElectMaster,
    LiveBroker,
    NewMember,
    NoteEvent,
    RegisterBroker,
    ReportEvent,
)
from batonmq.controller.rules.election import apply_election
from batonmq.controller.rules.groups import (
    BrokerGroup,
    GroupChange,
    Refused,
    ReplicaRecord,
    altered_event,
    check_cluster,
    event_of,
    living_replicas,
    without_members,
    without_stale_marks,
)
from batonmq.controller.rules.registration import apply_broker_id, register
from batonmq.history.event import (
    NOTED_KINDS,
    REPORT_SIZE_MAX,
    REPORTED_KINDS,
    EventKind,
    HistoryEvent,
)
from batonmq.protocol.codes import ResponseCode

LAG_BYTES_MAX: Final = 1 << 32
"""More than any log grows between two heartbeats."""

GroupCommand = (
    RegisterBroker
    | ApplyBrokerId
    | AlterSyncStateSet
    | ElectMaster
    | CleanBrokerData
    | ReportEvent
    | NoteEvent
)


CLEANS_NAME_THEIR_CALLER: Final = 4
"""By earlier rules the event of a clean does not say who asked."""


def change_group(
    group: BrokerGroup | None, command: GroupCommand, clock_ms: int, rules: int
) -> GroupChange:
    """Carries out `command` on `group` (None if unknown) by these rules; `clock_ms` is the state's
    clock. Raises Refused."""
    match command:
        case RegisterBroker():
            return register(group, command, clock_ms)
        case ApplyBrokerId():
            return apply_broker_id(group, command, clock_ms)
        case AlterSyncStateSet():
            return _alter_sync_state_set(group, command)
        case ElectMaster():
            return apply_election(group, command, clock_ms)
        case CleanBrokerData():
            if rules < CLEANS_NAME_THEIR_CALLER:
                command = msgspec.structs.replace(command, reason="")
            return _clean_broker_data(group, command)
        case ReportEvent():
            return _report_event(group, command)
        case NoteEvent():
            return _note_event(group, command)


# The SyncStateSet.


def _alter_sync_state_set(group: BrokerGroup | None, command: AlterSyncStateSet) -> GroupChange:
    if group is None:
        raise Refused(
            ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED,
            f"broker set {command.broker_name} is not known",
        )
    _check_caller(group, command)
    _check_members(group, command)
    # Sorted: all nodes must hold equal bytes for equal sets, since digests are compared.
    new_set = tuple(sorted({member.broker_id for member in command.new_set}))
    after = msgspec.structs.replace(
        group,
        sync_state_set=new_set,
        sync_state_set_epoch=group.sync_state_set_epoch + 1,
        confirm_floor=_confirmed_by_master(group, command),
    )
    after = without_stale_marks(after)
    event = altered_event(
        group,
        after,
        command.master_broker_id,
        command.reason or _how_set_changed(group.sync_state_set, new_set),
        confirm_offset=command.confirm_offset,
    )
    return GroupChange(group=after, broker_id=command.master_broker_id, events=(event,))


def _confirmed_by_master(group: BrokerGroup, command: AlterSyncStateSet) -> int:
    """R59: the floor after this set change, at most the end of the master's log."""
    # The master's log has all that is confirmed. A floor above its end is wrong, and no replica
    # could be elected below it: so it comes down here.
    floor = max(group.confirm_floor, command.confirm_offset)
    for seen in command.live:
        # With a margin that no log grows between two heartbeats. The leader has limited the command
        # exactly; nodes of earlier versions, which lack this rule, must come to the same state.
        is_master = seen.broker_id == command.master_broker_id and seen.max_offset >= 0
        if is_master and floor > seen.max_offset + LAG_BYTES_MAX:
            return seen.max_offset
    return floor


def _check_caller(group: BrokerGroup, command: AlterSyncStateSet) -> None:
    """Raises Refused unless the caller is the recorded master and names the current set (R3,
    R10)."""
    if NO_BROKER in (command.master_broker_id, group.master_broker_id) or (
        group.master_broker_id != command.master_broker_id
    ):
        raise Refused(
            ResponseCode.CONTROLLER_INVALID_MASTER,
            f"the master is {group.master_broker_id or None}, not {command.master_broker_id}",
        )
    # R3: a master that restarted changes no set before it is elected again.
    if group.master_incarnation != command.master_incarnation:
        raise Refused(
            ResponseCode.CONTROLLER_INVALID_MASTER,
            f"the master is another process of broker {group.master_broker_id} "
            f"(incarnation {group.master_incarnation or 'not given'})",
        )
    if group.master_epoch != command.master_epoch:
        raise Refused(
            ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH,
            f"masterEpoch is {group.master_epoch}, not {command.master_epoch}",
        )
    # R10: a proposal is about one set. A delayed one must not replace a newer set.
    if group.sync_state_set_epoch != command.sync_state_set_epoch:
        raise Refused(
            ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH,
            f"syncStateSetEpoch is {group.sync_state_set_epoch}, "
            f"not {command.sync_state_set_epoch}",
        )


def _check_members(group: BrokerGroup, command: AlterSyncStateSet) -> None:
    new_set = {member.broker_id: member for member in command.new_set}
    if tuple(sorted(new_set)) == group.sync_state_set:
        raise Refused(
            ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED,
            f"the SyncStateSet is {list(group.sync_state_set)} already",
        )
    living = living_replicas(group, command.live)
    for member in new_set.values():
        _check_member(group, member, living)
    if group.master_broker_id not in new_set:
        raise Refused(
            ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED,
            f"master {group.master_broker_id} is not in the new SyncStateSet {sorted(new_set)}",
        )


def _check_member(group: BrokerGroup, member: NewMember, living: dict[int, LiveBroker]) -> None:
    broker_id = member.broker_id
    record = group.replica(broker_id)
    unfit = ""
    if record is None:
        unfit = "is not registered"
    # Quirk c: a member that stays may be dead, else a shrink could not remove one of two dead
    # members. An added one must be the process whose acks the master counted.
    elif broker_id in group.sync_state_set:
        return
    elif record.learner:
        unfit = "is a learner"
    elif not _names_the_process(group, record, member):
        unfit = "is another process by now"
    elif record.suspicion:
        unfit = f"may miss what it acknowledged: {record.suspicion}"
    if unfit:
        raise Refused(ResponseCode.CONTROLLER_INVALID_REPLICAS, f"broker {broker_id} {unfit}")
    seen = living.get(broker_id)
    if seen is None:
        raise Refused(ResponseCode.CONTROLLER_BROKER_NOT_ALIVE, f"broker {broker_id} does not live")
    master = living.get(group.master_broker_id)
    # R13: elected, it could not give others what lies below its first byte.
    if master is not None and 0 <= master.min_offset < seen.min_offset:
        raise Refused(
            ResponseCode.CONTROLLER_INVALID_REPLICAS,
            f"the log of broker {broker_id} begins at {seen.min_offset}, "
            f"the master's at {master.min_offset}",
        )


def _names_the_process(group: BrokerGroup, record: ReplicaRecord, member: NewMember) -> bool:
    """R12. A master that speaks only remoting cannot name processes; that is as safe as Java's."""
    if member.incarnation == record.incarnation:
        return True
    return not member.incarnation and not group.master_incarnation


def _how_set_changed(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    added, removed = set(after) - set(before), set(before) - set(after)
    if not removed:
        return "expand"
    return "replace" if added else "shrink"


# Cleaning and reporting.


def _clean_broker_data(group: BrokerGroup | None, command: CleanBrokerData) -> GroupChange:
    code = ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
    ids = set(command.broker_ids)
    if not command.clean_living_broker and group is not None:
        # Without ids the whole group is forgotten, with all that elections know of its logs.
        if not ids and group.master_broker_id != NO_BROKER:
            raise Refused(code, f"broker set {group.broker_name} has a master; name the dead ids")
        if alive := sorted(ids & {seen.broker_id for seen in command.live}):
            raise Refused(code, f"broker {alive[0]} lives")
    if group is None:
        raise Refused(code, f"broker set {command.broker_name} is not known")
    check_cluster(group, command.cluster_name)
    kept = tuple(record for record in group.replicas if record.broker_id not in ids)
    if not ids or not kept:
        event = _cleaned_event(group, group, "the whole group", command)
        return GroupChange(group=None, events=(event,))
    # An empty set says nothing about who has the acknowledged messages.
    if group.sync_state_set and not set(group.sync_state_set) - ids:
        raise Refused(
            code,
            "no in-sync replica would be left; elect another by name first, or clean the group",
        )
    if len(kept) == len(group.replicas):
        return GroupChange(group=group)
    after = msgspec.structs.replace(group, replicas=kept)
    if ids & set(group.sync_state_set):
        after = without_members(after, ids)
    removed = [record.broker_id for record in group.replicas if record.broker_id in ids]
    text = "broker " + ", ".join(str(broker_id) for broker_id in removed)
    return GroupChange(group=after, events=(_cleaned_event(group, after, text, command),))


def _cleaned_event(
    before: BrokerGroup, after: BrokerGroup, what: str, command: CleanBrokerData
) -> HistoryEvent:
    return event_of(
        EventKind.BROKER_CLEANED,
        after,
        master_before=before.master_broker_id,
        set_before=before.sync_state_set,
        reason=f"{what}, {command.reason}" if command.reason else what,
    )


def _report_event(group: BrokerGroup | None, command: ReportEvent) -> GroupChange:
    if group is None or group.replica(command.broker_id) is None:
        raise Refused(
            ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST,
            f"broker {command.broker_name}:{command.broker_id} is not known",
        )
    if command.kind not in REPORTED_KINDS:
        raise Refused(
            ResponseCode.CONTROLLER_INVALID_REQUEST,
            f"a broker reports {', '.join(sorted(REPORTED_KINDS))}, not {command.kind!r}",
        )
    if not _is_json_object(command.json):
        raise Refused(
            ResponseCode.CONTROLLER_INVALID_REQUEST,
            f"a report's json is an object of at most {REPORT_SIZE_MAX} characters, or empty",
        )
    event = event_of(
        EventKind(command.kind),
        group,
        broker_id=command.broker_id,
        master_epoch=command.master_epoch,
        time_ms=command.time_ms,
        json=command.json,
    )
    return GroupChange(group=group, broker_id=command.broker_id, events=(event,))


def _note_event(group: BrokerGroup | None, command: NoteEvent) -> GroupChange:
    if group is None:
        raise Refused(
            ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST,
            f"broker set {command.broker_name} is not known",
        )
    if command.kind not in NOTED_KINDS or not _is_json_object(command.json):
        raise Refused(
            ResponseCode.CONTROLLER_INVALID_REQUEST,
            f"a controller notes {', '.join(sorted(NOTED_KINDS))} with an object of at most "
            f"{REPORT_SIZE_MAX} characters, not {command.kind!r}",
        )
    event = event_of(
        EventKind(command.kind),
        group,
        broker_id=command.broker_id,
        master_epoch=command.master_epoch,
        time_ms=command.time_ms or command.now_ms,
        node=command.node,
        reason=command.reason,
        json=command.json,
    )
    return GroupChange(group=group, events=(event,))


def _is_json_object(text: str) -> bool:
    if not text:
        return True
    # First: every node parses it when it applies the entry.
    if len(text) > REPORT_SIZE_MAX:
        return False
    # How deep lists may be in each other must not depend on how deep this node's stack is. Commands
    # that are proposed today have few, but logs of earlier versions may have such a report.
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + REPORT_SIZE_MAX)
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False
    finally:
        sys.setrecursionlimit(limit)
