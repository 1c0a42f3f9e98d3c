"""Registration of replicas, the first time and again: APPLY_BROKER_ID (1013), REGISTER_BROKER
(1003) and the gRPC call. Pure.

A replica is (id, check code); a process of it is an incarnation; its log has a log id. If another
incarnation of the recorded master registers, an election starts (R3). A member whose log may lack
bytes that it acked becomes a suspect (R17). A second process is refused while the first one is
alive (R18).

Origin: ReplicasInfoManager#applyBrokerId and #registerBroker.
"""

from typing import Final

import msgspec

from batonmq.controller.rules.commands import ApplyBrokerId, LiveBroker, RegisterBroker
from batonmq.controller.rules.groups import (
    EPOCH_MAX,
    BrokerGroup,
    GroupChange,
    Refused,
    ReplicaRecord,
    altered_event,
    check_cluster,
    event_of,
    is_healthy,
    living_replicas,
    without_members,
)
from batonmq.history.event import EventKind, HistoryEvent
from batonmq.protocol.codes import ResponseCode

REASON_MASTER_RESTARTED: Final = "master_restarted"
TEXT_SIZE_MAX: Final = 255
BROKER_ID_MAX: Final = 2**62
"""Ids are int64 on the wire, and the next one must be too."""


def apply_broker_id(
    group: BrokerGroup | None, command: ApplyBrokerId, clock_ms: int
) -> GroupChange:
    _check_fields(command)
    if command.broker_id < 1:
        raise _refused_id("ids start at 1")
    # Two brokers may apply for the first id of a new group at once: only one of them gets it.
    if group is None and command.broker_id != 1:
        raise _refused_id(
            f"broker set {command.broker_name} is not known, so its first id is 1, "
            f"not {command.broker_id}"
        )
    if group is not None:
        check_cluster(group, command.cluster_name)
    record = group.replica(command.broker_id) if group else None
    if record is not None:
        # The same code means the same broker asks again after a lost answer: no error, as in Java.
        if record.register_check_code != command.register_check_code:
            raise _refused_id(
                f"id {command.broker_id} belongs to another broker of {command.broker_name}"
            )
        return GroupChange(group=group, broker_id=command.broker_id)
    record = ReplicaRecord(
        broker_id=command.broker_id,
        register_check_code=command.register_check_code,
        address=command.register_check_code.split(";")[0],
    )
    return _added(group, record, command, clock_ms)


def _refused_id(why: str) -> Refused:
    return Refused(ResponseCode.CONTROLLER_BROKER_ID_INVALID, why)


def _check_fields(command: RegisterBroker | ApplyBrokerId) -> None:
    """Raises Refused for invalid fields and those that would let the state grow without bound."""
    texts = [command.broker_name, command.cluster_name, command.register_check_code]
    wrong = ""
    if isinstance(command, RegisterBroker):
        texts += [command.address, command.ha_address, command.incarnation, command.log_id]
        texts += [command.owner, *command.earlier_lives]
        if max(command.epoch, command.accepted_epoch) > EPOCH_MAX:
            wrong = f"epoch {max(command.epoch, command.accepted_epoch)} is no epoch"
    if not command.broker_name:
        wrong = "the broker name is missing"
    if max(map(len, texts)) > TEXT_SIZE_MAX:
        wrong = f"a name, address or code has more than {TEXT_SIZE_MAX} characters"
    if command.broker_id > BROKER_ID_MAX:
        wrong = f"id {command.broker_id} is no broker id"
    if wrong:
        raise Refused(ResponseCode.CONTROLLER_INVALID_REQUEST, wrong)


