"""Elections: what the leader may propose, and what every node does with it. Pure.

`may_propose` and `own_election` run on the leader before a command enters the log. They use what
only this node knows, measured on its own clock (R8): how long a group has waited for its first
election (R19), whether all replicas had the time to report their logs before a suspect wins (R17),
and what was last seen of the members that an unclean election passes over (R44). `apply_election`
runs on every node and uses nothing but the command and the state.

An unclean election waits until the old master's lease is over (R7). That is enough if one member of
the recorded set hears of the election: from then on it sends no ack to the old master (R2), and
each write of the old master needs the acks of all members. It is not enough if every member is out
of sight: they may continue together without controllers (R36). Then the refusal shows what was last
seen of each of them, and the operator has to accept that their later acks are cut
(`cut_later_acks`, R44).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace

from batonmq.controller.rules.commands import ANY_EPOCH, NO_BROKER, ElectMaster, LiveBroker
from batonmq.controller.rules.elect_policy import Choice, behind_reported, choose_master, why_stale
from batonmq.controller.rules.groups import (
    EPOCH_MAX,
    BrokerGroup,
    GroupChange,
    Refused,
    ReplicaRecord,
    check_cluster,
    deposed,
    event_of,
    is_healthy,
    living_replicas,
    without_stale_marks,
)
from batonmq.history.event import REASON_SIZE_MAX, EventKind
from batonmq.protocol.codes import ResponseCode

STILL_ANSWERS: Final = "the master still answers: an unclean election waits until its lease is over"

SUSPECT_WAITS: Final = (
    "only a replica that may lack confirmed messages could be elected, and this controller leads"
    " only since a moment ago: another replica may report a longer log"
)


@dataclass(frozen=True, slots=True)
class LastHeard:
    """The newest heartbeat of a process on this node, and how many ms ago it came; None and -1 if
    none came. `goodbye`: the process announced its end."""

    seen: LiveBroker | None = None
    silent_ms: int = -1
    goodbye: bool = False


@dataclass(frozen=True, slots=True)
class LastSeen:
    """What a node last saw of one member of the SyncStateSet.

    `silent_ms` is the time since its newest heartbeat. It is -1 if this node never had one, and the
    offsets are then those of its registration, -1 where unknown. `ended` says why the member surely
    sends no more acks to the old master; empty if that is not sure: a closed connection proves
    nothing (R6).
    """

    broker_id: int
    address: str
    silent_ms: int = -1
    max_offset: int = -1
    confirm_offset: int = -1
    ended: str = ""

    @property
    def when(self) -> str:
        """When it was last heard and where its log ended, as text for operators."""
        heard = f"last heard {self.silent_ms} ms ago" if self.silent_ms >= 0 else "not heard here"
        return f"{heard}, log end {self.max_offset}, confirmed {self.confirm_offset}"


def last_seen(
    group: BrokerGroup, record: ReplicaRecord, heard: LastHeard, *, lives: bool
) -> LastSeen:
    """What is known of the member in `record`. `heard` is about the registered process."""
    is_master = record.broker_id == group.master_broker_id
    accepted = heard.seen.master_epoch if heard.seen is not None else -1
    ended = ""
    if is_master and record.incarnation != group.master_incarnation:
        ended = "it was started again"  # R3: fenced until it is elected
    elif heard.goodbye:
        ended = "it was stopped"
    elif group.master_broker_id == NO_BROKER and accepted >= group.master_epoch > 0:
        ended = f"it accepted masterEpoch {accepted}"
    elif lives and not is_master:
        ended = "it lives, and hears of the election"
    # A session without a heartbeat says nothing of the log yet; the registration did.
    facts = record if heard.seen is None or heard.seen.max_offset < 0 else heard.seen
    return LastSeen(
        record.broker_id,
        record.address,
        heard.silent_ms,
        facts.max_offset,
        facts.confirm_offset,
        ended,
    )


def members_of(group: BrokerGroup) -> tuple[int, ...]:
    """The SyncStateSet; while no election is recorded, the replicas at the highest epoch that any
    of them reported (R49)."""
    if group.master_epoch > 0:
        return group.sync_state_set
    # The controllers forgot. The master of that epoch, if it still acknowledges, is among these.
    epoch, _ = group.highest_reported_epoch({})
    if epoch <= 0:
        return ()
    return tuple(
        each.broker_id
        for each in group.replicas
        if not each.learner and epoch in (each.epoch, each.accepted_epoch)
    )


@dataclass(frozen=True, slots=True)
class ElectionFacts:
    """What the leader itself saw of a group. Times are milliseconds on its own clock.

    `joined_for_ms`: since the newest replica appeared. `suspect_wait_ms`, `unclean_wait_ms`: how
    long an election of a suspect (R17), or an unclean one (R7), must still wait; 0 if it need not.
    `members`: those of `members_of`. `confirmed`: the highest confirmOffset reported, -1 if none.
    """

    joined_for_ms: int
    suspect_wait_ms: int
    unclean_wait_ms: int
    members: tuple[LastSeen, ...]
    confirmed: int


@dataclass(frozen=True, slots=True)
class OwnElection:
    """What the leader does about a group in need: propose an election, or report `refusal`.

    With `needs_operator` only an operator can decide (R19)."""

    propose: bool
    refusal: str
    needs_operator: bool = False


def may_propose(group: BrokerGroup, command: ElectMaster, seen: ElectionFacts) -> ElectMaster | str:
    """The command as it may be proposed now, or why it may not. `command.live` must be filled."""
    # Without members there is no old master whose lease has to end.
    if not command.unclean or not members_of(group):
        if seen.suspect_wait_ms > 0 and _choice(group, replace(command, unclean=False)).unclean:
            return SUSPECT_WAITS
        if not command.unclean and (why := unreported(command) or lacks_reported(group, command)):
            return why
        return _when_first(group, command, seen.joined_for_ms)
    if seen.unclean_wait_ms > 0:
        return STILL_ANSWERS
    passed = passes_over(group, command, seen.members)
    if not passed:
        return command
    if not command.cut_later_acks:
        return _why_not_cut(group, command, passed, max(seen.confirmed, group.confirm_floor))
    return replace(command, reason=_cut_reason(command, passed))


def own_election(
    group: BrokerGroup,
    live: Collection[LiveBroker],
    *,
    confirm_floor: int,
    suspect_wait_ms: int,
    heard_elsewhere: bool,
    master_died: bool,
) -> OwnElection | None:
    """The leader's own election of a group that needs one; None: wait and ask again.

    `heard_elsewhere`: another controller hears replicas that this one does not.
    """
    choice = choose_master(group, live, confirm_floor=confirm_floor)
    if choice.blocked:
        return OwnElection(False, choice.refusal, needs_operator=True)
    # R17: a healthy member may report in this time, and then it wins.
    if choice.unclean and suspect_wait_ms > 0:
        return None
    if choice.winner == NO_BROKER:
        if heard_elsewhere:
            return None  # R50: a peer may have a candidate
        if not master_died:
            # Without a candidate a command is useful only to depose a dead master.
            return OwnElection(False, choice.refusal) if group.master_epoch > 0 else None
    return OwnElection(True, choice.refusal)


def with_new_epochs(group: BrokerGroup, command: ElectMaster, step: int) -> ElectMaster:
    """`command`, which now makes a masterEpoch `step` above all reported ones, if the controllers
    know less than replicas do (R47)."""
    living = living_replicas(group, command.live)
    if not command.designate or group.newer_reported(living) is None:
        return command
    # The next number may be in use: a replica that is away may have accepted it. Rules of every
    # version count on from the highest epoch in `live`, so the larger number is put in there.
    highest, _ = group.highest_reported_epoch(living)
    epoch = min(max(highest, group.master_epoch) + step, EPOCH_MAX - 1)  # the rules add one
    if epoch <= highest:
        return command
    live = tuple(
        replace(seen, master_epoch=epoch) if seen.broker_id == command.broker_id else seen
        for seen in command.live
    )
    return replace(command, live=live)


def unreported(command: ElectMaster) -> str:
    """Why an election waits for the first heartbeat of a session, which comes in a moment: it may
    show that the record is stale (R19). Empty if none is missing."""
    names = [
        seen.broker_id
        for seen in command.live
        if seen.incarnation and seen.max_offset < 0 and seen.master_epoch < 0
    ]
    return f"replicas {names} have a session, and have not reported their logs yet" if names else ""


def lacks_reported(group: BrokerGroup, command: ElectMaster) -> str:
    """Why an election that is not unclean must not take the named replica (R49): the record is
    stale, and another replica reports a confirmOffset that the named one lacks."""
    living = living_replicas(group, command.live)
    record = group.replica(command.broker_id)
    # The rules themselves refuse a learner, whatever it has.
    may_win = record is not None and not record.learner
    if not command.designate or not may_win or not why_stale(group, living):
        return ""
    return behind_reported(group, living, command.broker_id)


def passes_over(
    group: BrokerGroup, command: ElectMaster, members: Sequence[LastSeen]
) -> tuple[LastSeen, ...]:
    """The members with which the old master may continue after the election; () if it cannot (R44).

    `command.live` must be filled.
    """
    # One member that ended or hears of the election is enough: each write needs the acks of all
    # (R1). A winner from the set is such a member.
    choice = _choice(group, command)
    if group.master_epoch == 0:  # whether the winner was a member is not known
        members = [member for member in members if member.broker_id != command.broker_id]
    if not choice.unclean or any(member.ended for member in members):
        return ()
    return tuple(members)


def _why_not_cut(
    group: BrokerGroup, command: ElectMaster, passed: Sequence[LastSeen], confirmed: int
) -> str:
    """The refusal: it shows the operator which members the election passes over, and the offsets.

    `confirmed` is the highest confirmOffset that the controllers know of.
    """
    known = "; ".join(f"broker {each.broker_id} at {each.address}: {each.when}" for each in passed)
    end = _log_end(command)
    cut = f"The log of broker {command.broker_id} ends at {end}: "
    lost = max(confirmed, *(each.confirm_offset for each in passed)) - end
    if lost > 0:
        cut += f"{lost} confirmed bytes above that are cut, and "
    return (
        f"the SyncStateSet {[each.broker_id for each in passed]} is out of sight and not known to"
        f" have ended, so its master may still acknowledge ({known}). {cut}whatever it"
        " acknowledges before it hears of the election is cut, too. Stop it first, or accept that: "
        f"mqctl electMaster -bn {group.broker_name} -b {command.broker_id} --unclean "
        "--cut-later-acks"
    )


def _cut_reason(command: ElectMaster, passed: Sequence[LastSeen]) -> str:
    """The reason of the election for the history: who may still acknowledge what is cut. As in
    every reason, the text before the colon says who asked."""
    known = ", ".join(f"broker {each.broker_id} ({each.when})" for each in passed)
    reason = f"{command.reason or 'an operator'}: later acks are cut of {known}"
    return reason[:REASON_SIZE_MAX]


def _when_first(group: BrokerGroup, command: ElectMaster, joined_for_ms: int) -> ElectMaster | str:
    """`command`, or why this first election must wait for further replicas (R19). `joined_for_ms`:
    how long ago, by this node's own clock, the newest replica was registered."""
    if group.master_epoch > 0:
        return command
    # The rules compare the wall clocks of two leaders, and one of them may be wrong. So this node
    # decides whether the group has waited long enough, and gives the command a time by which the
    # rules of every version come to the same result.
    waited_ms = group.joined_ms + joined_for_ms
    waiting, at_once = _choice(group, command, waited_ms), _choice(group, command)
    if at_once.winner and not waiting.winner:
        return waiting.refusal
    return replace(command, now_ms=max(command.now_ms, waited_ms))


