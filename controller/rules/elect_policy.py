"""Which replica becomes master, by the group's record and its live replicas. Pure.

Origin: RocketMQ's `DefaultElectPolicy` and `ReplicasInfoManager#electMaster`, with their faults
corrected: offsets and priorities of any size compare as numbers; a tie goes to the smallest id;
learners are never elected; an empty log does not win over one with data (R19).
"""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from batonmq.controller.rules.commands import NO_BROKER, LiveBroker
from batonmq.controller.rules.groups import BrokerGroup, living_replicas

FIRST_ELECTION_SETTLE_MS: Final = 1_000
"""How long the first election of a group waits for further replicas if one replica has data.
Another one with data may come, and between the two only an operator can decide (R19)."""


class Choice(msgspec.Struct, frozen=True):
    """The outcome: `winner` is NO_BROKER if there is none, and `refusal` then says why.

    `keeps_master`: the recorded master is alive, so there is nothing to elect. `blocked`: an
    operator has to name the master (R19). `unclean`: the winner may lack acknowledged messages, so
    its epoch is marked (R7).
    """

    winner: int = NO_BROKER
    keeps_master: bool = False
    blocked: bool = False
    unclean: bool = False
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

    `asker` is the requesting broker or, with `designate`, the only one that may win.
    `confirm_floor` is the highest confirmOffset reported (R16). `now_ms` is on the clock of
    `group.joined_ms`; None skips the wait for further replicas at a first election.
    """
    living = living_replicas(group, live)
    if group.master_epoch == 0:
        return _first_master(group, living, asker, designate, unclean, now_ms)
    stale = why_stale(group, living)
    # A living master stays, unless an operator names a replica: an election by mistake must not
    # move it. The master itself may be named while the record is stale: it then gets an epoch above
    # all that replicas know.
    is_named = designate and (bool(stale) or asker != group.master_broker_id)
    if group.master_broker_id in living and not is_named:
        seen = living[group.master_broker_id]
        if seen.incarnation == group.master_incarnation:
            return Choice(winner=group.master_broker_id, keeps_master=True)
    # R19: without a name the old record might elect a replica that lacks acknowledged bytes.
    if not designate and stale:
        return Choice(blocked=True, refusal=stale)
    # R16: the log of the winner must reach the highest confirmOffset that was ever reported.
    floor = max(confirm_floor, group.confirm_floor)
    pool = _clean_pool(group, living, floor)
    # Before `unclean`: who wins by the clean rules begins no unclean epoch, whatever was asked.
    if designate and asker in pool:
        return Choice(winner=asker)
    if unclean:
        return _unclean_master(group, living, asker, designate)
    if designate:
        return Choice(refusal=_why_not(group, living, asker, floor))
    if pool:
        return Choice(winner=_best(pool.values()))
    return _suspect_master(group, living, floor)


def why_stale(group: BrokerGroup, living: Mapping[int, LiveBroker]) -> str:
    """Why the record is stale: a replica knows newer epochs (R19). Empty if none does."""
    foreign = group.newer_reported(living)
    if foreign is None:
        return ""
    master_epoch, set_epoch, broker_id = foreign
    reported = f"masterEpoch {master_epoch}"
    recorded = f"{group.master_epoch}"
    # In the same epoch it is the set that is newer: the controllers lost a set change.
    if master_epoch == group.master_epoch:
        reported += f" with syncStateSetEpoch {set_epoch}"
        recorded += f" with {group.sync_state_set_epoch}"
    return (
        f"broker {broker_id} knows of {reported}, recorded is {recorded}: "
        "the controllers forgot; name the master to elect"
    )


def _first_master(
    group: BrokerGroup,
    living: Mapping[int, LiveBroker],
    asker: int,
    designate: bool,
    unclean: bool,
    now_ms: int | None,
) -> Choice:
    """No master was ever elected: there is no set to choose from."""
    # A learner's log counts for nothing here: no set ever waited for its acks.
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
        # R19: the empty log would be copied over the one with data.
        if with_data and asker not in with_data and not unclean:
            return Choice(refusal=f"broker {asker} has an empty log, {_names(with_data)} has data")
        if not unclean and (behind := behind_reported(group, living, asker)):
            return Choice(refusal=behind)
        return Choice(winner=asker, unclean=unclean and bool(with_data - {asker}))
    if not with_data:
        if asker != NO_BROKER:
            return Choice(winner=asker)
        if not candidates:
            return Choice(refusal="no replica lives")
        return Choice(winner=_best(candidates.values()))
    # No controller knows which of them has what was acknowledged, and lengths do not prove it.
    if len(with_data) > 1:
        return Choice(
            blocked=True,
            refusal=f"{_names(with_data)} have data, but no election is recorded: the controllers "
            "forgot; name the master to elect",
        )
    if stale := why_stale(group, living):
        # There were masters, so others may have more than this one replica, and register later.
        return Choice(blocked=True, refusal=stale)
    # The one replica with data may be on its way; an empty one must not win meanwhile (R19).
    if missing := with_data - candidates.keys():
        return Choice(refusal=f"the first election waits for {_names(missing)}, which has data")
    if now_ms is not None and now_ms - group.joined_ms < FIRST_ELECTION_SETTLE_MS:
        return Choice(refusal="the first election waits for further replicas, since one has data")
    return Choice(winner=min(with_data))


def behind_reported(group: BrokerGroup, living: Mapping[int, LiveBroker], asker: int) -> str:
    """Why only an unclean election takes `asker`, which is registered, if the controllers forgot
    elections (R49): another replica reports a confirmOffset that `asker` lacks. Empty if none does.
    """
    newest = {
        record.broker_id: living.get(record.broker_id, record)
        for record in group.replicas
        if not record.learner
    }
    top = max(newest, key=lambda one: (newest[one].epoch, newest[one].confirm_offset))
    # Its own end against the other's confirmed end: bytes above that were never acknowledged.
    own, best = newest[asker], newest[top]
    if (own.epoch, own.max_offset) >= (best.epoch, best.confirm_offset):
        return ""
    return (
        f"broker {asker} ends at {own.max_offset} in epoch {own.epoch}, broker {top} reports "
        f"{best.confirm_offset} confirmed in epoch {best.epoch}: only an unclean election takes it"
    )


def _unclean_master(
    group: BrokerGroup, living: Mapping[int, LiveBroker], asker: int, designate: bool
) -> Choice:
    record = group.replica(asker)
    # G5: the controllers never choose by themselves whose data is lost.
    if not designate or record is None:
        return Choice(refusal="an unclean election needs the replica named")
    if asker not in living or record.learner:
        return Choice(refusal=f"broker {asker} does not live, or is a learner")
    return Choice(winner=asker, unclean=True)


def _clean_pool(
    group: BrokerGroup, living: Mapping[int, LiveBroker], confirm_floor: int
) -> dict[int, LiveBroker]:
    """The members that a clean election may choose: alive, at or above the floor, not suspect."""
    suspects = {record.broker_id for record in group.replicas if record.suspect}
    return {
        broker_id: seen
        for broker_id, seen in _reaching(group, living, confirm_floor).items()
        if broker_id not in suspects
    }


def _suspect_master(
    group: BrokerGroup, living: Mapping[int, LiveBroker], confirm_floor: int
) -> Choice:
    """Without a healthy member a suspect may win, once every member can be compared (R17)."""
    # The member that is still away may be the one that has every acknowledged byte.
    complete = all(broker_id in living for broker_id in group.sync_state_set)
    suspects = _reaching(group, living, confirm_floor) if complete else {}
    if not suspects:
        return Choice(refusal=_why_none(group, living, confirm_floor))
    winner = living[_best(suspects.values())]
    # R16, R17: a replica outside the set may hold what this suspect acknowledged and lost. Only
    # an operator may cut that.
    if more := _more_elsewhere(group, living, winner):
        return Choice(blocked=True, refusal=more)
    return Choice(winner=winner.broker_id, unclean=True)


def _more_elsewhere(
    group: BrokerGroup, living: Mapping[int, LiveBroker], winner: LiveBroker
) -> str:
    """The refusal that names who reports more data than the suspect `winner`; empty if no replica
    does."""
    names = f"broker {winner.broker_id}, the best of the SyncStateSet {list(group.sync_state_set)},"
    ends = f"may lack confirmed messages and ends at {winner.max_offset} in epoch {winner.epoch}"
    for record in group.replicas:
        if record.learner or record.broker_id == winner.broker_id:
            continue
        newest = living.get(record.broker_id, record)
        outside = record.broker_id not in group.sync_state_set
        if outside and (newest.epoch, newest.max_offset) > (winner.epoch, winner.max_offset):
            more = f"outside of it has more: {newest.max_offset} in epoch {newest.epoch}"
        # What was confirmed before the last unclean epoch was cut then: it does not count.
        elif newest.confirm_offset > winner.max_offset and newest.epoch >= group.unclean_epoch:
            more = f"knows what was confirmed up to {newest.confirm_offset}"
        else:
            continue
        return f"{names} {ends}; broker {record.broker_id} {more}: name the master to elect"
    return ""


def _reaching(
    group: BrokerGroup, living: Mapping[int, LiveBroker], confirm_floor: int
) -> dict[int, LiveBroker]:
    """The living members whose log reaches `confirm_floor`, or whose log end is not known."""
    return {
        broker_id: living[broker_id]
        for broker_id in group.sync_state_set
        # An unknown end (-1) counts: a member has what was confirmed (R1).
        if broker_id in living and not 0 <= living[broker_id].max_offset < confirm_floor
    }


def _why_not(group: BrokerGroup, living: Mapping[int, LiveBroker], asker: int, floor: int) -> str:
    if asker not in living:
        return f"broker {asker} does not live"
    if asker in group.sync_state_set and (
        short := _why_short(group, {asker: living[asker]}, floor)
    ):
        return short
    return (
        f"broker {asker} is no living, complete member of the SyncStateSet "
        f"{list(group.sync_state_set)}: only an unclean election takes it"
    )


def _why_none(group: BrokerGroup, living: Mapping[int, LiveBroker], floor: int) -> str:
    members = [broker_id for broker_id in group.sync_state_set if broker_id in living]
    if not members:
        return f"no member of the SyncStateSet {list(group.sync_state_set)} lives"
    if short := _why_short(group, {broker_id: living[broker_id] for broker_id in members}, floor):
        return short
    lacking = f"{_names(set(members))} may lack confirmed messages"
    if absent := set(group.sync_state_set) - set(members):
        return f"{lacking}, {_names(absent)} does not live"
    return f"{lacking}: only an unclean election goes on from here"


def _why_short(group: BrokerGroup, members: Mapping[int, LiveBroker], floor: int) -> str:
    """The refusal, with numbers (R59), if all `members` end below what counts as confirmed; empty
    if one reaches it."""
    if any(not 0 <= seen.max_offset < floor for seen in members.values()):
        return ""
    ends = ", ".join(
        f"broker {each} ends at {members[each].max_offset}" for each in sorted(members)
    )
    return (
        f"{ends}, below {floor}, which was reported as confirmed: only an unclean election of a "
        "replica that you name lowers that, and what is missing is lost (mqctl electMaster "
        f"-bn {group.broker_name} -b ID --unclean)"
    )


def _best(pool: Collection[LiveBroker]) -> int:
    """Highest epoch, then highest maxOffset, then smallest priority, then smallest id."""
    best = max(
        pool,
        # Epoch before length: a longer log of an older epoch may hold bytes that were cut
        # elsewhere.
        key=lambda seen: (seen.epoch, seen.max_offset, -seen.election_priority, -seen.broker_id),
    )
    return best.broker_id


def _names(broker_ids: Collection[int]) -> str:
    return "broker " + ", ".join(str(broker_id) for broker_id in sorted(broker_ids))