def _added(
    group: BrokerGroup | None,
    record: ReplicaRecord,
    command: RegisterBroker | ApplyBrokerId,
    clock_ms: int,
) -> GroupChange:
    """Adds a replica with a new id; the next id offered is above it (quirk a)."""
    if group is None:
        group = BrokerGroup(cluster_name=command.cluster_name, broker_name=command.broker_name)
    group = msgspec.structs.replace(
        group.with_replica(record),
        # Never below: an id that was given and cleaned must not come back for another log.
        next_broker_id=max(group.next_broker_id, record.broker_id + 1),
        joined_ms=clock_ms,
    )
    return GroupChange(
        group=group, broker_id=record.broker_id, events=(_registered_event(group, record),)
    )


def _registered_event(group: BrokerGroup, record: ReplicaRecord, why: str = "") -> HistoryEvent:
    """`why`: why this registration makes the log suspect (R17)."""
    suspicion = why or record.suspicion
    reason = f"suspect: {suspicion}" if suspicion else ("learner" if record.learner else "")
    return event_of(
        EventKind.BROKER_REGISTERED,
        group,
        broker_id=record.broker_id,
        incarnation=record.incarnation,
        address=record.address,
        max_offset=record.max_offset,
        confirm_offset=record.confirm_offset,
        reason=reason,
    )


def register(group: BrokerGroup | None, command: RegisterBroker, clock_ms: int) -> GroupChange:
    _check_fields(command)
    if group is not None:
        check_cluster(group, command.cluster_name)
    native = bool(command.incarnation)
    broker_id = command.broker_id
    if broker_id < 1:
        if not native or not command.register_check_code:
            raise Refused(
                ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED,
                "an id is given only to a broker that tells its incarnation and a check code",
            )
        broker_id = _id_for_check_code(group, command.register_check_code)
    record = group.replica(broker_id) if group else None
    # Java brokers apply for their id first. One that did not may have another cluster's file.
    if record is None and not native:
        raise Refused(
            ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED,
            f"broker {command.broker_name}:{broker_id} has not applied for its id",
        )
    if record is None:
        return _added(group, _updated(ReplicaRecord(broker_id), command), command, clock_ms)
    assert group is not None
    if command.register_check_code and record.register_check_code != command.register_check_code:
        raise _refused_id(f"id {broker_id} belongs to another broker of {group.broker_name}")
    # R52: a delayed request of a process that ended must not replace the one that runs.
    if command.incarnation in record.earlier_lives:
        raise _refused_id(
            f"{command.incarnation} is an earlier life of broker {broker_id} of "
            f"{group.broker_name}, which runs as {record.incarnation} by now"
        )
    living = living_replicas(group, command.live)
    # R18: two processes on copies of one folder would both ack as this replica.
    if record.incarnation and record.incarnation != command.incarnation and broker_id in living:
        raise _refused_id(
            f"another process with id {broker_id} of {group.broker_name} lives "
            f"(incarnation {record.incarnation})"
        )
    return _register_again(group, record, command, living)


def _id_for_check_code(group: BrokerGroup | None, check_code: str) -> int:
    if group is None:
        return 1
    for record in group.replicas:
        # The first answer was lost: a second id for one folder would leave a dead replica behind.
        if record.register_check_code == check_code:
            return record.broker_id
    return group.next_broker_id


def _updated(record: ReplicaRecord, command: RegisterBroker) -> ReplicaRecord:
    return msgspec.structs.replace(
        record,
        register_check_code=command.register_check_code or record.register_check_code,
        # An empty field is one that this kind of broker does not send; it takes nothing away.
        address=command.address or record.address,
        ha_address=command.ha_address,
        incarnation=command.incarnation,
        log_id=command.log_id,
        learner=command.learner,
        epoch=command.epoch,
        max_offset=command.max_offset,
        confirm_offset=command.confirm_offset,
        election_priority=command.election_priority,
        # Cut, not refused: a long reason must not keep a replica out.
        suspicion=command.suspect[:TEXT_SIZE_MAX],
        accepted_epoch=command.accepted_epoch,
        earlier_lives=tuple(x for x in command.earlier_lives if x != command.incarnation),
        owner=command.owner or record.owner,
        is_stranger=command.is_stranger,
    )