def _log_end(command: ElectMaster) -> int:
    return next(
        (seen.max_offset for seen in command.live if seen.broker_id == command.broker_id), -1
    )


# On every node.


def apply_election(group: BrokerGroup | None, command: ElectMaster, clock_ms: int) -> GroupChange:
    if group is None:
        raise Refused(
            ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED,
            f"broker set {command.broker_name} is not known",
        )
    check_cluster(group, command.cluster_name)
    # Decided on an older state: another election was recorded since.
    if command.expected_master_epoch not in (ANY_EPOCH, group.master_epoch):
        raise Refused(
            ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH,
            f"masterEpoch is {group.master_epoch}, not {command.expected_master_epoch}",
        )
    asker = max(command.broker_id, NO_BROKER)  # Java's requests have -1 for none
    if asker != NO_BROKER and group.replica(asker) is None:
        known = ", ".join(str(record.broker_id) for record in group.replicas) or "none"
        raise Refused(
            ResponseCode.CONTROLLER_ELECT_MASTER_FAILED,
            f"broker set {group.broker_name} has no broker {asker}; known are {known}",
        )
    choice = _choice(group, command, clock_ms)
    # A repeated request, or one that crossed the election: it must not end a mastership.
    if choice.keeps_master:
        raise Refused(
            ResponseCode.CONTROLLER_MASTER_STILL_EXIST,
            f"master {choice.winner} of masterEpoch {group.master_epoch} lives",
        )
    if choice.winner == NO_BROKER:
        if choice.blocked:
            raise Refused(ResponseCode.CONTROLLER_ELECT_MASTER_FAILED, choice.refusal)
        return _none_elected(group, command, asker, choice.refusal)
    return _elected(group, command, choice.winner, unclean=choice.unclean)


