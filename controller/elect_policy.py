"""Who becomes master: a pure function of a group's record and of who lives.

Origin: RocketMQ's `DefaultElectPolicy` and `ReplicasInfoManager#electMaster`, with their quirks
mended: offsets and priorities are compared as numbers of any size; a tie goes to the smallest id on
every node; learners are never elected; the first master is one that is registered, and an empty log
does not win over one with data (R19). Liveness is the stamped one, so none can vanish midway.

The same function answers the leader's liveness core, which thereby proposes only what can succeed.
"""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from controller.commands import NO_BROKER, LiveBroker
from controller.groups import BrokerGroup, living_replicas

__all__ = ["FIRST_ELECTION_SETTLE_MS", "Choice", "choose_master"]

FIRST_ELECTION_SETTLE_MS: Final = 1_000
"""How long a group whose replicas hold data, but which no election is known of, waits for further
replicas to come before the longest log is chosen: the controllers were wiped, and the first to
register need not be the one that lacks nothing."""


class Choice(msgspec.Struct, frozen=True):
    """The outcome: `winner` is NO_BROKER if there is none, and `refusal` then says why.

    `keeps_master` means that the recorded master stands: nothing is to be elected. `blocked` means
    that nothing may be decided here before an operator names the master (R19).
    """

    winner: int = NO_BROKER
    keeps_master: bool = False
    blocked: bool = False
    refusal: str = ""


def choose_master(
    group: BrokerGroup,
    live: Collection[LiveBroker],
    *,
    asker: int = NO_BROKER,
    designate: bool = False,
    unclean: bool = False,
    confirm_floor: int = -1,
    now_ms: int | None = None,
) -> Choice:
    """Chooses the next master of `group`.

    `asker` is the broker that asks, or, with `designate`, the only one that will do.
    `confirm_floor` is the highest confirmOffset heard (R16). `now_ms` is on the clock of
    `group.joined_ms`; None leaves out the waiting for further replicas at a first election.
    """
    living = living_replicas(group, live)
    if group.master_epoch == 0:
        return _first_master(group, living, asker, designate, unclean, now_ms)
    if group.master_broker_id in living and not (
        designate and asker not in (NO_BROKER, group.master_broker_id)
    ):
        seen = living[group.master_broker_id]
        if seen.incarnation == group.master_incarnation:
            return Choice(winner=group.master_broker_id, keeps_master=True)
    if not designate:
        told_epoch, told_by = group.highest_reported_epoch(living)
        if told_epoch > group.master_epoch:
            return Choice(
                blocked=True,
                refusal=f"broker {told_by} knows of masterEpoch {told_epoch}, recorded is "
                f"{group.master_epoch}: the controllers forgot; name the master to elect",
            )
    if unclean:
        return _unclean_master(group, living, asker, designate)
    pool = _clean_pool(group, living, max(confirm_floor, group.confirm_floor))
    if designate:
        if asker in pool or _is_living_suspect(group, living, asker):
            return Choice(winner=asker)
        return Choice(refusal=f"broker {asker} is no living, complete member of the SyncStateSet")
    if not pool:
        return Choice(refusal=_why_nobody(group, living))
    return Choice(winner=_best(pool.values()))


def _first_master(
    group: BrokerGroup,
    living: Mapping[int, LiveBroker],
    asker: int,
    designate: bool,
    unclean: bool,
    now_ms: int | None,
) -> Choice:
    """Nobody was ever elected: there is no set to choose from."""
    records = {record.broker_id: record for record in group.replicas if not record.learner}
    if asker != NO_BROKER and asker not in records:
        return Choice(refusal=f"broker {asker} is not registered, or is a learner")
    with_data = {
        broker_id
        for broker_id, record in records.items()
        if (living[broker_id].max_offset if broker_id in living else record.max_offset) > 0
    }
    candidates = {broker_id: seen for broker_id, seen in living.items() if broker_id in records}
    if designate:
        if asker not in candidates:
            return Choice(refusal=f"broker {asker} does not live")
        if with_data and asker not in with_data and not unclean:
            return Choice(refusal=f"broker {asker} has an empty log, {_names(with_data)} has data")
        return Choice(winner=asker)
    if not with_data:
        if asker != NO_BROKER:
            return Choice(winner=asker)
        if not candidates:
            return Choice(refusal="no replica lives")
        return Choice(winner=_best(candidates.values()))
    if missing := with_data - candidates.keys():
        return Choice(refusal=f"the first election waits for {_names(missing)}, which has data")
    if now_ms is not None and now_ms - group.joined_ms < FIRST_ELECTION_SETTLE_MS:
        return Choice(refusal="the first election waits for further replicas, since one has data")
    return Choice(winner=_best([candidates[broker_id] for broker_id in with_data]))


def _unclean_master(
    group: BrokerGroup, living: Mapping[int, LiveBroker], asker: int, designate: bool
) -> Choice:
    record = group.replica(asker)
    if not designate or record is None:
        return Choice(refusal="an unclean election needs the replica named")
    if asker not in living or record.learner:
        return Choice(refusal=f"broker {asker} does not live, or is a learner")
    return Choice(winner=asker)


def _clean_pool(
    group: BrokerGroup, living: Mapping[int, LiveBroker], confirm_floor: int
) -> dict[int, LiveBroker]:
    """The members that may win: alive, not behind what was confirmed, and trusted to hold it.

    If no healthy member lives, suspects may win once every member is there to be compared (R17).
    """
    members = {
        broker_id: living[broker_id] for broker_id in group.sync_state_set if broker_id in living
    }
    suspects = {record.broker_id for record in group.replicas if record.suspect}
    pool = {
        broker_id: seen
        for broker_id, seen in members.items()
        if broker_id not in suspects and not 0 <= seen.max_offset < confirm_floor
    }
    if not pool and len(members) == len(group.sync_state_set) and suspects:
        return members
    return pool


def _is_living_suspect(
    group: BrokerGroup, living: Mapping[int, LiveBroker], broker_id: int
) -> bool:
    record = group.replica(broker_id)
    return record is not None and record.suspect and broker_id in living


def _why_nobody(group: BrokerGroup, living: Mapping[int, LiveBroker]) -> str:
    members = [broker_id for broker_id in group.sync_state_set if broker_id in living]
    if not members:
        return f"no member of the SyncStateSet {list(group.sync_state_set)} lives"
    return f"{_names(set(members))} may lack confirmed messages"


def _best(pool: Collection[LiveBroker]) -> int:
    """Highest epoch, then highest maxOffset, then smallest priority, then smallest id."""
    best = max(
        pool,
        key=lambda seen: (seen.epoch, seen.max_offset, -seen.election_priority, -seen.broker_id),
    )
    return best.broker_id


def _names(broker_ids: Collection[int]) -> str:
    return "broker " + ", ".join(str(broker_id) for broker_id in sorted(broker_ids))