def _found_suspicion(
    group: BrokerGroup, record: ReplicaRecord, renewed: ReplicaRecord, command: RegisterBroker
) -> str:
    """Why the log may lack bytes that were acked, whatever the replica reports; empty if nothing
    points to that (R17)."""
    # An empty log gets a new id: the old one was wiped.
    if record.log_id and renewed.log_id and record.log_id != renewed.log_id:
        return "its log was replaced"
    # What follows is no evidence against a running process: it may have sent this request, and
    # the offset in it, before it acked more.
    if renewed.incarnation == record.incarnation:
        return ""
    # Each process notes itself in its folder: one that lacks the last process is an old backup.
    earlier = command.earlier_lives
    if earlier and record.incarnation and record.incarnation not in earlier:
        return f"its folder does not know its last life {record.incarnation}: it was put back"
    floor = max(command.confirm_floor, group.confirm_floor)
    # It acked what it does not have any more.
    if 0 <= renewed.max_offset < floor:
        return f"its log ends at {renewed.max_offset}, confirmed was {floor}"
    return ""


def _marked(
    record: ReplicaRecord, renewed: ReplicaRecord, reported: str, found: str
) -> ReplicaRecord:
    """`renewed` with the mark `suspect` that a member has after this registration."""
    same_process = renewed.incarnation == record.incarnation
    # Only the process that reported its log may take that back: another one has not checked it.
    withdrawn = same_process and bool(record.suspicion) and not renewed.suspicion
    by_evidence = bool(found) or (record.suspect and not record.suspect_told)
    by_report = bool(reported) or (record.suspect_told and not withdrawn)
    return msgspec.structs.replace(
        renewed, suspect=by_evidence or by_report, suspect_told=by_report and not by_evidence
    )


def _register_again(
    group: BrokerGroup,
    record: ReplicaRecord,
    command: RegisterBroker,
    living: dict[int, LiveBroker],
) -> GroupChange:
    """A known replica registers again, maybe as another process, or with another address or log."""
    renewed = _updated(record, command)
    broker_id = record.broker_id
    member = broker_id in group.sync_state_set
    others = [other for other in group.sync_state_set if other != broker_id]
    # Its log may be the only complete one; as a learner it could never be elected.
    if member and renewed.learner and not others:
        raise _refused_id(
            f"broker {broker_id} is the only in-sync replica of {group.broker_name}: "
            "it cannot become a learner"
        )
    found = _found_suspicion(group, record, renewed, command)
    # The same report again, as at each registration of this process, is no new reason.
    known = renewed.incarnation == record.incarnation and renewed.suspicion == record.suspicion
    reported = "" if known else renewed.suspicion
    why = "; ".join(reason for reason in (found, reported) if reason)
    if member:
        renewed = _marked(record, renewed, reported, found)
    healthy_left = any(is_healthy(group, other) and other in living for other in others)
    after = group.with_replica(renewed)
    # R3: a set change that its earlier process proposed may still be committed: it needs an epoch
    # of its own.
    if broker_id == group.master_broker_id and renewed.incarnation != group.master_incarnation:
        after = msgspec.structs.replace(after, needs_election=REASON_MASTER_RESTARTED)
    events: list[HistoryEvent] = []
    # R17: without a healthy member the suspect may be the best copy that is left: it stays.
    if member and (renewed.learner or (renewed.suspect and healthy_left)):
        left = "became a learner" if renewed.learner else f"suspect: {why or 'as before'}"
        after = without_members(after, {broker_id})
        events.append(altered_event(group, after, broker_id, f"broker {broker_id}: {left}"))
    if why or (renewed.endpoint, renewed.suspicion) != (record.endpoint, record.suspicion):
        events.insert(0, _registered_event(after, renewed, why))
    return GroupChange(group=after, broker_id=broker_id, events=tuple(events))