def _elected(
    group: BrokerGroup, command: ElectMaster, winner: int, *, unclean: bool
) -> GroupChange:
    living = living_replicas(group, command.live)
    # R9: the live old members stay, so that the first acks of the new epoch are no single copy.
    # After an unclean election neither the old set nor the old confirmOffset says anything about
    # the winner's log (R16).
    kept = (
        set()
        if unclean
        else {
            member
            for member in group.sync_state_set
            if member in living and is_healthy(group, member)
        }
    )
    record = group.replica(winner)
    assert record is not None
    master_epoch = group.next_master_epoch(living)
    floor = max(group.confirm_floor, command.confirm_floor)
    after = replace(
        # From here on its log is the group's log: there is nothing left that it could lack.
        group.with_replica(replace(record, suspect=False, suspect_told=False)),
        master_broker_id=winner,
        master_incarnation=record.incarnation,
        master_epoch=master_epoch,
        sync_state_set=tuple(sorted(kept | {winner})),
        sync_state_set_epoch=group.sync_state_set_epoch + 1,
        needs_election="",
        confirm_floor=-1 if unclean else floor,
        unclean_epoch=master_epoch if unclean else group.unclean_epoch,
    )
    after = without_stale_marks(after)
    seen = living.get(winner)
    event = event_of(
        EventKind.ELECTED,
        after,
        broker_id=winner,
        incarnation=record.incarnation,
        address=record.address,
        master_before=group.master_broker_id,
        set_before=group.sync_state_set,
        max_offset=seen.max_offset if seen else record.max_offset,
        confirm_offset=floor,
        unclean=unclean,
        reason=command.reason or _requester(command),
        **_origin(command),
    )
    return GroupChange(group=after, broker_id=winner, events=(event,))


