"""What the rules of a broker group share: the `Change` that each of them gives, and small steps.

Origin: RocketMQ's `ControllerResult` and the event applications of its ReplicasInfoManager.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from controller.commands import NO_BROKER
from controller.groups import BrokerGroup
from controller.history import REASON_SIZE_MAX, EventKind, HistoryEvent
from protocol.codes import ResponseCode

__all__ = [
    "Change",
    "absolved",
    "altered_event",
    "deposed",
    "event_of",
    "is_healthy",
    "refused",
    "without_members",
]


@dataclass(frozen=True, slots=True)
class Change:
    """What a command came to. `group` is the group after it, None if there is none.

    `events` still lack log, index, part, and where 0 the time: the state stamps them.
    """

    group: BrokerGroup | None
    code: ResponseCode = ResponseCode.SUCCESS
    remark: str = ""
    broker_id: int = NO_BROKER
    events: tuple[HistoryEvent, ...] = ()


def refused(group: BrokerGroup | None, code: ResponseCode, remark: str) -> Change:
    return Change(group=group, code=code, remark=remark)


def event_of(kind: EventKind, group: BrokerGroup, **fields: Any) -> HistoryEvent:
    """An event about `group` as it stands after what happened."""
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
    """The set shrinks by the state's own decision; a master among those leaving is deposed."""
    kept = tuple(member for member in group.sync_state_set if member not in leaving)
    assert kept, "the set would be empty"
    group = msgspec.structs.replace(
        group, sync_state_set=kept, sync_state_set_epoch=group.sync_state_set_epoch + 1
    )
    group = absolved(group)
    if group.master_broker_id in leaving:
        group = deposed(group)
    return group


def absolved(group: BrokerGroup) -> BrokerGroup:
    """Who is out of the set is no suspect: it is added again only by what it acks from now on."""
    replicas = tuple(
        msgspec.structs.replace(record, suspect=False, suspect_told=False)
        if record.suspect and record.broker_id not in group.sync_state_set
        else record
        for record in group.replicas
    )
    return msgspec.structs.replace(group, replicas=replicas)


def deposed(group: BrokerGroup) -> BrokerGroup:
    """No master, in a new epoch; the set stands so that a returning member can win."""
    return msgspec.structs.replace(
        group,
        master_broker_id=NO_BROKER,
        master_incarnation="",
        master_epoch=group.master_epoch + 1,
        needs_election="",
    )
