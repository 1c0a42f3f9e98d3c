"""What the leader makes sure of before it proposes an election: whom it would leave behind. Pure.

The rules in `rules.elect_policy` choose by what a command carries. Here is what they cannot know,
since it is measured on this node's own clock (R8): how long a group has waited for its first
election (R19), whether all had the time to report their logs before a suspect wins (R17), and what
was last seen of the members of a set that an unclean election passes over (R44).

An unclean election waits until the old master's lease is over (R7). That proves something of a
master that needs other replicas: some member of the recorded set hears of the election, and
acknowledges nothing to the old master from then on (R2). It proves nothing where every member of
the set is out of sight: they may go on together, and a master that is alone in its set needs nobody
(R36). Then the operator is told what is known of them, and has to accept by name that what they go
on to acknowledge is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from batonmq.controller.rules.commands import NO_BROKER, ElectMaster, LiveBroker
from batonmq.controller.rules.elect_policy import behind_reported, choose_master, why_stale
from batonmq.controller.rules.groups import (
    EPOCH_MAX,
    BrokerGroup,
    ReplicaRecord,
    living_replicas,
)
from batonmq.history.event import REASON_SIZE_MAX

STILL_ANSWERS: Final = "the master still answers: an unclean election waits until its lease is over"

SUSPECT_WAITS: Final = (
    "only a replica that may lack confirmed messages could be elected, and this controller leads"
    " only since a moment ago: another replica may report a longer log"
)


@dataclass(frozen=True, slots=True)
class LastHeard:
    """The newest heartbeat of a process on this node, and how many ms ago it came: None and -1 if
    none did. `goodbye`: the process announced its end."""

    seen: LiveBroker | None = None
    silent_ms: int = -1
    goodbye: bool = False


@dataclass(frozen=True, slots=True)
class LastSeen:
    """What a node last saw of one member of the SyncStateSet.

    `silent_ms` is the time since its newest heartbeat, -1 if this node never had one; then the
    offsets are those of its registration, -1 where unknown. `ended` says how it is known that the
    member acknowledges nothing to the old master any more, empty if that is not known: a closed
    connection proves nothing (R6).
    """

    broker_id: int
    address: str
    silent_ms: int = -1
    max_offset: int = -1
    confirm_offset: int = -1
    ended: str = ""

    @property
    def when(self) -> str:
        """When and at which log end it was last heard, for people."""
        heard = f"last heard {self.silent_ms} ms ago" if self.silent_ms >= 0 else "not heard here"
        return f"{heard}, log end {self.max_offset}, confirmed {self.confirm_offset}"


def last_seen(
    group: BrokerGroup, record: ReplicaRecord, heard: LastHeard, *, lives: bool
) -> LastSeen:
    """What is known of the member of `record`; `heard` is of the process that registered."""
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
    """The SyncStateSet. While no election is recorded, the replicas at the highest epoch that any
    reported: its master may be among them (R49)."""
    if group.master_epoch > 0:
        return group.sync_state_set
    epoch, _ = group.highest_reported_epoch({})
    if epoch <= 0:
        return ()
    return tuple(
        each.broker_id
        for each in group.replicas
        if not each.learner and epoch in (each.epoch, each.accepted_epoch)
    )


def with_new_epochs(group: BrokerGroup, command: ElectMaster, step: int) -> ElectMaster:
    """`command`, so that the new masterEpoch lies `step` above all reported, where controllers know
    less than replicas do (R47).

    The next epoch number may be given already: a replica that is away may know it. The rules begin
    above what living replicas accepted, on nodes of every version, so the step is carried there.
    """
    living = living_replicas(group, command.live)
    if not command.designate or group.foreign_key(living) is None:
        return command
    highest, _ = group.highest_reported_epoch(living)
    epoch = min(max(highest, group.master_epoch) + step, EPOCH_MAX - 1)
    if highest <= 0 or epoch <= highest:
        return command
    live = tuple(
        replace(seen, master_epoch=epoch) if seen.broker_id == command.broker_id else seen
        for seen in command.live
    )
    return replace(command, live=live)


def unreported(command: ElectMaster) -> str:
    """Why an election waits: a living process has only opened its session, and its first heartbeat
    may show that this record is older than what it knows (R19). It is a moment away."""
    names = [
        seen.broker_id
        for seen in command.live
        if seen.incarnation and seen.max_offset < 0 and seen.master_epoch < 0
    ]
    return f"replicas {names} have a session, and have not reported their logs yet" if names else ""


def lacks_reported(group: BrokerGroup, command: ElectMaster) -> str:
    """Why a plain election does not take the named replica, though the record allows it: the record
    is older than what replicas report, and they report as confirmed what it lacks (R49)."""
    living = living_replicas(group, command.live)
    is_known = any(each.broker_id == command.broker_id for each in group.replicas)
    if not command.designate or not is_known or not why_stale(group, living):
        return ""
    return behind_reported(group, living, command.broker_id)


def passes_over(
    group: BrokerGroup, command: ElectMaster, members: Sequence[LastSeen]
) -> tuple[LastSeen, ...]:
    """The members with which the old master may go on after this election; () if it cannot (R44).

    `command` has its liveness. One member that ended or is fenced is enough, since every ack needs
    all of them (R1). A winner from the set is one: it lives, and ends its slave side first.
    """
    choice = choose_master(
        group,
        command.live,
        asker=command.broker_id,
        designate=command.designate,
        unclean=command.unclean,
        confirm_floor=command.confirm_floor,
    )
    if group.master_epoch == 0:  # whether the winner was a member is not known
        members = [member for member in members if member.broker_id != command.broker_id]
    if not choice.unclean or any(member.ended for member in members):
        return ()
    return tuple(members)


def why_not_cut(
    group: BrokerGroup, command: ElectMaster, passed: Sequence[LastSeen], confirmed: int
) -> str:
    """The refusal that tells the operator, with numbers, whom the election passes over.

    `confirmed` is the highest confirmOffset that the controllers heard of.
    """
    known = "; ".join(f"broker {each.broker_id} at {each.address}: {each.when}" for each in passed)
    end = _log_end(command)
    cut = f"The log of broker {command.broker_id} ends at {end}: "
    lost = max(confirmed, *(each.confirm_offset for each in passed)) - end
    if lost > 0:
        cut += f"{lost} confirmed bytes above that are cut, and "
    return (
        f"the SyncStateSet {[each.broker_id for each in passed]} is out of sight and not known to"
        f" have ended, so its master may go on acknowledging ({known}). {cut}whatever it"
        " acknowledges before it hears of the election is cut, too. Stop it first, or accept that: "
        f"mqctl electMaster -bn {group.broker_name} -b {command.broker_id} --unclean "
        "--cut-later-acks"
    )


def cut_reason(command: ElectMaster, passed: Sequence[LastSeen]) -> str:
    """The reason of the election for the history: who may go on to acknowledge what is cut. What
    stands before the colon says who asked, as in every reason."""
    known = ", ".join(f"broker {each.broker_id} ({each.when})" for each in passed)
    reason = f"{command.reason or 'an operator'}: later acks are cut of {known}"
    return reason[:REASON_SIZE_MAX]


def elects_suspect(group: BrokerGroup, command: ElectMaster) -> bool:
    """Whether a suspect would win though no operator named it (R17). `command` has its liveness."""
    choice = choose_master(
        group,
        command.live,
        asker=max(command.broker_id, NO_BROKER),
        designate=command.designate,
        confirm_floor=command.confirm_floor,
    )
    return choice.unclean


def when_first(group: BrokerGroup, command: ElectMaster, joined_for_ms: int) -> ElectMaster | str:
    """`command`, or why this first election must wait for further replicas (R19).

    The rules compare two wall clocks to tell how long the group has waited. One of them may have
    been ahead when the newest replica was registered, `joined_for_ms` ago by this node's own clock,
    or may be ahead now. So the wait is decided here, and the command gets a time by which the rules
    come to the same result, on nodes of every version.
    """
    if group.master_epoch > 0:
        return command
    waited_ms = group.joined_ms + joined_for_ms
    waiting, at_once = (
        choose_master(
            group,
            command.live,
            asker=max(command.broker_id, NO_BROKER),
            designate=command.designate,
            unclean=command.unclean,
            now_ms=now_ms,
        )
        for now_ms in (waited_ms, None)
    )
    if at_once.winner and not waiting.winner:
        return waiting.refusal
    return replace(command, now_ms=max(command.now_ms, waited_ms))


def _log_end(command: ElectMaster) -> int:
    return next(
        (seen.max_offset for seen in command.live if seen.broker_id == command.broker_id), -1
    )