def _none_elected(
    group: BrokerGroup, command: ElectMaster, asker: int, refusal: str
) -> GroupChange:
    """No replica can win. The leader's own election then deposes a dead master, once."""
    # A request of a broker or an operator that finds no winner changes nothing.
    if asker != NO_BROKER:
        raise Refused(ResponseCode.CONTROLLER_ELECT_MASTER_FAILED, refusal)
    if group.master_broker_id == NO_BROKER:
        raise Refused(ResponseCode.CONTROLLER_MASTER_NOT_AVAILABLE, refusal)
    after = deposed(group)
    event = event_of(
        EventKind.ELECTION_FAILED,
        after,
        broker_id=group.master_broker_id,
        master_before=group.master_broker_id,
        set_before=group.sync_state_set,
        confirm_offset=max(group.confirm_floor, command.confirm_floor),
        reason=f"{command.reason or _requester(command)}: {refusal}",
        **_origin(command),
    )
    return GroupChange(
        group=after,
        code=ResponseCode.CONTROLLER_MASTER_NOT_AVAILABLE,
        remark=refusal,
        events=(event,),
    )


def _origin(command: ElectMaster) -> dict[str, Any]:
    """Who saw the need and when, and when the election was proposed."""
    return {
        "node": command.node,
        "detected_ms": command.detected_ms,
        "silent_ms": command.silent_ms,
        "proposed_ms": command.now_ms,
    }


def _requester(command: ElectMaster) -> str:
    if command.broker_id < 1:
        return "asked by the controller"
    return f"{'named' if command.designate else 'asked by'} broker {command.broker_id}"


def _choice(group: BrokerGroup, command: ElectMaster, now_ms: int | None = None) -> Choice:
    """Who wins by `command`. Without `now_ms` a first election waits for no further replicas."""
    asker = max(command.broker_id, NO_BROKER)
    return choose_master(
        group,
        command.live,
        asker=asker,
        designate=command.designate and asker != NO_BROKER,
        unclean=command.unclean,
        confirm_floor=command.confirm_floor,
        now_ms=now_ms,
    )
